"""Exact sharing: each activation is kept once, and what can be computed from it is computed again.

Sources: Andoorveedu, Zhu, Zheng, Pekhimenko, "Tempo: Accelerating Transformer-Based Model Training through Memory
Footprint Reduction", NeurIPS 2022; Yang, Wei, et al., "Reducing Fine-Tuning Memory Overhead by Approximate and
Memory-Sharing Backpropagation" (MS-BP), ICML 2024: a normalization and the layers after it share x̂.
"""

from __future__ import annotations

from typing import Literal

import torch

from efficient_ft.core.errors import SettingError
from efficient_ft.methods.memory.packing import ActivationPacking
from efficient_ft.methods.registry import register
from efficient_ft.ops.packed import Policy
from efficient_ft.ops.packing import Dense, Half, Packer

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@register
class Compact(ActivationPacking):
    """Keep each activation once, exactly; the forward pass is not changed.

    A normalization keeps its normalized input x̂, from which the inputs of the layers after it are computed; a layer
    after GELU, SiLU, a product of two activations (SwiGLU) or, in a network with BatchNorm, after BatchNorm and its
    activation function keeps no input of its own. No matrix product is computed twice, except in attention. Gradients
    equal plain training's to rounding.

    Args:
        attention: ``recomputed`` keeps q, k and v and computes attention from them again in the backward pass, and so
            needs neither its output nor its statistics; ``kept`` keeps what torch's own operation keeps.
        activation_dtype: type in which the inputs of GELU and other smooth activation functions are kept: ``same``
            (exact), or ``bf16`` or ``fp16``, half of it in fp32. ReLU keeps a bit per element.

    Raises:
        SettingError: a value outside these.
    """

    name = "compact"
    packs_tail = True

    packs = False

    def __init__(
        self,
        attention: Literal["recomputed", "kept"] = "recomputed",
        activation_dtype: Literal["same", "bf16", "fp16"] = "same",
    ):
        super().__init__()
        if attention not in ("recomputed", "kept"):
            raise SettingError("attention", attention, ("recomputed", "kept"))
        if activation_dtype not in ("same", *_DTYPES):
            raise SettingError("activation_dtype", activation_dtype, ("same", *_DTYPES))
        self.attention, self.activation_dtype = attention, activation_dtype

    def policy(self) -> Policy:
        dense = Dense()
        dtype = _DTYPES.get(self.activation_dtype)
        activation: Packer = dense if dtype is None else Half(dtype)
        return Policy(
            product=dense,
            norm=dense,
            attention=dense,
            activation=activation,
            normalized=True,
            derived=True,
            derived_all=True,
            fused=dense,
            plain_attention=self.attention == "kept",
        )
