"""The lite residual module that TinyTL and Rep-Net run in parallel with the blocks of a CNN.

Sources: Cai, Gan, Zhu, Han, "TinyTL", NeurIPS 2020; weight standardization: Qiao, Wang, Liu, Shen, Yuille, 2019.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from timm.layers import StdConv2d
from torch import Tensor, nn

from efficient_ft.core.errors import UserError
from efficient_ft.models.view import ModelView

#: Channels of a group of every GroupNorm.
GROUP = 8

#: Added to the variance of a filter that is standardized.
EPS = 1e-6


class LiteResidual(nn.Module):
    """Pooled map → k×k convolution → GroupNorm → ReLU → 1×1 convolution → GroupNorm.

    Its output is 0 at initialization; the weights of both convolutions are standardized.

    Args:
        inputs, outputs: channels; the module is as wide as its input.
        kernel: side of the first convolution.
        groups: of the first convolution.
        stride: of the block it runs in parallel with.
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
        """(B, inputs, H, W) → (B, outputs, *size)."""
        if min(x.shape[-2:]) > 1:
            x = F.avg_pool2d(x, 2)
        x = self.norm2(self.conv2(self.act(self.norm1(self.conv1(x)))))
        return F.interpolate(x, size=size, mode="bilinear", align_corners=False)


def refuse_indivisible(view: ModelView, method_name: str, name: str, channels: int) -> None:
    """Raise UserError where the channels of the layer or block `name` do not divide into groups."""
    if channels % GROUP:
        raise UserError(
            f"method {method_name}: {name} of {view.name} has {channels} channels, which do not divide into groups of"
            f" {GROUP}."
        )


def stride_of(module: nn.Module) -> int:
    """Return the stride of a convolution, or of a block, also of one with parallel convolutions (MixNet)."""
    return max((m.stride[0] for m in module.modules() if isinstance(m, nn.Conv2d)), default=1)
