"""The identity of a run: a fingerprint of the settings that affect the result, and the name of the run folder."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Sequence
from typing import Any

from efficient_ft.config.schema import Config, DataConfig

#: Settings for display, logging, measurement and loading, which do not change the result of a run.
_NO_EFFECT: dict[str, Any] = {
    **dict.fromkeys(("resume", "jobs", "job_timeout", "published", "evaluate", "cost_only", "cost"), True),
    **dict.fromkeys(("step_stats", "logger", "allocator", "verbose", "memory"), True),
    "trainer": {"progress", "accelerator", "strategy", "cache_folder", "cache_limit"},
}
_DATA_NO_EFFECT = {
    "num_workers", "download", "eval_batch_size", "follow_links", "keep_decoded", "decoded_folder", "decoded_limit",
}  # fmt: skip

#: Data sets that are identified by their path.
OWN_FOLDERS = ("folder", "mask_folder", "text_folder")


def fingerprint(config: Config) -> str:
    """Return a hash (8 hexadecimal digits) of the settings that affect the result of a run."""
    what = config.model_dump(mode="json", exclude=_NO_EFFECT)
    if config.trainer.cache_features == "off":
        del what["trainer"]["views"], what["trainer"]["cache_dtype"]
    # Folders of runs without these settings keep their names.
    if config.trainer.weight_dtype == "fp32":
        del what["trainer"]["weight_dtype"]
    if not config.trainer.compile:
        del what["trainer"]["compile"]
    if config.trainer.prefix is None and what["trainer"]["precision"] in ("fp32", "fp16"):
        what["trainer"]["prefix"] = "fp32"  # the default in these precisions, and the value in earlier versions
    what["data"] = _content(config.data)
    if config.tasks:
        # The order of the tasks affects the result, because optimizer steps alternate between the tasks in this order.
        what["tasks"] = [[name, _content(data)] for name, data in config.tasks.items()]
        del what["data"]
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:8]


def _content(data: DataConfig) -> dict[str, Any]:
    """Return the settings of a data set that affect the result of a run."""
    what = data.model_dump(mode="json", exclude=_DATA_NO_EFFECT)
    if data.on_corrupt == "stop":
        del what["max_pixels"]  # Without skipped images, this limit has no effect.
    # A folder of images is identified by its path. A published data set is the same regardless of its path.
    root = what.pop("root")
    return {**what, "root": os.path.normpath(root)} if data.name in OWN_FOLDERS else what


def data_configs(config: Config) -> list[DataConfig]:
    """Return the configurations of the run's data sets. Without tasks, the run has one data set."""
    return list(config.tasks.values()) or [config.data]


def image_folders(config: Config) -> list[str]:
    """Return the folders of the run's data sets. The data set ``digits`` has no folder."""
    return [os.path.normpath(one.root) for one in data_configs(config) if one.name != "digits"]


def run_folder(config: Config, methods: Sequence[str] | None = None) -> str:
    """Return the relative path ``outputs/DATA/MODEL/METHOD+METHOD/FINGERPRINT`` of a run's folder.

    The path has forward slashes, and depends only on the configuration. With several tasks, DATA consists of the names
    of the tasks, joined with ``+``. If `methods` is given, these names are used instead of the names of the configured
    methods.
    """
    data: str = config.data.name
    if data in OWN_FOLDERS:
        data = os.path.basename(os.path.normpath(config.data.root)) or data
    if config.tasks:
        data = "+".join(config.tasks)
    names = sorted(config.method if methods is None else methods)
    parts = [data, config.model.name, "+".join(names), fingerprint(config)]
    return "/".join(["outputs", *(re.sub(r"[^\w.+-]+", "_", part) for part in parts)])
