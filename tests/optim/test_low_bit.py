"""Tests of Adam in 8 and 4 bits: the size of steps, the difference from torch's Adam, and exact resumption."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from efficient_ft.core.errors import SettingError, UserError
from efficient_ft.optim import LowBitAdam, LowBitAdamW, state_tensors

OWN = {True: LowBitAdamW, False: LowBitAdam}
TORCH = {True: torch.optim.AdamW, False: torch.optim.Adam}


def net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64))


def train(model: nn.Module, optimizer: Optimizer, steps: int, start: int = 0) -> float:
    for step in range(start, start + steps):
        x = torch.randn(16, 64, generator=torch.Generator().manual_seed(step))
        loss = (model(x) - x.roll(1, 1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return float(loss.detach())


@pytest.mark.parametrize("decoupled", [True, False], ids=["adamw", "adam"])
def test_small_parameters_are_updated_as_torch_does(decoupled: bool) -> None:
    models = [nn.Linear(8, 9), nn.Linear(8, 9)]
    models[1].load_state_dict(models[0].state_dict())
    optimizers = [
        OWN[decoupled](models[0].parameters(), lr=1e-2, weight_decay=0.1),
        TORCH[decoupled](models[1].parameters(), lr=1e-2, weight_decay=0.1),
    ]
    for step in range(5):
        for model, optimizer in zip(models, optimizers, strict=True):
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
            optimizer.zero_grad()
            model(x).square().sum().backward()
            optimizer.step()
    for found, expected in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("bits", [8, 4])
def test_it_trains_as_far_as_32_bits(bits: int) -> None:
    losses = []
    for make in (lambda p: torch.optim.AdamW(p, lr=3e-3), lambda p: LowBitAdamW(p, lr=3e-3, bits=bits)):
        model = net()
        losses.append(train(model, make(model.parameters()), 200))
    assert losses[1] < 1.1 * losses[0]


@pytest.mark.parametrize("bits", [8, 4])
def test_its_state_is_as_small_as_it_says(bits: int) -> None:
    """Each moment uses `bits` bits per parameter. The scales use 80 bits per 128 parameters."""
    weight = nn.Parameter(torch.zeros(512, 1024))
    optimizer = LowBitAdamW([weight], bits=bits)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    held = sum(t.untyped_storage().nbytes() for t in state_tensors(optimizer))
    assert held == weight.numel() * (2 * bits / 8 + 10 / 128) + 4  # 4 bytes hold the step number
    assert bits == 4 or held / weight.numel() / 2 <= 1.04


@pytest.mark.parametrize("bits", [8, 4])
def test_it_continues_bit_for_bit(bits: int) -> None:
    straight = net()
    train(straight, LowBitAdamW(straight.parameters(), bits=bits), 6)
    model = net()
    optimizer = LowBitAdamW(model.parameters(), bits=bits)
    train(model, optimizer, 3)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    again = net(1)
    other = LowBitAdamW(again.parameters(), bits=bits, lr=0.5)
    again.load_state_dict(saved[0])
    other.load_state_dict(saved[1])
    assert {t.dtype for state in other.state.values() for t in state.values()} == {
        torch.uint8,
        torch.int16,
        torch.float32,
    }
    train(model, optimizer, 1, 3)  # the loaded state must be a copy
    train(again, other, 3, 3)
    assert all(torch.equal(a, b) for a, b in zip(straight.parameters(), again.parameters(), strict=True))


@pytest.mark.parametrize("through", [copy.deepcopy, lambda both: pickle.loads(pickle.dumps(both))])
def test_a_copy_continues_bit_for_bit(through) -> None:
    model = net()
    optimizer = LowBitAdamW(model.parameters(), bits=4)
    train(model, optimizer, 2)
    other, copied = through((model, optimizer))
    train(model, optimizer, 2, 2)
    train(other, copied, 2, 2)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_a_state_of_other_bits_is_refused() -> None:
    model = net()
    optimizer = LowBitAdamW(model.parameters(), bits=8)
    train(model, optimizer, 1)
    for other in (LowBitAdamW(model.parameters(), bits=4), LowBitAdamW(net().parameters(), bits=4)):
        with pytest.raises(UserError, match=r"must belong to LowBitAdamW with bits=4"):
            other.load_state_dict(optimizer.state_dict())
    plain = torch.optim.AdamW(model.parameters())
    train(model, plain, 1)
    with pytest.raises(UserError, match="has a different state"):
        optimizer.load_state_dict(plain.state_dict())


def test_strides_and_half_precision() -> None:
    """Memory order does not change the result. A bfloat16 parameter is updated in float32 and rounded."""
    weight = torch.randn(64, 16, 3, 3)
    grad = torch.randn(64, 16, 3, 3)
    found = []
    for order in (torch.contiguous_format, torch.channels_last):
        p = nn.Parameter(weight.clone().to(memory_format=order))
        p.grad = grad.clone().to(memory_format=order)
        optimizer = LowBitAdamW([p])
        optimizer.step()
        found.append((p.detach().contiguous(), optimizer.state[p]["ratio"]))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])
    half = nn.Parameter(weight.bfloat16())
    exact = nn.Parameter(half.detach().float())
    half.grad, exact.grad = grad.bfloat16(), grad.bfloat16().float()
    for p in (half, exact):
        LowBitAdamW([p], lr=0.1).step()
    assert torch.equal(half, exact.bfloat16())


def test_a_parameter_without_a_gradient_is_left_and_may_come_late() -> None:
    model = net()
    optimizer = LowBitAdamW(model.parameters())
    before = model[0].weight.clone()
    model[2](torch.ones(1, 128)).sum().backward()
    optimizer.step()
    assert torch.equal(model[0].weight, before)
    train(model, optimizer, 1)
    assert not torch.equal(model[0].weight, before)
    assert [int(optimizer.state[p]["step"]) for p in (model[0].weight, model[2].weight)] == [1, 2]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"bits": 5}, "bits must be 8 or 4, got 5."),
        ({"lr": -1.0}, "lr must be a number >= 0, got -1.0."),
        ({"betas": (0.9, 1.0)}, "betas must be two numbers >= 0 and < 1"),
        ({"weight_decay": float("nan")}, "weight_decay must be a number >= 0, got nan."),
    ],
)
def test_mistakes_are_refused(settings: dict, message: str) -> None:
    with pytest.raises(SettingError, match=message.replace("(", r"\(")):
        LowBitAdamW([nn.Parameter(torch.zeros(3))], **settings)


def test_sparse_gradients_are_refused() -> None:
    table = nn.Embedding(100, 64, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(UserError, match="sparse"):
        LowBitAdamW(table.parameters()).step()


# ------------------------------------------------------------------------------ against AdamW on the same gradients
Gradients = Iterable[torch.Tensor]


def spread_over(decades: float, steps: int = 50, shuffled: bool = False) -> Gradients:
    """Yield Gaussian gradients whose scales cover the given number of decades within a row of 256 values."""
    sizes = torch.logspace(0, -decades, 256)
    if shuffled:
        sizes = sizes[torch.randperm(256, generator=torch.Generator().manual_seed(5))]
    for step in range(steps):
        yield torch.randn(64, 256, generator=torch.Generator().manual_seed(step)) * sizes


def pausing(kind: str, steps: int = 200) -> Gradients:
    """Yield gradients with zeros for every seventh channel, in the middle ("pause") or in the first three quarters.

    With "constant", the later gradients of these channels have one sign, so AdamW's steps exceed the learning rate.
    """
    for step, grad in enumerate(spread_over(2, steps)):
        if kind == "constant":
            grad[:, ::7] = torch.logspace(0, -2, 256)[::7]
        pause = steps // 4 <= step < 3 * steps // 4 if kind == "pause" else step < 3 * steps // 4
        if pause:
            grad[:, ::7] = 0
        yield grad


def compared(gradients: Gradients, *bits: int) -> dict[int, tuple[float, float]]:
    """Return, for each bit width, the largest step relative to AdamW's and the relative error of all steps."""
    makers: dict[int, Callable[..., Any]] = {32: lambda p: torch.optim.AdamW(p, weight_decay=0.0)}
    makers |= {b: lambda p, b=b: LowBitAdamW(p, weight_decay=0.0, bits=b) for b in bits}
    weights = {b: nn.Parameter(torch.zeros(64, 256)) for b in makers}
    optimizers = {b: make([weights[b]]) for b, make in makers.items()}
    largest, errors, total = dict.fromkeys(makers, 0.0), dict.fromkeys(makers, 0.0), 0.0
    for grad in gradients:
        steps = {}
        for b, optimizer in optimizers.items():
            weights[b].data.zero_()
            weights[b].grad = grad.clone()
            optimizer.step()
            steps[b] = weights[b].detach().double() / 1e-3
            largest[b] = max(largest[b], float(steps[b].abs().max()))
        total += float(steps[32].square().sum())
        for b in bits:
            errors[b] += float((steps[b] - steps[32]).square().sum())
    return {b: (largest[b] / largest[32], (errors[b] / total) ** 0.5) for b in bits}


@pytest.mark.parametrize(
    "gradients",
    [
        *(pytest.param(lambda d=d: spread_over(d), id=f"1e{d}") for d in (0, 1, 2, 3, 6)),
        pytest.param(lambda: spread_over(6, shuffled=True), id="1e6 shuffled"),
        *(pytest.param(lambda k=k: pausing(k), id=k) for k in ("late", "pause", "constant")),
    ],
)
def test_steps_are_as_large_as_adamw_s_and_near_them(gradients: Callable[[], Gradients]) -> None:
    found = compared(gradients(), 8, 4)
    assert found[8][0] <= 1.25
    assert found[8][1] <= 0.08
    assert found[4][0] <= 1.5
    assert found[4][1] >= 4 * found[8][1], "8 bits are at least four times as near as 4"


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.99, 0.999), (0.5, 0.9)])
def test_a_parameter_whose_gradient_becomes_zero_stops(bits: int, betas: tuple[float, float]) -> None:
    """A momentum that is rounded to nearest can remain at a nonzero code forever."""
    weight = nn.Parameter(torch.zeros(64, 64))
    optimizer = LowBitAdamW([weight], lr=1.0, betas=betas, weight_decay=0.0, bits=bits)
    for step in range(20):
        weight.grad = torch.randn(64, 64, generator=torch.Generator().manual_seed(step))
        optimizer.step()
    weight.grad = torch.zeros(64, 64)
    for _ in range(int(20 / (1 - betas[0]))):
        optimizer.step()
    before = weight.detach().clone()
    optimizer.step()
    assert (weight - before).abs().max() <= 1e-3


@pytest.mark.parametrize("bits", [8, 4])
def test_a_gradient_that_is_not_finite_spoils_its_own_value_only(bits: int) -> None:
    weight = nn.Parameter(torch.zeros(64, 64))
    optimizer = LowBitAdamW([weight], bits=bits)
    for step in range(5):
        weight.grad = torch.randn(64, 64, generator=torch.Generator().manual_seed(step))
        if step == 2:
            weight.grad[3, 5], weight.grad[8, 8] = float("nan"), float("inf")
        optimizer.step()
    assert weight.isnan().nonzero().tolist() == [[3, 5], [8, 8]]


@pytest.mark.parametrize("bits", [8, 4])
def test_huge_and_tiny_gradients(bits: int) -> None:
    for size in (1e-30, 1e-18, 1e15, 1e30):
        weight = nn.Parameter(torch.zeros(64, 64))
        optimizer = LowBitAdamW([weight], lr=1.0, weight_decay=0.0, bits=bits)
        for step in range(5):
            before = weight.detach().clone()
            weight.grad = size * torch.randn(64, 64, generator=torch.Generator().manual_seed(step))
            optimizer.step()
            assert (weight - before).abs().max() <= 1.5


# ---------------------------------------------------------------------------------------------- states of other formats
def test_a_state_without_shifts_is_rejected() -> None:
    model = net()
    optimizer = LowBitAdamW(model.parameters())
    train(model, optimizer, 1)
    state_dict = optimizer.state_dict()
    for state in state_dict["state"].values():
        if "root_range" in state:
            state["root_range"] = state["root_range"][:, :2]
    with pytest.raises(UserError, match=r"must belong to LowBitAdamW with bits=8.*resume=never"):
        LowBitAdamW(model.parameters()).load_state_dict(state_dict)


def test_a_state_of_torchao_is_rejected() -> None:
    optim = pytest.importorskip("torchao.optim")
    torch.compiler.set_stance("force_eager")
    try:
        model = net()
        theirs = optim.AdamW8bit(model.parameters())
        train(model, theirs, 1)
        with pytest.raises(UserError, match=r"must belong to LowBitAdamW with bits=8.*resume=never"):
            LowBitAdamW(model.parameters()).load_state_dict(theirs.state_dict())
    finally:
        torch.compiler.set_stance("default")


@pytest.mark.gpu
@pytest.mark.parametrize("bits", [8, 4])
def test_a_training_on_cuda_continues_on_a_cpu(bits: int) -> None:
    model = net().cuda()
    optimizer = LowBitAdamW(model.parameters(), lr=1e-3, bits=bits)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(16, 64, device="cuda")).square().mean().backward()
        optimizer.step()
    state = optimizer.state_dict()
    on_cpu = model.cpu()
    own = LowBitAdamW(on_cpu.parameters(), bits=bits)
    own.load_state_dict(state)
    train(on_cpu, own, 1)
