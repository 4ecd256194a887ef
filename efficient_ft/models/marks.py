"""Records of the methods that were applied to a model.

Each applied method adds one `Mark` to the model. Marks are copied and pickled with the model. The view of a model uses
the marks to find the modules that methods added.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import nn

#: Name of the model attribute that stores the marks.
_MARKS = "efficient_ft_methods"


@dataclass(frozen=True)
class Mark:
    """A record of a method that was applied to a model.

    Attributes:
        method: Name of the method.
        key: Name and settings of the method (`Method.state_key`).
        axes: Axes of the method (values of `methods.Axis`).
        adds: Additions of the method to the model or the training step (values of `methods.Adds`).
        conflicts: Reasons why other methods cannot be combined with this method. The keys are axes, additions or names
            of the other methods.
        modules: Full names of the modules that the method added. The view of the model excludes the layers of these
            modules.
        routed: Full names of modules whose input consists of routed tokens. Routed tokens may come from different
            images, and have no grid.
    """

    method: str
    key: str
    axes: tuple[str, ...] = ()
    adds: frozenset[str] = frozenset()
    conflicts: Mapping[str, str] = field(default_factory=dict)
    modules: tuple[str, ...] = ()
    routed: tuple[str, ...] = ()


def marks_of(model: nn.Module) -> tuple[Mark, ...]:
    """Return the marks of the methods that were applied to `model`, in the order of application."""
    return getattr(model, _MARKS, ())


def add_mark(model: nn.Module, mark: Mark) -> None:
    """Add a mark to `model`."""
    setattr(model, _MARKS, (*marks_of(model), mark))


def remove_mark(model: nn.Module, key: str) -> None:
    """Remove the mark whose key is `key` from `model`."""
    rest = tuple(mark for mark in marks_of(model) if mark.key != key)
    if rest:
        setattr(model, _MARKS, rest)
    elif hasattr(model, _MARKS):
        delattr(model, _MARKS)


def added_modules(model: nn.Module) -> frozenset[str]:
    """Return the full names of the adapter modules that methods of this package or peft added to `model`.

    PEFT layers list their additional modules in ``adapter_layer_names`` (``lora_A``, ``lora_B``, ...).
    """
    names = {name for mark in marks_of(model) for name in mark.modules}
    for name, module in model.named_modules():
        if hasattr(module, "base_layer"):
            names |= {f"{name}.{own}" if name else own for own in getattr(module, "adapter_layer_names", ())}
    return frozenset(names)


def routed_modules(model: nn.Module) -> frozenset[str]:
    """Return the full names of the modules whose input consists of tokens that a method routes."""
    return frozenset(name for mark in marks_of(model) for name in mark.routed)


def ancestors(name: str) -> list[str]:
    """Return the names of the modules that contain `name`, starting with the innermost and excluding the network."""
    parts = name.split(".")
    return [".".join(parts[:k]) for k in range(len(parts) - 1, 0, -1)]


def is_inside(name: str, modules: frozenset[str]) -> bool:
    """Return True if `name` is one of `modules` or a submodule of one of them."""
    return not modules.isdisjoint([name, *ancestors(name)])
