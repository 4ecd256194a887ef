"""Determine the cost of a training step in three ways. Results that are determined in different ways are never mixed.

* executed: FLOPs and bytes of the executed operations. These counts are the same on any machine.
* measured: time of the step, relative to a baseline whose steps alternate with it, and resident memory of the process.
* published: costs computed with the formulas of the papers.
"""

from efficient_ft.cost.executed import Executed, Kept, executed, kept_after_forward, layer_flops
from efficient_ft.cost.measured import Cost, Measured, compare, time_steps
from efficient_ft.cost.meter import LayerFlops, LiveTensor, Meter
from efficient_ft.cost.predict import Demand, Forward, Prediction, count_evaluation, predict, predicted_growth
from efficient_ft.cost.process import DeviceMemory, ProcessMemory, StepMemory
from efficient_ft.cost.published import Keeping, Published, published
from efficient_ft.cost.step import AUTOCAST, StepMethods, StepOptions, StepSpec, TrainingStep, optimizer_state_bytes

__all__ = [
    "AUTOCAST", "Cost", "Demand", "DeviceMemory", "Executed", "Forward", "Keeping", "Kept", "LayerFlops", "LiveTensor",
    "Measured", "Meter", "Prediction", "ProcessMemory", "Published", "StepMemory", "StepMethods", "StepOptions",
    "StepSpec", "TrainingStep", "compare", "count_evaluation", "executed", "kept_after_forward", "layer_flops",
    "optimizer_state_bytes", "predict", "predicted_growth", "published", "time_steps",
]  # fmt: skip
