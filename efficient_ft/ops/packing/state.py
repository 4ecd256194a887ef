"""State of packing: running ranges of 8-bit tensors, overflow of fp16, and the context a tensor is packed in."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from efficient_ft.core.errors import UserError
from efficient_ft.ops.packing.eight_bits import extremes
from efficient_ft.ops.packing.kernels import gpu

_LARGEST_HALF = 65504


@dataclass
class Ranges:
    """Running ranges of quantized tensors (Mesa: running mean with factor 0.9).

    Attributes:
        by_name: (low, high), each (G,) float32, by the name of the `PackContext`.
    """

    by_name: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def update(self, name: str, x_OGI: Tensor) -> tuple[Tensor, Tensor]:
        """Move a range towards that of x (outer, G, inner), and return it: low and high, each (G,) float32."""
        low, high = extremes(x_OGI)
        if name in self.by_name:
            old_low, old_high = (old.to(low.device) for old in self.by_name[name])
            low, high = old_low.lerp(low, 0.1), old_high.lerp(high, 0.1)
        self.by_name[name] = (low, high)
        return low, high


@dataclass
class Overflow:
    """Record whether a value was too large for fp16, without a synchronization with the device.

    Attributes:
        flag: () bool on the device of the tensors; None: no value was converted since the last check.
    """

    flag: Tensor | None = None

    def to_half(self, x: Tensor) -> Tensor:
        """Return x in fp16, and set the flag if a finite value becomes infinite."""
        if isinstance(x, FakeTensor) or not x.numel():
            return x.to(torch.float16)
        flag = self._flag(x.device)
        if gpu.supports(x) and flag.device == x.device:
            return gpu.convert(x, torch.float16, flag)
        low, high = x.aminmax()
        overflows = (low < -_LARGEST_HALF) | (high > _LARGEST_HALF)
        if x.device.type != "cpu" or not (low.isfinite() & high.isfinite()):  # x may hold inf or nan
            overflows = ((x.abs() > _LARGEST_HALF) & x.isfinite()).any()
        flag |= overflows.to(flag.device)
        return x.to(torch.float16)

    def watch(self, half: Tensor) -> None:
        """Set the flag if a value of `half`, converted from finite values, is infinite."""
        if not isinstance(half, FakeTensor):
            flag = self._flag(half.device)
            flag |= half.isinf().any().to(flag.device)

    def _flag(self, device: torch.device) -> Tensor:
        if self.flag is None:
            self.flag = torch.zeros((), dtype=torch.bool, device=device)
        return self.flag

    def check(self) -> None:
        """Clear the flag.

        Raises:
            UserError: a finite value became infinite since the last check.
        """
        flag, self.flag = self.flag, None
        if flag is not None and bool(flag):
            raise UserError(
                "A packed activation is larger than fp16 holds (65504). With value_dtype=fp16 choose value_dtype=bf16,"
                " which takes the same memory and has a wider range; instead of method=low_bit choose method=mesa."
            )


@dataclass(frozen=True)
class PackContext:
    """The context in which a tensor is packed, for packers that keep state.

    Attributes:
        name: of the tensor, the same in every step.
        samples: B. The elements of a sample are adjacent along the first dimension, whose size is a multiple of B.
        ranges: running ranges, by name.
        overflow: of fp16.
        heads: (dimension of x, number of groups that it is divided into) for one range per head; None: one range.
    """

    name: str
    samples: int
    ranges: Ranges
    overflow: Overflow
    heads: tuple[int, int] | None = None
