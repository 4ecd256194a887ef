"""Save and load the trained part of a model, or all weights of a model, as a ``.safetensors`` file."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from efficient_ft.core.errors import UserError, first_line
from efficient_ft.core.files import write_bytes_atomically
from efficient_ft.core.parsing import parse_json
from efficient_ft.methods.base import Method, plain_state_dict
from efficient_ft.methods.quantized import quantized_parameters
from efficient_ft.models.frozen_batch_norm import frozen_layers
from efficient_ft.models.marks import added_modules, is_inside

#: Metadata key of files that contain a trained part. The value is a JSON object with the attributes of `About`.
_KEY = "efficient_ft_trained_part"
#: Key under which the values of a tensor are stored in an encoded state.
_TENSOR = "__tensor__"
_DTYPES = {str(d).removeprefix("torch."): d for d in vars(torch).values() if isinstance(d, torch.dtype)}
_MALFORMED = (LookupError, TypeError, ValueError, ArithmeticError, AttributeError, RuntimeError)


@dataclass(frozen=True)
class About:
    """Metadata of the trained part of a model.

    Attributes:
        methods: ``state_key`` of each method.
        state: decoded states of the methods.
        other_weights: checksum of the weights that are not in the file.
    """

    methods: list[str]
    state: dict[str, dict[str, Any]]
    other_weights: str


@dataclass(frozen=True)
class Content:
    """Content of a file, with tensors on the CPU. `about` is None if the file does not contain a trained part."""

    path: Path
    tensors: dict[str, Tensor]
    about: About | None


def names_of_trained_part(model: nn.Module, trains: Iterable[nn.Parameter]) -> list[str]:
    """Return the names of the tensors in ``model.state_dict()`` that belong to the trained part.

    See `MethodSession.save`.
    """
    own, added = {id(p) for p in trains}, added_modules(model)
    parameters = {id(p) for p in model.parameters()}
    frozen = set(frozen_layers(model))
    names = []
    for name, tensor in model.state_dict(keep_vars=True).items():
        is_buffer = id(tensor) not in parameters
        if id(tensor) in own or is_inside(name, added) or (is_buffer and name.rpartition(".")[0] not in frozen):
            names.append(name)
    return names


def write_trained(path: Path, model: nn.Module, names: Sequence[str], methods: Sequence[Method]) -> None:
    """Write the tensors of `model` listed in `names`, and the settings and states of the methods.

    Raise UserError if the file cannot be written, or if a state contains objects that JSON cannot represent.
    """
    about = {
        "methods": [method.state_key for method in methods],
        "state": encode({method.state_key: state for method in methods if (state := method.state_dict())}),
        "other_weights": _checksum(model, names),
    }
    saved = model.state_dict()
    _write(path, {name: saved[name] for name in names}, {_KEY: json.dumps(about)})


def write_whole(path: Path, model: nn.Module, methods: Sequence[Method]) -> None:
    """Write all weights under the names of the pretrained model.

    Raise UserError if the file cannot be written, or if a weight is quantized.
    """
    if quantized := quantized_parameters(model):
        name = next(iter(quantized))
        raise UserError(
            f"The file {path} cannot be written: a .safetensors file with all weights cannot contain quantized weights"
            f" ({name}, {quantized[name]}). Save the trained part without whole=True, or use"
            " torch.save(model.state_dict(), path)."
        )
    _write(path, plain_state_dict(model, methods, copy_weights=False), {})


def _write(path: Path, tensors: Mapping[str, Tensor], about: dict[str, str]) -> None:
    from safetensors.torch import save

    # Tensors are cloned because the format does not allow tensors that share memory (tied weights).
    content = save({n: t.detach().cpu().clone().contiguous() for n, t in tensors.items()}, {"format": "pt", **about})
    try:
        write_bytes_atomically(path, content)
    except OSError as error:
        raise UserError(f"The file {path} cannot be written ({first_line(error)}).") from error


def read(path: Path) -> Content:
    """Read a file. Raise UserError if the file does not exist, is not in this format, or has malformed metadata."""
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        raise UserError(f"The file {path} does not exist. Pass a file written by session.save().")
    try:
        with safe_open(path, "pt") as opened:
            metadata = opened.metadata() or {}
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise UserError(f"The file {path} is not a valid .safetensors file ({first_line(error)}).") from error
    try:
        return Content(path, tensors, _about(metadata[_KEY]) if _KEY in metadata else None)
    except ValueError as error:
        raise UserError(f"The file {path} has malformed metadata: {first_line(error)}. Save the file again.") from error


def _about(text: str) -> About:
    found = parse_json(text)
    if not isinstance(found, dict):
        raise ValueError(f"it must be a JSON object, got {type(found).__name__}")
    if missing := [key for key in ("methods", "state", "other_weights") if key not in found]:
        raise ValueError(f"it lacks {missing[0]}")
    methods, state, other_weights = found["methods"], found["state"], found["other_weights"]
    if not isinstance(methods, list) or not all(isinstance(name, str) for name in methods):
        raise ValueError("methods must be a list of strings")
    if not isinstance(state, dict) or not all(isinstance(of, dict) and _TENSOR not in of for of in state.values()):
        raise ValueError("state must be a JSON object whose values are JSON objects")
    if not isinstance(other_weights, str):
        raise ValueError("other_weights must be a string")
    return About(methods, {name: decode(of) for name, of in state.items()}, other_weights)


def load_trained(content: Content, model: nn.Module, names: Sequence[str], methods: Sequence[Method]) -> None:
    """Copy a trained part into `model`, and restore the states of the methods.

    If the methods, settings, names, shapes or remaining weights differ, raise UserError and leave the model unchanged.
    """
    about = content.about
    assert about is not None
    own = [method.state_key for method in methods]
    if about.methods != own:
        raise UserError(
            f"The file {content.path} was saved with other methods or settings:"
            f" {', '.join(about.methods) or 'no method'}. This session has {', '.join(own) or 'no method'}. Pass the"
            " methods and settings of the file."
        )
    _require_same(content, model, names, "Use the same model, the same classes and the same trained parameters.")
    if about.other_weights != _checksum(model, names):
        raise UserError(
            f"The file {content.path} was saved with a model whose frozen weights differ from those of this model."
            " Create the model with the same pretrained weights and dtype."
        )
    _load_state(content.path, about.state, methods)
    _copy(content, model)


def _load_state(path: Path, state: Mapping[str, dict[str, Any]], methods: Sequence[Method]) -> None:
    """Restore the states of the methods, or reset all methods and raise UserError if a state is malformed."""
    stateful = [method for method in methods if method.state_key in state]
    previous = [copy.deepcopy(method.state_dict()) for method in stateful]
    for index, method in enumerate(stateful):
        try:
            _require_same_types(method.name, state[method.state_key], previous[index])
            method.load_state_dict(state[method.state_key])
        except _MALFORMED as error:
            for other, before in zip(stateful[: index + 1], previous, strict=False):
                other.load_state_dict(before)
            why = f"{type(error).__name__}: {first_line(error)}"
            raise UserError(
                f"The file {path} has malformed metadata: the state of method {method.name} is invalid ({why})."
            ) from error


def _require_same_types(name: str, found: Any, own: Any) -> None:
    """Raise TypeError if corresponding values have different types. None matches any type, and int matches float."""
    if found is None or own is None:
        return
    kinds = [(int, float) if isinstance(v, int | float) and not isinstance(v, bool) else type(v) for v in (found, own)]
    if kinds[0] != kinds[1] and not {list, tuple} >= set(kinds):
        raise TypeError(f"{name} must be {type(own).__name__}, got {type(found).__name__}")
    if isinstance(own, dict):
        for key in own.keys() & found.keys():
            _require_same_types(f"{name}.{key}", found[key], own[key])
    elif isinstance(own, list | tuple):
        for index, (one, other) in enumerate(zip(found, own, strict=False)):
            _require_same_types(f"{name}[{index}]", one, other)


def load_whole(content: Content, model: nn.Module) -> None:
    """Copy all weights into `model`. If names or shapes differ, raise UserError and leave the model unchanged."""
    hint = (
        "Methods that rename layers (LoRA) or add modules change the names of the weights. Load weights with the"
        " pretrained names before the methods are applied, and load weights with added modules after the methods are"
        " applied."
    )
    _require_same(content, model, list(model.state_dict()), hint)
    _copy(content, model)


def _require_same(content: Content, model: nn.Module, names: Sequence[str], hint: str) -> None:
    """Raise UserError unless the file contains exactly the tensors in `names`, with the same shapes as in the model."""
    missing, unknown = [n for n in names if n not in content.tensors], content.tensors.keys() - set(names)
    if missing or unknown:
        faults = [f"the file lacks the tensor {missing[0]} ({len(missing)} in total)"] if missing else []
        faults += [f"the model has no tensor {min(unknown)} ({len(unknown)} in total)"] if unknown else []
        raise UserError(f"The file {content.path} does not fit {type(model).__name__}: {' and '.join(faults)}. {hint}")
    own = model.state_dict()
    for name, tensor in content.tensors.items():
        if tensor.shape != own[name].shape:
            raise UserError(
                f"The file {content.path} does not fit {type(model).__name__}: the tensor {name} has the shape"
                f" {tuple(tensor.shape)} in the file and {tuple(own[name].shape)} in the model. {hint}"
            )


@torch.no_grad()
def _copy(content: Content, model: nn.Module) -> None:
    own = model.state_dict()
    for name, tensor in content.tensors.items():
        own[name].copy_(tensor)


def _checksum(model: nn.Module, names: Iterable[str]) -> str:
    """Return a checksum of all tensors in ``model.state_dict()`` whose names are not in `names`."""
    left_out, checksum = set(names), hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        if name not in left_out and isinstance(tensor, Tensor):
            checksum.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            for plain in _plain_tensors(tensor.detach()):
                checksum.update(plain.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return checksum.hexdigest()[:32]


def _plain_tensors(tensor: Tensor) -> Iterator[Tensor]:
    """Yield `tensor` itself, or the plain tensors of which a tensor subclass such as a quantized weight consists."""
    if not is_traceable_wrapper_subclass(tensor):
        yield tensor
        return
    names, _ = tensor.__tensor_flatten__()
    for name in names:
        yield from _plain_tensors(getattr(tensor, name))


def encode(state: Any) -> Any:
    """Convert the state of a method to JSON values. Tensors become dictionaries, and tuples become lists.

    Raise UserError if the state contains objects other than None, tensors, numbers, strings, lists, tuples, and
    dictionaries with string keys.
    """
    if isinstance(state, Tensor):
        return {_TENSOR: state.tolist(), "dtype": str(state.dtype).removeprefix("torch.")}
    if isinstance(state, dict) and all(isinstance(key, str) for key in state):
        return {key: encode(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return [encode(value) for value in state]
    if state is None or isinstance(state, str | int | float | bool):
        return state
    raise UserError(
        "The state of a method must consist of tensors, numbers, strings, lists, and dictionaries with string keys, got"
        f" {type(state).__name__} ({state!r:.60}). Return only these types from state_dict."
    )


def decode(state: Any) -> Any:
    """Convert the result of `encode` to a state with tensors on the CPU. Raise ValueError if `state` is malformed."""
    try:
        return _decode(state)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _decode(state: Any) -> Any:
    if isinstance(state, dict):
        if _TENSOR in state:
            return _tensor(state)
        return {key: _decode(value) for key, value in state.items()}
    return [_decode(value) for value in state] if isinstance(state, list) else state


def _tensor(encoded: dict[str, Any]) -> Tensor:
    name = encoded.get("dtype")
    if not isinstance(name, str) or name not in _DTYPES:
        raise ValueError(f"a tensor has the unknown dtype {name!r:.60}")
    try:
        return torch.tensor(encoded[_TENSOR], dtype=_DTYPES[name])
    except RecursionError:
        raise
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise ValueError(f"the values of a tensor cannot be read ({first_line(error)})") from error
