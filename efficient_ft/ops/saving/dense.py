"""A record of the operations inside packed parts that keep dense tensors for the backward pass."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from efficient_ft.ops.saving.table import name_of


class DenseKept:
    """Bytes of activations that operations without a packed form keep, by the operation's name.

    Args:
        samples: B, number of images; an activation's first dimension is a multiple of it.

    Attributes:
        bytes_of: by name; each storage counts once, for the first operation that keeps it.
    """

    def __init__(self, samples: int) -> None:
        self.samples = samples
        self.bytes_of: defaultdict[str, int] = defaultdict(int)
        self._known: set[int] = set()

    def exclude(self, tensors: Iterable[Tensor]) -> None:
        """Leave tensors out: parameters, and what is kept packed."""
        self._known.update(t.untyped_storage()._cdata for t in tensors)

    def watch(self, function: Any) -> saved_tensors_hooks:
        """Return a context manager that records what a function of torch keeps."""
        name = name_of(function)

        def see(t: Tensor) -> Tensor:
            storage = t.untyped_storage()
            if storage._cdata not in self._known and t.dim() and t.shape[0] % self.samples == 0:
                self._known.add(storage._cdata)
                self.bytes_of[name] += storage.nbytes()
            return t

        return saved_tensors_hooks(see, lambda t: t)
