"""The tasks: run a network, compute the loss, and measure the predictions."""

from __future__ import annotations

from efficient_ft.task.base import Inputs, Scores, Task, moved, tensors_of
from efficient_ft.task.classification import Classification
from efficient_ft.task.segmentation import Segmentation
from efficient_ft.task.text import TextClassification

__all__ = [
    "TASKS",
    "Classification",
    "Inputs",
    "Scores",
    "Segmentation",
    "Task",
    "TextClassification",
    "moved",
    "tensors_of",
]

#: The tasks by name; `training.kinds.registry.register` adds those of other packages.
TASKS: dict[str, Task] = {task.name: task for task in (Classification(), Segmentation(), TextClassification())}
