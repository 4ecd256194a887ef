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
        """Phrase that describes the effect of this axis's methods. Used in messages."""
        return _DOES[self]


_DOES = {
    Axis.SELECTION: "select the parameters to train",
    Axis.ADAPTERS: "add modules to the model",
    Axis.BACKPROP: "replace the backward pass",
    Axis.MEMORY: "define how activations are saved",
    Axis.TOKENS: "drop or merge tokens",
    Axis.PATCHES: "select the patches that enter the blocks",
}

#: Order in which methods are applied, by axis. Selection methods set `requires_grad`. Adapters then freeze the layers
#: that they adapt. Low-rank methods change the base layers of the adapters. Memory methods pack the tensors that are
#: still saved for the backward pass. Token methods replace the forward passes of entire blocks, and patch methods drop
#: patches before the first block.
ORDER_OF_APPLICATION = tuple(Axis)
#: Mapping from an axis to the axes whose methods must be applied later. Methods on other axes may be applied in any
#: order.
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

    `Method.apply` checks the requirements on the model in the order of this enumeration before the model is changed.
    """

    BLOCKS = "blocks"  # transformer blocks or stages that `ModelView` recognizes
    CLASSIFIER = "classifier"  # a classifier that can be trained
    CLASS_TOKEN = "class_token"  # a class token whose attention ranks the patch tokens
    TOKEN_GRID = "token_grid"  # a token grid that has more than one position and is the same for all blocks
    FIND_UNUSED_PARAMETERS = "find_unused_parameters"  # DistributedDataParallel with find_unused_parameters=True
    GRADIENTS_AT_STEP_END = "gradients_at_step_end"  # gradients that still exist in `step_end`


class Exactness(IntEnum):
    """Closeness of the parameter updates to those of plain full fine-tuning.

    ``efficient-ft plan`` prefers the lowest value.
    """

    EXACT = 0  # the updates are equal up to rounding
    NEAR = 1  # all parameters are trained; the cosine with the exact gradient is >= 0.98, or the moments have 8 bits
    APPROXIMATE = 2  # all parameters are trained, with a less accurate gradient or optimizer
    PART = 3  # only a part of the network or only added modules are trained
    UNKNOWN = 4  # the exactness is neither declared nor measured


@dataclass(frozen=True)
class PlanCandidate:
    """Settings of a method that ``efficient-ft plan`` examines. A method class lists its candidates in `candidates`.

    Attributes:
        settings: settings that differ from the method's defaults.
        exactness: closeness of the updates to those of plain full fine-tuning. For all values except `Exactness.EXACT`,
            ``efficient-ft plan`` also measures the cosine with the exact gradient if weights and images are available.
        evidence: test or measurement that demonstrates the exactness. Evidence is required for `Exactness.EXACT`.
        time_factor: ratio of the step time to the time of a step that has the same FLOPs but does not use the method.
    """

    settings: Mapping[str, Any] = field(default_factory=dict)
    exactness: Exactness = Exactness.UNKNOWN
    evidence: str = ""
    time_factor: float = 1.0
