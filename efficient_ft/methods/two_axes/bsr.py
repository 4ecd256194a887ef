"""BSR: train some of the blocks and drop tokens.

Source: Sarkar et al., "Block Selective Reprogramming for On-device Training of Vision Transformers", CVPR Workshops
2024. Section 5.2 of the paper describes the variant with experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

from torch import nn

from efficient_ft.methods.adapters.moe import ExpertsMethod
from efficient_ft.methods.base import Applied
from efficient_ft.methods.declarations import Adds, Axis, Needs
from efficient_ft.methods.registry import register
from efficient_ft.methods.selection.static import Blocks
from efficient_ft.methods.summary import ranges, trained
from efficient_ft.methods.tokens.evit import DropsTokens
from efficient_ft.models.view import ModelView


@register
class BSR(Blocks, DropsTokens):
    """Train the listed blocks, the final norm and the head, and drop tokens in the same way as `EViT`.

    The method combines `Blocks` and `EViT`, which can also be applied together as separate methods. Tokens are dropped
    in training and in evaluation.

    Args:
        blocks: indices of the blocks to train, counted from 0. Negative indices count from the end.
        drop_at: indices of the blocks that drop tokens. The index of the last block is not allowed. If the list is
            empty, no tokens are dropped, and all models with blocks are supported. The paper uses an empty list for
            ResNet-50 and for "Ours" in Table 5.
        keep_rate: fraction of the patch tokens that each block in `drop_at` keeps. Must be in (0, 1].
        fuse: if True, the dropped tokens are fused into one token, which is the sum of the dropped tokens weighted by
            attention.

    Raises:
        SettingError: If a setting is out of range. Raised by `apply` if a block index is out of range or repeated.
        UserError: Raised by `apply` if the model's blocks are not recognized. If tokens are dropped, UserError is also
            raised if the model has no class token or no token grid, or if its blocks are not supported.
    """

    name = "bsr"
    other_axes: tuple[Axis, ...] = (Axis.TOKENS,)
    adds = frozenset({Adds.TOKEN_DROPPING})
    needs = frozenset({Needs.BLOCKS, Needs.CLASS_TOKEN, Needs.TOKEN_GRID})
    hints: ClassVar[Mapping[Needs, str]] = {
        **Blocks.hints,
        Needs.CLASS_TOKEN: "To disable token dropping, use {drop_at}=[].",
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
        self.refuse_unfit_model(view)
        self._checked(view)  # raises errors before the model is changed
        dropping = self._drop_tokens(model, view)
        selected = super()._apply(model, view)
        dropped = self._kept_in_words(dropping)
        return replace(selected, summary=f"{selected.summary}; {dropped}")

    def _remove(self, model: nn.Module) -> None:
        DropsTokens._remove(self, model)
        super()._remove(model)


@register
class BSRMoE(ExpertsMethod, BSR):
    """Train in the same way as `BSR`, but with experts instead of the feed-forward networks in the trained blocks.

    The method combines `BSR` and `MoE`. The listed blocks (including attention, norms, experts and gates), the final
    norm and the head are trained, and tokens are dropped. The costs in Table 6 of the paper correspond to
    ``keep_rate=0.7, fuse=False``.

    Args:
        num_experts, top_k, norm_topk_prob, aux_loss_coef: see `MoE`.
        blocks: indices of the blocks that are trained and receive experts.
        drop_at, keep_rate, fuse: see `BSR`.

    Raises:
        SettingError: See `MoE` and `BSR`.
        UserError: See `MoE` and `BSR`.
    """

    name = "bsr_moe"
    other_axes: tuple[Axis, ...] = (Axis.ADAPTERS, Axis.TOKENS)
    adds = ExpertsMethod.adds | BSR.adds
    needs = ExpertsMethod.needs | BSR.needs

    def __init__(
        self,
        num_experts: int = 16,
        top_k: int = 4,
        blocks: list[int] = [3, 7, 11],  # noqa: B006
        norm_topk_prob: bool = False,
        aux_loss_coef: float = 0.0,
        drop_at: list[int] = [3, 6, 9],  # noqa: B006
        keep_rate: float = 0.5,
        fuse: bool = True,
    ):
        BSR.__init__(self, blocks, drop_at, keep_rate, fuse)
        self._store_routing(num_experts, top_k, norm_topk_prob, aux_loss_coef)

    def _apply(self, model: nn.Module, view: ModelView) -> Applied:
        if self.drop_at:
            self.refuse_unfit_model(view)
        names = self._networks_of(view, self.blocks)
        done = BSR._apply(self, model, view)
        without = trained(model)
        self._put_experts(model, names)
        summary = done.summary.replace(f": {without}", f": {trained(model)}")
        where = ranges(name.removesuffix(".mlp") for name in names)
        return replace(done, summary=f"{summary}; {self.num_experts} experts in {where}", routed=names)

    def _remove(self, model: nn.Module) -> None:
        self._take_experts(model)
        BSR._remove(self, model)
