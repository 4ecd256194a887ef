"""LBP-WHT: a low-rank backward pass with a block-wise Walsh–Hadamard projection.

Source: Yang, Chiang, Li, Marculescu, Marculescu, "Efficient Low-rank Backpropagation for Vision Transformer
Adaptation", NeurIPS 2023. The default padding ``ortho`` uses an orthonormal basis of the cropped rows and is not part
of the paper. With this padding, the gradient is exact at full rank. The settings `padding="reflect",
as_published=True` follow descriptions of the authors' implementation (see docs/notices.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from efficient_ft.core.distributed import all_reduce_sum
from efficient_ft.methods.backprop.low_rank import LowRank, LowRankBackward, refuse_order
from efficient_ft.methods.base import Applied
from efficient_ft.methods.checks import check_choice, check_integer
from efficient_ft.methods.registry import register
from efficient_ft.methods.skip import refuse_skip
from efficient_ft.models.view import Layer, ModelView
from efficient_ft.ops.projection import BLOCK, Padding, Pairs, WalshProjector, low_pass_l1, low_pass_linf, lowest_first

ORDERS = {"l1": 15, "linf": 8, "lhe": 15}


@register
class LBPWHT(LowRankBackward):
    """Approximate the gradients of linear layers with a few Walsh–Hadamard bases for each 8×8 block of the token grid.

    Args:
        bases: criterion for the selection of R of the 64 bases (i, j). ``l1``: all bases with i + j ≤ order − 1. The
            order must be from 1 to 15, and R = order(order+1)/2 for orders up to 8. ``linf``: all bases with max(i, j)
            ≤ order − 1. The order must be from 1 to 8, and R = order². ``lhe``: for each layer, the R bases with the
            highest energy in the output gradient g_y, where R is the same as for ``l1``. The energy is summed over the
            first `profile_steps` steps, which run the exact backward pass.
        order: number that determines which bases are selected (see `bases`). If the last stage is trained, the paper
            recommends orders from 4 (R = 10) to 6 (R = 21).
        padding: padding for grids whose height or width is not a multiple of 8. With ``ortho`` and ``zero``, the
            gradient is exact at full rank. With ``reflect`` (as published), the gradient is not exact at any rank.
        as_published: if True, choose the layers as reported for the authors' implementation. Fused qkv layers whose
            forward method is never called (as in SwinV2) keep the exact backward pass. Layers are projected even if
            projection costs more than the exact backward pass (as for talking heads).
        profile_steps: number of optimizer steps over which ``lhe`` measures the energy.
        skip: parts of layer names, such as ``attention``, ``fc2`` or ``mlp.fc2``. Layers whose names contain one of
            these parts keep the exact backward pass. ``*`` matches any part.
        fused: if True, fuse operations on a CPU. In bf16, a feed-forward network with two low-rank layers runs as one
            operation. In fp32, GELU and the preceding frozen BatchNorm run as one operation. Fusion saves time and
            activation memory, but numba uses about 30 MiB, or about 110 MiB in a process that compiles kernels. If
            None, the operations are fused only in networks with BatchNorm before GELU (EfficientFormer), which benefit
            most from fusion.

    Raises:
        SettingError: If a setting is out of range.
        UserError: See `LowRankBackward`. Also raised if a grid is too small for ``reflect`` padding.
    """

    name = "lbp_wht"

    def __init__(
        self,
        bases: Literal["l1", "linf", "lhe"] = "l1",
        order: int = 4,
        padding: Padding = "ortho",
        as_published: bool = False,
        profile_steps: int = 16,
        skip: Sequence[str] | None = None,
        fused: bool | None = None,
    ):
        check_choice("bases", bases, ORDERS)
        refuse_order(order, ORDERS[bases], f" with bases={bases}")
        check_choice("padding", padding, ("ortho", "zero", "reflect"))
        check_integer("profile_steps", profile_steps)
        refuse_skip(skip)
        self.bases, self.order, self.padding = bases, order, padding
        self.as_published, self.profile_steps = as_published, profile_steps
        self.profiles, self.skip, self.fused = bases == "lhe", skip, fused
        self._steps = 0
        self._layers: dict[str, LowRank] = {}
        self._restored: dict[str, Any] | None = None

    @property
    def warmup_steps(self) -> int:  # type: ignore[override]
        return self.profile_steps - self._steps if self.profiles else 0

    @property
    def acts_per_step(self) -> bool:  # type: ignore[override]
        return self.warmup_steps > 0

    def projector_for(self, layer: Layer) -> WalshProjector:
        return WalshProjector(
            low_pass_linf(self.order) if self.bases == "linf" else low_pass_l1(self.order), self.padding
        )

    def _apply(self, model: nn.Module, view: ModelView) -> Applied:
        applied = super()._apply(model, view)
        if self.profiles:
            self._layers = self._changed(model)
            if self._restored is not None:
                self.load_state_dict(self._restored)
        return applied

    def step_end(self) -> None:
        super().step_end()
        if not self.profiles or self._steps >= self.profile_steps:
            return
        self._steps += 1
        if self._steps == self.profile_steps:
            for how in self._layers.values():
                how.projector = WalshProjector(self._most_energy(how.energy), self.padding)
                how.energy = None
            self._stop_watching()

    def _most_energy(self, energy: Tensor | None) -> Pairs:
        """Return the R bases with the highest energy by increasing sequency, or those of ``l1`` without a gradient."""
        pairs = low_pass_l1(self.order)
        energy = torch.zeros(BLOCK, BLOCK, dtype=torch.float64) if energy is None else energy
        energy = all_reduce_sum(energy)
        # No gradient reaches this layer. For example, this applies to a layer in the last block if the classification
        # head uses only the class token.
        if not energy.any():
            return pairs
        top = energy.flatten().topk(len(pairs)).indices.tolist()
        return lowest_first((k // BLOCK, k % BLOCK) for k in top)

    def state_dict(self) -> dict[str, Any]:
        if not self.profiles:
            return {}
        chosen = {n: h.projector.pairs for n, h in self._layers.items() if isinstance(h.projector, WalshProjector)}
        return {
            "steps": self._steps,
            "energy": {n: h.energy.tolist() for n, h in self._layers.items() if h.energy is not None},
            "chosen": {n: [list(p) for p in pairs] for n, pairs in chosen.items()},
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if not self.profiles or not state_dict:
            return
        self._restored = state_dict  # restored again by `apply` if `apply` is called later
        self._steps = state_dict["steps"]
        if not self.acts_per_step:
            self._stop_watching()
        for name, how in self._layers.items():
            if name in state_dict["chosen"]:
                how.projector = WalshProjector(lowest_first(tuple(p) for p in state_dict["chosen"][name]), self.padding)
            if name in state_dict["energy"]:
                how.energy = torch.tensor(state_dict["energy"][name], dtype=torch.float64)
