"""The identity of a run: a fingerprint of the settings that affect its result, and the run folder named by it."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Sequence
from typing import Any

from efficient_ft.config.schema import Config, DataConfig, MaskConfig, OptimConfig, TextConfig

#: Settings of display, logging, measurement and loading, which do not change the result of a run.
_NO_EFFECT: dict[str, Any] = {
    "resume": True,
    "jobs": True,
    "job_timeout": True,
    "published": True,
    "evaluate": True,
    "cost_only": True,
    "cost": True,
    "step_stats": True,
    "logger": True,
    "allocator": True,
    "verbose": True,
    "memory": True,
    "trainer": {"progress", "accelerator", "strategy", "cache_folder", "cache_limit"},
}

#: Data sets that are identified by their place.
OWN_FOLDERS = ("folder", "mask_folder", "text_folder")

_DATA_NO_EFFECT = {
    "num_workers", "download", "eval_batch_size", "follow_links", "keep_decoded", "decoded_folder", "decoded_limit",
}  # fmt: skip


def fingerprint(config: Config) -> str:
    """Return 8 hex digits of the settings that affect the result of a run: equal for runs that train the same."""
    what = config.model_dump(mode="json", exclude=_NO_EFFECT)
    for setting in ("state_bits", "in_backward"):  # later settings: the runs from before them keep their folders
        if getattr(config.optim, setting) == OptimConfig.model_fields[setting].default:
            del what["optim"][setting]
    if config.trainer.cache_features == "off":  # later settings, which have no effect then
        for setting in ("cache_features", "views", "cache_dtype"):
            del what["trainer"][setting]
    if config.trainer.prefix == "fp32":  # a later setting
        del what["trainer"]["prefix"]
    if config.trainer.num_nodes == 1:  # a later setting
        del what["trainer"]["num_nodes"]
    if config.task == "classification":  # a later setting
        del what["task"]
    if config.model.max_length is None:  # a later setting
        del what["model"]["max_length"]
    for setting in ("encoder", "weights_key"):  # later settings
        if what["model"][setting] is None:
            del what["model"][setting]
    for settings in what["method"].values():
        for setting in ("skip", "fused"):  # later settings
            if setting in settings and settings[setting] is None:
                del settings[setting]
    what["data"] = _content(config.data)
    if config.tasks:
        # As a list: the tasks take turns in their order.
        what["tasks"] = [[name, _content(data)] for name, data in config.tasks.items()]
        del what["data"]
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:8]


def _content(data: DataConfig) -> dict[str, Any]:
    """The settings of a data set that affect a result."""
    what = data.model_dump(mode="json", exclude=_DATA_NO_EFFECT)
    if data.masks is None:  # a later setting
        del what["masks"]
    else:
        for setting in ("values", "colors", "palette", "exif", "folder", "image_folder", "suffix"):  # later settings
            if getattr(data.masks, setting) == MaskConfig.model_fields[setting].default:
                del what["masks"][setting]
    if data.text is None:  # a later setting
        del what["text"]
    else:
        for setting in ("names", "delimiter", "quotes", "encoding", "missing", "ignore_case"):  # later settings
            if getattr(data.text, setting) == TextConfig.model_fields[setting].default:
                del what["text"][setting]
    if data.splits is None:  # a later setting
        del what["splits"]
    if data.value_range is None:  # a later setting
        del what["value_range"]
    if data.on_corrupt == "stop" or data.max_pixels == DataConfig.model_fields["max_pixels"].default:
        del what["max_pixels"]  # a later setting, which decides only which images are left out
    if data.train_on_val:  # a later setting: the runs from before it keep their folders
        del what["train_on_val"]
    # A published data set is the same in any place; a folder of images is identified by its path.
    if data.name in OWN_FOLDERS:
        what["root"] = os.path.normpath(data.root)
    else:
        del what["root"]
    return what


def data_configs(config: Config) -> list[DataConfig]:
    """The configuration of every data set of the run: one, or one per task."""
    return list(config.tasks.values()) or [config.data]


def image_folders(config: Config) -> list[str]:
    """The folders of the run's images; none for digits, which need no files."""
    return [os.path.normpath(one.root) for one in data_configs(config) if one.name != "digits"]


def run_folder(config: Config, methods: Sequence[str] | None = None) -> str:
    """Return ``outputs/DATA/MODEL/METHOD+METHOD/FINGERPRINT``, relative, with forward slashes; DATA+DATA for tasks.

    The same configuration always gives the same folder, so that the same command finds its earlier run.

    Args:
        config: of the run.
        methods: what its methods are called in the folder's name; None: their own names.
    """
    data: str = config.data.name
    if data in OWN_FOLDERS:
        data = os.path.basename(os.path.normpath(config.data.root)) or data
    if config.tasks:
        data = "+".join(config.tasks)
    names = sorted(config.method if methods is None else methods)
    parts = [data, config.model.name, "+".join(names), fingerprint(config)]
    return "/".join(["outputs", *(re.sub(r"[^\w.+-]+", "_", part) for part in parts)])
