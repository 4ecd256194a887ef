"""Block-wise storage of Adam's moments in 8 or 4 bits: each block has codes, a scale and a range.

`form` defines the storage format in plain PyTorch, and `update` defines the Adam step.
"""

from efficient_ft.ops.blockwise.form import BLOCK, MIN_SIZE, Moments, dequantize, empty_moments, is_blockwise, quantize
from efficient_ft.ops.blockwise.update import AdamStep, adam_step

__all__ = [
    "BLOCK",
    "MIN_SIZE",
    "AdamStep",
    "Moments",
    "adam_step",
    "dequantize",
    "empty_moments",
    "is_blockwise",
    "quantize",
]
