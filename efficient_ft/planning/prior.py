"""Results of finished studies, from which plans and searches take losses of accuracy and learning rates.

``python scripts/docs.py --record prior`` writes prior.json from the studies in ``results``.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import nn

NAME = "prior.json"
_FILE = Path(__file__).with_name(NAME)

#: A study counts half as much for every halving or doubling of the image size, and for every kind of network that
#: differs, `_OTHER_KIND` times as much.
_OTHER_KIND = 0.1


@dataclass(frozen=True)
class Studied:
    """A row of a finished study, at its best learning rate.

    Attributes:
        row: name of the row.
        study: title of the study.
        folder: folder of the study, relative to the repository.
        arguments: settings of the row's methods, as on the command line.
        model: name of the network.
        kind: kind of the network (see `network_kind`).
        blocks: number of blocks of the network.
        image_size: height of the images in pixels, or None for texts.
        task: kind of task.
        pretrained: True if the network was pretrained.
        lr: best learning rate, or None if the study tunes another setting.
        accuracy: mean test accuracy over the seeds, in percent.
        points_lost: mean loss of test accuracy relative to full fine-tuning over the same seeds, in percentage points,
            or None if the study has no row ``full``.
        seeds: number of seeds.
    """

    row: str
    study: str
    folder: str
    arguments: tuple[str, ...]
    model: str
    kind: str
    blocks: int
    image_size: int | None
    task: str
    pretrained: bool
    lr: float | None
    accuracy: float
    points_lost: float | None
    seeds: int


@functools.cache
def studied() -> tuple[Studied, ...]:
    """Return all rows of the finished studies."""
    rows = json.loads(_FILE.read_text(encoding="utf-8"))
    return tuple(Studied(**{**row, "arguments": tuple(row["arguments"])}) for row in rows)


def points_lost(row: str | None) -> dict[str, float]:
    """Return the losses of test accuracy relative to full fine-tuning, in percentage points, keyed by study.

    A loss is negative if the recipe is better than full fine-tuning. The result is empty if there is no study.
    """
    return {one.study: one.points_lost for one in studied() if one.row == row and one.points_lost is not None}


def network_kind(network: nn.Module) -> str:
    """Return ``transformer`` if most parameters belong to linear layers, and ``convolutional`` otherwise."""
    sizes = {"transformer": 0, "convolutional": 0}
    for module in network.modules():
        if isinstance(module, nn.Linear | nn.Conv2d):
            kind = "transformer" if isinstance(module, nn.Linear) else "convolutional"
            sizes[kind] += sum(parameter.numel() for parameter in module.parameters(recurse=False))
    return max(sizes, key=sizes.__getitem__)


def closeness(row: Studied, kind: str, image_size: int) -> float:
    """Return the weight (0–1] of a studied row for a network of the given kind and image height in pixels."""
    size = 1.0 if row.image_size is None else 0.5 ** abs(math.log2(row.image_size / image_size))
    return size * (1.0 if row.kind == kind else _OTHER_KIND)


def weighted_mean(values: Sequence[tuple[float, float]]) -> float:
    """Return the mean of the pairs (value, weight)."""
    return sum(value * weight for value, weight in values) / sum(weight for _, weight in values)
