"""Scoring of patch tokens, and dropping or fusion of the lowest-scored tokens.

Sources: EViT (Liang et al., ICLR 2022); BSR (CVPR Workshops 2024).
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from efficient_ft.ops.autocast import autocast_disabled
from efficient_ft.ops.saving import current_packing, load, save


def class_attention(q_BHND: Tensor, k_BHND: Tensor, prefix: int, scale: float | None = None) -> Tensor:
    """Compute the class token's attention to each patch token: its row of softmax(q kᵀ · scale), averaged over heads.

    This function complements fused attention, which does not return its attention map. It requires O(H · N · D)
    operations in at least single precision. Source: EViT, Equation 3.

    Args:
        q_BHND, k_BHND: Inputs of attention, after q and k normalization and rotary embeddings.
        prefix: Number of prefix tokens, P. The class token is the first.
        scale: Factor of the scores. Default: 1 / √D.

    Returns:
        Attention weights, (B, N − P). Their sum is less than 1, since prefix tokens also receive attention.
    """
    scale = q_BHND.shape[-1] ** -0.5 if scale is None else scale
    return _ClassRow.apply(q_BHND, k_BHND, scale)[:, prefix:]


class _ClassRow(torch.autograd.Function):
    """The class token's row (B, N). It saves k in the same way as attention, so that k is saved only once."""

    @staticmethod
    def forward(ctx: Any, q_BHND: Tensor, k_BHND: Tensor, scale: float) -> Tensor:
        wide = torch.promote_types(q_BHND.dtype, torch.float32)
        with autocast_disabled(q_BHND):
            q_BHD = q_BHND[:, :, 0].to(wide) * scale
            p_BHN = (k_BHND.to(wide) @ q_BHD.unsqueeze(-1)).squeeze(-1).softmax(-1)
        mode = current_packing()
        if mode is not None:
            mode.begin("class_row")
        save(ctx, k_BHND if mode is None else mode.keep_for_attention(k_BHND, "k"), q_BHD, p_BHN)
        ctx.scale, ctx.types, ctx.tokens = scale, (q_BHND.dtype, k_BHND.dtype), q_BHND.shape[2]
        return p_BHN.mean(1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g_BN: Tensor) -> tuple[Tensor | None, ...]:
        k, q_BHD, p_BHN = load(ctx)
        of_q, of_k = ctx.types
        g_BHN = p_BHN * (g_BN / p_BHN.shape[1]).unsqueeze(1)
        g_BHN = g_BHN - p_BHN * g_BHN.sum(-1, keepdim=True)
        g_q = g_k = None
        if ctx.needs_input_grad[0]:
            g_q = q_BHD.new_zeros((*q_BHD.shape[:2], ctx.tokens, q_BHD.shape[2]), dtype=of_q)
            g_q[:, :, 0] = (g_BHN.unsqueeze(2) @ k.to(g_BHN.dtype)).squeeze(2) * ctx.scale
        if ctx.needs_input_grad[1]:
            g_k = (g_BHN.unsqueeze(-1) * q_BHD.unsqueeze(2)).to(of_k)
        return g_q, g_k, None


def num_kept(count: int, keep_rate: float) -> int:
    """Return ⌈keep_rate · count⌉ for the decimal `keep_rate`. For example, 0.1 of 30 is 3, not 4."""
    share = Fraction(str(keep_rate))
    return -(-share.numerator * count // share.denominator)


def drop(x_BNC: Tensor, scores_BL: Tensor, prefix: int, kept: int, fuse: bool) -> tuple[Tensor, Tensor]:
    """Keep the prefix tokens and the `kept` highest-scored patch tokens, in descending order of score.

    Args:
        x_BNC: Tokens, with prefix tokens first.
        scores_BL: Scores of the L = N − P patch tokens.
        prefix: Number of prefix tokens, P.
        kept: Number of kept patch tokens, K, from 0 to L.
        fuse: Append the token Σ aᵢ xᵢ over the dropped tokens, where a are their scores (EViT, Equation 4; BSR).
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
    """Gather tokens. torch.gather saves its input, although its gradient requires only the shape."""

    @staticmethod
    def forward(ctx: Any, x_BNC: Tensor, index_BK: Tensor) -> Tensor:
        ctx.save_for_backward(index_BK)
        ctx.shape = x_BNC.shape
        return x_BNC.gather(1, over_channels(index_BK, x_BNC.shape[-1]))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g_BKC: Tensor) -> tuple[Tensor, None]:
        (index_BK,) = ctx.saved_tensors
        # Indices are unique, so that no sum is required.
        return g_BKC.new_zeros(ctx.shape).scatter_(1, over_channels(index_BK, ctx.shape[-1]), g_BKC), None


def over_channels(index_BK: Tensor, channels: int) -> Tensor:
    """Expand token indices (B, K) to (B, K, channels), as gather and scatter require."""
    return index_BK.unsqueeze(-1).expand(-1, -1, channels)


def largest_first(scores_BN: Tensor) -> Tensor:
    """Return the indices that sort each row in descending order. Equal scores keep their order."""
    if torch.onnx.is_in_onnx_export():  # ONNX has no stable sort, but its TopK is stable
        return scores_BN.topk(scores_BN.shape[1], dim=1).indices
    return scores_BN.argsort(dim=1, descending=True, stable=True)
