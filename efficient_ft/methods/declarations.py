"""Declarations of methods, as enumerations: code reads these, never the text of a message."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import Any


class Axis(StrEnum):
    """The question that a method answers. A stack has at most one method on each axis."""

    SELECTION = "selection"
    ADAPTERS = "adapters"
    BACKPROP = "backprop"
    MEMORY = "memory"
    TOKENS = "tokens"
    PATCHES = "patches"

    @property
    def does(self) -> str:
        """The verb phrase for its methods, in the plural."""
        return _DOES[self]


_DOES = {
    Axis.SELECTION: "select what trains",
    Axis.ADAPTERS: "add modules to the model",
    Axis.BACKPROP: "replace the backward pass",
    Axis.MEMORY: "decide how activations are kept",
    Axis.TOKENS: "decide which tokens are passed on",
    Axis.PATCHES: "choose the patches that enter the blocks",
}

#: A selection decides what trains before adapters freeze what they adapt; low-rank backward then applies to the
#: adapters' base layers; packers wrap what is left to save; token methods rewrite whole blocks; patches are left out
#: before all of that.
ORDER_OF_APPLICATION: tuple[Axis, ...] = (
    Axis.SELECTION,
    Axis.ADAPTERS,
    Axis.BACKPROP,
    Axis.MEMORY,
    Axis.TOKENS,
    Axis.PATCHES,
)

#: For a method on an axis, the axes that must not have been applied before it. Elsewhere the order has no effect.
MUST_COME_BEFORE: dict[Axis, frozenset[Axis]] = {
    Axis.SELECTION: frozenset({Axis.ADAPTERS}),
    Axis.ADAPTERS: frozenset({Axis.BACKPROP}),
}


class Adds(StrEnum):
    """Additions of a method to a model or to its training step."""

    MODULES = "modules"  # modules with parameters of their own
    LOSS = "loss"  # a loss of its own (`Method.total_loss`)
    TOKEN_DROPPING = "token_dropping"  # fewer tokens; each kept one has a grid position
    TOKEN_MERGING = "token_merging"  # fewer tokens, without grid positions
    LOW_RANK_LAYERS = "low_rank_layers"  # layers with a low-rank backward pass
    SPARSE_WEIGHTS = "sparse_weights"  # layers that compute with part of their weights


class Needs(StrEnum):
    """Needs of a method: properties of a model, or an option of the training loop.

    Those of the model are checked before anything is changed, in the order given here.
    """

    BLOCKS = "blocks"  # blocks that the view recognizes
    CLASSIFIER = "classifier"  # a classifier
    CLASS_TOKEN = "class_token"  # a class token, whose attention ranks the patch tokens
    TOKEN_GRID = "token_grid"  # one grid of more than one position, the same from block to block
    FIND_UNUSED_PARAMETERS = "find_unused_parameters"  # DistributedDataParallel with find_unused_parameters=True
    GRADIENTS_AT_STEP_END = "gradients_at_step_end"  # the gradients of all that trains in `step_end`


class Exactness(IntEnum):
    """How close the updates of a recipe are to those of plain full fine-tuning; the lowest value is preferred."""

    EXACT = 0  # the same up to rounding
    NEAR = 1  # everything trains; the gradient's cosine with the exact one is at least .98, or moments have 8 bits
    APPROXIMATE = 2  # everything trains, with a coarser gradient or optimizer
    PART = 3  # a part of the network or an addition to it trains
    UNKNOWN = 4  # neither declared nor measured


@dataclass(frozen=True)
class PlanCandidate:
    """Settings of a method that plans examine (``efficient-ft plan``), as its class declares them in `candidates`.

    Attributes:
        settings: settings of the method that differ from the defaults.
        exactness: how close its updates are to those of plain full fine-tuning. A plan measures the gradient's cosine
            where weights and images are present regardless of the declaration, unless it is exact.
        evidence: the test or measurement that shows the exactness; needed for `Exactness.EXACT`.
        time_factor: time of a step relative to a step with the same FLOPs and without the method.
    """

    settings: Mapping[str, Any] = field(default_factory=dict)
    exactness: Exactness = Exactness.UNKNOWN
    evidence: str = ""
    time_factor: float = 1.0
