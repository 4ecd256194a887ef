"""Adam in 8 and 4 bits: as torch's, near it in accuracy, exactly resumable, and torchao's behind the same state."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from efficient_ft.core.errors import SettingError, UserError
from efficient_ft.optim import LowBitAdam, LowBitAdamW, low_bit_adam, state_tensors

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


@pytest.mark.parametrize(("bits", "share"), [(8, 1 / 4 + 1 / 256), (4, 1 / 8 + 1 / 128)])
def test_its_state_is_as_small_as_it_says(bits: int, share: float) -> None:
    """b bits per value and a scale of 32 bits per block of 256 or 128, against 32 bits per value."""
    weight = nn.Parameter(torch.zeros(512, 1024))
    optimizer = LowBitAdamW([weight], bits=bits)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    held = sum(t.untyped_storage().nbytes() for t in state_tensors(optimizer))
    assert held == share * 2 * 4 * weight.numel() + 4  # and the number of the step


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
    assert {t.dtype for state in other.state.values() for t in state.values()} == {torch.uint8, torch.float32}
    train(model, optimizer, 1, 3)  # which the loaded state must not share
    train(again, other, 3, 3)
    assert all(torch.equal(a, b) for a, b in zip(straight.parameters(), again.parameters(), strict=True))


def test_a_state_of_other_bits_is_refused() -> None:
    model = net()
    optimizer = LowBitAdamW(model.parameters(), bits=8)
    train(model, optimizer, 1)
    for other in (LowBitAdamW(model.parameters(), bits=4), LowBitAdamW(net().parameters(), bits=4)):
        with pytest.raises(UserError, match=r"must be that of LowBitAdamW with bits=4"):
            other.load_state_dict(optimizer.state_dict())
    plain = torch.optim.AdamW(model.parameters())
    train(model, plain, 1)
    with pytest.raises(UserError, match="got another one"):
        optimizer.load_state_dict(plain.state_dict())


def test_strides_and_half_precision() -> None:
    """Memory order of a parameter plays no part; a bfloat16 parameter is updated in float32 and rounded."""
    weight = torch.randn(64, 16, 3, 3)
    grad = torch.randn(64, 16, 3, 3)
    found = []
    for order in (torch.contiguous_format, torch.channels_last):
        p = nn.Parameter(weight.clone().to(memory_format=order))
        p.grad = grad.clone().to(memory_format=order)
        optimizer = LowBitAdamW([p])
        optimizer.step()
        found.append((p.detach().contiguous(), optimizer.state[p]["exp_avg"]))
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


def test_on_a_cpu_it_is_our_own() -> None:
    groups = [{"params": [nn.Parameter(torch.zeros(3))], "weight_decay": 0.5}]
    optimizer = low_bit_adam(groups, 4, lr=0.1)
    assert type(optimizer) is LowBitAdamW
    assert (optimizer.bits, optimizer.param_groups[0]["weight_decay"]) == (4, 0.5)
    assert type(low_bit_adam([nn.Parameter(torch.zeros(3))], 8, False)) is LowBitAdam


# ---------------------------------------------------------------------------------------------- torchao, for CUDA
@pytest.fixture
def eager() -> Iterator[None]:
    """torchao without its compiler: slow, and the same numbers."""
    pytest.importorskip("torchao.optim")
    torch.compiler.set_stance("force_eager")
    yield
    torch.compiler.set_stance("default")


def torchao(model: nn.Module, bits: int, decoupled: bool = True, **options: float) -> Optimizer:
    from efficient_ft.optim.torchao import torchao_class

    return torchao_class(bits, decoupled)(model.parameters(), **options)


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("decoupled", [True, False], ids=["adamw", "adam"])
@pytest.mark.parametrize("bits", [8, 4])
def test_torchao_takes_the_same_steps(bits: int, decoupled: bool) -> None:
    models = [net(), net()]
    own = OWN[decoupled](models[0].parameters(), lr=1e-3, weight_decay=0.1, bits=bits)
    theirs = torchao(models[1], bits, decoupled, lr=1e-3, weight_decay=0.1)
    for step in range(3):
        for model, optimizer in zip(models, (own, theirs), strict=True):
            for group in optimizer.param_groups:
                group["lr"] = 1e-3 / (step + 1)  # a number, as schedules set it
            train(model, optimizer, 1, step)
        assert all(isinstance(group["lr"], float) for group in theirs.param_groups)
        for found, expected in zip(models[0].parameters(), models[1].parameters(), strict=True):
            # a moment at a midpoint may be rounded the other way
            apart = ((found - expected).abs() > 1e-6 + 1e-5 * expected.abs()).float().mean()
            assert apart < 2e-3
        models[0].load_state_dict(models[1].state_dict())


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("bits", [8, 4])
def test_a_state_goes_from_torchao_to_ours_and_back(bits: int) -> None:
    model = net()
    theirs = torchao(model, bits)
    train(model, theirs, 2)
    state = copy.deepcopy(theirs.state_dict())
    assert {type(t) for one in state["state"].values() for t in one.values()} == {torch.Tensor}
    own = LowBitAdamW(model.parameters(), bits=bits)
    own.load_state_dict(state)
    back = torchao(net(1), bits)
    back.load_state_dict(own.state_dict())
    for key, one in back.state_dict()["state"].items():
        assert one.keys() == state["state"][key].keys()
        assert all(torch.equal(t, state["state"][key][name]) for name, t in one.items())
    assert sum(t.numel() * t.element_size() for t in state_tensors(theirs)) >= sum(
        t.numel() * t.element_size() for t in state_tensors(own)
    )
    with pytest.raises(UserError, match="must be that of AdamW"):
        torchao(net(), 12 - bits).load_state_dict(state)


def test_without_torchao_a_cuda_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from efficient_ft.optim.torchao import torchao_class

    monkeypatch.setitem(sys.modules, "torchao", None)
    torchao_class.cache_clear()
    with pytest.raises(UserError, match=r"need torchao on a CUDA device\. Install it: pip install torchao"):
        torchao_class(8, True)
    torchao_class.cache_clear()


@pytest.mark.gpu
@pytest.mark.parametrize("bits", [8, 4])
def test_on_cuda_it_is_torchao_s_and_continues_on_a_cpu(bits: int) -> None:
    pytest.importorskip("torchao.optim")
    model = net().cuda()
    optimizer = low_bit_adam(model.parameters(), bits, lr=1e-3)
    assert "torchao" in type(optimizer).__mro__[2].__module__
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(16, 64, device="cuda")).square().mean().backward()
        optimizer.step()
    state = optimizer.state_dict()
    on_cpu = model.cpu()
    own = low_bit_adam(on_cpu.parameters(), bits)
    own.load_state_dict(state)
    train(on_cpu, own, 1)
