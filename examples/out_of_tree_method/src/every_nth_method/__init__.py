"""Two methods for efficient-ft: a selection of blocks, and sampled weight gradients."""

from every_nth_method.method import EveryNth
from every_nth_method.sampled_rows import SampledRows

__all__ = ["EveryNth", "SampledRows"]
