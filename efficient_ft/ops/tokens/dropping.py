"""Drop the patch tokens of lowest score, or fuse them into one (EViT: Liang et al., ICLR 2022; BSR, CVPRW 2024)."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from efficient_ft.ops.tokens.order import largest_first


def num_kept(count: int, keep_rate: float) -> int:
    """Return ⌈keep_rate · count⌉, with `keep_rate` as it is written: .1 of 30 is 3, not 4."""
    share = Fraction(str(keep_rate))
    return -(-share.numerator * count // share.denominator)


def drop(x_BNC: Tensor, scores_BL: Tensor, prefix: int, kept: int, fuse: bool) -> tuple[Tensor, Tensor]:
    """Keep the prefix tokens and the `kept` patch tokens of highest score, in descending order of score.

    Args:
        x_BNC: tokens, prefix tokens first.
        scores_BL: of the patch tokens, L = N − P.
        prefix: P, number of prefix tokens.
        kept: K, from 0 to L.
        fuse: append one token, Σ aᵢ xᵢ over the dropped ones with their scores a (EViT, Equation 4; BSR). Gradients
            flow through both.

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
    """Gather the tokens (B, K, C) at `index_BK`, each token of an image at most once."""
    return _Take.apply(x_BNC, index_BK)


class _Take(torch.autograd.Function):
    """torch.gather keeps its whole input, of which its gradient needs only the shape."""

    @staticmethod
    def forward(ctx: Any, x_BNC: Tensor, index_BK: Tensor) -> Tensor:
        ctx.save_for_backward(index_BK)
        ctx.shape = x_BNC.shape
        return x_BNC.gather(1, over_channels(index_BK, x_BNC.shape[-1]))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g_BKC: Tensor) -> tuple[Tensor, None]:
        (index_BK,) = ctx.saved_tensors
        # indices are unique, so that nothing has to be added up
        return g_BKC.new_zeros(ctx.shape).scatter_(1, over_channels(index_BK, ctx.shape[-1]), g_BKC), None


def over_channels(index_BK: Tensor, channels: int) -> Tensor:
    """Expand indices of tokens (B, K) to (B, K, channels), as gather and scatter need them."""
    return index_BK.unsqueeze(-1).expand(-1, -1, channels)
