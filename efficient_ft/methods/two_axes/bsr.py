"""BSR: a few blocks are trained, and unimportant tokens are dropped.

Source: "Block Selective Reprogramming for On-device Training of Vision Transformers", CVPR Workshops 2024.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

from torch import nn

from efficient_ft.methods.base import Applied
from efficient_ft.methods.declarations import Adds, Axis, Needs
from efficient_ft.methods.registry import register
from efficient_ft.methods.selection.static import Blocks
from efficient_ft.methods.summary import ranges
from efficient_ft.methods.tokens.base import refuse_unfit_model, take_forwards
from efficient_ft.methods.tokens.evit import DropsTokens
from efficient_ft.models.view import ModelView


@register
class BSR(Blocks, DropsTokens):
    """Train the listed blocks, the final norm and the head, and drop tokens like `EViT` in training and evaluation.

    The method combines the selection of `Blocks` with the token dropping of `EViT`. Both are also available as separate
    methods and can be stacked.

    Args:
        blocks: indices of the blocks to train, counted from 0. Negative indices count from the end.
        drop_at: indices of the blocks that drop tokens. The last block is not allowed. If the list is empty, no tokens
            are dropped, and any model with blocks is supported (BSR on ResNet-50; "Ours" in the paper's Table 5).
        keep_rate: fraction of the patch tokens that each of these blocks keeps, above 0 and at most 1.
        fuse: if True, the dropped tokens are fused into one token, weighted by attention.

    Raises:
        SettingError: If a value is not allowed. Raised by `apply` if a block index is out of range or repeated.
        UserError: Raised by `apply` if the model's blocks are not recognized, or if tokens are dropped in a model
            without a class token, without a token grid, or with unsupported blocks.
    """

    name = "bsr"
    other_axes: tuple[Axis, ...] = (Axis.TOKENS,)
    adds = frozenset({Adds.TOKEN_DROPPING})
    needs = frozenset({Needs.BLOCKS, Needs.CLASSIFIER, Needs.CLASS_TOKEN, Needs.TOKEN_GRID})
    hints: ClassVar[Mapping[Needs, str]] = {
        **Blocks.hints,
        Needs.CLASS_TOKEN: "Without dropping: method.bsr.drop_at=[] (ResNet-50: method=bsr_cnn).",
    }
    merges = False
    _each_once = True

    def __init__(
        self,
        blocks: list[int] = [3, 7, 11],  # noqa: B006
        drop_at: list[int] = [3, 6, 9],  # noqa: B006
        keep_rate: float = 0.5,
        fuse: bool = True,
    ):
        super().__init__(blocks)
        self._store_dropping(drop_at, keep_rate, fuse)
        if not drop_at:
            self.other_axes = tuple(axis for axis in self.other_axes if axis != Axis.TOKENS)
            self.adds = self.adds - {Adds.TOKEN_DROPPING}
            self.needs = self.needs - {Needs.CLASS_TOKEN, Needs.TOKEN_GRID}

    def _apply(self, model: nn.Module, view: ModelView) -> Applied:
        if not self.drop_at:
            return super()._apply(model, view)
        refuse_unfit_model(view, self.name)
        self._names(view)  # validates `blocks` before the model is changed
        dropping = self._drop_tokens(model, view)
        selected = super()._apply(model, view)
        dropped = f"{ranges(dropping)} each keep {self.keep_rate:g} of the patch tokens"
        return replace(selected, summary=f"{selected.summary}; {dropped}")

    def _remove(self, model: nn.Module) -> None:
        take_forwards(model, self.name)
        super()._remove(model)
