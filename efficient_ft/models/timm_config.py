"""Convert a model configuration to timm's pretrained configuration and keyword arguments, and create the model."""

from __future__ import annotations

from typing import Any

import timm
from timm.models import PretrainedCfg, get_pretrained_cfg
from torch import nn

import efficient_ft.models.proxyless  # registers proxyless_mobile
import efficient_ft.models.small  # noqa: F401  registers vit_digits and vit_micro
from efficient_ft.config.schema import ModelConfig
from efficient_ft.core.errors import SettingError, UserError, did_you_mean, first_line
from efficient_ft.core.input_spec import InputSpec

#: Arguments of timm that have a separate setting. The values are hints for the error message. Arguments that name a
#: file must not come from a run folder, because early versions of timm unpickle the file.
SET_ELSEWHERE = {
    "num_classes": "The data set determines this argument.",
    "pretrained": "Set model.pretrained instead.",
    "img_size": "Set model.image_size instead.",
    "drop_rate": "Set model.drop_rate instead.",
    "drop_path_rate": "Set model.drop_path_rate instead.",
    "pretrained_cfg": "Set model.name=NAME.TAG instead.",
    **dict.fromkeys(("checkpoint_path", "pretrained_cfg_overlay"), "Set model.weights instead."),
}


def pretrained_cfg(config: ModelConfig) -> PretrainedCfg:
    """Return timm's pretrained configuration of a model, or an empty configuration if timm has none.

    The configuration describes the weights and the input. Raise a SettingError if timm lacks the model or the tag.
    """
    name = config.name
    if not timm.is_model(name):
        known = "a classifier of timm (see timm.list_models()), vit_digits, vit_micro or proxyless_mobile"
        raise SettingError("model.name", name, known, did_you_mean(name, timm.list_models()).strip() or None)
    try:
        cfg = get_pretrained_cfg(name)
    except RuntimeError:  # the model does not have the tag (the part after the dot)
        raise SettingError("model.name", name, timm.list_pretrained(f"{name.partition('.')[0]}.*")) from None
    return PretrainedCfg(architecture=name) if cfg is None else cfg


def timm_kwargs(config: ModelConfig, cfg: PretrainedCfg, num_classes: int) -> dict[str, Any]:
    """Return the arguments of `timm.create_model`, or raise a SettingError if an argument has a separate setting."""
    kwargs: dict[str, Any] = {"num_classes": num_classes}
    # Only models whose weights depend on the image size accept this argument. Other models accept any size.
    if config.image_size is not None and cfg.fixed_input_size:
        kwargs["img_size"] = image_size(config, cfg)
    if config.drop_path_rate:
        kwargs["drop_path_rate"] = config.drop_path_rate
    if config.drop_rate:
        kwargs["drop_rate"] = config.drop_rate
    for name, value in config.kwargs.items():
        if name in SET_ELSEWHERE:
            raise SettingError(f"model.kwargs.{name}", value, "unset", SET_ELSEWHERE[name])
    return {**kwargs, **config.kwargs}


def build(config: ModelConfig, kwargs: dict[str, Any], **more: Any) -> nn.Module:
    """Call `timm.create_model`, or raise a UserError if the model rejects the arguments."""
    # With additional arguments, timm also loads weights. The caller handles errors in loading.
    refusals = (TypeError, ValueError, AssertionError, *(() if more else (ArithmeticError, LookupError, RuntimeError)))
    try:
        return timm.create_model(config.name, **kwargs, **more)
    except refusals as error:
        raise UserError(
            f"model.name={config.name} cannot be built with the arguments {kwargs}: {first_line(error).rstrip('.')}."
            " Change model.kwargs or model.image_size."
        ) from error


def image_size(config: ModelConfig, cfg: PretrainedCfg) -> tuple[int, int]:
    """Return `model.image_size` as (H, W) in pixels.

    If `model.image_size` is None, return the image size of the pretrained weights.
    """
    size = cfg.input_size[-2:] if config.image_size is None else config.image_size
    return (size, size) if isinstance(size, int) else (int(size[0]), int(size[1]))


def input_of(config: ModelConfig) -> InputSpec:
    """Return the size (H, W), normalization and interpolation of a model's input images. See `factory.input_of`."""
    cfg = pretrained_cfg(config)
    mean = tuple(cfg.mean if config.mean is None else config.mean)
    std = tuple(cfg.std if config.std is None else config.std)
    channels = config.kwargs.get("in_chans", 3)
    for name, values in (("mean", mean), ("std", std)):
        if len(values) != channels:
            allowed = f"a list of {channels} values, one per channel (model.kwargs.in_chans={channels})"
            raise SettingError(f"model.{name}", list(values), allowed)
    return InputSpec(image_size(config, cfg), mean, std, cfg.interpolation or "bicubic")
