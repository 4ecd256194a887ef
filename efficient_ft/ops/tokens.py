"""Fewer tokens: which are important, dropping and fusing them, merging them. Pure functions of tensors.

Tokens are (B, N, C), the first P of them prefix tokens (class, distillation, registers), which are never dropped. What
is said of a "patch" token holds for a fused or merged one too.

Sources: EViT (Liang et al., ICLR 2022: class-token attention, fusing), BSR (CVPRW 2024), ALaST (2024), ToMe (Bolya et
al., ICLR 2023: matching, size-weighted merging, proportional attention).
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils._pytree import register_pytree_node

from efficient_ft.ops.packed import load, running, save


def share_kept(count: int, keep: float) -> int:
    """⌈keep · count⌉, for `keep` as it is written: .1 of 30 is 3, not 4."""
    share = Fraction(str(keep))
    return -(-share.numerator * count // share.denominator)


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
    scale = q_BHND.shape[-1] ** -0.5 if scale is None else scale
    return _ClassRow.apply(q_BHND, k_BHND, scale)[:, prefix:]


def _no_autocast(like: Tensor) -> AbstractContextManager[Any]:
    """Types stay what they are; a device that has no autocast (meta) needs none of it."""
    kind = like.device.type
    return torch.autocast(kind, enabled=False) if torch.amp.is_autocast_available(kind) else nullcontext()


class _ClassRow(torch.autograd.Function):
    """(B, N): of k it keeps what attention itself keeps, so that the row costs no memory of its own."""

    @staticmethod
    def forward(ctx: Any, q_BHND: Tensor, k_BHND: Tensor, scale: float) -> Tensor:
        wide = torch.promote_types(q_BHND.dtype, torch.float32)
        with _no_autocast(q_BHND):
            q_BHD = q_BHND[:, :, 0].to(wide) * scale
            p_BHN = (k_BHND.to(wide) @ q_BHD.unsqueeze(-1)).squeeze(-1).softmax(-1)
        mode = running()
        save(ctx, k_BHND if mode is None else mode.keep_for_attention(k_BHND), q_BHD, p_BHN)
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
    """The tokens at `index_BK`, (B, K, C); of each image every token once at most."""
    return _Take.apply(x_BNC, index_BK)


class _Take(torch.autograd.Function):
    """torch.gather, which would keep its whole input for the shape of its gradient."""

    @staticmethod
    def forward(ctx: Any, x_BNC: Tensor, index_BK: Tensor) -> Tensor:
        ctx.save_for_backward(index_BK)
        ctx.shape = x_BNC.shape
        return x_BNC.gather(1, _wide(index_BK, x_BNC.shape[-1]))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g_BKC: Tensor) -> tuple[Tensor, None]:
        (index_BK,) = ctx.saved_tensors
        # no token is there twice: nothing has to be added up
        return g_BKC.new_zeros(ctx.shape).scatter_(1, _wide(index_BK, ctx.shape[-1]), g_BKC), None


def _wide(index_BK: Tensor, channels: int) -> Tensor:
    return index_BK.unsqueeze(-1).expand(-1, -1, channels)


# ------------------------------------------------------------------------------------------------ from block to block
@dataclass(frozen=True, eq=False)
class Tokens:
    """What is known of a batch's tokens besides their values once some were dropped or merged.

    Attributes:
        places_BL: the place on the grid, row by row, of each token that is not a prefix token; the j-th fused token
            of a forward pass is at place H·W + j. None: they have none any more (merged).
        fused: so many have been made.
        sizes_BN: how many patches each token stands for, prefix tokens included; None: one each.
        made: what layers that run on these tokens have computed from them, for one another.
    """

    places_BL: Tensor | None = None
    fused: int = 0
    sizes_BN: Tensor | None = None
    made: dict[Any, Any] = field(default_factory=dict, repr=False)

    def columns_BN(self, prefix: int) -> Tensor:
        """The places of all tokens among prefix tokens, grid and fused tokens, in this order."""
        assert self.places_BL is not None
        before = torch.arange(prefix, device=self.places_BL.device).expand(len(self.places_BL), -1)
        return torch.cat([before, self.places_BL + prefix], 1)

    def on_grid(self, x_BNC: Tensor, prefix: int, positions: int) -> Tensor:
        """The tokens on their places of the grid, (B, H · W, C): zeros where one was dropped."""
        assert self.places_BL is not None
        grid = x_BNC.new_zeros(len(x_BNC), positions + self.fused, x_BNC.shape[2])
        index = _wide(self.places_BL, x_BNC.shape[2])
        return grid.scatter_(1, index, x_BNC[:, prefix:])[:, :positions]

    def dropped(self, index_BK: Tensor, positions: int, fuse: bool) -> Tokens:
        """After `drop` kept those at `index_BK` of the tokens, and fused the others or did not."""
        if self.places_BL is None:
            return replace(self, made={})
        places = self.places_BL.gather(1, index_BK)
        if not fuse:
            return replace(self, places_BL=places, made={})
        new = places.new_full((len(places), 1), positions + self.fused)
        return replace(self, places_BL=torch.cat([places, new], 1), fused=self.fused + 1, made={})


def all_there(x_BNC: Tensor, prefix: int, positions: int) -> Tokens:
    """Of the tokens as the model makes them; their places are known where they are as many as the grid has."""
    if x_BNC.shape[1] - prefix != positions:  # images of another size, patches left out at random
        return Tokens()
    places = torch.arange(x_BNC.shape[1] - prefix, device=x_BNC.device)
    return Tokens(places.expand(len(x_BNC), -1))


def _rebuilt(leaves: Iterable[Any], fused: Any) -> Tokens:
    places_BL, sizes_BN = leaves
    return Tokens(places_BL, fused, sizes_BN)


# Kept for a second forward pass as the tensors it is made of.
register_pytree_node(Tokens, lambda t: ([t.places_BL, t.sizes_BN], t.fused), _rebuilt)

#: The attribute of a tensor of tokens that says what is known of them.
_KNOWN = "efficient_ft_tokens"


def known(x_BNC: Tensor) -> tuple[Tensor, Tokens | None]:
    """x, and what it carries; None: the tokens are all there.

    What comes back carries nothing: kept for the backward pass it would hold, unseen, what it carries.
    """
    tokens: Tokens | None = getattr(x_BNC, _KNOWN, None)
    return (x_BNC if tokens is None else _Itself.apply(x_BNC)), tokens


def carry(x_BNC: Tensor, tokens: Tokens | None) -> Tensor:
    """x, which carries `tokens` to the next block: state of a forward pass stays in it, and is replayed with it."""
    if tokens is not None:
        setattr(x_BNC, _KNOWN, tokens)
    return x_BNC


class _Itself(torch.autograd.Function):
    """The same values as another tensor, no view of the first."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g


class _Here(threading.local):
    tokens: Tokens | None = None
    all: bool = False


_here = _Here()


@contextmanager
def among(tokens: Tokens | None) -> Iterator[None]:
    """Layers run meanwhile on these tokens."""
    before, _here.tokens = _here.tokens, tokens
    try:
        yield
    finally:
        _here.tokens = before


def tokens_here() -> Tokens | None:
    """Those a layer runs on now; None: all are there."""
    return _here.tokens


@contextmanager
def all_tokens() -> Iterator[None]:
    """Nothing is dropped or merged meanwhile: a model is looked at."""
    before, _here.all = _here.all, True
    try:
        yield
    finally:
        _here.all = before


def keeps_all() -> bool:
    """Whether nothing is to be dropped or merged now."""
    return _here.all


# ------------------------------------------------------------------------------------------------ ToMe
@torch.no_grad()
def match(metric_BNC: Tensor, r: int, prefix: int) -> Tensor:
    """Bipartite soft matching: tokens alternate between two sets, A (even places) and B (odd ones); every token of A
    draws an edge to the most similar one of B, and the r strongest count.

    Args:
        metric_BNC: what similarity (cosine, in single precision at least) is measured on: keys, their mean over heads.
        r: at most half of the tokens that are not prefix tokens.
        prefix: P; they are neither merged nor merged into.

    Returns:
        (B, N): the place of each token among the N − r that are left; both of a pair have the same. Prefix tokens stay
        the first ones, what stays of A comes next, then B.
    """
    metric = metric_BNC.to(torch.promote_types(metric_BNC.dtype, torch.float32))
    metric = metric / metric.norm(dim=-1, keepdim=True).clamp_min(1e-12)
    with _no_autocast(metric_BNC):
        similarity_BAB = metric[:, ::2] @ metric[:, 1::2].mT
    of_a, of_b = (prefix + 1) // 2, prefix // 2  # so many of A and of B are prefix tokens, the first ones
    similarity_BAB[:, :of_a] = -math.inf
    similarity_BAB[:, :, :of_b] = -math.inf
    best_BA, target_BA = similarity_BAB.max(-1)
    order_BA = best_BA.argsort(dim=1, descending=True, stable=True)
    source_BR, stay_BU = order_BA[:, :r], order_BA[:, r:].sort(1).values
    u, j = (torch.arange(n, device=metric.device) for n in (stay_BU.shape[1], metric.shape[1] // 2))
    place_of_u = torch.where(u < of_a, 2 * u, u + of_b)
    place_of_j = torch.where(j < of_b, 2 * j + 1, j + len(u))
    place_BN = torch.empty(metric.shape[:2], dtype=torch.long, device=metric.device)
    place_BN[:, 1::2] = place_of_j
    place_BN[:, ::2].scatter_(1, stay_BU, place_of_u.expand_as(stay_BU))
    place_BN[:, ::2].scatter_(1, source_BR, place_of_j[target_BA.gather(1, source_BR)])
    return place_BN


def merge(x_BNC: Tensor, size_BN: Tensor, place_BN: Tensor, left: int) -> tuple[Tensor, Tensor]:
    """Tokens of the same place become one, the mean of all the patches they stand for.

    Args:
        size_BN: how many patches each token stands for, in single precision at least.
        place_BN: as `match` gives it.
        left: N − r.

    Returns:
        (B, N − r, C), and the new sizes (B, N − r).
    """
    sizes = size_BN.new_zeros(len(size_BN), left).scatter_add_(1, place_BN, size_BN)
    return _Merge.apply(x_BNC, size_BN / sizes.gather(1, place_BN), place_BN, left), sizes


class _Merge(torch.autograd.Function):
    """Σ over the tokens of each place of share · x. It keeps shares and places, no activation."""

    @staticmethod
    def forward(ctx: Any, x_BNC: Tensor, share_BN: Tensor, place_BN: Tensor, left: int) -> Tensor:
        ctx.save_for_backward(share_BN, place_BN)
        ctx.type = x_BNC.dtype
        # rows of the whole batch: CPUs add those up many times faster
        first = torch.arange(len(place_BN), device=place_BN.device).unsqueeze(1) * left
        rows = (place_BN + first).flatten().unsqueeze(-1).expand(-1, x_BNC.shape[-1])
        shares = (x_BNC * share_BN.unsqueeze(-1)).flatten(0, 1)
        sums = shares.new_zeros(len(x_BNC) * left, x_BNC.shape[-1]).scatter_add_(0, rows, shares)
        return sums.unflatten(0, (len(x_BNC), left)).to(x_BNC.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g_BUC: Tensor) -> tuple[Tensor | None, ...]:
        share_BN, place_BN = ctx.saved_tensors
        g = g_BUC.gather(1, _wide(place_BN, g_BUC.shape[-1])) * share_BN.unsqueeze(-1)
        return g.to(ctx.type), None, None, None
