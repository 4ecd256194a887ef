"""Memory-efficient optimizers: Adam with states in 8 or 4 bits, steps inside the backward pass, and bfloat16 weights.

>>> optimizer = step_in_backward(LowBitAdamW(model.parameters(), lr=1e-4, bits=8))
"""

from efficient_ft.optim.in_backward import SteppedInBackward, step_in_backward, steps_in_backward
from efficient_ft.optim.low_bit import LowBitAdam, LowBitAdamW, state_tensors
from efficient_ft.optim.stochastic_rounding import StochasticRounding

__all__ = [
    "LowBitAdam",
    "LowBitAdamW",
    "SteppedInBackward",
    "StochasticRounding",
    "state_tensors",
    "step_in_backward",
    "steps_in_backward",
]
