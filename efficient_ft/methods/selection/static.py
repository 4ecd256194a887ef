"""Static selections: which parameters train, chosen once, before training.

Selections alone decide `requires_grad` (adapters may freeze what they adapt). Below the lowest parameter that trains,
autograd records no graph and keeps no activation.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from efficient_ft.core.errors import SettingError, UserError
from efficient_ft.methods.base import Applied, Method, make_trainable, trainable
from efficient_ft.models.view import ModelView, is_norm, parameters_under, view


class Selection(Method):
    """Base of the selections: a subclass says which parameters train; all others are frozen."""

    axis = "selection"
    #: `requires_grad` of every parameter before the selection, by name.
    _before: dict[str, bool]

    def __init__(self) -> None:
        self._before = {}

    def _chosen(self, model: nn.Module) -> dict[str, Tensor]:
        """The parameters that train, by full name."""
        raise NotImplementedError  # abstract

    def _apply(self, model: nn.Module) -> Applied:
        refuse_adapted(model, self.name)
        chosen = {id(p) for p in self._chosen(model).values()}
        self._before = trainable(model)
        make_trainable(model, {name: id(p) in chosen for name, p in model.named_parameters()})
        frozen = {id(p) for p in model.parameters()} - chosen
        return Applied(self.name, concise(model, chosen), dict.fromkeys(concise(model, frozen), "frozen"))

    def _remove(self, model: nn.Module) -> None:
        """Every parameter is trainable or frozen again as it was before; values stay."""
        if not self._before:
            return
        refuse_adapted(model, self.name)
        make_trainable(model, self._before)

    def remove(self, model: nn.Module) -> None:
        super().remove(model)
        self._before = {}


class Full(Selection):
    """Everything trains: plain fine-tuning."""

    name = "full"

    def _chosen(self, model: nn.Module) -> dict[str, Tensor]:
        return dict(model.named_parameters())


class HeadOnly(Selection):
    """The classifier alone trains (linear probing); a model with two classifiers trains both."""

    name = "head"

    def _chosen(self, model: nn.Module) -> dict[str, Tensor]:
        return _head(view(model))


class LastStage(Selection):
    """The last stage, what follows it and the head train: the partial training of LBP-WHT.

    The stage's downsampling belongs to it, save where the papers left it out (EfficientFormerV2). An isotropic
    transformer has four equal stages. See `ModelView.last_stage`.
    """

    name = "last_stage"

    def _chosen(self, model: nn.Module) -> dict[str, Tensor]:
        seen = view(model)
        return parameters_under(model, seen.last_stage()) | _head(seen)


class Blocks(Selection):
    """The blocks listed, the final norm and the head train.

    Args:
        blocks: indices into the model's blocks, counted from 0 through all stages; negative ones from the end.

    Raises:
        SettingError: no index is given, or (when applied) one lies outside the model.
    """

    name = "blocks"

    def __init__(self, blocks: list[int]) -> None:
        super().__init__()
        check_blocks(blocks)
        self.blocks = list(blocks)

    def _chosen(self, model: nn.Module) -> dict[str, Tensor]:
        seen = view(model)
        chosen = blocks_at(seen, f"method.{self.name}.blocks", self.blocks)
        head = _head(seen)
        final = parameters_under(model, seen.tail)
        norms = {n: p for n, p in _norms(model).items() if n in final}
        return parameters_under(model, chosen) | norms | head


class BitFit(Selection):
    """All bias vectors and the head train (Ben Zaken et al., 2022).

    SwinV2's and BEiT's `q_bias` and `v_bias`, which lie outside the qkv layer, belong to them; tables of relative
    positions that are called biases do not.
    """

    name = "bitfit"

    def _chosen(self, model: nn.Module) -> dict[str, Tensor]:
        head = _head(view(model))
        biases = {n: p for n, p in model.named_parameters() if p.dim() == 1 and re.search(r"(^|\.|_)bias$", n)}
        if not biases.keys() - head.keys():
            raise UserError(f"method bitfit: {type(model).__name__} has no biases outside its head; use method=head.")
        return biases | head


class NormLast(Selection):
    """The scales and shifts of all normalisation layers, and the head, train (FT-Norm+Last)."""

    name = "norm_last"

    def _chosen(self, model: nn.Module) -> dict[str, Tensor]:
        head = _head(view(model))
        norms = _norms(model)
        if not norms.keys() - head.keys():
            raise UserError(
                f"method norm_last: {type(model).__name__} has no normalisation layers with parameters outside its"
                " head; use method=head."
            )
        return norms | head


def check_blocks(blocks: Any) -> None:
    """Raise SettingError for what is no list of indices."""
    if not isinstance(blocks, Sequence) or isinstance(blocks, str) or not all(type(b) is int for b in blocks):
        raise SettingError("blocks", blocks, "a list of whole numbers, e.g. [3,7,11]")
    if not blocks:
        raise SettingError("blocks", "[]", "at least one block", "For the head alone use method=head.")


def blocks_at(seen: ModelView, setting: str, blocks: Sequence[int]) -> list[str]:
    """The names of blocks by their indices, negative ones from the end, for a method's `setting`.

    Raises:
        SettingError: an index outside the model.
        UserError: the model has no blocks.
    """
    count = len(seen.blocks)
    if not count:
        raise UserError(
            f"{setting.rpartition('.')[0].replace('.', ' ')}: no blocks were recognised in {seen.name};"
            " choose what trains by another selection (head, full, bitfit, norm_last)."
        )
    if not all(-count <= index < count for index in blocks):
        raise SettingError(
            setting, list(blocks), f"indices from {-count} to {count - 1}: {seen.name} has {count} blocks"
        )
    return [seen.blocks[index] for index in blocks]


def refuse_twice(seen: ModelView, setting: str, blocks: Sequence[int]) -> None:
    """Raise SettingError where a method's `setting`, indices inside the model, lists a block twice."""
    if len({index % len(seen.blocks) for index in blocks}) < len(blocks):
        raise SettingError(setting, list(blocks), "each block once")


def concise(model: nn.Module, chosen: set[int]) -> tuple[str, ...]:
    """The fewest module and parameter names that stand for exactly the parameters whose ids are in `chosen`."""

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


def _head(seen: ModelView) -> dict[str, Tensor]:
    if not seen.head:
        raise UserError(f"{seen.name} has no classifier to train: create it with num_classes=N (N of at least 1).")
    return parameters_under(seen.model, seen.head)


def _norms(model: nn.Module) -> dict[str, Tensor]:
    """Parameters that normalisation layers hold themselves, by full name."""
    return {
        f"{name}.{own}" if name else own: parameter
        for name, module in model.named_modules()
        if is_norm(module)
        for own, parameter in module.named_parameters(recurse=False)
    }


def refuse_adapted(model: nn.Module, name: str) -> None:
    """Adapters take what the selection leaves trainable, and rename what they adapt: they come after it."""
    adapted = next((n for n, m in model.named_modules() if hasattr(m, "base_layer") and hasattr(m, "lora_A")), None)
    if adapted is not None:
        raise UserError(
            f"method {name}: the model already holds adapters ({adapted}). Apply the selection first and the adapters"
            " after it (apply_methods does so), and remove them in the opposite order."
        )
