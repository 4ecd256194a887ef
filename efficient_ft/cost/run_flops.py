"""Count the FLOPs of a training run while it runs."""

from __future__ import annotations

import math
from contextlib import ExitStack
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from efficient_ft.cost.meter import operation_flops

#: Approximate maximum number of counted batches if the cost of a step changes. The counted batches are evenly spaced.
COUNTED_BATCHES = 1000


class FlopsCounter(TorchDispatchMode):
    """Count the FLOPs of the operations that run inside a ``with`` block. The attribute `flops` contains the sum."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        self.flops += operation_flops(func, args, kwargs, out)
        return out


class RunFlops:
    """Sum the FLOPs of a run's forward and backward passes. The formulas are those of `cost.executed`.

    A batch that is not counted adds the FLOPs of the last counted batch of its kind. If all batches of a kind have the
    same cost, one batch of each kind is counted and the sum is exact. Otherwise, every n-th batch is counted.

    Args:
        batches: number of training batches in the run.
        same: True if all batches of a kind have the same cost.

    Attributes:
        total: number of FLOPs so far.
        counted: number of counted batches.
    """

    def __init__(self, batches: int, same: bool) -> None:
        self.interval = None if same else math.ceil(batches / COUNTED_BATCHES)
        self.total, self.counted = 0, 0
        self._of_kind: dict[str, int] = {}
        self._kind = ""
        self._counter: FlopsCounter | None = None
        self._counting = ExitStack()

    def begin(self, number: int, kind: str) -> None:
        """Begin a batch. Call this method before the forward pass.

        Args:
            number: index of the training batch in the run, starting at 0.
            kind: key that identifies everything on which the cost depends, for example the shape and the data set.
        """
        self.close()
        self._kind = kind
        due = kind not in self._of_kind or (self.interval is not None and number % self.interval == 0)
        self._counter = self._counting.enter_context(FlopsCounter()) if due else None

    def end(self) -> None:
        """End the batch. Call this method after the backward pass."""
        self._counting.close()
        if self._counter is not None:
            self._of_kind[self._kind] = self._counter.flops
            self.counted += 1
        self.total += self._of_kind[self._kind]
        self._counter = None

    def close(self) -> None:
        """Discard a batch that ended with an exception."""
        self._counting.close()
        self._counter = None

    def state_dict(self) -> dict[str, Any]:
        """Return the counts so far as a dict."""
        return {"total": self.total, "counted": self.counted, "of_kind": dict(self._of_kind)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the counts that `state_dict()` returned."""
        self.total, self.counted = state_dict["total"], state_dict["counted"]
        self._of_kind = dict(state_dict["of_kind"])
