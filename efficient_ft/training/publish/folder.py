"""Export a run to a folder that can be published, check the export, and load exported networks.

The folder has a temporary name until the exported network has been compared with the network of the run.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from efficient_ft.config import ModelConfig, data_configs
from efficient_ft.config.kinds import OWN_CLASSIFIERS
from efficient_ft.core.errors import SettingError, UserError
from efficient_ft.core.files import refuse_link, set_default_permissions
from efficient_ft.core.format import format_bytes, format_seconds
from efficient_ft.data.inspection import spread
from efficient_ft.models import timm_config
from efficient_ft.models.image_processor import NAMES, processor_entries
from efficient_ft.record import config_file
from efficient_ft.record.files import json_text
from efficient_ft.task import Inputs, Task
from efficient_ft.task.base import tensors_of
from efficient_ft.training.kinds.base import Kind, Trained
from efficient_ft.training.kinds.registry import kind_named, kind_of
from efficient_ft.training.output import export
from efficient_ft.training.publish.card import CARD, Check, model_card, require_license
from efficient_ft.training.publish.graph import FORMATS, Format, input_names

#: File with the class names, in the order of the outputs.
CLASSES = "classes.json"
#: File with the tokenizer of a text network, in the format of the tokenizers library.
TOKENIZER = "tokenizer.json"
#: Configuration file of timm and transformers.
_CONFIG = "config.json"
#: Seed of the random inputs of a check, and the number of random samples.
_SEED, _RANDOM = 0, 16
#: Maximum difference of outputs that are not classes, relative to the largest output.
_TOLERANCE = 1e-3


@dataclass(frozen=True)
class ExportOptions:
    """Options of ``efficient-ft export``.

    Attributes:
        run: the run folder, or its model.safetensors.
        to: name of the file format, a key of `FORMATS`.
        out: folder to create, or None for ``export_FORMAT`` in the run folder.
        check: files and folders with samples for the check, or empty for evaluation samples of the run.
        samples: number of samples for the check.
        batch: fixed batch size of the exported network, or None for any batch size.
        batch_size: batch size of the check.
        license: identifier of the license for the model card.
        task: data set whose classes are exported, for runs on several data sets.
    """

    run: Path
    to: str
    out: Path | None = None
    check: Sequence[Path] = ()
    samples: int = 64
    batch: int | None = None
    batch_size: int = 32
    license: str = "unknown"
    task: str | None = None


def export_run(options: ExportOptions) -> tuple[Path, list[str]]:
    """Export a run to a new folder, and return the folder and lines that describe the export and its check.

    Raises:
        SettingError: If the file format or the license is invalid.
        UserError: If the run cannot be loaded or exported, if a package is missing, if the folder exists, or if the
            predictions of the exported network differ from those of the run. If an error is raised, the folder is not
            created.
    """
    if options.to not in FORMATS:
        raise SettingError("--to", options.to, FORMATS)
    require_license(options.license)
    form, place = FORMATS[options.to], options.run if options.run.is_dir() else options.run.parent
    out = options.out or place / f"export_{options.to}"
    refuse_link(out)
    if out.exists():
        raise UserError(f"The folder {out} already exists. Remove the folder, or choose another folder with --out DIR.")
    form.require_packages()
    trained = export.load(options.run, options.task)
    if trained.tasks and options.task is None:
        raise UserError(
            f"The run {options.run} was trained on several data sets. Pass --task {' or '.join(trained.tasks)}."
        )
    kind = kind_named(trained.task)
    if not kind.supports("export"):
        raise UserError(
            f"efficient-ft export does not support task={trained.task}. {kind.rules.unsupported['export'] or ''} Use"
            " model.safetensors of the run with efficient-ft predict, or in PyTorch.".replace("  ", " ")
        )
    batches, source = _check_inputs(options, kind, trained, place)
    with _new_folder(out) as folder:
        lines = _write(options, form, kind.task, trained, batches, source, folder)
    return out, lines


def _write(
    options: ExportOptions,
    form: Format,
    task: Task,
    trained: Trained,
    batches: Sequence[Inputs],
    source: str,
    folder: Path,
) -> list[str]:
    """Write all files of an export into the empty `folder`, check the export, and return lines for the user."""
    example = _example(batches[0], options.batch)
    texts = trained.input.tokenizer is not None
    file, stored = export.read_metadata(options.run)
    metadata = _metadata(stored, trained, input_names(example), options.batch)
    start = time.perf_counter()
    form.write(task, trained.model, example, trained.input.size[0] if texts else None, options.batch, metadata, folder)
    seconds = time.perf_counter() - start
    exported, _ = form.open(folder / form.file)
    check = compared(task, trained.model, exported, batches, f"{form.words}, {source}")
    size = sum(file.stat().st_size for file in folder.iterdir())
    place = options.run if options.run.is_dir() else options.run.parent
    shutil.copyfile(file, folder / export.NAME)
    library = _write_companions(place, trained, metadata, folder)
    (folder / CLASSES).write_text(json_text(trained.class_names, indent=1) + "\n", encoding="utf-8")
    card = model_card(place, trained, metadata, form, check, options.license, library, _command(options))
    (folder / CARD).write_text(card, encoding="utf-8")
    batch = "any batch size" if options.batch is None else f"batch size {options.batch}"
    lines = [
        f"{form.file}: {format_bytes(size)}, {batch}, exported in {format_seconds(seconds)}",
        f"check ({check.source}): {check.sentence}",
    ]
    if options.license == "unknown":
        lines.append(f"license: unknown. Set the license in {CARD} before you publish the folder, or pass --license.")
    return lines


def _command(options: ExportOptions) -> str:
    batch = "" if options.batch is None else f" --batch {options.batch}"
    return f"efficient-ft export {options.run.name} --to {options.to}{batch}"


def _metadata(stored: Mapping[str, str], trained: Trained, inputs: list[str], batch: int | None) -> dict[str, str]:
    """Return the metadata of an exported file: those of model.safetensors, the preprocessing and the inputs."""
    decoding = {} if trained.decoding == type(trained.decoding)() else {"": asdict(trained.decoding)}
    changed: dict[str, Any] = {"class_names": trained.class_names, "inputs": inputs, "batch": batch}
    changed |= {"decoding": decoding} if decoding else {}
    changed |= {} if trained.input.tokenizer else {"preprocessing": _preprocessing(trained)}
    kept = {key: text for key, text in stored.items() if key not in ("format", "decoding")}
    return {**kept, **{key: json.dumps(value) for key, value in changed.items()}}


def _preprocessing(trained: Trained) -> dict[str, Any]:
    """Return the entries of preprocessor_config.json. The whole image is resized, without cropping."""
    return {**processor_entries(trained.input), "do_center_crop": False, "do_convert_rgb": len(trained.input.mean) == 3}


def _write_companions(place: Path, trained: Trained, metadata: Mapping[str, str], folder: Path) -> str:
    """Write the files that other libraries need, and return the library that loads the folder, or an empty string."""
    if trained.input.tokenizer is not None:
        text = json.loads(trained.input.tokenizer.dumps())["tokenizer"]
        (folder / TOKENIZER).write_text(text, encoding="utf-8")
        return ""
    (folder / NAMES[0]).write_text(json_text(_preprocessing(trained), indent=2) + "\n", encoding="utf-8")
    if json.loads(metadata["added"]) or trained.tasks:
        return ""  # the weights alone do not define the network
    if "library" in metadata:
        if not (place / _CONFIG).is_file():
            return ""
        shutil.copyfile(place / _CONFIG, folder / _CONFIG)
        return metadata["library"]
    name = metadata["architecture"].partition(".")[0]
    if name in OWN_CLASSIFIERS or not type(trained.model).__module__.startswith("timm."):
        return ""
    (folder / _CONFIG).write_text(json_text(_timm_entries(trained, metadata), indent=2) + "\n", encoding="utf-8")
    return "timm"


def _timm_entries(trained: Trained, metadata: Mapping[str, str]) -> dict[str, Any]:
    """Return the entries of config.json with which `timm` loads the weights and the preprocessing."""
    kwargs, size = json.loads(metadata["model_kwargs"]), trained.input.image_size
    config = ModelConfig(name=metadata["architecture"], pretrained=False, image_size=size, kwargs=kwargs)
    cfg = timm_config.pretrained_cfg(config)
    classes = len(trained.class_names)
    arguments = timm_config.timm_kwargs(config, cfg, classes)
    del arguments["num_classes"]
    name, _, tag = config.name.partition(".")
    input_size = [len(trained.input.mean), *size]
    return {
        "architecture": name,
        "num_classes": classes,
        "num_features": int(getattr(trained.model, "num_features", 0)),
        "label_names": trained.class_names,
        **({"model_args": arguments} if arguments else {}),
        "pretrained_cfg": {
            **({"tag": tag} if tag else {}),
            "custom_load": False,
            "num_classes": classes,
            "input_size": input_size,
            "fixed_input_size": cfg.fixed_input_size,
            "interpolation": trained.input.interpolation,
            "crop_pct": 1.0,
            "crop_mode": "squash",
            "mean": list(trained.input.mean),
            "std": list(trained.input.std),
            "first_conv": cfg.first_conv,
            "classifier": cfg.classifier,
        },
    }


# ------------------------------------------------------------------------------------------------ the check
@torch.inference_mode()
def compared(task: Task, model: nn.Module, exported: nn.Module, batches: Sequence[Inputs], source: str) -> Check:
    """Compare an exported network with the network of the run, on all batches and on the first sample alone.

    Raises:
        UserError: If the classes with the highest logits differ for a sample, or if an output is not finite. Outputs
            that are not classes may differ by at most 0.1 % of the largest output.
    """
    samples, wrong = 0, {"alone": 0, "in batches": 0}
    largest = scale = 0.0
    for number, inputs in enumerate([_each(batches[0], lambda x: x[:1]), *batches]):
        expected, found = task.logits(model, inputs).float(), task.logits(exported, inputs).float()
        export.require_finite(expected)
        largest = max(largest, float((found - expected).abs().max()))
        scale = max(scale, float(expected.abs().max()))
        wanted, got = task.predicted(expected), task.predicted(found)
        if wanted is not None and got is not None:
            wrong["in batches" if number else "alone"] += int((wanted != got).sum())
        samples += len(expected) if number else 0
    classes = task.predicted(expected) is not None
    different = max(wrong.values())
    if different or not (classes or largest <= _TOLERANCE * max(scale, 1e-6)):
        where = f" for {different} of {samples} {task.sample}s" if different else ""
        raise UserError(
            f"The exported network and the run give different predictions{where} (largest logit difference"
            f" {largest:.2g}, largest logit {scale:.3g}; {source}). Nothing was written. Please report this network and"
            " its methods, and use model.safetensors of the run."
        )
    return Check(samples, task.sample, classes, largest, scale, source)


def _each(inputs: Inputs, change: Callable[[Tensor], Tensor]) -> Inputs:
    return {k: change(x) for k, x in inputs.items()} if isinstance(inputs, Mapping) else change(inputs)


def _example(inputs: Inputs, batch: int | None) -> Inputs:
    """Return a batch of `batch` samples (default 2) with the shapes of `inputs`, but with constant values.

    The values are constant, because exporters may store the example in the file, which must not contain user data.
    """
    return _each(inputs, lambda x: torch.ones(batch or 2, *x.shape[1:], dtype=x.dtype))


def _check_inputs(options: ExportOptions, kind: Kind, trained: Trained, place: Path) -> tuple[list[Inputs], str]:
    """Return batches for the check, and a description of their source."""
    count, size = options.samples, options.batch_size
    if options.check:
        found = list(kind.file_batches(trained, options.check, count, size))
        total = sum(len(tensors_of(one)[0]) for one in found)
        return found, f"{total} {kind.task.sample}s of --check"
    try:
        return _evaluation_inputs(options, trained, place)
    except UserError as error:
        reason = str(error).splitlines()[0]
        source = f"{_RANDOM} random inputs, because the data of the run cannot be read: {reason}"
        return [_random_inputs(kind.task, trained)], source


def _evaluation_inputs(options: ExportOptions, trained: Trained, place: Path) -> tuple[list[Inputs], str]:
    """Return evenly spaced samples of the test split of the run, or of the split that selects the best epoch."""
    if not (place / config_file.NAME).is_file():
        raise UserError(f"{place} contains no {config_file.NAME}.")
    config = config_file.read_config(place)
    kind = kind_of(config)
    changes = {"keep_decoded": "off", "num_workers": 0, "download": False}
    data = config.data.model_copy(update=changes)
    tasks = {name: one.model_copy(update=changes) for name, one in config.tasks.items()}
    config = config.model_copy(update={"data": data, "tasks": tasks})
    for one in data_configs(config):
        if not Path(one.root).expanduser().exists() and kind.missing(config):
            raise UserError(f"{one.root} does not exist.")
    part: Any = kind.open(config, trained.input).parts[options.task or ""]
    split = "test" if "test" in part.splits else part.best_split
    dataset = part.eval_loader(split).dataset
    chosen, size = spread(len(dataset), options.samples).tolist(), options.batch_size
    steps = range(0, len(chosen), size)
    found = [dataset.__getitems__([(0, k) for k in chosen[start : start + size]])[0] for start in steps]
    return found, f"{len(chosen)} {split} {kind.task.sample}s of the run"


def _random_inputs(task: Task, trained: Trained) -> Inputs:
    generator = torch.Generator().manual_seed(_SEED)
    inputs = task.example_inputs(_RANDOM, len(trained.input.mean), trained.input.size, generator)
    tokenizer = trained.input.tokenizer
    if tokenizer is None or not isinstance(inputs, Mapping):
        return inputs
    ids = torch.randint(tokenizer.size, inputs["input_ids"].shape, generator=generator)
    others = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "token_type_ids": torch.zeros_like(ids)}
    return {name: others[name] for name in tokenizer.inputs}


# ------------------------------------------------------------------------------------------------ folders
@contextmanager
def _new_folder(out: Path) -> Iterator[Path]:
    """Yield a temporary folder, and rename it to `out` at the end. After an error, the folder is removed."""
    parent = out.absolute().parent
    while not parent.is_dir():
        parent = parent.parent
    temporary = Path(tempfile.mkdtemp(prefix=".efficient_ft.", suffix=".tmp", dir=parent))
    try:
        yield temporary
        set_default_permissions(temporary, 0o777)
        out.parent.mkdir(parents=True, exist_ok=True)
        os.rename(temporary, out)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def load(run: Path, task: str | None = None, note: Callable[[str], object] = lambda _: None) -> Trained:
    """Load the network of a run, of an ONNX file, or of a folder that `export_run` wrote.

    An ONNX network runs with onnxruntime on the CPU. From the folder of an export, model.onnx is loaded if it exists,
    and model.safetensors otherwise. Files with the suffix ``.pt2`` are rejected, because loading them can run code.

    Args:
        run: the run folder, its model.safetensors, an ONNX file, or the folder of an export.
        task: data set whose classes are predicted, for runs on several data sets.
        note: function that is called with a sentence if the network runs with onnxruntime.

    Raises:
        UserError: If the file does not exist, is damaged, or was not written by a run or an export.
    """
    onnx = FORMATS["onnx"]
    file = run / onnx.file if run.is_dir() and (run / onnx.file).is_file() else run
    if file.suffix == ".pt2":
        raise UserError(
            f"{file}: efficient-ft predict does not load PT2 files, because loading such a file can run code. Pass the"
            " folder of the export, or its model.safetensors."
        )
    if file.suffix != ".onnx":
        return export.load(run, task)
    if not file.is_file():
        raise UserError(f"{file}: the file does not exist. Pass an exported folder or its ONNX file.")
    network, metadata = onnx.open(file)
    if "architecture" not in metadata or "class_names" not in metadata:
        raise UserError(
            f"The file {file} was not written by efficient-ft export: its metadata contain no architecture or classes."
            " Export a run with efficient-ft export RUN --to onnx."
        )
    if task is not None:
        raise UserError(f"--task {task}: the file {file} contains the classes of a single data set. Remove --task.")
    note(f"{file.name} runs with {onnx.words} on the CPU.")
    return export.described(file, metadata, network)
