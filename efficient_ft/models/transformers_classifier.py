"""Image classifiers from `transformers`, created by model type, from a Hub repository, or from a local folder.

A local folder contains the files that ``save_pretrained`` in `transformers` writes: ``config.json``,
``model.safetensors`` and ``preprocessor_config.json``. The last file is optional.
"""

from __future__ import annotations

import difflib
import json
import logging
import os
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from torch import Tensor, nn
from torch.nn import functional as F

from efficient_ft.config.schema import ModelConfig
from efficient_ft.core.errors import SettingError, UserError, first_line
from efficient_ft.core.input_spec import InputSpec
from efficient_ft.models.checkpoint import read_metadata
from efficient_ft.models.image_processor import NAMES, Processor, processor_entries, read_processor
from efficient_ft.models.image_size import FAILURES, nondividing_patch_size, size_setting, unused_pixels_error
from efficient_ft.models.loading_report import LoadingReport, set_loading_report
from efficient_ft.models.transformers_files import CONFIG, NetworkFiles, config_json
from efficient_ft.models.weights import recorded_size

__all__ = ["build", "companions", "input_of", "load", "missing", "portable"]

log = logging.getLogger(__name__)

#: Default image size if neither an image processor nor the network declares a size.
_DEFAULT_SIZE = (224, 224)
_FILES = NetworkFiles(
    auto="AutoModelForImageClassification",
    noun="an image classifier",
    extra="transformers",
    contents="config.json and model.safetensors",
    files=(),
    optional=NAMES,
    example="vit",
    dropout="hidden_dropout_prob for ViT",
    set_elsewhere={"problem_type": "Each image has one class.", "image_size": "Set model.image_size instead."},
    published={},
    is_complete=lambda path: True,
)
missing, portable = _FILES.missing, _FILES.portable


def input_of(config: ModelConfig) -> InputSpec:
    """Return the size, normalization and interpolation of the network's input images. See `factory.input_of`.

    The values come from the image processor in the folder or repository. Without an image processor, the size is that
    of the network, and the normalization is that of ImageNet. These assumptions are logged if the network has
    pretrained weights.
    """
    return _input(config, _architecture(config, 2))


def _input(config: ModelConfig, about: Any) -> InputSpec:
    channels = int(getattr(_sized(about), "num_channels", 3))
    file = _FILES.optional_file(config, NAMES)
    processor = _of_run(config) if file is None else read_processor(file, _FILES.library(config), channels)
    own, given = _own_size(about), config.image_size
    size = (given, given) if isinstance(given, int) else given
    assumed = []
    if size is None and processor is not None:
        size = processor.size
    if size is None:
        size = own or _DEFAULT_SIZE
        source = "config.image_size" if own else "the default"
        assumed += [f"images of {size[0]}×{size[1]} pixels ({source}; to change it, set model.image_size)"]
    if processor is None:
        processor = Processor(None, IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD, "bicubic")
        if config.mean is None:
            assumed += ["the mean and standard deviation of ImageNet (to change them, set model.mean and model.std)"]
        if assumed and (config.weights is not None or config.pretrained):
            _log(f"{config.weights or config.name} has no {NAMES[0]}. Assumed: {' and '.join(assumed)}.")
    if processor.crops:
        _log(
            f"{NAMES[0]} crops the center of each image. This run resizes images to {size[0]}×{size[1]} pixels without"
            " cropping."
        )
    mean, std = config.mean or processor.mean, config.std or processor.std
    for name, values in (("mean", mean), ("std", std)):
        if len(values) != channels:
            allowed = f"a list of {channels} values, one per channel (num_channels={channels})"
            raise SettingError(f"model.{name}", list(values), allowed)
    return InputSpec((int(size[0]), int(size[1])), mean, std, processor.interpolation)


def _of_run(config: ModelConfig) -> Processor | None:
    """Return the image size and normalization that a run has stored in the weights file, or None if there are none."""
    path = None if config.weights is None else Path(config.weights).expanduser()
    size = None if path is None or not os.path.isfile(path) else recorded_size(path)
    if path is None or size is None:
        return None
    about = read_metadata(path)
    try:
        mean, std = (tuple(float(one) for one in json.loads(about[name])) for name in ("mean", "std"))
    except (ValueError, LookupError, TypeError):
        return None
    return Processor(size, mean, std, about.get("interpolation", "bicubic"))


@cache
def _log(line: str) -> None:
    """Log a line once per process."""
    log.info("%s", line)


def _architecture(config: ModelConfig, classes: int) -> Any:
    """Return the network's `transformers` configuration. Raise a SettingError if the type has no image classifier."""
    about = _FILES.architecture(config, classes)
    known = _FILES.library(config).models.auto.modeling_auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES
    kind = about.model_type
    if kind in known and kind not in _OTHER_INPUTS:
        return about
    types = sorted(one for one in known if one not in _OTHER_INPUTS)
    near = difflib.get_close_matches(kind, types, n=3, cutoff=0.5)
    hint = (
        f"Similar types with an image classifier: {', '.join(near)}."
        if near
        else f"Examples of supported types: {', '.join(_EXAMPLES)}."
    )
    hint += " timm may also contain the network (model=timm)."
    if config.weights is None and kind == config.name:
        allowed = "a model type of transformers with an image classifier (AutoModelForImageClassification)"
        raise SettingError("model.name", kind, allowed, hint)
    allowed = "a network that AutoModelForImageClassification supports"
    setting, source = ("model.name", config.name) if config.weights is None else ("model.weights", config.weights)
    raise SettingError(setting, source, allowed, f"Its model type is {kind}. {hint}")


#: Model types for messages.
_EXAMPLES = ("convnextv2", "deit", "dinov2", "swin", "vit")
#: Model types that take inputs other than images: color clusters, patches with masks, and images with texts.
_OTHER_INPUTS = ("imagegpt", "siglip2", "shieldgemma2")


def _sized(about: Any) -> Any:
    """Return the configuration that contains `image_size`: `about`, or its vision part for networks such as CLIP."""
    inner = getattr(about, "vision_config", None)
    return inner if inner is not None and not hasattr(about, "image_size") else about


def _own_size(about: Any) -> tuple[int, int] | None:
    """Return the image size (H, W) in a configuration, or None if the configuration has no image size."""
    size = getattr(_sized(about), "image_size", None)
    if isinstance(size, list | tuple) and len(size) == 2:
        return int(size[0]), int(size[1])
    return (size, size) if isinstance(size, int) else None


def _with_size(config: ModelConfig, about: Any, size: tuple[int, int]) -> Any:
    """Set the image size (H, W) in the configuration `about` in place, and return `about`."""
    own = _own_size(about)
    if own is not None and own != size:
        try:
            _sized(about).image_size = size[0] if size[0] == size[1] else size
        except Exception as error:  # configurations validate their values in several ways
            raise _refused_size(config, size, own, first_line(error)) from error
    return about


def build(config: ModelConfig, classes: int) -> nn.Module:
    """Build an image classifier with random weights. See `factory.random_model`."""
    about = _architecture(config, classes)
    own, spec = _own_size(about), _input(config, about)
    size = spec.image_size
    try:
        model = _FILES.random(config, _with_size(config, about, size))
    except UserError as error:
        if own in (None, size):
            raise
        _FILES.random(config, _with_size(config, about, own))  # fails if the image size is not the reason
        raise _refused_size(config, size, own, first_line(error.__cause__ or error)) from error
    try:
        patch = nondividing_patch_size(model, size, len(spec.mean))
    except FAILURES as error:
        raise _refused_size(config, size, own, first_line(error)) from error
    if patch is not None:
        refused = unused_pixels_error(config.name, size, patch)
        if config.image_size is None and size != own:
            raise UserError(f"{refused} The file {NAMES[0]} specifies {size[0]}×{size[1]} pixels.")
        raise refused
    return _prepared(model, spec)


def _refused_size(config: ModelConfig, size: tuple[int, int], own: tuple[int, int] | None, why: str) -> SettingError:
    """Return the error for an image size (H, W) that a network cannot process."""
    do = f"transformers: {why.rstrip('.')}."
    if own not in (None, size):
        do = f"The size of the network is {own[0]}×{own[1]}. Use model.image_size={size_setting(own)}. {do}"
    return SettingError("model.image_size", size_setting(size), f"a size that {config.name} can process", do)


def _prepared(model: nn.Module, spec: InputSpec) -> nn.Module:
    """Store the network's class in its configuration, and the input size in `pretrained_cfg` for the model view."""
    about: Any = model.config
    about.architectures = [type(model).__name__]
    input_size = (len(spec.mean), *spec.image_size)
    model.pretrained_cfg = {"architecture": about.model_type, "input_size": input_size}  # type: ignore[assignment]
    return model


def load(config: ModelConfig, classes: int, random: nn.Module) -> nn.Module:
    """Build an image classifier with the weights of a repository, a folder or a file. See `factory.create_model`.

    If the image size differs from that of the weights, the position embeddings are resized as with
    ``interpolate_pos_encoding=True`` in `transformers`.
    """
    about = _architecture(config, classes)
    spec, names = _input(config, about), list((about.id2label or {}).values())
    source = _FILES.local(config)
    recorded = recorded_size(source) if source.is_file() else None
    own = recorded or _own_size(about)
    if own is not None:
        _with_size(config, about, own)
    model, report = _FILES.load(config, about)
    if not report.new_heads:
        shown = ", ".join(map(str, names[:3])) + ", …" * (len(names) > 3)
        known = f": {shown}" if _FILES.folder_of(config) is not None else ""
        report = replace(report, kept=f"the classifier of the weights ({classes} classes{known})")
    if own is not None and own != spec.image_size:
        model, report = _resized(config, model, random, own, spec.image_size, report)
    return set_loading_report(_prepared(model, spec), report)


def _resized(
    config: ModelConfig,
    model: nn.Module,
    random: nn.Module,
    own: tuple[int, int],
    size: tuple[int, int],
    report: LoadingReport,
) -> tuple[nn.Module, LoadingReport]:
    """Load the weights of `model`, built for images of the size `own`, into `random`, built for `size`.

    Return the network and the report, which describes the resized tensors.
    """
    weights, notes, tables = model.state_dict(), [], 0
    for name, target in random.state_dict().items():
        if weights[name].shape == target.shape:
            continue
        resized = _resized_tensor(model, name, weights[name], target.shape, own, size)
        if resized is None:
            source = config.weights or config.name
            do = f"The weights in {source} are for images of {own[0]}×{own[1]} pixels, and {name} cannot be resized."
            if config.image_size is None:
                do += f" The file {NAMES[0]} specifies {size[0]}×{size[1]} pixels."
            do += f" Use model.image_size={size_setting(own)}."
            raise SettingError("model.image_size", size_setting(size), f"the image size of {config.name}", do)
        tables += name.endswith(_TABLE)
        if not name.endswith(_TABLE):
            was, now = (shape[-2] for shape in (weights[name].shape, target.shape))
            sizes = f"{own[0]}×{own[1]} to {size[0]}×{size[1]} pixels (model.image_size)"
            notes.append(f"position embeddings were resized from {was} to {now} positions, for images of {sizes}")
        weights[name] = resized
    random.load_state_dict(weights)
    notes += [f"{tables} relative position bias tables were resized"] if tables else []
    return random, replace(report, notes=(*report.notes, *notes))


#: End of the names of tables with one row per relative position.
_TABLE = "relative_position_bias_table"


def _resized_tensor(
    model: nn.Module, name: str, value: Tensor, shape: torch.Size, own: tuple[int, int], size: tuple[int, int]
) -> Tensor | None:
    """Resize positions of a network from the image size `own` to `size`, or return None if they cannot be resized.

    Position embeddings are resized by the network's method `interpolate_pos_encoding`.
    """
    if name.endswith(_TABLE):
        return _resized_table(model, value, shape, own, size)
    parts = name.split(".")
    for depth in (1, 2):  # a parameter, or the weight of an nn.Embedding
        holder = model.get_submodule(".".join(parts[:-depth]))
        resize: Any = getattr(holder, "interpolate_pos_encoding", None)
        if resize is None:
            continue
        try:
            with torch.no_grad():
                found: Tensor = resize(torch.empty(1, *shape[-2:]), *size)
        except FAILURES:
            return None
        return found.reshape(shape) if found.numel() == shape.numel() else None
    return None


def _resized_table(
    model: nn.Module, table: Tensor, shape: torch.Size, own: tuple[int, int], size: tuple[int, int]
) -> Tensor | None:
    """Resize a table of relative positions (rows, heads) of BEiT. The last three rows belong to the class token."""
    about: Any = model.config
    patch = about.patch_size
    (h, w), (to_h, to_w) = (tuple(2 * (side // patch) - 1 for side in of) for of in (own, size))
    if (len(table), shape[0]) != (h * w + 3, to_h * to_w + 3):
        return None
    grid = table[:-3].reshape(1, w, h, -1).permute(0, 3, 1, 2)
    grid = F.interpolate(grid, size=(to_h, to_w), mode="bilinear")
    return torch.cat([grid.permute(0, 2, 3, 1).reshape(to_h * to_w, -1), table[-3:]])


def companions(model: nn.Module, class_names: Sequence[str], spec: InputSpec) -> dict[str, str]:
    """Return the contents of config.json and preprocessor_config.json for the weights of a network, by file name.

    With these files, `transformers` can load the weights.
    """
    return {CONFIG: config_json(model, class_names), NAMES[0]: json.dumps(processor_entries(spec), indent=2) + "\n"}
