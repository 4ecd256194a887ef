"""Selections that change from step to step: in each step some blocks train and the others are frozen.

Within a step a frozen parameter has ``requires_grad = False``: no gradient is computed for it, and below the lowest
parameter that trains nothing is recorded or kept. Between steps all that may train has ``requires_grad``, so that the
optimizer is built over all of it and its groups never change. Choices are drawn from (seed, step).
"""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

from efficient_ft.core.errors import SettingError, UserError
from efficient_ft.core.seeding import generator_of
from efficient_ft.methods.base import Applied, trainable
from efficient_ft.methods.declarations import Needs
from efficient_ft.methods.registry import register
from efficient_ft.methods.selection.static import Selection
from efficient_ft.models.view import ModelView, Reason, Skipped, parameters_under


class LayersPerStep(Selection):
    """Base of the selections that change from step to step: a subclass returns in `choose` the blocks that train.

    The head and the norm before it train in every step. Within a step the parameters of the other blocks are frozen;
    between steps all that may train has `requires_grad`, so that the optimizer is built over all of it.

    Args:
        num_layers: K, blocks that train in a step.
        train_embeddings: what comes before the blocks (patch embedding, class token, positions) trains, in every step.
            If False it is frozen, and the backward pass of a step ends at the lowest block that trains.
        seed: of the choices; None: the run's, and 0 outside of runs.

    Raises:
        SettingError: a value outside these, or (when applied) more blocks than the model has.
        UserError: when applied: the model's blocks are not recognized.
    """

    needs = frozenset({Needs.BLOCKS, Needs.FIND_UNUSED_PARAMETERS})
    acts_per_step = True
    #: A step's blocks are drawn: its cost is a mean.
    cost_steps = 8

    def __init__(self, num_layers: int, train_embeddings: bool, seed: int | None) -> None:
        super().__init__()
        if type(num_layers) is not int or num_layers < 1:
            raise SettingError("num_layers", num_layers, "an integer >= 1")
        if not isinstance(train_embeddings, bool):
            raise SettingError("train_embeddings", train_embeddings, ("true", "false"))
        if seed is not None and (type(seed) is not int or seed < 0):
            raise SettingError("seed", seed, "null (the run's) or an integer >= 0")
        self.num_layers, self.train_embeddings, self.seed = num_layers, train_embeddings, seed
        self._blocks: dict[str, nn.Module] = {}
        #: What may train in each block, once every method is applied (adapters freeze what they adapt).
        self._trainable: dict[str, list[nn.Parameter]] | None = None
        self._trained: tuple[int, ...] = ()

    @abstractmethod
    def choose(self, step: int, count: int) -> list[int]:
        """Return the indices of the blocks that train in a step, counted from 0.

        Draw random choices from (`self.seed`, `step`) alone, so that every process and a resumed run agree.

        Args:
            step: number of the optimizer step, from 0.
            count: number of blocks of the model.
        """

    def chosen(self, view: ModelView) -> dict[str, Tensor]:
        """Return what may train."""
        if self.train_embeddings:
            return dict(view.model.named_parameters())
        return parameters_under(view.model, [*view.blocks, *view.tail]) | view.new_parameters()

    def _apply(self, model: nn.Module, view: ModelView) -> Applied:
        self._check_count(view)
        super()._apply(model, view)
        self._blocks, self._trainable = {name: model.get_submodule(name) for name in view.blocks}, None
        frozen = [name for name, trains in trainable(model).items() if not trains]
        why = Skipped(Reason.FROZEN, "frozen: before or between the blocks")
        rest = "embeddings, norm and head" if self.train_embeddings else "norm and head"
        summary = "; ".join([self._drawn(len(view.blocks)), f"{rest} always train", *self._notes()])
        return Applied(self.name, view.blocks, dict.fromkeys(frozen, why), summary=summary)

    def _drawn(self, count: int) -> str:
        """Return a phrase about which of `count` blocks are trained."""
        return f"{self.num_layers} of {count} blocks train in each step"

    def _notes(self) -> tuple[str, ...]:
        """Return further phrases of the report."""
        return ()

    def _check_count(self, view: ModelView) -> None:
        """Raise SettingError where the model has fewer than K blocks."""
        if self.num_layers > len(view.blocks):
            raise SettingError(
                f"method.{self.name}.num_layers",
                self.num_layers,
                f"an integer from 1 to {len(view.blocks)}",
                f"{view.name} has {len(view.blocks)} blocks.",
            )

    def remove(self, model: nn.Module) -> None:
        super().remove(model)
        self._blocks, self._trainable = {}, None

    # ------------------------------------------------------------------ per step
    def step_begin(self, step: int) -> None:
        super().step_begin(step)
        if self._trainable is None:
            self._trainable = {
                name: [p for p in block.parameters() if p.requires_grad] for name, block in self._blocks.items()
            }
        count = len(self._blocks)
        with unset_fake_temporarily():  # costs are counted on fake tensors, choices drawn from real ones
            self._trained = tuple(sorted(self.choose(step, count)))
        for index, parameters in enumerate(self._trainable.values()):
            for parameter in parameters:
                parameter.requires_grad_(index in self._trained)
                if index not in self._trained:
                    parameter.grad = None

    def step_end(self) -> None:
        super().step_end()
        for parameters in (self._trainable or {}).values():
            for parameter in parameters:
                parameter.requires_grad_(True)

    def trained_in_some_step(self) -> list[nn.Parameter]:
        return [parameter for parameters in (self._trainable or {}).values() for parameter in parameters]

    def _generator(self, step: int) -> torch.Generator:
        return generator_of(self.seed or 0, step)

    def step_stats(self) -> dict[str, Any]:
        return {"trained": [list(self._blocks)[index] for index in self._trained]}


@register
class UniformLayers(LayersPerStep):
    """Train K blocks in every step, drawn uniformly: the control of methods that choose by importance.

    Args:
        num_layers, train_embeddings, seed: see `LayersPerStep`.

    Raises:
        SettingError: as in `LayersPerStep`.
        UserError: when applied: the model's blocks are not recognized.
    """

    name = "uniform_layers"

    def __init__(self, num_layers: int = 9, train_embeddings: bool = True, seed: int | None = None) -> None:
        super().__init__(num_layers, train_embeddings, seed)

    def choose(self, step: int, count: int) -> list[int]:
        return torch.randperm(count, generator=self._generator(step))[: self.num_layers].tolist()


@register
class LISA(LayersPerStep):
    """Train K blocks, drawn uniformly every `interval` steps; what comes before and after the blocks always trains.

    Source: Pan, Liu, Diao, Pi, Zhang, Han, Zhang, "LISA: Layerwise Importance Sampling for Memory-Efficient Large
    Language Model Fine-Tuning", NeurIPS 2024.

    Args:
        num_layers: K, blocks that train at a time.
        interval: optimizer steps from one choice to the next.
        train_embeddings, seed: see `LayersPerStep`.

    Raises:
        SettingError: as in `LayersPerStep`, or `interval` is not an integer >= 1.
        UserError: when applied: the model's blocks are not recognized.
    """

    name = "lisa"

    def __init__(
        self, num_layers: int = 2, interval: int = 20, train_embeddings: bool = True, seed: int | None = None
    ) -> None:
        super().__init__(num_layers, train_embeddings, seed)
        if type(interval) is not int or interval < 1:
            raise SettingError("interval", interval, "an integer >= 1")
        self.interval = interval

    def _drawn(self, count: int) -> str:
        if self.interval == 1:
            return super()._drawn(count)
        return f"{self.num_layers} of {count} blocks train, drawn every {self.interval} steps"

    def choose(self, step: int, count: int) -> list[int]:
        # Choices that hold for several steps come from the first of them.
        return torch.randperm(count, generator=self._generator(step - step % self.interval))[: self.num_layers].tolist()


@register
class TopLayers(LayersPerStep):
    """Train the K blocks that matter most, found in a short profile: "FT top-K" of the ALaST paper.

    In the first steps everything trains. A block matters by the size of its gradient relative to its weights,
    ‖g‖ / ‖w‖, each step counting as a share of 1 (our choice: the paper says "exploration"). Steps whose gradients are
    not finite do not count. The blocks chosen are part of the checkpoint.

    Args:
        num_layers: K.
        profile_steps: optimizer steps of the profile.
        train_embeddings: see `LayersPerStep`; during the profile as after it.

    Raises:
        SettingError: as in `LayersPerStep`, or `profile_steps` is not an integer >= 1.
        UserError: when applied: the model's blocks are not recognized; in `step_end` of the profile: the gradients have
            been set to None already.
    """

    name = "top_layers"
    needs = LayersPerStep.needs | {Needs.GRADIENTS_AT_STEP_END}
    cost_steps = 1

    def __init__(self, num_layers: int = 3, profile_steps: int = 10, train_embeddings: bool = False) -> None:
        super().__init__(num_layers, train_embeddings, None)
        if type(profile_steps) is not int or profile_steps < 1:
            raise SettingError("profile_steps", profile_steps, "an integer >= 1")
        self.profile_steps = profile_steps
        self._steps = 0
        self._shares: list[float] = []
        self._top: list[int] = []

    @property
    def warmup_steps(self) -> int:  # type: ignore[override]
        return self.profile_steps - self._steps

    def _drawn(self, count: int) -> str:
        return f"{self.num_layers} of {count} blocks train, chosen after {self.profile_steps} steps of all blocks"

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
        if not math.isfinite(total):
            return  # an overflow in fp16: the optimizer skips this step, and the profile takes another one
        shares = [size / total if total else 0.0 for size in sizes]
        self._shares = [a + b for a, b in zip(self._shares or [0.0] * len(shares), shares, strict=True)]
        self._steps += 1
        if self._steps == self.profile_steps:
            ranked = sorted(range(len(shares)), key=lambda index: (-self._shares[index], index))
            self._top = sorted(ranked[: self.num_layers])

    def remove(self, model: nn.Module) -> None:
        super().remove(model)
        self._steps, self._shares, self._top = 0, [], []  # a new model gets a new profile

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self._steps, "shares": list(self._shares), "top": list(self._top)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._steps, self._shares = state_dict["steps"], list(state_dict["shares"])
        self._top = list(state_dict["top"])


def _gradient_size(parameters: list[nn.Parameter]) -> Tensor:
    """Return ‖g‖ / ‖w‖ of all parameters of a block together.

    Raises:
        UserError: the gradients have been set to None already.
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
