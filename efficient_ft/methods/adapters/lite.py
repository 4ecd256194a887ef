"""Lite residual module that TinyTL (see `tinytl`) and Rep-Net (see `repnet`) add in parallel with the blocks of a CNN.

Weight standardization: Qiao, Wang, Liu, Shen, Yuille, "Micro-Batch Training with Batch-Channel Normalization and Weight
Standardization", 2019.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import StdConv2d
from torch import Tensor, nn

from efficient_ft.core.errors import SettingError, UserError
from efficient_ft.models.view import ModelView

#: Number of channels per group in all GroupNorm layers.
GROUP = 8
#: Constant added to the variance in weight standardization for numerical stability.
EPS = 1e-6


class LiteResidual(nn.Module):
    """Sequence of 2×2 average pooling, k×k convolution, GroupNorm, ReLU, 1×1 convolution and GroupNorm.

    Both convolutions use weight standardization. The scale of the last norm is initialized to 0, so that the initial
    output is 0.

    Args:
        inputs: number of input channels. Must be a multiple of `GROUP`.
        outputs: number of output channels. Must be a multiple of `GROUP`.
        kernel: kernel size k of the first convolution. Must be odd.
        groups: number of groups of the k×k convolution.
        stride: stride of the parallel block.
    """

    def __init__(self, inputs: int, outputs: int, kernel: int, groups: int, stride: int) -> None:
        super().__init__()
        self.conv1 = StdConv2d(inputs, inputs, kernel, stride=stride, groups=groups, eps=EPS)
        self.norm1 = nn.GroupNorm(inputs // GROUP, inputs)
        self.act = nn.ReLU(inplace=True)
        self.conv2 = StdConv2d(inputs, outputs, 1, eps=EPS)
        self.norm2 = nn.GroupNorm(outputs // GROUP, outputs)
        nn.init.zeros_(self.norm2.weight)

    def forward(self, x: Tensor, size: torch.Size) -> Tensor:
        """Return the output for `x` (B, inputs, H, W), resized by bilinear interpolation to (B, outputs, *size).

        `size` is the output size (H, W) of the parallel block. An input whose height or width is 1 is not pooled.
        """
        if min(x.shape[-2:]) > 1:
            x = F.avg_pool2d(x, 2)
        x = self.norm2(self.conv2(self.act(self.norm1(self.conv1(x)))))
        return F.interpolate(x, size=size, mode="bilinear", align_corners=False)


def refuse_indivisible(view: ModelView, method_name: str, name: str, channels: int) -> None:
    """Raise UserError unless the number of channels of the layer or block `name` is a multiple of `GROUP`."""
    if channels % GROUP:
        raise UserError(
            f"method {method_name}: the module {name} of {view.name} has {channels} channels, but GroupNorm requires a"
            f" multiple of {GROUP} channels. Choose another architecture."
        )


def check_lite(kernel_size: Any, groups: Any) -> None:
    """Raise SettingError unless the settings for the first convolution of a lite residual module are valid."""
    if type(kernel_size) is not int or kernel_size < 1 or kernel_size % 2 == 0:
        raise SettingError("kernel_size", kernel_size, "an odd integer >= 1")
    if type(groups) is not int or groups not in (1, 2, 4, 8):
        raise SettingError("groups", groups, ("1", "2", "4", "8"))


def stride_of(module: nn.Module) -> int:
    """Return the largest stride of the convolutions in `module`, or 1 if `module` contains no convolutions."""
    return max((m.stride[0] for m in module.modules() if isinstance(m, nn.Conv2d)), default=1)
