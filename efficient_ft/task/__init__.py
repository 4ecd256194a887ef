"""The tasks: what comes in, what the loss is, and how predictions are judged."""

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

#: By name.
TASKS: dict[str, Task] = {task.name: task for task in (Classification(), Segmentation(), TextClassification())}
