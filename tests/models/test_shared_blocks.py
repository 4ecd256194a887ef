"""Tests of networks in which a list contains the same block several times."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from timm.models.vision_transformer import Block
from torch import Tensor, nn

from efficient_ft.core.errors import UserError
from efficient_ft.integrations.session import MethodSession
from efficient_ft.methods import (
    LBPDCT,
    LISA,
    ALaST,
    Blocks,
    Checkpointing,
    Compact,
    EViT,
    HeadOnly,
    LastStage,
    Method,
    PatchDropout,
    ToMe,
)
from efficient_ft.models.view import view


class Shared(nn.Module):
    """A vision transformer. `order` contains the number of the weights of each block."""

    def __init__(self, order: Sequence[int]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.patch_embed = nn.Conv2d(3, 24, 8, 8)
        self.cls_token = nn.Parameter(torch.randn(1, 1, 24))
        kinds = [Block(24, 2) for _ in range(max(order) + 1)]
        self.blocks = nn.ModuleList([kinds[index] for index in order])
        self.last = self.blocks[-1]  # a further name, for example for a hook
        self.head = nn.Linear(24, 5)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patch_embed(images).flatten(2).mT
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], 1)
        for block in self.blocks:
            x = block(x)
        return self.head(x[:, 0])


ONE = [0] * 6
RUNS = [0, 0, 0, 1, 1, 1]
CYCLE = [0, 1, 0, 1, 0, 1]


@pytest.mark.parametrize(("order", "times"), [(ONE, 6), (CYCLE, 3)])
def test_the_last_stage_is_not_trained_alone_if_it_shares_weights_with_earlier_stages(
    order: list[int], times: int
) -> None:
    model = Shared(order)
    message = (
        rf"last_stage: the last stage of Shared shares .* blocks\.\d occurs {times} times \(blocks\.\d, .* Use anoth"
    )
    with pytest.raises(UserError, match=message):
        LastStage().apply(model, image_size=32)
    assert all(p.requires_grad for p in model.parameters())


def test_a_last_stage_with_own_weights_is_trained() -> None:
    LastStage().apply(model := Shared(RUNS), image_size=32)
    assert {name.split(".")[1] for name, p in model.named_parameters() if p.requires_grad and "blocks" in name} == {"3"}


@pytest.mark.parametrize("create", [lambda: ToMe(1), PatchDropout, lambda: EViT([0]), lambda: ALaST(1)])
def test_token_methods_require_that_each_block_occurs_once(create: Callable[[], Method]) -> None:
    message = (
        r"Shared contains blocks several times with shared weights \(blocks\.0: 3 times, and 1 more\)\. Tokens can"
    )
    with pytest.raises(UserError, match=message):
        create().apply(Shared(RUNS), image_size=32)


@pytest.mark.parametrize("create", [Checkpointing, lambda: LISA(1), lambda: Blocks([-1])])
def test_reports_state_that_blocks_are_shared(create: Callable[[], Method]) -> None:
    report = create().apply(Shared(RUNS), image_size=32)
    assert "Shared contains blocks several times with shared weights (blocks.0: 3 times, and 1 more)" in str(report)


@pytest.mark.parametrize("create", [HeadOnly, lambda: LBPDCT(1)])
def test_other_reports_do_not_mention_blocks(create: Callable[[], Method]) -> None:
    assert "shared" not in str(create().apply(Shared(RUNS), image_size=32))


def gradients(model: nn.Module, methods: Any) -> dict[str, Tensor]:
    with MethodSession(model.double(), methods, image_size=32) as session, session.step(0):
        images = torch.randn(2, 3, 32, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        session.loss(model(images).square().mean()).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("create", [Checkpointing, Compact])
@pytest.mark.parametrize("order", [ONE, RUNS, CYCLE])
def test_exact_methods_are_exact_with_shared_blocks(create: Callable[[], Method], order: list[int]) -> None:
    exact, found = gradients(Shared(order), []), gradients(Shared(order), create())
    assert exact.keys() == found.keys()
    assert all(torch.allclose(found[name], exact[name]) for name in exact)


def test_blocks_without_shared_weights_are_not_mentioned() -> None:
    assert view(Shared([0, 1, 2])).shared_blocks == {}
