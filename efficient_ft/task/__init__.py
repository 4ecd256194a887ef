"""The tasks: what comes in, what the loss is, and how predictions are judged."""

from __future__ import annotations

from efficient_ft.task.base import Inputs, Scores, Task
from efficient_ft.task.classification import Classification
from efficient_ft.task.segmentation import Segmentation

__all__ = ["TASKS", "Classification", "Inputs", "Scores", "Segmentation", "Task"]

#: By name.
TASKS: dict[str, Task] = {task.name: task for task in (Classification(), Segmentation())}
