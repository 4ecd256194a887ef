"""The model card of an exported run (README.md with YAML front matter, as the Hugging Face Hub reads it)."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from efficient_ft import __version__
from efficient_ft.config.identity import OWN_FOLDERS
from efficient_ft.core.errors import SettingError, UserError
from efficient_ft.core.format import format_bytes, format_metric, format_number, format_seconds
from efficient_ft.core.text import plain_line, spelled
from efficient_ft.data.counts import counted
from efficient_ft.record.results import read_results
from efficient_ft.training.kinds.base import Trained
from efficient_ft.training.publish.graph import Format

CARD = "README.md"
#: Maximum number of class names in the card.
_CLASSES = 20
#: Tasks of the Hugging Face Hub, by the noun for a sample.
_PIPELINES = {"image": "image-classification", "text": "text-classification"}


@dataclass(frozen=True)
class Check:
    """Comparison of an exported network with the network of the run.

    Attributes:
        samples: number of compared samples.
        noun: noun for one sample.
        classes: True if the predicted classes were compared.
        difference: largest absolute difference between corresponding logits.
        scale: largest absolute logit.
        source: the program that runs the exported network, and the source of the samples.
    """

    samples: int
    noun: str
    classes: bool
    difference: float
    scale: float
    source: str

    @property
    def sentence(self) -> str:
        """The result in one sentence."""
        top = f"the predicted classes agree for all {self.samples} {self.noun}s; " if self.classes else ""
        return f"{top}the logits differ by at most {self.difference:.2g} (largest logit {self.scale:.3g})."


def require_license(name: str) -> None:
    """Raise SettingError if `name` cannot be an identifier of a license."""
    if not re.fullmatch(r"[a-z0-9][a-z0-9.+-]*", name):
        raise SettingError("--license", name, "an identifier of the Hugging Face Hub, such as apache-2.0 or cc-by-4.0")


def model_card(
    run: Path,
    trained: Trained,
    metadata: Mapping[str, str],
    form: Format,
    check: Check,
    license: str,
    library: str,
    command: str,
) -> str:
    """Return the text of the card.

    `run` is the run folder. `library` is the library that can load the exported folder, or an empty string.
    """
    try:
        results: Mapping[str, Any] | None = read_results(run)
    except UserError:  # the run was not finished, or only model.safetensors is available
        results = None
    name = f"{metadata['architecture']} ({counted(len(trained.class_names), _output_noun(trained))})"
    accuracies = _accuracies(results, trained)
    parts = [
        _front_matter(results, check, license, library, form, accuracies, name),
        f"# {name}",
        _origin(metadata["efficient_ft"], command),
        _usage(trained, form, library),
        _preprocessing(trained),
        _classes(trained),
        _accuracy(accuracies),
        *([] if results is None else [_training(results), _costs(results), _data(results)]),
        f"## Check of the export\n\nCompared with PyTorch ({plain_line(check.source)}): {check.sentence}",
    ]
    return "\n\n".join(parts) + "\n"


def _origin(version: str, command: str) -> str:
    if version == __version__:
        return f"Trained and exported with efficient-ft {version} (`{command}`)."
    return f"Trained with efficient-ft {version}, and exported with efficient-ft {__version__} (`{command}`)."


def _front_matter(
    results: Mapping[str, Any] | None,
    check: Check,
    license: str,
    library: str,
    form: Format,
    accuracies: Sequence[tuple[str, str, float]],
    name: str,
) -> str:
    from huggingface_hub import EvalResult, ModelCardData

    pipeline = _PIPELINES.get(check.noun, "image-classification")
    data, kind = _data_name(results), "unknown" if results is None else str(results["config"]["data"]["name"])
    measured = [
        EvalResult(pipeline, kind, data, metric, value, dataset_split=split) for split, metric, value in accuracies
    ]
    tags = ["efficient-ft", pipeline, *(["onnx"] if form.file.endswith(".onnx") else [])]
    entries = ModelCardData(
        license=license,
        library_name=library or "efficient-ft",
        pipeline_tag=pipeline,
        tags=tags,
        model_name=name if measured else None,
        eval_results=measured or None,
    )
    return f"---\n{entries.to_yaml()}\n---"


def _data_name(results: Mapping[str, Any] | None) -> str:
    """Return the name of the data, without the path of a folder of this machine."""
    if results is None:
        return "unknown"
    data = results["config"]["data"]
    root = Path(data["root"]).name
    return f"folder {root}" if data["name"] in OWN_FOLDERS and root else str(data["name"])


def _accuracies(results: Mapping[str, Any] | None, trained: Trained) -> list[tuple[str, str, float]]:
    """Return (split, metric, value) for each split on which the exported weights were evaluated."""
    metric = trained.notes.get("metric", "accuracy")
    if results is None:
        value, split = trained.notes.get("accuracy"), trained.notes.get("split", "val")
        return [] if value is None else [(split, metric, float(value))]
    active = next((task for task, names in trained.tasks.items() if names == trained.class_names), "")
    data = results["data"].get("tasks", {}).get(active, results["data"])
    return [(split, results["accuracy"].get("metric", metric), value) for split, value in data["accuracy"].items()]


def _usage(trained: Trained, form: Format, library: str) -> str:
    onnx, texts = form.file.endswith(".onnx"), trained.input.tokenizer is not None
    if texts and onnx:
        lines = ["import onnxruntime", "", "session = onnxruntime.InferenceSession('DIR/model.onnx')"]
    elif texts:
        lines = ["import torch", "", "network = torch.export.load('DIR/model.pt2').module()"]
    else:
        lines = _image_code(trained, onnx=onnx)
    parts = ["## Usage", _python(*lines)]
    if not onnx:
        parts.append("Loading a PT2 file can run code. Load only files that you trust.")
    if library == "timm":
        parts.append(_python("import timm", "", "model = timm.create_model('local-dir:DIR', pretrained=True)"))
    elif library:
        name = "AutoModelForImageClassification"
        parts.append(_python(f"from transformers import {name}", "", f"model = {name}.from_pretrained('DIR')"))
    extra = " with the extra `export`" if onnx else ""
    parts.append(f"If efficient-ft is installed{extra}, `efficient-ft predict DIR FILE...` prints predictions.")
    return "\n\n".join(parts)


def _python(*lines: str) -> str:
    return "\n".join(["```python", *lines, "```"])


def _image_code(trained: Trained, *, onnx: bool) -> list[str]:
    """Return a program that reads an image, computes the outputs of the exported network, and prints a prediction."""
    spec, (height, width) = trained.input, trained.input.image_size
    color = len(spec.mean) == 3
    lines = ["import json", "", "import numpy as np", "import onnxruntime" if onnx else "import torch"]
    lines += [
        "from PIL import Image, ImageOps",
        "",
        "image = ImageOps.exif_transpose(Image.open('IMAGE')).convert('RGBA')",
        "white = Image.new('RGBA', image.size, 'white')",
        f"image = Image.alpha_composite(white, image).convert('RGB'){'' if color else '.convert(' + repr('L') + ')'}",
        f"image = image.resize(({width}, {height}), Image.Resampling.{spec.interpolation.upper()})",
        f"values = np.asarray(image, np.float32).reshape({height}, {width}, {len(spec.mean)}) / 255",
        f"values = (values - np.float32({list(spec.mean)})) / np.float32({list(spec.std)})",
        "pixel_values = values.transpose(2, 0, 1)[None]",
    ]
    if onnx:
        lines.append("session = onnxruntime.InferenceSession('DIR/model.onnx')")
        lines.append("logits = session.run(['logits'], {'pixel_values': pixel_values})[0][0]")
    else:
        lines.append("network = torch.export.load('DIR/model.pt2').module()")
        lines.append("logits = network(torch.from_numpy(pixel_values))[0].detach().numpy()")
    lines.append("names = json.load(open('DIR/classes.json', encoding='utf-8'))")
    if "target_mean" in trained.notes:
        mean, std = trained.notes["target_mean"], trained.notes["target_std"]
        lines.append(f"targets = logits * np.float64({std}) + np.float64({mean})")
        return [*lines, "print(dict(zip(names, targets.tolist())))"]
    if "thresholds" in trained.notes:
        lines.append(f"found = 1 / (1 + np.exp(-logits)) >= {trained.notes['thresholds']}")
        return [*lines, "print([name for name, is_found in zip(names, found) if is_found])"]
    return [*lines, "print(names[logits.argmax()])"]


def _preprocessing(trained: Trained) -> str:
    spec = trained.input
    if spec.tokenizer is not None:
        inputs = ", ".join(f"`{name}`" for name in spec.tokenizer.inputs)
        return (
            f"## Preprocessing\n\n`tokenizer.json` converts texts to token ids. Texts are truncated to {spec.size[0]}"
            f" tokens. Inputs: {inputs} (int64, batch × tokens). Output: `logits`."
        )
    height, width = spec.image_size
    color = "RGB" if len(spec.mean) == 3 else "gray"
    return (
        f"## Preprocessing\n\nRotate the image according to its EXIF orientation, place transparent images on a white"
        f" background, and convert images with 16 bits per value to 8 bits. Resize the whole {color} image to"
        f" {height}×{width} pixels (height × width, {spec.interpolation}), without cropping and without keeping the"
        f" aspect ratio. Scale the values to [0, 1], subtract the mean {list(spec.mean)}, and divide by the standard"
        f" deviation {list(spec.std)}. Input:"
        f" `pixel_values` (float32, batch × {len(spec.mean)} × {height} × {width}). Output: `logits`. The file"
        " preprocessor_config.json contains the same values."
    )


def _classes(trained: Trained) -> str:
    names = [plain_line(name) for name in trained.class_names]
    shown = ", ".join(names[:_CLASSES]) + ("" if len(names) <= _CLASSES else f", … ({len(names) - _CLASSES} more)")
    noun = _output_noun(trained)
    heading = {"class": "Classes"}.get(noun, f"{noun.capitalize()}s")
    order = f"`classes.json` lists the {heading.lower()} in the order of the outputs."
    return f"## {heading}\n\n{shown}\n\n{order}{_outputs(trained)}"


def _output_noun(trained: Trained) -> str:
    """Return the noun for an output of the network."""
    return "target" if "target_mean" in trained.notes else "label" if "thresholds" in trained.notes else "class"


def _outputs(trained: Trained) -> str:
    """Return how to convert outputs that are not classes, or an empty string."""
    notes = trained.notes
    if "target_mean" in notes:
        mean, std = notes["target_mean"], notes["target_std"]
        return f" A target is output · std + mean, with the mean {mean} and the std {std}."
    if "thresholds" in notes:
        return f" A label is predicted if the sigmoid of its output is at least its threshold: {notes['thresholds']}."
    return ""


def _table(rows: Sequence[tuple[str, str]], header: tuple[str, str]) -> str:
    return "\n".join(f"| {left} | {right} |" for left, right in [header, ("---", "---"), *rows])


def _accuracy(accuracies: Sequence[tuple[str, str, float]]) -> str:
    if not accuracies:
        return "## Results\n\nThe run recorded no result."
    metric = spelled(accuracies[0][1])
    rows = [(split, format_metric(value, name)) for split, name, value in accuracies]
    return f"## Results\n\n{_table(rows, ('split', metric))}"


def _training(results: Mapping[str, Any]) -> str:
    methods = [f"- {name}: {of.get('summary', '')}".rstrip(": ") for name, of in results["methods"].items()]
    arguments = " ".join(map(shlex.quote, map(_without_folders, results["arguments"])))
    command = (
        f"```bash\nefficient-ft {arguments}\n```\n\nAbsolute paths are shortened."
        if arguments
        else "The run was started from Python."
    )
    return "\n\n".join(["## Training", command, "\n".join(map(plain_line, methods))])


def _without_folders(text: str) -> str:
    """Shorten absolute paths to their last part, because a published card must not describe the user's machine."""
    return re.sub(r"(?<![\w.…/])(?:~|[A-Za-z]:)?[/\\](?:[^\s,\]/\\]+[/\\])*([^\s,\]/\\]+)", r"…/\1", text)


def _costs(results: Mapping[str, Any]) -> str:
    step, totals = results["cost"]["executed"], results["totals"]
    rows = [
        ("trained parameters", f"{results['trainable_parameters']:,} of {results['total_parameters']:,}"),
        ("forward pass, per image", format_number(step["forward_flops"], "FLOPs")),
        ("backward pass, per image", format_number(step["backward_flops"], "FLOPs")),
        ("tensors saved for the backward pass, per image", format_bytes(step["saved_bytes"])),
        ("whole training", format_number(totals["flops"], "FLOPs")),
        ("time of training", format_seconds(totals["seconds"])),
    ]
    memory = results.get("memory") or {}
    if memory.get("step_peak_bytes"):
        rows.append(("peak memory of the process in training steps", format_bytes(memory["step_peak_bytes"])))
    size = results["config"]["data"]["batch_size"]
    device = results["environment"].get("device")
    where = f" Device: {plain_line(str(device))}." if isinstance(device, str) else ""
    return f"## Costs of training\n\nThe batch size is {size}.{where}\n\n{_table(rows, ('cost', 'value'))}"


def _data(results: Mapping[str, Any]) -> str:
    data = results["data"]
    each = data.get("tasks") or {"": data}
    rows = []
    for task, one in each.items():
        before = f"{task} " if task else ""
        for split, count in one.get("splits", {}).items():
            per_class = _per_class(data.get("summary", {}).get(task, {}), split)
            rows.append((f"{before}{split}", f"{count:,}{per_class}"))
        rows.append((f"{before}skipped", f"{one['skipped']:,}"))
        sizes = data.get("summary", {}).get(task, {}).get("sizes")
        if sizes:
            smallest, median, largest = (" × ".join(map(str, sizes[key])) for key in ("min", "median", "max"))
            rows.append((f"{before}width × height in pixels", f"{smallest} to {largest} (median {median})"))
        if one.get("digest"):
            rows.append((f"{before}digest of the training and selection data", f"`{one['digest']}`"))
    return f"## Data\n\n{plain_line(_data_name(results))}\n\n{_table(rows, ('split', 'samples'))}"


def _per_class(summary: Mapping[str, Any], split: str) -> str:
    """Return the smallest and the largest number of samples of a class, or an empty string if they are not known."""
    counts = summary.get("splits", {}).get(split, {}).get("per_class")
    if not counts:
        return ""
    low, high = min(counts), max(counts)
    return f" ({low:,} per class)" if low == high else f" ({low:,} to {high:,} per class)"
