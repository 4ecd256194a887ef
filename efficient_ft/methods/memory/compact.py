"""Exact sharing: each activation is kept once, and what can be computed from it is computed again.

Sources: Andoorveedu, Zhu, Zheng, Pekhimenko, "Tempo: Accelerating Transformer-Based Model Training through Memory
Footprint Reduction", NeurIPS 2022; Yang, Wei, et al., "Reducing Fine-Tuning Memory Overhead by Approximate and
Memory-Sharing Backpropagation" (MS-BP), ICML 2024: a normalization and the layers after it share x̂.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
from torch import nn

from efficient_ft.core.errors import SettingError
from efficient_ft.methods.base import Applied
from efficient_ft.methods.memory.packing import ActivationPacking
from efficient_ft.methods.registry import register
from efficient_ft.models.view import ModelView
from efficient_ft.ops.saving import Policy
from efficient_ft.ops.storage import Dense, Half, Packer

#: With ``attention=mixed`` attention is computed again in every block whose number is a multiple of this.
_EVERY = 4

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@register
class Compact(ActivationPacking):
    """Keep each activation once, exactly; the forward pass is not changed.

    A normalization keeps its normalized input x̂, from which the inputs of the layers after it are computed; a layer
    after GELU, SiLU, a product of two activations (SwiGLU) or, in a network with BatchNorm, after BatchNorm and its
    activation function keeps no input of its own. No matrix product is computed twice, except in attention that is
    recomputed. Gradients equal plain training's to rounding.

    Args:
        attention: ``recomputed`` keeps q, k and v and computes attention from them again in the backward pass, and so
            needs neither its output nor its statistics; ``kept`` keeps what torch's own operation keeps; ``mixed``
            recomputes attention in every fourth block (of twelve, in the fourth, eighth and twelfth).
        activation_dtype: type in which the inputs of GELU and other smooth activation functions are kept: ``same``
            (exact), or ``bf16`` or ``fp16``, half of it in fp32. ReLU keeps a bit per element.

    Raises:
        SettingError: a value outside these.
    """

    name = "compact"
    packs_tail = True
    libraries = ()

    def __init__(
        self,
        attention: Literal["mixed", "recomputed", "kept"] = "mixed",
        activation_dtype: Literal["same", "bf16", "fp16"] = "same",
    ):
        super().__init__()
        if attention not in ("mixed", "recomputed", "kept"):
            raise SettingError("attention", attention, ("mixed", "recomputed", "kept"))
        if activation_dtype not in ("same", *_DTYPES):
            raise SettingError("activation_dtype", activation_dtype, ("same", *_DTYPES))
        self.attention, self.activation_dtype = attention, activation_dtype
        # With ``mixed``: blocks that keep what torch's attention keeps.
        self._kept: frozenset[str] = frozenset()

    def _apply(self, model: nn.Module, view: ModelView) -> Applied:
        blocks = view.blocks if self.attention == "mixed" else ()
        self._kept = frozenset(blocks) - frozenset(blocks[_EVERY - 1 :: _EVERY])
        return super()._apply(model, view)

    def policy_of(self, part: str) -> Policy:
        return replace(self.policy(), plain_attention=self.attention == "kept" or part in self._kept)

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
        )
