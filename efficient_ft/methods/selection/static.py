"""Static selection methods, which select the parameters to train once before training.

Only selection methods set `requires_grad`. As an exception, adapters may freeze the layers that they adapt. Below the
lowest trainable parameter, autograd records no graph and saves no activations.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from typing import ClassVar

from torch import Tensor, nn

from efficient_ft.core.errors import UserError
from efficient_ft.methods.base import Applied, Method
from efficient_ft.methods.checks import blocks_at, check_bool, check_indices
from efficient_ft.methods.declarations import Axis, Needs
from efficient_ft.methods.feed_forward import run_in_parts, run_whole
from efficient_ft.methods.quantized import refuse_quantized
from efficient_ft.methods.registry import register
from efficient_ft.methods.summary import ranges, trained
from efficient_ft.models.trained import make_trainable, trainable
from efficient_ft.models.view import ModelView, Reason, Skipped, has_attention, is_norm, parameters_under


class Selection(Method):
    """Base class of the selection methods.

    A subclass implements `chosen`, which returns the parameters to train. All other parameters are frozen. `apply` sets
    `requires_grad`, and the report lists the trained and the frozen parts with as few names as possible. `remove`
    restores `requires_grad`. Frozen feed-forward networks process the batch in parts (see `methods.feed_forward`). A
    constructor must call ``super().__init__()``.
    """

    axis = Axis.SELECTION
    changes_weights = False
    #: Mapping from parameter names to the value of `requires_grad` before the method was applied.
    _before: dict[str, bool]

    def __init__(self) -> None:
        self._before = {}

    @abstractmethod
    def chosen(self, view: ModelView) -> dict[str, Tensor]:
        """Return a mapping from full names to the parameters to train.

        Args:
            view: view of the model. `parameters_under(view.model, names)` returns the parameters of the modules with
                the given names.

        Raises:
            SettingError: If a setting does not fit this model.
            UserError: If the model has no parameter that can be selected.
        """

    def _apply(self, model: nn.Module, view: ModelView) -> Applied:
        chosen = {id(p) for p in self._checked(view).values()}
        self._before = trainable(model)
        make_trainable(model, {name: id(p) in chosen for name, p in model.named_parameters()})
        run_in_parts(model)
        frozen = {id(p) for p in model.parameters()} - chosen
        skipped = dict.fromkeys(concise(model, frozen), Skipped(Reason.FROZEN, "frozen"))
        touched = concise(model, chosen)
        return Applied(self.name, touched, skipped, summary=f"{self._trains(touched, view)}: {trained(model)}")

    def _checked(self, view: ModelView) -> dict[str, Tensor]:
        """Return the parameters to train, or raise UserError if one of them is quantized."""
        chosen = self.chosen(view)
        refuse_quantized(self.name, view.model, chosen, "train")
        return chosen

    def _trains(self, touched: tuple[str, ...], view: ModelView) -> str:
        """Return a phrase that states which parts are trained. `touched` contains the names of these parts."""
        is_one = len(touched) == 1 and not touched[0].endswith("s")  # a module may be named "heads"
        return f"{ranges(touched)} {'trains' if is_one else 'train'}"

    def _remove(self, model: nn.Module) -> None:
        run_whole(model)
        make_trainable(model, self._before)


@register
class Full(Selection):
    """Train all parameters (full fine-tuning).

    Args:
        train_norms: if False, the scales and shifts of normalization layers are frozen, as in Back Razor for CNNs
            (Jiang et al., NeurIPS 2022, Section 4.2).
    """

    name = "full"

    def __init__(self, train_norms: bool = True) -> None:
        super().__init__()
        check_bool("train_norms", train_norms)
        self.train_norms = train_norms

    def _trains(self, touched: tuple[str, ...], view: ModelView) -> str:
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
    """Train only the classifier (linear probing). If a model has two classifiers, both classifiers are trained."""

    name = "head"
    needs = frozenset({Needs.CLASSIFIER})

    def chosen(self, view: ModelView) -> dict[str, Tensor]:
        return view.new_parameters()


@register
class LastStage(Selection):
    """Train the last stage, the layers after the last stage, and the head (the partial training in the LBP-WHT paper).

    The downsampling layer of the stage is also trained, except in EfficientFormerV2 (as reported for LBP-WHT). An
    isotropic transformer is divided into four stages of equal size. See `ModelView.last_stage`.

    Raises:
        UserError: Raised by `apply` if the model's stages or blocks are not recognized.
    """

    name = "last_stage"

    def chosen(self, view: ModelView) -> dict[str, Tensor]:
        try:
            last = view.last_stage()
        except UserError as error:
            raise UserError(f"method {self.name}: {error}") from None
        return parameters_under(view.model, last) | view.new_parameters()


@register
class Blocks(Selection):
    """Train the listed blocks, the final norm and the head. Class-attention blocks and attention pooling are frozen.

    Args:
        blocks: indices of the blocks to train, counted from 0 across all stages. Negative indices count from the end.

    Raises:
        SettingError: If the list is empty. Also raised by `apply` if an index is out of range.
    """

    name = "blocks"
    needs = frozenset({Needs.BLOCKS})
    hints: ClassVar[Mapping[Needs, str]] = {
        Needs.BLOCKS: "Use another selection method (head, full, bitfit or norm_last)."
    }
    #: If True, a list that refers to a block twice is rejected.
    _each_once = False

    def __init__(self, blocks: list[int]) -> None:
        super().__init__()
        check_indices("blocks", blocks, do="To train only the head, use the method head.")
        self.blocks = list(blocks)

    def chosen(self, view: ModelView) -> dict[str, Tensor]:
        # Attention after the blocks (class attention, attention pooling) is frozen with its normalizations.
        final = parameters_under(view.model, (name for name in view.tail if not has_attention(view.model, name)))
        norms = {n: p for n, p in _norms(view.model).items() if n in final}
        return parameters_under(view.model, self._names(view)) | view.new_parameters() | norms

    def _names(self, view: ModelView) -> tuple[str, ...]:
        return blocks_at(view, self.full_name("blocks"), self.blocks, once=self._each_once)


@register
class BitFit(Selection):
    """Train all bias vectors and the head (BitFit: Ben Zaken et al., 2022).

    The parameters `q_bias` and `v_bias` of SwinV2 and BEiT, which are not part of the qkv layer, are also trained.
    Relative position tables are not trained, even if their names contain "bias".

    Raises:
        UserError: Raised by `apply` if the model has no biases outside its head.
    """

    name = "bitfit"

    def _trains(self, touched: tuple[str, ...], view: ModelView) -> str:
        return f"{ranges(['biases', *head_in_words(view)])} train"

    def chosen(self, view: ModelView) -> dict[str, Tensor]:
        head = view.new_parameters()
        biases = {n: p for n, p in view.model.named_parameters() if p.dim() == 1 and re.search(r"(^|\.|_)bias$", n)}
        if not biases.keys() - head.keys():
            raise UserError(f"method bitfit: {view.name} has no biases outside its head. Use the method head.")
        return biases | head


@register
class NormLast(Selection):
    """Train the head and the scales and shifts of all normalization layers (FT-Norm+Last).

    Raises:
        UserError: Raised by `apply` if the model has no normalization layers with parameters outside its head.
    """

    name = "norm_last"

    def _trains(self, touched: tuple[str, ...], view: ModelView) -> str:
        return f"{ranges(['normalization layers', *head_in_words(view)])} train"

    def chosen(self, view: ModelView) -> dict[str, Tensor]:
        norms = _norms(view.model)
        head = view.new_parameters() if norms else {}
        if not norms.keys() - head.keys():
            raise UserError(
                f"method norm_last: {view.name} has no normalization layers with parameters outside its head. Use"
                " the method head."
            )
        return norms | head


def head_in_words(view: ModelView) -> tuple[str, ...]:
    """Return ``("head",)``, or an empty tuple if the model has no head (for example, the image tower of CLIP)."""
    return ("head",) if view.head or view.outside else ()


def concise(model: nn.Module, chosen: set[int]) -> tuple[str, ...]:
    """Return as few names of modules and parameters as possible that cover exactly the parameters with ids `chosen`."""

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
    return {
        f"{name}.{own}" if name else own: parameter
        for name, module in model.named_modules()
        if is_norm(module)
        for own, parameter in module.named_parameters(recurse=False)
    }
