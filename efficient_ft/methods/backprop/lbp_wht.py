"""LBP-WHT: low-rank backward by a block-wise Walsh–Hadamard projection.

Source: Yang, Chiang, Li, Marculescu, Marculescu, "Efficient Low-rank Backpropagation for Vision Transformer
Adaptation", NeurIPS 2023. The default padding is ours: an orthonormal basis of the cropped rows, which is exact at
full rank and closer to the exact gradient at every rank we measured; `padding="reflect", as_published=True` is theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from efficient_ft.core.distributed import all_reduce_sum
from efficient_ft.core.errors import SettingError
from efficient_ft.methods.backprop.low_rank import LowRank, LowRankBackward, refuse_order
from efficient_ft.methods.base import Applied
from efficient_ft.methods.registry import register
from efficient_ft.methods.skip import refuse_skip
from efficient_ft.models.view import Layer, ModelView
from efficient_ft.ops.projection import BLOCK, Padding, Pairs, WalshProjector, low_pass_l1, low_pass_linf, lowest_first

ORDERS = {"l1": 15, "linf": 8, "lhe": 15}


@register
class LBPWHT(LowRankBackward):
    """Gradients of linear layers through a few Walsh–Hadamard bases of each 8×8 block of the token grid.

    Args:
        bases: which of the 64 bases. ``l1``: i + j ≤ order − 1 (order 1–15; R = order(order+1)/2 up to order 8).
            ``linf``: max(i, j) ≤ order − 1 (order 1–8, R = order²). ``lhe``: the R = order(order+1)/2 of most energy
            in each layer's g_y over the first `profile_steps` steps, which run with the exact backward.
        order: of the low-pass selection; 4 (R = 10) to 6 (R = 21) is the paper's advice.
        padding: of grids that are no multiple of 8: ``ortho``, ``zero`` (both exact at full rank), ``reflect`` (as
            published: not exact at any rank).
        as_published: as the authors ran it: a qkv whose forward was never called (SwinV2) stays exact, and layers
            are projected even where that costs more than the exact backward (talking heads).
        profile_steps: optimizer steps that ``lhe`` profiles.
        skip: parts of the names of layers that stay exact: ``attention``, ``fc2``, ``mlp.fc2``; ``*`` is any part.
        fused: on a CPU compute GELU, and a frozen BatchNorm before it, in one pass each way: less time and fewer bytes,
            and about 100 MiB for the compiler of the kernels (numba). None: only in networks that have BatchNorm
            before GELU (EfficientFormer), where it gains most.

    Raises:
        SettingError: a value outside these.
        UserError: as in `LowRankBackward`; with ``reflect`` padding also a grid too small to be mirrored.
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
        if bases not in ORDERS:
            raise SettingError("bases", bases, ORDERS)
        refuse_order(order, ORDERS[bases], f" with bases={bases}")
        if padding not in ("ortho", "zero", "reflect"):
            raise SettingError("padding", padding, ("ortho", "zero", "reflect"))
        if type(profile_steps) is not int or profile_steps < 1:
            raise SettingError("profile_steps", profile_steps, "an integer >= 1")
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

    def remove(self, model: nn.Module) -> None:
        super().remove(model)
        self._steps, self._layers, self._restored = 0, {}, None  # a new model gets a new profile

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
        """The R bases of most energy, lowest first; those of LP_L1 for a layer that no gradient on the grid reached."""
        pairs = low_pass_l1(self.order)
        energy = torch.zeros(BLOCK, BLOCK, dtype=torch.float64) if energy is None else energy
        energy = all_reduce_sum(energy)
        if not energy.any():  # the last block of a model that classifies by its class token, say
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
        self._restored = state_dict  # for a model that it is applied to later
        self._steps = state_dict["steps"]
        if not self.acts_per_step:
            self._stop_watching()
        for name, how in self._layers.items():
            if name in state_dict["chosen"]:
                how.projector = WalshProjector(lowest_first(tuple(p) for p in state_dict["chosen"][name]), self.padding)
            if name in state_dict["energy"]:
                how.energy = torch.tensor(state_dict["energy"][name], dtype=torch.float64)
