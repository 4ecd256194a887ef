"""The network inside a module of another library, specified by an attribute."""

from __future__ import annotations

from typing import Any

from torch import nn

from efficient_ft.core.errors import SettingError


def find_network(module: Any, name: str) -> nn.Module:
    """Return the module at the dotted attribute path `name` of `module`, or `module` itself if `name` is empty.

    Raises:
        SettingError: If the attribute does not exist or is not a module.
    """
    found = module
    for depth, part in enumerate(name.split(".") if name else ()):
        child = getattr(found, part, None)
        if not isinstance(child, nn.Module):
            _refuse_name(found, name, ".".join(name.split(".")[:depth]), hasattr(found, part))
        found = child
    return found


def _refuse_name(holder: Any, name: str, prefix: str, exists: bool) -> None:
    children = holder.named_children() if isinstance(holder, nn.Module) else ()
    names = [f"{prefix}.{child}" if prefix else child for child, _ in children]
    why = (
        "It is not a module when the callback applies the methods: build the network in __init__."
        if exists
        else 'Pass the attribute that holds the timm model, or network="" for the module itself.'
    )
    of = f"{type(holder).__name__}" + (f" ({prefix})" if prefix else "")
    constraint = f"a module of {of}: " + (f"one of {', '.join(names)}" if names else "it has none")
    raise SettingError("network", repr(name), constraint, why)
