"""LoRA-FA: add low-rank adapters in which only one of the two matrices is trained.

Source: Zhang, Zhang, Shi, Chu, Li, "LoRA-FA: Memory-efficient Low-rank Adaptation for Large Language Models
Fine-tuning", 2023.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

from torch import Tensor, nn

from efficient_ft.methods.adapters.lora import LoRA
from efficient_ft.methods.base import Applied
from efficient_ft.methods.forwards import OwnForward, put_inside, take_away
from efficient_ft.methods.quantized import is_quantized
from efficient_ft.methods.registry import register
from efficient_ft.models.view import Layer, ModelView, Reason, Skipped
from efficient_ft.ops.frozen import frozen_conv2d
from efficient_ft.ops.saving import current_packing


class _FrozenForward(OwnForward):
    """Forward pass of a convolution that saves its input only if its weight is trainable."""

    def __call__(self, x: Tensor, *others: Any, **keywords: Any) -> Tensor:
        module: Any = self.module
        # The original forward pass runs if the class of the module was changed by a method with a low-rank backward
        # pass, or if activations are packed. A packed convolution with a frozen weight does not save its input either.
        if type(self.module) is not nn.Conv2d or module.weight.requires_grad or current_packing() is not None:
            return self.within(x, *others, **keywords)
        return frozen_conv2d(
            x, module.weight, module.bias, module.stride, module.padding, module.dilation, module.groups
        )


@register
class LoRAFA(LoRA):
    """Add LoRA adapters with a frozen matrix A, so that only B is trained (LoRA-FA: Zhang et al., 2023).

    An adapted layer computes W x + (alpha / rank) B A x with frozen W and A. The gradient of B requires only A x, which
    has ``rank`` values per position. Therefore, A x is saved instead of the layer's input x. A is initialized as in
    LoRA, and B is initialized with zeros, so that the initial output is unchanged. Only B and the head are trained. All
    other parameters are frozen, including norms and biases that were trainable before. Convolutions without an adapter
    are also frozen and do not save their inputs. `remove` merges the adapters into the weights and restores the names
    of the layers.

    Only layers whose weights are trainable are adapted. If no other method has selected the trained parameters, all
    layers except those in the stem and the head are adapted. Layers whose number of input or output channels does not
    exceed the rank are not adapted. Subclasses of `nn.Linear` and `nn.Conv2d` are not adapted either.

    Args:
        rank: rank r of each adapter. Must be at least 1. The adapter of a fused qkv layer has the rank 3·rank and the
            scale alpha / (3·rank).
        alpha: numerator of the scale alpha / rank. Must be positive.
        targets: layers to adapt. ``all``: linear layers and ungrouped convolutions of any kernel size (A is a
            convolution with this kernel size, and B is a 1×1 convolution). ``attention``: linear layers and 1×1
            convolutions in attention modules.

    Raises:
        SettingError: If a setting is out of range.
        UserError: See `LoRA`.
    """

    name = "lora_fa"

    def __init__(self, rank: int = 8, alpha: float = 8.0, targets: Literal["all", "attention"] = "all") -> None:
        super().__init__(rank, alpha, targets)

    def _apply(self, model: nn.Module, view: ModelView) -> Applied:
        report = super()._apply(model, view)
        for name, parameter in model.named_parameters():
            if ".lora_A." in name:
                parameter.requires_grad_(False)
        for module in model.modules():
            # `frozen_conv2d` does not support subclasses, other padding modes, or padding that is given as a string.
            plain = type(module) is nn.Conv2d and module.padding_mode == "zeros" and not isinstance(module.padding, str)
            weight: Any = module.weight if plain else None
            if plain and not weight.requires_grad and not is_quantized(weight):
                put_inside(module, _FrozenForward(module))
        return replace(report, summary=self._summary(model, dict(report.skipped)))

    def _remove(self, model: nn.Module) -> None:
        take_away(model, _FrozenForward)
        super()._remove(model)

    def _trains(self, model: nn.Module, view: ModelView, left_out: dict[str, Skipped]) -> set[str]:
        return self._trained_head(view)

    def _why_not(self, layer: Layer) -> Skipped | None:
        spatial = layer.why_not is not None and layer.why_not.reason == Reason.SPATIAL_CONVOLUTION
        if spatial and self.targets == "all":
            module: Any = layer.module
            # peft does not support such convolutions for A.
            if module.dilation != (1, 1) or module.padding_mode != "zeros":
                return Skipped(Reason.OTHER_FORM, "the convolution is dilated or not padded with zeros")
            return self._why_not_trained(layer)
        return super()._why_not(layer)
