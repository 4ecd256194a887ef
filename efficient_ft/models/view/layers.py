"""One layer in the view of a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn

from efficient_ft.models.view.reason import Skipped

#: Number of projections that a fused layer combines, by the last part of its name.
_FUSED = {"qkv": 3, "kv": 2, "qk": 2}


def projections_in(name: str) -> int:
    """Return the number of projections that the layer combines in one matrix: 3 for ``qkv``, usually 1.

    The last two parts of the name are checked: a convolution in a conv-norm module is named ``qkv.c``.
    """
    return next((_FUSED[part] for part in name.split(".")[-2:] if part in _FUSED), 1)


@dataclass(frozen=True)
class TokenLayout:
    """Layout of a grid's positions in a layer's input.

    Attributes:
        form: ``tokens`` (B, prefix + H·W, C); ``channels_last`` (B, H, W, C); ``channels_first`` (B, C, H, W). Each
            window of windowed attention is a separate map (B·windows, H·W, C).
        grid: (H, W) at the image size of the model. For the two map layouts, the grid of a step is read from the
            input's shape.
        prefix: number of tokens before the grid (class, distillation, registers).
    """

    form: Literal["tokens", "channels_last", "channels_first"]
    grid: tuple[int, int]
    prefix: int = 0

    @property
    def count(self) -> int:
        """N = prefix + H·W."""
        return self.prefix + self.grid[0] * self.grid[1]


@dataclass(frozen=True, eq=False)
class Layer:
    """A linear layer or convolution.

    Attributes:
        name: full module name.
        module: the `nn.Linear` or `nn.Conv2d`.
        tokens: layout of its input; None if there is none.
        why_not: reason why the input has no layout, or None.
        in_attention: True if it belongs to an attention module.
        reach: full name of the attention module whose `qkv_bias_separate` must be set so that this module's forward is
            called (SwinV2, BEiT and EVA otherwise use its weight directly), or None.
    """

    name: str
    module: nn.Module
    tokens: TokenLayout | None
    why_not: Skipped | None = None
    in_attention: bool = False
    reach: str | None = None

    @property
    def channels(self) -> tuple[int, int]:
        """(C_in, C_out)."""
        assert isinstance(self.module.weight, Tensor)
        out, in_ = self.module.weight.shape[:2]
        return int(in_), int(out)
