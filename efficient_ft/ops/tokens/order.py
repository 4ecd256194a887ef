"""The order of tokens by their scores."""

from __future__ import annotations

import torch
from torch import Tensor


def largest_first(scores_BN: Tensor) -> Tensor:
    """Return the indices that sort each row from its largest score; the first of equal scores comes first."""
    if torch.onnx.is_in_onnx_export():  # it has no stable sort, and the order of its TopK is stable
        return scores_BN.topk(scores_BN.shape[1], dim=1).indices
    return scores_BN.argsort(dim=1, descending=True, stable=True)
