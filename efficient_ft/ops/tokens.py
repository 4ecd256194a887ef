"""Functions that score, drop, fuse and merge tokens, and the record of the remaining tokens.

Tokens have the shape (B, N, C). The first P tokens are prefix tokens (class token, distillation token, registers),
which are never dropped. The other tokens are called patch tokens, even after fusion or merging.

The record contains the grid positions of the remaining tokens, and the patches that each token represents. The record
is passed from block to block as an attribute of the token tensor (`attach_tokens`, `pop_tokens`). Each forward pass
creates a new record, and recomputation in the backward pass creates an equal record. Layers inside a block read the
record with `current_tokens`.

Sources: EViT (Liang et al., ICLR 2022); BSR (CVPR Workshops 2024); ToMe (Bolya et al., "Token Merging: Your ViT But
Faster", ICLR 2023).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import register_pytree_node

from efficient_ft.core.context import context, set_context
from efficient_ft.ops.autocast import autocast_disabled
from efficient_ft.ops.first_order import first_order
from efficient_ft.ops.saving import current_packing, load, save
from efficient_ft.ops.storage import Packed


def class_attention(q_BHND: Tensor, k_BHND: Tensor, prefix: int, scale: float | None = None) -> Tensor:
    """Compute the attention of the class token to each patch token.

    The result is the row of the class token in softmax(q kᵀ · scale), averaged over heads. The row is computed
    separately, because fused attention does not return attention weights. The computation requires O(H · N · D)
    operations, which use at least single precision. Source: EViT, Equation 3.

    Args:
        q_BHND, k_BHND: Inputs of attention, after q and k normalization and rotary embeddings.
        prefix: Number of prefix tokens, P. The class token must be the first token.
        scale: Factor by which the scores are multiplied. Default: 1 / √D.

    Returns:
        Attention weights, (B, N − P). The weights sum to less than 1, because prefix tokens also receive attention.
    """
    scale = q_BHND.shape[-1] ** -0.5 if scale is None else scale
    return _ClassRow.apply(q_BHND, k_BHND, scale)[:, prefix:]


class _ClassRow(torch.autograd.Function):
    """Attention weights of the class token, (B, N). k is packed as in attention, so that k is saved only once."""

    @staticmethod
    def forward(ctx: Any, q_BHND: Tensor, k_BHND: Tensor, scale: float) -> Tensor:
        wide = torch.promote_types(q_BHND.dtype, torch.float32)
        with autocast_disabled(q_BHND):
            q_BHD = q_BHND[:, :, 0].to(wide) * scale
            p_BHN = (k_BHND.to(wide) @ q_BHD.unsqueeze(-1)).squeeze(-1).softmax(-1)
        mode = current_packing()
        kept: Tensor | Packed = k_BHND
        if mode is not None:
            mode.begin("class_row")
            kept = mode.keep(k_BHND, mode.policy.fused or mode.policy.attention, k_BHND.dtype, 1, role="k")
        save(ctx, kept, q_BHD, p_BHN)
        ctx.scale, ctx.types, ctx.tokens = scale, (q_BHND.dtype, k_BHND.dtype), q_BHND.shape[2]
        return p_BHN.mean(1)

    @staticmethod
    @first_order
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
    """Return ⌈keep_rate · count⌉. `keep_rate` is interpreted as an exact decimal number, so that 0.1 · 30 is 3."""
    share = Fraction(str(keep_rate))
    return -(-share.numerator * count // share.denominator)


def drop(x_BNC: Tensor, scores_BL: Tensor, prefix: int, kept: int, fuse: bool) -> tuple[Tensor, Tensor]:
    """Keep the prefix tokens and the `kept` patch tokens with the highest scores, in descending order of score.

    Args:
        x_BNC: Tokens, with prefix tokens first.
        scores_BL: Scores of the L = N − P patch tokens.
        prefix: Number of prefix tokens, P.
        kept: Number of patch tokens to keep, K, from 0 to L.
        fuse: If True, append the token Σ aᵢ xᵢ, where xᵢ are the dropped tokens and aᵢ are their scores (EViT, Equation
            4; BSR). Gradients flow through both aᵢ and xᵢ.

    Returns:
        Tokens (B, P + K, C), and the indices (B, K) of the kept patch tokens, from 0 to L − 1. If tokens were fused,
        the fused token is appended. Its index is that of the dropped token with the highest score.
    """
    patches_BLC = x_BNC[:, prefix:]
    order_BL = largest_first(scores_BL)
    index_BK = order_BL[:, :kept]
    parts = [x_BNC[:, :prefix], take(patches_BLC, index_BK)]
    if fuse and kept < scores_BL.shape[1]:
        rest = order_BL[:, kept:]
        weights = scores_BL.gather(1, rest).to(x_BNC.dtype)
        parts.append(weights.unsqueeze(1) @ take(patches_BLC, rest))
        index_BK = order_BL[:, : kept + 1]
    return torch.cat(parts, 1), index_BK


def take(x_BNC: Tensor, index_BK: Tensor) -> Tensor:
    """Return the tokens at the indices `index_BK`, (B, K, C). The indices of an image must be unique."""
    return _Take.apply(x_BNC, index_BK)


class _Take(torch.autograd.Function):
    """Gather operation that saves the shape of its input, whereas torch.gather saves the input itself."""

    @staticmethod
    def forward(ctx: Any, x_BNC: Tensor, index_BK: Tensor) -> Tensor:
        ctx.save_for_backward(index_BK)
        ctx.shape = x_BNC.shape
        return x_BNC.gather(1, over_channels(index_BK, x_BNC.shape[-1]))

    @staticmethod
    @first_order
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


@torch.no_grad()
def match(metric_BNC: Tensor, r: int, prefix: int) -> Tensor:
    """Compute bipartite soft matching (ToMe, Section 3).

    Tokens alternate between two sets, A (even positions) and B (odd positions). Each token of A is matched with the
    most similar token of B. The r pairs with the highest similarity are merged.

    Args:
        metric_BNC: Features whose cosine similarity is compared in at least single precision. ToMe uses the keys,
            averaged over heads.
        r: Number of merged tokens, at most half of the patch tokens.
        prefix: Number of prefix tokens, P. Prefix tokens are not merged.

    Returns:
        New index of each token, (B, N), from 0 to N − r − 1. Both tokens of a pair have the same index. The prefix
        tokens are followed by the unmerged tokens of A and then by the tokens of B, each in the order of the input. In
        contrast, the paper concatenates A and B. The order only affects the sets A and B of the next matching.
    """
    metric = metric_BNC.to(torch.promote_types(metric_BNC.dtype, torch.float32))
    metric = metric / metric.norm(dim=-1, keepdim=True).clamp_min(1e-12)
    with autocast_disabled(metric_BNC):
        similarity_BAB = metric[:, ::2] @ metric[:, 1::2].mT
    of_a, of_b = (prefix + 1) // 2, prefix // 2  # number of prefix tokens in A and in B
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
    """Merge tokens with equal indices. A merged token is the mean of all patches that these tokens represent.

    Args:
        x_BNC: Tokens.
        size_BN: Number of patches that each token represents, in at least single precision.
        index_BN: New index of each token, from `match`.
        left: Number of remaining tokens, N − r.

    Returns:
        Tokens (B, N − r, C), and their sizes (B, N − r).
    """
    sizes = size_BN.new_zeros(size_BN.shape[0], left).scatter_add_(1, index_BN, size_BN)
    return _Merge.apply(x_BNC, size_BN / sizes.gather(1, index_BN), index_BN, left), sizes


@torch.no_grad()
def representatives(value_BL: Tensor, size_BN: Tensor, index_BN: Tensor, left: int, prefix: int) -> Tensor:
    """Select a value for each patch token that `merge` returns.

    If tokens were merged, the value of the token that represents the most patches is selected.

    Args:
        value_BL: Integer value of each of the L = N − P patch tokens.
        size_BN: Number of patches that each token represents.
        index_BN: New index of each token, from `match`.
        left: Number of remaining tokens, N − r.
        prefix: Number of prefix tokens, P, which are not merged.

    Returns:
        Values (B, L − r). If several tokens represent the same number of patches, the value of the last of them is
        selected.
    """
    count = index_BN.shape[1]
    key_BN = size_BN.long() * count + torch.arange(count, device=index_BN.device)
    largest_BU = key_BN.new_zeros(key_BN.shape[0], left).scatter_reduce_(1, index_BN, key_BN, "amax") % count
    return value_BL.gather(1, largest_BU[:, prefix:] - prefix)


def unmerge(x_BUC: Tensor, index_BN: Tensor) -> Tensor:
    """Repeat each merged token once for each of its original tokens. The result has the shape before `merge`.

    Args:
        x_BUC: Merged tokens.
        index_BN: Index of the merged token that represents each of the N original tokens.

    Returns:
        Tokens (B, N, C) in their original order. The mean of these tokens is the mean of x weighted by sizes. Attention
        over these tokens equals attention over x if the logarithms of the sizes are added to the scores.
    """
    return _Unmerge.apply(x_BUC, index_BN)


class _Merge(torch.autograd.Function):
    """Sum of the tokens with the same index, weighted by `share`. Only shares and indices are saved."""

    @staticmethod
    def forward(ctx: Any, x_BNC: Tensor, share_BN: Tensor, index_BN: Tensor, left: int) -> Tensor:
        ctx.save_for_backward(share_BN, index_BN)
        ctx.type = x_BNC.dtype
        return _sums(x_BNC * share_BN.unsqueeze(-1), index_BN, left).to(x_BNC.dtype)

    @staticmethod
    @first_order
    def backward(ctx: Any, g_BUC: Tensor) -> tuple[Tensor | None, ...]:
        share_BN, index_BN = ctx.saved_tensors
        g = g_BUC.gather(1, over_channels(index_BN, g_BUC.shape[-1])) * share_BN.unsqueeze(-1)
        return g.to(ctx.type), None, None, None


class _Unmerge(torch.autograd.Function):
    """Gather operation for indices that may repeat, which saves only the indices."""

    @staticmethod
    def forward(ctx: Any, x_BUC: Tensor, index_BN: Tensor) -> Tensor:
        ctx.save_for_backward(index_BN)
        ctx.left = x_BUC.shape[1]
        return x_BUC.gather(1, over_channels(index_BN, x_BUC.shape[-1]))

    @staticmethod
    @first_order
    def backward(ctx: Any, g_BNC: Tensor) -> tuple[Tensor | None, ...]:
        (index_BN,) = ctx.saved_tensors
        wide = torch.promote_types(g_BNC.dtype, torch.float32)
        return _sums(g_BNC.to(wide), index_BN, ctx.left).to(g_BNC.dtype), None


def _sums(x_BNC: Tensor, index_BN: Tensor, left: int) -> Tensor:
    """Sum the tokens with equal indices. The result has the shape (B, left, C)."""
    # On CPUs, summing over the rows of the flattened batch is many times faster than summing along dimension 1.
    first = torch.arange(index_BN.shape[0], device=index_BN.device).unsqueeze(1) * left
    rows = (index_BN + first).flatten().unsqueeze(-1).expand(-1, x_BNC.shape[-1])
    sums = x_BNC.new_zeros(x_BNC.shape[0] * left, x_BNC.shape[-1]).scatter_add_(0, rows, x_BNC.flatten(0, 1))
    return sums.unflatten(0, (x_BNC.shape[0], left))


@dataclass(frozen=True, eq=False)
class Tokens:
    """Record of the tokens of a batch after some tokens have been dropped or merged.

    Attributes:
        grid_index_BL: Grid index (row by row) of each token except prefix tokens. The j-th fused token of a forward
            pass has the index H·W + j. The attribute is None if the indices are unknown (merged tokens, or a different
            image size).
        rotary_index_BL: Index of the rotary embedding of each token except prefix tokens, or None if the blocks have no
            rotary embeddings. A fused or merged token has the embedding of one of the tokens that it represents.
        fused: Number of fused tokens so far.
        sizes_BN: Number of patches that each token represents, including prefix tokens, or None if each token
            represents one patch.
        merged_into_BN: Index of the token that represents each original token, or None if the indices are not recorded.
        cache: Results shared by all layers that receive these tokens.
    """

    grid_index_BL: Tensor | None = None
    rotary_index_BL: Tensor | None = None
    fused: int = 0
    sizes_BN: Tensor | None = None
    merged_into_BN: Tensor | None = None
    cache: dict[Any, Any] = field(default_factory=dict, repr=False)

    @classmethod
    def full(cls, x_BNC: Tensor, prefix: int, positions: int, rotary: int | None = None) -> Tokens:
        """Create the record of all tokens before any token is dropped.

        `prefix` is the number of prefix tokens, and `positions` is the number of grid positions. Indices in the grid
        are set only if the number of patch tokens equals the number of grid positions. `rotary` is the number of rotary
        embeddings, or None if the blocks have no rotary embeddings.
        """
        patches = x_BNC.shape[1] - prefix
        assert rotary in (None, patches), f"{patches} patch tokens have {rotary} rotary embeddings"
        index = torch.arange(patches, device=x_BNC.device).expand(x_BNC.shape[0], -1)
        # The numbers differ if the image size differs, or if patches were dropped randomly.
        return cls(index if patches == positions else None, None if rotary is None else index)

    def columns_BN(self, prefix: int) -> Tensor:
        """Return the column of each token in a matrix over prefix tokens, then grid positions, then fused tokens."""
        assert self.grid_index_BL is not None
        before = torch.arange(prefix, device=self.grid_index_BL.device).expand(self.grid_index_BL.shape[0], -1)
        return torch.cat([before, self.grid_index_BL + prefix], 1)

    def on_grid(self, x_BNC: Tensor, prefix: int, positions: int) -> Tensor:
        """Scatter the tokens to the grid, (B, H·W, C), with zeros for dropped tokens."""
        assert self.grid_index_BL is not None
        grid = x_BNC.new_zeros(x_BNC.shape[0], positions + self.fused, x_BNC.shape[2])
        index = over_channels(self.grid_index_BL, x_BNC.shape[2])
        return grid.scatter_(1, index, x_BNC[:, prefix:])[:, :positions]

    def dropped(self, index_BK: Tensor, positions: int, fuse: bool) -> Tokens:
        """Return the record of the tokens at `index_BK`.

        If `fuse` is True, the last column of `index_BK` belongs to the fused token.
        """
        grid, rotary = self.grid_index_BL, self.rotary_index_BL
        if rotary is not None:
            rotary = rotary.gather(1, index_BK)
        if grid is None:
            return replace(self, rotary_index_BL=rotary, cache={})
        if not fuse:
            return replace(self, grid_index_BL=grid.gather(1, index_BK), rotary_index_BL=rotary, cache={})
        kept = grid.gather(1, index_BK[:, :-1])
        grid = torch.cat([kept, kept.new_full((kept.shape[0], 1), positions + self.fused)], 1)
        return replace(self, grid_index_BL=grid, rotary_index_BL=rotary, fused=self.fused + 1, cache={})


def _rebuild(leaves: Iterable[Any], fused: Any) -> Tokens:
    grid_index_BL, rotary_index_BL, sizes_BN, merged_into_BN = leaves
    return Tokens(grid_index_BL, rotary_index_BL, fused, sizes_BN, merged_into_BN)


# The record is registered as a pytree, so that recomputation saves its tensors.
register_pytree_node(
    Tokens, lambda t: ([t.grid_index_BL, t.rotary_index_BL, t.sizes_BN, t.merged_into_BN], t.fused), _rebuild
)

#: Name of the attribute of a token tensor that stores the record.
_ATTRIBUTE = "efficient_ft_tokens"


def attach_tokens(x_BNC: Tensor, tokens: Tokens | None) -> Tensor:
    """Attach a record to x for the next block, and return x. `tokens` is None if no token was removed."""
    if tokens is not None:
        setattr(x_BNC, _ATTRIBUTE, tokens)
    return x_BNC


def pop_tokens(x_BNC: Tensor) -> tuple[Tensor, Tokens | None]:
    """Return x without its record, and the record, which is None if no token was removed.

    Saving x with its record for the backward pass would also keep the record in memory without counting its size.
    """
    tokens: Tokens | None = getattr(x_BNC, _ATTRIBUTE, None)
    return (x_BNC if tokens is None else _Identity.apply(x_BNC)), tokens


class _Identity(torch.autograd.Function):
    """Identity function whose result has the values, but not the attributes, of x. The result is not a view of x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g


def token_context(tokens: Tokens | None) -> AbstractContextManager[None]:
    """Set the record that `current_tokens` returns inside a ``with`` block."""
    return set_context("tokens", tokens)


def current_tokens() -> Tokens | None:
    """Return the record of the tokens that the current layer receives, or None if no token was removed."""
    tokens: Tokens | None = context.tokens
    return tokens


def token_reduction_suspended() -> AbstractContextManager[None]:
    """Suspend token reduction inside a ``with`` block, for example to probe a model. Blocks then keep all tokens."""
    return set_context("token_reduction_suspended", True)


def is_token_reduction_suspended() -> bool:
    """Return True if blocks must keep all tokens."""
    return context.token_reduction_suspended
