"""Save each activation only once and without loss, and recompute tensors that can be computed from saved tensors.

Sources: Andoorveedu, Zhu, Zheng, Pekhimenko, "Tempo: Accelerating Transformer-Based Model Training through Memory
Footprint Reduction", NeurIPS 2022; Yang, Wei, et al., "Reducing Fine-Tuning Memory Overhead by Approximate and
Memory-Sharing Backpropagation" (MS-BP), ICML 2024. In MS-BP, a normalization layer shares its normalized input x̂ with
the layers that follow.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
from torch import nn

from efficient_ft.methods.base import Applied
from efficient_ft.methods.checks import check_choice
from efficient_ft.methods.memory.packing import ActivationPacking, uniform_policy
from efficient_ft.methods.registry import register
from efficient_ft.models.view import ModelView
from efficient_ft.ops.saving import Policy
from efficient_ft.ops.storage import Dense, Half, Packer

#: With ``attention=mixed``, attention is recomputed in every block whose number is a multiple of this value.
_EVERY = 4
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@register
class Compact(ActivationPacking):
    """Save each activation only once and without loss. The forward pass does not change.

    A normalization layer saves its normalized input x̂. The inputs of the layers after the normalization layer are
    recomputed from x̂. A layer that follows GELU, SiLU or a product of two activations (SwiGLU) does not save its
    input. In a network with BatchNorm, a layer that follows BatchNorm and an activation function does not save its
    input either. No matrix product is computed twice, except in recomputed attention. Up to rounding errors, the
    gradients equal those of training without the method.

    Args:
        attention: ``recomputed`` saves q, k and v, but not the output or the statistics of attention, and recomputes
            attention in the backward pass. ``kept`` saves the same tensors as torch's attention operation. ``mixed``
            recomputes attention only in every fourth block (for example, in the fourth, eighth and twelfth of twelve
            blocks), and in all attention modules outside of the recognized or specified blocks.
        activation_dtype: dtype of the saved inputs of GELU and other smooth activation functions. ``same`` keeps the
            dtype of the input and is exact. ``bf16`` and ``fp16`` use half the memory of fp32. ReLU saves one bit per
            element.

    Raises:
        SettingError: If a setting is invalid.
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
        check_choice("attention", attention, ("mixed", "recomputed", "kept"))
        check_choice("activation_dtype", activation_dtype, ("same", *_DTYPES))
        self.attention, self.activation_dtype = attention, activation_dtype
        # Names of the blocks that save the same tensors as torch's attention operation with ``attention=mixed``.
        self._kept: frozenset[str] = frozenset()

    def _apply(self, model: nn.Module, view: ModelView) -> Applied:
        blocks = view.blocks if self.attention == "mixed" else ()
        kept = frozenset(blocks) - frozenset(blocks[_EVERY - 1 :: _EVERY])
        self._kept = frozenset(name for block in kept for name in view.called_modules(block))
        return super()._apply(model, view)

    def policy_of(self, part: str) -> Policy:
        return replace(self.policy(), plain_attention=self.attention == "kept" or part in self._kept)

    def policy(self) -> Policy:
        dtype = _DTYPES.get(self.activation_dtype)
        activation: Packer = Dense() if dtype is None else Half(dtype)
        return uniform_policy(
            Dense(), activation=activation, normalized=True, derived=True, derived_all=True, fused=Dense()
        )
