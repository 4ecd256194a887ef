"""Test kit for methods: contracts, small models for testing the contracts, and training steps.

Running the contracts requires pytest (`pip install efficient-ft[dev]`). Importing this package does not require pytest.
"""

from efficient_ft.testing.contracts import MethodContracts, counted_probes, worked_on_or_refused
from efficient_ft.testing.models import CLASSES, MODELS, USUAL, SmallModel, batch_of, lively, model_of
from efficient_ft.testing.rows import Instead, Reference, Row
from efficient_ft.testing.steps import Gradients, evaluate, gradients, largest_difference, stir, train_a_little, warm_up

__all__ = [
    "CLASSES",
    "MODELS",
    "USUAL",
    "Gradients",
    "Instead",
    "MethodContracts",
    "Reference",
    "Row",
    "SmallModel",
    "batch_of",
    "counted_probes",
    "evaluate",
    "gradients",
    "largest_difference",
    "lively",
    "model_of",
    "stir",
    "train_a_little",
    "warm_up",
    "worked_on_or_refused",
]
