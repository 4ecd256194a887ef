"""Tests of exact settings: the gradients equal those of plain training on each family in `backbones.yaml`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import timm
import torch
import torchvision
import transformers
import yaml
from torch import Tensor, nn

from efficient_ft.core.errors import UserError
from efficient_ft.methods import Axis
from efficient_ft.testing import CLASSES, Gradients, Instead, Row, largest_difference, lively
from efficient_ft.testing.steps import gradients_of
from tests.methods.settings import ROWS

_LISTS = Path(__file__).resolve().parents[2] / "scripts" / "backbones.yaml"
BACKBONES = yaml.safe_load(_LISTS.read_text(encoding="utf-8"))["backbones"]
_VIT = {"img_size": 32, "patch_size": 8, "depth": 4, "embed_dim": 48, "num_heads": 3}
_STAGES = {"depths": (1, 1, 1, 1), "dims": (16, 24, 32, 48)}
_VISION = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 48, "num_hidden_layers": 4,
           "image_size": 32, "patch_size": 8}  # fmt: skip
_SWIN = {"embed_dim": 16, "depths": (1, 1), "num_heads": (1, 2)}


def _timm(name: str, **kwargs: Any) -> Callable[[], nn.Module]:
    return partial(timm.create_model, name, num_classes=CLASSES, **kwargs)


def _transformers(name: str, **settings: Any) -> Callable[[], nn.Module]:
    def create() -> nn.Module:
        configuration = getattr(transformers, BACKBONES["transformers"][name])
        network: nn.Module = getattr(transformers, name)(configuration(**settings, num_labels=CLASSES))
        return network

    return create


def _segformer() -> nn.Module:
    about = transformers.SegformerConfig(
        depths=[1, 1, 1, 1], hidden_sizes=[16, 16, 32, 32], num_attention_heads=[1, 1, 2, 2], decoder_hidden_size=16,
        num_labels=CLASSES,
    )  # type: ignore[call-arg]  # fmt: skip
    return transformers.SegformerForSemanticSegmentation(about)


#: Functions that create a small network of each family, and the image size.
FAMILIES: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "vit": (_timm("deit3_small_patch16_224", **_VIT), 32),
    "rotary": (_timm("vit_small_patch16_dinov3", **_VIT, mlp_ratio=4.0), 32),
    "convnext": (_timm("convnext_tiny", **_STAGES), 64),
    "transformers vit": (_transformers("ViTForImageClassification", **_VISION), 32),
    "registers": (_timm("vit_small_patch14_reg4_dinov2", **_VIT), 32),
    "eva02": (_timm("eva02_tiny_patch14_224", **_VIT), 32),
    "siglip": (_timm("vit_base_patch16_siglip_224", **_VIT), 32),
    "clip": (_timm("vit_base_patch16_clip_224", **_VIT), 32),
    "beit": (_timm("beit_base_patch16_224", **_VIT), 32),
    "relative positions": (_timm("vit_relpos_small_patch16_224", **_VIT), 32),
    "swin": (_timm("swin_tiny_patch4_window7_224", img_size=32, window_size=4, **_SWIN), 32),
    "swinv2": (_timm("swinv2_tiny_window8_256", img_size=32, window_size=4, **_SWIN), 32),
    "torchvision swin": (
        partial(
            torchvision.models.SwinTransformer, [4, 4], 16, [1, 1], [1, 2], [4, 4], num_classes=CLASSES,
            stochastic_depth_prob=0.0,
        ),
        32,
    ),
    "torchvision vit": (
        partial(torchvision.models.VisionTransformer, 32, 8, 4, 2, 32, 48, num_classes=CLASSES), 32,
    ),
    "torchvision resnet": (
        partial(torchvision.models.ResNet, torchvision.models.resnet.Bottleneck, [1, 1, 1, 1], num_classes=CLASSES), 64,
    ),
    "resnet": (_timm("resnet50", layers=(1, 1, 1, 1), channels=(16, 16, 32, 32)), 64),
    "convnextv2": (_timm("convnextv2_tiny", **_STAGES), 64),
    "efficientnet": (_timm("efficientnet_b0"), 64),
    "mobilenetv3": (_timm("mobilenetv3_small_050"), 64),
    "regnet": (_timm("regnety_002"), 64),
    "mixer": (partial(timm.models.mlp_mixer.MlpMixer, CLASSES, 32, patch_size=8, num_blocks=2, embed_dim=32), 32),
    "poolformer": (_timm("poolformer_s12"), 64),
    "pvt": (_timm("pvt_v2_b1", depths=(1, 1, 1, 1), embed_dims=(16, 16, 32, 32), num_heads=(1, 1, 2, 2)), 64),
    "efficientformer": (_timm("efficientformer_l1", depths=(1, 1, 1, 2), embed_dims=(16, 16, 32, 64), num_vit=1), 224),
    "transformers dinov2": (_transformers("Dinov2WithRegistersForImageClassification", **_VISION), 32),
    "transformers beit": (_transformers("BeitForImageClassification", **_VISION), 32),
    "transformers swin": (
        _transformers("SwinForImageClassification", image_size=32, patch_size=2, window_size=4, drop_path_rate=0.0,
                      embed_dim=16, depths=[1, 1], num_heads=[1, 2]), 32,
    ),
    "transformers convnext": (
        _transformers("ConvNextForImageClassification", hidden_sizes=[16, 16, 32, 32], depths=[1, 1, 1, 1]), 64,
    ),
    "transformers resnet": (
        _transformers("ResNetForImageClassification", embedding_size=16, hidden_sizes=[16, 16, 32, 32],
                      depths=[1, 1, 1, 1]), 64,
    ),
    "segformer": (_segformer, 64),
}  # fmt: skip
#: Families and methods of the default tests. The other pairs are marked as exhaustive.
OFTEN = ("vit", "rotary", "convnext", "transformers vit")
_METHODS = ("lbp_wht", "back_razor", "compact", "checkpointing", "evit", "blocks")

#: First row of each method that has an exact setting.
EXACT = {
    row.method.name: row
    for row in reversed(ROWS.values())
    if row.off is not None or row.instead == Instead.SAME_GRADIENTS
}


_OFTEN_PAIRS = [
    *((family, method) for family in OFTEN[:2] for method in _METHODS),
    *((family, method) for family in OFTEN[2:] for method in ("lbp_wht", "compact")),
]


def pairs() -> list[Any]:
    return [
        pytest.param(family, method, marks=() if (family, method) in _OFTEN_PAIRS else pytest.mark.exhaustive)
        for family in FAMILIES
        for method in EXACT
    ]


def network_of(family: str) -> nn.Module:
    torch.manual_seed(0)
    return lively(FAMILIES[family][0]()).double()


def step(family: str, model: nn.Module) -> Gradients:
    size = FAMILIES[family][1]
    generator = torch.Generator().manual_seed(1)
    torch.manual_seed(2)  # for dropout and drop path
    found: Any = model.train()(torch.randn(2, 3, size, size, generator=generator, dtype=torch.float64))
    logits: Tensor = found.logits if hasattr(found, "logits") else found
    (logits * torch.randn(logits.shape, generator=generator, dtype=torch.float64)).sum().backward()
    return gradients_of(model)


def exact_settings(row: Row, blocks: int) -> dict[str, Any]:
    """Return the settings at which a method is exact on a network with `blocks` blocks."""
    exact = dict(row.off or {})
    return {**exact, "num_layers": blocks} if "num_layers" in exact else exact


@pytest.mark.parametrize(("family", "method"), pairs())
def test_exact_settings_have_the_gradients_of_plain_training(family: str, method: str) -> None:
    from efficient_ft.models.view import view

    row, model = EXACT[method], network_of(family)
    own = row.create(**exact_settings(row, max(len(view(model).blocks), 1)))
    with ExitStack() as stack:
        for owner, attribute, replacement in row.shortcuts:
            stack.enter_context(mock.patch.object(owner, attribute, replacement))
        torch.manual_seed(1)
        try:
            own.apply(model, image_size=FAMILIES[family][1])
        except UserError as error:
            if not {Axis.TOKENS, Axis.PATCHES} & set(own.axes) or (family, method) in _OFTEN_PAIRS:
                raise  # Only methods that reduce tokens may reject a family.
            pytest.skip(str(error))
        for number in range(own.warmup_steps):
            own.step_begin(number)
            step(family, model)
            own.step_end()
            model.zero_grad()
        own.step_begin(own.warmup_steps)
        found = step(family, model)
    plain = network_of(family)
    for _ in range(own.warmup_steps):  # for the running statistics of BatchNorm
        step(family, plain)
        plain.zero_grad()
    expected = step(family, plain)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert {name for name, g in found.items() if g is not None} <= trained
    expected = {name: g if name in trained else None for name, g in expected.items()}
    # BatchNorm over two images of few positions amplifies rounding errors.
    norms = any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in plain.modules())
    assert largest_difference(expected, found) < (1e-8 if norms else 1e-10)


@pytest.mark.parametrize("family", OFTEN)
def test_almost_all_parameters_have_gradients(family: str) -> None:
    found = step(family, network_of(family))
    assert sum(g is None or not g.any() for g in found.values()) < len(found) / 10
