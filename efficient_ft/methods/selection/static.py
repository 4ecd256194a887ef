"""Static selections: which parameters train, chosen once, before training.

Only selections set `requires_grad` (adapters may freeze what they adapt). Below the lowest parameter that trains,
autograd records no graph and keeps no activation.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from typing import ClassVar

from torch import Tensor, nn

from efficient_ft.core.errors import SettingError, UserError
from efficient_ft.methods.base import Applied, Method, make_trainable, trainable
from efficient_ft.methods.blocks import blocks_at, check_indices
from efficient_ft.methods.declarations import Axis, Needs
from efficient_ft.methods.feed_forward import run_in_parts, run_whole
from efficient_ft.methods.registry import register
from efficient_ft.methods.summary import ranges, trained
from efficient_ft.models.view import ModelView, Reason, Skipped, is_norm, parameters_under


class Selection(Method):
    """Base of the selections: a subclass returns in `chosen` the parameters that train; all others are frozen.

    `apply` sets `requires_grad` and reports modules and parameters by the fewest names; `remove` restores what
    `requires_grad` was. Frozen feed-forward networks run on parts of the batch, see `methods.feed_forward`. A
    constructor calls ``super().__init__()``.
    """

    axis = Axis.SELECTION
    changes_weights = False
    #: `requires_grad` of every parameter before the selection, by name.
    _before: dict[str, bool]

    def __init__(self) -> None:
        self._before = {}

    @abstractmethod
    def chosen(self, view: ModelView) -> dict[str, Tensor]:
        """Return the parameters that train, by full name.

        Args:
            view: the view of the model. `parameters_under(view.model, names)` gives the parameters of modules.

        Raises:
            SettingError: a setting does not fit this model.
            UserError: nothing in the model can be chosen.
        """

    def _apply(self, model: nn.Module, view: ModelView) -> Applied:
        chosen = {id(p) for p in self.chosen(view).values()}
        self._before = trainable(model)
        make_trainable(model, {name: id(p) in chosen for name, p in model.named_parameters()})
        run_in_parts(model)
        frozen = {id(p) for p in model.parameters()} - chosen
        skipped = dict.fromkeys(concise(model, frozen), Skipped(Reason.FROZEN, "frozen"))
        touched = concise(model, chosen)
        return Applied(self.name, touched, skipped, summary=f"{self._trains(touched)}: {trained(model)}")

    def _trains(self, touched: tuple[str, ...]) -> str:
        """Return a phrase about the trained parts; `touched` names them with the fewest names."""
        return f"{ranges(touched)} {'trains' if len(touched) == 1 else 'train'}"

    def _remove(self, model: nn.Module) -> None:
        run_whole(model)
        make_trainable(model, self._before)

    def remove(self, model: nn.Module) -> None:
        super().remove(model)
        self._before = {}


@register
class Full(Selection):
    """Train everything: plain fine-tuning.

    Args:
        train_norms: False: all but the scales and shifts of normalization layers, as Back Razor trains CNNs (Jiang et
            al., NeurIPS 2022, section 4.2).
    """

    name = "full"

    def __init__(self, train_norms: bool = True) -> None:
        super().__init__()
        if not isinstance(train_norms, bool):
            raise SettingError("train_norms", train_norms, ("true", "false"))
        self.train_norms = train_norms

    def _trains(self, touched: tuple[str, ...]) -> str:
        return "everything trains" if self.train_norms else "everything except normalization layers trains"

    def chosen(self, view: ModelView) -> dict[str, Tensor]:
        parameters: dict[str, Tensor] = dict(view.model.named_parameters())
        if self.train_norms:
            return parameters
        norms = [name for name, module in view.model.named_modules() if is_norm(module)]
        frozen = parameters_under(view.model, norms)
        return {name: parameter for name, parameter in parameters.items() if name not in frozen}


@register
class HeadOnly(Selection):
    """Train the classifier alone (linear probing); a model with two classifiers trains both."""

    name = "head"
    needs = frozenset({Needs.CLASSIFIER})

    def chosen(self, view: ModelView) -> dict[str, Tensor]:
        return view.new_parameters()


@register
class LastStage(Selection):
    """Train the last stage, what follows it and the head: the partial training of LBP-WHT.

    The stage's downsampling is part of it, except where the papers left it out (EfficientFormerV2). An isotropic
    transformer has four equal stages. See `ModelView.last_stage`.

    Raises:
        UserError: when applied: the model has no stages or blocks that could be recognized.
    """

    name = "last_stage"
    needs = frozenset({Needs.CLASSIFIER})

    def chosen(self, view: ModelView) -> dict[str, Tensor]:
        try:
            last = view.last_stage()
        except UserError as error:
            raise UserError(f"{self.name}: {error}") from None
        return parameters_under(view.model, last) | view.new_parameters()


@register
class Blocks(Selection):
    """Train the blocks listed, the final norm and the head.

    Args:
        blocks: indices into the model's blocks, counted from 0 through all stages; negative ones from the end.

    Raises:
        SettingError: no index is given, or (when applied) one is outside the model.
    """

    name = "blocks"
    needs = frozenset({Needs.BLOCKS, Needs.CLASSIFIER})
    hints: ClassVar[Mapping[Needs, str]] = {
        Needs.BLOCKS: "Choose what trains by another selection (head, full, bitfit, norm_last)."
    }
    #: A block listed twice is an error.
    _each_once = False

    def __init__(self, blocks: list[int]) -> None:
        super().__init__()
        check_indices("blocks", blocks, do="For the head alone use method=head.")
        self.blocks = list(blocks)

    def chosen(self, view: ModelView) -> dict[str, Tensor]:
        final = parameters_under(view.model, view.tail)
        norms = {n: p for n, p in _norms(view.model).items() if n in final}
        return parameters_under(view.model, self._names(view)) | view.new_parameters() | norms

    def _names(self, view: ModelView) -> tuple[str, ...]:
        """Return the names of the blocks listed."""
        return blocks_at(view, f"method.{self.name}.blocks", self.blocks, once=self._each_once)


@register
class BitFit(Selection):
    """Train all bias vectors and the head (Ben Zaken et al., 2022).

    SwinV2's and BEiT's `q_bias` and `v_bias`, which are not in the qkv layer, are included; tables of relative
    positions that are called biases are not.

    Raises:
        UserError: when applied: the model has no biases outside its head.
    """

    name = "bitfit"
    needs = frozenset({Needs.CLASSIFIER})

    def _trains(self, touched: tuple[str, ...]) -> str:
        return "biases and head train"

    def chosen(self, view: ModelView) -> dict[str, Tensor]:
        head = view.new_parameters()
        biases = {n: p for n, p in view.model.named_parameters() if p.dim() == 1 and re.search(r"(^|\.|_)bias$", n)}
        if not biases.keys() - head.keys():
            raise UserError(f"method bitfit: {view.name} has no biases outside its head; use method=head.")
        return biases | head


@register
class NormLast(Selection):
    """Train the scales and shifts of all normalization layers, and the head (FT-Norm+Last).

    Raises:
        UserError: when applied: the model has no such parameters outside its head.
    """

    name = "norm_last"
    needs = frozenset({Needs.CLASSIFIER})

    def _trains(self, touched: tuple[str, ...]) -> str:
        return "normalization layers and head train"

    def chosen(self, view: ModelView) -> dict[str, Tensor]:
        head = view.new_parameters()
        norms = _norms(view.model)
        if not norms.keys() - head.keys():
            raise UserError(
                f"method norm_last: {view.name} has no normalization layers with parameters outside its head; use"
                " method=head."
            )
        return norms | head


def concise(model: nn.Module, chosen: set[int]) -> tuple[str, ...]:
    """Return the fewest names of modules and parameters that stand for exactly the parameters whose ids are given."""

    def names(module: nn.Module, prefix: str) -> Iterator[str]:
        own = [f"{prefix}{n}" for n, p in module.named_parameters(recurse=False) if id(p) in chosen]
        yield from own
        for child_name, child in module.named_children():
            inside = [id(p) in chosen for p in child.parameters()]
            if inside and all(inside):
                yield f"{prefix}{child_name}"
            elif any(inside):
                yield from names(child, f"{prefix}{child_name}.")

    return tuple(names(model, ""))


def _norms(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters that normalization layers hold themselves, by full name."""
    return {
        f"{name}.{own}" if name else own: parameter
        for name, module in model.named_modules()
        if is_norm(module)
        for own, parameter in module.named_parameters(recurse=False)
    }
