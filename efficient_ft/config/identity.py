"""The identity of a run: a fingerprint of the settings that affect the result, and the name of the run folder."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Sequence
from typing import Any

from efficient_ft.config.schema import AugmentConfig, Config, DataConfig
from efficient_ft.core.units import parse_bytes

#: Settings for display, logging, measurement and loading, which do not change the result of a run.
_NO_EFFECT: dict[str, Any] = {
    **dict.fromkeys(("resume", "pause_at", "jobs", "job_timeout", "published", "evaluate", "cost_only"), True),
    **dict.fromkeys(("step_stats", "logger", "allocator", "verbose", "memory", "cost"), True),
    "trainer": {"progress", "accelerator", "strategy", "cache_folder", "cache_limit"},
}
_DATA_NO_EFFECT = {
    "num_workers", "download", "eval_batch_size", "follow_links", "keep_decoded", "decoded_folder", "decoded_limit",
}  # fmt: skip

#: Settings of augmentation that have no effect at their default. Folders of runs without these settings keep their
#: names.
_AUGMENT_OFF = ("policy", "num_ops", "magnitude", "color_jitter", "erase_prob", "mixup", "cutmix", "mix_prob")

#: Data sets that are identified by their path.
OWN_FOLDERS = ("folder", "labels", "mask_folder", "text_folder")


def fingerprint(config: Config) -> str:
    """Return a hash (8 hexadecimal digits) of the settings that affect the result of a run."""
    what = config.model_dump(mode="json", exclude=_NO_EFFECT)
    if config.trainer.cache_features == "off":
        del what["trainer"]["views"], what["trainer"]["cache_dtype"]
    # Folders of runs without these settings keep their names.
    if config.trainer.weight_dtype == "fp32":
        del what["trainer"]["weight_dtype"]
    for name in ("ema", "patience"):
        if getattr(config.trainer, name) is None:
            del what["trainer"][name]
    for name in ("class_weights", "decay_steps"):
        if getattr(config.optim, name) is None:
            del what["optim"][name]
    if config.model.library is None:
        del what["model"]["library"]
    if not config.trainer.compile:
        del what["trainer"]["compile"]
    if config.trainer.prefix is None and what["trainer"]["precision"] in ("fp32", "fp16"):
        what["trainer"]["prefix"] = "fp32"  # the default in these precisions, and the value in earlier versions
    limited = config.trainer.limit_eval_batches is not None
    what["data"] = _content(config.data, limited)
    if config.data.automatic and config.memory is not None:
        what["memory"] = parse_bytes("memory", config.memory)  # the budget determines the batch size
    if config.data.effective_batch_size is not None:
        del what["trainer"]["grad_accum_steps"]
    if config.tasks:
        # The order of the tasks affects the result, because optimizer steps alternate between the tasks in this order.
        what["tasks"] = [[name, _content(data, limited)] for name, data in config.tasks.items()]
        del what["data"]
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:8]


def _content(data: DataConfig, limited: bool) -> dict[str, Any]:
    """Return the settings of a data set that affect the result of a run.

    If `limited` is True, only a limited number of evaluation batches is used, so their size affects the result.
    """
    what = data.model_dump(mode="json", exclude=_DATA_NO_EFFECT)
    what["augment"] = augment_content(data.augment)
    if limited and data.eval_batch_size not in (None, data.batch_size):
        what["eval_batch_size"] = data.eval_batch_size
    if data.labels is None:
        del what["labels"]  # folders of runs without this section keep their names
    if data.on_corrupt == "stop":
        del what["max_pixels"]  # Without skipped images, this limit has no effect.
    # An automatic batch size is identified by ``auto``, because the run folder is created before the size is selected.
    if data.automatic:
        what["batch_size"] = "auto"
    del what["batch_size_selected"]
    if data.effective_batch_size is None:
        del what["effective_batch_size"]  # Folders of runs without this setting keep their names.
    if data.sampler == "shuffle":
        del what["sampler"]  # Folders of runs without this setting keep their names.
    # A folder of images is identified by its path. A published data set is the same regardless of its path.
    root = what.pop("root")
    return {**what, "root": os.path.normpath(root)} if data.name in OWN_FOLDERS else what


def augment_content(augment: AugmentConfig) -> dict[str, Any]:
    """Return the settings of augmentation, without optional settings that have their defaults."""
    defaults, plain = AugmentConfig.model_fields, augment.model_dump(mode="json")
    return {name: value for name, value in plain.items() if name not in _AUGMENT_OFF or value != defaults[name].default}


def data_configs(config: Config) -> list[DataConfig]:
    """Return the configurations of the run's data sets. Without tasks, the run has one data set."""
    return list(config.tasks.values()) or [config.data]


def image_folders(config: Config) -> list[str]:
    """Return the folders of the run's data sets. The data set ``digits`` has no folder."""
    return [os.path.normpath(one.root) for one in data_configs(config) if one.name != "digits"]


def run_folder(config: Config, methods: Sequence[str] | None = None) -> str:
    """Return the relative path ``outputs/DATA/MODEL/METHOD+METHOD/FINGERPRINT`` of a run's folder.

    The path has forward slashes, and depends only on the configuration. If ``data.root`` is a path such as ``..``, DATA
    also depends on the working directory. With several tasks, DATA consists of the names
    of the tasks, joined with ``+``. If `methods` is given, these names are used instead of the names of the configured
    methods.
    """
    data: str = config.data.name
    if data in OWN_FOLDERS:
        data = os.path.basename(os.path.abspath(config.data.root)) or data
    if config.tasks:
        data = "+".join(config.tasks)
    names = sorted(config.method if methods is None else methods)
    parts = [data, config.model.name, "+".join(names), fingerprint(config)]
    return "/".join(["outputs", *(re.sub(r"[^\w.+-]+", "_", part) for part in parts)])
