"""Enumerations and classes for the declarations of methods."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import Any


class Axis(StrEnum):
    """Part of a training step that a method controls. At most one method per axis can be applied to a model."""

    SELECTION = "selection"
    ADAPTERS = "adapters"
    BACKPROP = "backprop"
    MEMORY = "memory"
    TOKENS = "tokens"
    PATCHES = "patches"

    @property
    def does(self) -> str:
        """Phrase that states in messages what methods on this axis do."""
        return _DOES[self]


_DOES = {
    Axis.SELECTION: "select the parameters to train",
    Axis.ADAPTERS: "add modules to the model",
    Axis.BACKPROP: "replace the backward pass",
    Axis.MEMORY: "define how activations are saved",
    Axis.TOKENS: "drop or merge tokens",
    Axis.PATCHES: "select the patches that enter the blocks",
}

#: Order in which methods are applied, by axis. Selections set `requires_grad`, and adapters then freeze the adapted
#: layers. Low-rank methods change the base layers of the adapters. Memory methods pack the tensors that are still
#: saved. Token methods replace the forward passes of entire blocks, and patch methods drop patches before the first
#: block.
ORDER_OF_APPLICATION = tuple(Axis)
#: For each axis, the axes that must be applied after it. All other pairs of axes may be applied in any order.
MUST_COME_BEFORE: dict[Axis, frozenset[Axis]] = {
    Axis.SELECTION: frozenset({Axis.ADAPTERS}),
    Axis.ADAPTERS: frozenset({Axis.BACKPROP}),
}


class Adds(StrEnum):
    """Addition of a method to the model or to the training step."""

    MODULES = "modules"  # modules with parameters
    LOSS = "loss"  # an additional loss (`Method.total_loss`)
    TOKEN_DROPPING = "token_dropping"  # a smaller number of tokens, each with a grid position
    TOKEN_MERGING = "token_merging"  # a smaller number of tokens, without grid positions
    LOW_RANK_LAYERS = "low_rank_layers"  # layers with a low-rank backward pass
    SPARSE_WEIGHTS = "sparse_weights"  # layers that use only a subset of their weights


class Needs(StrEnum):
    """Requirement that a method has on the model or on the training loop.

    Before it changes the model, `Method.apply` checks the requirements on the model in the order of this enumeration.
    """

    BLOCKS = "blocks"  # transformer blocks or stages that `ModelView` recognizes
    CLASSIFIER = "classifier"  # a classifier that can be trained
    CLASS_TOKEN = "class_token"  # a class token whose attention ranks the patch tokens
    TOKEN_GRID = "token_grid"  # a token grid with more than one position, the same for all blocks
    FIND_UNUSED_PARAMETERS = "find_unused_parameters"  # DistributedDataParallel with find_unused_parameters=True
    GRADIENTS_AT_STEP_END = "gradients_at_step_end"  # gradients that still exist in `step_end`


class Exactness(IntEnum):
    """Closeness of the parameter updates to those of plain full fine-tuning.

    ``efficient-ft plan`` prefers the lowest value.
    """

    EXACT = 0  # equal up to rounding
    NEAR = 1  # all parameters are trained; cosine with the exact gradient >= 0.98, or 8-bit moments
    APPROXIMATE = 2  # all parameters are trained, with a coarser gradient or optimizer
    PART = 3  # only a part of the network or only added modules are trained
    UNKNOWN = 4  # neither declared nor measured


@dataclass(frozen=True)
class PlanCandidate:
    """Settings of a method that ``efficient-ft plan`` examines. A method class lists its candidates in `candidates`.

    Attributes:
        settings: settings that differ from the method's defaults.
        exactness: closeness of the updates to those of plain full fine-tuning. Unless the value is `Exactness.EXACT`,
            ``efficient-ft plan`` also measures the cosine with the exact gradient if weights and images are available.
        evidence: test or measurement that demonstrates the exactness. Required for `Exactness.EXACT`.
        time_factor: ratio of the step time to the time of a step that has the same FLOPs but does not use the method.
    """

    settings: Mapping[str, Any] = field(default_factory=dict)
    exactness: Exactness = Exactness.UNKNOWN
    evidence: str = ""
    time_factor: float = 1.0
