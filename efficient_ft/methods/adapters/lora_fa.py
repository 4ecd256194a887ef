"""LoRA-FA: LoRA whose projection A is frozen, so that the backward pass needs A x, of rank r, and never x.

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
from efficient_ft.methods.registry import register
from efficient_ft.models.view import Layer, ModelView, Reason, Skipped
from efficient_ft.ops.frozen_convolution import frozen_conv2d
from efficient_ft.ops.saving import current_packing


class _FrozenForward(OwnForward):
    """Forward pass of a convolution that keeps nothing of its input while its weight is frozen."""

    def __call__(self, x: Tensor, *others: Any, **keywords: Any) -> Tensor:
        module: Any = self.module
        # A low-rank backward pass has given the module another class; a packed convolution keeps no input either.
        if type(self.module) is not nn.Conv2d or module.weight.requires_grad or current_packing() is not None:
            return self.within(x, *others, **keywords)
        return frozen_conv2d(
            x, module.weight, module.bias, module.stride, module.padding, module.dilation, module.groups
        )


@register
class LoRAFA(LoRA):
    """Add LoRA adapters of which only B trains (LoRA-FA: Zhang et al., 2023).

    An adapted layer computes W x + (alpha / rank) B A x with W and A frozen. The gradient of B needs A x, of ``rank``
    values per position; nothing else of the layer's input is kept. A is initialized as in LoRA, and B by zeros: the
    output is unchanged at initialization. B and the head train, nothing else; what the selection leaves trainable
    otherwise (norms, biases) is frozen, and so is a convolution that is not adapted, which keeps no input either.
    `remove` merges the adapters into the weights and restores the layers' names.

    Layers are adapted where the selection that was applied before leaves their weight trainable; without a selection,
    everywhere but in the stem and the head. Not adapted are layers whose input or output has no more channels than the
    rank, and layers of other classes than torch's.

    Args:
        rank: rank r of each adapter, at least 1; a fused qkv layer gets 3·rank with the same alpha (scale
            alpha / (3·rank)).
        alpha: numerator of the adapters' scale alpha / rank, above 0.
        targets: layers that are adapted: ``all`` linear layers and ungrouped convolutions of any kernel size (A has the
            kernel, B is 1×1), or those linear layers and 1×1 convolutions that are in ``attention`` modules.

    Raises:
        SettingError: a setting is out of range.
        UserError: as in `LoRA`.
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
            if _is_plain(module) and not module.weight.requires_grad:  # type: ignore[union-attr]
                put_inside(module, _FrozenForward(module))
        return replace(report, summary=self._summary(model, dict(report.skipped)))

    def _remove(self, model: nn.Module) -> None:
        for module in model.modules():
            take_away(module, _FrozenForward)
        super()._remove(model)

    def _trains(self, model: nn.Module, view: ModelView, left_out: dict[str, Skipped]) -> set[str]:
        return self._trained_head(view)

    def _why_not(self, layer: Layer) -> Skipped | None:
        spatial = layer.why_not is not None and layer.why_not.reason == Reason.SPATIAL_CONVOLUTION
        if spatial and self.targets == "all":
            module: Any = layer.module
            if module.dilation != (1, 1) or module.padding_mode != "zeros":  # peft's A has neither
                return Skipped(Reason.OTHER_FORM, "a convolution that is dilated or not padded by zeros")
            return self._why_not_trained(layer)
        return super()._why_not(layer)


def _is_plain(module: nn.Module) -> bool:
    """Return True for a convolution of torch's own class that pads with zeros, by numbers."""
    return type(module) is nn.Conv2d and module.padding_mode == "zeros" and not isinstance(module.padding, str)
