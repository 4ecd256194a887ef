"""Tests of frozen feed-forward networks that run on parts of the batch: equal values, less memory and conditions."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import timm
import torch
from hypothesis import given
from hypothesis import strategies as st
from timm.layers import mlp
from timm.models.efficientformer import ConvMlpWithNorm
from torch import Tensor, nn

from efficient_ft.cost import executed
from efficient_ft.methods import feed_forward
from efficient_ft.methods.feed_forward import run_in_parts, run_whole
from efficient_ft.methods.forwards import forwards_of
from efficient_ft.methods.selection.static import Full, HeadOnly
from efficient_ft.models.frozen_batch_norm import freeze_batch_norm


def _conv_mlp_with_norm() -> nn.Module:
    module = ConvMlpWithNorm(6, 20)
    freeze_batch_norm(module)
    return module


MAKERS: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: mlp.Mlp(6, 20),
    "glu": lambda: mlp.GluMlp(6, 20),
    "swiglu": lambda: mlp.SwiGLU(6, 20),
    "maps": lambda: mlp.Mlp(6, 20, use_conv=True),
    "conv": lambda: mlp.ConvMlp(6, 20),
    "response_norm": lambda: mlp.GlobalResponseNormMlp(6, 20),
    "conv_norm": _conv_mlp_with_norm,
}


def _frozen(module: nn.Module) -> tuple[nn.Module, list[int]]:
    """Return the frozen module in double precision and training mode, and the list of its first layer's batch sizes."""
    module.double().train().requires_grad_(False)
    run_in_parts(module)
    sizes: list[int] = []
    first = next(m for m in module.modules() if isinstance(m, nn.Linear | nn.Conv2d))
    first.forward = lambda x: sizes.append(len(x)) or type(first).forward(first, x)  # type: ignore[assignment, func-returns-value]
    return module, sizes


def _input(module: nn.Module, batch: int) -> Tensor:
    maps = any(isinstance(m, nn.Conv2d) for m in module.modules())
    return torch.randn(batch, 6, 4, 4).double() if maps else torch.randn(batch, 4, 4, 6).double()


@pytest.mark.parametrize("name", MAKERS)
@given(batch=st.integers(1, 9), part=st.integers(1, 5))
def test_parts_give_the_values_of_the_whole(name: str, batch: int, part: int) -> None:
    torch.manual_seed(batch)
    module, sizes = _frozen(MAKERS[name]())
    x = _input(module, batch)
    expected = type(module).forward(module, x)
    sizes.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(feed_forward, "_PART_BYTES", part * 20 * 16 * 8)  # hidden maps of `part` images
        torch.testing.assert_close(module(x), expected, rtol=1e-14, atol=1e-14)
    assert max(sizes) <= part
    assert sum(sizes) == batch


def test_maps_keep_their_memory_format(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_forward, "_PART_BYTES", 1)
    module, sizes = _frozen(mlp.ConvMlp(6, 20))
    x = _input(module, 4).to(memory_format=torch.channels_last)
    assert module.to(memory_format=torch.channels_last)(x).is_contiguous(memory_format=torch.channels_last)
    assert sizes == [1, 1, 1, 1]


def test_hooks_and_traces_have_the_whole_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_forward, "_PART_BYTES", 1)
    module, sizes = _frozen(mlp.Mlp(6, 20))
    x = _input(module, 4)
    traced = torch.jit.trace(module, x)
    assert torch.equal(traced(x[:1]), module(x[:1]))
    sizes.clear()
    hook = module.fc2.register_forward_hook(lambda *_: None)  # type: ignore[union-attr, operator]
    module(x)
    hook.remove()
    module(x)
    assert sizes == [4, 1, 1, 1, 1]


@pytest.mark.parametrize("why", ["gradient passes", "parameter trains", "dropout", "batch norm"])
def test_the_batch_stays_whole(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_forward, "_PART_BYTES", 1)
    dropped = 0.5 if why == "dropout" else 0.0
    norm = nn.BatchNorm2d if why == "batch norm" else None
    module, sizes = _frozen(mlp.ConvMlp(6, 20, drop=dropped, norm_layer=norm))
    x = _input(module, 4)
    if why == "gradient passes":
        x.requires_grad_()
    if why == "parameter trains":
        module.fc2.bias.requires_grad_()  # type: ignore[union-attr]
    module(x)
    assert sizes == [4]
    sizes.clear()
    with torch.no_grad():
        module.eval()(x)
    assert sizes == [1, 1, 1, 1], "an evaluation has parts, also of what trains"


def test_a_selection_puts_them_in_and_takes_them_out() -> None:
    model = timm.create_model("vit_tiny_patch16_224", depth=2, num_classes=3)
    for method in (HeadOnly(), Full()):
        method.apply(model)
        assert all(len(forwards_of(block.mlp)) == 1 for block in model.blocks)
        method.remove(model)
        assert not any("forward" in module.__dict__ for module in model.modules())
    run_whole(model)  # no effect on a plain model


@pytest.mark.slow
def test_training_the_head_takes_less_at_its_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.device("meta"):
        model = timm.create_model("deit_small_patch16_224", num_classes=10)
    parts = executed(model, 16, (224, 224), methods=[HeadOnly()])
    monkeypatch.setattr(feed_forward, "_PART_BYTES", 2**40)
    whole = executed(model, 16, (224, 224), methods=[HeadOnly()])
    assert parts.step_peak_bytes < 0.7 * whole.step_peak_bytes
    assert parts.flops == whole.flops
