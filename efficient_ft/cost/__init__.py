"""What a training step costs: executed (counted, the same anywhere), measured (timed, always beside another), and
published (by the papers' own rule)."""

from efficient_ft.cost.executed import Executed, Kept, executed, kept_after_forward, layer_flops
from efficient_ft.cost.measured import Cost, Measured, TrainingStep, compare, time_steps
from efficient_ft.cost.meter import LayerFlops, LiveTensor, Meter
from efficient_ft.cost.published import Keeping, Published, published

__all__ = [
    "Cost",
    "Executed",
    "Keeping",
    "Kept",
    "LayerFlops",
    "LiveTensor",
    "Measured",
    "Meter",
    "Published",
    "TrainingStep",
    "compare",
    "executed",
    "kept_after_forward",
    "layer_flops",
    "published",
    "time_steps",
]
