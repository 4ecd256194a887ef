"""Find the head of a network and other newly initialized parts.

Methods must not freeze newly initialized parts, because the weights of these parts are random. Models from timm declare
their classifier. In other networks, the head is recognized by a common name. If no module has such a name, the head is
inferred from the structure: it consists of the parts outside of a pretrained network or after the blocks.
"""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from torch import nn

from efficient_ft.core.errors import UserError
from efficient_ft.models.marks import is_inside
from efficient_ft.models.view.probe import DataFlow
from efficient_ft.models.view.specified import specified
from efficient_ft.models.view.structure import after, holder_of, is_norm, names_of, stages_of

#: Names of the last layer in networks without timm's `get_classifier`. The first name that exists is used.
_CLASSIFIERS = ("segmentation_head", "decode_head.classifier", "classifier", "score")
#: Common names of heads in other networks. All names that exist are used.
_HEADS = ("head", "heads", "fc", "mlp_head", "classification_head", "cls_head")
#: Pattern for the names of heads and auxiliary heads.
_HEAD = re.compile(r"^aux|(^|_)(heads?|fc|classifiers?)\d*$", re.IGNORECASE)
#: Pattern for the names of attention pooling layers in the image towers of CLIP. These layers are pretrained.
_POOLING = re.compile(r"(.*\.)?attn_?pool")
#: Names of base classes of networks in `transformers`, segmentation-models-pytorch and timm (feature extractors).
_NETWORKS = {"PreTrainedModel", "EncoderMixin", "FeatureDictNet", "FeatureGetterNet"}


@dataclass(frozen=True)
class Head:
    """The head of a network.

    Attributes:
        modules: Full names of the head's modules.
        others: Full names of other modules and parameters that are outside of the pretrained networks in the model.
        note: Phrase that lists the inferred parts in reports, or an empty string if no parts were inferred.
        candidates: Names of the possible heads if the network has several and does not declare its head. `modules`
            then contains the same names. Modules whose output is the input of another possible head are omitted.
    """

    modules: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    note: str = ""
    candidates: tuple[str, ...] = ()


def head_of(model: nn.Module, size: tuple[int, ...]) -> Head:
    """Find the head of `model`, which takes images of `size` (H, W) in pixels or texts of `size` (tokens,)."""
    named: tuple[str, ...] = specified(model).get("classifier", ())
    stated = _stated(model)
    if stated and not named:
        return Head(names_of(model, stated))
    if stated is not None and not named and type(model).__module__.startswith(("timm.", "efficient_ft.")):
        return Head()  # the model was created without a classifier
    networks = [] if stated is not None else networks_in(model)
    around = list(_around(model, networks)) if networks else []
    known = named or tuple(name for name in _CLASSIFIERS if _has_parameters(model, name))[:1]
    if not networks and not named and len(candidates := _candidates(model)) > 1:
        last = _without_feeders(model, candidates, size)
        if len(last) > 1:
            return Head(last, (), "", last)
        if last != known:
            modules = tuple(dict.fromkeys([*_followers(model), *last]))
            return Head(modules, (), _note(modules))
    if known:
        others = tuple(part for name in around for part in _without(model, name, frozenset(known)))
        return Head(known, others, _note(others, networks))
    parameters = dict(model.named_parameters(remove_duplicate=False))
    modules = tuple(name for name in around if name not in parameters)
    if modules and not (len(networks) == 1 and _precede(model, modules, networks[0], size)):
        return Head(modules, tuple(name for name in around if name not in modules), _note(around, networks))
    if len(networks) == 1:
        inner = head_of(model.get_submodule(networks[0]), size)
        found = tuple(f"{networks[0]}.{name}" for name in inner.modules)
        candidates = tuple(f"{networks[0]}.{name}" for name in inner.candidates)
        return Head(found, tuple(around), _note((*found, *around)), candidates)
    modules = _last_parts(model, size)
    return Head(modules, (), _note(modules))


def other_heads(model: nn.Module, size: tuple[int, ...]) -> tuple[str, ...]:
    """Return the possible heads other than the classifier that the user specifies.

    Heads whose output is an input of the classifier are omitted. The result is empty if the user does not specify the
    classifier.
    """
    named = frozenset(specified(model).get("classifier", ()))
    candidates = _candidates(model)
    if not named.intersection(candidates) or len(candidates) == len(named):
        return ()
    return tuple(name for name in _without_feeders(model, candidates, size) if name not in named)


def _candidates(model: nn.Module) -> tuple[str, ...]:
    """Return the names of the direct submodules with the name of a head or an auxiliary head."""
    return tuple(name for name, _ in model.named_children() if _HEAD.search(name) and _has_parameters(model, name))


def _without_feeders(model: nn.Module, candidates: tuple[str, ...], size: tuple[int, ...]) -> tuple[str, ...]:
    """Return the modules in `candidates` whose output is not the input of another candidate, directly or indirectly.

    The data flow is read from a forward pass on fake tensors. If the network cannot run on an input of `size`, a
    candidate is assumed to feed the next one if the number of output features equals the number of input features.
    """
    try:
        flow = DataFlow(model, size, candidates)
        feeders = {one for one, other in itertools.permutations(candidates, 2) if flow.feeds(one, other)}
    except UserError:
        features = {name: _features(model.get_submodule(name)) for name in candidates}
        feeders = {a for a, b in itertools.pairwise(candidates) if features[a][1] == features[b][0]}
    return tuple(name for name in candidates if name not in feeders) or candidates


def _precede(model: nn.Module, modules: tuple[str, ...], network: str, size: tuple[int, ...]) -> bool:
    """Return True if no module in `modules` uses the output of `network`, as for a normalization of the input."""
    try:
        flow = DataFlow(model, size, (*modules, network))
    except UserError:
        return False
    return not any(flow.feeds(network, name) for name in modules)


def _features(module: nn.Module) -> tuple[int, int]:
    """Return the number of input features of the first layer and of output features of the last layer, or (-1, -2)."""
    sizes = [
        (m.in_features, m.out_features) if isinstance(m, nn.Linear) else (m.in_channels, m.out_channels)
        for m in module.modules()
        if isinstance(m, nn.Linear | nn.Conv2d)
    ]
    return (sizes[0][0], sizes[-1][1]) if sizes else (-1, -2)


def _stated(model: nn.Module) -> list[nn.Module] | None:
    """Return the modules from timm's method `get_classifier`, or None if the method does not exist or fails."""
    get_classifier: Any = getattr(model, "get_classifier", None)
    if get_classifier is None or not hasattr(type(model), "get_classifier"):  # a wrapper may forward the attribute
        return None
    try:
        found = get_classifier()
    except AttributeError:  # the head of the timm model was replaced
        return None
    modules = list(found) if isinstance(found, tuple | list) else [found]
    return [m for m in modules if isinstance(m, nn.Module) and not isinstance(m, nn.Identity)]


def networks_in(model: nn.Module) -> list[str]:
    """Return the full names of the outermost pretrained networks in `model`.

    The list is empty if `model` itself is such a network, or if it contains none.
    """
    base = getattr(model, "base_model_prefix", "")  # the submodule without the head (transformers)
    if base and isinstance(getattr(model, base, None), nn.Module) and _first_layer(model).startswith(f"{base}."):
        return [base]
    if _is_of_transformers(model) and _is_of_transformers(getattr(model, "backbone", None)):
        return ["backbone"]  # as in UperNet
    if is_network(model):
        return []
    found: list[str] = []
    for name, child in model.named_children():
        inner = networks_in(child)
        found += [f"{name}.{network}" for network in inner] if inner else [name] * is_network(child)
    return found or _network_around_blocks(model)


def _network_around_blocks(model: nn.Module) -> list[str]:
    """Find the outermost submodule that contains the blocks and the first convolution or embedding.

    Returns:
        A list with the name of the submodule, or an empty list.
    """
    first = _first_layer(model)
    parts = holder_of(model).split(".")
    names = (".".join(parts[: depth + 1]) for depth in range(len(parts)))
    return [name for name in names if name and first.startswith(f"{name}.")][:1]


def _first_layer(model: nn.Module) -> str:
    """Return the name of the first convolution or embedding, or "" if there is none."""
    return next((n for n, m in model.named_modules() if isinstance(m, nn.Conv2d | nn.Embedding)), "")


def is_network(module: nn.Module) -> bool:
    """Return True if `module` is a network of timm, transformers, torchvision or segmentation-models-pytorch."""
    if hasattr(type(module), "get_classifier") or _NETWORKS & {kind.__name__ for kind in type(module).__mro__}:
        return True
    of_torchvision = vars(sys.modules.get("torchvision.models", object))
    return any(kind is not nn.Module and of_torchvision.get(kind.__name__) is kind for kind in type(module).__mro__)


def _is_of_transformers(module: object) -> bool:
    return any(kind.__name__ == "PreTrainedModel" for kind in type(module).__mro__)


def _around(module: nn.Module, networks: Iterable[str], prefix: str = "") -> Iterator[str]:
    """Yield the full names of the parameters and of the outermost modules that are outside of `networks`."""
    yield from (f"{prefix}{name}" for name, _ in module.named_parameters(recurse=False))
    for name, child in module.named_children():
        full = f"{prefix}{name}"
        if any(network.startswith(f"{full}.") for network in networks):
            yield from _around(child, networks, f"{full}.")
        elif full not in networks and next(child.parameters(), None) is not None:
            yield full


def _without(model: nn.Module, name: str, known: frozenset[str]) -> list[str]:
    """Return the parts of the module or parameter `name` that do not belong to any module in `known`."""
    if is_inside(name, known):
        return []
    if not any(part.startswith(f"{name}.") for part in known):
        return [name]
    return list(_around(model.get_submodule(name), known, f"{name}."))


def _followers(model: nn.Module) -> list[str]:
    """Return the names of the modules after the blocks, except norm and pooling layers."""
    return [
        name
        for name in after(model, stages_of(model)[2])
        if not is_norm(model.get_submodule(name)) and not _POOLING.fullmatch(name)
    ]


def _last_parts(model: nn.Module, size: tuple[int, ...]) -> tuple[str, ...]:
    """Return the names of modules with the name of a head, and of modules after the blocks.

    Normalization and pooling layers are omitted. If there are no such modules, return the name of the layer that runs
    last, or nothing for networks of `transformers`.
    """
    followers = _followers(model)
    named = [name for name in _HEADS if _has_parameters(model, name)]
    if followers or named:
        return tuple(dict.fromkeys([*named, *followers]))
    if _is_of_transformers(model):
        return ()  # a network of `transformers` without a head, such as CLIPVisionModel
    layers = [name for name, module in model.named_modules() if isinstance(module, nn.Linear | nn.Conv2d) and name]
    with suppress(UserError):  # a network that cannot run on inputs of this size
        layers = DataFlow(model, size, layers).called
    blocks = frozenset(block for stage in stages_of(model)[0] for block in stage)
    pooling = any(_POOLING.fullmatch(part) for part in layers[-1].split(".")) if layers else False
    return () if not layers or pooling or is_inside(layers[-1], blocks) else (layers[-1],)


def _note(parts: Iterable[str], networks: Iterable[str] = ()) -> str:
    """Return the phrase that lists the inferred parts in reports, or an empty string if there are no parts.

    The inferred parts are outside of `networks` if `networks` is not empty, and are the head otherwise.
    """
    listed, held = ", ".join(parts), ", ".join(networks)
    if not listed:
        return ""
    return f"not part of {held}, and therefore treated as new: {listed}" if held else f"inferred as the head: {listed}"


def _has_parameters(model: nn.Module, name: str) -> bool:
    try:
        return next(model.get_submodule(name).parameters(), None) is not None
    except AttributeError:
        return False
