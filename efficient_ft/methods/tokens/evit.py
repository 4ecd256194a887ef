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
from efficient_ft.methods.tokens.base import (
    DroppingForward,
    give_forwards,
    grid_positions,
    refuse_other_blocks,
    refuse_without_blocks,
    refuse_without_class_token,
    take_forwards,
)
from efficient_ft.models.view import ModelView, default_image_size, view
from efficient_ft.ops.tokens import num_kept


class EViT(Method):
    """Keep in some blocks only the patch tokens that the class token attends to most.

    Between attention and feed-forward network, in training and in evaluation, ``keep_rate`` of the tokens stay, in the
    order of the attention, mean over the heads; the others become one, weighted by it. Attention stays fused: the
    class token's row is computed beside it. The trained weights are the model's own, but belong with the dropping:
    what is exported notes it.

    Args:
        drop_at: blocks in which tokens are dropped, counted from 0, negative ones from the end; not the last.
        keep_rate: share of the patch tokens kept, above 0 and at most 1.
        fuse: what is dropped becomes one more token.
    """

    name = "evit"
    axis = "tokens"
    merges = False

    def __init__(self, drop_at: list[int] = [3, 6, 9], keep_rate: float = 0.5, fuse: bool = True):  # noqa: B006
        super().__init__()
        check_dropping(drop_at, keep_rate, fuse)
        self.drop_at, self.keep_rate, self.fuse = list(drop_at), keep_rate, fuse

    def _apply(self, model: nn.Module) -> Applied:
        chosen = drop_tokens(model, self.name, self.drop_at, self.keep_rate, self.fuse)
        return Applied(
            self.name, chosen, {name: "all tokens flow on" for name in view(model).blocks if name not in chosen}
        )

    def _remove(self, model: nn.Module) -> None:
        take_forwards(model)


def drop_tokens(model: nn.Module, who: str, drop_at: Sequence[int], keep_rate: float, fuse: bool) -> tuple[str, ...]:
    """Make the blocks at `drop_at` drop tokens, for the method `who`; returns their names.

    Raises:
        SettingError: an index outside the model, of its last block, or twice.
        UserError: the model has no class token or blocks of another form, or something in it needs all tokens.
    """
    seen = view(model)
    instead = " Without dropping: method.bsr.drop_at=[] (ResNet-50: method=bsr_cnn)." if who == "bsr" else ""
    refuse_without_class_token(seen, who, instead)
    refuse_without_blocks(seen, who)
    count = len(seen.blocks)
    places = [b % count if -count <= b < count else b for b in drop_at]
    if not all(0 <= b < count - 1 for b in places):
        raise SettingError(
            f"method.{who}.drop_at",
            list(drop_at),
            f"indices from 0 to {count - 2}: {seen.name} has {count} blocks, and a drop in the last does nothing",
        )
    if len(set(places)) < len(places):
        raise SettingError(f"method.{who}.drop_at", list(drop_at), "each block once")
    chosen = tuple(seen.blocks[b] for b in sorted(places))
    refuse_other_blocks(model, who, chosen)
    _refuse_few(seen, who, chosen, keep_rate, fuse)
    settings = partial(num_kept, keep_rate=keep_rate), fuse
    give_forwards(model, seen, who, dict.fromkeys(chosen, (DroppingForward, settings)))
    return chosen


def _refuse_few(seen: ModelView, who: str, chosen: Sequence[str], keep_rate: float, fuse: bool) -> None:
    """Raise SettingError where a block is left so few tokens that as many flow on as came in."""
    count = grid_positions(seen, who)
    for name in chosen:
        kept = num_kept(count, keep_rate)
        left = kept + (fuse and kept < count)
        if keep_rate < 1 and left >= count:
            height, width = default_image_size(seen.model)
            raise SettingError(
                f"method.{who}.keep_rate",
                keep_rate,
                f"a share that leaves fewer than came in: of the {count} patch tokens of {name} it keeps {kept}"
                + (" and fuses the rest into one" if fuse else ""),
                f"Take larger images (here {height}×{width}), or drop in fewer blocks.",
            )
        count = left


def check_dropping(drop_at: Any, keep_rate: Any, fuse: Any) -> None:
    """Raise SettingError for settings that no model can be given."""
    if not isinstance(drop_at, Sequence) or isinstance(drop_at, str) or not all(type(b) is int for b in drop_at):
        raise SettingError("drop_at", drop_at, "a list of whole numbers, e.g. [3,6,9]")
    if not drop_at:
        raise SettingError("drop_at", "[]", "at least one block")
    if isinstance(keep_rate, bool) or not isinstance(keep_rate, int | float) or not 0 < keep_rate <= 1:
        raise SettingError("keep_rate", keep_rate, "a number above 0 and at most 1")
    if not isinstance(fuse, bool):
        raise SettingError("fuse", fuse, ("true", "false"))
