"""Operations that save packed tensors for the backward pass, and the mode that installs these operations.

`mode` defines the mode and its policy, and `table` lists the operations. Each other module contains one family of
operations.
"""

# Importing a module registers its operations.
from efficient_ft.ops.saving import attention, norms, pointwise, pooling, products  # noqa: F401
from efficient_ft.ops.saving.mode import PackedOperations, PackingState, Policy, current_packing, packing_suspended
from efficient_ft.ops.saving.saving import load, save
from efficient_ft.ops.saving.table import DenseKept, packed_operation

__all__ = [
    "DenseKept",
    "PackedOperations",
    "PackingState",
    "Policy",
    "current_packing",
    "load",
    "packed_operation",
    "packing_suspended",
    "save",
]
