"""BSR with experts: each trained block has several feed-forward networks, and each token is routed to some of them.

Source: "Block Selective Reprogramming for On-device Training of Vision Transformers", CVPR Workshops 2024, Section 5.2.
"""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from efficient_ft.methods.adapters.moe import ExpertsMethod
from efficient_ft.methods.base import Applied
from efficient_ft.methods.declarations import Axis
from efficient_ft.methods.registry import register
from efficient_ft.methods.summary import ranges, trained
from efficient_ft.methods.tokens.base import refuse_unfit_model
from efficient_ft.methods.two_axes.bsr import BSR
from efficient_ft.models.view import ModelView


@register
class BSRMoE(ExpertsMethod, BSR):
    """Train like `BSR`, with experts instead of the feed-forward networks of the trained blocks.

    The method combines `BSR` and `MoE`. The listed blocks (attention, norms, experts, gates), the final norm and the
    head are trained, and tokens are dropped. The costs in the paper's Table 6 use ``keep_rate=0.7, fuse=False``.

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
            refuse_unfit_model(view, self.name)
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
