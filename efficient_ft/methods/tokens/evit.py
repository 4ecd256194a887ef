"""EViT: tokens that the class token attends to little are dropped, and fused into one.

Source: Liang, Ge, Tong, Song, Wang, Xie, "Not All Patches Are What You Need: Expediting Vision Transformers via Token
Reorganizations", ICLR 2022.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import nn

from efficient_ft.core.errors import SettingError
from efficient_ft.methods.base import Applied, Method
from efficient_ft.methods.blocks import blocks_at, check_indices
from efficient_ft.methods.declarations import Adds, Axis, Needs
from efficient_ft.methods.registry import register
from efficient_ft.methods.tokens.base import (
    DroppingForward,
    give_forwards,
    grid_positions,
    refuse_other_blocks,
    take_forwards,
)
from efficient_ft.models.view import ModelView, Reason, Skipped
from efficient_ft.ops.tokens import num_kept


@register
class EViT(Method):
    """Keep in some blocks only the patch tokens that the class token attends to most.

    Between attention and feed-forward network, in training and in evaluation, ``keep_rate`` of the tokens stay, in the
    order of the attention, mean over the heads; the others become one, weighted by it. Attention stays fused: the
    class token's row is computed separately. The trained weights are the model's own, but belong with the dropping:
    exported files note it.

    Args:
        drop_at: blocks in which tokens are dropped, counted from 0, negative ones from the end; not the last.
        keep_rate: share of the patch tokens kept, above 0 and at most 1.
        fuse: what is dropped becomes one more token.

    Raises:
        SettingError: a value outside these, or (when applied) a block outside the model, its last one, or too few
            tokens to drop any.
        UserError: when applied: the model has no class token, no token grid, or blocks of another form.
    """

    name = "evit"
    axis = Axis.TOKENS
    adds = frozenset({Adds.TOKEN_DROPPING})
    needs = frozenset({Needs.BLOCKS, Needs.CLASS_TOKEN, Needs.TOKEN_GRID})
    merges = False

    def __init__(self, drop_at: list[int] = [3, 6, 9], keep_rate: float = 0.5, fuse: bool = True):  # noqa: B006
        super().__init__()
        check_dropping(drop_at, keep_rate, fuse)
        self.drop_at, self.keep_rate, self.fuse = list(drop_at), keep_rate, fuse

    def _apply(self, model: nn.Module, view: ModelView) -> Applied:
        dropping = dropping_blocks(view, self.name, self.drop_at, self.keep_rate, self.fuse)
        drop_tokens(model, view, dropping, self.keep_rate, self.fuse)
        why = Skipped(Reason.NOT_CHOSEN, "all tokens flow on")
        return Applied(self.name, dropping, {name: why for name in view.blocks if name not in dropping})

    def _remove(self, model: nn.Module) -> None:
        take_forwards(model)


def dropping_blocks(
    view: ModelView, method_name: str, drop_at: Sequence[int], keep_rate: float, fuse: bool
) -> tuple[str, ...]:
    """Return the names of the blocks at `drop_at`; nothing is changed.

    Raises:
        SettingError: an index outside the model, of its last block, or twice; or so few tokens that none is dropped.
        UserError: blocks of another form.
    """
    chosen = blocks_at(view, f"method.{method_name}.drop_at", drop_at, last=False)
    refuse_other_blocks(view, method_name, chosen)
    _refuse_few(view, method_name, chosen, keep_rate, fuse)
    return chosen


def drop_tokens(model: nn.Module, view: ModelView, names: Sequence[str], keep_rate: float, fuse: bool) -> None:
    """Make the blocks of these names drop tokens."""
    settings = partial(num_kept, keep_rate=keep_rate), fuse
    give_forwards(model, view, dict.fromkeys(names, (DroppingForward, settings)))


def _refuse_few(view: ModelView, method_name: str, chosen: Sequence[str], keep_rate: float, fuse: bool) -> None:
    """Raise SettingError where a block is left so few tokens that as many flow on as came in."""
    count = grid_positions(view)
    for name in chosen:
        kept = num_kept(count, keep_rate)
        left = kept + (fuse and kept < count)
        if keep_rate < 1 and left >= count:
            height, width = view.image_size
            raise SettingError(
                f"method.{method_name}.keep_rate",
                keep_rate,
                f"a share that leaves fewer than came in: of the {count} patch tokens of {name} it keeps {kept}"
                + (" and fuses the rest into one" if fuse else ""),
                f"Take larger images (here {height}×{width}), or drop in fewer blocks.",
            )
        count = left


def check_dropping(drop_at: Any, keep_rate: Any, fuse: Any) -> None:
    """Raise SettingError for settings that fit no model."""
    check_indices("drop_at", drop_at, "[3,6,9]")
    if isinstance(keep_rate, bool) or not isinstance(keep_rate, int | float) or not 0 < keep_rate <= 1:
        raise SettingError("keep_rate", keep_rate, "a number > 0 and <= 1")
    if not isinstance(fuse, bool):
        raise SettingError("fuse", fuse, ("true", "false"))
