"""The task of a run, and its training step."""

from __future__ import annotations

from efficient_ft.config import Config
from efficient_ft.cost import StepSpec
from efficient_ft.models.factory import input_of
from efficient_ft.task import TASKS, Segmentation, Task


def run_task(config: Config) -> Task:
    """The task of a run, as its configuration asks for it."""
    masks = config.data.masks
    if config.task == "segmentation" and masks is not None and masks.evaluation == "windows":
        return Segmentation(input_of(config.model).image_size)
    return TASKS[config.task]


def step_spec(config: Config) -> StepSpec:
    """The settings of a training step of a run."""
    spec = input_of(config.model)
    return StepSpec(
        config.data.batch_size,
        spec.size,
        config.trainer.precision,
        label_smoothing=config.optim.label_smoothing,
        in_chans=len(spec.mean),
        frozen_bn=config.model.frozen_bn,
        grad_clip_norm=config.optim.grad_clip_norm,
        task=run_task(config),
    )
