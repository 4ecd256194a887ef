"""Ordering of tokens by their scores."""

from __future__ import annotations

import torch
from torch import Tensor


def largest_first(scores_BN: Tensor) -> Tensor:
    """Return the indices that sort each row in descending order. Equal scores keep their order."""
    if torch.onnx.is_in_onnx_export():  # ONNX has no stable sort, but its TopK is stable
        return scores_BN.topk(scores_BN.shape[1], dim=1).indices
    return scores_BN.argsort(dim=1, descending=True, stable=True)
