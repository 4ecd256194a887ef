"""Stacks of methods, and training loops with and without a session."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from efficient_ft import MethodSession
from efficient_ft.methods import (
    LBPWHT,
    LISA,
    ALaST,
    BackRazor,
    BitFit,
    Blocks,
    BSRMoE,
    EViT,
    LastStage,
    LoRA,
    LoRAFA,
    LowBit,
    Method,
    RepNet,
    TinyTL,
    TopLayers,
)
from efficient_ft.testing import model_of
from tests.integrations.loops import batches_of, train_by_hand

STACKS: dict[str, Callable[[], list[Method]]] = {
    "last_stage+lbp_wht": lambda: [LastStage(), LBPWHT(order=3)],
    "bsr_moe": lambda: [BSRMoE(4, 2, [1, -1], aux_loss_coef=0.1, drop_at=[1, 2])],
    "lisa": lambda: [LISA(num_layers=1, interval=1, seed=3)],
    "alast": lambda: [ALaST(num_layers=2, budget_init=0.7, seed=3)],
    "back_razor": lambda: [BackRazor(sparsity=0.7)],
    "top_layers": lambda: [TopLayers(num_layers=2, profile_steps=2)],
    "lbp_wht_lhe": lambda: [LBPWHT(bases="lhe", order=2, profile_steps=2)],
    "lora": lambda: [LoRA(rank=2)],
}
#: Methods of every axis and all methods that add modules, each with its small model.
SAVED: dict[str, tuple[str, Callable[[], list[Method]]]] = {
    **{name: ("vit", make) for name, make in STACKS.items()},
    "lora_fa": ("vit", lambda: [LoRAFA(rank=2)]),
    "bitfit": ("vit", lambda: [BitFit()]),
    "blocks+evit": ("vit", lambda: [Blocks([-1]), EViT([1])]),
    "low_bit": ("vit", lambda: [Blocks([-1]), LowBit()]),
    "repnet": ("mobilenet", lambda: [RepNet([1, 2])]),
    "tinytl": ("mobilenet", lambda: [TinyTL()]),
    "last_stage": ("resnet", lambda: [LastStage()]),
}


def sgd_of(session: MethodSession) -> torch.optim.Optimizer:
    """Create the optimizer of `sgd` for the session's parameters."""
    return torch.optim.SGD(session.parameters(), lr=0.05, momentum=0.9)


def train(
    model: Any,
    session: MethodSession,
    batches: list[tuple[Tensor, Tensor]],
    accumulate: int = 1,
    numbered: bool = False,
) -> None:
    """Train with a session.

    With ``numbered=True``, each micro-batch has its own `session.step` block with the same number.
    """
    optimizer = sgd_of(session)
    for step in range(len(batches) // accumulate):
        group = batches[step * accumulate : (step + 1) * accumulate]
        if numbered:
            for index, (x, y) in enumerate(group):
                with session.step(step):
                    (session.loss(F.cross_entropy(model(x), y)) / accumulate).backward()
                    if index + 1 == accumulate:
                        optimizer.step()
                        optimizer.zero_grad()
            continue
        with session.step(step):
            for x, y in group:
                (session.loss(F.cross_entropy(model(x), y)) / accumulate).backward()
            optimizer.step()
            optimizer.zero_grad()


def by_hand(methods: list[Method], count: int = 4, accumulate: int = 1, name: str = "vit") -> nn.Module:
    torch.manual_seed(0)
    model = model_of(name)
    train_by_hand(model, methods, batches_of(name, count), accumulate=accumulate)
    return model
