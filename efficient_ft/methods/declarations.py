"""Declarations of methods as enumerations, which code reads instead of messages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import Any


class Axis(StrEnum):
    """The part of a training step that a method decides on. A stack has at most one method on each axis."""

    SELECTION = "selection"
    ADAPTERS = "adapters"
    BACKPROP = "backprop"
    MEMORY = "memory"
    TOKENS = "tokens"
    PATCHES = "patches"

    @property
    def does(self) -> str:
        """The verb phrase of this axis in messages, in the plural."""
        return _DOES[self]


_DOES = {
    Axis.SELECTION: "select what trains",
    Axis.ADAPTERS: "add modules to the model",
    Axis.BACKPROP: "replace the backward pass",
    Axis.MEMORY: "decide how activations are kept",
    Axis.TOKENS: "decide which tokens are passed on",
    Axis.PATCHES: "choose the patches that enter the blocks",
}

#: Selections set `requires_grad` before adapters freeze the layers that they adapt. Low-rank backward then applies to
#: the adapters' base layers, and memory methods wrap the remaining saved tensors. Token methods replace the forward
#: pass of whole blocks, and patches are dropped before the blocks.
ORDER_OF_APPLICATION: tuple[Axis, ...] = (
    Axis.SELECTION,
    Axis.ADAPTERS,
    Axis.BACKPROP,
    Axis.MEMORY,
    Axis.TOKENS,
    Axis.PATCHES,
)

#: By axis of a method, the axes that must not be applied before it. The order of other axes has no effect.
MUST_COME_BEFORE: dict[Axis, frozenset[Axis]] = {
    Axis.SELECTION: frozenset({Axis.ADAPTERS}),
    Axis.ADAPTERS: frozenset({Axis.BACKPROP}),
}


class Adds(StrEnum):
    """Additions of a method to a model or to its training step."""

    MODULES = "modules"  # modules with parameters
    LOSS = "loss"  # a further loss (`Method.total_loss`)
    TOKEN_DROPPING = "token_dropping"  # fewer tokens, each with a grid position
    TOKEN_MERGING = "token_merging"  # fewer tokens, without grid positions
    LOW_RANK_LAYERS = "low_rank_layers"  # layers with a low-rank backward pass
    SPARSE_WEIGHTS = "sparse_weights"  # layers that compute with a part of their weights


class Needs(StrEnum):
    """Needs of a method: properties of the model or options of the training loop.

    `Method.apply` checks the properties of the model, in this order, before it changes anything.
    """

    BLOCKS = "blocks"  # transformer blocks or stages that the view recognizes
    CLASSIFIER = "classifier"  # a classifier
    CLASS_TOKEN = "class_token"  # a class token, whose attention ranks the patch tokens
    TOKEN_GRID = "token_grid"  # one grid of more than one position, the same from block to block
    FIND_UNUSED_PARAMETERS = "find_unused_parameters"  # DistributedDataParallel with find_unused_parameters=True
    GRADIENTS_AT_STEP_END = "gradients_at_step_end"  # gradients of all trained parameters in `step_end`


class Exactness(IntEnum):
    """Closeness of the updates to those of plain full fine-tuning; a plan prefers the lowest value."""

    EXACT = 0  # equal up to rounding
    NEAR = 1  # everything trains; the gradient's cosine with the exact one is >= 0.98, or moments have 8 bits
    APPROXIMATE = 2  # everything trains, with a coarser gradient or optimizer
    PART = 3  # a part of the network or an added module trains
    UNKNOWN = 4  # neither declared nor measured


@dataclass(frozen=True)
class PlanCandidate:
    """Settings of a method that ``efficient-ft plan`` examines; a class lists them in `candidates`.

    Attributes:
        settings: settings of the method that differ from the defaults.
        exactness: closeness of the updates to those of plain full fine-tuning. Unless it is exact, a plan also measures
            the gradient's cosine if weights and images are available.
        evidence: the test or measurement that shows the exactness; required for `Exactness.EXACT`.
        time_factor: time of a step relative to a step with the same FLOPs and without the method.
    """

    settings: Mapping[str, Any] = field(default_factory=dict)
    exactness: Exactness = Exactness.UNKNOWN
    evidence: str = ""
    time_factor: float = 1.0
