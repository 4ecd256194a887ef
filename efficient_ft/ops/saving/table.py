"""Table of packed operations, and a record of the dense tensors that other operations save.

The table maps a torch function to the function that replaces it. The modules of this package register their operations
when they are imported. Use the decorator `packs` to register a new operation.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

#: Function that replaces a torch function and is called with the mode and the original arguments. The function returns
#: the result, or NotImplemented if the arguments are not supported.
Operation = Callable[..., Any]

_OPERATIONS: dict[Any, Operation] = {}


def packs(*functions: Any) -> Callable[[Operation], Operation]:
    """Decorate a function that replaces the given torch functions and saves packed tensors."""

    def register(operation: Operation) -> Operation:
        for function in functions:
            # torch exports some functions under two names, so an operation may be registered twice.
            assert _OPERATIONS.get(function, operation) is operation, function
            _OPERATIONS[function] = operation
        return operation

    return register


def packed_operation(function: Any) -> Operation | None:
    """Return the packed operation that replaces a torch function, or None if no operation replaces the function."""
    return _OPERATIONS.get(function)


def name_of(function: Any) -> str:
    """Return the name of a torch function, for example ``matmul`` for ``Tensor.__matmul__``."""
    return getattr(function, "__name__", str(function)).strip("_")


class DenseKept:
    """Record of the sizes of activations that operations without a packed version save.

    Args:
        samples: Number of images, B. The first dimension of an activation is a multiple of B.

    Attributes:
        bytes_of: Number of saved bytes for each operation name. Each storage is counted once, for the first operation
            that saves it.
    """

    def __init__(self, samples: int) -> None:
        self.samples = samples
        self.bytes_of: defaultdict[str, int] = defaultdict(int)
        self._known: set[int] = set()

    def exclude(self, tensors: Iterable[Tensor]) -> None:
        """Exclude tensors from the record, for example parameters and packed tensors."""
        self._known.update(t.untyped_storage()._cdata for t in tensors)

    def watch(self, function: Any) -> saved_tensors_hooks:
        """Return a context manager that records the tensors that a torch function saves."""
        name = name_of(function)

        def see(t: Tensor) -> Tensor:
            storage = t.untyped_storage()
            if storage._cdata not in self._known and t.dim() and t.shape[0] % self.samples == 0:
                self._known.add(storage._cdata)
                self.bytes_of[name] += storage.nbytes()
            return t

        return saved_tensors_hooks(see, lambda t: t)
