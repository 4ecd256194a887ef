"""Tests of optimizer steps inside the backward pass: equal weights, one gradient at a time, and rejected uses."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import Optimizer

from efficient_ft.core.errors import SettingError, UserError
from efficient_ft.methods import LISA, ALaST, BackRazor, Checkpointing, Full, LoRA, Mesa, MoE, UniformLayers
from efficient_ft.methods.base import Method
from efficient_ft.optim import LowBitAdamW, step_in_backward, steps_in_backward
from efficient_ft.testing import model_of
from tests.integrations.loops import assert_same_weights, batches_of, train_by_hand

OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "8 bits": lambda p: LowBitAdamW(p, lr=1e-2, bits=8),
    "4 bits": lambda p: LowBitAdamW(p, lr=1e-2, bits=4),
}
METHODS: dict[str, Callable[[], list[Method]]] = {
    "full": lambda: [Full()],
    "lisa": lambda: [LISA(num_layers=1, interval=2, seed=1)],
    "uniform_layers": lambda: [UniformLayers(num_layers=1, train_embeddings=False, seed=1)],
    "alast": lambda: [ALaST(num_layers=2, budget_init=0.7, seed=3)],
    "lora": lambda: [LoRA(rank=2)],
    "moe": lambda: [MoE(num_experts=4, top_k=1, blocks=[-1], norm_topk_prob=True, aux_loss_coef=0.1)],
    "checkpointing": lambda: [Checkpointing()],
    "back_razor": lambda: [Full(), BackRazor(sparsity=0.7)],
    "mesa": lambda: [Mesa()],
}


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))


def step(model: nn.Module, optimizer: Optimizer, seed: int) -> None:
    optimizer.zero_grad()
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(seed))
    model(x).square().sum().backward()
    optimizer.step()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_weights_equal_those_of_an_ordinary_step(name: str) -> None:
    plain, inside = net(), net()
    optimizers = [OPTIMIZERS[name](plain.parameters()), step_in_backward(OPTIMIZERS[name](inside.parameters()))]
    for seed in range(4):
        for model, optimizer in zip((plain, inside), optimizers, strict=True):
            optimizer.param_groups[0]["lr"] = 0.01 / (seed + 1)  # a learning rate schedule
            step(model, optimizer, seed)
        assert_same_weights(plain, inside)


@pytest.mark.first(3, "slow")
@pytest.mark.parametrize("name", METHODS)
def test_it_stacks_with_methods(name: str) -> None:
    """Methods that freeze layers, skip experts, pack activations or recompute give the weights of ordinary training."""
    trained = []
    for wrap in (lambda o: o, step_in_backward):
        torch.manual_seed(0)
        network = model_of("vit")

        def optimizer_of(model: nn.Module, wrap: Callable[[Optimizer], Optimizer] = wrap) -> Optimizer:
            return wrap(torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2))

        train_by_hand(network, METHODS[name](), batches_of("vit", 5), optimizer_of=optimizer_of)
        assert (any(p.grad is not None for p in network.parameters())) is False
        trained.append(network)
    assert_same_weights(*trained)


def test_gradients_never_exist_together() -> None:
    model = net()
    optimizer = step_in_backward(torch.optim.SGD(model.parameters(), lr=0.1))
    seen = []
    for p in model.parameters():  # hooks run in order of registration, so these run after the step
        p.register_post_accumulate_grad_hook(lambda _: seen.append([q.grad is not None for q in model.parameters()]))
    step(model, optimizer, 0)
    assert len(seen) == 6
    assert not any(itertools.chain.from_iterable(seen))


def test_a_checkpoint_is_that_of_an_ordinary_training_and_continues() -> None:
    straight, plain = net(), net()
    optimizer = OPTIMIZERS["8 bits"](straight.parameters())
    for seed in range(6):
        step(straight, optimizer, seed)
    inside = step_in_backward(OPTIMIZERS["8 bits"](plain.parameters()))
    for seed in range(3):
        step(plain, inside, seed)
    saved = copy.deepcopy((plain.state_dict(), inside.state_dict()))
    for wrap in (lambda o: o, step_in_backward):
        model = net()
        other = wrap(LowBitAdamW(model.parameters(), lr=7.0))
        model.load_state_dict(saved[0])
        other.load_state_dict(saved[1])
        assert other.param_groups[0]["lr"] == 1e-2
        for seed in range(3, 6):
            step(model, other, seed)
        assert_same_weights(straight, model)
        assert len(other.state) == 6


def test_groups_added_later_step_too() -> None:
    plain, inside = net(), net()
    optimizers = []
    for model, wrap in ((plain, lambda o: o), (inside, step_in_backward)):
        optimizer = wrap(torch.optim.SGD(model[0].parameters(), lr=0.1))
        optimizer.add_param_group({"params": list(model[2].parameters()), "lr": 0.01})
        optimizers.append(optimizer)
        step(model, optimizer, 0)
    assert_same_weights(plain, inside)
    assert [g["lr"] for g in optimizers[1].param_groups] == [0.1, 0.01]


def test_a_closure_and_a_scheduler() -> None:
    model = net()
    optimizer = step_in_backward(torch.optim.SGD(model.parameters(), lr=0.1))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))

    def closure() -> torch.Tensor:
        loss = model(torch.ones(1, 64)).square().sum()
        loss.backward()
        return loss.detach()

    before = model[0].weight.clone()
    assert optimizer.step(closure) > 0
    scheduler.step()
    assert not torch.equal(model[0].weight, before)
    assert optimizer.optimizer.param_groups[0]["lr"] == 0.05


def test_a_second_backward_pass_in_a_step_is_refused() -> None:
    model = net()
    step_in_backward(torch.optim.SGD(model.parameters(), lr=0.1))
    model(torch.ones(1, 64)).sum().backward()
    with pytest.raises(UserError, match="one backward pass per step"):
        model(torch.ones(1, 64)).sum().backward()


def test_a_grad_scaler_is_refused() -> None:
    model = net()
    optimizer, scaler = step_in_backward(LowBitAdamW(model.parameters())), torch.amp.GradScaler("cpu")
    scaler.scale(model(torch.ones(4, 64)).square().sum()).backward()
    with pytest.raises(UserError, match="cannot be used with a GradScaler"):
        scaler.step(optimizer)
    step(model, optimizer, 0)
    off = torch.amp.GradScaler("cpu", enabled=False)  # loops that select fp16 by a setting use a disabled scaler
    off.scale(model(torch.ones(4, 64)).square().sum()).backward()
    off.step(optimizer)


def test_several_processes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 2)
    with pytest.raises(SettingError, match="world_size must be 1 with step_in_backward, got 2"):
        step_in_backward(torch.optim.SGD(net().parameters(), lr=0.1))


def test_removed_it_leaves_gradients() -> None:
    model = net()
    optimizer = step_in_backward(torch.optim.SGD(model.parameters(), lr=0.1))
    assert steps_in_backward([optimizer])
    optimizer.remove()
    before = model[0].weight.clone()
    F.mse_loss(model(torch.ones(1, 64)), torch.ones(1, 64)).backward()
    assert torch.equal(model[0].weight, before)
    assert all(p.grad is not None for p in model.parameters())
