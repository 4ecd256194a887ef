"""The record, on a model, of the methods applied to it.

Every method leaves one `Mark`. Marks are copied and pickled with the model, so a deep copy still knows what was
applied; the view of a model reads from them which modules are not the model's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import nn

#: The attribute of a model that holds its marks.
_MARKS = "efficient_ft_methods"
#: The attribute of a model that holds the names of its classifier's modules.
_CLASSIFIER = "efficient_ft_classifier"


@dataclass(frozen=True)
class Mark:
    """One method, as recorded on the model it was applied to.

    Attributes:
        method: its name.
        key: name and settings (`Method.state_key`).
        axes: the axes on which it decides (values of `methods.Axis`).
        adds: what it adds (values of `methods.Adds`).
        conflicts: axes, additions or method names it cannot be stacked with, each with the reason.
        modules: full names of the modules it put into the model. They and all below them are no layers of the model.
        routed: full names of modules whose input it routes: tokens of any images, without the grid.
    """

    method: str
    key: str
    axes: tuple[str, ...] = ()
    adds: frozenset[str] = frozenset()
    conflicts: Mapping[str, str] = field(default_factory=dict)
    modules: tuple[str, ...] = ()
    routed: tuple[str, ...] = ()


def marks_of(model: nn.Module) -> tuple[Mark, ...]:
    """Marks of the methods applied to `model`, in the order of application."""
    return getattr(model, _MARKS, ())


def add_mark(model: nn.Module, mark: Mark) -> None:
    """Record a method on `model`."""
    setattr(model, _MARKS, (*marks_of(model), mark))


def remove_mark(model: nn.Module, key: str) -> None:
    """Delete the mark with this key from `model`."""
    rest = tuple(mark for mark in marks_of(model) if mark.key != key)
    if rest:
        setattr(model, _MARKS, rest)
    elif hasattr(model, _MARKS):
        delattr(model, _MARKS)


def name_classifier(model: nn.Module, names: tuple[str, ...]) -> None:
    """Record on `model` the full names of its classifier's modules, as its user states them."""
    setattr(model, _CLASSIFIER, names)


def named_classifier(model: nn.Module) -> tuple[str, ...]:
    """Full names of the classifier's modules as the user of `model` stated them; empty: not stated."""
    return getattr(model, _CLASSIFIER, ())


def added_modules(model: nn.Module) -> frozenset[str]:
    """Full names of the modules that adapters put into `model`: those that marks name, and peft's own.

    peft's layers list what they added to the layer they wrap in ``adapter_layer_names`` (``lora_A``, ``lora_B``, ...).
    """
    names = {name for mark in marks_of(model) for name in mark.modules}
    for name, module in model.named_modules():
        if hasattr(module, "base_layer"):
            names |= {f"{name}.{own}" if name else own for own in getattr(module, "adapter_layer_names", ())}
    return frozenset(names)


def routed_modules(model: nn.Module) -> frozenset[str]:
    """Full names of the modules of `model` whose input a method routes."""
    return frozenset(name for mark in marks_of(model) for name in mark.routed)


def is_inside(name: str, modules: frozenset[str]) -> bool:
    """True if `name` is one of `modules` or below one of them."""
    parts = name.split(".")
    return any(".".join(parts[:n]) in modules for n in range(1, len(parts) + 1))
