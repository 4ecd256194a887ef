"""Mesa: activations in 8 bits between the forward and the backward pass.

Source: Pan, Chen, He, Liu, Cai, Zhuang, "Mesa: A Memory-saving Training Framework for Transformers", 2021.
"""

from __future__ import annotations

from typing import Literal

from efficient_ft.core.errors import SettingError
from efficient_ft.methods.memory.packing import ActivationPacking
from efficient_ft.methods.registry import register
from efficient_ft.ops.saving import Policy
from efficient_ft.ops.storage import EightBits


@register
class Mesa(ActivationPacking):
    """Keep what the backward pass needs in 8 bits; the forward pass is not changed.

    Inputs of linear layers, convolutions, normalizations and smooth activation functions, q, k, v and softmax's output
    are rounded at random to 255 steps of a running range (mean with factor 0.9), one for each attention head; ReLU
    keeps a bit per element.

    Args:
        attention: ``unfused`` keeps q, k, v and softmax's output (as published); ``fused`` keeps q, k and v and
            recomputes attention from them by torch's fused kernel.
        recompute_inputs: a layer that takes the output of GELU or of a LayerNorm keeps no input of its own: it is
            computed from what the layer before keeps.

    Raises:
        SettingError: a value outside these.
    """

    name = "mesa"

    def __init__(self, attention: Literal["unfused", "fused"] = "unfused", recompute_inputs: bool = True):
        super().__init__()
        if attention not in ("unfused", "fused"):
            raise SettingError("attention", attention, ("unfused", "fused"))
        self.attention, self.recompute_inputs = attention, recompute_inputs

    def policy(self) -> Policy:
        bits = EightBits()
        return Policy(
            product=bits,
            norm=bits,
            attention=bits,
            activation=bits,
            normalized=self.recompute_inputs,
            derived=self.recompute_inputs,
            fused=bits if self.attention == "fused" else None,
        )
