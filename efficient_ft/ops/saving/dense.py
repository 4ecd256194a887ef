"""A record of the operations in packed parts that save dense tensors for the backward pass."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from efficient_ft.ops.saving.table import name_of


class DenseKept:
    """Bytes of the activations saved by operations that have no packed version, by the operation's name.

    Args:
        samples: B, number of images; the first dimension of an activation is a multiple of it.

    Attributes:
        bytes_of: bytes by name. Each storage counts once, for the first operation that saves it.
    """

    def __init__(self, samples: int) -> None:
        self.samples = samples
        self.bytes_of: defaultdict[str, int] = defaultdict(int)
        self._known: set[int] = set()

    def exclude(self, tensors: Iterable[Tensor]) -> None:
        """Exclude tensors from the record: parameters and packed tensors."""
        self._known.update(t.untyped_storage()._cdata for t in tensors)

    def watch(self, function: Any) -> saved_tensors_hooks:
        """Return a context manager that records the tensors that a function of torch saves."""
        name = name_of(function)

        def see(t: Tensor) -> Tensor:
            storage = t.untyped_storage()
            if storage._cdata not in self._known and t.dim() and t.shape[0] % self.samples == 0:
                self._known.add(storage._cdata)
                self.bytes_of[name] += storage.nbytes()
            return t

        return saved_tensors_hooks(see, lambda t: t)
