"""What a training step costs: executed (counted, the same anywhere) and measured (timed, always beside another)."""

from efficient_ft.cost.executed import Executed, Kept, executed, kept_after_forward, layer_flops
from efficient_ft.cost.measured import Cost, Measured, TrainingStep, compare, time_steps
from efficient_ft.cost.meter import LayerFlops, LiveTensor, Meter

__all__ = [
    "Cost",
    "Executed",
    "Kept",
    "LayerFlops",
    "LiveTensor",
    "Measured",
    "Meter",
    "TrainingStep",
    "compare",
    "executed",
    "kept_after_forward",
    "layer_flops",
    "time_steps",
]
