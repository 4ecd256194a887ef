"""Tasks. A task runs a network, computes its loss, and evaluates its predictions."""

from __future__ import annotations

from efficient_ft.core.inputs import Inputs
from efficient_ft.task.base import Scores, Task, moved, tensors_of, total_weight
from efficient_ft.task.classification import Classification, TextClassification
from efficient_ft.task.multilabel import MultiLabel
from efficient_ft.task.regression import Regression
from efficient_ft.task.segmentation import Segmentation

__all__ = [
    "TASKS",
    "Classification",
    "Inputs",
    "MultiLabel",
    "Regression",
    "Scores",
    "Segmentation",
    "Task",
    "TextClassification",
    "moved",
    "tensors_of",
    "total_weight",
]

#: Mapping from names to tasks. `training.kinds.registry.register` adds the tasks of other packages.
TASKS: dict[str, Task] = {
    task.name: task for task in (Classification(), Segmentation(), TextClassification(), MultiLabel(), Regression())
}
