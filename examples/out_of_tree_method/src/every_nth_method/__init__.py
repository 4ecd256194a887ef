"""Two methods for efficient-ft. `EveryNth` selects blocks to train, and `SampledRows` samples weight gradients."""

from every_nth_method.method import EveryNth
from every_nth_method.sampled_rows import SampledRows

__all__ = ["EveryNth", "SampledRows"]
