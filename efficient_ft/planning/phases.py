"""The phases of a planned run, for the prediction of its memory (`training.memory.budget`)."""

from __future__ import annotations

from dataclasses import replace

import torch

from efficient_ft.config import Config
from efficient_ft.cost import Demand
from efficient_ft.models import factory
from efficient_ft.planning.counting import Counted
from efficient_ft.training.kinds.registry import kind_of
from efficient_ft.training.memory.budget import Predictor


class RunPhases:
    """Demands of the recipes of one plan: counts of each, and the evaluation and reading that all of them share.

    Evaluation is counted once for each batch size, on the network without methods.

    Args:
        base: the run without a recipe.
    """

    def __init__(self, base: Config) -> None:
        kind = kind_of(base)
        images = None if kind.missing(base) else kind.open(base, factory.input_of(base.model))
        self._predictor = Predictor(base, images, 0, torch.device("cpu"))
        self._shared: dict[str, Demand] = {}

    def demand(self, config: Config, counted: Counted) -> Demand:
        """The counts of a recipe.

        Args:
            config: of its run.
            counted: its step.
        """
        key = config.model_dump_json(include={"data", "trainer"})
        if key not in self._shared:
            self._shared[key] = self._predictor.around(config)
        shared = self._shared[key]
        gradients = counted.trainable * 4 if config.trainer.grad_accum_steps > 1 else 0
        return replace(
            shared,
            model_bytes=max(counted.resident_bytes - shared.batch_bytes, shared.weights_bytes),
            step_bytes=counted.step_bytes,
            largest_bytes=counted.largest_bytes,
            optimizer_bytes=counted.optimizer_bytes,
            gradient_bytes=gradients,
        )
