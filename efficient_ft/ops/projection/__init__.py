"""Low-rank backward pass: constant matrices, projections with these matrices, and layers that use the projections.

`transforms` builds the matrices. `projection` selects the matrices for a grid and applies them to tensors. `low_rank`
defines the backward pass (LBP-WHT: Yang et al., NeurIPS 2023).
"""

from efficient_ft.ops.projection.feed_forward import low_rank_feed_forward, pool_mixer
from efficient_ft.ops.projection.low_rank import low_rank_conv1x1, low_rank_linear
from efficient_ft.ops.projection.projection import (
    CosineProjector,
    Padding,
    Projection,
    Projector,
    SubsetProjection,
    WalshProjector,
    backward_flops,
)
from efficient_ft.ops.projection.transforms import (
    BLOCK,
    Grid,
    Pairs,
    Tile,
    block_energy,
    dct_rows,
    low_pass_l1,
    low_pass_linf,
    lowest_first,
)

__all__ = [
    "BLOCK",
    "CosineProjector",
    "Grid",
    "Padding",
    "Pairs",
    "Projection",
    "Projector",
    "SubsetProjection",
    "Tile",
    "WalshProjector",
    "backward_flops",
    "block_energy",
    "dct_rows",
    "low_pass_l1",
    "low_pass_linf",
    "low_rank_conv1x1",
    "low_rank_feed_forward",
    "low_rank_linear",
    "lowest_first",
    "pool_mixer",
]
