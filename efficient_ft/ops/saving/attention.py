"""Attention: softmax, fused and unfused scaled dot-product attention, multi-head attention, and normalized q and k."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend

from efficient_ft.ops.attention import (
    attention_gradients,
    attention_output,
    attention_weights,
    supports_attention,
)
from efficient_ft.ops.autocast import to_single_precision
from efficient_ft.ops.first_order import first_order
from efficient_ft.ops.saving.mode import PackedOperations
from efficient_ft.ops.saving.products import matmul, product
from efficient_ft.ops.saving.saving import as_kept, load, save
from efficient_ft.ops.saving.sharing import SharedUnpack, apply_to
from efficient_ft.ops.saving.table import name_of, packed_operation, packs
from efficient_ft.ops.storage import Dense, Packed

aten = torch.ops.aten

_Unpack = Callable[[], Tensor]

#: Lower bound of the sum of a packed softmax output, which prevents a division by 0 if packing dropped all values.
_TINY = 1e-30

_MULTI_HEAD_ATTENTION = inspect.signature(F.multi_head_attention_forward)


class _Softmax(torch.autograd.Function):
    """Softmax that saves its output. The output has the dtype `dtype`, and is 0 where `masked_out` is True."""

    @staticmethod
    def forward(
        ctx: Any, mode: PackedOperations, x: Tensor, dim: int, dtype: torch.dtype, masked_out: Tensor | None = None
    ) -> Tensor:
        p = torch.softmax(x, dim).to(dtype)
        if masked_out is not None:
            p.masked_fill_(masked_out, 0)
        save(ctx, mode.keep(p, mode.policy.attention, None, 1, result=True, role="output"))
        ctx.dim, ctx.type, ctx.zero_sum = dim, x.dtype, mode.policy.position_network
        return p

    @staticmethod
    @first_order
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        (p,) = load(ctx)
        p, g = p.to(ctx.type), g.to(ctx.type)  # in 16 bits, the small differences below would be lost
        if ctx.zero_sum:  # the values of a packed p do not sum to 1
            total = p.sum(ctx.dim, keepdim=True)
            g_x = p * (g - (g * p).sum(ctx.dim, keepdim=True) / total.clamp_min(_TINY))
            return None, g_x, None, None, None
        return None, aten._softmax_backward_data(g, p, ctx.dim, p.dtype), None, None, None


@packs(torch.softmax, Tensor.softmax)
def _softmax(mode: PackedOperations, input: Tensor, dim: int | None = None, dtype: torch.dtype | None = None) -> Any:
    if dim is None or not mode.supports(input):
        return NotImplemented
    x = to_single_precision(input) if dtype is None else input.to(dtype)
    p = _Softmax.apply(mode, x, dim, x.dtype)
    return as_kept(mode, p, mode.policy.attention, heads=1, cast=False)


packs(F.softmax)(lambda mode, input, dim=None, _stacklevel=3, dtype=None: _softmax(mode, input, dim, dtype))


class _FusedAttention(torch.autograd.Function):
    """Compute softmax(q kᵀ · scale + bias) v with torch's fused attention kernel and a constant bias.

    The backward pass recomputes attention from the unpacked q, k and v. The next layer can reuse the recomputed result.
    """

    @staticmethod
    def forward(
        ctx: Any, mode: PackedOperations, q: Tensor, k: Tensor, v: Tensor, scale: float | None, bias: Tensor | None
    ) -> Tensor:
        packer = mode.policy.fused
        assert packer is not None
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        y = F.scaled_dot_product_attention(q, k, v, bias, scale=scale)
        parts = [mode.keep(x, packer, y.dtype, 1, role=role) for x, role in zip((q, k, v), "qkv", strict=True)]
        ctx.compiled = not isinstance(packer, Dense)  # exact methods do not load the compiler of the kernels
        form = [(p.unpack, len(p.tensors)) for p in parts]
        unpack = partial(_attention_again, form, scale, bias is not None, ctx.compiled)
        tensors = (*(t for p in parts for t in p.tensors), *(() if bias is None else (bias,)))
        shared = SharedUnpack(unpack, mode.state.last)
        shared.add_user()
        save(ctx, Packed(tensors, shared, shared))
        ctx.types, ctx.scale = (q.dtype, k.dtype, v.dtype), scale
        if mode.policy.derived_all and y.dim() == 4:
            mode.set_source(
                y.transpose(1, 2).flatten(2), Packed(tensors, partial(apply_to, _merge_heads, shared), shared)
            )
        return y

    @staticmethod
    @first_order
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        (y,) = load(ctx)
        found = attention_backward(y, g, ctx.scale, ctx.compiled)
        return None, *(g.to(t) for g, t in zip(found, ctx.types, strict=True)), None, None


def _attention_again(
    parts: Sequence[tuple[Any, int]], scale: float, has_bias: bool, compiled: bool, *tensors: Tensor
) -> Tensor:
    """Recompute attention from the saved tensors of q, k and v."""
    remaining = iter(tensors)
    q, k, v = [unpack(*islice(remaining, count)) for unpack, count in parts]
    return attention_again(q, k, v, next(remaining) if has_bias else None, scale, compiled)


def attention_again(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float, compiled: bool) -> Tensor:
    """Recompute the output of attention, and attach what `attention_backward` needs.

    An autograd graph is recorded only if neither `attention_gradients` nor torch's kernel for CPUs supports the inputs.
    """
    inputs, logsumexp = [q, k, v], None
    if bias is None and supports_attention(q, k, v):
        y = attention_output(q, k, v, scale, compiled)
    elif bias is None and uses_cpu_kernel(q, k, v):
        y, logsumexp = aten._scaled_dot_product_flash_attention_for_cpu.default(q, k, v, scale=scale)
    else:
        with torch.enable_grad():
            q, k, v = inputs = [x.detach().requires_grad_() for x in inputs]
            y = F.scaled_dot_product_attention(q, k, v, bias, scale=scale)
    y.attention_inputs, y.attention_logsumexp = inputs, logsumexp  # type: ignore[attr-defined]
    return y


def attention_backward(y: Any, g: Tensor, scale: float, compiled: bool) -> Sequence[Tensor]:
    """Return the gradients of q, k and v, given the result y of `attention_again`, and the gradient of y."""
    (q, k, v), logsumexp = y.attention_inputs, y.attention_logsumexp
    if y.requires_grad:
        return torch.autograd.grad(y, (q, k, v), g)
    if logsumexp is None:
        return attention_gradients(q, k, v, g, scale, compiled)
    return cpu_kernel_backward(g, q, k, v, y, logsumexp, scale)


def uses_cpu_kernel(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Return True if torch would compute attention in q, k and v without a mask with its fused kernel for CPUs."""
    return q.device.type == "cpu" and bool(torch._fused_sdp_choice(q, k, v) == SDPBackend.FLASH_ATTENTION.value)


def cpu_kernel_backward(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, logsumexp: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v, given the output and the logsumexp of torch's fused kernel for CPUs."""
    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    found: tuple[Tensor, Tensor, Tensor] = backward(g, q, k, v, y, logsumexp, 0.0, False, scale=scale)
    return found


def _merge_heads(y: Tensor) -> Tensor:
    """Reshape an attention output from (B, H, N, D) to (B, N, H·D), and detach the output from its graph."""
    return y.detach().transpose(1, 2).flatten(2)


class _Attention(torch.autograd.Function):
    """Unfused attention softmax(q kᵀ · scale + bias) v for q, k and v (..., N, D), with a constant bias.

    The output of softmax is saved only once for both softmax and the product with v.
    """

    @staticmethod
    def forward(
        ctx: Any, mode: PackedOperations, q: Tensor, k: Tensor, v: Tensor, scale: float, bias: Tensor | None
    ) -> Tensor:
        q, k, v, p, y = unfused_attention(q, k, v, scale, bias)
        of_q, of_k = ctx.needs_input_grad[1:3]
        packer = mode.policy.attention
        kept_q = mode.keep(q, packer, y.dtype, 1, role="q") if of_k else None
        kept_k = mode.keep(k, packer, y.dtype, 1, role="k") if of_q else None
        kept_p = mode.keep(p, packer, y.dtype, 1, role="p")
        kept_v = mode.keep(v, packer, y.dtype, 1, role="v") if of_q or of_k else None
        save(ctx, kept_v, kept_p, kept_k, kept_q)
        ctx.scale, ctx.types = scale, (q.dtype, k.dtype, v.dtype)
        return y

    @staticmethod
    @first_order
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        v, p, k, q = load(ctx, one_by_one=True)
        found = unfused_attention_backward(g, v, p, k, q, ctx.scale, ctx.needs_input_grad[3])
        return None, *(None if t is None else t.to(d) for t, d in zip(found, ctx.types, strict=True)), None, None


def unfused_attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return contiguous q, k and v, the output p of the softmax, and p v."""
    # Non-contiguous inputs are copied once here, because otherwise each product would copy its inputs.
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    if bias is None and supports_attention(q, k, v):
        p = attention_weights(q, k, scale)
    else:
        p = _attention_weights(q, k, scale, bias)
    return q, k, v, p, p @ v


def _attention_weights(q: Tensor, k: Tensor, scale: float, bias: Tensor | None) -> Tensor:
    """Compute softmax(q kᵀ · scale + bias) for q and k (..., N, D).

    If the product has 16 bits, its rounding errors are computed and added in float32, because torch's fused attention
    also computes the softmax from float32 scores.
    """
    product = scores = _scaled_product(q, k.mT, scale)
    if product.dtype.itemsize == 2:
        scores = product.float().add_(_scaled_product(q, k.mT, scale, product))
    if bias is not None:
        scores += bias
    p = torch.softmax(scores, -1).to(product.dtype)
    if bias is not None:  # torch returns zeros for fully masked queries
        p.masked_fill_(_masked_out(bias), 0)
    return p


def unfused_attention_backward(
    g: Tensor, v: _Unpack | None, p: _Unpack, k: _Unpack | None, q: _Unpack | None, scale: float, of_v: bool
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the gradients of q, k and v. The arguments v, p, k and q are functions that unpack the tensors."""
    g, dense = g.contiguous(), p()
    g_v = dense.mT @ g if of_v else None
    g_q = g_k = None
    if v is not None:
        g_scores = aten._softmax_backward_data.default(g @ v().mT, dense, -1, dense.dtype)
        del dense
        g_q = None if k is None else _scaled_product(g_scores, k(), scale)
        g_k = None if q is None else _scaled_product(g_scores.mT, q(), scale)
    return g_q, g_k, g_v


def _masked_out(mask: Tensor) -> Tensor:
    """Return a boolean mask (..., N, 1) of the queries for which `mask` (..., N, M) excludes every key."""
    if mask.dtype == torch.bool:
        return mask.any(-1, keepdim=True).logical_not()
    return mask.detach().amax(-1, keepdim=True) == -torch.inf


def _scaled_product(a: Tensor, b: Tensor, scale: float, rounded: Tensor | None = None) -> Tensor:
    """Compute scale · a b for a (..., n, k) and b (..., k, m) in one kernel.

    If `rounded` (..., n, m) is given, compute the rounding errors scale · a b - rounded instead.
    """
    batch = a.shape[:-2]
    start = a.new_empty(1, 1, 1) if rounded is None else rounded.flatten(0, -3)
    y = torch.baddbmm(start, a.flatten(0, -3), b.flatten(0, -3), beta=0 if rounded is None else -1, alpha=scale)
    return y.view(*batch, *y.shape[1:])


@packs(F.scaled_dot_product_attention)
def _attention(
    mode: PackedOperations,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Replacement for `F.scaled_dot_product_attention` with the same parameters."""
    if mode.policy.plain_attention or is_causal or enable_gqa or not mode.supports(query, key, value):
        return NotImplemented
    batch = query.shape[:-2]
    # The inputs are broadcast, for example, if several query heads share a head of k and v.
    broadcast = query.dim() < 3 or key.shape[:-2] != batch or value.shape[:-2] != batch
    if attn_mask is not None:
        scores_shape = (*query.shape[:-1], key.shape[-2])
        broadcast |= torch.broadcast_shapes(attn_mask.shape, scores_shape) != scores_shape
    constant = attn_mask is None or (attn_mask.is_floating_point() and not attn_mask.requires_grad)
    if mode.policy.fused is not None and constant and not dropout_p:
        return _FusedAttention.apply(mode, query, key, value, scale, attn_mask)
    if broadcast:
        return NotImplemented
    if constant and not dropout_p and not mode.policy.forward:
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        return _Attention.apply(mode, query, key, value, scale, attn_mask)
    # Non-contiguous inputs are copied once here, because otherwise each product would copy its inputs.
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    late = query.dtype == torch.bfloat16 and not mode.policy.forward  # in fp16, unscaled scores could overflow
    query = (query if late else query * scale).contiguous()
    key, value = key.contiguous(), value.contiguous()
    mode.begin("scores")
    scores = matmul(mode, query, key.mT)
    if scores is NotImplemented:
        return NotImplemented
    dtype = scores.dtype
    if dtype.itemsize == 2 and not mode.policy.forward:  # see `_attention_weights`
        with torch.no_grad():
            rounding_errors = _scaled_product(query.to(dtype), key.mT.to(dtype), 1.0, scores)
        scores = scores.float() + rounding_errors
    if late:
        scores = scores * scale
    masked_out = None
    if attn_mask is not None:
        masked_out = _masked_out(attn_mask)  # torch returns zeros for fully masked queries
        excluded = attn_mask.logical_not() if attn_mask.dtype == torch.bool else None
        scores = scores + attn_mask if excluded is None else scores.masked_fill(excluded, -torch.inf)
    mode.begin("softmax")
    p = _Softmax.apply(mode, to_single_precision(scores), -1, dtype, masked_out)
    p = as_kept(mode, p, mode.policy.attention, heads=1, cast=False).to(value.dtype)
    mode.begin("values")
    return product(mode, F.dropout(p, dropout_p), value)


@packs(F.multi_head_attention_forward)
def _multi_head_attention(mode: PackedOperations, *args: Any, **kwargs: Any) -> Any:
    """Compute multi-head attention for inputs (N, B, C). Masks and returned attention weights are not supported."""
    bound = _MULTI_HEAD_ATTENTION.bind(*args, **kwargs)
    bound.apply_defaults()
    a = SimpleNamespace(**bound.arguments)
    inputs = [t.transpose(0, 1) for t in (a.query, a.key, a.value)]
    unusual = (a.need_weights, a.add_zero_attn, a.use_separate_proj_weight, a.is_causal, a.in_proj_weight is None)
    given = (a.bias_k, a.bias_v, a.key_padding_mask, a.attn_mask, a.static_k, a.static_v)
    trained = (a.in_proj_weight, a.in_proj_bias, a.out_proj_weight, a.out_proj_bias)
    supported = a.query.dim() == 3 and mode.supports(*inputs, trained=trained)
    if any(unusual) or any(t is not None for t in given) or not supported:
        return NotImplemented
    if a.query is a.key and a.key is a.value:
        parts = [*_packed_or_plain(mode, F.linear, inputs[0], a.in_proj_weight, a.in_proj_bias).chunk(3, -1)]
    else:
        biases = (None,) * 3 if a.in_proj_bias is None else a.in_proj_bias.chunk(3)
        projections = zip(inputs, a.in_proj_weight.chunk(3), biases, strict=True)
        parts = [_packed_or_plain(mode, F.linear, x, w, b) for x, w, b in projections]
    q, k, v = (x.unflatten(-1, (a.num_heads, -1)).transpose(1, 2) for x in parts)
    p = a.dropout_p if a.training else 0.0
    y = _packed_or_plain(mode, F.scaled_dot_product_attention, q, k, v, None, p).transpose(1, 2).flatten(2)
    return _packed_or_plain(mode, F.linear, y, a.out_proj_weight, a.out_proj_bias).transpose(0, 1), None


def _packed_or_plain(mode: PackedOperations, function: Any, *args: Any) -> Tensor:
    """Call a torch function, or the packed version of the function if that version supports the arguments."""
    operation = packed_operation(function)
    assert operation is not None
    mode.begin(name_of(function))
    y = operation(mode, *args)
    return function(*args) if y is NotImplemented else y


class _Normalize(torch.autograd.Function):
    """Normalization x / max(‖x‖, ε) along `dim`, which saves its output. The next product saves the same tensor."""

    @staticmethod
    def forward(ctx: Any, mode: PackedOperations, x: Tensor, dim: int, eps: float) -> Tensor:
        norm = torch.linalg.vector_norm(x, dim=dim, keepdim=True)
        y = x / norm.clamp_min(eps)
        save(ctx, mode.keep(y, mode.policy.attention, None, 1, result=True, role="output"), norm)
        ctx.dim, ctx.eps = dim, eps
        return y

    @staticmethod
    @first_order
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        y, norm = load(ctx)
        along = (g * y).sum(ctx.dim, keepdim=True).where(norm >= ctx.eps, 0)  # below ε, the divisor is constant
        return None, (g - y * along) / norm.clamp_min(ctx.eps), None, None


@packs(F.normalize)
def _normalize(
    mode: PackedOperations, input: Tensor, p: float = 2.0, dim: Any = 1, eps: float = 1e-12, out: Any = None
) -> Any:
    if p != 2 or not isinstance(dim, int) or out is not None or not mode.supports(input):
        return NotImplemented
    y = _Normalize.apply(mode, to_single_precision(input), dim, eps)
    return as_kept(mode, y, mode.policy.attention, heads=1, cast=False)
