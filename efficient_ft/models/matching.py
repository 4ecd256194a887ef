"""Find the part of a weights file that fits a network, and list missing, mismatched and unused tensors."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from efficient_ft.config.schema import ModelConfig
from efficient_ft.core.errors import SettingError
from efficient_ft.models.checkpoint import Contents

#: Kinds of prefix tokens, by parameter name. Prefix tokens precede the patch tokens.
PREFIX_TOKENS = {"cls_token": "class", "dist_token": "distillation", "reg_token": "register",
                 "register_tokens": "register"}  # fmt: skip
#: Maximum numbers of candidate prefixes that `_votes` and `_groups` contribute to the search.
_BY_NAMES, _BY_STRUCTURE = 16, 24
#: Pattern for the parts that torch.compile, FSDP and activation checkpointing insert into the names of tensors.
_WRAPPERS = re.compile(r"(?:(?<=\.)|^)(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
#: Keys of averaged weights in checkpoints of timm's training script. The values are the keys of the other weights.
_AVERAGES = {"state_dict_ema": "state_dict", "model_ema": "model"}


@dataclass(frozen=True)
class Fit:
    """The result of comparing a network with the tensors of a file that have a common name prefix.

    Attributes:
        prefix: Prefix of the full names in the file.
        taken: Tensors to load, by their names in the network. For a new head, these are the initialized tensors of the
            network.
        missing: Names of the network's tensors that the file does not contain.
        misshapen: Descriptions of mismatched shapes or data types, by tensor name.
        foreign: Names of tensors in the file that suggest a different variant of the network.
        left_out: Mapping from the names of unused tensors, without the prefix, to the reasons why they are not used.
        new_heads: Mapping from the names of classifiers to the reasons why they must be newly initialized.
        notes: Descriptions of changes to tensors.
        error: Reason why the names could not be converted, or an empty string if the conversion succeeded.
        loaded: Number of tensors taken from the file.
        model: Network with the tensors in `taken`, or None if the comparison does not build a network.
    """

    prefix: str
    taken: Mapping[str, Tensor] = field(default_factory=dict)
    missing: tuple[str, ...] = ()
    misshapen: Mapping[str, str] = field(default_factory=dict)
    foreign: tuple[str, ...] = ()
    left_out: Mapping[str, str] = field(default_factory=dict)
    new_heads: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    error: str = ""
    loaded: int = 0
    model: nn.Module | None = None

    @property
    def complete(self) -> bool:
        """Return True if the names could be converted, and no tensor is missing, mismatched or foreign."""
        return not (self.error or self.missing or self.misshapen or self.foreign)


def choose(
    config: ModelConfig, path: Path, contents: Contents, own: Collection[str], fit: Callable[[Contents, str], Fit]
) -> tuple[Contents, Fit]:
    """Find the tensors in a file that fit a network, and whose names have a common prefix.

    `own` contains the names of the network's tensors. `model.weights_key` restricts the search to a part of the file.
    `fit` compares the tensors that have a given name prefix with the network.

    Returns:
        The contents that were searched, and the complete fit. If no fit is complete, the nearest fit is returned.

    Raises:
        SettingError: If several parts of the file fit, or if `model.weights_key` matches no part.
    """
    return _search(config, path, _restricted(config, path, contents), own, fit)


def _search(
    config: ModelConfig, path: Path, searched: Contents, own: Collection[str], fit: Callable[[Contents, str], Fit]
) -> tuple[Contents, Fit]:
    """Implement `choose` for the tensors in `searched`.

    If no tensors fit, remove the components that wrappers insert into names, and search again.
    """
    votes = _votes(searched.tensors, own)
    most = max(votes.values(), default=0)
    likely = [prefix for prefix, count in votes.most_common(_BY_NAMES) if count * 2 >= most]
    fits = [fit(searched, prefix) for prefix in likely]
    if not any(one.complete for one in fits):
        fits += [fit(searched, prefix) for prefix in _groups(searched.tensors, len(own)) if prefix not in likely]
    complete = [one for one in fits if one.complete]
    if not complete and any(_WRAPPERS.search(name) for name in searched.tensors):
        names = {name: _WRAPPERS.sub("", name) for name in searched.tensors}
        if len(set(names.values())) == len(names):
            plain = {names[name]: value for name, value in searched.tensors.items()}
            keys = {names[name]: _WRAPPERS.sub("", searched.keys[name]) for name in names}
            return _search(config, path, Contents(plain, keys, searched.objects), own, fit)
    if not complete:
        fits = fits or [Fit("", missing=tuple(own))]
        return searched, max(fits, key=lambda one: (one.loaded, len(searched.under(one.prefix))))
    complete = _different(complete)
    if len(complete) == 1:
        return searched, complete[0]
    average = _average(complete)
    if average is None:
        raise _ambiguous(config, path, searched, complete)
    return searched, average


def _restricted(config: ModelConfig, path: Path, contents: Contents) -> Contents:
    """Return the part of the file that `model.weights_key` selects."""
    if config.weights_key is None:
        return contents
    start = f"{str(config.weights_key).rstrip('.')}."
    tensors = {name: value for name, value in contents.tensors.items() if name.startswith(start)}
    if not tensors:
        groups = Counter(name.partition(".")[0] for name in contents.tensors)
        if len(groups) == 1:
            groups = Counter(".".join(name.split(".")[:2]) for name in contents.tensors)
        inside = ", ".join(f"{name} ({count} tensors)" for name, count in groups.most_common(8))
        known = "a prefix of the tensor names in model.weights"
        raise SettingError("model.weights_key", config.weights_key, known, f"The file {path} contains {inside}.")
    return Contents(tensors, contents.keys, contents.objects)


def _votes(names: Collection[str], own: Collection[str]) -> Counter[str]:
    """For each prefix, count the names in the file that are names in the network after the prefix is removed."""
    votes: Counter[str] = Counter()
    for name in names:
        starts = [0, *(dot.end() for dot in re.finditer(r"\.", name))]
        votes.update(name[:start] for start in starts if name[start:] in own)
    return votes


def _groups(names: Collection[str], size: int) -> list[str]:
    """Return the prefixes that many names share, starting with the shortest.

    These prefixes are searched if the names in the file must be converted before they match names in the network.
    """
    counts: Counter[str] = Counter()
    for name in names:
        parts = name.split(".")
        counts.update(".".join(parts[:n]) + "." * (n > 0) for n in range(min(len(parts), 8)))
    many = [prefix for prefix, count in counts.items() if count >= max(2, size // 3)]
    return sorted(many, key=lambda prefix: prefix.count("."))[:_BY_STRUCTURE]


def _different(fits: Sequence[Fit]) -> list[Fit]:
    """Return the fits without duplicates, which occur if a module is registered twice."""

    def same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
        return one.keys() == other.keys() and bool(one) and all(torch.equal(one[name], other[name]) for name in one)

    kept: list[Fit] = []
    for one in fits:
        if not any(same(one.taken, other.taken) for other in kept):
            kept.append(one)
    return kept


def _average(fits: Sequence[Fit]) -> Fit | None:
    """Return the fit of the averaged weights, or None if `fits` is not a pair that timm's training script stores."""
    if len(fits) != 2:
        return None
    for one, other in (fits, fits[::-1]):
        key, _, rest = one.prefix.partition(".")
        if _AVERAGES.get(key) == other.prefix.partition(".")[0] and rest == other.prefix.partition(".")[2]:
            note = f"the averaged weights are used (model.weights_key={_AVERAGES[key]} selects the other weights)"
            return replace(one, notes=(*one.notes, note))
    return None


def _ambiguous(config: ModelConfig, path: Path, contents: Contents, fits: Sequence[Fit]) -> SettingError:
    def setting(key: str) -> str:
        return f"model.weights_key={key}" if re.fullmatch(r"[\w.-]+", key) else f"\"model.weights_key='{key}'\""

    named = [(one.prefix.rstrip("."), len(contents.under(one.prefix))) for one in fits]
    listed = ", ".join(f"{name or 'the top level'} ({count} tensors)" for name, count in named)
    keys = [name for name, _ in named if name]
    given = "null" if config.weights_key is None else config.weights_key
    do = f"The file {path} contains {len(fits)} sets of weights that fit {config.name}: {listed}."
    do += f" Set {setting(keys[-1])} or another key."
    return SettingError("model.weights_key", given, f"one of {', '.join(keys)}", do)


def compare(
    prefix: str,
    given: Mapping[str, Tensor],
    own: Mapping[str, Tensor],
    model: nn.Module,
    heads: Sequence[str],
    *,
    offset: int = 0,
    lenient: bool = False,
) -> Fit:
    """Compare tensors of a file, `given`, with the tensors of a network, `own`.

    `given` contains the tensors whose names start with `prefix`. The keys are the names without the prefix. `heads`
    contains the names of the network's classifiers. `offset` is the number of additional classes at the start of a
    published classifier. `lenient` is True if the network's library ignores names that belong to other variants of the
    network.
    """
    given = {n: v.reshape(()) if n in own and own[n].ndim == 0 and v.numel() == 1 else v for n, v in given.items()}
    new: dict[str, str] = {}
    for head in heads:
        given, reason = _fit_head(head, given, own, offset)
        if reason is not None:
            new[head] = reason
    fresh = {name for name in own for head in new if name.startswith(f"{head}.")}
    taken = {name: own[name] if name in fresh else given[name] for name in own if name in fresh or name in given}
    misshapen = {
        name: f"{shape(value)} in the file, but {shape(own[name])} in the model"
        for name, value in taken.items()
        if value.shape != own[name].shape
    }
    misshapen |= {
        name: f"{str(value.dtype).removeprefix('torch.')} in the file"
        for name, value in taken.items()
        if own[name].is_floating_point() and not value.is_floating_point()
    }
    missing = tuple(name for name in own if name not in taken and not name.endswith("num_batches_tracked"))
    left_out: dict[str, str] = {}
    foreign = []
    buffers = dict(model.named_buffers()).keys() - own.keys()
    for name in given.keys() - own.keys():
        reason = _reason(name, model, heads, buffers)
        if reason is None and not lenient:
            foreign.append(name)
        else:
            left_out[name] = reason or "not used by this variant of the model"
    left_out = {name: left_out[name] for name in given if name in left_out}  # keeps the order of the file
    loaded = len(taken) - len(fresh) - len(misshapen)
    return Fit(prefix, taken, missing, misshapen, tuple(sorted(foreign)), left_out, new, loaded=loaded)


def fit_of_transformers(prefix: str, model: nn.Module, found: Mapping[str, Any], heads: Collection[str]) -> Fit:
    """Return the fit of a network that `transformers` has loaded.

    `prefix` is the prefix of the full names in the file. `found` is the loading info that ``from_pretrained`` returns.
    `heads` contains the names of the parts that may be newly initialized.
    """
    own = model.state_dict()
    shapes = {name: f"{'×'.join(map(str, was))} in the file, but {'×'.join(map(str, now))} in the model"
              for name, was, now in sorted(found["mismatched_keys"], key=lambda one: str(one[0]))}  # fmt: skip
    fresh = {name: head for name in {*shapes, *found["missing_keys"]} for head in heads
             if name.startswith(f"{head}.")}  # fmt: skip
    rows = {name.rpartition(".")[0]: was[0] for name, was, _ in found["mismatched_keys"] if len(was)}
    reasons = {head: f"{rows[head]} in the file" if head in rows else "absent from the file"
               for head in sorted(set(fresh.values()))}  # fmt: skip
    buffers = dict(model.named_buffers()).keys()
    left_out = {name: _reason(name, model, tuple(heads), buffers) for name in sorted(found["unexpected_keys"])}
    missing = tuple(sorted(name for name in found["missing_keys"] if name not in fresh))
    wrong = {name: words for name, words in shapes.items() if name not in fresh}
    foreign = tuple(name for name, why in left_out.items() if why is None)
    unused = {name: why for name, why in left_out.items() if why is not None}
    loaded = len(own) - len(fresh) - len(missing) - len(wrong)
    return Fit(prefix, own, missing, wrong, foreign, unused, reasons, loaded=loaded, model=model)


def _fit_head(
    head: str, given: dict[str, Tensor], own: Mapping[str, Tensor], offset: int
) -> tuple[dict[str, Tensor], str | None]:
    """Return the tensors to load, and the reason why the classifier must be newly initialized.

    The reason is None if the classifier fits, or if the caller reports the wrong shapes.
    """
    names = [name for name in own if name.startswith(f"{head}.")]
    here = [name for name in names if name in given]
    if not names or any(given[name].ndim != own[name].ndim or not given[name].ndim for name in here):
        return given, None  # the caller reports the wrong shape
    rows = {given[name].shape[0] for name in here}
    if len(rows) > 1:
        return given, None
    if len(here) == len(names) and all(given[name].shape[1:] == own[name].shape[1:] for name in names):
        (rows_here,), rows_own = rows, own[names[0]].shape[0]
        if rows_here == rows_own:
            return given, None
        if offset and rows_here == rows_own + offset:
            return {**given, **{name: given[name][offset:] for name in names}}, None
        reason = f"{rows_here} in the file"
    elif not here:
        reason = "absent from the file"
    elif len(here) < len(names):
        reason = f"{', '.join(name for name in names if name not in here)} absent from the file"
    else:
        reason = "the file has a different number of input features"
    return {name: value for name, value in given.items() if name not in names}, reason


def _reason(name: str, model: nn.Module, heads: Sequence[str], buffers: Collection[str]) -> str | None:
    """Return the reason to ignore a tensor that the network does not have.

    The result is None if the tensor suggests a different variant of the network.
    """
    first = name.partition(".")[0]
    if name.endswith(("total_ops", "total_params")):
        return "from a profiler"
    if name in buffers or name.endswith("num_batches_tracked"):
        return "computed by the model"
    if first in PREFIX_TOKENS:
        return None
    if name.rpartition(".")[2] == "mask_token":
        return "used only in pretraining"
    for head in heads:
        if name.startswith(f"{head}."):
            return "of another head"
        base = head.partition(".")[0]
        if first == base and (head == base or not hasattr(getattr(model, base), name.split(".")[1])):
            return "of another head"
    return None if hasattr(model, first) else "not part of the model"


def shape(tensor: Tensor) -> str:
    """Return the shape of a tensor as text, for example "3×16×16", or "a single number" for a scalar."""
    return "×".join(map(str, tensor.shape)) or "a single number"


def split_prefix(contents: Contents, prefix: str) -> tuple[str, str]:
    """Split a prefix of full names into the key of a nested mapping and the prefix of the names in this mapping."""
    key = next((contents.keys[name] for name in contents.tensors if name.startswith(prefix)), "")
    if key and not f"{prefix}.".startswith(f"{key}."):
        return prefix.rstrip("."), ""
    return key, prefix[len(key) + 1 :] if key else prefix


def no_fit(config: ModelConfig, path: Path, details: str) -> SettingError:
    """Return the error for a file that does not fit the network. `details` explains the reasons."""
    encoder = "" if config.encoder is None else f" or model.encoder={config.encoder}"
    kind = "a folder" if path.is_dir() else "a file"
    return SettingError("model.weights", path, f"{kind} that fits model.name={config.name}{encoder}", details)


def some(names: Sequence[Any]) -> str:
    """Return the first four names and the number of the remaining names as text."""
    return ", ".join(map(str, names[:4])) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
