"""LoRA (Hu et al., 2022) through peft: a low-rank matrix B·A is added to each adapted layer; its weight is frozen."""

from __future__ import annotations

import math
import re
from typing import Any, Literal

from torch import nn

from efficient_ft.core.errors import SettingError, UserError
from efficient_ft.methods.base import Applied, Method, make_trainable, trainable
from efficient_ft.methods.declarations import Adds, Axis
from efficient_ft.methods.registry import register
from efficient_ft.models.view import Layer, ModelView, Reason, Skipped, parameters_under

#: Projections in one matrix, by the layer's name: such a layer gets the rank of each, under one alpha (the LBP-WHT
#: baselines).
FUSED = {"qkv": 3, "kv": 2, "qk": 2}


@register
class LoRA(Method):
    """Adapt the layers that the selection applied before leaves trainable; without a selection, all.

    An adapted layer computes W x + (alpha / rank) B A x, with A from Kaiming-uniform(√5) and B = 0: the output is
    unchanged at initialization. `remove` merges the adapters into the weights and gives the layers their names back.

    With ``attention``, only A, B and the head train. With ``all``, every linear layer and 1×1 convolution that works
    on tokens or maps of the images is adapted, and the rest of what the selection chose trains too: biases, norms,
    layer scales, other convolutions. Layers no wider than the rank (talking heads) are left as they are: their adapter
    would not be low-rank.

    Args:
        rank: of each adapter; a fused qkv gets three times as much, with the same alpha (scale alpha / (3·rank)).
        alpha: the adapter's scale times its rank.
        targets: ``attention`` or ``all``.
        dropout: of the adapter's input, in training.

    Raises:
        SettingError: a value outside these.
        UserError: when applied: no such layer is in the part that trains, or the model has adapters already.
    """

    name = "lora"
    axis = Axis.ADAPTERS
    adds = frozenset({Adds.MODULES})

    def __init__(
        self,
        rank: int = 8,
        alpha: float = 8.0,
        targets: Literal["attention", "all"] = "attention",
        dropout: float = 0.0,
    ) -> None:
        if type(rank) is not int or rank < 1:
            raise SettingError("rank", rank, "an integer >= 1")
        if not (math.isfinite(alpha) and alpha > 0):
            raise SettingError("alpha", alpha, "a number > 0")
        if targets not in ("attention", "all"):
            raise SettingError("targets", targets, ["attention", "all"])
        if not 0 <= dropout < 1:
            raise SettingError("dropout", dropout, "a number >= 0 and < 1")
        self.rank, self.alpha, self.targets, self.dropout = rank, float(alpha), targets, float(dropout)
        self._adapted: tuple[str, ...] = ()
        # Attention modules whose qkv had to be made reachable, and requires_grad of every parameter, before.
        self._reached: tuple[str, ...] = ()
        self._before: dict[str, bool] = {}

    def _apply(self, model: nn.Module, view: ModelView) -> Applied:
        # peft takes seconds to import.
        from peft import LoraConfig, inject_adapter_in_model
        from peft.tuners.tuners_utils import BaseTunerLayer

        if any(isinstance(m, BaseTunerLayer) for m in model.modules()):
            raise UserError("method lora: the model has peft adapters already; merge or remove them first.")
        skipped = {layer.name: self._why_not(layer) for layer in view.layers}
        chosen = [layer for layer in view.layers if skipped[layer.name] is None]
        left_out = {name: why for name, why in skipped.items() if why is not None}
        if not chosen:
            raise self._nothing(view, left_out)

        self._before = trainable(model)
        self._adapted = tuple(layer.name for layer in chosen)
        self._reached = tuple(dict.fromkeys(layer.reach for layer in chosen if layer.reach is not None))
        if self.targets == "attention":
            trains = {n for n in parameters_under(model, view.head) if self._before[n]}
        else:
            weights = {f"{name}.weight" for name in self._adapted}
            trains = {n for n, before in self._before.items() if before and n not in weights}
        parameters = dict(model.named_parameters())

        config = LoraConfig(
            r=self.rank,
            lora_alpha=self.alpha,  # type: ignore[arg-type]
            lora_dropout=self.dropout,
            # One expression, matched as a whole: in a list, a name also matches the end of a longer one.
            target_modules="|".join(re.escape(name) for name in self._adapted),
            rank_pattern={re.escape(x.name): self._rank(x.name) for x in chosen if self._rank(x.name) != self.rank},
        )
        inject_adapter_in_model(config, model)
        del model.peft_config
        # peft froze all that is not an adapter, the head included.
        for name, parameter in parameters.items():
            parameter.requires_grad_(name in trains)
            if not parameter.requires_grad:
                parameter.grad = None
        for name in self._reached:
            model.get_submodule(name).qkv_bias_separate = True  # type: ignore[assignment]
        return Applied(self.name, self._adapted, left_out)

    def _remove(self, model: nn.Module) -> None:
        for name in self._adapted:
            layer: Any = model.get_submodule(name)
            layer.merge()
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, layer.get_base_layer())
        for name in self._reached:
            model.get_submodule(name).qkv_bias_separate = False  # type: ignore[assignment]
        make_trainable(model, self._before)

    def remove(self, model: nn.Module) -> None:
        super().remove(model)
        self._adapted, self._reached, self._before = (), (), {}

    def _rank(self, name: str) -> int:
        """Return the rank of a layer's adapter; a convolution with its norm in one module has the name one level up."""
        return self.rank * next((FUSED[part] for part in name.split(".")[-2:] if part in FUSED), 1)

    def _why_not(self, layer: Layer) -> Skipped | None:
        """Return why a layer gets no adapter; None: it gets one."""
        # Unlike a projection, an adapter needs no grid, but the input of its layer must come from the images.
        if layer.why_not is not None and layer.why_not.reason != Reason.NO_GRID:
            return layer.why_not
        if self.targets == "attention" and not layer.in_attention:
            return Skipped(Reason.NOT_ATTENTION)
        if not layer.module.weight.requires_grad:  # type: ignore[union-attr]
            return Skipped(Reason.FROZEN)
        if self._rank(layer.name) >= min(layer.channels):
            detail = f"rank {self._rank(layer.name)} is not below its {min(layer.channels)} channels"
            return Skipped(Reason.TOO_NARROW, detail)
        return None

    def _nothing(self, view: ModelView, skipped: dict[str, Skipped]) -> UserError:
        """Return the error for a model without a layer to adapt: the reason, and what to do about it."""
        narrow = next((f"{n}: {why}" for n, why in skipped.items() if why.reason == Reason.TOO_NARROW), None)
        if narrow is not None:
            return UserError(f"method lora: no layer of {view.name} is wide enough ({narrow}); take a lower rank.")
        frozen = sum(why.reason == Reason.FROZEN for why in skipped.values())
        if frozen:
            return UserError(
                f"method lora: the {frozen} layers of {view.name} that could be adapted are all"
                f" {Reason.FROZEN.value}. Adapters go where weights train: choose full, last_stage or blocks."
            )
        if self.targets == "attention":
            return UserError(
                f"method lora: {view.name} has no attention layers that adapters could reach;"
                " use targets=all (method=lora_all)."
            )
        return UserError(
            f"method lora: {view.name} has no linear layers or 1×1 convolutions outside its stem and head."
        )
