"""Image classifiers from timm, and classifiers of this package with the same interface."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from timm.models import PretrainedCfg
from torch import Tensor, nn

from efficient_ft.config.schema import ModelConfig
from efficient_ft.core.errors import SettingError, UserError, first_line
from efficient_ft.models.hub import fetch_weights, missing_files
from efficient_ft.models.timm_config import build as build_timm
from efficient_ft.models.timm_config import image_size, input_of, pretrained_cfg, timm_kwargs
from efficient_ft.models.weights import load_weights, recorded_size

__all__ = ["build", "input_of", "load", "missing"]

#: Exceptions that a network may raise for an image size that it cannot process. ValueError includes UserError.
_FAILURES = (RuntimeError, AssertionError, ValueError, ArithmeticError, LookupError)


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
    given = height if height == width else f"[{height},{width}]"
    do = f"The default size is {own[0]}×{own[1]}. Use {use}null for the default.{other}"
    return SettingError("model.image_size", given, f"a size that {config.name} can process", do)


def _is_usable(config: ModelConfig, side: int) -> bool:
    """Return True if the network can process images of `side`×`side` pixels."""
    changed = config.model_copy(update={"image_size": side, "weights": None})
    cfg = pretrained_cfg(changed)
    try:
        model = build_timm(changed, timm_kwargs(changed, cfg, 2))
        with torch.no_grad():
            model.eval()(torch.zeros(1, changed.kwargs.get("in_chans", 3), side, side))
    except _FAILURES:
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
    patches: list[tuple[int, int]] = []  # sizes of the patches that do not cover the images completely

    def look(layer: nn.Conv2d, inputs: tuple[Tensor, ...]) -> None:
        patch = (layer.kernel_size[0], layer.kernel_size[1])
        cuts = patch == tuple(layer.stride) and layer.padding in ((0, 0), 0, "valid") and max(patch) > 1
        if cuts and tuple(inputs[0].shape[-2:]) == size and any(s % p for s, p in zip(size, patch, strict=True)):
            patches.append(patch)

    training = model.training
    try:
        with torch.no_grad(), ExitStack() as hooks:
            for module in model.modules():
                if isinstance(module, nn.Conv2d):
                    hooks.enter_context(module.register_forward_pre_hook(look))
            model.eval()(torch.zeros(1, config.kwargs.get("in_chans", 3), *size))
    except _FAILURES as error:
        if config.image_size is None:  # only the patch size in model.kwargs can be the reason
            kwargs = ", ".join(f"{name}={value}" for name, value in config.kwargs.items())
            do = f"The model fails: {first_line(error)}"
            raise SettingError("model.kwargs", kwargs, f"valid arguments for {config.name}", do) from error
        raise _refused_size(config, cfg) from error
    finally:
        model.train(training)
    recorded = None if config.weights is None else recorded_size(Path(config.weights).expanduser())
    if patches and recorded != size:
        raise _unused_pixels(config, size, patches[0])


def _unused_pixels(config: ModelConfig, size: tuple[int, int], patch: tuple[int, int]) -> SettingError:
    """Return the error for an image size that is not a multiple of the patch size."""
    used, next_ = ([s // p * p + up * p * (s % p > 0) for s, p in zip(size, patch, strict=True)] for up in (0, 1))
    square = size[0] == size[1] and patch[0] == patch[1]
    near = [side[0] if square else f"[{side[0]},{side[1]}]" for side in (used, next_) if min(side)]
    shown = [str(side[0]) if square else f"{side[0]}×{side[1]}" for side in (used, size)]
    known = f"a multiple of {patch[0]} (the patch size of {config.name})"
    do = f"Only {shown[0]} of {shown[1]} pixels would be used. Use {' or '.join(map(str, near))}."
    return SettingError("model.image_size", size[0] if square else f"[{size[0]},{size[1]}]", known, do)
