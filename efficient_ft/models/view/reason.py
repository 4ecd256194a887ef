"""Why a part of a model is left as it is."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Reason(Enum):
    """Why a part of a model is left as it is; the value is the text that reports show.

    The first group is found by the view of the model, the second decided by a method. A method that needs a reason
    which is not here uses `OTHER` with a detail.
    """

    HEAD = "the head"
    NEW = "new, outside of the pretrained network"
    STEM = "the stem or patch embedding"
    GROUPED_CONVOLUTION = "a depthwise or grouped convolution"
    SPATIAL_CONVOLUTION = "a convolution that is not 1×1 with stride 1"
    NOT_CALLED = "its forward is not called by the model"
    NOT_FROM_IMAGES = "its input does not come from the images"
    SINGLE_POSITION = "a map of a single position"
    NO_TOKEN_DIMENSION = "an input without a token dimension"
    NO_GRID = "tokens without positions on a grid of the model"
    ROUTED = "its input is the tokens routed to an expert, from any images"

    FROZEN = "frozen by the selection"
    NOT_CHOSEN = "not chosen"
    NOT_ATTENTION = "not in an attention module"
    OTHER_FORM = "a module of another form"
    TOO_NARROW = "no wider than the rank"
    EXACT_IS_CHEAPER = "exact is cheaper"
    AS_PUBLISHED = "left out, as published"
    UNPACKED_OPERATION = "dense: its operation is not one of those that are packed"
    NO_EFFECT = "its setting has no effect here"
    OTHER = "for another reason"


@dataclass(frozen=True)
class Skipped:
    """A part of a model that a method leaves as it is.

    Args:
        reason: why, for code to read.
        detail: why, for people to read; empty: the reason's own text.
    """

    reason: Reason
    detail: str = ""

    def __str__(self) -> str:
        return self.detail or self.reason.value
