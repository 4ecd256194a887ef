"""Tests of optimizer steps on bfloat16 weights: small updates survive, and steps resume with equal bits."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from efficient_ft.cost.step import optimizer_state_bytes
from efficient_ft.models.weight_dtype import store_weights
from efficient_ft.optim import LowBitAdam, LowBitAdamW, StochasticRounding, step_in_backward
from efficient_ft.training.optimizer import SGD

Make = Callable[[Any], Optimizer]
MAKE: dict[str, Make] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2),
    "sgd": lambda p: SGD(p, lr=1e-1, momentum=0.9, fused=True),
    "sgd without momentum": lambda p: torch.optim.SGD(p, lr=1e-1),
    "adamw, 8 bits": lambda p: LowBitAdamW(p, lr=1e-2, bits=8),
    "adam, 4 bits": lambda p: LowBitAdam(p, lr=1e-2, bits=4),
}


def net(dtype: str = "bf16") -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.LayerNorm(128), nn.Linear(128, 64), nn.Linear(64, 4))
    return store_weights(layers, dtype)  # type: ignore[return-value]


def train(model: nn.Module, optimizer: Optimizer, steps: int, start: int = 0) -> float:
    for step in range(start, start + steps):
        x = torch.randn(16, 64, generator=torch.Generator().manual_seed(step))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = (model(x).float() - x[:, :4].roll(1, 1)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return float(loss.detach())


def same(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


def test_small_updates_accumulate() -> None:
    """1,000 updates of 1e-4 decrease a weight from 1 to 0.9. Rounding to nearest discards every one of them."""
    found = {}
    for name, wrap in {"stochastic": StochasticRounding, "nearest": lambda optimizer: optimizer}.items():
        weight = nn.Parameter(torch.ones(4096, dtype=torch.bfloat16))
        optimizer = wrap(torch.optim.SGD([weight], lr=1e-4))
        for _ in range(1000):
            weight.grad = torch.ones_like(weight)
            optimizer.step()
        found[name] = weight.detach().double()
    assert (found["nearest"] == 1).all()
    # Up to 1,000 roundings to multiples of 2^-8 with probability 1e-4 · 2^8 have a standard deviation below 0.02.
    assert abs(found["stochastic"].mean() - 0.9) < 4 * 0.02 / 4096**0.5
    assert found["stochastic"].std() < 0.02


@pytest.mark.parametrize("name", MAKE)
def test_the_first_step_is_the_step_of_fp32_weights_rounded(name: str) -> None:
    """A step differs from the step in fp32, with the same values and gradients, by less than the bf16 spacing."""
    model, wide = net(), net().float()
    optimizer, reference = StochasticRounding(MAKE[name](model.parameters())), MAKE[name](wide.parameters())
    for p, q in zip(model.parameters(), wide.parameters(), strict=True):
        q.grad = torch.randn(q.shape, generator=torch.Generator().manual_seed(1)).bfloat16().float()
        p.grad = q.grad.to(p.dtype)
    optimizer.step()
    reference.step()
    for p, q in zip(model.parameters(), wide.parameters(), strict=True):
        if p.dtype == torch.float32:
            assert torch.equal(p, q)
        else:
            assert ((p.float() - q).abs() <= q.abs() * 2.0**-7 + 1e-30).all()
            assert {t.dtype for t in optimizer.state[p].values()} == {t.dtype for t in reference.state[q].values()}


@pytest.mark.parametrize("name", MAKE)
@pytest.mark.parametrize("inside", [False, True], ids=["", "in backward"])
def test_it_continues_bit_for_bit(name: str, inside: bool) -> None:
    def build(model: nn.Module) -> Optimizer:
        optimizer: Optimizer = StochasticRounding(MAKE[name](model.parameters()))
        return step_in_backward(optimizer) if inside else optimizer

    straight = net()
    train(straight, build(straight), 6)
    model = net()
    first = build(model)
    train(model, first, 3)
    saved = copy.deepcopy(first.state_dict()), copy.deepcopy(model.state_dict())
    torch.rand(5)  # the global generator has no effect
    continued = net()
    second = build(continued)
    second.load_state_dict(saved[0])
    continued.load_state_dict(saved[1])
    train(continued, second, 3, start=3)
    assert same(continued, straight)


@pytest.mark.parametrize("inside", [False, True], ids=["", "in backward"])
def test_a_copy_continues_bit_for_bit(inside: bool) -> None:
    model = net()
    optimizer: Optimizer = StochasticRounding(MAKE["adamw, 8 bits"](model.parameters()))
    optimizer = step_in_backward(optimizer) if inside else optimizer
    train(model, optimizer, 2)
    other, copied = copy.deepcopy((model, optimizer))
    train(model, optimizer, 2, 2)
    train(other, copied, 2, 2)
    assert same(model, other)


def test_a_state_that_was_saved_without_rounding_can_be_loaded() -> None:
    model = net("fp32")
    plain = MAKE["adamw"](model.parameters())
    train(model, plain, 2)
    rounded = net()
    optimizer = StochasticRounding(MAKE["adamw"](rounded.parameters()))
    optimizer.load_state_dict(plain.state_dict())
    train(rounded, optimizer, 1)


@pytest.mark.parametrize("name", ["adamw", "sgd", "adamw, 8 bits"])
def test_steps_in_the_backward_pass_give_equal_bits(name: str) -> None:
    models = net(), net()
    for model, wrap in zip(models, (lambda optimizer: optimizer, step_in_backward), strict=True):
        train(model, wrap(StochasticRounding(MAKE[name](model.parameters()))), 5)
    assert same(*models)


def test_it_trains_as_far_as_fp32_weights() -> None:
    losses = {}
    for dtype in ("fp32", "bf16"):
        model = net(dtype)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        losses[dtype] = train(model, StochasticRounding(optimizer) if dtype == "bf16" else optimizer, 300)
    assert losses["bf16"] < 1.1 * losses["fp32"]


def test_weights_and_gradients_take_half_of_the_bytes_and_the_state_is_unchanged() -> None:
    sizes = {}
    for dtype in ("fp32", "bf16"):
        model = nn.Linear(256, 256, bias=False)
        store_weights(model, dtype)
        optimizer = StochasticRounding(torch.optim.AdamW(model.parameters(), fused=True))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            model(torch.ones(1, 256)).sum().backward()
        assert model.weight.grad is not None
        optimizer.step()
        sizes[dtype] = model.weight.nbytes, model.weight.grad.nbytes, optimizer_state_bytes(optimizer)
    assert sizes["bf16"][:2] == tuple(size // 2 for size in sizes["fp32"][:2])
    assert sizes["bf16"][2] == sizes["fp32"][2]


def test_gradients_are_clipped_by_their_norm() -> None:
    model = net()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(torch.randn(16, 64)).square().sum().backward()
    norm = torch.stack([p.grad.double().norm() for p in model.parameters() if p.grad is not None]).norm()
    found = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    assert abs(found / norm - 1) < 0.01
    clipped = torch.stack([p.grad.double().norm() for p in model.parameters() if p.grad is not None]).norm()
    assert abs(clipped / 0.1 - 1) < 0.01
