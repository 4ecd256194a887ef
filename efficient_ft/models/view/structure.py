"""Find the stages, blocks, stem and normalization layers of a network by the names of its attributes.

In most timm classifiers, the stages are attributes of the network. In other classifiers, the stages are attributes of a
submodule (``body.layer1``). In models from `transformers` and segmentation-models-pytorch, the stages are inside an
encoder (``encoder.model.blocks``, ``segformer.stages``, ``bert.encoder.layer``), which is followed by a decoder or
classifier.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Sequence

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from efficient_ft.models.view.specified import specified

#: Pattern for the class names of normalization layers.
_NORM = re.compile(r"norm|abn|^affine$", re.IGNORECASE)


def above(model: nn.Module, name: str) -> Iterator[nn.Module]:
    """Yield the modules that contain the module `name`, starting with the model."""
    module = model
    for part in name.split("."):
        yield module
        module = getattr(module, part) if hasattr(module, part) else module[int(part)]  # type: ignore[index]


def names_of(model: nn.Module, modules: Iterable[nn.Module]) -> tuple[str, ...]:
    """Return the full names of `modules` in `model`."""
    wanted = {id(m) for m in modules}
    return tuple(name for name, m in model.named_modules() if id(m) in wanted)


def stem_of(model: nn.Module) -> str | None:
    """Return the name of the stem, or None if the model has no convolution.

    The stem is the top-level module that contains the first convolution. If this module also contains the blocks, the
    stem is only the convolution.
    """
    cfg = getattr(model, "pretrained_cfg", None) or {}
    first = cfg.get("first_conv")
    if isinstance(first, tuple | list):
        first = first[0] if first else None
    if first is None:
        first = next((n for n, m in model.named_modules() if isinstance(m, nn.Conv2d)), None)
    if first is None:
        return None
    top = first.split(".")[0]
    if any(block.startswith(f"{top}.") for block in specified(model).get("blocks", ())):
        return first
    if top in ("blocks", "stages", "layers", "features"):
        return first
    return first if f"{holder_of(model)}.".startswith(f"{top}.") else top


#: Block names of each stage, names of the other modules of each stage, and names of the containers.
_Stages = tuple[tuple[tuple[str, ...], ...], tuple[tuple[str, ...], ...], tuple[str, ...]]


def stages_of(model: nn.Module) -> _Stages:
    """Return the block names of each stage, the names of the other modules of each stage, and the container names.

    A container is a module that contains blocks or stages. If the user specifies other blocks than those that are
    recognized, the blocks of each container form one stage. If all blocks are in one container, they are divided into
    four stages.
    """
    blocks = specified(model).get("blocks")
    return stages_of_blocks(model, blocks) if blocks else _recognized_stages(model)


def _recognized_stages(model: nn.Module) -> _Stages:
    holder = holder_of(model)
    inside = f"{holder}." if holder else ""
    owner = model.get_submodule(holder)
    held = _containers(owner)
    if not held:
        return (), (), ()
    if held[0] in (*_CONTAINERS, _FEATURES):
        top = f"{inside}{held[0]}"
        children = [(f"{top}.{n}", m) for n, m in getattr(owner, held[0]).named_children() if _has_parameters(m)]
        lists = [m for _, m in children if _blocks_of(m) is not None and not are_halves(m)]
        # In torchvision's Swin and ConvNeXt, the stages alternate with lists of layers that reduce the feature map.
        others = [m for m in lists if not _holds_blocks(m)]
        if len(others) < len(lists) and not any(_is_composite(layer) for m in others for layer in m.children()):
            return (*_split_stages(children), (top,))
        quarters = _quarters([n for n, _ in children])
        return quarters, tuple(() for _ in quarters), (top,)
    names = [n for n, _ in owner.named_children()]
    between = names[names.index(held[0]) : names.index(held[-1]) + 1]
    modules = [(f"{inside}{n}", getattr(owner, n)) for n in between if _has_parameters(getattr(owner, n))]
    containers = tuple(f"{inside}{n}" for n in held)
    return (*_split_stages(modules, containers), containers)


def _quarters(names: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    """Divide the blocks of an isotropic network into four stages of equal size."""
    cuts = [round(len(names) * k / 4) for k in range(5)]
    return tuple(tuple(names[a:b]) for a, b in itertools.pairwise(cuts) if b > a)


def stages_of_blocks(model: nn.Module, blocks: Sequence[str]) -> _Stages:
    """Return the same values as `stages_of` for given `blocks`."""
    recognized = _recognized_stages(model)
    if [block for stage in recognized[0] for block in stage] == list(blocks):
        return recognized
    holders = tuple(dict.fromkeys(name.rpartition(".")[0] for name in blocks))
    stages = tuple(tuple(name for name in blocks if name.rpartition(".")[0] == holder) for holder in holders)
    if len(holders) == 1:
        stages = _quarters(blocks)
        return stages, tuple(() for _ in stages), tuple(holder or blocks[-1] for holder in holders)
    extras = []
    for holder, stage in zip(holders, stages, strict=True):
        within = model.get_submodule(holder).named_children() if holder else ()
        others = (f"{holder}.{n}" for n, m in within if _has_parameters(m))
        extras.append(tuple(n for n in others if n not in stage and not any(b.startswith(f"{n}.") for b in blocks)))
    return stages, tuple(extras), tuple(holder or blocks[-1] for holder in holders)


#: Names of attributes that contain stages or blocks.
_CONTAINERS = ("blocks", "stages", "layers", "layer", "levels", "transformers", "network", "dense_stages",
               "resblocks")  # fmt: skip
#: Name of an attribute that is a sequence of blocks in some networks (RexNet) and of layers in other networks.
_FEATURES = "features"
#: Patterns for stages in separate attributes (``layer1``, ``stages_0``, ``s1``). The first matching pattern is used.
_NUMBERED = ("layer[1-8]", r"stages_\d", r"layers_\d", "s[1-8]", "stage[1-8]", r"denseblock\d", r"level\d", r"block\d+")
#: Names of attributes that contain the blocks of a stage.
_BLOCKS_OF_STAGE = ("blocks", "transformer_encoder", "layers")
#: Names of submodules of timm's classifiers that may contain the stages.
_TIMM_HOLDERS = ("encoder", "body", "features")
#: Maximum nesting depth at which `holder_of` searches a network for an encoder.
_DEPTH = 3


def holder_of(model: nn.Module) -> str:
    """Return the full name of the encoder that contains the stages or blocks.

    The name is "" if the model itself contains the stages or blocks, or if none are found.
    """
    if _containers(model):
        return ""
    names = [n for n, _ in model.named_modules() if n and n.count(".") < _DEPTH and not n.startswith("decode")]
    if hasattr(type(model), "get_classifier"):
        names = [n for n in names if n in _TIMM_HOLDERS]
    found = (n for n in sorted(names, key=lambda n: n.count(".")) if _contains_blocks(model.get_submodule(n)))
    return next(found, "")


def _contains_blocks(module: nn.Module) -> bool:
    """Return True if a module contains stages or blocks, and not only the layers of an MLP."""
    containers = [module.get_submodule(name) for name in _containers(module)]
    if len(containers) == 1:
        return any(_is_composite(child) for child in containers[0].children())
    return containers != []


def _containers(module: nn.Module) -> list[str]:
    """Return the names of the submodules that are stages, or that contain stages or blocks."""
    for name in _CONTAINERS:
        container = module._modules.get(name)  # getattr may return an attribute of a wrapped module
        if isinstance(container, nn.ModuleList | nn.Sequential) and len(container):
            return [name]
    features = module._modules.get(_FEATURES)
    if type(features) is nn.Sequential and _holds_blocks(features) and "0" in features._modules:
        return [_FEATURES]
    children = [name for name, _ in module.named_children()]
    if {"layer1", "stage2"} <= set(children):  # HRNet, whose later stages process several maps
        return []
    series = ([n for n in children if re.fullmatch(form, n)] for form in _NUMBERED)
    return next((names for names in series if names and names[0][-1] in "01"), [])  # the numbers must start with 0 or 1


def _blocks_of(stage: nn.Module) -> tuple[str, nn.Module] | None:
    """Return the name prefix and the module that contains the blocks of a stage, or None if there is no such module."""
    for name in _BLOCKS_OF_STAGE:
        if isinstance(getattr(stage, name, None), nn.ModuleList | nn.Sequential):
            return f"{name}.", getattr(stage, name)
    if isinstance(stage, nn.ModuleList | nn.Sequential) or type(stage).__name__ == "RegStage":
        return "", stage
    return None


def _holds_blocks(stage: nn.Module) -> bool:
    """Return True if a stage is a list of blocks.

    Return False if most of the listed modules are the layers of a single block, as in ConvMixer.
    """
    found = _blocks_of(stage)
    if found is None:
        return False
    parts = [_is_composite(m) for m in stage.children() if _has_parameters(m)]
    return found[0] != "" or 2 * sum(parts) >= len(parts)


def _split_stages(
    modules: list[tuple[str, nn.Module]], stages: tuple[str, ...] = ()
) -> tuple[tuple[tuple[str, ...], ...], tuple[tuple[str, ...], ...]]:
    """Return the block names of each stage, and the names of the other modules of each stage.

    `modules` contains the stages in order, and the modules between stages, which belong to the following stage.
    `stages` contains the names of the stages. If `stages` is empty, every module that is a list of blocks is a stage. A
    stage in `stages` that is not a list of blocks is a single block.
    """
    blocks: list[tuple[str, ...]] = []
    extras: list[tuple[str, ...]] = []
    before: list[str] = []
    for name, stage in modules:
        listed = _blocks_of(stage) if _holds_blocks(stage) else None
        if name not in stages and (stages or listed is None):
            before.append(name)
            continue
        others: list[str] = []
        if listed is None:
            blocks.append((name,))
        else:
            blocks.append(tuple(f"{name}.{listed[0]}{n}" for n, m in listed[1].named_children() if _has_parameters(m)))
            if listed[0]:
                rest = ((n, m) for n, m in stage.named_children() if f"{n}." != listed[0])
                others = [f"{name}.{n}" for n, m in rest if _has_parameters(m)]
        extras.append((*before, *others))
        before = []
    if before and extras:  # layers after the last stage, in the same container
        extras[-1] = (*extras[-1], *before)
    return tuple(blocks), tuple(extras)


def after(model: nn.Module, container: tuple[str, ...], stages: int = 0) -> tuple[str, ...]:
    """Return the names of the modules with parameters that follow the stages. Modules in the encoder come first.

    A list next to the stages with one module per stage (`pos_block` of Twins) runs inside the stages, so only its last
    module follows them.
    """
    found: list[str] = []
    around = container[0].split(".")[:-1] if container else []
    for depth in range(len(around), -1, -1):
        inside = ".".join(around[:depth])
        holder = model.get_submodule(inside)
        names = [n for n, _ in holder.named_children()]
        within = {c.split(".")[depth] for c in container if not inside or c.startswith(f"{inside}.")}
        last = max((names.index(c) for c in within), default=len(names))
        rest = (n for n in names[last + 1 :] if _has_parameters(getattr(holder, n)))
        for n in rest:
            module = getattr(holder, n)
            per_stage = depth == len(around) and isinstance(module, nn.ModuleList) and len(module) == stages > 1
            found.append(".".join([*around[:depth], n, *([str(stages - 1)] if per_stage else [])]))
    return tuple(found)


def shared_blocks(model: nn.Module, blocks: Sequence[str]) -> dict[str, list[str]]:
    """Return all full names of each block that its list contains several times, with the name in `blocks` as the key.

    Other attributes that refer to a block, for example ``self.last = self.blocks[-1]``, do not count.
    """
    found = {}
    for name in blocks:
        holder, block = name.rpartition(".")[0], model.get_submodule(name)
        siblings = model.get_submodule(holder)._modules.items()
        names = [f"{holder}.{child}" if holder else child for child, module in siblings if module is block]
        if len(names) > 1:
            found[name] = names
    return found


def _is_composite(module: nn.Module) -> bool:
    return next(module.children(), None) is not None


def are_halves(module: nn.Module) -> bool:
    """Return True if `module` is a list of an attention module and a feed-forward network, as in vit-pytorch.

    Such a list is a block without a forward method. The network calls the two modules of the list.
    """
    kinds = [type(child).__name__.lower() for child in module.children()] if type(module) is nn.ModuleList else []
    return len(kinds) == 2 and "attention" in kinds[0] and "attention" not in kinds[1]


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


#: Names of image towers in networks that also take texts, points or other inputs.
_TOWERS = ("visual", "vision_model", "vision_tower", "vision_encoder", "image_encoder")


def image_tower(model: nn.Module) -> str | None:
    """Return the name of the image tower if the network also has other embeddings, as in CLIP, or None otherwise."""
    names = (n for n, _ in model.named_modules() if n.count(".") <= 1 and n.rpartition(".")[2] in _TOWERS)
    return next((name for name in names if embeddings_outside(model, name)), None)


def embeddings_outside(model: nn.Module, name: str) -> list[str]:
    """Return the names of the embeddings in `model` that are outside of the module `name`."""
    embeddings = (n for n, module in model.named_modules() if isinstance(module, nn.Embedding))
    return [n for n in embeddings if not f"{n}.".startswith(f"{name}.")]


def is_norm(module: nn.Module) -> bool:
    """Return True if `module` is a normalization layer according to the name of its class.

    A module that contains a linear layer or a convolution is not a normalization layer (timm's ``ConvMlpWithNorm``).
    """
    if _NORM.search(type(module).__name__) is None:
        return False
    return not any(isinstance(part, nn.Linear | _ConvNd) for part in module.modules())


def parameters_under(model: nn.Module, names: Iterable[str]) -> dict[str, Tensor]:
    """Return the parameters of the modules that are listed in `names`, by full name.

    `names` may also contain full names of parameters.
    """
    prefixes = tuple(f"{name}." for name in names)
    return {n: p for n, p in model.named_parameters() if f"{n}.".startswith(prefixes)}
