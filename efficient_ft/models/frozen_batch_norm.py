"""Freezing the BatchNorm statistics of a pretrained model, as every recipe of the papers does."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from efficient_ft.ops.frozen_batch_norm import frozen_batch_norm


class FrozenBatchNorm2d(nn.BatchNorm2d):
    """`nn.BatchNorm2d` that uses its running statistics in training too; scale and shift may still train."""

    def forward(self, x: Tensor) -> Tensor:
        assert self.running_mean is not None
        assert self.running_var is not None
        arguments = (x, self.running_mean, self.running_var, self.weight, self.bias)
        trains = self.weight is not None and self.weight.requires_grad
        if torch.is_grad_enabled() and not trains and any(t is not None and t.requires_grad for t in (x, self.bias)):
            return frozen_batch_norm(*arguments, self.eps)
        return F.batch_norm(*arguments, False, 0.0, self.eps)


def freeze_batch_norm(model: nn.Module) -> list[str]:
    """Freeze the statistics of every BatchNorm of `model`, in training mode too; returns their names.

    Call it again after each `model.train()`: layers with a forward of their own (timm's fused normalisation and
    activation) are put in evaluation mode, which `train` undoes. Names and values of the state stay as they are.
    """
    names = []
    for name, module in model.named_modules():
        if not isinstance(module, _BatchNorm) or module.running_mean is None:
            continue
        names.append(name)
        if type(module) is nn.BatchNorm2d:
            module.__class__ = FrozenBatchNorm2d
        elif type(module) is not FrozenBatchNorm2d:
            module.eval()
    return names
