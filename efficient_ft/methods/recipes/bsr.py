"""BSR: a few blocks train, and tokens that matter little are dropped on the way.

Source: "Block Selective Reprogramming for On-device Training of Vision Transformers", CVPR Workshops 2024.
"""

from __future__ import annotations

from torch import nn

from efficient_ft.methods.base import Applied
from efficient_ft.methods.selection.static import Blocks, refuse_adapted, refuse_twice
from efficient_ft.methods.tokens.base import take_forwards
from efficient_ft.methods.tokens.evit import check_dropping, drop_tokens
from efficient_ft.models.view import view


class BSR(Blocks):
    """Train the blocks listed, the final norm and the head, and drop tokens as `EViT` does, in evaluation too.

    The selection of `Blocks` and the dropping of `EViT` in one; each can be had alone, and stacked.

    Args:
        blocks: those that train, counted from 0, negative ones from the end.
        drop_at: blocks in which tokens are dropped; not the last. None of them ([]): no token is dropped, and any model
            with blocks will do (BSR on ResNet-50; "Ours" in the paper's Table 5).
        keep_rate: share of the patch tokens kept in each of them, above 0 and at most 1.
        fuse: what is dropped becomes one more token.
    """

    name = "bsr"
    merges = False

    def __init__(
        self,
        blocks: list[int] = [3, 7, 11],  # noqa: B006
        drop_at: list[int] = [3, 6, 9],  # noqa: B006
        keep_rate: float = 0.5,
        fuse: bool = True,
    ):
        super().__init__(blocks)
        check_dropping([0] if drop_at == [] else drop_at, keep_rate, fuse)
        self.drop_at, self.keep_rate, self.fuse = list(drop_at), keep_rate, fuse

    def _apply(self, model: nn.Module) -> Applied:
        refuse_adapted(model, self.name)
        self._chosen(model)  # what is wrong with the blocks is said before anything is changed
        refuse_twice(view(model), f"method.{self.name}.blocks", self.blocks)
        dropping = drop_tokens(model, self.name, self.drop_at, self.keep_rate, self.fuse) if self.drop_at else ()
        selected = super()._apply(model)
        return Applied(
            self.name,
            selected.touched,
            selected.skipped,
            notes=(f"{self.keep_rate:g} of the patch tokens stay in {', '.join(dropping)}",) if dropping else (),
        )

    def _remove(self, model: nn.Module) -> None:
        take_forwards(model)
        super()._remove(model)
