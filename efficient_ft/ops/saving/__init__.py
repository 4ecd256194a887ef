"""Operations that save packed tensors for their backward pass, and the mode that uses them.

`mode` has the mode and its policy, `table` the operations that there are, and one module each family of operations.
"""

# Importing a family registers its operations.
from efficient_ft.ops.saving import attention, norms, pointwise, pooling, products
from efficient_ft.ops.saving.dense import DenseKept
from efficient_ft.ops.saving.mode import PackedOperations, PackingState, Policy, current_packing, packing_suspended
from efficient_ft.ops.saving.saving import load, save
from efficient_ft.ops.saving.table import packed_operation, packs

__all__ = [
    "DenseKept",
    "PackedOperations",
    "PackingState",
    "Policy",
    "attention",
    "current_packing",
    "load",
    "norms",
    "packed_operation",
    "packing_suspended",
    "packs",
    "pointwise",
    "pooling",
    "products",
    "save",
]
