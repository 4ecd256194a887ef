"""Image classifiers from timm, and classifiers of this package with the same interface."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from timm.models import PretrainedCfg
from torch import nn

from efficient_ft.config.schema import ModelConfig
from efficient_ft.core.errors import SettingError, UserError, first_line
from efficient_ft.models.hub import fetch_weights, missing_files
from efficient_ft.models.image_size import FAILURES, nondividing_patch_size, size_setting, unused_pixels_error
from efficient_ft.models.timm_config import build as build_timm
from efficient_ft.models.timm_config import image_size, input_of, pretrained_cfg, timm_kwargs
from efficient_ft.models.weights import load_weights, recorded_size

__all__ = ["build", "input_of", "load", "missing"]


def build(config: ModelConfig, classes: int) -> nn.Module:
    """Build a classifier with random weights. See `factory.random_model`."""
    cfg = pretrained_cfg(config)
    try:
        model = build_timm(config, timm_kwargs(config, cfg, classes))
    except UserError:
        if config.image_size is not None:
            own = config.model_copy(update={"image_size": None})
            build_timm(own, timm_kwargs(own, cfg, classes))  # this call fails if the image size is not the reason
            raise _refused_size(config, cfg) from None
        raise
    _check_image_size(config, cfg, model)
    _record_input_size(config, model)
    return model


def load(config: ModelConfig, classes: int, random: nn.Module) -> nn.Module:
    """Build a classifier with the weights of a file, or with timm's pretrained weights. See `factory.create_model`."""
    cfg = pretrained_cfg(config)
    path = fetch_weights(config, cfg)
    model = load_weights(config, timm_kwargs(config, cfg, classes), random, cfg, path)
    _record_input_size(config, model)
    return model


def missing(config: ModelConfig) -> str | None:
    """Return a message if the weights are missing, or None otherwise. See `factory.missing_weights`."""
    return missing_files(config, pretrained_cfg(config))


def _refused_size(config: ModelConfig, cfg: PretrainedCfg) -> SettingError:
    """Return the error for an image size that a network cannot process.

    The message suggests the next larger usable size.
    """
    height, width = image_size(config, cfg)
    own = tuple(cfg.input_size[-2:])
    sizes = [side for side in range(32, max(own), 32) if side > max(height, width)]
    usable = next((side for side in sizes if _is_usable(config, side)), None)
    use = "" if usable is None else f"model.image_size={usable}, or "
    other = " Or change model.kwargs." if config.kwargs else ""
    do = f"The default size is {own[0]}×{own[1]}. Use {use}null for the default.{other}"
    return SettingError("model.image_size", size_setting((height, width)), f"a size that {config.name} can process", do)


def _is_usable(config: ModelConfig, side: int) -> bool:
    """Return True if the network can process images of `side`×`side` pixels."""
    changed = config.model_copy(update={"image_size": side, "weights": None})
    cfg = pretrained_cfg(changed)
    try:
        model = build_timm(changed, timm_kwargs(changed, cfg, 2))
        with torch.no_grad():
            model.eval()(torch.zeros(1, changed.kwargs.get("in_chans", 3), side, side))
    except FAILURES:
        return False
    return True


def _record_input_size(config: ModelConfig, model: nn.Module) -> None:
    """Store the input size in the model's `pretrained_cfg`. The model view runs the model with inputs of this size."""
    spec = input_of(config)
    record: Any = model.pretrained_cfg
    model.pretrained_cfg = {**record, "input_size": (len(spec.mean), *spec.size)}  # type: ignore[assignment]


def _check_image_size(config: ModelConfig, cfg: PretrainedCfg, model: nn.Module) -> None:
    """Raise a SettingError if the model cannot process the image size, or if its patches do not cover the image."""
    own = tuple(cfg.input_size[-2:])
    size = image_size(config, cfg)
    if size == own and not any("patch" in name for name in config.kwargs):
        return
    try:
        patch = nondividing_patch_size(model, size, config.kwargs.get("in_chans", 3))
    except FAILURES as error:
        if config.image_size is None:  # only the patch size in model.kwargs can be the reason
            kwargs = ", ".join(f"{name}={value}" for name, value in config.kwargs.items())
            do = f"The model raised an error: {first_line(error)}."
            raise SettingError("model.kwargs", kwargs, f"valid arguments for {config.name}", do) from error
        raise _refused_size(config, cfg) from error
    recorded = None if config.weights is None else recorded_size(Path(config.weights).expanduser())
    if patch is not None and recorded != size:
        raise unused_pixels_error(config.name, size, patch)
