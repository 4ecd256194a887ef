"""Packing state: running ranges, seeds of stochastic rounding, fp16 overflow, and the context of a tensor."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from efficient_ft.core.distributed import rank
from efficient_ft.core.errors import UserError
from efficient_ft.core.seeding import seed_of
from efficient_ft.ops.storage.eight_bits import extremes
from efficient_ft.ops.storage.kernels import gpu

_LARGEST_HALF = 65504


#: Fraction by which a range moves towards the current values in each step (Mesa).
_SHARE = 0.1


@dataclass
class Ranges:
    """Running ranges of quantized tensors (Mesa: running mean with factor 0.9).

    If a tensor is not finite in a step, all ranges are restored to their values before that step. After n steps without
    use, a range moves by the amount of n steps, since the weights of earlier layers have changed.

    Attributes:
        by_name: Ranges (low, high) by the name of the `PackContext`, each (G,) float32.
        step: Number of completed optimizer steps.
        updated: Step of the last update, by name.
    """

    by_name: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    step: int = 0
    updated: dict[str, int] = field(default_factory=dict)
    #: Ranges and steps of their last updates before the current step, by name.
    _before: dict[str, tuple[tuple[Tensor, Tensor] | None, int]] = field(default_factory=dict)
    #: True if all tensors of the current step are finite, () bool.
    _finite: Tensor | None = None

    def update(self, name: str, x_OGI: Tensor) -> tuple[Tensor, Tensor]:
        """Move a range towards that of x (outer, G, inner), and return its low and high values, each (G,) float32.

        If x is not finite, the returned range is not finite either, so that x is unpacked to non-finite values. The
        stored range does not change.
        """
        low, high = extremes(x_OGI)
        old, step = self.by_name.get(name), self.updated.get(name, self.step)
        if old is not None:
            old = (old[0].to(low.device), old[1].to(low.device))
            share = _SHARE if self.step - step <= 1 else 1 - (1 - _SHARE) ** (self.step - step)
            low, high = old[0].lerp(low, share), old[1].lerp(high, share)
        if isinstance(low, FakeTensor):
            self.by_name[name] = (low, high)
            return low, high
        finite = (low * 0 + high * 0 == 0).all()
        self._before.setdefault(name, (self.by_name.get(name), step))
        self._finite = finite if self._finite is None else self._finite & finite.to(self._finite.device)
        if old is not None and low.device.type != "cpu":  # without a synchronization
            self.by_name[name] = (torch.where(finite, low, old[0]), torch.where(finite, high, old[1]))
        elif finite:
            self.by_name[name] = (low, high)
        self.updated[name] = self.step
        return low, high

    def end_step(self) -> None:
        """Finish an optimizer step. If a tensor of the step was not finite, restore the ranges before the step."""
        if self._finite is not None and not self._finite:
            for name, (old, step) in self._before.items():
                self.by_name.pop(name, None)
                self.updated.pop(name, None)
                if old is not None:
                    self.by_name[name], self.updated[name] = old, step
        self._before, self._finite = {}, None
        self.step += 1

    def state_dict(self) -> dict[str, Any]:
        """Return the state in plain containers."""
        ranges = {name: [low.tolist(), high.tolist(), self.updated[name]] for name, (low, high) in self.by_name.items()}
        return {"step": self.step, "by_name": ranges}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state returned by `state_dict`."""
        self.step, self._before, self._finite = state_dict["step"], {}, None
        self.by_name, self.updated = {}, {}
        for name, (low, high, step) in state_dict["by_name"].items():
            self.by_name[name] = (torch.tensor(low, dtype=torch.float32), torch.tensor(high, dtype=torch.float32))
            self.updated[name] = step


@dataclass
class Noise:
    """Seeds of stochastic rounding: a hash of the seed, the rank, the step, and the index in the step.

    The generators of torch are not used. Dropout and stochastic depth are therefore the same as without packing.

    Attributes:
        seed: torch's initial seed when the object is created.
        step: Number of completed optimizer steps.
        count: Number of seeds returned in this step.
        used: True after a seed was returned.
    """

    seed: int = field(default_factory=torch.initial_seed)
    step: int = 0
    count: int = 0
    used: bool = False

    def next_seed(self, device: torch.device) -> Tensor:
        """Return the next seed, () int64 on `device`."""
        number = seed_of(self.seed, rank(), self.step, self.count) & 0x7FFFFFFF
        self.count, self.used = self.count + 1, True
        return torch.full((), number, dtype=torch.int64, device=device)

    def end_step(self) -> None:
        """Finish an optimizer step."""
        self.step, self.count = self.step + 1, 0

    def state_dict(self) -> dict[str, Any]:
        """Return the state in plain containers."""
        return {"seed": self.seed, "step": self.step, "count": self.count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state returned by `state_dict`."""
        self.seed, self.step, self.count = (state_dict[key] for key in ("seed", "step", "count"))
        self.used = True


@dataclass
class Overflow:
    """Record of values that are too large for fp16, without synchronization with the device.

    Attributes:
        flag: True if a finite value became infinite, () bool on the device of the tensors. None if no value was
            converted since the last check.
    """

    flag: Tensor | None = None

    def to_half(self, x: Tensor) -> Tensor:
        """Convert x to fp16, and set the flag if a finite value becomes infinite."""
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
        """Set the flag if `half`, which was converted from finite values, contains an infinite value."""
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
            UserError: If a finite value became infinite since the last check.
        """
        flag, self.flag = self.flag, None
        if flag is not None and bool(flag):
            raise UserError(
                "A packed activation exceeds the range of fp16 (65504). With value_dtype=fp16, use value_dtype=bf16,"
                " which takes the same memory and has a wider range. With method=low_bit, use method=mesa."
            )


@dataclass(frozen=True)
class PackContext:
    """The context in which a tensor is packed, for packers that keep state.

    Attributes:
        name: Name of the tensor, the same in every step.
        samples: Number of samples, B. The elements of a sample are adjacent along the first dimension, whose size is a
            multiple of B.
        ranges: Running ranges, by name.
        overflow: Record of fp16 overflow.
        heads: Dimension of x and number of groups along it, for one range per head. If None, the tensor has one range.
        noise: Seeds of stochastic rounding.
    """

    name: str
    samples: int
    ranges: Ranges
    overflow: Overflow
    heads: tuple[int, int] | None = None
    noise: Noise = field(default_factory=Noise)
