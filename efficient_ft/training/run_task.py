"""The training step of a run, as its configuration sets it."""

from __future__ import annotations

from efficient_ft.config import Config
from efficient_ft.cost import StepSpec
from efficient_ft.models.factory import input_of
from efficient_ft.training.kinds.registry import kind_of


def step_spec(config: Config) -> StepSpec:
    """Return the settings of a training step of a run."""
    spec = input_of(config.model)
    return StepSpec(
        config.data.batch_size,
        spec.size,
        config.trainer.precision,
        label_smoothing=config.optim.label_smoothing,
        in_chans=len(spec.mean),
        frozen_bn=config.model.frozen_bn,
        grad_clip_norm=config.optim.grad_clip_norm,
        task=kind_of(config).task_of(config),
    )
