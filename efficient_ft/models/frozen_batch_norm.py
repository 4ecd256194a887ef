"""BatchNorm layers with frozen statistics.

By default, runs freeze the BatchNorm statistics of a pretrained model. Back Razor freezes all parameters of BatchNorm.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from timm.layers import BatchNormAct2d
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from efficient_ft.ops.frozen import frozen_batch_norm


class FrozenBatchNorm2d(nn.BatchNorm2d):
    """An `nn.BatchNorm2d` layer that uses its running statistics even in training mode.

    The weight and bias of the layer remain trainable.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Normalize x (B, C, H, W) with the running statistics."""
        return _frozen(self, x)


class FrozenBatchNormAct2d(BatchNormAct2d):
    """A `BatchNormAct2d` layer of timm that uses its running statistics even in training mode."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalize x (B, C, H, W) with the running statistics, then apply dropout and the activation."""
        return self.act(self.drop(_frozen(self, x)))


def _frozen(norm: nn.BatchNorm2d, x: Tensor) -> Tensor:
    assert norm.running_mean is not None
    assert norm.running_var is not None
    arguments = (x, norm.running_mean, norm.running_var, norm.weight, norm.bias)
    trains = norm.weight is not None and norm.weight.requires_grad
    if torch.is_grad_enabled() and not trains and any(t is not None and t.requires_grad for t in (x, norm.bias)):
        return frozen_batch_norm(*arguments, norm.eps)
    return F.batch_norm(*arguments, False, 0.0, norm.eps)


#: Layer classes with frozen statistics. Each key is the class that the value replaces.
FROZEN: dict[type, type] = {nn.BatchNorm2d: FrozenBatchNorm2d, BatchNormAct2d: FrozenBatchNormAct2d}


#: Layers whose statistics are frozen: all layers (True), no layers (False), or the layers in the frozen part of the
#: network (``frozen_part``), i.e. the layers whose weight and bias are not trained.
FrozenStatistics = bool | Literal["frozen_part"]


def freeze_batch_norm(model: nn.Module, which: FrozenStatistics = True) -> list[str]:
    """Freeze BatchNorm statistics of `model`. Calling ``model.train()`` does not unfreeze the statistics.

    The class of `nn.BatchNorm2d` layers and of timm's `BatchNormAct2d` layers is replaced by the corresponding class in
    `FROZEN`. Other BatchNorm layers are switched to evaluation mode before each forward pass. The state dict does not
    change, and weights and biases remain trainable.

    Returns:
        The names of the frozen layers.
    """
    names = []
    for name, module in model.named_modules():
        if not isinstance(module, _BatchNorm) or module.running_mean is None or not which:
            continue
        own = list(module.parameters(recurse=False))
        if which == "frozen_part" and (not own or any(parameter.requires_grad for parameter in own)):
            continue
        names.append(name)
        if type(module) in FROZEN:
            module.__class__ = FROZEN[type(module)]
        elif type(module) not in FROZEN.values():
            module.eval()
            if _evaluate not in module._forward_pre_hooks.values():
                module.register_forward_pre_hook(_evaluate)
    return names


def frozen_layers(model: nn.Module) -> list[str]:
    """Return the names of the BatchNorm layers of `model` whose statistics are frozen."""
    modules = model.named_modules()
    return [n for n, m in modules if type(m) in FROZEN.values() or _evaluate in m._forward_pre_hooks.values()]


def layers_without_statistics(model: nn.Module) -> list[str]:
    """Return the names of the BatchNorm layers of `model` that have initial statistics (mean 0 and variance 1)."""
    layers = [(name, module) for name, module in model.named_modules() if isinstance(module, _BatchNorm)]
    statistics = [(name, module.running_mean, module.running_var) for name, module in layers]
    return [
        name
        for name, mean, variance in statistics
        if mean is not None and variance is not None and not mean.is_meta and not mean.any() and (variance == 1).all()
    ]


def unfreeze_batch_norm(model: nn.Module, names: Iterable[str]) -> None:
    """Unfreeze the BatchNorm statistics of the layers listed in `names`.

    In training mode, the statistics of these layers are then updated again.
    """
    classes = {frozen: plain for plain, frozen in FROZEN.items()}
    for module in map(model.get_submodule, names):
        module.__class__ = classes.get(type(module), type(module))
        for key, hook in list(module._forward_pre_hooks.items()):
            if hook is _evaluate:
                del module._forward_pre_hooks[key]
                module.train(model.training)  # the hook has switched the layer to evaluation mode


def _evaluate(module: nn.Module, args: tuple[Any, ...]) -> None:
    if module.training:
        module.eval()
