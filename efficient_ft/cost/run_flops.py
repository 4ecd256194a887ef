"""FLOPs of a whole training, counted while it runs."""

from __future__ import annotations

import math
from contextlib import ExitStack
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from efficient_ft.cost.meter import operation_flops

#: If the cost of a step changes during training, at most about this many batches are counted, evenly spaced.
COUNTED_BATCHES = 1000


class FlopsCounter(TorchDispatchMode):
    """Count the FLOPs of the operations that run within a ``with`` block, in `flops`."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        self.flops += operation_flops(func, args, kwargs, out)
        return out


class RunFlops:
    """Add up the FLOPs of forward and backward passes, by the same formulas as `cost.executed`.

    Each batch is either counted, or has the FLOPs of the last counted batch of its kind. Where all batches of a kind
    cost the same, the sum is exact and one batch of each kind is counted; else every n-th batch is.

    Args:
        batches: batches of the whole training.
        same: whether all batches of a kind cost the same.

    Attributes:
        total: FLOPs so far.
        counted: batches that were counted.
    """

    def __init__(self, batches: int, same: bool) -> None:
        self.interval = None if same else math.ceil(batches / COUNTED_BATCHES)
        self.total, self.counted = 0, 0
        self._of_kind: dict[str, int] = {}
        self._kind = ""
        self._counter: FlopsCounter | None = None
        self._counting = ExitStack()

    def begin(self, number: int, kind: str) -> None:
        """Begin batch `number` (from 0) before its forward pass.

        Args:
            number: of the batch in the whole training.
            kind: what its cost depends on: its shape, its task.
        """
        self.close()
        self._kind = kind
        due = kind not in self._of_kind or (self.interval is not None and number % self.interval == 0)
        self._counter = self._counting.enter_context(FlopsCounter()) if due else None

    def end(self) -> None:
        """End the batch after its backward pass."""
        self._counting.close()
        if self._counter is not None:
            self._of_kind[self._kind] = self._counter.flops
            self.counted += 1
        self.total += self._of_kind[self._kind]
        self._counter = None

    def close(self) -> None:
        """Leave a batch that an exception ended; it is not added."""
        self._counting.close()
        self._counter = None

    def state_dict(self) -> dict[str, Any]:
        """The sums so far, in plain containers."""
        return {"total": self.total, "counted": self.counted, "of_kind": dict(self._of_kind)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from the state of `state_dict()`."""
        self.total, self.counted = state_dict["total"], state_dict["counted"]
        self._of_kind = dict(state_dict["of_kind"])
