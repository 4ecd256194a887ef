"""One layer in the view of a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn

from efficient_ft.models.view.reason import Skipped

#: Number of projections that a fused layer combines, by the last part of its name.
_FUSED = {"qkv": 3, "kv": 2, "qk": 2}


def projections_in(name: str) -> int:
    """Return how many projections the layer of this full name combines in one matrix: 3 for ``qkv``, usually 1.

    The last two parts of the name are looked up: a convolution inside a conv-norm module is ``qkv.c``.
    """
    return next((_FUSED[part] for part in name.split(".")[-2:] if part in _FUSED), 1)


@dataclass(frozen=True)
class TokenLayout:
    """Layout of a grid's positions in a layer's input.

    Attributes:
        form: ``tokens`` (B, prefix + H·W, C); ``channels_last`` (B, H, W, C); ``channels_first`` (B, C, H, W).
            A window of a windowed attention is a map of its own: (B·windows, H·W, C).
        grid: (H, W). In the two map forms the grid of a step is read from the input's shape; this is the one at the
            model's own image size.
        prefix: tokens before the grid (class, distillation, registers).
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
    """One linear layer or convolution.

    Attributes:
        name: full module name.
        module: the `nn.Linear` or `nn.Conv2d`.
        tokens: the layout of its input, or None with the reason in `why_not`.
        why_not: why the input has no layout; None where it has one.
        in_attention: it belongs to an attention module.
        reach: full name of the attention module whose `qkv_bias_separate` must be set so that this module's forward
            is called at all (SwinV2, BEiT and EVA compute qkv from its weight otherwise), or None.
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
