"""Mesa: save activations in 8 bits for the backward pass.

Source: Pan, Chen, He, Liu, Cai, Zhuang, "Mesa: A Memory-saving Training Framework for Transformers", 2021.
"""

from __future__ import annotations

from typing import Literal

from efficient_ft.methods.checks import check_choice
from efficient_ft.methods.memory.packing import ActivationPacking, uniform_policy
from efficient_ft.methods.registry import register
from efficient_ft.ops.saving import Policy
from efficient_ft.ops.storage import EightBits


@register
class Mesa(ActivationPacking):
    """Save the tensors for the backward pass in 8 bits. The forward pass does not change.

    The tensors q, k, v, the output of the softmax, and the inputs of linear layers, convolutions, normalizations and
    smooth activation functions are stochastically rounded to 255 steps. Each tensor, or each attention head of a
    tensor, has a running range. The ranges are exponential moving averages with decay 0.9. ReLU saves one bit per
    element.

    Args:
        attention: ``unfused`` saves q, k, v and the output of the softmax (as published). ``fused`` saves q, k and v
            and recomputes attention from these tensors with torch's fused kernel.
        recompute_inputs: if True, a layer that follows GELU or a LayerNorm does not save its input. The input is
            recomputed from the tensor that is saved for GELU or the LayerNorm.

    Raises:
        SettingError: If a setting is invalid.
    """

    name = "mesa"

    def __init__(self, attention: Literal["unfused", "fused"] = "unfused", recompute_inputs: bool = True):
        super().__init__()
        check_choice("attention", attention, ("unfused", "fused"))
        self.attention, self.recompute_inputs = attention, recompute_inputs

    def policy(self) -> Policy:
        bits = EightBits()
        return uniform_policy(
            bits,
            normalized=self.recompute_inputs,
            derived=self.recompute_inputs,
            fused=bits if self.attention == "fused" else None,
        )
