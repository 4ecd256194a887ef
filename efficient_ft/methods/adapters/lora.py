"""LoRA: add trainable low-rank adapters to linear layers and 1×1 convolutions.

Source: Hu, Shen, Wallis, Allen-Zhu, Li, Wang, Wang, Chen, "LoRA: Low-Rank Adaptation of Large Language Models", ICLR
2022. The library `peft` implements the adapted layers.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Any, Literal

from torch import nn

from efficient_ft.core.errors import UserError, hint
from efficient_ft.methods.base import Applied, Method
from efficient_ft.methods.checks import check_bool, check_choice, check_integer, check_number
from efficient_ft.methods.declarations import Adds, Axis
from efficient_ft.methods.quantized import is_quantized, refuse_quantized
from efficient_ft.methods.registry import register
from efficient_ft.methods.summary import count, left, trained, within
from efficient_ft.models.marks import is_inside
from efficient_ft.models.trained import make_trainable, trainable
from efficient_ft.models.view import Layer, ModelView, Reason, Skipped, projections_in
from efficient_ft.models.weight_dtype import stores_bf16


@register
class LoRA(Method):
    """Add LoRA adapters to the trainable layers of the model (Hu et al., ICLR 2022).

    Only layers whose weights are trainable are adapted. If no other method has selected the trained parameters, all
    supported layers are adapted. An adapted layer computes W x + (alpha / rank) B A x. W is frozen, A is initialized
    with ``kaiming_uniform_(a=√5)``, and B is initialized with zeros, so that the initial output is unchanged. `remove`
    merges the adapters into the weights and restores the names of the layers.

    With ``targets="attention"``, linear layers and 1×1 convolutions in attention modules are adapted, and only A, B and
    the head are trained. With ``targets="all"``, every linear layer and 1×1 convolution whose input depends on the
    images is adapted. Other trainable parameters (biases, norms, layer scales and other convolutions) are also trained.
    The stem, the head and new modules around a pretrained network are never adapted. Layers whose number of input or
    output channels does not exceed the rank (for example, talking heads) are not adapted. Subclasses of `nn.Linear` and
    `nn.Conv2d` (for example, convolutions with standardized weights) are not adapted either.

    Args:
        rank: rank r of each adapter. Must be at least 1. The adapter of a fused qkv layer has the rank 3·rank and the
            scale alpha / (3·rank).
        alpha: numerator of the scale alpha / rank. Must be positive.
        targets: layers to adapt. ``attention``: linear layers and 1×1 convolutions in attention modules. ``all``: all
            linear layers and 1×1 convolutions.
        dropout: dropout probability of the inputs of the adapters during training. Must be in [0, 1).
        as_published: if True, choose the layers as reported for the baselines of the LBP-WHT paper. Layers whose
            forward method is never called (such as qkv in SwinV2) are not adapted, whereas layers with fewer channels
            than the rank (such as talking heads) are adapted.

    Raises:
        SettingError: If a setting is out of range.
        UserError: Raised by `apply` if no trainable layer can be adapted, if all layers are too narrow for the rank, if
            the model already has `peft` adapters, or if another method that adds modules has been applied.
    """

    name = "lora"
    axis = Axis.ADAPTERS
    adds = frozenset({Adds.MODULES})
    libraries = ("peft",)

    def __init__(
        self,
        rank: int = 8,
        alpha: float = 8.0,
        targets: Literal["attention", "all"] = "attention",
        dropout: float = 0.0,
        as_published: bool = False,
    ) -> None:
        check_integer("rank", rank)
        check_number("alpha", alpha, "a number > 0", lambda number: number > 0)
        check_choice("targets", targets, ("attention", "all"))
        check_number("dropout", dropout, "a number >= 0 and < 1", lambda share: 0 <= share < 1)
        check_bool("as_published", as_published)
        self.rank, self.alpha, self.targets, self.dropout = rank, float(alpha), targets, float(dropout)
        self.as_published = as_published
        self._adapted: tuple[str, ...] = ()
        # Attention modules that call their qkv layer instead of reading its weight while the method is applied.
        self._reached: tuple[str, ...] = ()
        # Values of `requires_grad` before `apply`, keyed by parameter name.
        self._before: dict[str, bool] = {}

    def _apply(self, model: nn.Module, view: ModelView) -> Applied:
        # `peft` is imported only here, because the import takes several seconds.
        from peft import LoraConfig, inject_adapter_in_model

        outside = frozenset(view.outside)  # new layers are trained directly, without adapters
        skipped = {x.name: Skipped(Reason.NEW) if is_inside(x.name, outside) else self._why_not(x) for x in view.layers}
        uses = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
        shared = (x.name for x in view.layers if uses[id(x.module.weight)] > 1)
        skipped |= {name: skipped[name] or Skipped(Reason.SHARED) for name in shared}
        chosen = [layer for layer in view.layers if skipped[layer.name] is None]
        left_out = {name: why for name, why in skipped.items() if why is not None}
        if not chosen:
            raise self._nothing(view, left_out)

        self._before = trainable(model)
        self._adapted = tuple(layer.name for layer in chosen)
        self._reached = tuple(dict.fromkeys(layer.reach for layer in chosen if layer.reach is not None))
        trains = self._trains(model, view, left_out)
        parameters = dict(model.named_parameters())

        config = LoraConfig(
            r=self.rank,
            lora_alpha=self.alpha,  # type: ignore[arg-type]
            lora_dropout=self.dropout,
            # A regular expression is used, because names in a list would also match as suffixes.
            target_modules="|".join(re.escape(name) for name in self._adapted),
            rank_pattern={re.escape(x.name): self._rank(x.name) for x in chosen if self._rank(x.name) != self.rank},
        )
        inject_adapter_in_model(config, model)
        del model.peft_config
        # `peft` gives the adapters the dtype of the layers. Adapters stay in fp32 if only large weights are in bf16.
        if stores_bf16(model):
            known = {id(parameter) for parameter in parameters.values()}
            for parameter in model.parameters():
                if id(parameter) not in known:
                    parameter.data = parameter.data.float()
        # `peft` freezes all parameters except those of the adapters. Make the other trained parameters trainable again.
        for name, parameter in parameters.items():
            parameter.requires_grad_(name in trains)
            if not parameter.requires_grad:
                parameter.grad = None
        for layer in chosen:
            # Some networks (such as DaViT) read attributes of their layers, such as kernel_size, in the forward pass.
            original: Any = layer.module
            adapter = model.get_submodule(layer.name)
            for attribute in original.__constants__:
                if hasattr(original, attribute) and not hasattr(adapter, attribute):
                    setattr(adapter, attribute, getattr(original, attribute))
        for name in self._reached:
            model.get_submodule(name).qkv_bias_separate = True  # type: ignore[assignment]
        return Applied(self.name, self._adapted, left_out, summary=self._summary(model, left_out))

    def _remove(self, model: nn.Module) -> None:
        for name in self._adapted:
            layer: Any = model.get_submodule(name)
            layer.merge()
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, layer.get_base_layer())
        for name in self._reached:
            model.get_submodule(name).qkv_bias_separate = False  # type: ignore[assignment]
        make_trainable(model, self._before)

    def _summary(self, model: nn.Module, left_out: dict[str, Skipped]) -> str:
        where = f"{count(len(self._adapted), 'layer')} in {within(self._adapted)}"
        return f"adapters of rank {self.rank} in {where} are trained: {trained(model)}{left(left_out, 'not adapted')}"

    def _trains(self, model: nn.Module, view: ModelView, left_out: dict[str, Skipped]) -> set[str]:
        if self.targets == "attention":
            return self._trained_head(view)
        # With `as_published`, layers whose forward method is never called are frozen, like the adapted layers.
        unreached = [name for name, why in left_out.items() if why.reason == Reason.AS_PUBLISHED]
        weights = {f"{name}.weight" for name in (*self._adapted, *unreached)}
        return {n for n, before in self._before.items() if before and n not in weights}

    def _trained_head(self, view: ModelView) -> set[str]:
        return {n for n in view.new_parameters() if self._before[n]}

    def _rank(self, name: str) -> int:
        """Return the rank of the adapter of a layer. The rank is larger for fused layers."""
        return self.rank * projections_in(name)

    def _why_not(self, layer: Layer) -> Skipped | None:
        """Return the reason why a layer receives no adapter, or None if the layer receives an adapter."""
        # The input of an adapted layer must depend on the images, but a token grid is not required.
        if layer.why_not is not None and layer.why_not.reason != Reason.NO_GRID:
            return layer.why_not
        if self.targets == "attention" and not layer.in_attention:
            return Skipped(Reason.NOT_ATTENTION)
        return self._why_not_trained(layer)

    def _why_not_trained(self, layer: Layer) -> Skipped | None:
        if type(layer.module) not in (nn.Linear, nn.Conv2d):
            # Adapters cannot be merged into standardized weights, and matrix A does not support "same" padding.
            return Skipped(Reason.OTHER_FORM, f"the class {type(layer.module).__name__} overrides the forward method")
        weight: Any = layer.module.weight
        if is_quantized(weight):
            return Skipped(Reason.QUANTIZED, f"quantized ({type(weight).__name__})")
        if not weight.requires_grad:
            return Skipped(Reason.FROZEN)
        if layer.reach is not None and self.as_published:
            return Skipped(Reason.AS_PUBLISHED, "the forward method of the layer is never called")
        if self._rank(layer.name) >= min(layer.channels) and not self.as_published:
            detail = f"the rank {self._rank(layer.name)} is not below min(in, out) = {min(layer.channels)} channels"
            return Skipped(Reason.TOO_NARROW, detail)
        return None

    def _nothing(self, view: ModelView, skipped: dict[str, Skipped]) -> UserError:
        narrow = next((f"{n}: {why}" for n, why in skipped.items() if why.reason == Reason.TOO_NARROW), None)
        if narrow is not None:
            return UserError(
                f"method {self.name}: all layers of {view.name} have too few channels ({narrow}). Use a lower rank."
            )
        quantized = [f"{name}.weight" for name, why in skipped.items() if why.reason == Reason.QUANTIZED]
        refuse_quantized(self.name, view.model, quantized, "adapt")
        frozen = sum(why.reason == Reason.FROZEN for why in skipped.values())
        if frozen:
            return UserError(
                f"method {self.name}: all {frozen} layers of {view.name} that could be adapted are"
                f" {Reason.FROZEN.value}. Only trainable layers can be adapted. Select full, last_stage or blocks."
            )
        if self.targets == "attention":
            attention = {
                skipped[layer.name].reason for layer in view.layers if layer.in_attention and layer.name in skipped
            }
            not_called = Reason.NOT_CALLED in attention
            why = " (attention modules do not call the forward methods of their layers)" if not_called else ""
            return UserError(
                f"method {self.name}: the model {view.name} has no attention layers that can be adapted{why}."
                + f" Use {self.full_name('targets')}={hint(repr('all'), 'all')}."
            )
        return UserError(
            f"method {self.name}: the model {view.name} has no linear layers or 1×1 convolutions outside of its stem"
            " and head that can be adapted. Use another method, for example bitfit or last_stage."
        )
