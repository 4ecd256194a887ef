"""The limits and the result of a plan."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from efficient_ft.planning.options import Excluded, Option

#: Default planning time in seconds.
PLANNING = 60.0


@dataclass(frozen=True)
class Limits:
    """Limits of a plan.

    Args:
        memory_bytes: budget for the resident memory of the process or, on a GPU, for the memory reserved on the device.
        seconds: budget for the training time in seconds. If None, there is no limit.
        loss: maximum loss of test accuracy relative to full fine-tuning, in percentage points.
        split_batch: True if the batch may be split into micro-batches with accumulated gradients.
        planning_seconds: time in seconds after which no further recipe is examined, except the smallest recipes.
    """

    memory_bytes: int
    seconds: float | None = None
    loss: float = 1.0
    split_batch: bool = False
    planning_seconds: float = PLANNING


@dataclass(frozen=True)
class Plan:
    """Result of planning.

    Attributes:
        memory_bytes: the requested budget or the memory of the machine or container, whichever is smaller.
        asked_bytes: requested budget.
        base_bytes: memory of the process before the model is created (interpreter and libraries).
        allocator: allocator of the process.
        device: device on which to run.
        options: recipes that fit, sorted by exactness class and step time.
        excluded: other recipes.
        recommended: recommended option, or None if no recipe is within the limits.
        smallest_bytes: smallest budget that would suffice for one of the examined recipes.
        smallest: name of the recipe that needs the smallest budget.
        steps: number of optimizer steps of the run, or None if there are no images.
        seconds: duration of planning in seconds.
        planning_seconds: limit of the planning time in seconds.
    """

    memory_bytes: int
    asked_bytes: int
    base_bytes: int
    allocator: str
    device: str
    options: tuple[Option, ...]
    excluded: tuple[Excluded, ...]
    recommended: Option | None
    smallest_bytes: int
    smallest: str
    steps: int | None
    seconds: float
    planning_seconds: float = PLANNING

    @property
    def not_examined(self) -> list[str]:
        """Names of the recipes that were not examined because the planning time limit was reached."""
        return [one.name for one in self.excluded if not one.examined]

    @property
    def examined(self) -> int:
        """Number of examined recipes."""
        return len(self.options) + len(self.excluded) - len(self.not_examined)

    def as_dict(self) -> dict[str, Any]:
        """Return the attributes as a JSON-serializable dict."""
        return asdict(self)


@dataclass(frozen=True)
class Examined:
    """Recipe that has just been examined.

    Attributes:
        number: number of the recipe, counted from 1.
        of: total number of recipes.
        name: name of the recipe.
        needed_bytes: budget that the recipe needs, or None if the recipe cannot be used with this network.
        fits: True if the budget is sufficient.
    """

    number: int
    of: int
    name: str
    needed_bytes: int | None
    fits: bool
