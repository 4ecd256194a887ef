"""Properties of a network that the user states, because the view cannot read them from the network.

The properties are stored as an attribute of the network, so that all views of the network use them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypedDict

from torch import nn

from efficient_ft.core.errors import SettingError

#: Name of the model attribute that stores the stated properties.
_ATTRIBUTE = "efficient_ft_stated"


class Structure(TypedDict, total=False):
    """Keyword arguments that describe a network. Arguments that are missing or None are read from the network.

    Attributes:
        image_size: height and width of the images in pixels, or one number for square images.
        prefix_tokens: number of class, distillation and register tokens, which precede the patch tokens.
        blocks: full names of the blocks, in forward order. A block is the unit that methods train, checkpoint or skip.
            A name that ends with ``.*`` refers to all submodules of a module: ``blocks="encoder.layers.*"``.
    """

    image_size: int | tuple[int, int] | None
    prefix_tokens: int | None
    blocks: str | Iterable[str] | None


def state(model: nn.Module, classifier: str | Iterable[str] = (), **structure: Any) -> None:
    """Check the stated properties of `model` and store them.

    Properties that are missing, None or empty do not change.

    Args:
        model: the network.
        classifier: full names of the classifier's modules.
        **structure: see `Structure`.

    Raises:
        SettingError: If a value is invalid, or if a module does not exist or has no parameters.
    """
    unknown = set(structure) - Structure.__optional_keys__
    if unknown:
        raise TypeError(f"unexpected keyword arguments: {', '.join(sorted(unknown))}")
    found: dict[str, Any] = {}
    if names := _names(classifier):
        found["classifier"] = _modules(model, "classifier", names)
    if structure.get("image_size") is not None:
        found["image_size"] = _size(structure["image_size"])
    prefix = structure.get("prefix_tokens")
    if prefix is not None:
        if type(prefix) is not int or prefix < 0:
            raise SettingError("prefix_tokens", repr(prefix), "an integer >= 0")
        found["prefix_tokens"] = prefix
    if names := _names(structure.get("blocks") or ()):
        found["blocks"] = _blocks(model, names)
    if found:
        setattr(model, _ATTRIBUTE, {**stated(model), **found})


def stated(model: nn.Module) -> dict[str, Any]:
    """Return the stored properties of `model`: `classifier`, `image_size`, `prefix_tokens` and `blocks`."""
    found: dict[str, Any] = vars(model).get(_ATTRIBUTE, {})
    return found


def _names(given: str | Iterable[str]) -> tuple[str, ...]:
    return (given,) if isinstance(given, str) else tuple(given)


def _size(given: Any) -> tuple[int, int]:
    size = (given, given) if type(given) is int else tuple(given) if isinstance(given, tuple | list) else ()
    if len(size) != 2 or not all(type(side) is int and side > 0 for side in size):
        raise SettingError("image_size", repr(given), "a number of pixels, or a pair (height, width)")
    return size[0], size[1]


def _modules(model: nn.Module, setting: str, names: tuple[str, ...]) -> tuple[str, ...]:
    """Return `names`. Raise SettingError if one of them is not a module with parameters."""
    with_parameters = [n for n, module in model.named_modules() if n and next(module.parameters(), None) is not None]
    for name in names:
        if name not in with_parameters:
            top = [n for n in with_parameters if "." not in n]
            raise SettingError(setting, repr(name), f"a module of {type(model).__name__}: {', '.join(top)}, …")
    return names


def _blocks(model: nn.Module, names: tuple[str, ...]) -> tuple[str, ...]:
    every: list[str] = []
    for name in names:
        holder = name.removesuffix(".*")
        _modules(model, "blocks", (holder,))
        children = model.get_submodule(holder).named_children() if holder != name else ()
        every += [f"{holder}.{child}" for child, m in children if next(m.parameters(), None) is not None] or [name]
    for name in every:
        module = model.get_submodule(name)
        if type(module).forward is nn.Module.forward or isinstance(module, nn.ModuleList | nn.ModuleDict):
            raise SettingError(
                "blocks", repr(name), "modules with a forward pass", f"{type(module).__name__} only contains modules."
            )
        if outer := next((other for other in every if name.startswith(f"{other}.")), None):
            raise SettingError("blocks", repr(name), f"outside of the block {outer}")
    if twice := next((name for name in every if every.count(name) > 1), None):
        raise SettingError("blocks", repr(twice), "listed once")
    return tuple(every)
