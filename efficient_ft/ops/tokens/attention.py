"""The class token's attention, which scores patch tokens (EViT: Liang et al., ICLR 2022, Equation 3)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from efficient_ft.ops.autocast import autocast_disabled
from efficient_ft.ops.saving import current_packing, load, save


def class_attention(q_BHND: Tensor, k_BHND: Tensor, prefix: int, scale: float | None = None) -> Tensor:
    """Compute the class token's attention to each patch token: its row of softmax(q kᵀ · scale), averaged over heads.

    It complements fused attention, which does not return its attention map. It takes O(H · N · D) operations in at
    least single precision.

    Args:
        q_BHND, k_BHND: inputs of attention, after q and k normalization and rotary embeddings.
        prefix: P, number of prefix tokens; the class token is the first.
        scale: factor of the scores; None: 1 / √D.

    Returns:
        (B, N − P) shares of the attention. Their sum is less than 1, since prefix tokens have a share too.
    """
    scale = q_BHND.shape[-1] ** -0.5 if scale is None else scale
    return _ClassRow.apply(q_BHND, k_BHND, scale)[:, prefix:]


class _ClassRow(torch.autograd.Function):
    """The class token's row (B, N). It saves k like attention does, so that k is saved only once."""

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
