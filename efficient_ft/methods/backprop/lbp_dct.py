"""LBP-DCT: the same low-rank backward with a low-pass DCT over the whole token grid.

At the number of coefficients and the cost of LBP-WHT it is closer to the exact gradient on every grid that is no
single 8×8 block. Source of the scheme: LBP-WHT (see `lbp_wht`); the projector is ours.
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
    """Gradients of linear layers through the lowest DCT-II components of the token grid.

    Args:
        order: 1–15; keeps as many components as LBP-WHT's ``l1`` selection of that order (padding ``ortho``).
        skip, fused: as in `LBPWHT`.

    Raises:
        SettingError: `order` is not an integer from 1 to 15.
        UserError: as in `LowRankBackward`.
    """

    name = "lbp_dct"

    def __init__(self, order: int = 4, skip: Sequence[str] | None = None, fused: bool | None = None):
        refuse_order(order, 15)
        refuse_skip(skip)
        self.order, self.skip, self.fused = order, skip, fused

    def projector_for(self, layer: Layer) -> CosineProjector:
        return CosineProjector(self.order)
