"""The layers in the view of a model, and the reasons why a method does not change a part of a model."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Literal

from torch import Tensor, nn


class Reason(Enum):
    """The reasons why a method does not change a part of a model. The value of each member is shown in reports.

    The view of the model determines the reasons in the first group, and methods determine the reasons in the second
    group. For a reason that is not listed, a method uses `OTHER` with a detail.
    """

    HEAD = "the head"
    NEW = "newly initialized, outside of the pretrained network"
    STEM = "the stem or patch embedding"
    GROUPED_CONVOLUTION = "a depthwise or grouped convolution"
    SPATIAL_CONVOLUTION = "a convolution that is not 1×1 with stride 1"
    NOT_CALLED = "the model does not call the forward method of the layer"
    NOT_FROM_IMAGES = "the input does not come from the images"
    SINGLE_POSITION = "a feature map with a single position"
    NO_TOKEN_DIMENSION = "an input without a token dimension"
    NO_GRID = "tokens without positions on a grid"
    ROUTED = "the input consists of routed tokens of different images"

    FROZEN = "frozen by the selection"
    NOT_CHOSEN = "not chosen"
    NOT_ATTENTION = "not in an attention module"
    OTHER_FORM = "a module with a different structure"
    QUANTIZED = "quantized"
    SHARED = "the weight is used in several places, so adapters could not be merged"
    TOO_NARROW = "no wider than the rank"
    EXACT_IS_CHEAPER = "exact is cheaper"
    AS_PUBLISHED = "excluded, as published"
    UNPACKED_OPERATION = "dense, because packing does not support the operation"
    NO_EFFECT = "the setting has no effect here"
    OTHER = "for another reason"


@dataclass(frozen=True)
class Skipped:
    """A part of a model that a method does not change.

    Args:
        reason: The reason as a member of the enumeration.
        detail: The reason as text for reports. The default is the text of `reason`.
    """

    reason: Reason
    detail: str = ""

    def __str__(self) -> str:
        return self.detail or self.reason.value


#: Numbers of projections that fused layers combine. The keys are parts of layer names.
_FUSED = {"qkv": 3, "kv": 2, "qk": 2}


def projections_in(name: str) -> int:
    """Return the number of projections that a layer combines in one matrix.

    The number is 3 for a layer named ``qkv``, and 1 for most layers.
    """
    # The second-to-last part is also compared, because a convolution in a conv-norm module is named ``qkv.c``.
    return next((_FUSED[part] for part in name.split(".")[-2:] if part in _FUSED), 1)


@dataclass(frozen=True)
class TokenLayout:
    """The layout of the token grid in a layer's input.

    Attributes:
        form: ``tokens`` (B, prefix + H·W, C), ``channels_last`` (B, H, W, C) or ``channels_first`` (B, C, H, W). In
            windowed attention, each window is a separate map (B·windows, H·W, C).
        grid: Grid (H, W) at the model's image size. For ``channels_last`` and ``channels_first``, the actual grid is
            given by the shape of the input.
        prefix: Number of class, distillation and register tokens before the grid.
    """

    form: Literal["tokens", "channels_last", "channels_first"]
    grid: tuple[int, int]
    prefix: int = 0

    @property
    def count(self) -> int:
        """The number of tokens, prefix + H·W."""
        return self.prefix + self.grid[0] * self.grid[1]


@dataclass(frozen=True, eq=False)
class Layer:
    """A linear layer or convolution of a model.

    Attributes:
        name: Full module name.
        module: The `nn.Linear` or `nn.Conv2d` module.
        tokens: Layout of the input, or None if the input has no layout.
        why_not: Reason why the input has no layout, or None if the input has a layout.
        in_attention: True if the layer belongs to an attention module.
        reach: Full name of the attention module that calls this layer only if the module's attribute
            `qkv_bias_separate` is True, or None for other layers. By default, SwinV2, BEiT and EVA use the weight of
            such a layer directly.
    """

    name: str
    module: nn.Module
    tokens: TokenLayout | None
    why_not: Skipped | None = None
    in_attention: bool = False
    reach: str | None = None

    @property
    def channels(self) -> tuple[int, int]:
        """The numbers of input and output channels (C_in, C_out)."""
        assert isinstance(self.module.weight, Tensor)
        out, in_ = self.module.weight.shape[:2]
        return int(in_), int(out)
