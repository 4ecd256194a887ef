"""Methods: small parts, each on one axis of a training step, that can be stacked.

Every class of every method can be imported from here (``from efficient_ft.methods import LBPWHT, BackRazor``);
`METHODS` has them by the name they have on the command line.
"""

from typing import Any

from efficient_ft.methods.base import Applied, Method, apply_methods, in_order, plain_state_dict
from efficient_ft.methods.declarations import Adds, Axis, Exactness, Needs, PlanCandidate
from efficient_ft.methods.optimizer_check import check_optimizer
from efficient_ft.methods.registry import METHODS, own_classes, register
from efficient_ft.methods.stack import check_stack
from efficient_ft.models.view import ModelView, Reason, Skipped

__all__ = [
    "METHODS",
    "Adds",
    "Applied",
    "Axis",
    "Exactness",
    "Method",
    "ModelView",
    "Needs",
    "PlanCandidate",
    "Reason",
    "Skipped",
    "apply_methods",
    "check_optimizer",
    "check_stack",
    "in_order",
    "plain_state_dict",
    "register",
]


def __getattr__(name: str) -> Any:
    """Find the classes of this package's methods, which register themselves, on first use."""
    if not name.startswith("_"):
        found = own_classes().get(name)
        if found is not None:
            return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *own_classes()])
