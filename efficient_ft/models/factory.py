"""Networks by name, with pretrained weights, with those of a local file, or with random ones.

Classifiers of images have timm's names; for segmentation networks see `models.segmentation`, for texts `models.text`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from timm.models import PretrainedCfg
from torch import Tensor, nn

from efficient_ft.core.errors import SettingError, UserError, first_line
from efficient_ft.core.input_spec import InputSpec
from efficient_ft.models.checkpoint import read_contents
from efficient_ft.models.hub import fetch_weights, missing_weights
from efficient_ft.models.loading_report import loading_report
from efficient_ft.models.segmentation import (
    build_segmenter,
    input_of_segmenter,
    is_segmenter,
    load_segmenter,
    weights_cfg,
)
from efficient_ft.models.tasks import give_heads, zero_parameters
from efficient_ft.models.text import build_text, input_of_text, is_text, load_text
from efficient_ft.models.timm_config import build, image_size, pretrained_cfg, timm_kwargs
from efficient_ft.models.timm_config import input_of as input_of_classifier
from efficient_ft.models.view import view
from efficient_ft.models.weights import load_weights, noted_size

if TYPE_CHECKING:
    from efficient_ft.config.schema import ModelConfig

__all__ = ["create_model", "input_of", "loading_report", "missing_weights", "random_model", "read_state_dict"]

log = logging.getLogger(__name__)


def input_of(config: ModelConfig) -> InputSpec:
    """Size, normalization and interpolation of a network's images; or the length of its texts.

    Raises:
        SettingError: an unknown model, or `model.mean` or `model.std` without one value per channel.
    """
    if is_text(config):
        return input_of_text(config)
    return input_of_segmenter(config) if is_segmenter(config) else input_of_classifier(config)


def read_state_dict(path: Path) -> dict[str, Tensor]:
    """Read the tensors of a file by their full names; see `models.checkpoint.read_contents`."""
    return read_contents(path).tensors


def create_model(config: ModelConfig, num_classes: int | Mapping[str, int], *, report: bool = True) -> nn.Module:
    """Create the network `config.name` with its weights, in fp32 on the CPU.

    Args:
        config: the `model` section of the configuration.
        num_classes: number of outputs; or by task, for a classifier per task (`models.tasks`): the first is created or
            loaded as that of a network of one task, the others are newly initialized.
        report: log which weights were loaded; `loading_report` returns the report in any case.

    Raises:
        UserError: an unknown name, arguments or an image size that the model refuses, or weights that cannot be
            fetched or do not fit.
    """
    if not isinstance(num_classes, int):
        model = create_model(config, next(iter(num_classes.values())), report=report)
        give_heads(model, num_classes, zero=config.zero_head)
        return model
    random = random_model(config, num_classes)
    if config.weights is None and not config.pretrained:
        log.warning(
            "%s starts from RANDOM weights (model.pretrained=false, no model.weights): it is trained from scratch.",
            config.name,
        )
        if config.zero_head:
            _zero_head(random)
        return random
    if is_text(config):
        return _loaded(config, load_text(config, num_classes), num_classes, report)
    cfg = weights_cfg(config) if is_segmenter(config) else pretrained_cfg(config)
    path = fetch_weights(config, cfg) if config.weights is None else Path(config.weights).expanduser()
    if is_segmenter(config):
        return _loaded(config, load_segmenter(config, num_classes, path, random), num_classes, report)
    model = load_weights(config, timm_kwargs(config, cfg, num_classes), random, cfg, path)
    _record_input_size(config, model)
    return _loaded(config, model, num_classes, report)


def _loaded(config: ModelConfig, model: nn.Module, num_classes: int, shown: bool) -> nn.Module:
    """Log the loading report, and prepare new parts."""
    report = loading_report(model)
    assert report is not None, "every loader sets a report"
    if report.new_heads and config.zero_head:
        _zero_head(model)
    for line in report.lines(num_classes):
        log.log(logging.INFO if shown else logging.DEBUG, "%s", line)
    for words in report.suspicious if shown else ():
        log.warning("warning: the weights are suspicious: %s.", words)
    return model


def random_model(config: ModelConfig, num_classes: int | Mapping[str, int]) -> nn.Module:
    """Create the same classifier with random weights, also if the configuration names weights: to count its cost.

    Args:
        config: the `model` section of the configuration.
        num_classes: number of outputs, or by task.

    Raises:
        UserError: an unknown name, or arguments or an image size that the model refuses.
    """
    if not isinstance(num_classes, int):
        model = random_model(config, next(iter(num_classes.values())))
        give_heads(model, num_classes)
        return model
    if is_text(config):
        return build_text(config, num_classes)
    if is_segmenter(config):
        return build_segmenter(config, num_classes)
    cfg = pretrained_cfg(config)
    try:
        model = build(config, timm_kwargs(config, cfg, num_classes))
    except UserError:
        if config.image_size is not None:
            own = config.model_copy(update={"image_size": None})
            build(own, timm_kwargs(own, cfg, num_classes))  # raises if the size is not the reason
            raise _refused_size(config, cfg) from None
        raise
    _check_image_size(config, cfg, model)
    _record_input_size(config, model)
    return model


def _refused_size(config: ModelConfig, cfg: PretrainedCfg) -> SettingError:
    """Return the error for an image size that a network cannot process, with the next larger one that it can."""
    height, width = image_size(config, cfg)
    own = tuple(cfg.input_size[-2:])
    sizes = [side for side in range(32, max(own), 32) if side > max(height, width)]
    usable = next((side for side in sizes if _is_usable(config, side)), None)
    use = "" if usable is None else f"model.image_size={usable}, or "
    other = " Or change model.kwargs." if config.kwargs else ""
    return SettingError(
        "model.image_size",
        height if height == width else f"[{height},{width}]",
        f"a size that {config.name} can process",
        f"Its own is {own[0]}×{own[1]}. Use {use}null for its own.{other}",
    )


def _is_usable(config: ModelConfig, side: int) -> bool:
    """Whether the network processes square images of `side` pixels."""
    changed = config.model_copy(update={"image_size": side, "weights": None})
    cfg = pretrained_cfg(changed)
    try:
        model = build(changed, timm_kwargs(changed, cfg, 2))
        with torch.no_grad():
            model.eval()(torch.zeros(1, changed.kwargs.get("in_chans", 3), side, side))
    except (RuntimeError, AssertionError, ValueError, ArithmeticError, LookupError):  # UserError is a ValueError
        return False
    return True


def _zero_head(model: nn.Module) -> None:
    """Let the classifier give 0 for every class."""
    for name in view(model).head:
        zero_parameters(model.get_submodule(name))


def _record_input_size(config: ModelConfig, model: nn.Module) -> None:
    """Set the input size in the model's own record: the model view probes it at that size."""
    spec = input_of(config)
    record: Any = model.pretrained_cfg
    model.pretrained_cfg = {**record, "input_size": (len(spec.mean), *spec.size)}  # type: ignore[assignment]


def _check_image_size(config: ModelConfig, cfg: PretrainedCfg, model: nn.Module) -> None:
    """Reject a size that the model accepts but cannot process, or whose pixels its patches do not cover."""
    own = tuple(cfg.input_size[-2:])
    size = image_size(config, cfg)
    if size == own and not any("patch" in name for name in config.kwargs):
        return
    training = model.training
    try:
        with torch.no_grad(), _patches(model, size) as patches:
            model.eval()(torch.zeros(1, config.kwargs.get("in_chans", 3), *size))
    except (RuntimeError, AssertionError, ValueError, ArithmeticError, LookupError) as error:
        if config.image_size is None:  # patches of another size
            kwargs = ", ".join(f"{name}={value}" for name, value in config.kwargs.items())
            raise SettingError(
                "model.kwargs", kwargs, f"arguments with which {config.name} runs", f"It fails: {first_line(error)}"
            ) from error
        raise _refused_size(config, cfg) from error
    finally:
        model.train(training)
    noted = None if config.weights is None else noted_size(Path(config.weights).expanduser())
    if patches and noted != size:
        raise _unused_pixels(config, size, patches[0])


@contextmanager
def _patches(model: nn.Module, size: tuple[int, int]) -> Iterator[list[tuple[int, int]]]:
    """Record the patch sizes of layers whose patches do not cover images of `size`."""
    found: list[tuple[int, int]] = []

    def look(layer: nn.Module, inputs: tuple[Any, ...]) -> None:
        assert isinstance(layer, nn.Conv2d)
        patch = (layer.kernel_size[0], layer.kernel_size[1])
        cuts = patch == tuple(layer.stride) and layer.padding in ((0, 0), 0, "valid") and max(patch) > 1
        if cuts and tuple(inputs[0].shape[-2:]) == size and any(s % p for s, p in zip(size, patch, strict=True)):
            found.append(patch)

    hooks = [m.register_forward_pre_hook(look) for m in model.modules() if isinstance(m, nn.Conv2d)]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def _unused_pixels(config: ModelConfig, size: tuple[int, int], patch: tuple[int, int]) -> SettingError:
    """Return the error for an image size that is not a multiple of the patch size."""
    used, next_ = ([s // p * p + up * p * (s % p > 0) for s, p in zip(size, patch, strict=True)] for up in (0, 1))
    square = size[0] == size[1] and patch[0] == patch[1]
    near = [side[0] if square else f"[{side[0]},{side[1]}]" for side in (used, next_) if min(side)]
    shown = [str(side[0]) if square else f"{side[0]}×{side[1]}" for side in (used, size)]
    return SettingError(
        "model.image_size",
        size[0] if square else f"[{size[0]},{size[1]}]",
        f"a multiple of {patch[0]}, the patch size of {config.name}",
        f"Only {shown[0]} of {shown[1]} pixels would be used. Use {' or '.join(map(str, near))}.",
    )
