"""Cosine between a recipe's gradient and the exact gradient, on a few training images of the run."""

from __future__ import annotations

import copy

import torch

from efficient_ft.bench.gradients import error_and_cosine, step_gradients
from efficient_ft.config import Config
from efficient_ft.core.errors import UserError
from efficient_ft.methods.base import apply_methods
from efficient_ft.methods.build import build_methods
from efficient_ft.models import factory
from efficient_ft.models.view import view
from efficient_ft.task import moved
from efficient_ft.training.kinds.registry import kind_of

#: Number of images in the batch on which gradients are compared.
IMAGES = 4


class Closeness:
    """Compare the gradients of recipes with the exact gradient, for the network and the weights of a run."""

    def __init__(self, config: Config, device: torch.device) -> None:
        data = config.data.model_copy(update={"batch_size": IMAGES, "num_workers": 0})
        single = config.model_copy(update={"data": data, "tasks": {}})
        images = kind_of(single).open(single, factory.input_of(config.model))
        inputs, targets = next(iter(images.train_loader()))
        self._batch = moved(inputs, device), targets.to(device)
        kind = kind_of(config)
        self._task = kind.task_of(config)
        torch.manual_seed(config.seed)
        self._plain = kind.network(config.model, images.num_classes).to(device)
        for name in view(self._plain).head:
            weight = getattr(self._plain.get_submodule(name), "weight", None)
            if weight is not None and not weight.any():  # zero weights in the head block all gradients
                torch.nn.init.trunc_normal_(weight, std=0.02)
        self._exact = step_gradients(self._plain, self._batch, seed=config.seed, task=self._task).gradients
        self._seed = config.seed

    def cosine(self, config: Config) -> float | None:
        """Return the cosine between the gradients of the recipe and the exact gradients of the trained parameters.

        Return None if no parameter of the network is trained, or if the recipe cannot run a step.
        """
        model, methods = copy.deepcopy(self._plain), build_methods(config)
        try:
            apply_methods(model, methods)
            steps = max((method.warmup_steps for method in methods), default=0)
            for step in range(steps + 1):
                found = step_gradients(
                    model, self._batch, methods=methods, step=step, seed=self._seed, task=self._task
                ).gradients
            keys = [key for key in found if key in self._exact]
            return error_and_cosine(self._exact, found, keys)[1] if keys else None
        except UserError:
            return None
