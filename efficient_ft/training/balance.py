"""Correct imbalanced classes with weights in the loss (``optim.class_weights``) or a sampler (``data.sampler``)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from efficient_ft.config import Config, data_configs
from efficient_ft.config.class_weights import SETTING, class_weights
from efficient_ft.config.explain import show
from efficient_ft.core.errors import SettingError
from efficient_ft.core.text import plain_line
from efficient_ft.data.opened import OpenedData
from efficient_ft.data.samplers import class_shares
from efficient_ft.task import Task
from efficient_ft.training.kinds.base import RunData, settings_of_task
from efficient_ft.training.output.console import say


def balance_classes(config: Config, task: Task, data: RunData, say: Callable[[str], None] = say) -> dict[str, Tensor]:
    """Check the settings that balance classes, print what they mean for the data, and return the class weights.

    `say` prints a line. With `data.on_corrupt=skip`, the numbers of samples may differ before and after the inspection.

    Returns:
        The weights of each data set, float32 (C,). The key of a single data set is an empty string. A data set whose
        classes have equal weights has no entry, because such weights do not change the loss.

    Raises:
        SettingError: If a setting is invalid for the data or is not supported by the kind of task.
        UserError: If the file with the class weights cannot be read.
    """
    given, found = config.optim.class_weights, {}
    if given is not None and not task.weighs_classes:
        do = "The loss of this kind of task has no class weights."
        raise SettingError(SETTING, show(given), f"null with task={config.task}", do)
    if config.tasks and given not in (None, "auto"):
        do = "The data sets have different classes."
        raise SettingError(SETTING, show(given), "null or auto with several tasks", do)
    for (name, part), options in zip(data.parts.items(), data_configs(config), strict=True):
        prefix, sizes = f"{name}: " if name else "", part.class_sizes()
        if options.sampler != "shuffle":
            with settings_of_task(name):
                _check_sampler(options.sampler, sizes, config.task)
            say(prefix + _sampler_line(options.sampler, part))
        if given is None:
            continue
        weights = class_weights(given, part.class_names, None if sizes is None else sizes.tolist())
        say(prefix + _weights_line(weights, part))
        if given == "auto" and options.sampler != "shuffle":
            say(
                f"warning: {prefix}data.sampler={options.sampler} and {SETTING}=auto correct the same imbalance twice."
                " Usually, only one of these settings is used."
            )
        if len(set(weights)) > 1:
            found[name] = torch.tensor(weights, dtype=torch.float32)
    return found


def _check_sampler(sampler: str, sizes: np.ndarray | None, task: str) -> None:
    if sizes is None:
        do = "A sample of this data set does not have a single class."
        raise SettingError("data.sampler", sampler, f"shuffle with task={task}", do)


def _sampler_line(sampler: str, data: OpenedData) -> str:
    sizes = data.class_sizes()
    assert sizes is not None
    draws = class_shares(sizes, sampler) * sizes.sum()
    how = (
        "each class equally often"
        if sampler == "balanced"
        else "each class in proportion to the square root of its size"
    )
    present = np.flatnonzero(sizes)
    small, large = present[sizes[present].argmin()], sizes.argmax()

    def end(at: int) -> str:
        return f"{plain_line(data.class_names[at])} with {sizes[at]} {data.noun}s is drawn about {draws[at]:.0f} times"

    absent = len(sizes) - len(present)
    more = f" {absent} of {len(sizes)} classes have no training {data.noun}s." if absent else ""
    return f"data.sampler={sampler} draws {how}: in an epoch, {end(int(small))}, and {end(int(large))}.{more}"


def _weights_line(weights: Sequence[float], data: OpenedData) -> str:
    sizes = data.class_sizes()
    low, high = int(np.argmin(weights)), int(np.argmax(weights))
    if weights[low] == weights[high]:
        return f"{SETTING}: all classes have the same weight, so the loss is not weighted."

    def end(at: int) -> str:
        size = "" if sizes is None else f" ({sizes[at]} training {data.noun}s)"
        return f"{weights[at]:.3g} for {plain_line(data.class_names[at])}{size}"

    return f"{SETTING}: the weights in the loss range from {end(low)} to {end(high)}."
