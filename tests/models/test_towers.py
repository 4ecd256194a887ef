"""Tests of networks from open_clip, vit-pytorch and segmentation-models-pytorch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import segmentation_models_pytorch as smp
import timm
import torch
import torchvision
import transformers
from open_clip.model import CLIP, CLIPTextCfg, CLIPVisionCfg
from open_clip.modified_resnet import ModifiedResNet
from open_clip.transformer import VisionTransformer
from torch import Tensor, nn
from vit_pytorch import SimpleViT, ViT

from efficient_ft.core.errors import UserError
from efficient_ft.integrations.session import MethodSession
from efficient_ft.methods import (
    LBPDCT,
    LBPWHT,
    LISA,
    BackRazor,
    BitFit,
    Checkpointing,
    Compact,
    EViT,
    HeadOnly,
    LastStage,
    LoRA,
    Method,
    PatchDropout,
    ToMe,
)
from efficient_ft.models.view import view
from efficient_ft.testing import lively


def _tower(**settings: Any) -> VisionTransformer:
    sizes: dict[str, Any] = {"image_size": 32, "patch_size": 8, "width": 32, "layers": 4, "heads": 2}
    return VisionTransformer(**sizes, mlp_ratio=2.0, output_dim=16, **settings)


def _resnet() -> ModifiedResNet:
    return ModifiedResNet([1, 1, 1, 1], output_dim=16, heads=2, image_size=64, width=8)


class Classifier(nn.Module):
    """A tower with a head for classification, as in a typical training script."""

    def __init__(self, tower: nn.Module) -> None:
        super().__init__()
        self.visual, self.fc = tower, nn.Linear(16, 5)

    def forward(self, images: Tensor) -> Tensor:
        return self.fc(self.visual(images))


_OF_VIT: dict[str, Any] = {"image_size": 32, "patch_size": 8, "num_classes": 5, "dim": 32, "depth": 4, "heads": 2,
                           "mlp_dim": 48}  # fmt: skip

#: Functions that create a network, and the image size.
NETWORKS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "open_clip ViT": (_tower, 32),
    "open_clip ViT, LayerScale and attention pooling": (
        partial(_tower, ls_init_value=0.1, attentional_pool=True, attn_pooler_queries=4, attn_pooler_heads=2),
        32,
    ),
    "open_clip ViT, sequence": (lambda: nn.Sequential(_tower(), nn.Linear(16, 5)), 32),
    "open_clip ResNet": (lambda: Classifier(_resnet()), 64),
    "vit-pytorch ViT": (lambda: ViT(**_OF_VIT), 32),
    "vit-pytorch SimpleViT": (lambda: SimpleViT(**_OF_VIT), 32),
    "torchvision ViT": (lambda: torchvision.models.VisionTransformer(32, 8, 4, 2, 32, 48, num_classes=5), 32),
    "smp Unet": (lambda: smp.Unet("resnet18", encoder_weights=None, classes=3), 64),
    "smp Segformer": (lambda: smp.Segformer("mit_b0", encoder_weights=None, classes=3), 64),
    "smp FPN": (lambda: smp.FPN("resnet18", encoder_weights=None, classes=3), 64),
    "smp DeepLabV3+": (lambda: smp.DeepLabV3Plus("resnet18", encoder_weights=None, classes=3), 64),
    "smp UPerNet": (lambda: smp.UPerNet("mit_b0", encoder_weights=None, classes=3), 64),
}

#: Methods whose gradients are exact with these settings.
EXACT: list[Callable[[], Method]] = [
    Checkpointing,
    Compact,
    partial(BackRazor, sparsity=0.0, value_dtype="same"),
    partial(LBPWHT, order=15),
]


#: Reasons why networks do not support a low-rank backward pass.
_NOT_LOW_RANK = {
    "vit-pytorch ViT": "tokens without positions on a grid, because no layer outputs a feature map",
    "vit-pytorch SimpleViT": "tokens without positions on a grid, because no layer outputs a feature map",
    "smp Unet": "a convolution that is not 1×1",
}


def network(name: str) -> nn.Module:
    torch.manual_seed(0)
    model = lively(NETWORKS[name][0]()).double().train()
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.eval()
    return model


def gradients(model: nn.Module, size: int) -> dict[str, Tensor]:
    images = torch.randn(2, 3, size, size, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    torch.manual_seed(2)  # for dropout
    model(images).square().mean().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.slow
@pytest.mark.parametrize("make", EXACT, ids=lambda make: make().name)
@pytest.mark.parametrize("name", NETWORKS)
def test_exact_methods_change_no_gradient(name: str, make: Callable[[], Method]) -> None:
    plain, size = network(name), NETWORKS[name][1]
    own, method = copy.deepcopy(plain), make()
    if isinstance(method, LBPWHT) and name in _NOT_LOW_RANK:
        with pytest.raises(UserError, match=_NOT_LOW_RANK[name]):
            method.apply(own, image_size=size)
        return
    report = method.apply(own, image_size=size)
    assert report.touched or report.none_needed
    expected, found = gradients(plain, size), gradients(own, size)
    assert found.keys() == expected.keys()
    for parameter, grad in found.items():
        torch.testing.assert_close(grad, expected[parameter], rtol=1e-10, atol=1e-12, msg=parameter)


# ------------------------------------------------------------------------------------------------ open_clip
def test_the_tower_of_open_clip_declares_its_size_and_tokens() -> None:
    for model in (_tower(), Classifier(_tower()), nn.Sequential(_tower(), nn.Linear(16, 5))):
        looked = view(model)
        assert (looked.image_size, looked.prefix_tokens, looked.block_grid) == ((32, 32), 1, (4, 4))
        assert [len(stage) for stage in looked.stages] == [1, 1, 1, 1]
    assert len(LBPDCT(2).apply(_tower()).touched) == 8


def test_a_tower_without_a_classifier_is_fine_tuned_and_reported() -> None:
    report = str(BitFit().apply(_tower()))
    assert "biases train" in report
    assert "no classifier was found" in report
    assert str(LastStage().apply(_tower())).startswith("last_stage: transformer.resblocks.3 and ln_post train")
    with pytest.raises(UserError, match="has no classifier that can be trained"):
        HeadOnly().apply(_tower())
    assert view(_resnet()).head == ()
    assert view(Classifier(_resnet())).head == ("fc",)


@pytest.mark.slow
def test_patches_are_dropped_in_the_tower_but_no_method_reads_its_attention() -> None:
    plain = network("open_clip ViT")
    model = copy.deepcopy(plain)
    PatchDropout(1.0).apply(model)
    expected = gradients(plain, 32)
    for parameter, grad in gradients(model, 32).items():
        torch.testing.assert_close(grad, expected[parameter], rtol=1e-10, atol=1e-12, msg=parameter)
    for method in (EViT([1]), ToMe(2)):
        with pytest.raises(UserError, match="MultiheadAttention does not expose its queries and keys"):
            method.apply(_tower())
    with pytest.raises(UserError, match=r"\(attention modules do not call .* their layers\)\. Use targets='all'"):
        LoRA().apply(_tower())
    assert LoRA(targets="all").apply(_tower()).touched


def _clip() -> CLIP:
    vision = CLIPVisionCfg(layers=2, width=64, head_width=32, patch_size=8, image_size=32)
    return CLIP(16, vision, CLIPTextCfg(context_length=8, vocab_size=50, width=32, heads=2, layers=2))


def _clip_of_transformers() -> nn.Module:
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 48, "num_hidden_layers": 2}
    vision = {**sizes, "image_size": 32, "patch_size": 8}
    return transformers.CLIPModel(transformers.CLIPConfig(vision_config=vision, text_config=sizes))


@pytest.mark.parametrize(("create", "tower"), [(_clip, "visual"), (_clip_of_transformers, "vision_model")])
def test_a_network_for_images_and_texts_is_rejected_with_its_tower(create: Callable[[], Any], tower: str) -> None:
    model = create()
    for method in (LastStage(), Checkpointing(), LBPDCT(2), LoRA(), LISA(1)):
        with pytest.raises(UserError, match=rf"takes other inputs .* image tower, model\.{tower}\. In a callback"):
            method.apply(model)
    before = {name for name, p in model.named_parameters() if p.requires_grad}
    with MethodSession(model.get_submodule(tower), LastStage()) as session:
        assert session.reports
    frozen = before - {name for name, p in model.named_parameters() if p.requires_grad}
    assert frozen
    assert all(name.startswith(f"{tower}.") for name in frozen)


class Queries(nn.Module):
    """A tower with learned queries."""

    def __init__(self) -> None:
        super().__init__()
        self.image_encoder = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1, num_classes=0)
        self.queries, self.head = nn.Embedding(3, 192), nn.Linear(192, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.image_encoder(x) + self.queries.weight.mean(0))


class Prompts(Queries):
    def forward(self, x: Tensor, points: Tensor | None = None, scale: bool = False) -> Tensor:
        x = self.image_encoder(x)
        return self.head(x + self.queries.weight.mean(0) if scale or points is None else x + self.queries(points))


class Texts(Queries):
    def forward(self, x: Tensor, texts: Tensor | None = None) -> Tensor:
        x = self.image_encoder(x)
        return self.head(x if texts is None else x + self.queries(texts))


class Required(Queries):
    def forward(self, x: Tensor, texts: Tensor) -> Tensor:
        return self.head(self.image_encoder(x) + self.queries(texts))


def test_a_network_with_learned_queries_takes_images_only() -> None:
    for network, size in ((Queries, 32), (Prompts, 32), (Queries, None)):
        assert LastStage().apply(network(), image_size=size).touched
    assert LBPDCT(2).apply(Queries(), image_size=32).touched
    for other in (Texts, Required):
        with pytest.raises(UserError, match=rf"{other.__name__} takes other inputs .* model\.image_encoder\."):
            LastStage().apply(other(), image_size=32)


def test_the_message_about_a_failed_pass_names_the_tower_and_the_size() -> None:
    def sized(network: nn.Module) -> nn.Module:
        network.image_encoder = nn.Sequential(nn.Conv2d(3, 3, 16, 16), nn.Flatten(), nn.Linear(12, 192))
        return network

    with pytest.raises(UserError, match=r"cannot be run on images of 224×224(.|\n)* tower, model\.image_encoder\."):
        LBPDCT(2).apply(sized(Queries()))
    with pytest.raises(UserError, match=r"takes other inputs .* If it takes only images, .* image_size=112\."):
        BitFit().apply(sized(Prompts()))
    assert BitFit().apply(sized(Prompts()), image_size=32).touched


# ------------------------------------------------------------------------------------------------ vit-pytorch
@pytest.mark.parametrize(("kind", "head"), [(ViT, "mlp_head"), (SimpleViT, "linear_head")])
def test_a_list_of_attention_and_feed_forward_network_is_a_block(kind: Callable[..., nn.Module], head: str) -> None:
    model = kind(**_OF_VIT)
    looked = view(model, (32, 32))
    assert looked.blocks == tuple(f"transformer.layers.{i}" for i in range(4))
    assert looked.head == (head,)
    lisa = LISA(1)
    lisa.apply(model)
    lisa.step_begin(0)
    trained = {name.split(".")[2] for name, p in model.named_parameters() if ".layers." in name and p.requires_grad}
    assert len(trained) == 1


def test_both_halves_of_a_list_are_recomputed() -> None:
    model: Any = ViT(**_OF_VIT).train()
    report = Checkpointing().apply(model)
    assert report.touched == tuple(f"transformer.layers.{i}" for i in range(4))
    calls = []
    model.transformer.layers[1][0].norm.register_forward_hook(lambda *_: calls.append("attention"))
    model.transformer.layers[1][1].net[0].register_forward_hook(lambda *_: calls.append("network"))
    model(torch.randn(2, 3, 32, 32)).sum().backward()
    assert calls == ["attention", "network", "network", "attention"]
    with pytest.raises(UserError, match="do not share one token grid"):
        ToMe(2).apply(ViT(**_OF_VIT), image_size=32)
