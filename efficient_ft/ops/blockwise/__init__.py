"""Optimizer states in 8 or 4 bits: blocks of values, each with a scale and codes of a codebook.

`form` has the form in plain torch, `update` the step of Adam over states in it, and `kernels` its CPU kernel.
"""

from efficient_ft.ops.blockwise.form import BLOCK, MIN_SIZE, codebook, dequantize, is_blockwise, quantize
from efficient_ft.ops.blockwise.update import AdamStep, Moment, adam_step

__all__ = [
    "BLOCK",
    "MIN_SIZE",
    "AdamStep",
    "Moment",
    "adam_step",
    "codebook",
    "dequantize",
    "is_blockwise",
    "quantize",
]
