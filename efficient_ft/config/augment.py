"""Presets of ``data.augment.name``, and rules for settings of augmentation. This module does not import torch."""

from __future__ import annotations

from typing import Any

from efficient_ft.config.explain import show
from efficient_ft.config.schema import AugmentConfig, Config
from efficient_ft.core.errors import SettingError

#: Settings of each preset. Settings that are not listed are off. The sources are timm's training script (light),
#: torchvision's reference recipe of 2021 (medium), and DeiT (strong; Touvron et al., ICML 2021).
PRESETS: dict[str, dict[str, Any]] = {
    "light": {"color_jitter": 0.4},
    "medium": {"policy": "trivialaugment", "erase_prob": 0.1},
    "strong": {"policy": "randaugment", "erase_prob": 0.25, "mixup": 0.8, "cutmix": 1.0},
}
_OFF = {"policy": "none", "color_jitter": 0.0, "erase_prob": 0.0, "mixup": 0.0, "cutmix": 0.0}


def resolved(augment: AugmentConfig) -> AugmentConfig:
    """Return a copy in which each setting that is null has the value of the preset, or a value that turns it off.

    The name is ``resize_crop`` or ``none``.
    """
    preset = PRESETS.get(augment.name, {})
    values = {name: preset.get(name, off) for name, off in _OFF.items() if getattr(augment, name) is None}
    name = "none" if augment.name == "none" else "resize_crop"
    return augment.model_copy(update={**values, "name": name})


def mixes(augment: AugmentConfig) -> bool:
    """Return True if MixUp or CutMix is on."""
    of = resolved(augment)
    return of.mix_prob > 0 and bool(of.mixup or of.cutmix)


def describe(augment: AugmentConfig) -> str:
    """Return the settings from `policy` to `mix_prob` that are on, for example ``erase_prob=0.25 mixup=0.8``."""
    of = resolved(augment)
    on = {name: value for name in _OFF if (value := getattr(of, name)) != _OFF[name]}
    if of.policy == "randaugment":
        on |= {"num_ops": of.num_ops, "magnitude": of.magnitude}
    if mixes(augment):
        on["mix_prob"] = of.mix_prob
    return " ".join(f"{name}={show(value)}" for name, value in on.items())


def is_random(augment: AugmentConfig) -> bool:
    """Return True if the transform of a training image differs between epochs."""
    of = resolved(augment)
    return of.name != "none" or of.policy != "none" or bool(of.color_jitter or of.erase_prob)


def refuse_mixing(key: str, augment: AugmentConfig, where: str, why: str) -> None:
    """Raise a SettingError if MixUp or CutMix is on.

    Args:
        key: name of the data settings, for example ``data``.
        augment: settings of augmentation.
        where: the condition that excludes mixing, for example "with task=segmentation".
        why: sentence that states the reason.
    """
    if not mixes(augment):
        return
    for name in ("mixup", "cutmix"):
        if value := getattr(augment, name):
            raise SettingError(f"{key}.augment.{name}", show(value), f"0 {where}", why)
    turned_off = f"{key}.augment.mixup=0 {key}.augment.cutmix=0"
    raise SettingError(f"{key}.augment.name", augment.name, f"light or medium {where}", f"{why} Or set {turned_off}.")


def check_augment(key: str, augment: AugmentConfig) -> None:
    """Raise a SettingError for settings of augmentation that exclude each other or that have no effect together."""
    if augment.scale[0] > augment.scale[1]:
        raise SettingError(f"{key}.augment.scale", list(augment.scale), "[smallest, largest]")
    if augment.name == "none" and augment.resize != "input":
        allowed = f"input with {key}.augment.name=none"
        do = "Without augmentation, images are not cropped."
        raise SettingError(f"{key}.augment.resize", augment.resize, allowed, do)
    policy = resolved(augment).policy
    for name in ("num_ops", "magnitude"):
        value, default = getattr(augment, name), AugmentConfig.model_fields[name].default
        if value != default and policy != "randaugment":
            allowed = f"left out with {key}.augment.policy={policy}"
            do = f"Only RandAugment has this setting ({key}.augment.policy=randaugment)."
            raise SettingError(f"{key}.augment.{name}", value, allowed, do)
    if augment.mix_prob != 1 and not (resolved(augment).mixup or resolved(augment).cutmix):
        do = f"Set {key}.augment.mixup or {key}.augment.cutmix to mix batches."
        raise SettingError(f"{key}.augment.mix_prob", augment.mix_prob, "left out without MixUp and CutMix", do)


def check_stored_features(config: Config) -> None:
    """Raise a SettingError if a run stores features but mixes images."""
    why = "Each stored feature belongs to one image, but MixUp and CutMix mix two images."
    refuse_mixing("data", config.data.augment, f"with trainer.cache_features={config.trainer.cache_features}", why)
