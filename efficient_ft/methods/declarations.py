"""Declarations of methods as enumerations, which code reads instead of messages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import Any


class Axis(StrEnum):
    """Part of a training step that a method controls. A stack contains at most one method per axis."""

    SELECTION = "selection"
    ADAPTERS = "adapters"
    BACKPROP = "backprop"
    MEMORY = "memory"
    TOKENS = "tokens"
    PATCHES = "patches"

    @property
    def does(self) -> str:
        """Verb phrase for this axis in messages, in the plural."""
        return _DOES[self]


_DOES = {
    Axis.SELECTION: "select the parameters to train",
    Axis.ADAPTERS: "add modules to the model",
    Axis.BACKPROP: "replace the backward pass",
    Axis.MEMORY: "define how activations are saved",
    Axis.TOKENS: "drop or merge tokens",
    Axis.PATCHES: "select the patches that enter the blocks",
}

#: Selections set `requires_grad` before adapters freeze the adapted layers. Low-rank backward then changes the base
#: layers of adapters, and memory methods pack the remaining saved tensors. Token methods replace the forward pass of
#: whole blocks, and patches are dropped before the blocks.
ORDER_OF_APPLICATION = tuple(Axis)
#: Axes that must not be applied before a method on the given axis. The order of other axes has no effect.
MUST_COME_BEFORE: dict[Axis, frozenset[Axis]] = {
    Axis.SELECTION: frozenset({Axis.ADAPTERS}),
    Axis.ADAPTERS: frozenset({Axis.BACKPROP}),
}


class Adds(StrEnum):
    """Additions of a method to the model or the training step."""

    MODULES = "modules"  # modules with parameters
    LOSS = "loss"  # an additional loss (`Method.total_loss`)
    TOKEN_DROPPING = "token_dropping"  # fewer tokens, each with a grid position
    TOKEN_MERGING = "token_merging"  # fewer tokens, without grid positions
    LOW_RANK_LAYERS = "low_rank_layers"  # layers with a low-rank backward pass
    SPARSE_WEIGHTS = "sparse_weights"  # layers that use only a subset of their weights


class Needs(StrEnum):
    """Requirements of a method on the model or the training loop.

    `Method.apply` checks the requirements on the model in this order before it changes the model.
    """

    BLOCKS = "blocks"  # transformer blocks or stages that the view recognizes
    CLASSIFIER = "classifier"  # a classifier
    CLASS_TOKEN = "class_token"  # a class token whose attention ranks the patch tokens
    TOKEN_GRID = "token_grid"  # one grid with more than one position for all blocks
    FIND_UNUSED_PARAMETERS = "find_unused_parameters"  # DistributedDataParallel with find_unused_parameters=True
    GRADIENTS_AT_STEP_END = "gradients_at_step_end"  # gradients of all trained parameters in `step_end`


class Exactness(IntEnum):
    """Closeness of the updates to the updates of plain full fine-tuning. A plan prefers the lowest value."""

    EXACT = 0  # equal up to rounding
    NEAR = 1  # all parameters train; cosine with the exact gradient >= 0.98, or 8-bit moments
    APPROXIMATE = 2  # all parameters train, with a coarser gradient or optimizer
    PART = 3  # only a part of the network or added modules train
    UNKNOWN = 4  # neither declared nor measured


@dataclass(frozen=True)
class PlanCandidate:
    """Settings of a method that ``efficient-ft plan`` examines. A method class lists them in `candidates`.

    Attributes:
        settings: settings that differ from the method's defaults.
        exactness: closeness of the updates to the updates of plain full fine-tuning. Unless it is `Exactness.EXACT`, a
            plan also measures the cosine with the exact gradient if weights and images are available.
        evidence: test or measurement that demonstrates the exactness; required for `Exactness.EXACT`.
        time_factor: step time relative to a step with the same FLOPs and without the method.
    """

    settings: Mapping[str, Any] = field(default_factory=dict)
    exactness: Exactness = Exactness.UNKNOWN
    evidence: str = ""
    time_factor: float = 1.0
