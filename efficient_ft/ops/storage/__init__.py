"""Packed tensors: the small forms in which activations are kept for the backward pass.

`sparse`, `eight_bits` and `groups` have the forms, `kernels` their kernels for CPU and GPU, and `packers` the classes
that use them. `efficient_ft.ops.saving` has the operations that save packed tensors.
"""

from efficient_ft.ops.storage.eight_bits import dequantize, extremes, quantize
from efficient_ft.ops.storage.groups import BITS, group_length, group_pack, group_unpack
from efficient_ft.ops.storage.packers import Dense, EightBits, GroupBits, Half, Packed, Packer, Sparse
from efficient_ft.ops.storage.sparse import (
    bitmap_bytes,
    magnitude_bits,
    pack_bits,
    sparse_pack,
    sparse_unpack,
    unpack_bits,
    values_kept,
)
from efficient_ft.ops.storage.state import Noise, Overflow, PackContext, Ranges

__all__ = [
    "BITS",
    "Dense",
    "EightBits",
    "GroupBits",
    "Half",
    "Noise",
    "Overflow",
    "PackContext",
    "Packed",
    "Packer",
    "Ranges",
    "Sparse",
    "bitmap_bytes",
    "dequantize",
    "extremes",
    "group_length",
    "group_pack",
    "group_unpack",
    "magnitude_bits",
    "pack_bits",
    "quantize",
    "sparse_pack",
    "sparse_unpack",
    "unpack_bits",
    "values_kept",
]
