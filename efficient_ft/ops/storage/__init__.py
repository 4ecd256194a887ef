"""Compact storage formats for activations that are saved for the backward pass.

`sparse`, `eight_bits` and `groups` define the formats with reference implementations in plain PyTorch, which run on
every device. For fake tensors, the functions return fake tensors and compute no values. `kernels` contains CPU and GPU
kernels with bit-identical results. `packers` contains the classes that use the formats. The operations in
`efficient_ft.ops.saving` save packed tensors.
"""

from efficient_ft.ops.storage.groups import BITS, group_length, group_pack, group_unpack
from efficient_ft.ops.storage.packers import (
    Dense,
    EightBits,
    GroupBits,
    Half,
    Noise,
    Overflow,
    PackContext,
    Packed,
    Packer,
    Ranges,
    Sparse,
)
from efficient_ft.ops.storage.sparse import bitmap_bytes, magnitude_bits, pack_bits, unpack_bits

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
    "group_length",
    "group_pack",
    "group_unpack",
    "magnitude_bits",
    "pack_bits",
    "unpack_bits",
]
