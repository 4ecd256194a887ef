"""Back Razor: save only the largest activations for the backward pass.

Source: Jiang, Chen, Huang, Du, Zhou, Wang, "Back Razor: Memory-Efficient Transfer Learning by Self-Sparsified
Backpropagation", NeurIPS 2022.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

from efficient_ft.core.errors import SettingError
from efficient_ft.methods.checks import check_choice, check_sparsity
from efficient_ft.methods.declarations import Adds
from efficient_ft.methods.memory.packing import DENSE_FORWARD, ActivationPacking, uniform_policy
from efficient_ft.methods.registry import register
from efficient_ft.methods.skip import is_skipped, refuse_skip
from efficient_ft.models.view import ModelView, Reason, Skipped
from efficient_ft.ops.saving import Policy
from efficient_ft.ops.storage import Dense, EightBits, Half, Packer, Sparse

VALUES = ("fp16", "bf16", "same", "int8")


@register
class BackRazor(ActivationPacking):
    """Save only the largest activations of each sample. The forward pass does not change.

    A bitmap stores the positions of the saved values. The method prunes q, k, v, the output of the softmax, and the
    inputs of linear layers, convolutions and normalizations. The input of GELU is not pruned and is saved in half
    precision. ReLU saves one bit per element. The gradient of a layer's input does not depend on pruned values, except
    in normalizations and attention.

    Args:
        sparsity: fraction of the values that is dropped. Must be in [0, 1).
        value_dtype: dtype of the saved values. With ``fp16`` (as reported for the authors' implementation), `step_end`
            raises an error if a value overflows. ``bf16`` avoids overflows. ``same`` keeps the dtype of the activation.
            ``int8`` combines Back Razor with Mesa: all values, including the input of GELU, are saved in 8 bits with
            one running range per tensor.
        norm_saves: tensor that normalization layers save: the ``input`` (as published) or the ``normalized`` input x̂.
        attention: ``unfused`` saves q, k, v and the output of the softmax (as published). ``fused`` saves q, k and v in
            8 bits and recomputes attention from these tensors with torch's fused kernel.
        recompute_inputs: if True, a layer that follows GELU does not save its input. The input is recomputed from the
            tensor that is saved for GELU. With ``norm_saves=normalized``, the input of a layer that follows a LayerNorm
            is also recomputed.
        threshold: pruning threshold: ``exact`` (as published), or ``sampled``, which is estimated from 4096 values of
            each sample. With ``sampled``, the number of saved values may be slightly smaller than the sparsity allows,
            but not larger.
        prune: ``backward`` prunes only the tensors that are saved for the backward pass. With ``both``, the forward
            pass in training also uses the pruned tensors (the negative control in Figure 3 of the paper). The backward
            pass is the same for both values: gradients pass through the pruning operation unchanged (straight-through
            estimator). Evaluation and exported models remain dense.
        skip: parts of layer names, such as ``decoder`` or ``mlp.fc2``. Layers whose names contain one of these parts
            are not pruned. ``*`` matches any part.

    Raises:
        SettingError: If a setting is invalid, or if ``prune=both`` is combined with ``attention=fused`` or
            ``value_dtype=int8``.
    """

    name = "back_razor"

    def __init__(
        self,
        sparsity: float = 0.8,
        value_dtype: Literal["fp16", "bf16", "same", "int8"] = "fp16",
        norm_saves: Literal["input", "normalized"] = "normalized",
        attention: Literal["unfused", "fused"] = "unfused",
        recompute_inputs: bool = True,
        threshold: Literal["exact", "sampled"] = "sampled",
        prune: Literal["backward", "both"] = "backward",
        skip: Sequence[str] | None = None,
    ):
        super().__init__()
        check_sparsity(sparsity)
        check_choice("value_dtype", value_dtype, VALUES)
        check_choice("norm_saves", norm_saves, ("input", "normalized"))
        check_choice("attention", attention, ("unfused", "fused"))
        check_choice("threshold", threshold, ("exact", "sampled"))
        check_choice("prune", prune, ("backward", "both"))
        if prune == "both" and (attention == "fused" or value_dtype == "int8"):
            other = "attention=fused" if attention == "fused" else "value_dtype=int8"
            raise SettingError("prune", prune, f"backward with {other}", "With prune=both, values must not be rounded.")
        self.sparsity, self.value_dtype, self.norm_saves = sparsity, value_dtype, norm_saves
        self.attention, self.recompute_inputs = attention, recompute_inputs
        refuse_skip(skip)
        self.threshold, self.prune, self.skip = threshold, prune, skip
        if prune == "both":
            self.conflicts = {Adds.LOW_RANK_LAYERS: f"prune=both: {DENSE_FORWARD}"}

    def _left_plain(self, view: ModelView) -> dict[str, Skipped]:
        why = Skipped(Reason.NOT_CHOSEN, f"left dense ({self.full_name('skip')})")
        return {name: why for name, _ in view.model.named_modules() if is_skipped(name, self.skip)}

    def policy(self) -> Policy:
        half = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(self.value_dtype)
        eight_bits = self.value_dtype == "int8"
        sparse = Sparse(self.sparsity, half, eight_bits, self.threshold == "exact")
        activation: Packer = EightBits() if eight_bits else Dense() if half is None else Half(half)
        return uniform_policy(
            sparse,
            activation=activation,
            normalized=self.norm_saves == "normalized",
            derived=self.recompute_inputs,
            fused=EightBits() if self.attention == "fused" else None,
            forward=self.prune == "both",
        )
