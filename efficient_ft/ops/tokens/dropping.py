"""Dropping of the lowest-scored patch tokens, or fusion into one token (EViT, ICLR 2022; BSR, CVPR Workshops 2024)."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def num_kept(count: int, keep_rate: float) -> int:
    """Return ⌈keep_rate · count⌉ for the decimal `keep_rate`: 0.1 of 30 is 3, not 4."""
    share = Fraction(str(keep_rate))
    return -(-share.numerator * count // share.denominator)


def drop(x_BNC: Tensor, scores_BL: Tensor, prefix: int, kept: int, fuse: bool) -> tuple[Tensor, Tensor]:
    """Keep the prefix tokens and the `kept` highest-scored patch tokens, in descending order of score.

    Args:
        x_BNC: tokens, prefix tokens first.
        scores_BL: scores of the L = N − P patch tokens.
        prefix: P, number of prefix tokens.
        kept: K, from 0 to L.
        fuse: append the token Σ aᵢ xᵢ over the dropped tokens, where a are their scores (EViT, Equation 4; BSR).
            Gradients flow through both factors.

    Returns:
        Tokens (B, P + K (+ 1), C), and the indices (B, K) of the kept patch tokens, from 0 to L − 1.
    """
    patches_BLC = x_BNC[:, prefix:]
    order_BL = largest_first(scores_BL)
    index_BK = order_BL[:, :kept]
    parts = [x_BNC[:, :prefix], take(patches_BLC, index_BK)]
    if fuse and kept < scores_BL.shape[1]:
        rest = order_BL[:, kept:]
        weights = scores_BL.gather(1, rest).to(x_BNC.dtype)
        parts.append(weights.unsqueeze(1) @ take(patches_BLC, rest))
    return torch.cat(parts, 1), index_BK


def take(x_BNC: Tensor, index_BK: Tensor) -> Tensor:
    """Gather the tokens (B, K, C) at `index_BK`, which contains each token of an image at most once."""
    return _Take.apply(x_BNC, index_BK)


class _Take(torch.autograd.Function):
    """Gather tokens. torch.gather would save its input, but its gradient needs only the shape."""

    @staticmethod
    def forward(ctx: Any, x_BNC: Tensor, index_BK: Tensor) -> Tensor:
        ctx.save_for_backward(index_BK)
        ctx.shape = x_BNC.shape
        return x_BNC.gather(1, over_channels(index_BK, x_BNC.shape[-1]))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g_BKC: Tensor) -> tuple[Tensor, None]:
        (index_BK,) = ctx.saved_tensors
        # Indices are unique, so no sum is needed.
        return g_BKC.new_zeros(ctx.shape).scatter_(1, over_channels(index_BK, ctx.shape[-1]), g_BKC), None


def over_channels(index_BK: Tensor, channels: int) -> Tensor:
    """Expand token indices (B, K) to (B, K, channels), as gather and scatter require."""
    return index_BK.unsqueeze(-1).expand(-1, -1, channels)


def largest_first(scores_BN: Tensor) -> Tensor:
    """Return the indices that sort each row in descending order. Equal scores keep their order."""
    if torch.onnx.is_in_onnx_export():  # ONNX has no stable sort, but its TopK is stable
        return scores_BN.topk(scores_BN.shape[1], dim=1).indices
    return scores_BN.argsort(dim=1, descending=True, stable=True)
