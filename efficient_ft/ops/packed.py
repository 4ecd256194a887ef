"""Operations that keep packed tensors for their backward pass, and the mode that puts them in the place of torch's.

A `PackedOperations` mode around a part of a model's forward pass takes the operations that would save activations
(linear layers, convolutions, normalisations, attention's products and softmax, activation functions, products with a
learned scale) and computes the same result, but saves what a `Policy` says. The backward pass uses the formulas of the
operation on the unpacked tensors (Back Razor: Jiang et al., NeurIPS 2022, equation 3): gradients that do not depend
on a packed tensor stay exact. So any model is served whose forward pass is made of torch's functions, and parameters
that need no gradient save nothing for it. What is not in the table at the end runs as it is, and so does all that it
calls (nn.MultiheadAttention is one function to a mode).

A tensor that several operations save (the input of separate q, k and v layers, softmax's output) is packed once.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode

from efficient_ft.ops.packing import Overflow, Packed, Packer, Place, Ranges, pack_bits, unpack_bits

aten = torch.ops.aten


@dataclass(frozen=True)
class Policy:
    """How each kind of tensor is kept.

    Attributes:
        product: inputs of linear layers and convolutions, where the weight trains.
        norm: inputs of normalisations and of products with a learned scale.
        attention: q, k, v and softmax's output.
        activation: inputs of GELU and other smooth activation functions. ReLU's family keeps a bit per element.
        normalised: LayerNorm keeps its normalised input x̂ (centred, and so better pruned) instead of its input.
        derived: what can be computed from what is kept already is not kept again: a product that takes the output of an
            activation function gets it from that function's kept input, and one that takes the output of a LayerNorm
            (if `normalised`) from x̂, with γ and β exact.
        fused: fused attention stays fused; q, k and v are kept like this, and the backward pass recomputes attention
            from them, so that all it uses is consistent. None: attention in its parts.
        forward: the forward pass, too, computes with what comes back of the inputs of products and normalisations, q,
            k, v and softmax's output. A negative control; the formulas of the backward pass stay the same.
    """

    product: Packer
    norm: Packer
    attention: Packer
    activation: Packer
    normalised: bool = False
    derived: bool = False
    fused: Packer | None = None
    forward: bool = False


class _Last:
    """The tensor that was unpacked last, until all its users have had it or another one is unpacked.

    In the backward pass the users of a tensor often come one right after another: the layer that took a norm's output
    and the norm itself, attention's second product and its softmax.
    """

    def __init__(self) -> None:
        # One value, set and read whole: with several devices the backward pass has several threads.
        self.held: tuple[_Unpack, Tensor] | None = None


class _Unpack:
    """The way back to a dense tensor, shared by `users`, of which so many have been `served`."""

    def __init__(self, unpack: Callable[..., Tensor], last: _Last) -> None:
        self.unpack, self.last, self.users, self.served = unpack, last, 0, 0

    def __call__(self, *tensors: Tensor) -> Tensor:
        held, self.last.held = self.last.held, None
        dense = held[1] if held is not None and held[0] is self else None
        del held  # whatever it is gone before something else is unpacked
        if dense is None:
            dense = self.unpack(*tensors)
        self.served += 1
        if self.served % self.users:
            self.last.held = self, dense
        return dense

    def once(self, unpack: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        """What `unpack`, which goes through here, gives, in the forward pass: that is no user's turn."""
        dense = unpack(*tensors)
        self.served -= 1
        self.last.held = None
        return dense


@dataclass
class Session:
    """What packing remembers from step to step: running ranges, and whether a value overflowed."""

    ranges: Ranges = field(default_factory=Ranges)
    overflow: Overflow = field(default_factory=Overflow)
    last: _Last = field(default_factory=_Last)

    def state_dict(self) -> dict[str, Any]:
        """The running ranges, as plain containers."""
        return {place: [low.tolist(), high.tolist()] for place, (low, high) in self.ranges.of.items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.ranges.of = {
            place: (torch.tensor(low, dtype=torch.float32), torch.tensor(high, dtype=torch.float32))
            for place, (low, high) in state_dict.items()
        }


_running = threading.local()


def running() -> PackedOperations | None:
    """The mode around the operation that runs now: how autograd functions that no mode can see pack what they save."""
    return getattr(_running, "mode", None)


class PackedOperations(TorchFunctionMode):
    """While entered, operations on tensors that need a gradient save packed tensors.

    Args:
        policy: how.
        session: kept from step to step.
        region: a name for this part of the model.
        samples: B, images in the batch; every activation's first dimension is a multiple of it.
        heads: of the attention in this part: ranges per head; None: one range per tensor.
    """

    def __init__(self, policy: Policy, session: Session, region: str, samples: int, heads: int | None = None) -> None:
        super().__init__()
        self.policy, self.session, self.region, self.samples, self.heads = policy, session, region, samples, heads
        self._count = 0
        self._suspended = False
        self._kept: dict[tuple[Any, ...], tuple[weakref.ref, Packed]] = {}

    def __enter__(self) -> PackedOperations:
        self._outer = running()
        _running.mode = self
        self.session.last.held = None  # of a backward pass that was not finished
        super().__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)
        _running.mode = self._outer
        self._kept.clear()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        operation = _OPERATIONS.get(func)
        if operation is None or self._suspended or not torch.is_grad_enabled():
            return func(*args, **kwargs)
        result = operation(self, *args, **kwargs)
        return func(*args, **kwargs) if result is NotImplemented else result

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Plain operations meanwhile, on tensors that are no activations of the images."""
        before, self._suspended = self._suspended, True
        try:
            yield
        finally:
            self._suspended = before

    def keep(
        self,
        x: Tensor,
        packer: Packer,
        dtype: torch.dtype | None = None,
        heads: int | None = None,
        result: bool = False,
    ) -> Packed:
        """x packed, once for all that ask for it.

        Args:
            dtype: in which it takes part in the operation (autocast), and comes back.
            heads: the dimension of x that the heads lie along.
            result: x is what the operation returns. A view of it, saved, would hold x, which holds what is saved.
        """
        order, memory, identity = _lying(x)
        storage, key = x.untyped_storage(), (*identity, dtype or x.dtype, packer)
        packed = self._alive(key, storage) or self._alive((*identity, "derived"), storage)
        if packed is None:
            self._count += 1
            groups = None
            if heads is not None and self.heads and heads < x.dim() and x.shape[heads] % self.heads == 0:
                groups = (order.index(heads % x.dim()), self.heads)
            place = Place(
                f"{self.region}/{self._count}", self.samples, self.session.ranges, self.session.overflow, groups
            )
            with torch.no_grad():
                memory = memory.data if result else memory
                packed = packer.pack(memory if dtype is None else memory.to(dtype), place)
            shared = _Unpack(packed.unpack, self.session.last)
            packed = Packed(packed.tensors, shared, shared)
            self._kept[key] = (weakref.ref(storage), packed)
        return _for_user(packed, order, dtype or x.dtype)

    def keep_for_attention(self, x: Tensor) -> Packed:
        """x, a contiguous q, k or v (B, H, N, D), as attention keeps it."""
        return self.keep(x, self.policy.fused or self.policy.attention, x.dtype, 1)

    def weight(self, weight: Tensor) -> tuple[Tensor, Tensor | Packed]:
        """What a linear layer or convolution multiplies by, and what is kept of that."""
        return weight, weight

    def _alive(self, key: tuple[Any, ...], storage: torch.UntypedStorage) -> Packed | None:
        """What is kept under `key`, unless it is of a tensor that is gone, whose memory another one has now."""
        found = self._kept.get(key)
        return found[1] if found is not None and found[0]() is storage else None

    def derived(self, x: Tensor) -> Packed | None:
        """What x can be computed from, where that is kept already."""
        order, _, identity = _lying(x)
        packed = self._alive((*identity, "derived"), x.untyped_storage())
        return packed and _for_user(packed, order, x.dtype)

    def derive(self, y: Tensor, packed: Packed) -> None:
        """Whoever asks for y shall get what `packed` unpacks to."""
        order, _, identity = _lying(y)
        from_kept = Packed(packed.tensors, partial(_permuted, packed.unpack, order), packed.shared)
        self._kept[*identity, "derived"] = (weakref.ref(y.untyped_storage()), from_kept)

    def serves(self, *tensors: Tensor, trained: Sequence[Tensor | None] = ()) -> bool:
        """Whether these are activations of this batch, and one of them, or of `trained`, needs a gradient."""
        return any(t is not None and t.requires_grad for t in (*tensors, *trained)) and all(
            t.dim() and t.numel() and t.shape[0] % self.samples == 0 for t in tensors
        )


def _lying(x: Tensor) -> tuple[tuple[int, ...], Tensor, tuple[Any, ...]]:
    """The order in which x's dimensions lie in memory (the first stays first), x in that order, and what tells it from
    other tensors: a tensor and its transpose are the same thing to keep."""
    order = (0, *sorted(range(1, x.dim()), key=x.stride().__getitem__, reverse=True))
    memory = x.permute(order)
    identity = (x.untyped_storage()._cdata, x.storage_offset(), memory.shape, memory.stride(), x._version)
    return order, memory, identity


def _for_user(packed: Packed, order: tuple[int, ...], dtype: torch.dtype) -> Packed:
    """`packed` for one more operation that saves it."""
    packed.shared.users += 1
    return Packed(packed.tensors, partial(_in_order, packed.unpack, order, dtype), packed.shared)


def _permuted(unpack: Callable[..., Tensor], order: tuple[int, ...], *tensors: Tensor) -> Tensor:
    return unpack(*tensors).permute(order)


def _in_order(unpack: Callable[..., Tensor], order: tuple[int, ...], dtype: torch.dtype, *tensors: Tensor) -> Tensor:
    return unpack(*tensors).to(dtype).permute([order.index(d) for d in range(len(order))])


# ------------------------------------------------------------------------------------------------ saving
def save(ctx: Any, *parts: Tensor | Packed | None) -> None:
    """Save for the backward pass; `load` gives the parts back, unpacked, in the same order."""
    flat: list[Tensor | None] = []
    ctx.parts = []
    for part in parts:
        tensors = part.tensors if isinstance(part, Packed) else (part,)
        ctx.parts.append((len(tensors), part.unpack if isinstance(part, Packed) else None))
        flat += tensors
    ctx.save_for_backward(*flat)


def load(ctx: Any, one_by_one: bool = False) -> list[Any]:
    """What `save` was given: dense tensors; `one_by_one`, calls that give them, so that not all are there at once."""
    saved, at, parts = ctx.saved_tensors, 0, []
    for count, unpack in ctx.parts:
        tensors = saved[at : at + count]
        if unpack is None:
            parts.append(tensors[0])
        else:
            parts.append(partial(unpack, *tensors) if one_by_one else unpack(*tensors))
        at += count
    return parts


def _single_precision(x: Tensor) -> Tensor:
    """What CUDA's autocast does before normalisations and softmax; the CPU's leaves the type."""
    if x.device.type == "cuda" and torch.is_autocast_enabled("cuda"):
        return x.float()
    return x


# ------------------------------------------------------------------------------------------------ in the forward pass
class _AsKept(torch.autograd.Function):
    """What comes back of x once it is packed; its gradient is x's (straight through)."""

    @staticmethod
    def forward(
        ctx: Any, mode: PackedOperations, x: Tensor, packer: Packer, dtype: torch.dtype | None, heads: int | None
    ) -> Tensor:
        kept = mode.keep(x, packer, dtype, heads)
        y = kept.shared.once(kept.unpack, *kept.tensors)
        kept.shared.users -= 1  # nothing is kept here
        mode.derive(y, kept)  # whoever keeps y keeps nothing more
        ctx.type = x.dtype
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        return None, g.to(ctx.type), None, None, None


def _as_kept(
    mode: PackedOperations,
    x: Tensor,
    packer: Packer,
    needed: bool = True,
    heads: int | None = None,
    autocast: bool = True,
) -> Tensor:
    """x, or with `Policy.forward` what is kept of it where it is `needed`, in the type in which a product takes it."""
    if not mode.policy.forward or not needed:
        return x
    device = x.device.type
    dtype = torch.get_autocast_dtype(device) if autocast and torch.is_autocast_enabled(device) else None
    return _AsKept.apply(mode, x, packer, dtype, heads)


# ------------------------------------------------------------------------------------------------ products
class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, mode: PackedOperations, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        used, kept_weight = mode.weight(weight)
        y = F.linear(x, used, bias)
        kept = mode.keep(x, mode.policy.product, y.dtype, -1) if ctx.needs_input_grad[2] else None
        save(ctx, kept, kept_weight if ctx.needs_input_grad[1] else None)
        ctx.types = x.dtype, weight.dtype, None if bias is None else bias.dtype
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = load(ctx)
        of_x, of_weight, of_bias = ctx.types
        g_rows = g.reshape(-1, g.shape[-1])
        g_w = None if x is None else (g_rows.T @ x.reshape(-1, x.shape[-1])).to(of_weight)
        g_b = g_rows.sum(0).to(of_bias) if ctx.needs_input_grad[3] else None
        g_x = None if weight is None else (g @ weight.to(g.dtype)).to(of_x)
        return None, g_x, g_w, g_b


def _linear(mode: PackedOperations, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    if not mode.serves(input, trained=(weight, bias)):
        return NotImplemented
    input = _as_kept(mode, input, mode.policy.product, weight.requires_grad, -1)
    return _Linear.apply(mode, input, weight, bias)


class _Conv2d(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, mode: PackedOperations, x: Tensor, weight: Tensor, bias: Tensor | None, geometry: tuple[Any, ...]
    ) -> Tensor:
        used, kept_weight = mode.weight(weight)
        y = F.conv2d(x, used, bias, *geometry)
        kept = mode.keep(x, mode.policy.product, y.dtype) if ctx.needs_input_grad[2] else None
        save(ctx, kept, kept_weight)
        ctx.geometry, ctx.shape = geometry, x.shape
        ctx.types = x.dtype, weight.dtype, None if bias is None else bias.dtype
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = load(ctx)
        of_x, of_weight, of_bias = ctx.types
        stride, padding, dilation, groups = ctx.geometry
        if x is None:  # the input's shape is all that is needed of it
            x = g.new_empty(1).expand(ctx.shape)
        wanted = [ctx.needs_input_grad[i] for i in (1, 2, 3)]
        sizes = None if of_bias is None else [weight.shape[0]]
        g_x, g_w, g_b = aten.convolution_backward(
            g, x, weight.to(g.dtype), sizes, stride, padding, dilation, False, [0, 0], groups, wanted
        )
        return (
            None,
            g_x.to(of_x) if wanted[0] else None,
            g_w.to(of_weight) if wanted[1] else None,
            g_b.to(of_bias) if wanted[2] else None,
            None,
        )


def _conv2d(
    mode: PackedOperations,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Any:
    if input.dim() != 4 or not mode.serves(input, trained=(weight, bias)):
        return NotImplemented
    stride, dilation = _pair(stride), _pair(dilation)
    if padding == "valid":
        padding = 0
    elif padding == "same":
        around = [d * (k - 1) for d, k in zip(dilation, weight.shape[2:], strict=True)]
        if any(total % 2 for total in around):
            return NotImplemented
        padding = [total // 2 for total in around]
    input = _as_kept(mode, input, mode.policy.product, weight.requires_grad)
    return _Conv2d.apply(mode, input, weight, bias, (stride, _pair(padding), dilation, groups))


def _pair(value: int | Sequence[int]) -> list[int]:
    return [value, value] if isinstance(value, int) else [*value] * (3 - len(value))


class _Matmul(torch.autograd.Function):
    """Two activations, (..., n, k) and (..., k, m)."""

    @staticmethod
    def forward(ctx: Any, mode: PackedOperations, a: Tensor, b: Tensor) -> Tensor:
        y = a @ b
        packer = mode.policy.attention
        kept_a = mode.keep(a, packer, y.dtype, 1) if ctx.needs_input_grad[2] else None
        kept_b = mode.keep(b, packer, y.dtype, 1) if ctx.needs_input_grad[1] else None
        save(ctx, kept_b, kept_a)  # unpacked last: softmax's output, which softmax wants next
        ctx.types = a.dtype, b.dtype
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        b, a = load(ctx)
        g_a = None if b is None else (g @ b.mT).to(ctx.types[0])
        g_b = None if a is None else (a.mT @ g).to(ctx.types[1])
        return None, g_a, g_b


def _bmm(mode: PackedOperations, input: Tensor, mat2: Tensor) -> Any:
    return _matmul(mode, input, mat2)


def _matmul(mode: PackedOperations, input: Tensor, other: Tensor) -> Any:
    alike = input.dim() == other.dim() >= 3 and input.shape[:-2] == other.shape[:-2]
    if not alike or not mode.serves(input, other):
        return NotImplemented
    return _product(mode, input, other)


def _product(mode: PackedOperations, a: Tensor, b: Tensor) -> Tensor:
    packer, of_a, of_b = mode.policy.attention, b.requires_grad, a.requires_grad
    return _Matmul.apply(mode, _as_kept(mode, a, packer, of_a, 1), _as_kept(mode, b, packer, of_b, 1))


# ------------------------------------------------------------------------------------------------ attention
class _Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, mode: PackedOperations, x: Tensor, dim: int) -> Tensor:
        p = torch.softmax(x, dim)
        save(ctx, mode.keep(p, mode.policy.attention, None, 1, result=True))
        ctx.dim, ctx.type = dim, x.dtype
        return p

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        (p,) = load(ctx)
        return None, aten._softmax_backward_data(g, p, ctx.dim, p.dtype).to(ctx.type), None


def _softmax(mode: PackedOperations, input: Tensor, dim: int | None = None, dtype: torch.dtype | None = None) -> Any:
    if dim is None or not mode.serves(input):
        return NotImplemented
    p = _Softmax.apply(mode, _single_precision(input) if dtype is None else input.to(dtype), dim)
    return _as_kept(mode, p, mode.policy.attention, heads=1, autocast=False)


def _functional_softmax(
    mode: PackedOperations,
    input: Tensor,
    dim: int | None = None,
    _stacklevel: int = 3,
    dtype: torch.dtype | None = None,
) -> Any:
    return _softmax(mode, input, dim, dtype)


class _FusedAttention(torch.autograd.Function):
    """softmax(q kᵀ · scale + bias) v by torch's fused kernel, in the backward pass once more from the unpacked q, k, v.

    The bias is a constant.
    """

    @staticmethod
    def forward(
        ctx: Any,
        mode: PackedOperations,
        packer: Packer,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: Any,
        bias: Tensor | None,
    ) -> Tensor:
        y = F.scaled_dot_product_attention(q, k, v, bias, scale=scale)
        save(ctx, *(mode.keep(x, packer, y.dtype, 1) for x in (q, k, v)), bias)
        ctx.scale, ctx.types = scale, (q.dtype, k.dtype, v.dtype)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        *kept, bias = load(ctx)
        with torch.enable_grad():
            inputs = [x.detach().requires_grad_() for x in kept]
            q, k, v = inputs
            y = F.scaled_dot_product_attention(q, k, v, bias, scale=ctx.scale)
            found = torch.autograd.grad(y, inputs, g)
        return None, None, *(g.to(t) for g, t in zip(found, ctx.types, strict=True)), None, None


class _Attention(torch.autograd.Function):
    """softmax(q kᵀ · scale + bias) v in its parts, of (..., N, D) each, with a constant bias.

    Softmax's output is kept once, for both its users.
    """

    @staticmethod
    def forward(
        ctx: Any, mode: PackedOperations, q: Tensor, k: Tensor, v: Tensor, scale: float, bias: Tensor | None
    ) -> Tensor:
        # Contiguous once: each product would copy them again.
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        scores = _scaled_product(q, k.mT, scale)
        if bias is not None:
            scores += bias
        p = torch.softmax(_single_precision(scores), -1).to(scores.dtype)
        del scores
        y = p @ v
        of_q, of_k = ctx.needs_input_grad[1:3]
        packer = mode.policy.attention
        kept_q = mode.keep(q, packer, y.dtype, 1) if of_k else None
        kept_k = mode.keep(k, packer, y.dtype, 1) if of_q else None
        kept_p = mode.keep(p, packer, y.dtype, 1)
        kept_v = mode.keep(v, packer, y.dtype, 1) if of_q or of_k else None
        save(ctx, kept_v, kept_p, kept_k, kept_q)
        ctx.scale, ctx.types = scale, (q.dtype, k.dtype, v.dtype)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        g = g.contiguous()
        v, p, k, q = load(ctx, one_by_one=True)
        dense = p()
        g_v = dense.mT @ g if ctx.needs_input_grad[3] else None
        g_q = g_k = None
        if v is not None:
            g_scores = aten._softmax_backward_data(g @ v().mT, dense, -1, dense.dtype)
            del dense
            g_q = None if k is None else _scaled_product(g_scores, k(), ctx.scale)
            g_k = None if q is None else _scaled_product(g_scores.mT, q(), ctx.scale)
        found = (g_q, g_k, g_v)
        return None, *(None if t is None else t.to(d) for t, d in zip(found, ctx.types, strict=True)), None, None


def _scaled_product(a: Tensor, b: Tensor, scale: float) -> Tensor:
    """scale · a b, of (..., n, k) and (..., k, m), without a pass of its own for the scale."""
    batch = a.shape[:-2]
    product = torch.baddbmm(a.new_empty(1, 1, 1), a.flatten(0, -3), b.flatten(0, -3), beta=0, alpha=scale)
    return product.view(*batch, *product.shape[1:])


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
    if is_causal or enable_gqa or not mode.serves(query, key, value):
        return NotImplemented
    constant = attn_mask is None or (attn_mask.is_floating_point() and not attn_mask.requires_grad)
    if mode.policy.fused is not None and constant and not dropout_p:
        return _FusedAttention.apply(mode, mode.policy.fused, query, key, value, scale, attn_mask)
    if constant and not dropout_p and not mode.policy.forward:
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        return _Attention.apply(mode, query, key, value, scale, attn_mask)
    # Once in the order of the products, which would copy them each time.
    query = (query * (query.shape[-1] ** -0.5 if scale is None else scale)).contiguous()
    key, value = key.contiguous(), value.contiguous()
    scores = _matmul(mode, query, key.mT)
    if scores is NotImplemented:
        return NotImplemented
    nowhere = None  # queries that may look at nothing: torch gives them zeros
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        nowhere = attn_mask.any(-1, keepdim=True).logical_not()
        scores = scores.masked_fill((attn_mask | nowhere).logical_not(), -torch.inf)
    elif attn_mask is not None:
        scores = scores + attn_mask
    p = _Softmax.apply(mode, _single_precision(scores), -1)
    p = _as_kept(mode, p, mode.policy.attention, heads=1, autocast=False).to(value.dtype)
    if nowhere is not None:
        p = p.masked_fill(nowhere, 0)
    return _product(mode, F.dropout(p, dropout_p), value)


class _Normalize(torch.autograd.Function):
    """x / max(‖x‖, ε) along `dim`: what is kept is the result, which the product after it keeps as well."""

    @staticmethod
    def forward(ctx: Any, mode: PackedOperations, x: Tensor, dim: int, eps: float) -> Tensor:
        norm = torch.linalg.vector_norm(x, dim=dim, keepdim=True).clamp_min(eps)
        y = x / norm
        save(ctx, mode.keep(y, mode.policy.attention, None, 1, result=True), norm)
        ctx.dim = dim
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        y, norm = load(ctx)
        return None, (g - y * (g * y).sum(ctx.dim, keepdim=True)) / norm, None, None


def _normalize(
    mode: PackedOperations, input: Tensor, p: float = 2.0, dim: Any = 1, eps: float = 1e-12, out: Any = None
) -> Any:
    if p != 2 or not isinstance(dim, int) or out is not None or not mode.serves(input):
        return NotImplemented
    y = _Normalize.apply(mode, _single_precision(input), dim, eps)
    return _as_kept(mode, y, mode.policy.attention, heads=1, autocast=False)


# ------------------------------------------------------------------------------------------------ normalisations
class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        mode: PackedOperations,
        x: Tensor,
        shape: list[int],
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
    ) -> Tensor:
        y, mean, rstd = torch.native_layer_norm(x, shape, weight, bias, eps)
        ctx.shape, ctx.normalised = shape, mode.policy.normalised
        if mode.policy.normalised:
            x_hat = torch.native_layer_norm(x, shape, None, None, eps)[0]
            kept = mode.keep(x_hat, mode.policy.norm, None, -1)
            save(ctx, kept, weight, bias, rstd)
            affine = [p for p in (weight, bias) if p is not None]
            way = partial(_affine, kept.unpack, weight is not None, bias is not None)
            if mode.policy.forward:
                y = kept.shared.once(way, *kept.tensors, *affine).to(y.dtype)
            if mode.policy.derived:
                mode.derive(y, Packed((*kept.tensors, *affine), way, kept.shared))
        else:
            save(ctx, mode.keep(x, mode.policy.norm, None, -1), weight, bias, rstd, mean)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, rstd, *mean = load(ctx)
        wanted = [ctx.needs_input_grad[i] for i in (1, 3, 4)]
        if ctx.normalised:
            zero, one = torch.zeros_like(rstd), torch.ones_like(rstd)
            found = aten.native_layer_norm_backward(g, x, ctx.shape, zero, one, weight, bias, wanted)
            g_x = found[0].mul_(rstd) if wanted[0] else None
        else:
            found = aten.native_layer_norm_backward(g, x, ctx.shape, mean[0], rstd, weight, bias, wanted)
            g_x = found[0]
        return None, g_x, None, found[1], found[2], None


def _affine(unpack: Callable[..., Tensor], has_weight: bool, has_bias: bool, *tensors: Tensor) -> Tensor:
    """x̂ · γ + β."""
    count = has_weight + has_bias
    y = unpack(*(tensors[:-count] if count else tensors))
    if has_weight:
        y = y * tensors[-count]
    return y + tensors[-1] if has_bias else y


def _layer_norm(
    mode: PackedOperations,
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Any:
    if not mode.serves(input, trained=(weight, bias)):
        return NotImplemented
    input = _single_precision(input)
    input = _as_kept(mode, input, mode.policy.norm, not mode.policy.normalised, -1, autocast=False)
    return _LayerNorm.apply(mode, input, list(normalized_shape), weight, bias, eps)


class _BatchNorm(torch.autograd.Function):
    """With running statistics: an affine map of each channel, which keeps its input only for γ's gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        mode: PackedOperations,
        x: Tensor,
        mean: Tensor,
        var: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
    ) -> Tensor:
        y = F.batch_norm(x, mean, var, weight, bias, False, 0.0, eps)
        kept = mode.keep(x, mode.policy.norm, y.dtype) if ctx.needs_input_grad[4] else None
        save(ctx, kept, weight, mean, var)
        ctx.eps, ctx.type = eps, x.dtype
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, var = load(ctx)
        channels = [1, -1] + [1] * (g.dim() - 2)
        others = [d for d in range(g.dim()) if d != 1]
        rstd = (var + ctx.eps).rsqrt()
        scale = rstd if weight is None else weight * rstd
        g_x = (g * scale.view(channels)).to(ctx.type) if ctx.needs_input_grad[1] else None
        g_b = g_w = None
        if x is not None or ctx.needs_input_grad[5]:
            g_b = g.sum(others, dtype=mean.dtype)
        if x is not None:
            # Σ g·(x − mean)·rstd, without a centred copy of x
            g_w = ((g * x).sum(others, dtype=mean.dtype) - mean * g_b) * rstd
        return None, g_x, None, None, g_w, g_b if ctx.needs_input_grad[5] else None, None


class _TrainingBatchNorm(torch.autograd.Function):
    """With the batch's statistics, which stay exact."""

    @staticmethod
    def forward(
        ctx: Any,
        mode: PackedOperations,
        x: Tensor,
        mean: Tensor | None,
        var: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
        momentum: float,
        eps: float,
    ) -> Tensor:
        y, of_batch, rstd = torch.native_batch_norm(x, weight, bias, mean, var, True, momentum, eps)
        save(ctx, mode.keep(x, mode.policy.norm), weight, of_batch, rstd)
        ctx.eps = eps
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, rstd = load(ctx)
        wanted = [ctx.needs_input_grad[i] for i in (1, 4, 5)]
        found = aten.native_batch_norm_backward(g, x, weight, None, None, mean, rstd, True, ctx.eps, wanted)
        return None, found[0], None, None, found[1], found[2], None, None


def _batch_norm(
    mode: PackedOperations,
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    if not mode.serves(input, trained=(weight, bias)):
        return NotImplemented
    trains = weight is not None and weight.requires_grad
    input = _as_kept(mode, input, mode.policy.norm, training or trains, autocast=False)
    if training:
        return _TrainingBatchNorm.apply(mode, input, running_mean, running_var, weight, bias, momentum, eps)
    return _BatchNorm.apply(mode, input, running_mean, running_var, weight, bias, eps)


class _Scale(torch.autograd.Function):
    """x · s, s learned or computed from what is learned, with fewer values than x (LayerScale, a logit scale)."""

    @staticmethod
    def forward(ctx: Any, mode: PackedOperations, x: Tensor, s: Tensor) -> Tensor:
        y = x * s
        kept = mode.keep(x, mode.policy.norm) if ctx.needs_input_grad[2] else None
        save(ctx, kept, s if ctx.needs_input_grad[1] else None)
        ctx.types, ctx.shape = (x.dtype, s.dtype), s.shape
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, s = load(ctx)
        g_x = None if s is None else (g * s).to(ctx.types[0])
        g_s = None if x is None else (g * x).sum_to_size(ctx.shape).to(ctx.types[1])
        return None, g_x, g_s


def _mul(mode: PackedOperations, input: Any, other: Any) -> Any:
    if not isinstance(input, Tensor) or not isinstance(other, Tensor):
        return NotImplemented
    x, s = (input, other) if input.numel() >= other.numel() else (other, input)
    broadcast = torch.broadcast_shapes(x.shape, s.shape)
    if not s.requires_grad or broadcast != x.shape or 4 * s.numel() > x.numel() or not mode.serves(x, trained=(s,)):
        return NotImplemented
    return _Scale.apply(mode, _as_kept(mode, x, mode.policy.norm, autocast=False), s)


# ------------------------------------------------------------------------------------------------ activation functions
class _Smooth(torch.autograd.Function):
    """A function of each element, whose gradient is `of_input(g, x)`."""

    @staticmethod
    def forward(
        ctx: Any,
        mode: PackedOperations,
        x: Tensor,
        function: Callable[[Tensor], Tensor],
        of_input: Callable[[Tensor, Tensor], Tensor],
    ) -> Tensor:
        y = function(x)
        kept = mode.keep(x, mode.policy.activation, None, -1 if x.dim() == 3 else None)
        save(ctx, kept)
        ctx.of_input = of_input
        if mode.policy.derived:
            mode.derive(y, Packed(kept.tensors, partial(_through, kept.unpack, function), kept.shared))
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = load(ctx)
        return None, ctx.of_input(g, x), None, None


def _through(unpack: Callable[..., Tensor], function: Callable[[Tensor], Tensor], *tensors: Tensor) -> Tensor:
    return function(unpack(*tensors))


def _smooth(function: Callable[..., Tensor], gradient: Callable[..., Tensor]) -> Callable[..., Any]:
    """A handler for activation functions without settings; `inplace` would destroy nothing that is needed here."""

    def handler(mode: PackedOperations, input: Tensor, inplace: bool = False) -> Any:
        return _Smooth.apply(mode, input, function, gradient) if mode.serves(input) else NotImplemented

    return handler


def _gelu(mode: PackedOperations, input: Tensor, *, approximate: str = "none") -> Any:
    if not mode.serves(input):
        return NotImplemented
    return _Smooth.apply(
        mode,
        input,
        partial(F.gelu, approximate=approximate),
        lambda g, x: aten.gelu_backward(g, x, approximate=approximate),
    )


class _Clamp(torch.autograd.Function):
    """ReLU and its bounded forms: a bit for each element."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, low: float, high: float) -> Tensor:
        inside = (x > low) if high == torch.inf else (x > low) & (x < high)
        ctx.save_for_backward(pack_bits(inside))
        ctx.shape = x.shape
        return x.clamp(low, None if high == torch.inf else high)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        (bits,) = ctx.saved_tensors
        return g * unpack_bits(bits, ctx.shape), None, None


def _clamp(low: float, high: float) -> Callable[..., Any]:
    def handler(mode: PackedOperations, input: Tensor, inplace: bool = False) -> Any:
        return _Clamp.apply(input, low, high) if mode.serves(input) else NotImplemented

    return handler


def _hardtanh(
    mode: PackedOperations, input: Tensor, min_val: float = -1.0, max_val: float = 1.0, inplace: bool = False
) -> Any:
    return _Clamp.apply(input, min_val, max_val) if mode.serves(input) else NotImplemented


# ------------------------------------------------------------------------------------------------ pooling
class _OfShape(torch.autograd.Function):
    """A pooling whose gradient depends on its input's shape alone, which torch would keep whole."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, function: Any, of_input: Any) -> Tensor:
        ctx.shape, ctx.of_input = x.shape, of_input
        return function(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.of_input(g, g.new_empty(1).expand(ctx.shape)), None, None


def _avg_pool2d(
    mode: PackedOperations,
    input: Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Any:
    if not mode.serves(input):
        return NotImplemented
    kernel = _pair(kernel_size)
    how = (
        kernel,
        kernel if stride is None else _pair(stride),
        _pair(padding),
        ceil_mode,
        count_include_pad,
        divisor_override,
    )
    return _OfShape.apply(
        input, lambda x: F.avg_pool2d(x, *how), lambda g, like: aten.avg_pool2d_backward(g, like, *how)
    )


def _adaptive_avg_pool2d(mode: PackedOperations, input: Tensor, output_size: Any) -> Any:
    if not mode.serves(input):
        return NotImplemented
    return _OfShape.apply(
        input,
        lambda x: F.adaptive_avg_pool2d(x, output_size),
        lambda g, like: aten._adaptive_avg_pool2d_backward(g, like),
    )


class _MaxPool2d(torch.autograd.Function):
    """Keeps, for each result, which place of its window it came from: a byte, where torch keeps its input and eight."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, kernel: list[int], stride: list[int], padding: list[int], dilation: list[int], ceil: bool
    ) -> Tensor:
        y, index = aten.max_pool2d_with_indices(x, kernel, stride, padding, dilation, ceil)
        ctx.shape, ctx.window = x.shape, (kernel[1], stride, padding, dilation)
        top, left = _corners(index, stride, padding)
        row, column = (index // x.shape[3] - top) // dilation[0], (index % x.shape[3] - left) // dilation[1]
        ctx.save_for_backward((row * kernel[1] + column).to(torch.uint8))
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        (place,) = ctx.saved_tensors
        width, stride, padding, dilation = ctx.window
        top, left = _corners(place, stride, padding)
        place = place.long()
        index = (top + place // width * dilation[0]) * ctx.shape[3] + left + place % width * dilation[1]
        g_x = g.new_zeros(*ctx.shape[:2], ctx.shape[2:].numel())
        g_x = g_x.scatter_add_(2, index.flatten(2), g.flatten(2)).view(ctx.shape)
        # as g lies, so that the layers below need no copy
        g_x = g_x if g.is_contiguous() else g_x.contiguous(memory_format=torch.channels_last)
        return g_x, None, None, None, None, None


def _corners(of: Tensor, stride: list[int], padding: list[int]) -> tuple[Tensor, Tensor]:
    """First row (H, 1) and first column (W,) of the windows of a result (B, C, H, W)."""
    rows, columns = (
        torch.arange(n, device=of.device) * s - p for n, s, p in zip(of.shape[2:], stride, padding, strict=True)
    )
    return rows[:, None], columns


def _max_pool2d(
    mode: PackedOperations,
    input: Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Any:
    kernel = _pair(kernel_size)
    if return_indices or input.dim() != 4 or kernel[0] * kernel[1] > 256 or not mode.serves(input):
        return NotImplemented
    step = kernel if stride is None or stride == [] else _pair(stride)
    return _MaxPool2d.apply(input, kernel, step, _pair(padding), _pair(dilation), ceil_mode)


# ------------------------------------------------------------------------------------------------ the table
_OPERATIONS: dict[Any, Callable[..., Any]] = {
    F.linear: _linear,
    F.conv2d: _conv2d,
    torch.conv2d: _conv2d,
    torch.matmul: _matmul,
    torch.bmm: _bmm,
    Tensor.matmul: _matmul,
    Tensor.bmm: _bmm,
    Tensor.__matmul__: _matmul,
    F.softmax: _functional_softmax,
    torch.softmax: _softmax,
    Tensor.softmax: _softmax,
    F.scaled_dot_product_attention: _attention,
    F.normalize: _normalize,
    F.layer_norm: _layer_norm,
    F.batch_norm: _batch_norm,
    torch.mul: _mul,
    Tensor.mul: _mul,
    Tensor.__mul__: _mul,
    Tensor.__rmul__: _mul,
    F.gelu: _gelu,
    F.silu: _smooth(F.silu, lambda g, x: aten.silu_backward(g, x)),
    F.hardswish: _smooth(F.hardswish, lambda g, x: aten.hardswish_backward(g, x)),
    F.relu: _clamp(0.0, torch.inf),
    torch.relu: _clamp(0.0, torch.inf),
    Tensor.relu: _clamp(0.0, torch.inf),
    F.relu6: _clamp(0.0, 6.0),
    F.hardtanh: _hardtanh,
    F.avg_pool2d: _avg_pool2d,
    F.adaptive_avg_pool2d: _adaptive_avg_pool2d,
    F.max_pool2d: _max_pool2d,
    torch.max_pool2d: _max_pool2d,
}
