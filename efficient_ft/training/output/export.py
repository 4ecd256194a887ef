"""Write and read ``model.safetensors``: the trained weights under timm's names, and the metadata required by `load`."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, Json, ValidationError, model_validator
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from efficient_ft import __version__
from efficient_ft.config import ModelConfig
from efficient_ft.config.schema import LARGEST_SIDE
from efficient_ft.core.errors import SettingError, UserError, first_line
from efficient_ft.core.files import set_default_permissions, write_atomically
from efficient_ft.core.input_spec import InputSpec
from efficient_ft.core.tokenizer import Tokenizer
from efficient_ft.data.images import MAX_PIXELS, Decoding
from efficient_ft.methods import METHODS
from efficient_ft.methods.base import Method, in_order
from efficient_ft.models.factory import read_state_dict
from efficient_ft.models.tasks import tasks_of
from efficient_ft.models.text import TOKENIZER
from efficient_ft.record.formats import PASS_A_RUN, OtherVersionError
from efficient_ft.training.kinds.base import Trained
from efficient_ft.training.kinds.registry import kind_named

NAME = "model.safetensors"
_Channel = Annotated[int, Field(ge=0, le=255)]
_Names = Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1)]


def save(
    path: Path,
    weights: Mapping[str, Tensor],
    model: ModelConfig,
    class_names: list[str] | dict[str, list[str]],
    input: InputSpec,
    notes: dict[str, Any],
    methods: Sequence[Method] = (),
) -> None:
    """Write the state dict `weights` with the metadata that `load` needs.

    The parameters must have timm's names (see `plain_state_dict`). `class_names` is a list in the order of the outputs,
    or a mapping from tasks to such lists. The metadata contain the settings of methods that cannot be merged into the
    weights. For adapters, the metadata also contain the settings of the method that selected the layers.
    """
    adapted = any(m.axis == "adapters" and not m.merges for m in methods)
    added = [m for m in in_order(methods) if not m.merges or (adapted and m.axis == "selection")]
    about = {
        "architecture": model.name,
        **({} if model.encoder is None else {"encoder": model.encoder}),
        **({} if model.library is None else {"library": model.library}),
        "model_kwargs": model.kwargs,
        "class_names": class_names,
        "image_size": list(input.size),  # for texts, this list contains only the number of tokens
        "mean": list(input.mean),
        "std": list(input.std),
        "interpolation": input.interpolation,
        **notes,
        "added": [{"method": m.name, "settings": m.settings()} for m in added],
        "efficient_ft": __version__,
    }
    if input.tokenizer is not None:
        about |= {TOKENIZER: input.tokenizer.dumps()}
    metadata = {"format": "pt", **{k: v if isinstance(v, str) else json.dumps(v) for k, v in about.items()}}
    separate = _without_shared_storages(weights)

    def write(temporary: Path) -> None:
        save_file(separate, temporary, metadata)
        _sort_metadata(temporary)
        set_default_permissions(temporary, 0o666)  # safetensors creates files that only their owner can read

    write_atomically(path, write)


def _sort_metadata(file: Path) -> None:
    """Sort the metadata in a .safetensors file, because the order that the library writes differs between processes."""
    with open(file, "rb+") as opened:
        length = int.from_bytes(opened.read(8), "little")
        header = json.loads(opened.read(length))
        header["__metadata__"] = dict(sorted(header.get("__metadata__", {}).items()))
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        assert len(text) <= length, "sorting the metadata must not lengthen the header"
        opened.seek(8)
        opened.write(text.ljust(length))


def _without_shared_storages(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copy tensors that share a storage (tied weights, views), because the file format does not support sharing."""
    seen: set[int] = set()
    separate: dict[str, Tensor] = {}
    for name, weight in weights.items():
        storage = weight.untyped_storage()
        alone = storage.data_ptr() not in seen and storage.nbytes() == weight.nbytes
        separate[name] = weight if alone else weight.clone()
        seen.add(storage.data_ptr())
    return separate


def load(run: Path, task: str | None = None) -> Trained:
    """Load the trained network of a run from the run folder or from the file model.safetensors.

    For a run with several tasks, `task` selects the task of the returned network (default: the first task).

    Raises:
        OtherVersionError: If the file names a method or a setting that this version does not support.
        UserError: If the file does not exist, is damaged, or was not written by a run, or if the task is unknown.
    """
    file, metadata = read_metadata(run)
    about = _checked(file, metadata)
    tokenizer = _tokenizer(file, about)
    size = about.image_size
    config = ModelConfig(
        name=about.architecture,
        library=about.library,
        encoder=about.encoder,
        pretrained=False,
        weights=str(file),
        image_size=None if tokenizer else (size[0], size[1]),
        max_length=size[0] if tokenizer else None,
        kwargs=about.model_kwargs,
    )
    added = [_noted_method(file, part) for part in about.added]
    tasks = about.class_names if isinstance(about.class_names, dict) else {}
    if task is not None and task not in tasks:
        has = f"its tasks are {', '.join(tasks)}" if tasks else "it was trained on a single data set"
        raise UserError(f"The run {run} has no task {task}: {has}.")
    kind = kind_named(about.task)
    classes = {name: len(of_task) for name, of_task in tasks.items()} or len(about.class_names)
    try:
        if added or tasks:
            model = kind.random_network(config, classes)
            for method in added:
                method.apply(model)
            _require_same_shapes(file, model)
            model.load_state_dict(read_state_dict(file))
        else:
            model = kind.network(config, classes, report=False)
            _require_same_shapes(file, model)
    except (UserError, RuntimeError, TypeError) as error:
        raise _altered(file, first_line(error)) from error
    switch = tasks_of(model)
    if switch is not None:
        switch.active = task or switch.active
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    return _trained(model, metadata, about, tokenizer, tasks, "" if switch is None else switch.active)


def described(file: Path, metadata: dict[str, str], model: nn.Module) -> Trained:
    """Describe the network `model` of an exported file, whose metadata are those of model.safetensors for one task.

    Raises:
        UserError: If the metadata are damaged.
    """
    about = _checked(file, metadata)
    if isinstance(about.class_names, dict):
        raise _altered(file, "its class_names must be a list")
    return _trained(model, metadata, about, _tokenizer(file, about), {}, "")


def _trained(
    model: nn.Module,
    metadata: dict[str, str],
    about: _About,
    tokenizer: Tokenizer | None,
    tasks: dict[str, list[str]],
    active: str,
) -> Trained:
    return Trained(
        model=model.eval(),
        class_names=tasks[active] if active else list(about.class_names),
        input=InputSpec(tuple(about.image_size), tuple(about.mean), tuple(about.std), about.interpolation, tokenizer),
        notes={k: v for k, v in metadata.items() if k not in _READ},
        tasks=tasks,
        task=about.task,
        decoding=Decoding(**about.decoding.get(active, _Decoding()).model_dump()),
    )


def _tokenizer(file: Path, about: _About) -> Tokenizer | None:
    try:
        return Tokenizer.loads(about.tokenizer) if about.tokenizer is not None else None
    except Exception as error:  # the tokenizers library raises errors of the class Exception
        raise _altered(file, f"the entry {TOKENIZER} cannot be read ({first_line(error)})") from error


def read_metadata(run: Path) -> tuple[Path, dict[str, str]]:
    """Return the path of model.safetensors of a run and its metadata. Raise UserError if the file cannot be used."""
    file = run / NAME if run.is_dir() else run
    if not file.is_file():
        if not run.exists():
            raise UserError(f"{run}: the folder does not exist. {PASS_A_RUN}")
        raise UserError(f"The folder {run} contains no {NAME}. Pass the folder of a run that has finished an epoch.")
    try:
        with safe_open(file, "pt") as opened:
            about = dict(opened.metadata() or {})
    except (SafetensorError, OSError) as error:
        raise UserError(f"The file {file} cannot be read ({error}).") from error
    if "architecture" not in about or "class_names" not in about:
        raise UserError(f"The file {file} was not written by a run: its metadata contain no architecture or classes.")
    return file, about


#: Keys of the metadata that `Trained.notes` does not contain.
_READ = ("format", "architecture", "library", "encoder", "model_kwargs", "class_names", "image_size", "mean", "std",
         "interpolation", "added", "decoding", TOKENIZER)  # fmt: skip


class _Added(BaseModel):
    method: str
    settings: dict[str, Any]


class _Decoding(BaseModel):
    value_range: tuple[float, float] | None = None
    max_pixels: Annotated[int, Field(ge=1)] = MAX_PIXELS

    @model_validator(mode="after")
    def _ordered(self) -> _Decoding:
        if self.value_range is not None and not self.value_range[0] < self.value_range[1]:
            raise ValueError("value_range must be [LOW, HIGH] with LOW < HIGH")
        return self


class _About(BaseModel):
    """The metadata that `save` writes and `load` reads."""

    model_config = ConfigDict(protected_namespaces=())

    architecture: str
    library: Literal["transformers"] | None = None
    encoder: str | None = None
    model_kwargs: Json[dict[str, Any]]
    class_names: Json[_Names | Annotated[dict[str, _Names], Field(min_length=1)]]
    image_size: Json[Annotated[list[Annotated[int, Field(ge=1, le=LARGEST_SIDE)]], Field(min_length=1, max_length=2)]]
    mean: Json[list[Annotated[float, Field(allow_inf_nan=False)]]]
    std: Json[list[Annotated[float, Field(gt=0, allow_inf_nan=False)]]]
    interpolation: Literal["nearest", "nearest-exact", "bilinear", "bicubic", "box", "hamming", "lanczos"]
    added: Json[list[_Added]] = []
    decoding: Json[dict[str, _Decoding]] = {}
    tokenizer: str | None = None
    task: str = "classification"
    class_ids: Json[list[Annotated[int, Field(ge=0, le=65535)]]] | None = None
    class_colors: Json[list[tuple[_Channel, _Channel, _Channel]]] | None = None
    columns: Json[Literal[1, 2]] | None = None
    thresholds: Json[list[float]] | None = None
    target_mean: Json[list[float]] | None = None
    target_std: Json[list[float]] | None = None

    @model_validator(mode="after")
    def _fits(self) -> _About:
        texts = self.tokenizer is not None
        if texts != (len(self.image_size) == 1):
            raise ValueError("image_size must contain one number if there is a tokenizer, and two numbers otherwise")
        if len(self.mean) != len(self.std) or len(self.mean) not in ((0,) if texts else (1, 3)):
            raise ValueError("mean and std must contain one number per channel")
        if self.class_colors is not None and len(self.class_colors) != len(self.class_names):
            raise ValueError("class_colors must contain one color per class")
        return self


def _checked(file: Path, metadata: dict[str, str]) -> _About:
    """Validate the metadata of `file`, and return them."""
    try:
        about = _About.model_validate(metadata)
        kind_named(about.task).check_notes(about.model_dump(), len(about.class_names))
        return about
    except SettingError as error:
        raise _altered(file, f"its {error}") from error
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or "metadata"
        raise _altered(file, f"its {where}: {first['msg'].removeprefix('Value error, ')}") from error
    except ValueError as error:
        raise _altered(file, f"its metadata: {error}") from error


def _altered(file: Path, why: str) -> UserError:
    return UserError(
        f"The file {file} cannot be used: {why.rstrip('.')}. The file was changed after the run wrote it. Restore the"
        " file, or train again."
    )


def _require_same_shapes(file: Path, model: nn.Module) -> None:
    """Raise UserError if tensors have different shapes in the file and in the model, e.g. for different classes."""
    own = model.state_dict()
    with safe_open(file, "pt") as opened:
        shapes = {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
    for name, shape in shapes.items():
        if name in own and tuple(own[name].shape) != shape:
            found, expected = ("×".join(map(str, of)) for of in (shape, own[name].shape))
            raise UserError(f"the tensor {name} has the shape {found}, but the metadata require the shape {expected}")


def _noted_method(file: Path, part: _Added) -> Method:
    """Build a method from the name and the settings in the metadata of `file`."""
    name, settings = part.method, part.settings
    do = "Train again with this version, or use the version that wrote the file."
    if name not in METHODS:
        raise OtherVersionError(file, f"the file contains the method {name}, which is unknown to this version", do)
    unknown = sorted(set(settings) - set(inspect.signature(METHODS[name]).parameters))
    if unknown:
        which = ", ".join(f"method.{name}.{setting}" for setting in unknown)
        raise OtherVersionError(file, f"the file contains {which}, which this version does not support", do)
    try:
        return METHODS[name](**settings)
    except UserError as error:
        raise OtherVersionError(file, f"this version does not support the settings of {name}: {error}", do) from error


def require_finite(logits: Tensor) -> None:
    """Raise UserError if a value of `logits` is not finite."""
    if not bool(logits.isfinite().all()):
        raise UserError(
            "The network's outputs are not finite. The weights, mean or std in model.safetensors cannot be used."
            " Train again."
        )
