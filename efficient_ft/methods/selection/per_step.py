"""Selection methods that train different blocks in different steps. Blocks that are not trained in a step are frozen.

Within a step, frozen parameters have ``requires_grad = False``, so that no gradients are computed for these parameters.
Below the lowest trainable parameter, autograd records no graph and saves no tensors. Between steps, all parameters that
may be trained require gradients. The optimizer can therefore be created with all of these parameters, and its parameter
groups do not change. Random choices are derived from the seed and the number of the step.
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
from efficient_ft.methods.base import Applied
from efficient_ft.methods.checks import check_bool, check_integer
from efficient_ft.methods.declarations import Needs
from efficient_ft.methods.registry import register
from efficient_ft.methods.selection.static import Selection, head_in_words
from efficient_ft.methods.summary import are, count, ranges
from efficient_ft.models.trained import trainable
from efficient_ft.models.view import ModelView, Reason, Skipped, parameters_under


class LayersPerStep(Selection):
    """Base class of the selection methods that train different blocks in different steps.

    A subclass implements `choose`, which returns the blocks to train. The head and the norm before the head are trained
    in every step. Within a step, the parameters of the blocks that were not chosen are frozen. Between steps, all
    parameters that may be trained require gradients.

    Args:
        num_layers: number K of blocks to train per step.
        train_embeddings: if True, the modules before the blocks (patch embedding, class token, positions) are trained
            in every step. If False, these modules are frozen, and the backward pass of a step ends at the lowest
            trained block.
        seed: seed for the random choices. If None, the seed of the run is used. Outside of a run, None means 0.

    Raises:
        SettingError: If a setting is invalid. Also raised by `apply` if the model has fewer blocks than `num_layers`.
        UserError: Raised by `apply` if the model's blocks are not recognized.
    """

    needs = frozenset({Needs.BLOCKS, Needs.FIND_UNUSED_PARAMETERS})
    acts_per_step = True
    #: Blocks are sampled at random in each step, so that costs differ between steps. The cost is averaged over this
    #: number of steps.
    cost_steps = 8

    def __init__(self, num_layers: int, train_embeddings: bool, seed: int | None) -> None:
        super().__init__()
        check_integer("num_layers", num_layers)
        check_bool("train_embeddings", train_embeddings)
        if seed is not None and (type(seed) is not int or seed < 0):
            raise SettingError("seed", seed, "null (the seed of the run) or an integer >= 0")
        self.num_layers, self.train_embeddings, self.seed = num_layers, train_embeddings, seed
        self._blocks: dict[str, nn.Module] = {}
        #: Trainable parameters of each block after all methods have been applied. Adapters may have frozen some
        #: parameters.
        self._trainable: dict[str, list[nn.Parameter]] | None = None
        self._trained: tuple[int, ...] = ()

    @abstractmethod
    def choose(self, step: int, count: int) -> list[int]:
        """Return the indices of the blocks to train in a step, counted from 0.

        Random choices must depend only on `self.seed` and `step`, so that all processes and resumed runs make the same
        choices.

        Args:
            step: number of the optimizer step, counted from 0.
            count: number of blocks in the model.
        """

    def chosen(self, view: ModelView) -> dict[str, Tensor]:
        """Return a mapping from full names to the parameters that may be trained."""
        if self.train_embeddings:
            return dict(view.model.named_parameters())
        return parameters_under(view.model, [*view.blocks, *view.tail]) | view.new_parameters()

    def _apply(self, model: nn.Module, view: ModelView) -> Applied:
        self._check_count(view)
        super()._apply(model, view)
        self._blocks, self._trainable = {name: model.get_submodule(name) for name in view.blocks}, None
        frozen = [name for name, trains in trainable(model).items() if not trains]
        why = Skipped(Reason.FROZEN, "frozen because the parameter is before or between the blocks")
        rest = ranges([*(("embeddings",) if self.train_embeddings else ()), "norm", *head_in_words(view)])
        always = f"{rest} {are(1 if rest == 'norm' else 2)} always trained"
        summary = "; ".join([self._drawn(len(view.blocks)), always, *self._notes()])
        return Applied(self.name, view.blocks, dict.fromkeys(frozen, why), summary=summary)

    def _drawn(self, count: int) -> str:
        """Return a phrase about the number of trained blocks out of `count` blocks."""
        return f"{self._share(count)} trained in each step"

    def _share(self, blocks: int) -> str:
        return f"{self.num_layers} of {count(blocks, 'block')} {are(self.num_layers)}"

    def _notes(self) -> tuple[str, ...]:
        return ()

    def _check_count(self, view: ModelView) -> None:
        if self.num_layers > len(view.blocks):
            count = len(view.blocks)
            raise self.setting_error("num_layers", f"an integer from 1 to {count}", f"{view.name} has {count} blocks.")

    def step_begin(self, step: int) -> None:
        super().step_begin(step)
        if self._trainable is None:
            self._trainable = {
                name: [p for p in block.parameters() if p.requires_grad] for name, block in self._blocks.items()
            }
        count = len(self._blocks)
        with unset_fake_temporarily():  # costs are counted on fake tensors, but `choose` requires real tensors
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
    """Train K uniformly sampled blocks in each step, as a control for methods that select blocks by importance.

    Args:
        num_layers, train_embeddings, seed: see `LayersPerStep`.

    Raises:
        SettingError: See `LayersPerStep`.
        UserError: Raised by `apply` if the model's blocks are not recognized.
    """

    name = "uniform_layers"

    def __init__(self, num_layers: int = 9, train_embeddings: bool = True, seed: int | None = None) -> None:
        super().__init__(num_layers, train_embeddings, seed)

    def choose(self, step: int, count: int) -> list[int]:
        return torch.randperm(count, generator=self._generator(step))[: self.num_layers].tolist()


@register
class LISA(LayersPerStep):
    """Train K blocks, sampled uniformly every `interval` steps, and the modules before and after all blocks.

    Source: Pan, Liu, Diao, Pi, Zhang, Han, Zhang, "LISA: Layerwise Importance Sampling for Memory-Efficient Large
    Language Model Fine-Tuning", NeurIPS 2024.

    Args:
        num_layers: number K of blocks to train at a time.
        interval: number of optimizer steps after which new blocks are sampled.
        train_embeddings, seed: see `LayersPerStep`.

    Raises:
        SettingError: If `interval` is not an integer >= 1. See also `LayersPerStep`.
    """

    name = "lisa"

    def __init__(
        self, num_layers: int = 2, interval: int = 20, train_embeddings: bool = True, seed: int | None = None
    ) -> None:
        super().__init__(num_layers, train_embeddings, seed)
        check_integer("interval", interval)
        self.interval = interval

    def _drawn(self, count: int) -> str:
        if self.interval == 1:
            return super()._drawn(count)
        return f"{self._share(count)} trained, sampled every {self.interval} steps"

    def choose(self, step: int, count: int) -> list[int]:
        # The number of the first step in the interval is used, so that the choice is the same in the entire interval.
        return torch.randperm(count, generator=self._generator(step - step % self.interval))[: self.num_layers].tolist()


@register
class TopLayers(LayersPerStep):
    """Train the K most important blocks ("FT top-K" in the ALaST paper). Importance is measured in a short profile.

    All blocks are trained during the profile. The importance of a block is the norm of its gradient relative to the
    norm of its weights, ‖g‖ / ‖w‖. In each step, the importances of all blocks are normalized to a sum of 1. The
    normalized values are summed over the steps of the profile. The paper does not define this measure and only mentions
    "exploration". Steps with non-finite gradients are ignored. Checkpoints contain the selected blocks.

    Args:
        num_layers: number K of blocks to train after the profile.
        profile_steps: number of optimizer steps in the profile.
        train_embeddings: see `LayersPerStep`. This setting applies both during and after the profile.

    Raises:
        SettingError: See `LayersPerStep`. Also raised if `profile_steps` is not an integer >= 1.
        UserError: Raised by `apply` if the model's blocks are not recognized. Raised by `step_end` during the profile
            if the gradients have already been set to None.
    """

    name = "top_layers"
    needs = LayersPerStep.needs | {Needs.GRADIENTS_AT_STEP_END}
    cost_steps = 1

    def __init__(self, num_layers: int = 3, profile_steps: int = 10, train_embeddings: bool = False) -> None:
        super().__init__(num_layers, train_embeddings, None)
        check_integer("profile_steps", profile_steps)
        self.profile_steps = profile_steps
        self._steps = 0
        self._shares: list[float] = []
        self._top: list[int] = []

    @property
    def warmup_steps(self) -> int:  # type: ignore[override]
        return self.profile_steps - self._steps

    def _drawn(self, count: int) -> str:
        return f"{self._share(count)} trained after a profile of {self.profile_steps} steps"

    def choose(self, step: int, count: int) -> list[int]:
        return self._top if self._steps >= self.profile_steps else list(range(count))

    def step_end(self) -> None:
        super().step_end()
        if self._steps >= self.profile_steps or not self._trainable:
            return
        blocks = list(self._trainable.values())  # an entry is empty if adapters have frozen the whole block
        found = iter(torch.stack([_gradient_size(parameters) for parameters in blocks if parameters]).tolist())
        sizes = [next(found) if parameters else 0.0 for parameters in blocks]
        total = sum(sizes)
        if not math.isfinite(total):
            return  # The optimizer skips steps with an fp16 overflow, so that the profile takes longer.
        shares = [size / total if total else 0.0 for size in sizes]
        self._shares = [a + b for a, b in zip(self._shares or [0.0] * len(shares), shares, strict=True)]
        self._steps += 1
        if self._steps == self.profile_steps:
            ranked = sorted(range(len(shares)), key=lambda index: (-self._shares[index], index))
            self._top = sorted(ranked[: self.num_layers])

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self._steps, "shares": list(self._shares), "top": list(self._top)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._steps, self._shares = state_dict["steps"], list(state_dict["shares"])
        self._top = list(state_dict["top"])


def _gradient_size(parameters: list[nn.Parameter]) -> Tensor:
    """Return ‖g‖ / ‖w‖ over all parameters of a block. Raise UserError if the block has no gradients."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    if not gradients:
        raise UserError(
            "method top_layers: the blocks have no gradients at the end of the step. Call step_end() before the"
            " optimizer's zero_grad()."
        )
    weights: list[Tensor] = [p.detach() for p in parameters]
    size = [torch.linalg.vector_norm(torch.stack(torch._foreach_norm(t))) for t in (gradients, weights)]
    return size[0] / size[1].clamp_min(1e-12)
