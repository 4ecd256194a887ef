"""Tests of fused BatchNorm and GELU: equal gradients, less saved memory and the conditions of fusion."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from efficient_ft.cost import executed
from efficient_ft.methods import fused_layers
from efficient_ft.methods.backprop.lbp_dct import LBPDCT
from efficient_ft.methods.backprop.lbp_wht import LBPWHT
from efficient_ft.methods.fused_layers import fuse_layers, separate_layers
from efficient_ft.models.frozen_batch_norm import freeze_batch_norm


@pytest.fixture
def network() -> nn.Module:
    torch.manual_seed(0)
    model = timm.create_model("efficientformer_l1", num_classes=3)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):  # non-trivial statistics, as in a trained network
            nn.init.normal_(module.running_mean, 0, 0.3)
            nn.init.uniform_(module.running_var, 0.5, 2)
            nn.init.normal_(module.bias, 0, 0.3)
    freeze_batch_norm(model)
    return model.to(memory_format=torch.channels_last).train()


@contextmanager
def calls() -> Iterator[list[str]]:
    """Record the names of the fused operations that run."""
    seen: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        for name in ("gelu", "batch_norm_gelu", "low_rank_feed_forward", "pool_mixer", "frozen_input_conv2d"):
            operation = getattr(fused_layers, name)

            def call(*args: Tensor, of: str = name, run: object = operation) -> Tensor:
                seen.append(of)
                return run(*args)  # type: ignore[operator]

            patch.setattr(fused_layers, name, call)
        yield seen


class _Plain(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def _images() -> Tensor:
    return torch.randn(2, 3, 224, 224, generator=torch.Generator().manual_seed(1))


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    model.zero_grad()
    model(_images()).square().sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.slow
@pytest.mark.first(1, "exhaustive")
@pytest.mark.parametrize("trains", ["all", "last stage", "biases"])
def test_gradients_are_those_of_the_plain_model(network: nn.Module, trains: str) -> None:
    for name, p in network.named_parameters():
        p.requires_grad_(
            {"all": True, "last stage": name.startswith("stages.3"), "biases": name.endswith("bias")}[trains]
        )
    plain = _gradients(network)
    assert len(fuse_layers(network)) == 15
    with calls() as seen:
        fused = _gradients(network)
    assert seen.count("batch_norm_gelu") == 14
    assert seen.count("gelu") == 1
    assert fused.keys() == plain.keys()
    for name, g in fused.items():
        assert (g - plain[name]).norm() <= 1e-4 * plain[name].norm() + 1e-6, name


def test_evaluation_is_the_plain_models_bit_for_bit(network: nn.Module) -> None:
    network.eval()
    with torch.no_grad():
        plain = network(_images())
        fuse_layers(network)
        with calls() as seen:
            assert torch.equal(network(_images()), plain)
    assert not seen


@pytest.mark.parametrize(
    ("why", "expected"),
    [
        ("live statistics", {"gelu"}),
        ("a hook of the user's", {"gelu"}),
        ("a layer that is changed", {"gelu"}),
        ("maps in torch's default layout", {"gelu"}),
        ("bfloat16", set()),
        ("a function mode", set()),
        ("double precision", set()),
    ],
)
def test_the_plain_operations_run_where_fusing_is_not_allowed(network: nn.Module, why: str, expected: set[str]) -> None:
    fuse_layers(network)
    images = _images()
    mode: Any = None
    if why == "live statistics":
        fresh = timm.create_model("efficientformer_l1", num_classes=3).to(memory_format=torch.channels_last).train()
        fuse_layers(fresh)
        network = fresh
    elif why == "a hook of the user's":
        for module in network.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.register_forward_hook(lambda *_: None)
    elif why == "a layer that is changed":
        for module in network.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.__dict__["forward"] = lambda x: x
    elif why == "maps in torch's default layout":
        network.to(memory_format=torch.contiguous_format)
    elif why == "bfloat16":
        mode = torch.autocast("cpu", dtype=torch.bfloat16)
    elif why == "a function mode":
        mode = _Plain()
    else:
        network, images = network.double(), images.double()
    with calls() as seen:
        if mode is None:
            network(images)
        else:
            with mode:
                network(images)
    assert set(seen) == expected


def test_it_is_taken_out_again(network: nn.Module) -> None:
    before = {name: set(module.__dict__) for name, module in network.named_modules()}
    fuse_layers(network)
    twin = copy.deepcopy(network)
    separate_layers(network)
    assert {name: set(module.__dict__) for name, module in network.named_modules()} == before
    with calls() as seen:
        twin(_images())
    assert len(seen) == 15, "a copy runs it with its own modules"


@pytest.mark.slow
@pytest.mark.parametrize("method", [LBPWHT, LBPDCT])
def test_low_rank_methods_fuse_unless_told_not_to(network: nn.Module, method: type[LBPWHT] | type[LBPDCT]) -> None:
    plain = copy.deepcopy(network)
    on, off = method(), method(fused=False)
    assert any("15 GELU layers" in note for note in on.apply(network).notes)
    assert on.libraries == ("numba",)
    assert not off.apply(plain).notes
    assert off.libraries == ()
    assert not any("forward" in module.__dict__ for module in plain.modules())
    on.remove(network)
    assert not any("forward" in module.__dict__ for module in network.modules())


@pytest.mark.parametrize(("fused", "expected"), [(None, 0), (True, 4), (False, 0)])
def test_networks_without_batch_norm_are_fused_only_if_asked_for(fused: bool | None, expected: int) -> None:
    model = timm.create_model("vit_tiny_patch16_224", depth=2, num_classes=3)
    method = LBPWHT(fused=fused)
    assert method.libraries == (() if fused is False else ("numba",)), "before the model is known"
    method.apply(model)
    assert sum("forward" in module.__dict__ for module in model.modules()) == expected
    assert method.libraries == (("numba",) if expected else ())


@pytest.mark.slow
def test_fewer_bytes_are_kept_and_no_other_flops_executed() -> None:
    with torch.device("meta"):
        model = timm.create_model("efficientformer_l1", num_classes=3).to(memory_format=torch.channels_last)
    fused, apart = (
        executed(copy.deepcopy(model), 2, (224, 224), methods=[LBPWHT(fused=None if on else False)])
        for on in (True, False)
    )
    assert (fused.forward_flops, fused.backward_flops) == (apart.forward_flops, apart.backward_flops)
    # The fused model saves each hidden map once instead of twice in the 3, 2, 6 and 3 blocks with BatchNorm.
    maps = sum(
        blocks * 4 * width * side**2
        for blocks, width, side in zip((3, 2, 6, 3), (48, 96, 224, 448), (56, 28, 14, 7), strict=True)
    )
    assert 0.8 * 4 * maps < apart.saved_bytes - fused.saved_bytes < 1.2 * 4 * maps


def _train_last_stage(model: nn.Module) -> None:
    for name, p in model.named_parameters():
        p.requires_grad_(name.startswith(("stages.3", "norm", "head")))
    for module in model.modules():
        if hasattr(module, "gamma"):
            nn.init.constant_(module.gamma, 0.5)


@pytest.mark.slow
@pytest.mark.parametrize("bf16", [False, True])
def test_low_rank_blocks_run_as_one_operation_with_equal_gradients(network: nn.Module, bf16: bool) -> None:
    _train_last_stage(network)
    plain = copy.deepcopy(network)
    LBPWHT().apply(network)
    LBPWHT(fused=False).apply(plain)
    exact = _gradients(plain)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16):
        rounded = _gradients(plain)
        with calls() as seen:
            fused = _gradients(network)
    assert seen.count("low_rank_feed_forward") == 4 * bf16
    assert seen.count("pool_mixer") == 3 * bf16
    assert seen.count("frozen_input_conv2d") == int(bf16)
    assert fused.keys() == exact.keys()
    for name, g in exact.items():
        allowed = 1.1 * (rounded[name] - g).norm() + 5e-3 * g.norm() if bf16 else 1e-4 * g.norm()
        assert (fused[name] - g).norm() <= allowed + 1e-6, name


@pytest.mark.parametrize(
    ("why", "expected"),
    [
        ("drop path", {"low_rank_feed_forward": 4, "pool_mixer": 0}),
        ("dropout", {"low_rank_feed_forward": 0, "pool_mixer": 0}),
        ("a hook on a layer", {"low_rank_feed_forward": 0, "pool_mixer": 0}),
        ("a hook on pooling", {"low_rank_feed_forward": 4, "pool_mixer": 0}),
        ("live statistics", {"low_rank_feed_forward": 1, "pool_mixer": 0}),
        ("one exact layer", {"low_rank_feed_forward": 0, "pool_mixer": 0}),
        ("a function mode", {"low_rank_feed_forward": 0, "pool_mixer": 0}),
        ("evaluation", {"low_rank_feed_forward": 0, "pool_mixer": 0}),
    ],
)
def test_separate_operations_run_where_a_block_cannot_be_fused(
    network: nn.Module, why: str, expected: dict[str, int]
) -> None:
    if why in ("live statistics", "drop path"):
        rate = 0.1 if why == "drop path" else 0.0
        network = timm.create_model("efficientformer_l1", num_classes=3, drop_path_rate=rate)
        network.to(memory_format=torch.channels_last).train()
        if why == "drop path":
            freeze_batch_norm(network)
    _train_last_stage(network)
    LBPWHT(skip=["fc1"] if why == "one exact layer" else None).apply(network)
    mode: Any = _Plain() if why == "a function mode" else None
    hooked: dict[str, Any] = {"a hook on a layer": (nn.Conv2d, nn.Linear), "a hook on pooling": nn.AvgPool2d}
    for module in network.stages[3].modules():
        if why == "dropout" and isinstance(module, nn.Dropout):
            module.p = 0.1
        if isinstance(module, hooked.get(why, ())):
            module.register_forward_hook(lambda *_: None)
    if why == "evaluation":
        network.eval()
    with calls() as seen, torch.autocast("cpu", dtype=torch.bfloat16), mode or nullcontext():
        network(_images())
    assert {name: seen.count(name) for name in expected} == expected
