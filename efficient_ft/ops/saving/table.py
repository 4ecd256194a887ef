"""The table of packed operations. It maps a function of torch to the function that replaces it.

The modules of this package register their operations on import. Decorate a new operation with `packs`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

#: Called with the mode and the arguments of torch's function. Returns the result, or NotImplemented if the operation
#: does not support these arguments.
Operation = Callable[..., Any]

_OPERATIONS: dict[Any, Operation] = {}


def packs(*functions: Any) -> Callable[[Operation], Operation]:
    """Register a packed operation for functions of torch."""

    def register(operation: Operation) -> Operation:
        for function in functions:
            # torch exports some functions under two names
            assert _OPERATIONS.get(function, operation) is operation, function
            _OPERATIONS[function] = operation
        return operation

    return register


def packed_operation(function: Any) -> Operation | None:
    """Return the packed operation for a function of torch, or None."""
    return _OPERATIONS.get(function)


def name_of(function: Any) -> str:
    """Return the name of a function of torch, for example ``matmul`` for ``Tensor.__matmul__``."""
    return getattr(function, "__name__", str(function)).strip("_")
