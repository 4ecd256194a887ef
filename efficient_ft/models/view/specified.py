"""User-specified properties of a network. They take precedence over properties that are inferred from the network.

The properties are stored as an attribute of the network, so that all views of the network use them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypedDict

from torch import nn

from efficient_ft.core.errors import SettingError, did_you_mean

#: Name of the model attribute that stores the user-specified properties.
_ATTRIBUTE = "efficient_ft_specified"


class Structure(TypedDict, total=False):
    """Keyword arguments that describe the structure of a network.

    If an argument is omitted or None, the value from an earlier call is used. Without an earlier value, the property is
    inferred from the network.

    Attributes:
        image_size: height and width of the images in pixels, or one number for square images.
        prefix_tokens: number of class, distillation and register tokens, which precede the patch tokens.
        blocks: full names of the blocks, in forward order. A block is the unit that methods train, checkpoint or skip.
            A name that ends with ``.*`` selects the direct children of a module that have parameters, for example
            ``"encoder.layers.*"``.
    """

    image_size: int | tuple[int, int] | None
    prefix_tokens: int | None
    blocks: str | Iterable[str] | None


def specify(model: nn.Module, classifier: str | Iterable[str] = (), **structure: Any) -> None:
    """Validate user-specified properties of a network, and store them on `model`.

    Properties that are omitted or None, and a `classifier` without names, do not change.

    Args:
        model: the network.
        classifier: full names of the classifier's modules.
        **structure: see `Structure`.

    Raises:
        SettingError: If a value is invalid, or if a module does not exist or has no parameters.
        TypeError: If `structure` contains an unknown argument.
    """
    check_arguments(structure)
    found: dict[str, Any] = {}
    if names := _names("classifier", classifier):
        found["classifier"] = _modules(model, "classifier", names)
    if structure.get("image_size") is not None:
        found["image_size"] = _size(structure["image_size"])
    prefix = structure.get("prefix_tokens")
    if prefix is not None:
        if type(prefix) is not int or prefix < 0:
            raise SettingError("prefix_tokens", repr(prefix), "an integer >= 0")
        found["prefix_tokens"] = prefix
    if structure.get("blocks") is not None:
        names = _names("blocks", structure["blocks"])
        if not names:
            hint = "To use the blocks that are recognized, leave out the argument."
            raise SettingError("blocks", structure["blocks"], "a list with at least one name", hint)
        found["blocks"] = _blocks(model, names)
    if found:
        setattr(model, _ATTRIBUTE, {**specified(model), **found})


def check_arguments(structure: Mapping[str, Any]) -> None:
    """Raise TypeError if `structure` contains an argument that is not in `Structure`."""
    known = sorted({"classifier", *Structure.__optional_keys__})
    for name in sorted(set(structure) - set(known)):
        similar = did_you_mean("image_size" if name == "img_size" else name, known)
        raise TypeError(f"unexpected keyword argument {name!r}. Valid arguments are {', '.join(known)}.{similar}")


@contextmanager
def restored_on_error(model: nn.Module) -> Iterator[None]:
    """Restore the stored properties of `model` if the ``with`` block raises an error."""
    before = specified(model)
    try:
        yield
    except Exception:
        vars(model).pop(_ATTRIBUTE, None)
        if before:
            setattr(model, _ATTRIBUTE, before)
        raise


def specified(model: nn.Module) -> dict[str, Any]:
    """Return the user-specified properties of `model`: `classifier`, `image_size`, `prefix_tokens` and `blocks`."""
    found: dict[str, Any] = vars(model).get(_ATTRIBUTE, {})
    return found


def _names(setting: str, given: Any) -> tuple[str, ...]:
    if isinstance(given, nn.Module):
        names: tuple[Any, ...] = (given,)
    else:
        names = tuple(given) if isinstance(given, Iterable) and not isinstance(given, str) else (given,)
    for name in names:
        if isinstance(name, nn.Module):
            hint = f"Pass the name of the module, for example {setting}='encoder.layers.0'."
            if isinstance(name, nn.ModuleList | nn.Sequential):
                hint = f"Pass the names of the modules in it, for example {setting}='encoder.layers.*'."
            raise SettingError(setting, f"a {type(name).__name__}", "a name of a module, or a list of names", hint)
        if not isinstance(name, str):
            raise SettingError(setting, f"{name!r:.60}", "a name of a module, or a list of names")
    return names


def _size(given: Any) -> tuple[int, int]:
    size = (given, given) if type(given) is int else tuple(given) if isinstance(given, tuple | list) else ()
    if len(size) != 2 or not all(type(side) is int and side > 0 for side in size):
        raise SettingError("image_size", repr(given), "an integer >= 1 or a pair (height, width) of such integers")
    return size[0], size[1]


def _modules(model: nn.Module, setting: str, names: tuple[str, ...]) -> tuple[str, ...]:
    """Return `names`. Raise SettingError if one of them is not a module with parameters."""
    with_parameters = [n for n, module in model.named_modules() if n and next(module.parameters(), None) is not None]
    for name in names:
        if name not in with_parameters:
            top = [n for n in with_parameters if "." not in n]
            what = "a module" if setting == "classifier" else "names of modules"
            known = f"{what} of {type(model).__name__} with parameters ({', '.join(top)}, …)"
            raise SettingError(setting, repr(name), known, did_you_mean(name, with_parameters).strip() or None)
    return names


def _blocks(model: nn.Module, names: tuple[str, ...]) -> tuple[str, ...]:
    every: list[str] = []
    for name in names:
        holder = name.removesuffix(".*")
        _modules(model, "blocks", (holder,))
        children = model.get_submodule(holder).named_children() if holder != name else ()
        found = [f"{holder}.{child}" for child, m in children if next(m.parameters(), None) is not None]
        if holder != name and not found:
            raise SettingError("blocks", repr(name), f"names of modules with parameters ({holder} contains none)")
        every += found or [name]
    if len(every) == 1 and (list_name := _list_in(model, every[0])) is not None:
        modules = len([*model.get_submodule(list_name).children()])
        do = f"{list_name} has {modules} modules. To use each of them as a block, pass blocks='{list_name}.*'."
        raise SettingError("blocks", repr(every[0]), "the names of individual blocks", do)
    for name in every:
        module = model.get_submodule(name)
        if type(module).forward is nn.Module.forward or isinstance(module, nn.ModuleList | nn.ModuleDict):
            hint = f"{type(module).__name__} is only a container. Pass the names of its submodules ({name}.*)."
            raise SettingError("blocks", repr(name), "names of modules with a forward method", hint)
        if outer := next((other for other in every if name.startswith(f"{other}.")), None):
            raise SettingError(
                "blocks", repr(name), "modules that do not contain each other", f"It is inside {outer!r}."
            )
    if twice := next((name for name in every if every.count(name) > 1), None):
        raise SettingError("blocks", repr(twice), "unique", "The name occurs more than once.")
    return tuple(every)


def _list_in(model: nn.Module, name: str) -> str | None:
    """Return the name of the list of modules that `name` denotes or contains, or None.

    The items of the list have submodules, as blocks do. A module that is itself an item of a list is a block.
    """
    if name.rpartition(".")[2].isdigit():
        return None
    module = model.get_submodule(name)
    inside = [f"{name}.{child}" for child, _ in module.named_children()]
    return next((one for one in [name, *inside] if _is_list(model.get_submodule(one))), None)


def _is_list(module: nn.Module) -> bool:
    if not isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential):
        return False
    return sum(next(child.children(), None) is not None for child in module.children()) > 1
