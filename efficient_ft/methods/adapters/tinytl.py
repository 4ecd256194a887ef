"""TinyTL: small residual modules on pooled maps, in parallel with a frozen network whose biases train.

Source: Cai, Gan, Zhu, Han, "TinyTL: Reduce Memory, Not Parameters for Efficient On-Device Learning", NeurIPS 2020.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from timm.layers import BatchNormAct2d
from timm.models._efficientnet_blocks import InvertedResidual
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from efficient_ft.core.errors import SettingError, UserError
from efficient_ft.methods.adapters.lite import EPS, GROUP, LiteResidual, refuse_indivisible, stride_of
from efficient_ft.methods.base import Applied, Method, make_trainable, trainable
from efficient_ft.methods.declarations import Adds, Axis, Needs
from efficient_ft.methods.registry import register
from efficient_ft.models.frozen_batch_norm import FROZEN
from efficient_ft.models.view import ModelView, Reason, Skipped, parameters_under

#: Blocks whose input is this much smaller than the image get kernels of 3: their pooled map is 3×3 at 224 px. The paper
#: leaves this open. With it, and with modules as wide as their input, all four published memories that depend on it are
#: reproduced (TinyTL 37 and 65 MB, FT-Last 31, FT-Norm+Last 192); kernels of 5 everywhere give 42 MB instead of 37.
COARSE = 32


class InvertedResidualWithLite(InvertedResidual):
    """timm's block with a parallel `lite_residual`; its own parameters keep their names."""

    lite_residual: LiteResidual

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y + self.lite_residual(x, y.shape[-2:])


class GroupNorm2d(nn.BatchNorm2d):
    """The scale and shift of a BatchNorm, applied after normalizing each image by groups of channels."""

    def forward(self, x: Tensor) -> Tensor:
        return F.group_norm(x, self.num_features // GROUP, self.weight, self.bias, self.eps)


class GroupNormAct2d(BatchNormAct2d):
    """`GroupNorm2d` for timm's normalization and activation in one."""

    def forward(self, x: Tensor) -> Tensor:
        x = F.group_norm(x, self.num_features // GROUP, self.weight, self.bias, self.eps)
        return self.act(self.drop(x))


_GROUPED: dict[type, type] = {nn.BatchNorm2d: GroupNorm2d, BatchNormAct2d: GroupNormAct2d}
_GROUPED |= {FROZEN[norm]: grouped for norm, grouped in _GROUPED.items()}


@register
class TinyTL(Method):
    """Add lite residual modules to the inverted residual blocks of a CNN; they, all biases and the head train.

    It works in the part of the model that the selection applied before leaves trainable: blocks in which nothing trains
    get no module, nor do blocks without expansion (MobileNetV2's first). Modules start at an output of 0 and cannot be
    merged: exported weights hold them under their own names (``….lite_residual.…``).

    Args:
        kernel_size: side of the modules' convolutions, odd; 3 where the block's input is 32 times smaller than the
            image.
        groups: of these convolutions.
        norm: of the pretrained network: ``group``, as published (GroupNorm of 8 channels and standardized weights of
            the convolutions before it, for weights that were trained so), or ``batch`` (BatchNorm as it is, which
            leaves the pretrained network's output unchanged at first).

    Raises:
        SettingError: a value outside these.
        UserError: when applied: no such block is in the part that trains, or channels that do not divide into groups.
    """

    name = "tinytl"
    axis = Axis.ADAPTERS
    adds = frozenset({Adds.MODULES})
    needs = frozenset({Needs.BLOCKS})
    merges = False

    def __init__(self, kernel_size: int = 5, groups: int = 2, norm: Literal["group", "batch"] = "group") -> None:
        if type(kernel_size) is not int or kernel_size < 1 or kernel_size % 2 == 0:
            raise SettingError("kernel_size", kernel_size, "an odd integer >= 1")
        if type(groups) is not int or groups not in (1, 2, 4, 8):
            raise SettingError("groups", groups, ["1", "2", "4", "8"])
        if norm not in ("group", "batch"):
            raise SettingError("norm", norm, ["group", "batch"])
        self.kernel_size, self.groups, self.norm = kernel_size, groups, norm
        self._before: dict[str, bool] = {}
        # The class of each normalization before, and mean and deviation of each standardized filter.
        self._norms: dict[str, type] = {}
        self._filters: dict[str, tuple[Tensor, Tensor]] = {}

    def _apply(self, model: nn.Module, view: ModelView) -> Applied:
        chosen, skipped = self._chosen(view)
        norms = self._to_group(view) if self.norm == "group" else {}
        self._before = trainable(model)
        self._norms = {name: type(model.get_submodule(name)) for name in norms}
        trains = {n for n, p in model.named_parameters() if p.requires_grad and p.dim() == 1 and n.endswith("bias")}
        trains |= {n for n in parameters_under(model, view.head) if self._before[n]}
        make_trainable(model, {name: name in trains for name in self._before})
        for name in norms:
            module = model.get_submodule(name)
            module.__class__ = _GROUPED[type(module)]
        if norms:
            self._filters = {n: _standardize(m) for n, m in model.named_modules() if _is_normalized(m)}
        for name, stride in chosen.items():
            block: Any = model.get_submodule(name)
            like = next(block.parameters())
            lite = LiteResidual(
                block.conv_pw.in_channels,
                block.conv_pwl.out_channels,
                min(self.kernel_size, 3) if stride >= COARSE else self.kernel_size,
                self.groups,
                stride_of(block),
            )
            block.lite_residual = lite.to(like.device, like.dtype).train(block.training)
            block.__class__ = InvertedResidualWithLite
        notes = ("every BatchNorm is replaced by a GroupNorm: for weights that were trained with it",) if norms else ()
        added = tuple(f"{name}.lite_residual" for name in chosen)
        return Applied(self.name, added, skipped, notes, modules=added)

    def _chosen(self, view: ModelView) -> tuple[dict[str, int], dict[str, Skipped]]:
        """Return the blocks that get a module, with the downsampling of their input, and the others with the reason."""
        chosen: dict[str, int] = {}
        skipped: dict[str, Skipped] = {}
        smaller = 1
        for name, module in view.model.named_modules():
            if name in view.blocks:
                if type(module) is not InvertedResidual or module.conv_s2d is not None:
                    skipped[name] = Skipped(Reason.OTHER_FORM, "not an inverted residual block with expansion")
                elif not any(p.requires_grad for p in module.parameters()):
                    skipped[name] = Skipped(Reason.FROZEN)
                else:
                    chosen[name] = smaller
                    for channels in (module.conv_pw.in_channels, module.conv_pwl.out_channels):
                        refuse_indivisible(view, self.name, name, channels)
                smaller *= stride_of(module)
            elif isinstance(module, nn.Conv2d) and not name.startswith(tuple(f"{b}." for b in view.blocks)):
                smaller *= stride_of(module)
        if not chosen and any(why.reason == Reason.FROZEN for why in skipped.values()):
            raise UserError(
                f"method {self.name}: the inverted residual blocks of {view.name} are all {Reason.FROZEN.value};"
                " choose full."
            )
        if not chosen:
            raise UserError(
                f"method {self.name}: {view.name} has no inverted residual blocks (as MobileNetV2, ProxylessNAS,"
                " EfficientNet have); use lora or bitfit."
            )
        return chosen, skipped

    def _to_group(self, view: ModelView) -> list[str]:
        """Return the names of the BatchNorms.

        Raises:
            UserError: one of them cannot become a GroupNorm.
        """
        found = []
        for name, module in view.model.named_modules():
            if isinstance(module, _BatchNorm):
                if type(module) not in _GROUPED or not module.affine:
                    raise UserError(
                        f"method {self.name}: {name} of {view.name} is a {type(module).__name__}, which cannot become"
                        " a GroupNorm; use method.tinytl.norm=batch."
                    )
                refuse_indivisible(view, self.name, name, module.num_features)
                found.append(name)
        return found

    def _remove(self, model: nn.Module) -> None:
        """Restore the model's own layers, filters and names; the modules are lost."""
        block: Any
        for block in model.modules():
            if hasattr(block, "lite_residual"):
                del block.lite_residual
                block.__class__ = InvertedResidual
        for name, was in self._norms.items():
            model.get_submodule(name).__class__ = was
        with torch.no_grad():
            for name, (mean, deviation) in self._filters.items():
                weight: Any = model.get_submodule(name).weight
                weight.copy_(weight * deviation.to(weight) + mean.to(weight))
        make_trainable(model, self._before)

    def remove(self, model: nn.Module) -> None:
        super().remove(model)
        self._before, self._norms, self._filters = {}, {}, {}


def _is_normalized(module: nn.Module) -> bool:
    """Return True for a convolution before a normalization: it has no bias (squeeze-and-excitation's have one)."""
    return isinstance(module, nn.Conv2d) and module.bias is None


@torch.no_grad()
def _standardize(module: Any) -> tuple[Tensor, Tensor]:
    """Bring each filter of a convolution to mean 0 and deviation 1, in place: it is frozen, so once is enough.

    Returns:
        Mean and deviation of each filter before.
    """
    weight = module.weight
    variance, mean = torch.var_mean(weight, dim=(1, 2, 3), correction=0, keepdim=True)
    deviation = (variance + EPS).sqrt()
    weight.copy_((weight - mean) / deviation)
    return mean, deviation
