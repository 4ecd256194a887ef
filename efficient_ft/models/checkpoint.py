"""Read the tensors of a weights file by name, without executing code from the file."""

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
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from efficient_ft.core.errors import SettingError, UserError, why_unreadable

_FORMS = "a complete weights file (.safetensors, .npz for the ViT family, or .pth, .pt, .bin, .ckpt with tensors only)"
#: Patterns for the first bytes of files that are often passed by mistake, and the error message for each pattern.
_OTHER_FILES = (
    (rb"version https://git-lfs", "The file is a Git LFS pointer. Run git lfs pull to download the weights"),
    (rb"\s*<(!doctype|html|\?xml)", "The file is a web page, so the download has failed. Download the weights again"),
    (rb"\xff\xd8\xff|\x89PNG|GIF8|BM..\0\0|RIFF....WEBP", "The file is an image. Pass a file of weights"),
    (rb"%PDF", "The file is a PDF document. Pass a file of weights"),
    (rb"\x89HDF", "The file is an HDF5 file, for example from Keras. Convert the file to PyTorch's names first"),
    (rb"GGUF", "The file is a GGUF file. Use the original weights instead"),
    (rb"\x1f\x8b|BZh|7z\xbc|\xfd7zXZ|Rar!", "The file is a compressed archive. Unpack the archive first"),
    (rb"\s*\{[^\0]*$", "The file is a JSON file. Merge the shards that the file lists into one .safetensors file"),
    (rb"[\t\n\r -~]+$", "The file is a text file. Pass a file of weights"),
)
#: Pattern for the names of other files that the Transformers trainer and Accelerate store next to the weights.
_NO_WEIGHTS = re.compile(r"(optimizer|scheduler|scaler|training_args|rng_state|random_states|sampler)[\w.-]*$")
#: Advice for a file that contains Python objects.
_WEIGHTS_ALONE = (
    "Ask the author of the file to save only the weights: safetensors.torch.save_model(model, FILE). Converting the"
    " file executes the code in the file, so convert the file only if you trust its source."
)
#: Maximum nesting depth of the mappings and lists that are searched for tensors.
_DEPTH = 16


@dataclass(frozen=True)
class Contents:
    """The tensors of a weights file.

    Attributes:
        tensors: Tensors by full name. A full name consists of the keys of the nested mappings and lists, joined with
            dots.
        keys: For each full name, the key of the nested mapping that contains the tensor, or "" for the top level.
        objects: Names of the classes whose objects in the file were not loaded.
    """

    tensors: dict[str, Tensor]
    keys: dict[str, str]
    objects: tuple[str, ...] = ()

    def under(self, prefix: str) -> dict[str, Tensor]:
        """Return the tensors whose full names start with `prefix`. The prefix is removed from the names."""
        return {name[len(prefix) :]: value for name, value in self.tensors.items() if name.startswith(prefix)}

    def weights_under(self, prefix: str) -> dict[str, Tensor]:
        """Return the usable tensors whose full names start with `prefix`.

        Floating-point tensors are converted to fp32, and integer tensors are unchanged.
        """
        values = self.under(prefix)
        usable = (name for name, v in values.items() if not v.is_floating_point() or why_unusable(v) is None)
        return {name: values[name].float() if values[name].is_floating_point() else values[name] for name in usable}


def read_contents(path: Path) -> Contents:
    """Read all tensors of a .safetensors, .pth, .pt, .bin, .ckpt or .npz file.

    The format is detected from the content of the file. Only .npz files are also recognized by the extension.

    Raises:
        SettingError: If the file does not exist, is damaged, or contains no tensors.
    """
    require_file(path)
    try:
        with open(path, "rb") as opened:
            start = opened.read(512)
        why = _other_file(path, start)
        held, objects = _read(path, start) if why is None else (None, ())
    except Exception as error:  # torch, NumPy and safetensors raise many types of errors for a damaged file
        damaged = isinstance(error, OSError) and error.errno == errno.EINVAL  # torch's error for a truncated file
        reason = "the file is truncated or damaged" if damaged else why_unreadable(error).partition(". ")[0].rstrip(".")
        why = f"The file cannot be read: {reason}"
        if "Python objects" in why:
            why += f". {_WEIGHTS_ALONE.rstrip('.')}"
    if why is not None:
        raise SettingError("model.weights", path, _FORMS, f"{why}.")
    tensors: dict[str, Tensor] = {}
    keys: dict[str, str] = {}
    for key, name, value in _walk(held, ()):
        full = f"{key}.{name}".lstrip(".") if key else name
        if full in tensors:
            raise SettingError("model.weights", path, "a file with unique names", f"The file contains {full} twice.")
        tensors[full], keys[full] = value, key
    if not tensors:
        raise _without_tensors(path, held, objects)
    return Contents(tensors, keys, objects)


def read_metadata(path: Path) -> dict[str, str]:
    """Return the metadata of a .safetensors file, or an empty dictionary for other formats."""
    if path.suffix != ".safetensors":
        return {}
    try:
        with safe_open(path, "pt") as opened:
            return dict(opened.metadata() or {})
    except (SafetensorError, OSError) as error:
        raise UserError(f"The file {path} cannot be read ({error}).") from error


def require_file(path: Path) -> None:
    """Raise a SettingError unless `path` is a file. For a folder, the message states what to pass instead."""
    if os.path.isfile(path):  # pathlib raises an error for a name that is too long
        return
    do, shown = None, str(path)
    if re.match(r"\w[\w-]+:", shown) and os.name == "posix":
        shown = re.sub(r"^(\w+):/(?!/)", r"\1://", shown)  # Path merges the two slashes of a URL
        do = "Download the file, and pass its local path."
    elif os.path.isdir(path):
        inside = sorted(name for name in os.listdir(path) if re.search(r"\.(safetensors|pth|pt|bin|ckpt|npz)$", name))
        inside = [name for name in inside if not _NO_WEIGHTS.match(name)]
        if not inside:
            do = "The folder contains no weights files."
        elif inside[0].startswith("adapter_model."):
            do = "The folder contains an adapter. Merge the adapter into its network (peft: merge_and_unload())."
        elif any(re.search(r"-\d+-of-\d+\.", name) for name in inside):
            do = "The folder contains shards of one model. Merge the tensors of all shards into one mapping, and store"
            do += " the mapping with safetensors.torch.save_file."
        else:
            do = f"The folder contains {len(inside)} weights file{'s' * (len(inside) > 1)}."
            do += f" Pass {'this file' if len(inside) == 1 else 'one of the files'}: model.weights={path / inside[0]}."
    raise SettingError("model.weights", shown, "an existing file", do)


def _other_file(path: Path, start: bytes) -> str | None:
    """Return an error message if a file contains no weights, or None if it may contain weights.

    The function checks the first bytes of the file, `start`, and the names of the members of an archive.
    """
    if not start:
        return "The file is empty"
    for pattern, sentence in _OTHER_FILES:
        if re.match(pattern, start, re.IGNORECASE):
            return sentence
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
        inner = {name.partition("/")[2] for name in names}
        if "constants.pkl" in inner:
            return f"The file is a TorchScript program. {_WEIGHTS_ALONE.rstrip('.')}"
        if "data.pkl" not in inner and not any(name.endswith(".npy") for name in names):
            return f"The file is an archive ({', '.join(names[:3])}). Unpack the archive first"
    return None


def _read(path: Path, start: bytes) -> tuple[Any, tuple[str, ...]]:
    """Return the object that is stored in a file, and the names of the classes whose objects were not loaded."""
    if start[8:9] == b"{":
        return load_file(path), ()
    if path.suffix == ".npz" or start[:6] == b"\x93NUMPY":
        arrays = np.load(path, allow_pickle=False)
        if isinstance(arrays, np.ndarray):
            raise ValueError("the file contains one array without a name")
        return {name: torch.from_numpy(arrays[name]) for name in arrays.files}, ()
    with warnings.catch_warnings():  # torch warns about pickle files and unsupported tensor types
        warnings.simplefilter("ignore")
        return _unpickle(path)


class _Inert:
    """Base class of the classes that replace unknown classes in a pickle file.

    Instances ignore the arguments of the constructor and their pickled state.
    """

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __setstate__(self, state: Any) -> None: ...


#: Standard types that replace custom mapping and list classes. Each key is a part of the error message that torch
#: raises for such a class.
_STANDARD: dict[str, type] = {"Can only SETITEM": OrderedDict, "Can only append": list, "Can only extend": list}


def _unpickle(path: Path) -> tuple[Any, tuple[str, ...]]:
    """Read a file written by `torch.save`. Objects of classes that torch rejects are replaced with inert objects.

    Returns:
        The object that is stored in the file, and the names of the replaced classes.
    """
    try:
        with open(path, "rb") as opened:  # torch checks the extension of a path, but not of an open file
            names = [str(name) for name in torch.serialization.get_unsafe_globals_in_checkpoint(opened)]
    except ValueError:  # the file has the old format of torch.save, which is not a zip archive
        names = []
    inert: dict[str, type] = {name: type(name, (_Inert,), {}) for name in names}
    while True:
        allowed: Any = [(cls, name) for name, cls in inert.items()]
        try:
            with open(path, "rb") as opened, torch.serialization.safe_globals(allowed):
                held = torch.load(opened, map_location="cpu", weights_only=True)
            return held, tuple(names)
        except pickle.UnpicklingError as error:
            # The file contains an object of a custom mapping or list class. The error message names the inert class.
            standard = next((kind for text, kind in _STANDARD.items() if text in str(error)), None)
            found = next((n for n, cls in inert.items() if issubclass(cls, _Inert) and repr(cls) in str(error)), None)
            if standard is None or found is None:
                raise
            inert[found] = type(found, (), {"__new__": lambda *_, kind=standard, **__: kind()})


def _walk(held: Any, path: tuple[str, ...], above: tuple[int, ...] = ()) -> Iterator[tuple[str, str, Tensor]]:
    """Yield (key of the mapping, name, value) for each tensor in nested mappings and lists. Cycles are not followed."""
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
    do = f"The file contains {inside}."
    if arrays:
        do += " NumPy arrays in the file are not loaded. Save the arrays as .npz with numpy.savez(FILE, **arrays)."
    if objects:
        what = "a whole model" if any(name.startswith("torch.nn.modules.") for name in objects) else "Python objects"
        do = f"The file contains {what} (classes {', '.join(objects[:3])}). Loading such a file would execute its code."
        do += f" {_WEIGHTS_ALONE}"
    return SettingError("model.weights", path, "a file with a state dict (a mapping from names to tensors)", do)


def why_unusable(tensor: Tensor) -> str | None:
    """Return the reason why a tensor cannot be used as a floating-point weight, or None if it can be used."""
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
