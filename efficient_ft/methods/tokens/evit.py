"""EViT: patch tokens with low attention from the class token are dropped and fused into one token.

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
from efficient_ft.methods.checks import check_bool, check_keep_rate
from efficient_ft.methods.declarations import Adds, Axis, Needs
from efficient_ft.methods.registry import register
from efficient_ft.methods.summary import ranges
from efficient_ft.methods.tokens.base import (
    DroppingForward,
    give_forwards,
    grid_positions,
    refuse_other_blocks,
    refuse_unfit_model,
    take_forwards,
)
from efficient_ft.models.view import ModelView, Reason, Skipped
from efficient_ft.ops.tokens import num_kept


@register
class EViT(Method):
    """Drop the patch tokens that the class token attends to least (EViT: Liang et al., ICLR 2022).

    Each block of ``drop_at`` keeps the share ``keep_rate`` of the patch tokens with the highest attention from the
    class token (averaged over heads), in descending order of attention. It does so between attention and feed-forward
    network. The other patch tokens are fused into one token, their sum weighted by attention. Tokens are dropped in
    training and in evaluation. The weights keep the model's own names, but must be used with the same dropping, which
    exported files record. Attention stays fused, and the class token's row is computed separately.

    Args:
        drop_at: indices of the blocks in which tokens are dropped, counted from 0; negative indices count from the end.
            The last block is not allowed.
        keep_rate: share of the patch tokens that each of these blocks keeps, above 0 and at most 1. The number is
            rounded up.
        fuse: append one token fused from the dropped tokens.

    Raises:
        SettingError: a setting is out of range; when applied: a block index is outside the model, belongs to the last
            block or is listed twice, or a block would drop no token because too few are left.
        UserError: when applied: the model has no class token, no grid of tokens, or blocks of an unsupported type; or
            another method that drops or merges tokens has been applied.
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
        drop_tokens(model, view, self.name, dropping, self.keep_rate, self.fuse)
        why = Skipped(Reason.NOT_CHOSEN, "keeps all tokens: not listed in drop_at")
        others = {name: why for name in view.blocks if name not in dropping}
        fused = ", and fuse the others into one" if self.fuse else ""
        summary = f"{ranges(dropping)} each keep {self.keep_rate:g} of the patch tokens{fused}"
        return Applied(self.name, dropping, others, summary=summary)

    def _remove(self, model: nn.Module) -> None:
        take_forwards(model, self.name)


def dropping_blocks(
    view: ModelView, method_name: str, drop_at: Sequence[int], keep_rate: float, fuse: bool
) -> tuple[str, ...]:
    """Return the names of the blocks at the indices `drop_at`, without changing the model.

    Raises:
        SettingError: an index is outside the model, belongs to the last block or is listed twice, or a block would drop
            no token because too few are left.
        UserError: the blocks are of an unsupported type.
    """
    refuse_unfit_model(view, method_name)
    chosen = blocks_at(view, f"method.{method_name}.drop_at", drop_at, last=False)
    refuse_other_blocks(view, method_name, chosen)
    _refuse_few(view, method_name, chosen, keep_rate, fuse)
    return chosen


def drop_tokens(
    model: nn.Module, view: ModelView, method_name: str, names: Sequence[str], keep_rate: float, fuse: bool
) -> None:
    """Replace the forward passes of the blocks, so that the named blocks drop tokens like `EViT` does."""
    settings = partial(num_kept, keep_rate=keep_rate), fuse
    give_forwards(model, view, method_name, dict.fromkeys(names, (DroppingForward, settings)))


def _refuse_few(view: ModelView, method_name: str, chosen: Sequence[str], keep_rate: float, fuse: bool) -> None:
    """Raise SettingError if a block outputs as many tokens as it receives."""
    count = grid_positions(view)
    for name in chosen:
        kept = num_kept(count, keep_rate)
        left = kept + (fuse and kept < count)
        if keep_rate < 1 and left >= count:
            height, width = view.image_size
            raise SettingError(
                f"method.{method_name}.keep_rate",
                keep_rate,
                f"low enough to drop tokens in every block of drop_at ({name} takes {count} patch tokens and keeps"
                f" {kept}{' and a fused one' if left > kept else ''})",
                f"Use larger images (now {height}×{width}), or drop tokens in fewer blocks.",
            )
        count = left


def check_dropping(drop_at: Any, keep_rate: Any, fuse: Any) -> None:
    """Raise SettingError if a setting of `EViT` is out of range for every model."""
    check_indices("drop_at", drop_at, "[3,6,9]")
    check_keep_rate(keep_rate)
    check_bool("fuse", fuse)
