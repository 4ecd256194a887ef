"""The task of a run."""

from __future__ import annotations

from efficient_ft.config import Config
from efficient_ft.models.factory import input_of
from efficient_ft.task import TASKS, Segmentation, Task


def run_task(config: Config) -> Task:
    """The task of a run, as its configuration asks for it."""
    masks = config.data.masks
    if config.task == "segmentation" and masks is not None and masks.evaluation == "windows":
        return Segmentation(input_of(config.model).image_size)
    return TASKS[config.task]
