"""TinyTL: add trainable lite residual modules in parallel with the blocks of a CNN whose weights are frozen.

Source: Cai, Gan, Zhu, Han, "TinyTL: Reduce Memory, Not Parameters for Efficient On-Device Learning", NeurIPS 2020.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from timm.layers import BatchNormAct2d
from timm.models._efficientnet_blocks import InvertedResidual
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules.batchnorm import _BatchNorm

from efficient_ft.core.errors import UserError, hint
from efficient_ft.methods.adapters.lite import EPS, GROUP, LiteResidual, check_lite, refuse_indivisible, stride_of
from efficient_ft.methods.base import Applied, Method
from efficient_ft.methods.checks import check_choice, classes_in_words
from efficient_ft.methods.declarations import Adds, Axis, Needs
from efficient_ft.methods.forwards import foreign_forward
from efficient_ft.methods.registry import register
from efficient_ft.methods.summary import count, left, trained
from efficient_ft.models.frozen_batch_norm import FROZEN
from efficient_ft.models.trained import make_trainable, trainable
from efficient_ft.models.view import ModelView, Reason, Skipped
from efficient_ft.models.weight_dtype import dtype_of_added

#: If the input of a block is downsampled by at least this factor, the kernel size of the block's module is limited to
#: 3. For images of 224×224 pixels, the pooled feature map then has 3×3 positions. The paper does not specify this
#: factor. A factor of 32 and as many hidden channels as input channels reproduce the four published memory sizes that
#: depend on these two choices. The sizes are 37 and 65 MB for TinyTL, 31 MB for FT-Last, and 192 MB for FT-Norm+Last.
#: If all kernels had size 5, TinyTL would require 42 MB instead of 37 MB.
COARSE = 32


class InvertedResidualWithLite(InvertedResidual):
    """InvertedResidual block with a parallel `lite_residual`. The parameters of the block keep their names."""

    lite_residual: LiteResidual

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y + self.lite_residual(x, y.shape[-2:])


class GroupNorm2d(nn.BatchNorm2d):
    """GroupNorm with `GROUP` channels per group that replaces a BatchNorm2d and keeps the scale and shift."""

    def forward(self, x: Tensor) -> Tensor:
        return F.group_norm(x, self.num_features // GROUP, self.weight, self.bias, self.eps)


class GroupNormAct2d(BatchNormAct2d):
    """Replacement for timm's `BatchNormAct2d`: `GroupNorm2d`, followed by dropout and an activation function."""

    def forward(self, x: Tensor) -> Tensor:
        x = F.group_norm(x, self.num_features // GROUP, self.weight, self.bias, self.eps)
        return self.act(self.drop(x))


#: Mapping from BatchNorm classes to the classes that replace them if ``norm="group"``.
_GROUPED: dict[type, type] = {nn.BatchNorm2d: GroupNorm2d, BatchNormAct2d: GroupNormAct2d}
_GROUPED |= {FROZEN[norm]: grouped for norm, grouped in _GROUPED.items()}


@register
class TinyTL(Method):
    """Add lite residual modules in parallel with the inverted residual blocks of a CNN (Cai et al., NeurIPS 2020).

    The modules, all biases and the head are trained, and all other weights are frozen. Blocks and biases that are
    already frozen remain frozen, and frozen blocks receive no module. Blocks without expansion (such as the first block
    of MobileNetV2) and blocks that are not instances of timm's InvertedResidual receive no module either. The initial
    output of the modules is 0. The modules cannot be merged. Exported weights therefore contain the modules
    (``….lite_residual.…``).

    Args:
        kernel_size: kernel size of the first convolution in each module. Must be odd. The kernel size is limited to 3
            in blocks whose input is downsampled from the image by a factor of 32 or more.
        groups: number of groups of the first convolution. Must be 1, 2, 4 or 8.
        norm: normalization in the pretrained network. ``group`` (as published) replaces every BatchNorm with GroupNorm
            with groups of 8 channels, and standardizes the weights of all convolutions without a bias. ``group``
            requires weights that were trained with these changes. ``batch`` keeps BatchNorm, so that the initial output
            is unchanged.

    Raises:
        SettingError: If a setting is out of range.
        UserError: Raised by `apply` if no inverted residual block is trainable, if the number of channels of a block or
            norm is not a multiple of 8, or if another method that adds modules has been applied. With ``norm="group"``,
            UserError is also raised if GroupNorm cannot replace a norm, or if the network was trained with BatchNorm.
    """

    name = "tinytl"
    axis = Axis.ADAPTERS
    adds = frozenset({Adds.MODULES})
    needs = frozenset({Needs.BLOCKS})
    merges = False

    def __init__(self, kernel_size: int = 5, groups: int = 2, norm: Literal["group", "batch"] = "group") -> None:
        check_lite(kernel_size, groups)
        check_choice("norm", norm, ("group", "batch"))
        self.kernel_size, self.groups, self.norm = kernel_size, groups, norm
        self._before: dict[str, bool] = {}
        # Original class of each norm, and original means and standard deviations of the filters of each standardized
        # convolution. The keys are module names.
        self._norms: dict[str, type] = {}
        self._filters: dict[str, tuple[Tensor, Tensor]] = {}

    def _apply(self, model: nn.Module, view: ModelView) -> Applied:
        chosen, skipped = self._chosen(view)
        norms = self._to_group(view) if self.norm == "group" else {}
        self._before = trainable(model)
        self._norms = {name: type(model.get_submodule(name)) for name in norms}
        trains = {n for n, p in model.named_parameters() if p.requires_grad and p.dim() == 1 and n.endswith("bias")}
        trains |= {n for n in view.new_parameters() if self._before[n]}
        make_trainable(model, {name: name in trains for name in self._before})
        for name in norms:
            module = model.get_submodule(name)
            module.__class__ = _GROUPED[type(module)]
        if norms:
            # Only convolutions before a norm are standardized. These convolutions have no bias, whereas convolutions in
            # squeeze-and-excitation modules have a bias.
            self._filters = {
                n: _standardize(m) for n, m in model.named_modules() if isinstance(m, nn.Conv2d) and m.bias is None
            }
        for name, stride in chosen.items():
            block: Any = model.get_submodule(name)
            lite = LiteResidual(
                block.conv_pw.in_channels,
                block.conv_pwl.out_channels,
                min(self.kernel_size, 3) if stride >= COARSE else self.kernel_size,
                self.groups,
                stride_of(block),
            )
            block.lite_residual = lite.to(next(block.parameters()).device, dtype_of_added(block)).train(block.training)
            block.__class__ = InvertedResidualWithLite
        note = "GroupNorm replaces every BatchNorm, so the pretrained weights must have been trained with GroupNorm"
        notes = (note,) if norms else ()
        added = tuple(f"{name}.lite_residual" for name in chosen)
        summary = f"lite residuals in {count(len(chosen), 'block')}, biases and head are trained: {trained(model)}"
        summary += left(skipped, "without a residual", "block") + ("; GroupNorm replaces BatchNorm" if norms else "")
        return Applied(self.name, added, skipped, notes, modules=added, summary=summary)

    def _chosen(self, view: ModelView) -> tuple[dict[str, int], dict[str, Skipped]]:
        """Return the downsampling factor of the input of each block that receives a module, and the skipped blocks."""
        chosen: dict[str, int] = {}
        skipped: dict[str, Skipped] = {}
        smaller = 1
        for name, module in view.model.named_modules():
            if name in view.blocks:
                foreign = foreign_forward(module) is not None
                if foreign or type(module) is not InvertedResidual or module.conv_s2d is not None:
                    skipped[name] = Skipped(Reason.OTHER_FORM, "not an inverted residual with expansion")
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
                f"method {self.name}: all inverted residual blocks of {view.name} are {Reason.FROZEN.value}."
                " Select full."
            )
        if not chosen:
            raise UserError(
                f"method {self.name}: the method requires blocks of timm's class InvertedResidual (MobileNetV2 and V3,"
                f" MNASNet, ProxylessNAS, EfficientNet). The blocks of {view.name} are {classes_in_words(view)}. Use"
                " lora or bitfit instead."
            )
        return chosen, skipped

    def _to_group(self, view: ModelView) -> list[str]:
        """Return the names of all BatchNorm layers. Raise UserError if one was trained or cannot be replaced."""
        found = []
        for name, module in view.model.named_modules():
            if isinstance(module, _BatchNorm):
                advice = hint("norm='batch'", "method=tinytl_batch_norm")
                if type(module) not in _GROUPED or not module.affine:
                    raise UserError(
                        f"method {self.name}: the norm {name} of {view.name} has the class {type(module).__name__} and"
                        f" cannot be replaced with GroupNorm. Use {advice}."
                    )
                refuse_indivisible(view, self.name, name, module.num_features)
                if _was_trained(module):
                    raise UserError(
                        f"method {self.name}: the weights of {view.name} were trained with BatchNorm ({name} has"
                        " running statistics). With GroupNorm, the network would predict at chance level. Use"
                        f" {advice}, or weights that were trained with"
                        " GroupNorm."
                    )
                found.append(name)
        return found

    def _remove(self, model: nn.Module) -> None:
        block: Any
        for block in model.modules():
            if hasattr(block, "lite_residual"):
                del block.lite_residual
                block.__class__ = InvertedResidual
        for name, norm_class in self._norms.items():
            model.get_submodule(name).__class__ = norm_class
        with torch.no_grad():
            for name, (mean, deviation) in self._filters.items():
                weight: Any = model.get_submodule(name).weight
                weight.copy_(weight * deviation.to(weight.device) + mean.to(weight.device))
        make_trainable(model, self._before)


def _was_trained(norm: _BatchNorm) -> bool:
    """Return True if the running statistics of a BatchNorm layer differ from their initial values."""
    mean, variance = norm.running_mean, norm.running_var
    if mean is None or variance is None or mean.is_meta or isinstance(mean, FakeTensor):
        return False
    return bool((mean != 0).any() or (variance != 1).any())


@torch.no_grad()
def _standardize(module: Any) -> tuple[Tensor, Tensor]:
    """Standardize the frozen filters in place, and return their means and standard deviations, (C_out, 1, 1, 1)."""
    weight = module.weight.detach().to(torch.promote_types(module.weight.dtype, torch.float32))
    variance, mean = torch.var_mean(weight, dim=(1, 2, 3), correction=0, keepdim=True)
    deviation = (variance + EPS).sqrt()
    module.weight.copy_((weight - mean) / deviation)
    return mean, deviation
