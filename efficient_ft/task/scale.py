"""The scale of the targets of a regression."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Scale:
    """Mean and standard deviation of each target. A scaled target is ``(target - mean) / std``."""

    mean: Sequence[float]
    std: Sequence[float]

    def restored(self, scaled: Tensor) -> Tensor:
        """Convert scaled targets (N, targets) to the units of the user, float64 on the CPU."""
        mean, std = (torch.tensor(values, dtype=torch.float64) for values in (self.mean, self.std))
        return scaled.cpu().double() * std + mean
