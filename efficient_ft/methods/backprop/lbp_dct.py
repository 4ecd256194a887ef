"""LBP-DCT: a low-rank backward pass with a low-pass DCT over the entire token grid.

On every grid larger than one 8×8 block, LBP-DCT approximates the exact gradient better than LBP-WHT with the same
number of coefficients and the same cost. The backward pass is the same as in LBP-WHT (see `lbp_wht`). The projector was
developed in this project and is not part of the LBP-WHT paper.
"""

from __future__ import annotations

from collections.abc import Sequence

from efficient_ft.methods.backprop.low_rank import LowRankBackward, refuse_order
from efficient_ft.methods.registry import register
from efficient_ft.methods.skip import refuse_skip
from efficient_ft.models.view import Layer
from efficient_ft.ops.projection import CosineProjector


@register
class LBPDCT(LowRankBackward):
    """Approximate the gradients of linear layers with the lowest-frequency DCT-II components of the token grid.

    Args:
        order: order of the low-pass filter. Must be from 1 to 15. The number of components equals the number of bases
            that LBP-WHT selects with ``bases=l1`` and ``padding=ortho`` for the same order.
        skip, fused: see `LBPWHT`.

    Raises:
        SettingError: If `order` is not an integer from 1 to 15.
        UserError: See `LowRankBackward`.
    """

    name = "lbp_dct"

    def __init__(self, order: int = 4, skip: Sequence[str] | None = None, fused: bool | None = None):
        refuse_order(order, 15)
        refuse_skip(skip)
        self.order, self.skip, self.fused = order, skip, fused

    def projector_for(self, layer: Layer) -> CosineProjector:
        return CosineProjector(self.order)
