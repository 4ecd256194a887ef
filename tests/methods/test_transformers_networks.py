"""Tests of methods that drop or merge tokens on whole networks from `transformers`."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import timm
import torch
import transformers
from torch import Tensor, nn

from efficient_ft.core.errors import UserError
from efficient_ft.cost import executed
from efficient_ft.methods import (
    LBPDCT,
    ALaST,
    BackRazor,
    Checkpointing,
    Compact,
    EViT,
    LowBit,
    Mesa,
    Method,
    PatchDropout,
    ToMe,
)  # fmt: skip
from efficient_ft.methods.tokens.block_forms import form_of
from efficient_ft.models.view import view
from efficient_ft.testing import lively
from tests.cli.program import REPOSITORY

SIZES: dict[str, Any] = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 48, "num_hidden_layers": 4,
                         "image_size": 32, "patch_size": 4, "num_labels": 5}  # fmt: skip
_VISION = {name: value for name, value in SIZES.items() if name != "num_labels"}


def _create(network: str, config: str, **settings: Any) -> nn.Module:
    about = getattr(transformers, config)(**settings)
    return getattr(transformers, network)(about)


#: Functions that create a network for images of 32×32 pixels (an 8×8 grid), and their numbers of prefix tokens.
NETWORKS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "ViT": (partial(_create, "ViTForImageClassification", "ViTConfig", **SIZES), 1),
    "DeiT": (partial(_create, "DeiTForImageClassification", "DeiTConfig", **SIZES), 2),
    "DINOv2": (
        partial(
            _create, "Dinov2WithRegistersForImageClassification", "Dinov2WithRegistersConfig", **SIZES,
            num_register_tokens=2,
        ),
        3,
    ),
    "CLIP": (partial(_create, "CLIPForImageClassification", "CLIPConfig", vision_config=_VISION, num_labels=5), 1),
    "DINOv3": (partial(_create, "DINOv3ViTModel", "DINOv3ViTConfig", **_VISION, num_register_tokens=2), 3),
}  # fmt: skip


def network(name: str) -> nn.Module:
    torch.manual_seed(0)
    return lively(NETWORKS[name][0]()).double()


def output(model: nn.Module, size: tuple[int, int] = (32, 32)) -> Tensor:
    """Return the logits, or the output of a network without a classifier for the class token."""
    images = torch.randn(2, 3, *size, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    found = model(images)
    result: Tensor = found.logits if hasattr(found, "logits") else found.pooler_output
    return result


@pytest.mark.parametrize("name", NETWORKS)
def test_the_view_finds_the_tokens(name: str) -> None:
    looked = view(network(name))
    assert (looked.prefix_tokens, looked.block_grid, looked.has_class_token) == (NETWORKS[name][1], (8, 8), True)
    assert looked.image_size == (32, 32)


@pytest.mark.slow
@pytest.mark.parametrize("method", [BackRazor, Checkpointing, Compact, LBPDCT, LowBit, Mesa, ToMe])
def test_a_network_of_transformers_saves_as_many_bytes_as_the_network_of_timm(method: Callable[[], Method]) -> None:
    sizes = {**SIZES, "hidden_size": 192, "num_attention_heads": 3, "intermediate_size": 768, "image_size": 224}
    vit = {"embed_dim": 192, "num_heads": 3, "depth": 4, "num_classes": 5}
    with torch.device("meta"):
        own = _create("ViTForImageClassification", "ViTConfig", **{**sizes, "patch_size": 16})
        usual = timm.create_model("vit_tiny_patch16_224", **vit)
    found, expected = (executed(model, 8, (224, 224), methods=[method()]) for model in (own, usual))
    assert found.saved_bytes == pytest.approx(expected.saved_bytes, rel=0.02)


@pytest.mark.parametrize("name", NETWORKS)
def test_sorting_all_tokens_changes_no_output(name: str) -> None:
    plain = network(name).eval()  # in training, the rotary embeddings of DINOv3 are random
    own = copy.deepcopy(plain)
    EViT([0, 2], keep_rate=1.0).apply(own)
    torch.testing.assert_close(output(own), output(plain), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize(
    "method",
    [partial(ToMe, 4), partial(EViT, [1]), partial(PatchDropout, 0.5), partial(ALaST, 2, budget_init=0.6)],
    ids=["tome", "evit", "patch_dropout", "alast"],
)
def test_a_network_trains_and_recomputes(name: str, method: Callable[[], Method]) -> None:
    found = []
    for recomputes in (False, True):
        model, own = network(name), method()
        own.apply(model)
        if recomputes:
            Checkpointing().apply(model)
        own.step_begin(0)
        torch.manual_seed(5)
        result = output(model)
        result.square().sum().backward()
        found.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    assert found[0].keys() == found[1].keys()
    for parameter, grad in found[0].items():
        torch.testing.assert_close(found[1][parameter], grad, rtol=1e-10, atol=1e-12, msg=parameter)


@pytest.mark.slow
def test_no_fake_tensor_stays_in_a_cache_of_transformers() -> None:
    """The forward pass on fake tensors comes first, as in every program."""
    program = (
        "import torch, transformers\n"
        "from torch._subclasses.fake_tensor import FakeTensor\n"
        "from efficient_ft.methods import EViT\n"
        "about = transformers.DINOv3ViTConfig(hidden_size=32, num_attention_heads=2, intermediate_size=48,\n"
        "                                     num_hidden_layers=2, image_size=32, patch_size=4)\n"
        "model = transformers.DINOv3ViTModel(about)\n"
        "EViT([0]).apply(model)\n"
        "assert not isinstance(model(torch.randn(1, 3, 32, 32)).last_hidden_state, FakeTensor)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def test_keywords_that_transformers_passes_through_are_accepted() -> None:
    model = network("ViT")
    EViT([1]).apply(model)
    images = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    result = model(images, labels=torch.tensor([0, 1]), num_items_in_batch=2, output_hidden_states=True)
    result.loss.backward()
    assert result.hidden_states[-1].shape[1] < 65


def test_gradient_checkpointing_of_transformers_is_rejected() -> None:
    for methods in ([EViT([1])], [ToMe(4)], [PatchDropout(0.5), LBPDCT(2)]):
        model = network("ViT")
        for method in methods:
            method.apply(model)
        model.gradient_checkpointing_enable()  # type: ignore[operator]
        with pytest.raises(UserError, match=r"gradient_checkpointing_disable\(\), and use the method checkpointing"):
            output(model.train())
        output(model.eval())


@pytest.mark.slow
def test_a_compiled_network_keeps_the_embeddings_of_its_tokens() -> None:
    model = network("DINOv3").eval()
    EViT([1], keep_rate=0.5).apply(model)
    with torch.no_grad():
        expected = output(model)
        torch.testing.assert_close(output(torch.compile(model, backend="eager")), expected, rtol=1e-9, atol=1e-9)


def test_some_patch_tokens_remain_if_a_network_averages_them() -> None:
    model, method = network("CLIP"), ALaST(2, budget_min=0.01, budget_init=0.9)
    method.apply(model)
    for budget in method._budgets.values():
        budget.value = 0.01
    method.step_begin(0)
    assert output(model).isfinite().all()


def test_a_subclass_with_the_forward_pass_of_its_base_class_is_recognized() -> None:
    layer = transformers.models.vit.modeling_vit.ViTLayer

    class Same(layer):  # type: ignore[misc,valid-type]
        pass

    class Custom(layer):  # type: ignore[misc,valid-type]
        def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            return 2 * super().forward(x, *args, **kwargs)

    assert form_of(Same) is form_of(layer)
    assert form_of(Custom) is None


def test_attention_that_cannot_be_observed_is_rejected_when_the_method_is_applied() -> None:
    class Average(nn.Module):
        def forward(self, x: Tensor, attention_mask: None = None) -> tuple[Tensor, None]:
            return x.mean(1, keepdim=True).expand_as(x), None

    for method in (EViT([1]), ALaST(1)):
        model: Any = network("ViT")
        for layer in (module for module in model.modules() if form_of(type(module)) is not None):
            layer.attention = Average()
        with pytest.raises(UserError, match="the attention of ViTLayer was not found"):
            method.apply(model)


def test_the_embeddings_of_a_tower_are_not_a_new_head() -> None:
    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.backbone, self.fc = NETWORKS["DINOv3"][0](), nn.Linear(32, 5)

        def forward(self, images: Tensor) -> Tensor:
            return self.fc(self.backbone(images).pooler_output)

    looked = view(Classifier())
    assert looked.head == ("fc",)
    assert not looked.outside
