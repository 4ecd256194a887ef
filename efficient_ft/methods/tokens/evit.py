"""EViT: drop the patch tokens to which the class token attends least.

Source: Liang, Ge, Tong, Song, Wang, Xie, "Not All Patches Are What You Need: Expediting Vision Transformers via Token
Reorganizations", ICLR 2022.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import nn

from efficient_ft.methods.base import Applied
from efficient_ft.methods.checks import blocks_at, check_bool, check_indices, check_keep_rate
from efficient_ft.methods.declarations import Adds, Axis, Needs
from efficient_ft.methods.registry import register
from efficient_ft.methods.summary import ranges
from efficient_ft.methods.tokens.base import DroppingForward, TokenMethod, grid_positions, run_dropping
from efficient_ft.models.view import ModelView, Reason, Skipped
from efficient_ft.ops.tokens import num_kept


class DropsTokens(TokenMethod):
    """Base class of the methods that drop tokens in the same way as `EViT`. The settings are described in `EViT`."""

    drop_at: list[int]
    keep_rate: float
    fuse: bool

    def _store_dropping(self, drop_at: Any, keep_rate: Any, fuse: Any) -> None:
        """Check and store the settings. The list `drop_at` may be empty."""
        check_indices("drop_at", [0] if drop_at == [] else drop_at, "[3,6,9]")
        check_keep_rate(keep_rate)
        check_bool("fuse", fuse)
        self.drop_at, self.keep_rate, self.fuse = list(drop_at), keep_rate, fuse

    def _kept_in_words(self, blocks: Sequence[str]) -> str:
        verb = "keeps" if len(blocks) == 1 else "each keep"
        return f"{ranges(blocks)} {verb} {self.keep_rate:g} of the patch tokens"

    def _drop_tokens(self, model: nn.Module, view: ModelView) -> tuple[str, ...]:
        """Make the blocks in `drop_at` drop tokens, and return their names. An error leaves the model unchanged."""
        self.refuse_unfit_model(view)
        chosen = blocks_at(view, self.full_name("drop_at"), self.drop_at, last=False)
        self.refuse_other_blocks(view, chosen)
        self._refuse_few(view, chosen)
        self.refuse_fixed_tokens(view, run_dropping, chosen)
        settings = partial(num_kept, keep_rate=self.keep_rate), self.fuse
        self.give_forwards(model, view, dict.fromkeys(chosen, (DroppingForward, settings)))
        return chosen

    def _refuse_few(self, view: ModelView, chosen: Sequence[str]) -> None:
        count = grid_positions(view)
        for name in chosen:
            kept = num_kept(count, self.keep_rate)
            left = kept + (self.fuse and kept < count)
            if self.keep_rate < 1 and left >= count:
                height, width = view.image_size
                raise self.setting_error(
                    "keep_rate",
                    f"low enough to drop tokens in every block of drop_at (the block {name} receives {count} patch"
                    f" tokens and keeps {kept}{' and a fused token' if left > kept else ''})",
                    f"Use images larger than {height}×{width}, or drop tokens in fewer blocks.",
                )
            count = left


@register
class EViT(DropsTokens):
    """Drop the patch tokens to which the class token attends least (EViT: Liang et al., ICLR 2022).

    Each block in ``drop_at`` keeps the fraction ``keep_rate`` of its patch tokens: the tokens that receive the highest
    attention from the class token, averaged over the heads. The kept tokens are sorted by attention in descending
    order. Tokens are dropped after attention and before the feed-forward network. With ``fuse=True``, the dropped
    tokens are replaced with one token, which is the sum of the dropped tokens weighted by attention. Tokens are dropped
    in training and in evaluation. The names of the weights do not change, but the trained model must be used with the
    same token dropping. Exported files contain the settings of the token dropping. Attention still runs as a fused
    operation. The attention of the class token is computed separately.

    Args:
        drop_at: indices of the blocks that drop tokens, counted from 0. Negative indices count from the end. The index
            of the last block is not allowed.
        keep_rate: fraction of the patch tokens that each block in `drop_at` keeps. Must be in (0, 1]. The number of
            kept tokens is rounded up.
        fuse: if True, the dropped tokens are fused into one token, which is appended to the kept tokens.

    Raises:
        SettingError: If a setting is out of range. Raised by `apply` if a block index is out of range, is repeated, or
            refers to the last block, or if a block receives too few tokens to drop one.
        UserError: Raised by `apply` if the model has no class token or no token grid, if its blocks are not supported,
            or if another method that drops or merges tokens has been applied.
    """

    name = "evit"
    axis = Axis.TOKENS
    adds = frozenset({Adds.TOKEN_DROPPING})
    needs = frozenset({Needs.BLOCKS, Needs.CLASS_TOKEN, Needs.TOKEN_GRID})
    merges = False

    def __init__(self, drop_at: list[int] = [3, 6, 9], keep_rate: float = 0.5, fuse: bool = True):  # noqa: B006
        super().__init__()
        check_indices("drop_at", drop_at, "[3,6,9]")
        self._store_dropping(drop_at, keep_rate, fuse)

    def _apply(self, model: nn.Module, view: ModelView) -> Applied:
        dropping = self._drop_tokens(model, view)
        why = Skipped(Reason.NOT_CHOSEN, "keeps all tokens: the block is not listed in drop_at")
        others = {name: why for name in view.blocks if name not in dropping}
        fused = ", and fuse the other tokens into one token" if self.fuse else ""
        summary = f"{self._kept_in_words(dropping)}{fused}"
        return Applied(self.name, dropping, others, summary=summary)
