"""Attention in bfloat16 on a CPU: the attention weights, the output, and the gradients of q, k and v.

torch's fused attention computes the output and the gradients three times more slowly, because its small products do not
use the bfloat16 units of the processor. The products here are batched products of torch. Scores are computed in two
parts, the rounded scores and their rounding errors, so that the softmax is as accurate as with float32 scores. The
output and the gradients are computed for a part of the attention weights at a time, and the weights are not stored.

A kernel compiled by numba computes the softmax and its gradient in one pass. If numba is not installed, torch's
operations are used.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from efficient_ft.ops.optional import optional_module
from efficient_ft.ops.storage.kernels.cpu import run_in_threads

__all__ = ["attention_gradients", "attention_output", "attention_weights", "supports_attention"]

_AT_A_TIME = 1 << 20  # number of scores that are computed at a time; a tensor of bfloat16 scores has 2 MiB
_ROWS = 32  # number of rows that a thread processes at a time

#: Function that returns the compiled kernels, or None if numba is not installed.
_kernels = partial(optional_module, "efficient_ft.ops.attention.numba_kernels")


def supports_attention(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Return True if q, k and v are non-empty bfloat16 tensors (B, H, N, D) on a CPU with at most 2²⁰ scores per head.

    The number of keys may differ from the number of queries.
    """
    return q.shape[-2] * k.shape[-2] <= _AT_A_TIME and all(
        t.device.type == "cpu"
        and t.dtype == torch.bfloat16
        and t.dim() == 4
        and t.shape[:2] == q.shape[:2]
        and t.numel() > 0
        for t in (q, k, v)
    )


def attention_weights(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """Compute softmax(q kᵀ · scale) for q (B, H, N, D) and k (B, H, M, D) in bfloat16. The result is (B, H, N, M).

    `supports_attention` must return True for q, k and the values.
    """
    p = q.new_empty(*q.shape[:3], k.shape[2])
    for (_, rests, _), (q_part, k_part, p_part) in _parts(q, k, p):
        _score(q_part, k_part, scale, p_part, rests)
        _softmax(p_part, rests, compiled=True)
    return p


def attention_output(q: Tensor, k: Tensor, v: Tensor, scale: float, compiled: bool = True) -> Tensor:
    """Compute softmax(q kᵀ · scale) v for q (B, H, N, D), k (B, H, M, D) and v (B, H, M, E) in bfloat16.

    `supports_attention` must return True for q, k and v. The result has the shape (B, H, N, E). If `compiled` is
    False, no kernel compiled by numba is used, so that numba is not loaded.
    """
    y = q.new_empty(*q.shape[:3], v.shape[3])
    for (scores, rests, _), (q_part, k_part, v_part, y_part) in _parts(q, k, v, y):
        _score(q_part, k_part, scale, scores, rests)
        _softmax(scores, rests, compiled)
        torch.bmm(scores, v_part, out=y_part)
    return y


def attention_gradients(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, scale: float, compiled: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v, given the gradient g (B, H, N, E) of `attention_output`."""
    of_q, of_k, of_v = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (q, k, v))
    for (scores, rests, of_scores), parts in _parts(q, k, v, g.to(q.dtype), of_q, of_k, of_v):
        q_part, k_part, v_part, g_part, of_q_part, of_k_part, of_v_part = parts
        _score(q_part, k_part, scale, scores, rests)
        torch.bmm(g_part, v_part.mT, out=of_scores)
        _softmax(scores, rests, compiled, of_scores, scale)
        torch.bmm(scores.mT, g_part, out=of_v_part)
        torch.bmm(of_scores, k_part, out=of_q_part)
        torch.bmm(of_scores.mT, q_part, out=of_k_part)
    return of_q, of_k, of_v


def _parts(q: Tensor, k: Tensor, *others: Tensor) -> Iterator[tuple[tuple[Tensor, ...], tuple[Tensor, ...]]]:
    """Divide tensors (B, H, ...) into parts (P, ...) of P heads, and yield three buffers (P, N, M) with the parts."""
    heads, size = q.shape[0] * q.shape[1], q.shape[2] * k.shape[2]
    at_a_time = min(_AT_A_TIME // size, heads)
    tensors = [t.reshape(heads, *t.shape[2:]) for t in (q, k, *others)]
    buffers = q.new_empty(3, at_a_time, q.shape[2], k.shape[2])
    for start in range(0, heads, at_a_time):
        stop = min(start + at_a_time, heads)
        yield buffers[:, : stop - start].unbind(), tuple(t[start:stop] for t in tensors)


def _score(q: Tensor, k: Tensor, scale: float, scores: Tensor, rests: Tensor) -> None:
    """Compute the rounded scores q kᵀ · scale, and their rounding errors."""
    torch.baddbmm(scores, q, k.mT, beta=0, alpha=scale, out=scores)
    torch.baddbmm(scores, q, k.mT, beta=-1, alpha=scale, out=rests)


def _softmax(scores: Tensor, rests: Tensor, compiled: bool, g: Tensor | None = None, scale: float = 1.0) -> None:
    """Replace `scores` by the softmax p of scores + rests, and the gradient g of p by the gradient of the products."""
    kernels = _kernels() if compiled and not isinstance(scores, FakeTensor) else None
    if kernels is None:
        p = torch.softmax(scores.float().add_(rests), -1)
        if g is not None:
            g.copy_(torch.ops.aten._softmax_backward_data(g.float(), p, -1, p.dtype).mul_(scale))
        scores.copy_(p)
        return
    rows, n = scores.shape[:-1].numel(), scores.shape[-1]
    addresses = [scores.data_ptr(), rests.data_ptr(), 0 if g is None else g.data_ptr()]
    run_in_threads(
        kernels.softmax(g is not None),
        [-(-rows // _ROWS), _ROWS, rows, n, *addresses, int(np.float64(scale).view(np.int64))],
    )
