"""Find several networks with blocks in one module, for example two towers with a common head."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from torch import nn

from efficient_ft.core.errors import UserError
from efficient_ft.models.marks import is_inside
from efficient_ft.models.view.head import is_network
from efficient_ft.models.view.probe import DataFlow, image_channels
from efficient_ft.models.view.structure import after, stages_of, stages_of_blocks


def towers_of(model: nn.Module, size: tuple[int, ...]) -> tuple[str, ...]:
    """Return the full names of the networks with blocks in `model`, or an empty tuple if there are less than two.

    Networks on which the output of `model` does not depend are omitted, for example the text tower of a CLIP network of
    which only the image tower runs. A network from a library is one network, even if it has several branches.

    Args:
        model: network.
        size: image size (H, W) in pixels, or (tokens,) for texts.
    """
    if is_network(model):
        return ()
    names = _inside(model, "", image_channels(model))
    if len(names) < 2:
        return ()
    try:
        flow = DataFlow(model, size, names)
    except UserError:  # the model requires other inputs or another size
        return tuple(names)
    used = tuple(name for name in names if flow.uses(name))
    return used if len(used) > 1 else ()


def _inside(module: nn.Module, name: str, channels: int) -> list[str]:
    """Return the names of the networks in the submodules of `module`, whose full name is `name`."""
    children = {f"{name}.{child}" if name else child: part for child, part in module.named_children()}
    kinds = Counter(type(part) for part in children.values())
    found = []
    for path, part in children.items():
        inside = [] if is_network(part) else _inside(part, path, channels)
        twin = kinds[type(part)] > 1 and not isinstance(part, nn.Sequential | nn.ModuleList | nn.ModuleDict)
        if len(inside) < 2 and (is_network(part) or _takes_images(part, channels) or twin) and _has_blocks(part):
            inside = [path]
        found += inside
    return found


def _takes_images(module: nn.Module, channels: int) -> bool:
    """Return True if the first convolution in `module` has the number of channels of the images."""
    first = next((m for m in module.modules() if isinstance(m, nn.Conv2d)), None)
    return first is not None and first.in_channels == channels


def _has_blocks(module: nn.Module) -> bool:
    """Return True if blocks are recognized in `module`, which is not itself a list of blocks."""
    return type(module).forward is not nn.Module.forward and len([b for s in stages_of(module)[0] for b in s]) > 1


def holding(towers: Iterable[str], blocks: Iterable[str]) -> list[str]:
    """Return the names in `towers` of the networks that contain at least one of `blocks`."""
    inside = tuple(f"{block}." for block in blocks)
    return [tower for tower in towers if any(block.startswith(f"{tower}.") for block in inside)]


def pattern_of(model: nn.Module, tower: str) -> list[str]:
    """Return the values of the argument `blocks` for the blocks of the network `tower` in `model`."""
    network = model.get_submodule(tower)
    names = [f"{tower}.{block}" for stage in stages_of(network)[0] for block in stage]
    patterns = []
    for holder in dict.fromkeys(name.rpartition(".")[0] for name in names):
        inside = model.get_submodule(holder).named_children()
        children = [f"{holder}.{name}" for name, part in inside if next(part.parameters(), None) is not None]
        patterns += [f"{holder}.*"] if set(children) <= set(names) else [n for n in names if n in children]
    return patterns


def after_towers(model: nn.Module, towers: Sequence[str], containers: Sequence[str]) -> tuple[str, ...]:
    """Return the names of the modules after the blocks in several networks, and of the modules after these networks.

    `containers` contains the names of the modules that contain blocks. Networks in `towers` without such a module are
    omitted.
    """
    found: list[str] = []
    for tower in holding(towers, containers):
        inside = tuple(name.removeprefix(f"{tower}.") for name in containers if name.startswith(f"{tower}."))
        found += [f"{tower}.{name}" for name in after(model.get_submodule(tower), inside)]
    outside = (name for name in after(model, tuple(towers)) if not any(f"{t}.".startswith(f"{name}.") for t in towers))
    return (*found, *(name for name in outside if not is_inside(name, frozenset(towers))))


def last_stages(
    model: nn.Module, towers: Sequence[str], blocks: Sequence[str]
) -> list[tuple[tuple[str, ...], tuple[str, ...]]]:
    """Return the other modules and the blocks of the last stage of each network in `towers`, by full name."""
    found = []
    for tower in towers:
        inside = [name.removeprefix(f"{tower}.") for name in blocks if name.startswith(f"{tower}.")]
        stages, extras, _ = stages_of_blocks(model.get_submodule(tower), inside)
        found.append((_under(tower, extras[-1]), _under(tower, stages[-1])))
    return found


def _under(tower: str, names: Iterable[str]) -> tuple[str, ...]:
    return tuple(f"{tower}.{name}" for name in names)
