"""Selections that change from step to step: in each, some blocks train and the others are frozen.

Within a step a frozen parameter has ``requires_grad = False``: no gradient is computed for it, and below the lowest one
that trains nothing is recorded or kept. Between steps all that may train has ``requires_grad``, so that the optimizer
is built over all of it, and its groups never change. Choices come from (seed, step).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

from efficient_ft.core.errors import SettingError, UserError
from efficient_ft.core.seeding import generator_of
from efficient_ft.methods.base import Applied, trainable
from efficient_ft.methods.selection.static import Selection
from efficient_ft.models.view import ModelView, parameters_under, view


class LayersPerStep(Selection):
    """Base: a subclass says which blocks train in a step. The head and the norm before it always do.

    Args:
        num_layers: K, blocks that train in a step.
        train_embeddings: what comes before the blocks (patch embedding, class token, positions) trains, in every step; if
            not, it is frozen, and the backward pass of a step ends at the lowest block that trains.
        seed: of the choices; None: the run's, and 0 in anyone's own loop.
    """

    find_unused_parameters = True
    #: A step's mask is drawn: its cost is a mean.
    cost_steps = 8

    def __init__(self, num_layers: int, train_embeddings: bool, seed: int | None) -> None:
        super().__init__()
        if type(num_layers) is not int or num_layers < 1:
            raise SettingError("num_layers", num_layers, "a whole number of at least 1")
        if not isinstance(train_embeddings, bool):
            raise SettingError("train_embeddings", train_embeddings, ("true", "false"))
        if seed is not None and (type(seed) is not int or seed < 0):
            raise SettingError("seed", seed, "null (the run's) or a whole number of at least 0")
        self.num_layers, self.train_embeddings, self.seed = num_layers, train_embeddings, seed
        self._blocks: dict[str, nn.Module] = {}
        #: What may train in each block, once every method is applied (adapters freeze what they adapt).
        self._trainable: dict[str, list[nn.Parameter]] | None = None
        self._trained: tuple[int, ...] = ()

    def choose(self, step: int, count: int) -> list[int]:
        """The blocks, counted from 0, that train in a step; `count`: all of the model."""
        raise NotImplementedError  # abstract

    def _chosen(self, model: nn.Module) -> dict[str, Tensor]:
        """What may train."""
        if self.train_embeddings:
            return dict(model.named_parameters())
        seen = view(model)
        return parameters_under(model, [*seen.blocks, *seen.tail, *seen.head])

    def _apply(self, model: nn.Module) -> Applied:
        names = self._refuse_few(view(model))
        super()._apply(model)
        self._blocks, self._trainable = {name: model.get_submodule(name) for name in names}, None
        frozen = [name for name, trains in trainable(model).items() if not trains]
        return Applied(
            self.name,
            names,
            dict.fromkeys(frozen, "frozen: it lies before or between the blocks"),
            notes=(f"{self.num_layers} of {len(names)} blocks train in a step", *self._notes()),
        )

    def _notes(self) -> tuple[str, ...]:
        return ()

    def _refuse_few(self, seen: ModelView) -> tuple[str, ...]:
        """The model's blocks, where there are K of them."""
        if not seen.blocks:
            raise UserError(f"method {self.name}: no blocks were recognised in {seen.name}.")
        if self.num_layers > len(seen.blocks):
            raise SettingError(
                f"method.{self.name}.layers",
                self.num_layers,
                f"a whole number from 1 to {len(seen.blocks)}: {seen.name} has {len(seen.blocks)} blocks",
            )
        return seen.blocks

    def remove(self, model: nn.Module) -> None:
        super().remove(model)
        self._blocks, self._trainable = {}, None

    # ------------------------------------------------------------------ per step
    def step_begin(self, step: int) -> None:
        if self._trainable is None:
            self._trainable = {
                name: [p for p in block.parameters() if p.requires_grad] for name, block in self._blocks.items()
            }
        count = len(self._blocks)
        with unset_fake_temporarily():  # costs are counted on fake tensors, choices made on real numbers
            self._trained = tuple(sorted(self.choose(step, count)))
        for index, parameters in enumerate(self._trainable.values()):
            for parameter in parameters:
                parameter.requires_grad_(index in self._trained)
                if index not in self._trained:
                    parameter.grad = None

    def step_end(self) -> None:
        for parameters in (self._trainable or {}).values():
            for parameter in parameters:
                parameter.requires_grad_(True)

    def _generator(self, step: int) -> torch.Generator:
        return generator_of(self.seed or 0, step)

    def step_stats(self) -> dict[str, Any]:
        return {"trained": [list(self._blocks)[index] for index in self._trained]}


class UniformLayers(LayersPerStep):
    """In every step K blocks train, drawn uniformly: the control of every method that chooses by importance."""

    name = "uniform_layers"

    def __init__(self, num_layers: int = 9, train_embeddings: bool = True, seed: int | None = None) -> None:
        super().__init__(num_layers, train_embeddings, seed)

    def choose(self, step: int, count: int) -> list[int]:
        return torch.randperm(count, generator=self._generator(step))[: self.num_layers].tolist()


class LISA(LayersPerStep):
    """K blocks train, drawn uniformly anew every so many steps; what comes before and after the blocks always trains.

    Source: Pan, Liu, Diao, Pi, Zhang, Han, Zhang, "LISA: Layerwise Importance Sampling for Memory-Efficient Large
    Language Model Fine-Tuning", NeurIPS 2024.

    Args:
        num_layers: K, blocks that train at a time.
        interval: optimizer steps from one choice to the next.
        train_embeddings, seed: see `LayersPerStep`.
    """

    name = "lisa"

    def __init__(
        self, num_layers: int = 2, interval: int = 20, train_embeddings: bool = True, seed: int | None = None
    ) -> None:
        super().__init__(num_layers, train_embeddings, seed)
        if type(interval) is not int or interval < 1:
            raise SettingError("interval", interval, "a whole number of at least 1")
        self.interval = interval

    def choose(self, step: int, count: int) -> list[int]:
        # Choices that hold for several steps come from the first of them.
        return torch.randperm(count, generator=self._generator(step - step % self.interval))[: self.num_layers].tolist()


class TopLayers(LayersPerStep):
    """The K blocks that matter most train, found in a short profile: "FT top-K" of the ALaST paper.

    In the first steps everything trains. What matters is the size of a block's gradient against that of its weights,
    ‖g‖ / ‖w‖, of which each step counts its share (our choice: the paper says "exploration"). The blocks chosen are
    part of the checkpoint.

    Args:
        num_layers: K.
        profile_steps: optimizer steps of the profile.
        train_embeddings: see `LayersPerStep`; in the profile they train if they do after it.
    """

    name = "top_layers"
    cost_steps = 1

    def __init__(self, num_layers: int = 3, profile_steps: int = 10, train_embeddings: bool = False) -> None:
        super().__init__(num_layers, train_embeddings, None)
        if type(profile_steps) is not int or profile_steps < 1:
            raise SettingError("profile_steps", profile_steps, "a whole number of at least 1")
        self.profile_steps = profile_steps
        self._steps = 0
        self._shares: list[float] = []
        self._top: list[int] = []

    @property
    def warmup_steps(self) -> int:  # type: ignore[override]
        return self.profile_steps - self._steps

    def choose(self, step: int, count: int) -> list[int]:
        return self._top if self._steps >= self.profile_steps else list(range(count))

    def step_end(self) -> None:
        super().step_end()
        if self._steps >= self.profile_steps or not self._trainable:
            return
        blocks = list(self._trainable.values())  # where adapters alone train, not each has some
        found = iter(torch.stack([_gradient_size(parameters) for parameters in blocks if parameters]).tolist())
        sizes = [next(found) if parameters else 0.0 for parameters in blocks]
        total = sum(sizes)
        shares = [size / total if 0 < total < math.inf else 0.0 for size in sizes]
        self._shares = [a + b for a, b in zip(self._shares or [0.0] * len(shares), shares, strict=True)]
        self._steps += 1
        if self._steps == self.profile_steps:
            ranked = sorted(range(len(shares)), key=lambda index: (-self._shares[index], index))
            self._top = sorted(ranked[: self.num_layers])

    def remove(self, model: nn.Module) -> None:
        super().remove(model)
        self._steps, self._shares, self._top = 0, [], []  # another model has a profile of its own

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self._steps, "shares": list(self._shares), "top": list(self._top)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._steps, self._shares = state_dict["steps"], list(state_dict["shares"])
        self._top = list(state_dict["top"])


def _gradient_size(parameters: list[nn.Parameter]) -> Tensor:
    """‖g‖ / ‖w‖ of all parameters of a block together.

    Raises:
        UserError: they have no gradients any more.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    if not gradients:
        raise UserError(
            "method top_layers: the blocks have no gradients at the end of the step. Call step_end() before the"
            " optimizer's zero_grad()."
        )
    weights: list[Tensor] = [p.detach() for p in parameters]
    size = [torch.linalg.vector_norm(torch.stack(torch._foreach_norm(t))) for t in (gradients, weights)]
    return size[0] / size[1].clamp_min(1e-12)
