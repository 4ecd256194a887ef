"""What a training step costs: executed (counted on any machine), and measured (timed, always beside another)."""

from efficient_ft.cost.executed import Executed, Kept, executed, kept_after_forward, layer_flops
from efficient_ft.cost.meter import LayerFlops, LiveTensor, Meter

__all__ = [
    "Executed",
    "Kept",
    "LayerFlops",
    "LiveTensor",
    "Meter",
    "executed",
    "kept_after_forward",
    "layer_flops",
]
