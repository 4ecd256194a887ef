"""Back Razor: activations pruned to their largest values between the forward and the backward pass.

Source: Jiang, Chen, Huang, Du, Zhou, Wang, "Back Razor: Memory-Efficient Transfer Learning by Self-Sparsified
Backpropagation", NeurIPS 2022.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

from efficient_ft.core.errors import SettingError
from efficient_ft.methods.declarations import Adds
from efficient_ft.methods.memory.packing import DENSE_FORWARD, ActivationPacking
from efficient_ft.methods.registry import register
from efficient_ft.methods.skip import is_skipped, refuse_skip
from efficient_ft.models.view import ModelView, Reason, Skipped
from efficient_ft.ops.saving import Policy
from efficient_ft.ops.storage import Dense, EightBits, Half, Packer, Sparse

VALUES = ("fp16", "bf16", "same", "int8")


@register
class BackRazor(ActivationPacking):
    """Keep the largest values of each sample's activations and a bitmap; the forward pass is not changed.

    Pruned are the inputs of linear layers, convolutions and normalizations, q, k, v and softmax's output; GELU's input
    is kept whole, in half precision, and ReLU keeps a bit per element. Gradients to a layer's input do not depend on
    what is pruned, except through normalizations and attention.

    Args:
        sparsity: share of the values dropped, from 0 to below 1.
        value_dtype: type of the values kept: ``fp16`` (as the authors; where it overflows, `step_end` raises an error),
            ``bf16``, ``same`` (the activation's own), or ``int8`` (Back Razor with Mesa: 8 bits, a running range per
            tensor; GELU's input too).
        norm_saves: what normalizations keep: their ``input`` (as published), or x̂, ``normalized``.
        attention: ``unfused`` keeps q, k, v and softmax's output (as published); ``fused`` keeps q, k and v in 8 bits
            and recomputes attention from them by torch's fused kernel.
        recompute_inputs: a layer that takes the output of GELU, or of a LayerNorm if ``norm_saves=normalized``, keeps
            no input of its own: it is computed from what the layer before keeps.
        threshold: ``exact`` (as published), or ``sampled``: estimated from 4096 values of each sample, never over
            budget and a little below it.
        prune: ``backward``, or ``both``: the paper's negative control (its Figure 3), in which the forward pass of
            training also computes with the pruned tensors. The formulas of the backward pass are the same: pruning
            passes gradients straight through. Evaluation stays dense, so that the two differ only in the forward pass
            of training, and the exported model is what is evaluated.
        skip: parts of the names of layers that stay dense: ``decoder``, ``mlp.fc2``; ``*`` is any part.

    Raises:
        SettingError: a value outside these, or ``prune=both`` with ``attention=fused`` or ``value_dtype=int8``.
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
        if isinstance(sparsity, bool) or not isinstance(sparsity, int | float) or not 0 <= sparsity < 1:
            raise SettingError("sparsity", sparsity, "a number >= 0 and < 1")
        for setting, value, allowed in (
            ("value_dtype", value_dtype, VALUES),
            ("norm_saves", norm_saves, ("input", "normalized")),
            ("attention", attention, ("unfused", "fused")),
            ("threshold", threshold, ("exact", "sampled")),
            ("prune", prune, ("backward", "both")),
        ):
            if value not in allowed:
                raise SettingError(setting, value, allowed)
        if prune == "both" and (attention == "fused" or value_dtype == "int8"):
            other = "attention=fused" if attention == "fused" else "value_dtype=int8"
            raise SettingError("prune", prune, f"backward with {other}", "The control prunes, it does not round.")
        self.sparsity, self.value_dtype, self.norm_saves = sparsity, value_dtype, norm_saves
        self.attention, self.recompute_inputs = attention, recompute_inputs
        refuse_skip(skip)
        self.threshold, self.prune, self.skip = threshold, prune, skip
        if prune == "both":
            self.conflicts = {Adds.LOW_RANK_LAYERS: f"prune=both: {DENSE_FORWARD}"}

    def _left_plain(self, view: ModelView) -> dict[str, Skipped]:
        why = Skipped(Reason.NOT_CHOSEN, f"left dense (method.{self.name}.skip)")
        return {name: why for name, _ in view.model.named_modules() if is_skipped(name, self.skip)}

    def policy(self) -> Policy:
        half = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(self.value_dtype)
        eight_bits = self.value_dtype == "int8"
        sparse = Sparse(self.sparsity, half, eight_bits, self.threshold == "exact")
        activation: Packer = EightBits() if eight_bits else Dense() if half is None else Half(half)
        return Policy(
            product=sparse,
            norm=sparse,
            attention=sparse,
            activation=activation,
            normalized=self.norm_saves == "normalized",
            derived=self.recompute_inputs,
            fused=EightBits() if self.attention == "fused" else None,
            forward=self.prune == "both",
        )
