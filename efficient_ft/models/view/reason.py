"""Reasons why a part of a model is not changed."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Reason(Enum):
    """Reason why a part of a model is not changed. The value is the text in reports.

    The view of the model finds the first group; methods decide the second group. A method with another reason uses
    `OTHER` with a detail.
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
    OTHER_FORM = "a module of a different structure"
    TOO_NARROW = "no wider than the rank"
    EXACT_IS_CHEAPER = "exact is cheaper"
    AS_PUBLISHED = "excluded, as in the paper"
    UNPACKED_OPERATION = "dense: packing does not support its operation"
    NO_EFFECT = "its setting has no effect here"
    OTHER = "for another reason"


@dataclass(frozen=True)
class Skipped:
    """A part of a model that a method does not change.

    Args:
        reason: the reason, for code.
        detail: the reason, for people; empty: the text of `reason`.
    """

    reason: Reason
    detail: str = ""

    def __str__(self) -> str:
        return self.detail or self.reason.value
