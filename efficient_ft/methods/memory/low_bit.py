"""Low-bit activations: 8 to 2 bits per value between the forward and the backward pass, in groups.

Sources: Chen, Zheng, Yao, Wang, Stoica, Mahoney, Gonzalez, "ActNN: Reducing Training Memory Footprint via 2-Bit
Activation Compressed Training", ICML 2021 (groups, stochastic rounding); Liu, Zheng, Wang, Cen, Chen, Han, Chen, Liu,
Tang, Gonzalez, Mahoney, Cheung, "GACT: Activation Compressed Training for Generic Network Architectures", ICML 2022;
Pan et al., "Mesa", 2021 (8 bits, attention recomputed from q, k and v).
"""

from __future__ import annotations

from typing import Literal

from efficient_ft.core.errors import SettingError
from efficient_ft.methods.memory.packing import ActivationPacking
from efficient_ft.methods.registry import register
from efficient_ft.ops.packed import Policy
from efficient_ft.ops.packing import BITS, GroupBits

#: The largest group.
_LARGEST = 2**16


@register
class LowBit(ActivationPacking):
    """Keep what the backward pass needs in a few bits per value; the forward pass is not changed.

    Each group of consecutive values keeps its minimum and its step, the spacing of the values that it can represent, in
    fp16. What can be computed from a kept tensor is not kept again: a layer after a normalization, GELU, a product of
    two activations (SwiGLU) or, in a network with BatchNorm, after BatchNorm and its activation function, keeps nothing
    of its own. ReLU keeps a bit per element.

    Args:
        bits: of a value: 8, 4, 3 or 2.
        group: values of a group, a multiple of 8 up to 65536; None: 64, or 40 with 2 bits. The minimum and the step add
            32 / group bits to each value.
        rounding: ``nearest``, with a smaller error, or ``stochastic``, whose mean is the exact value (as in ActNN).
        attention: ``fused`` keeps q, k and v and recomputes attention from them by torch's fused kernel; ``unfused``
            keeps q, k, v and softmax's output.

    Raises:
        SettingError: a value outside these.
    """

    name = "low_bit"
    packs_tail = True

    def __init__(
        self,
        bits: Literal[8, 4, 3, 2] = 4,
        group: int | None = None,
        rounding: Literal["nearest", "stochastic"] = "nearest",
        attention: Literal["fused", "unfused"] = "fused",
    ):
        super().__init__()
        if isinstance(bits, bool) or bits not in BITS:
            raise SettingError("bits", bits, map(str, BITS))
        if group is not None and (type(group) is not int or group % 8 or not 8 <= group <= _LARGEST):
            raise SettingError(
                "group", group, f"a multiple of 8 from 8 to {_LARGEST}, or null", "null means 64, and 40 with 2 bits."
            )
        for setting, value, allowed in (
            ("rounding", rounding, ("nearest", "stochastic")),
            ("attention", attention, ("fused", "unfused")),
        ):
            if value not in allowed:
                raise SettingError(setting, value, allowed)
        self.bits, self.group, self.rounding, self.attention = bits, group, rounding, attention

    def policy(self) -> Policy:
        group = (40 if self.bits == 2 else 64) if self.group is None else self.group
        packer = GroupBits(self.bits, group, self.rounding == "stochastic")
        return Policy(
            product=packer,
            norm=packer,
            attention=packer,
            activation=packer,
            normalized=True,
            derived=True,
            derived_all=True,
            fused=packer if self.attention == "fused" else None,
        )
