"""Fewer tokens: which are important, dropping and fusing them, merging them. Pure functions of tensors.

Tokens are (B, N, C), the first P of them prefix tokens (class, distillation, registers), which are never dropped. What
is said of a "patch" token holds for a fused or merged one too.

Sources: EViT (Liang et al., ICLR 2022: class-token attention, fusing), BSR (CVPRW 2024), ALaST (2024), ToMe (Bolya et
al., ICLR 2023: matching, size-weighted merging, proportional attention).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor


def share_kept(count: int, keep: float) -> int:
    """⌈keep · count⌉, for `keep` as it is written: .1 of 30 is 3, not 4."""
    return math.ceil(Fraction(str(keep)) * count)


def class_attention(q_BHND: Tensor, k_BHND: Tensor, prefix: int, scale: float | None = None) -> Tensor:
    """How much the class token attends to each patch token: its row of softmax(q kᵀ · scale), the mean over the heads.

    Computed beside fused attention, in single precision at least, for O(H · N · D) operations.

    Args:
        q_BHND, k_BHND: as attention takes them (after q and k normalisation and rotary embeddings).
        prefix: P; the class token is the first.
        scale: None: 1 / √D.

    Returns:
        (B, N − P): shares of an attention that also goes to the prefix tokens, so that they add up to less than 1.
    """
    wide = torch.promote_types(q_BHND.dtype, torch.float32)
    scale = q_BHND.shape[-1] ** -0.5 if scale is None else scale
    row_BHN = (k_BHND.to(wide) @ (q_BHND[:, :, 0].to(wide) * scale).unsqueeze(-1)).squeeze(-1)
    return row_BHN.softmax(-1).mean(1)[:, prefix:]


def drop(x_BNC: Tensor, scores_BL: Tensor, prefix: int, kept: int, fuse: bool) -> tuple[Tensor, Tensor]:
    """The prefix tokens and the `kept` patch tokens of highest score, the most important first.

    Args:
        scores_BL: of the patch tokens, L = N − P.
        kept: from 0 to L.
        fuse: what is dropped becomes one more token, Σ aᵢ xᵢ with the scores a as they are (EViT, BSR), the last one.
            Gradients flow through both.

    Returns:
        (B, P + kept (+ 1), C), and (B, kept) the places of the kept ones among the patch tokens.
    """
    patches_BLC = x_BNC[:, prefix:]
    order_BL = scores_BL.argsort(dim=1, descending=True, stable=True)
    index_BK = order_BL[:, :kept]
    parts = [x_BNC[:, :prefix], take(patches_BLC, index_BK)]
    if fuse and kept < scores_BL.shape[1]:
        rest = order_BL[:, kept:]
        weights = scores_BL.gather(1, rest).to(x_BNC.dtype)
        parts.append(weights.unsqueeze(1) @ take(patches_BLC, rest))
    return torch.cat(parts, 1), index_BK


def take(x_BNC: Tensor, index_BK: Tensor) -> Tensor:
    """The tokens at `index_BK`, (B, K, C)."""
    return x_BNC.gather(1, index_BK.unsqueeze(-1).expand(-1, -1, x_BNC.shape[-1]))


# ------------------------------------------------------------------------------------------------ ToMe
@dataclass(frozen=True)
class Matching:
    """r pairs of tokens to be merged, of alternating sets: even places (A) into odd ones (B).

    Attributes:
        stay_BU: places in A of those that stay, ascending.
        source_BR, target_BR: places in A and in B of the pairs.
    """

    stay_BU: Tensor
    source_BR: Tensor
    target_BR: Tensor


@torch.no_grad()
def match(metric_BNC: Tensor, r: int, prefix: int) -> Matching:
    """Bipartite soft matching: every token of A draws an edge to the most similar one of B, and the r strongest count.

    Args:
        metric_BNC: what similarity (cosine) is measured on: keys, their mean over the heads.
        r: at most half of the tokens that are not prefix tokens.
        prefix: P; they are neither merged nor merged into.
    """
    metric = metric_BNC / metric_BNC.norm(dim=-1, keepdim=True).clamp_min(1e-12)
    similarity_BAB = metric[:, ::2] @ metric[:, 1::2].mT
    similarity_BAB[:, : (prefix + 1) // 2] = -math.inf
    similarity_BAB[:, :, : prefix // 2] = -math.inf
    best_BA, target_BA = similarity_BAB.max(-1)
    order_BA = best_BA.argsort(dim=1, descending=True, stable=True)
    source_BR = order_BA[:, :r]
    return Matching(order_BA[:, r:].sort(1).values, source_BR, target_BA.gather(1, source_BR))


def merge(x_BNC: Tensor, size_BN: Tensor, matching: Matching) -> tuple[Tensor, Tensor]:
    """Each pair becomes one token, the mean of all the patches it stands for.

    Args:
        size_BN: how many patches each token stands for.

    Returns:
        (B, N − r, C): what stays of A, then B; and the new sizes (B, N − r).
    """
    size = size_BN.unsqueeze(-1).to(x_BNC.dtype)
    sums, sizes = (_merged_sum(t, matching) for t in (x_BNC * size, size))
    return sums / sizes, sizes.squeeze(-1)


def _merged_sum(x_BNC: Tensor, matching: Matching) -> Tensor:
    a, b = x_BNC[:, ::2], x_BNC[:, 1::2]
    target = matching.target_BR.unsqueeze(-1).expand(-1, -1, x_BNC.shape[-1])
    return torch.cat([take(a, matching.stay_BU), b.scatter_add(1, target, take(a, matching.source_BR))], 1)
