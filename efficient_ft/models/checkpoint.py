"""Read the tensors of a weights file by name, without running code from the file."""

from __future__ import annotations

import errno
import os
import pickle
import re
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from efficient_ft.core.errors import SettingError, first_line, why_unreadable

_FORMS = "a complete weights file (.safetensors; .pth, .pt, .bin or .ckpt with tensors only; .npz for the ViT family)"
#: First bytes of files that are often given instead of weights, and a sentence about each.
_OTHER_FILES = (
    (rb"version https://git-lfs", "It is a Git LFS pointer instead of the file. Run git lfs pull"),
    (rb"\s*<(!doctype|html|\?xml)", "It is a web page: the download failed"),
    (rb"\x89HDF", "It is an HDF5 file, as written by Keras. Convert it to PyTorch's names first"),
    (rb"GGUF", "It is a GGUF file. Use the original weights"),
    (rb"\x1f\x8b|BZh|7z\xbc|\xfd7zXZ|Rar!", "It is a compressed archive. Unpack it first"),
    (rb"\s*\{[^\0]*$", "It is a JSON file. Merge the shards that it lists into one .safetensors file"),
)
#: What training stores next to weights: names of the Transformers trainer and of Accelerate.
_NO_WEIGHTS = re.compile(r"(optimizer|scheduler|scaler|training_args|rng_state|random_states|sampler)[\w.-]*$")
#: Advice for a file that holds more than tensors. Loading it to convert it would run the code in it.
_WEIGHTS_ALONE = (
    "Ask its author for the weights alone: safetensors.torch.save_model(model, FILE). Loading it yourself to convert it"
    " runs the code that it contains, so do this only if you trust its source."
)
#: Nesting beyond this depth is not searched.
_DEPTH = 16


@dataclass(frozen=True)
class Contents:
    """The tensors of a file.

    Attributes:
        tensors: tensors by full name; keys of nested mappings and lists are joined by dots.
        keys: the key of the nested mapping in each full name; "" at the top level.
        objects: classes of Python objects in the file that were not loaded.
    """

    tensors: dict[str, Tensor]
    keys: dict[str, str]
    objects: tuple[str, ...] = ()

    def under(self, prefix: str) -> dict[str, Tensor]:
        """Return the tensors whose full names start with `prefix`, without the prefix."""
        return {name[len(prefix) :]: value for name, value in self.tensors.items() if name.startswith(prefix)}

    def weights_under(self, prefix: str) -> dict[str, Tensor]:
        """Return the tensors under `prefix` in fp32, without tensors that cannot be weights; integers are unchanged."""
        return {
            name: value.float() if value.is_floating_point() else value
            for name, value in self.under(prefix).items()
            if not value.is_floating_point() or why_unusable(value) is None
        }


def read_contents(path: Path) -> Contents:
    """Read all tensors of a .safetensors, .pth, .pt, .bin, .ckpt or .npz file. The format is detected by the content.

    Raises:
        SettingError: the file does not exist, is damaged, or contains no tensors.
    """
    require_file(path)
    objects: tuple[str, ...] = ()
    try:
        with open(path, "rb") as opened:
            start = opened.read(512)
        why = _other_file(path, start)
        if why is None:
            held, objects = _read(path, start)
    except Exception as error:  # torch, numpy and safetensors raise many types of errors for a damaged file
        damaged = isinstance(error, OSError) and error.errno == errno.EINVAL  # raised by torch at the end of the file
        reason = "it is truncated or damaged" if damaged else why_unreadable(error).partition(". ")[0].rstrip(".")
        why = f"Reading it failed: {reason}"
        if "Python objects" in why:
            why += f". {_WEIGHTS_ALONE.rstrip('.')}"
    if why is not None:
        raise SettingError("model.weights", path, _FORMS, f"{why}.")
    tensors: dict[str, Tensor] = {}
    keys: dict[str, str] = {}
    for key, name, value in _walk(held, ()):
        full = f"{key}.{name}".lstrip(".") if key else name
        if full in tensors:
            raise SettingError("model.weights", path, "a file with unique names", f"It contains {full} twice.")
        tensors[full], keys[full] = value, key
    if not tensors:
        raise _without_tensors(path, held, objects)
    return Contents(tensors, keys, objects)


def require_file(path: Path) -> None:
    """Raise a SettingError unless the path is a file; the error for a folder contains advice."""
    if os.path.isfile(path):  # pathlib raises for a name that is too long
        return
    do, shown = None, str(path)
    if re.match(r"\w[\w-]+:", shown) and os.name == "posix":
        shown = re.sub(r"^(\w+):/(?!/)", r"\1://", shown)  # a Path has joined the slashes
        do = "Download the file, and pass its local path."
    elif os.path.isdir(path):
        inside = sorted(name for name in os.listdir(path) if re.search(r"\.(safetensors|pth|pt|bin|ckpt|npz)$", name))
        inside = [name for name in inside if not _NO_WEIGHTS.match(name)]
        count = f"{len(inside)} file{'s' * (len(inside) > 1)}"
        do = "It is a folder" + (f" with {count} of weights" if inside else " without files of weights")
        shards = [name for name in inside if re.search(r"-\d+-of-\d+\.", name)]
        if inside and inside[0].startswith("adapter_model."):
            do = "It is a folder with an adapter. Merge it into its network first (peft: merge_and_unload())."
        elif shards:
            do += ", shards of one model. Join them into one file: their tensors in one mapping, written by"
            do += " safetensors.torch.save_file."
        else:
            one = "it" if len(inside) == 1 else "one of them"
            do += f". Pass {one}: model.weights={path / inside[0]}." if inside else "."
    raise SettingError("model.weights", shown, "an existing file", do)


def _other_file(path: Path, start: bytes) -> str | None:
    """Return a sentence about a file without weights, judged by its first bytes; None for other files."""
    if not start:
        return "Reading it failed: it is empty"
    for pattern, sentence in _OTHER_FILES:
        if re.match(pattern, start, re.IGNORECASE):
            return sentence
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
        inner = {name.partition("/")[2] for name in names}
        if "constants.pkl" in inner:
            return f"It is a TorchScript program. {_WEIGHTS_ALONE.rstrip('.')}"
        if "data.pkl" not in inner and not any(name.endswith(".npy") for name in names):
            return f"It is an archive ({', '.join(names[:3])}). Unpack it first"
    return None


def _read(path: Path, start: bytes) -> tuple[Any, tuple[str, ...]]:
    """Return the object in a file, and the classes that were not loaded."""
    if start[8:9] == b"{":
        return load_file(path), ()
    if path.suffix == ".npz" or start[:6] == b"\x93NUMPY":
        arrays = np.load(path, allow_pickle=False)
        if isinstance(arrays, np.ndarray):
            raise ValueError("it contains one array without a name")
        return {name: torch.from_numpy(arrays[name]) for name in arrays.files}, ()
    with warnings.catch_warnings():  # torch warns of pickles and of unsupported kinds of tensors
        warnings.simplefilter("ignore")
        return _unpickle(path)


class _Inert:
    """Base of replacements for the classes in a pickle. The objects ignore arguments and state."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __setstate__(self, state: Any) -> None: ...


class _InertDict:
    """Replaces a class of mappings; torch fills only its own types."""

    def __new__(cls, *_: Any, **__: Any) -> Any:
        return OrderedDict()


class _InertList:
    """Replaces a class of lists."""

    def __new__(cls, *_: Any, **__: Any) -> Any:
        return []


def _unpickle(path: Path) -> tuple[Any, tuple[str, ...]]:
    """Read a file written by torch.save. Objects of classes that torch does not allow become inert.

    Settings, metrics and paths are often stored next to the weights.
    """
    try:
        with open(path, "rb") as opened:  # for a path, torch would use its suffix
            names = [str(name) for name in torch.serialization.get_unsafe_globals_in_checkpoint(opened)]
    except ValueError:  # the format before archives
        names = []
    inert: dict[str, type] = {name: type(name, (_Inert,), {}) for name in names}
    while True:
        allowed: Any = [(cls, name) for name, cls in inert.items()]
        try:
            with open(path, "rb") as opened, torch.serialization.safe_globals(allowed):
                held = torch.load(opened, map_location="cpu", weights_only=True)
            return held, tuple(names)
        except pickle.UnpicklingError as error:
            # A mapping or list of a custom class. torch names the inert class that it would have to fill.
            kind = {"Can only SETITEM": _InertDict, "Can only append": _InertList, "Can only extend": _InertList}
            other = next((made for text, made in kind.items() if text in str(error)), None)
            found = next((n for n, cls in inert.items() if issubclass(cls, _Inert) and repr(cls) in str(error)), None)
            if other is None or found is None:
                raise
            inert[found] = type(found, (other,), {})


def _walk(held: Any, path: tuple[str, ...], above: tuple[int, ...] = ()) -> Iterator[tuple[str, str, Tensor]]:
    """Yield (key of the mapping, name, value) of each tensor in nested mappings and lists; cycles are not followed."""
    if isinstance(held, Tensor) and not path:
        yield "", "tensor", held
    if len(path) > _DEPTH or id(held) in above:
        return
    entries = held.items() if isinstance(held, Mapping) else enumerate(held) if isinstance(held, list | tuple) else ()
    for name, value in entries:
        if isinstance(value, Tensor):
            yield ".".join(path), str(name), value.detach()
        else:
            yield from _walk(value, (*path, str(name)), (*above, id(held)))


def _without_tensors(path: Path, held: Any, objects: tuple[str, ...]) -> SettingError:
    """Return the error for a file without named tensors."""
    arrays = any(name.endswith("multiarray._reconstruct") for name in objects)
    objects = tuple(name for name in objects if not name.startswith(("numpy.", "builtins.")))
    inside = ", ".join(map(str, list(held)[:5])) if isinstance(held, Mapping) and held else "nothing"
    do = f"It contains {inside}."
    if arrays:
        do += " NumPy's arrays in it are not loaded. Save them with numpy.savez(FILE, **arrays), as .npz."
    if objects:
        what = "a whole model" if any(name.startswith("torch.nn.modules.") for name in objects) else "Python objects"
        do = (
            f"It contains {what} (classes {', '.join(objects[:3])}), which cannot be loaded without running code."
            f" {_WEIGHTS_ALONE}"
        )
    return SettingError("model.weights", path, "a file with a state dict (names to tensors)", do)


def why_unusable(tensor: Tensor) -> str | None:
    """Return why a tensor of this kind cannot be a weight; None if it can be one."""
    if tensor.is_quantized:
        return "quantized"
    if tensor.is_meta:
        return "without values (on the meta device)"
    if tensor.layout != torch.strided:
        return "sparse"
    if tensor.is_complex():
        return "complex"
    if tensor.is_floating_point():
        return f"{str(tensor.dtype).removeprefix('torch.')} without its scales" if tensor.itemsize == 1 else None
    return str(tensor.dtype).removeprefix("torch.")


def error_text(error: BaseException) -> str:
    """Return the first line of an error's text, without a period."""
    return first_line(error).rstrip(".")
