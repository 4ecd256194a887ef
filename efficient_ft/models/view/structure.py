"""The structure of a timm classifier, from its attributes alone: stages, blocks, stem, head, normalizations."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, nn

#: Normalization layers by class.
_NORM = re.compile(r"norm|abn|^affine$", re.IGNORECASE)


def above(model: nn.Module, name: str) -> Iterator[nn.Module]:
    """Yield the modules that contain `name`, from the model down, without itself."""
    module = model
    for part in name.split("."):
        yield module
        module = getattr(module, part) if hasattr(module, part) else module[int(part)]  # type: ignore[index]


def classifiers(model: nn.Module) -> list[nn.Module]:
    """Return the classifier modules of a timm model."""
    get_classifier: Any = getattr(model, "get_classifier", None)
    found = None if get_classifier is None else get_classifier()
    modules = list(found) if isinstance(found, tuple | list) else [found]
    return [m for m in modules if isinstance(m, nn.Module) and not isinstance(m, nn.Identity)]


def names_of(model: nn.Module, modules: Iterable[nn.Module]) -> tuple[str, ...]:
    """Return the full names of some modules of a model."""
    wanted = {id(m) for m in modules}
    return tuple(name for name, m in model.named_modules() if id(m) in wanted)


def stem_of(model: nn.Module) -> str | None:
    """Return the name of the top-level module that holds the first convolution."""
    cfg = getattr(model, "pretrained_cfg", None) or {}
    first = cfg.get("first_conv")
    if isinstance(first, tuple | list):
        first = first[0] if first else None
    if first is None:
        first = next((n for n, m in model.named_modules() if isinstance(m, nn.Conv2d)), None)
    if first is None:
        return None
    top = first.split(".")[0]
    return first if top in ("blocks", "stages", "layers", "features") else top


def stages_of(
    model: nn.Module,
) -> tuple[tuple[tuple[str, ...], ...], tuple[tuple[str, ...], ...], tuple[str, ...]]:
    """Return blocks of each stage, its other modules (downsampling), and the top-level modules that hold them."""
    for top in ("blocks", "stages", "layers"):
        container = getattr(model, top, None)
        if not isinstance(container, nn.ModuleList | nn.Sequential) or not len(container):
            continue
        children = [(f"{top}.{n}", m) for n, m in container.named_children() if _has_parameters(m)]
        if all(_is_stage(m) for _, m in children):
            return (*_split_stages(children), (top,))
        names = [n for n, _ in children]
        cuts = [round(len(names) * k / 4) for k in range(5)]
        quarters = tuple(tuple(names[a:b]) for a, b in itertools.pairwise(cuts) if b > a)
        return quarters, tuple(() for _ in quarters), (top,)
    layers = [(f"layer{k}", getattr(model, f"layer{k}")) for k in range(1, 9) if hasattr(model, f"layer{k}")]
    if layers:
        return (*_split_stages(layers), tuple(n for n, _ in layers))
    return (), (), ()


def _is_stage(module: nn.Module) -> bool:
    return isinstance(module, nn.ModuleList | nn.Sequential) or isinstance(
        getattr(module, "blocks", None), nn.ModuleList | nn.Sequential
    )


def _split_stages(
    stages: list[tuple[str, nn.Module]],
) -> tuple[tuple[tuple[str, ...], ...], tuple[tuple[str, ...], ...]]:
    blocks: list[tuple[str, ...]] = []
    extras: list[tuple[str, ...]] = []
    for name, stage in stages:
        holder = getattr(stage, "blocks", None)
        if holder is None:
            blocks.append(tuple(f"{name}.{n}" for n, m in stage.named_children() if _has_parameters(m)))
            extras.append(())
        else:
            blocks.append(tuple(f"{name}.blocks.{n}" for n, m in holder.named_children() if _has_parameters(m)))
            extras.append(
                tuple(f"{name}.{n}" for n, m in stage.named_children() if n != "blocks" and _has_parameters(m))
            )
    return tuple(blocks), tuple(extras)


def after(model: nn.Module, container: tuple[str, ...]) -> tuple[str, ...]:
    """Return the top-level modules registered after the stages: timm registers them in the order they run."""
    names = [n for n, _ in model.named_children()]
    last = max((names.index(c) for c in container), default=len(names))
    return tuple(n for n in names[last + 1 :] if _has_parameters(getattr(model, n)))


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def is_norm(module: nn.Module) -> bool:
    """Return True for a normalization layer, by the name of its class."""
    return _NORM.search(type(module).__name__) is not None


def parameters_under(model: nn.Module, names: Iterable[str]) -> dict[str, Tensor]:
    """Return the parameters, by full name, of the modules (or parameters) with these full names."""
    prefixes = tuple(names)
    return {
        n: p
        for n, p in model.named_parameters()
        if any(n == prefix or n.startswith(f"{prefix}.") for prefix in prefixes)
    }
