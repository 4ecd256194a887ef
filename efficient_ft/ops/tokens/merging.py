"""Merging of similar tokens (ToMe: Bolya et al., "Token Merging: Your ViT But Faster", ICLR 2023)."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from efficient_ft.ops.autocast import autocast_disabled
from efficient_ft.ops.tokens.dropping import largest_first, over_channels


@torch.no_grad()
def match(metric_BNC: Tensor, r: int, prefix: int) -> Tensor:
    """Compute bipartite soft matching (ToMe, Section 3).

    Tokens alternate between two sets, A (even positions) and B (odd positions). Every token of A has an edge to the
    most similar token of B, and the r edges of highest similarity are merged.

    Args:
        metric_BNC: Features whose cosine similarity is compared in at least single precision. ToMe uses the keys,
            averaged over heads.
        r: Number of merged tokens, at most half of the patch tokens.
        prefix: Number of prefix tokens, P. Prefix tokens are not merged.

    Returns:
        New index of each token, (B, N), from 0 to N − r − 1. Both tokens of a pair have the same index. The order is
        prefix
        tokens, unmerged tokens of A, then B, each in the order of the input. The paper concatenates the two sets
        instead.
        The order only determines the two sets of the next matching.
    """
    metric = metric_BNC.to(torch.promote_types(metric_BNC.dtype, torch.float32))
    metric = metric / metric.norm(dim=-1, keepdim=True).clamp_min(1e-12)
    with autocast_disabled(metric_BNC):
        similarity_BAB = metric[:, ::2] @ metric[:, 1::2].mT
    of_a, of_b = (prefix + 1) // 2, prefix // 2  # numbers of prefix tokens in A and in B
    similarity_BAB[:, :of_a] = -math.inf
    similarity_BAB[:, :, :of_b] = -math.inf
    best_BA, target_BA = similarity_BAB.max(-1)
    order_BA = largest_first(best_BA)
    source_BR, stay_BU = order_BA[:, :r], order_BA[:, r:].sort(1).values
    u, j = (torch.arange(n, device=metric.device) for n in (stay_BU.shape[1], metric.shape[1] // 2))
    index_of_u = torch.where(u < of_a, 2 * u, u + of_b)
    index_of_j = torch.where(j < of_b, 2 * j + 1, j + len(u))
    index_BN = torch.empty(metric.shape[:2], dtype=torch.long, device=metric.device)
    index_BN[:, 1::2] = index_of_j
    index_BN[:, ::2].scatter_(1, stay_BU, index_of_u.expand_as(stay_BU))
    index_BN[:, ::2].scatter_(1, source_BR, index_of_j[target_BA.gather(1, source_BR)])
    return index_BN


def merge(x_BNC: Tensor, size_BN: Tensor, index_BN: Tensor, left: int) -> tuple[Tensor, Tensor]:
    """Merge the tokens with equal indices into the mean of all patches that they represent.

    Args:
        x_BNC: Tokens.
        size_BN: Number of patches that each token represents, in at least single precision.
        index_BN: New index of each token, from `match`.
        left: Number of remaining tokens, N − r.

    Returns:
        Tokens (B, N − r, C), and their sizes (B, N − r).
    """
    sizes = size_BN.new_zeros(len(size_BN), left).scatter_add_(1, index_BN, size_BN)
    return _Merge.apply(x_BNC, size_BN / sizes.gather(1, index_BN), index_BN, left), sizes


def unmerge(x_BUC: Tensor, index_BN: Tensor) -> Tensor:
    """Repeat each merged token once for each token that was merged into it. The result has the shape before `merge`.

    Args:
        x_BUC: Merged tokens.
        index_BN: For each of the N tokens before any merge, the index of the token that represents it now.

    Returns:
        Tokens (B, N, C) in their order before any merge. Their mean is the mean of x weighted by sizes. Attention over
        these
        tokens equals attention over x with the log of the sizes added to its scores.
    """
    return _Unmerge.apply(x_BUC, index_BN)


class _Merge(torch.autograd.Function):
    """Σ share · x over the tokens of each index. It saves shares and indices, but no activations."""

    @staticmethod
    def forward(ctx: Any, x_BNC: Tensor, share_BN: Tensor, index_BN: Tensor, left: int) -> Tensor:
        ctx.save_for_backward(share_BN, index_BN)
        ctx.type = x_BNC.dtype
        return _sums(x_BNC * share_BN.unsqueeze(-1), index_BN, left).to(x_BNC.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g_BUC: Tensor) -> tuple[Tensor | None, ...]:
        share_BN, index_BN = ctx.saved_tensors
        g = g_BUC.gather(1, over_channels(index_BN, g_BUC.shape[-1])) * share_BN.unsqueeze(-1)
        return g.to(ctx.type), None, None, None


class _Unmerge(torch.autograd.Function):
    """x at the indices, some of which are repeated. It saves only the indices."""

    @staticmethod
    def forward(ctx: Any, x_BUC: Tensor, index_BN: Tensor) -> Tensor:
        ctx.save_for_backward(index_BN)
        ctx.left = x_BUC.shape[1]
        return x_BUC.gather(1, over_channels(index_BN, x_BUC.shape[-1]))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g_BNC: Tensor) -> tuple[Tensor | None, ...]:
        (index_BN,) = ctx.saved_tensors
        wide = torch.promote_types(g_BNC.dtype, torch.float32)
        return _sums(g_BNC.to(wide), index_BN, ctx.left).to(g_BNC.dtype), None


def _sums(x_BNC: Tensor, index_BN: Tensor, left: int) -> Tensor:
    """Sum the tokens of each index to (B, left, C)."""
    # On CPUs, sums over rows of the flattened batch are many times faster.
    first = torch.arange(len(index_BN), device=index_BN.device).unsqueeze(1) * left
    rows = (index_BN + first).flatten().unsqueeze(-1).expand(-1, x_BNC.shape[-1])
    sums = x_BNC.new_zeros(len(x_BNC) * left, x_BNC.shape[-1]).scatter_add_(0, rows, x_BNC.flatten(0, 1))
    return sums.unflatten(0, (len(x_BNC), left))
