"""Tests of the statistics of blocks: observed tokens and relative magnitudes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

from efficient_ft.methods import BSR, ALaST, Checkpointing
from efficient_ft.models.view import view
from efficient_ft.ops.tokens import Tokens
from efficient_ft.training.callbacks.block_stats import BlockIO, channel_axis, observe_blocks, relative_magnitude
from tests.training.test_step_stats import ALAST_SETTINGS, BSR_SETTINGS, VIT


def test_padding_is_left_out_of_the_mean() -> None:
    """The mean covers all tokens of texts with 7, 3 and 1 tokens, and excludes padding."""
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(3, 7, 5, generator=generator, dtype=torch.float64) for _ in range(2))
    lengths = (7, 3, 1)
    present = torch.tensor([[1] * n + [0] * (7 - n) for n in lengths])
    ratios = [
        (y[b, t] - x[b, t]).square().sum().sqrt() / y[b, t].square().sum().sqrt()
        for b, n in enumerate(lengths)
        for t in range(n)
    ]
    found = relative_magnitude(BlockIO(x, None, y, None), 0, 2, present)
    assert found is not None
    assert float(found[0]) == pytest.approx(sum(map(float, ratios)) / 11)
    assert float(found[1]) == pytest.approx(11 / 3)


@pytest.mark.parametrize("method", [None, BSR(**BSR_SETTINGS), ALaST(**ALAST_SETTINGS)], ids=["plain", "bsr", "alast"])
def test_nothing_more_is_kept_for_the_backward_pass_and_recomputing_is_not_seen(method):
    torch.manual_seed(0)
    model = timm.create_model("vit_digits", **VIT["kwargs"]).train()
    images = torch.randn(3, 3, 32, 32)
    if method is not None:
        copy.deepcopy(method).apply(model)
    seen: list[tuple[int, list[float]]] = []

    def see(index: int, io: BlockIO) -> None:
        found = relative_magnitude(io, 1, 2)
        assert found is not None
        assert not any(t.requires_grad for t in (*found, io.x, io.y))
        seen.append((index, [float(value) for value in found]))

    def saved(model: nn.Module, observing: bool) -> list[torch.Size]:
        sizes: list[torch.Size] = []

        def pack(t: Tensor) -> Tensor:
            sizes.append(t.shape)
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            if observing:
                with observe_blocks(model, view(model).blocks, see):
                    model(images).sum().backward()
            else:
                model(images).sum().backward()
        return sizes

    assert saved(model, True) == saved(model, False)
    once = list(seen)
    assert [index for index, _ in once] == [0, 1, 2, 3]
    assert not any(module._forward_hooks for module in model.modules())
    seen.clear()
    Checkpointing().apply(model)
    saved(model, True)
    assert seen == once
    seen.clear()
    timms: Any = timm.create_model("vit_digits", **VIT["kwargs"]).train()
    timms.set_grad_checkpointing(True)
    saved(timms, True)
    assert [index for index, _ in seen] == [0, 1, 2, 3]


def test_tokens_are_compared_with_themselves_wherever_they_stand():
    """Tokens are matched by position after they are shuffled, dropped and fused."""
    torch.manual_seed(0)
    x, y = torch.randn(2, 1 + 5, 4, dtype=torch.float64), torch.randn(2, 1 + 4, 4, dtype=torch.float64)
    before = Tokens(
        torch.tensor([[7, 2, 0, 9, 4], [1, 9, 3, 8, 6]]), fused=1
    )  # the grid has 9 positions, so index 9 is a fused token
    after = Tokens(torch.tensor([[4, 9, 7, 10], [8, 1, 6, 10]]), fused=2)  # index 10 is a new token
    pairs = [(0, 0), (5, 1), (4, 2), (1, 3)], [(0, 0), (4, 1), (1, 2), (5, 3)]
    expected = [
        (y[image, new] - x[image, old]).norm() / y[image, new].norm()
        for image, which in enumerate(pairs)
        for old, new in which
    ]
    found = relative_magnitude(BlockIO(x, before, y, after), prefix=1, axis=2)
    assert found is not None
    assert float(found[0]) == pytest.approx(float(sum(expected)) / 8, rel=1e-12)
    assert float(found[1]) == 4


def test_where_places_are_not_known_prefix_tokens_are_compared():
    torch.manual_seed(0)
    x, y = torch.randn(2, 7, 4), torch.randn(2, 5, 4)
    alone = float(((y - x[:, :5])[:, :2].norm(dim=-1) / y[:, :2].norm(dim=-1)).mean())
    for after in (None, Tokens(None, sizes_BN=torch.ones(2, 5))):
        found = relative_magnitude(BlockIO(x, None, y, after), prefix=2, axis=2)
        assert found is not None
        assert [float(value) for value in found] == pytest.approx([alone, 2])
        assert relative_magnitude(BlockIO(x, None, y, after), prefix=0, axis=2) is None


def test_maps_have_their_channels_where_the_block_puts_them():
    torch.manual_seed(0)
    for block, axis in ((nn.Conv2d(3, 3, 1), 1), (nn.Sequential(nn.LayerNorm(3), nn.Linear(3, 3)), 3)):
        x = torch.randn(2, 3, 4, 5) if axis == 1 else torch.randn(2, 4, 5, 3)
        y = torch.randn_like(x)
        y.select(axis, 0)[0], y.select(axis, 1)[0], y.select(axis, 2)[0] = (
            0,
            0,
            0,
        )  # as after a ReLU, one position is zero in all channels
        assert channel_axis(block, 4) == axis
        found = relative_magnitude(BlockIO(x, None, y, None), prefix=0, axis=axis)
        expected = ((y[1] - x[1]).norm(dim=axis - 1) / y[1].norm(dim=axis - 1)).mean()
        assert found is not None
        assert [float(value) for value in found] == pytest.approx([float(expected), 10])
    assert channel_axis(nn.Conv2d(3, 3, 1), 3) == 2
