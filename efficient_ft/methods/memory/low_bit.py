"""Save activations with a few bits per value, in groups of values.

Sources: Chen, Zheng, Yao, Wang, Stoica, Mahoney, Gonzalez, "ActNN: Reducing Training Memory Footprint via 2-Bit
Activation Compressed Training", ICML 2021 (groups, stochastic rounding); Liu, Zheng, Wang, Cen, Chen, Han, Chen, Liu,
Tang, Gonzalez, Mahoney, Cheung, "GACT: Activation Compressed Training for Generic Network Architectures", ICML 2022;
Pan et al., "Mesa", 2021 (8 bits, attention recomputed from q, k and v).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from efficient_ft.core.errors import SettingError
from efficient_ft.methods.base import Applied
from efficient_ft.methods.checks import check_choice, check_integer, check_number
from efficient_ft.methods.memory.chosen_bits import ChosenBits, ProfiledForward, bits_per_value
from efficient_ft.methods.memory.packing import ActivationPacking, uniform_policy
from efficient_ft.methods.registry import register
from efficient_ft.ops.saving import PackingState, Policy
from efficient_ft.ops.storage import BITS, GroupBits, Packer

#: Maximum number of values in a group.
_LARGEST = 2**16
#: Group sizes that ``bits=auto`` can select.
_CHOSEN_GROUPS = (64, 128, 256)


@register
class LowBit(ActivationPacking):
    """Save the tensors for the backward pass with a few bits per value. The forward pass does not change.

    For each group of consecutive values, a minimum and a step are saved in fp16. The step is the distance between two
    representable values. Tensors that can be computed from saved tensors are not saved. A layer that follows a
    normalization, GELU or a product of two activations (SwiGLU) does not save its input. In a network with BatchNorm, a
    layer that follows BatchNorm and an activation function does not save its input either. ReLU saves one bit per
    element.

    Args:
        bits: number of bits per value: 8, 4, 3, 2 or ``auto``. ``auto`` selects the number of bits for each tensor
            under the `budget`, based on how much the gradient changes if the tensor is rounded. The changes are
            measured in a profile, which consists of the first `profile_steps` steps. During the profile, all tensors
            are stored in 8 bits.
        budget: mean number of bits per value with ``bits=auto``, including the minimum and the step of each group. A
            budget of 3.5 results in the same size as ``bits=3``. If None, the budget is 4.5, which results in the same
            size as ``bits=4``.
        profile_steps: number of optimizer steps in the profile of ``bits=auto``. The measurement of each packed tensor
            extends a profile step by about half the time of a normal step. A profile step temporarily stores two
            additional copies of the gradients.
        group: number of values per group. Must be a multiple of 8 and at most 65536. The minimum and the step add 32 /
            group bits to each value. If None, a group contains 64 values, or 40 values with ``bits=2``. With
            ``bits=auto``, None means that a group size of 64, 128 or 256 is selected for each tensor.
        rounding: ``nearest``, which has a smaller error, or ``stochastic``, which is unbiased (as in ActNN).
        attention: ``fused`` saves q, k and v and recomputes attention from these tensors with torch's fused kernel.
            ``unfused`` saves q, k, v and the output of the softmax.

    Raises:
        SettingError: If a setting is invalid.
    """

    name = "low_bit"
    packs_tail = True

    def __init__(
        self,
        bits: Literal[8, 4, 3, 2, "auto"] = 4,
        budget: float | None = None,
        profile_steps: int = 1,
        group: int | None = None,
        rounding: Literal["nearest", "stochastic"] = "nearest",
        attention: Literal["fused", "unfused"] = "fused",
    ):
        super().__init__()
        if isinstance(bits, bool) or bits not in (*BITS, "auto"):
            raise SettingError("bits", bits, (*map(str, BITS), "auto"))
        if group is not None and (type(group) is not int or group % 8 or not 8 <= group <= _LARGEST):
            raise SettingError(
                "group", group, f"a multiple of 8 from 8 to {_LARGEST}, or null", "null means 64, or 40 with bits=2."
            )
        check_choice("rounding", rounding, ("nearest", "stochastic"))
        check_choice("attention", attention, ("fused", "unfused"))
        check_integer("profile_steps", profile_steps)
        self.bits, self.group, self.rounding, self.attention = bits, group, rounding, attention
        self.budget, self.profile_steps = budget, profile_steps
        self._check_budget()
        if bits == "auto":
            self._forward = ProfiledForward

    def _check_budget(self) -> None:
        if self.budget is None:
            return
        if self.bits != "auto":
            raise SettingError("budget", self.budget, f"null with bits={self.bits}", "A budget requires bits=auto.")
        least = bits_per_value((min(BITS), max(self._groups)))
        most = bits_per_value((max(BITS), min(self._groups)))
        allowed = f"null or a number of bits per value from {least:g} to {most:g}, including minimum and step"
        check_number("budget", self.budget, allowed, lambda bits: least <= bits <= most)

    @property
    def _groups(self) -> tuple[int, ...]:
        """Group sizes that may be used. Several group sizes are possible only with ``bits=auto``."""
        if self.group is not None:
            return (self.group,)
        return _CHOSEN_GROUPS if self.bits == "auto" else (40 if self.bits == 2 else 64,)

    @property
    def warmup_steps(self) -> int:  # type: ignore[override]
        if self.bits != "auto":
            return 0
        chosen = self._packing
        if not isinstance(chosen, ChosenBits):
            return self.profile_steps
        return 0 if chosen.forms is not None else self.profile_steps - chosen.steps

    @property
    def applied(self) -> Applied | None:
        report = self._applied
        note = self._packing.note() if isinstance(self._packing, ChosenBits) else None
        return report if report is None or note is None else replace(report, notes=(*report.notes, note))

    def policy(self) -> Policy:
        packer: Packer
        if isinstance(self._packing, ChosenBits):
            packer = self._packing
        else:
            assert self.bits != "auto"
            packer = GroupBits(self.bits, self._groups[0], self.rounding == "stochastic")
        fused = packer if self.attention == "fused" else None
        return uniform_policy(packer, normalized=True, derived=True, derived_all=True, fused=fused)

    def _new_state(self) -> PackingState:
        if self.bits != "auto":
            return PackingState()
        budget = bits_per_value((4, min(self._groups))) if self.budget is None else self.budget
        return ChosenBits(
            budget=budget,
            groups=self._groups,
            stochastic=self.rounding == "stochastic",
            profile_steps=self.profile_steps,
        )

    def step_end(self) -> None:
        super().step_end()
        if isinstance(self._packing, ChosenBits):
            self._packing.step_end()
