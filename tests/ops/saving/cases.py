"""Operations with all kinds of float64 inputs, and helpers for the tests of packed operations."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from efficient_ft.ops.saving import PackedOperations, PackingState, Policy
from efficient_ft.ops.storage import PackContext, Packed, Packer, Sparse

EXACT = {"rtol": 1e-10, "atol": 1e-12}
SAMPLES = 2


@dataclass
class Counting:
    """A packer that keeps all values and records the shapes of its inputs."""

    shapes: list[tuple[int, ...]] = field(default_factory=list)

    def pack(self, x: Tensor, place: PackContext) -> Packed:
        self.shapes.append(tuple(x.shape))
        return Sparse(0.0).pack(x, place)

    __hash__ = object.__hash__


def everywhere(packer: Packer, **settings: object) -> Policy:
    return Policy(packer, packer, packer, packer, **settings)


def around(policy: Policy, samples: int = SAMPLES, heads: int | None = None) -> PackedOperations:
    return PackedOperations(policy, PackingState(), "r", samples, heads)


def tensors(*shapes: tuple[int, ...], seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(s, generator=generator, dtype=torch.float64).requires_grad_() for s in shapes]


def upstream(y: Tensor) -> Tensor:
    return torch.randn(y.shape, generator=torch.Generator().manual_seed(99), dtype=torch.float64).to(y.dtype)


def gradients(y: Tensor, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return torch.autograd.grad(y, inputs, upstream(y))


def packed(function: Callable[..., Tensor], inputs: Sequence[Tensor], policy: Policy, **where: int) -> Tensor:
    with around(policy, **where):
        return function(*inputs)


def prune(x: Tensor, sparsity: float, samples: int = SAMPLES) -> Tensor:
    """Set all values below the k-th smallest magnitude of each sample to zero. The magnitudes must be distinct."""
    rows = x.detach().reshape(samples, -1)
    k = min(max(math.floor(rows.shape[1] * sparsity), 1), rows.shape[1])
    threshold = rows.abs().sort(1).values[:, k - 1 : k]
    return torch.where(rows.abs() >= threshold, rows, 0).reshape(x.shape)


def saved_while(function: Callable[[], Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Return the result of `function` and one saved tensor per storage."""
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = function()
    return y, list({t.untyped_storage().data_ptr(): t for t in kept}.values())


def others(saved: list[Tensor], known: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors in `saved` that share no storage with a tensor in `known`."""
    storages = {t.untyped_storage().data_ptr() for t in known}
    return [t for t in saved if t.untyped_storage().data_ptr() not in storages]


def bytes_of(saved: list[Tensor]) -> int:
    return sum(t.untyped_storage().nbytes() for t in saved)


# ------------------------------------------------------------------------------------------------ operations
def channels_last(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda x, *rest: function(x.contiguous(memory_format=torch.channels_last), *rest)


def batch_norm(training: bool) -> Callable[..., Tensor]:
    def function(x: Tensor, *affine: Tensor) -> Tensor:
        mean, var = torch.linspace(-1, 1, 4).double(), torch.linspace(0.5, 2, 4).double()
        return F.batch_norm(x, mean, var, *affine, training=training)

    return function


def masked(mask: Tensor) -> Callable[..., Tensor]:
    return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, mask)


def multi_head(
    x: Tensor, w_in: Tensor, w_out: Tensor, b_in: Tensor | None = None, b_out: Tensor | None = None
) -> Tensor:
    return multi_head_of_three(x, x, x, w_in, w_out, b_in, b_out)


def multi_head_of_three(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w_in: Tensor,
    w_out: Tensor,
    b_in: Tensor | None = None,
    b_out: Tensor | None = None,
) -> Tensor:
    """Call `F.multi_head_attention_forward` on batch-first inputs, as `nn.MultiheadAttention` does."""
    x = [q.transpose(0, 1)] * 3 if q is k is v else [t.transpose(0, 1) for t in (q, k, v)]
    biases = (b_in, None, None, False, 0.0, w_out, b_out)
    return F.multi_head_attention_forward(*x, 8, 2, w_in, *biases, need_weights=False)[0].transpose(0, 1)


MASK = torch.tensor([[1, 1, 0, 1, 0], [0, 1, 1, 1, 1], [1, 0, 0, 0, 0]]).bool()
QKV = [(2, 2, 3, 4), (2, 2, 5, 4), (2, 2, 5, 6)]
SEPARATE = [(2, 3, 4), (2, 4, 5)]
conv = F.conv2d
attention = F.scaled_dot_product_attention

OPERATIONS: dict[str, tuple[Callable[..., Tensor], list[tuple[int, ...]]]] = {
    "linear 2-D": (F.linear, [(4, 6), (5, 6), (5,)]),
    "linear 3-D": (F.linear, [(2, 3, 6), (5, 6), (5,)]),
    "linear 4-D": (F.linear, [(2, 2, 3, 6), (5, 6), (5,)]),
    "linear without bias": (F.linear, [(2, 3, 6), (5, 6)]),
    "linear on windows": (F.linear, [(8, 3, 6), (5, 6), (5,)]),
    "linear, transposed input": (lambda x, w: F.linear(x.mT, w), [(2, 6, 3), (5, 6)]),
    "linear, part of a tensor": (lambda x, w: F.linear(x[:, :, 1], w), [(2, 3, 3, 6), (5, 6)]),
    "conv": (conv, [(2, 4, 7, 6), (6, 4, 3, 3), (6,)]),
    "conv without bias": (conv, [(2, 4, 7, 6), (6, 4, 3, 3)]),
    "conv stride": (partial(conv, stride=2, padding=1), [(2, 4, 7, 6), (6, 4, 3, 3), (6,)]),
    "conv stride (2, 1)": (partial(conv, stride=(2, 1), padding=(0, 2)), [(2, 4, 7, 6), (6, 4, 3, 2), (6,)]),
    "conv same": (partial(conv, padding="same", dilation=(1, 2)), [(2, 4, 7, 6), (6, 4, 3, 5), (6,)]),
    "conv valid": (partial(conv, padding="valid", stride=2), [(2, 4, 7, 6), (6, 4, 3, 3), (6,)]),
    "conv dilation": (partial(conv, dilation=2, padding=(2,)), [(2, 4, 7, 6), (6, 4, 3, 3), (6,)]),
    "conv groups": (partial(conv, groups=2), [(2, 4, 7, 6), (6, 2, 3, 3), (6,)]),
    "conv depthwise": (partial(conv, groups=4, padding=1), [(2, 4, 7, 6), (4, 1, 3, 3)]),
    "conv channels last": (channels_last(partial(conv, padding=1)), [(2, 4, 7, 6), (6, 4, 3, 3), (6,)]),
    "layer_norm": (lambda x, *wb: F.layer_norm(x, (5,), *wb), [(2, 3, 5), (5,), (5,)]),
    "layer_norm without bias": (lambda x, w: F.layer_norm(x, (5,), w), [(2, 3, 5), (5,)]),
    "layer_norm without weight": (lambda x, b: F.layer_norm(x, (5,), None, b), [(2, 3, 5), (5,)]),
    "layer_norm bare": (lambda x: F.layer_norm(x, (5,), eps=0.1), [(2, 3, 5)]),
    "layer_norm over two": (lambda x, *wb: F.layer_norm(x, (3, 5), *wb), [(2, 2, 3, 5), (3, 5), (3, 5)]),
    "rms_norm": (lambda x, w: F.rms_norm(x, (5,), w), [(2, 3, 5), (5,)]),
    "rms_norm bare": (lambda x: F.rms_norm(x, (5,), eps=0.1), [(2, 3, 5)]),
    "rms_norm over two": (lambda x, w: F.rms_norm(x, (3, 5), w, 0.1), [(2, 2, 3, 5), (3, 5)]),
    "group_norm": (lambda x, *wb: F.group_norm(x, 2, *wb), [(2, 4, 3, 5), (4,), (4,)]),
    "group_norm without weight": (lambda x, b: F.group_norm(x, 2, None, b), [(2, 4, 3, 5), (4,)]),
    "group_norm bare": (lambda x: F.group_norm(x, 4, eps=0.1), [(2, 4, 3, 5)]),
    "group_norm 2-D": (lambda x, *wb: F.group_norm(x, 2, *wb), [(6, 4), (4,), (4,)]),
    "group_norm channels last": (channels_last(lambda x, *wb: F.group_norm(x, 2, *wb)), [(2, 4, 3, 5), (4,), (4,)]),
    "batch_norm eval": (batch_norm(False), [(2, 4, 3, 5), (4,), (4,)]),
    "batch_norm eval 2-D": (batch_norm(False), [(6, 4), (4,), (4,)]),
    "batch_norm eval bare": (batch_norm(False), [(2, 4, 3, 5)]),
    "batch_norm training": (batch_norm(True), [(2, 4, 3, 5), (4,), (4,)]),
    "batch_norm training bare": (batch_norm(True), [(2, 4, 3, 5)]),
    "gelu": (F.gelu, [(2, 3, 5)]),
    "gelu tanh": (partial(F.gelu, approximate="tanh"), [(2, 3, 5)]),
    "silu": (F.silu, [(2, 3, 5)]),
    "hardswish": (lambda x: F.hardswish(3 * x), [(2, 3, 9)]),
    "sigmoid": (torch.sigmoid, [(2, 3, 5)]),
    "product of two activations": (torch.mul, [(2, 3, 5), (2, 3, 5)]),
    "product with a wide gate": (torch.mul, [(2, 3, 5), (2, 3, 1)]),
    "product as an operator": (lambda a, b: a * b, [(2, 3, 5), (2, 3, 5)]),
    "product with itself": (lambda a: a * a, [(2, 3, 5)]),
    "multi-head attention": (multi_head, [(2, 3, 8), (24, 8), (8, 8), (24,), (8,)]),
    "multi-head attention without bias": (multi_head, [(2, 3, 8), (24, 8), (8, 8)]),
    "multi-head attention of three inputs": (
        multi_head_of_three,
        [(2, 3, 8), (2, 5, 8), (2, 5, 8), (24, 8), (8, 8), (24,), (8,)],
    ),
    "relu": (F.relu, [(2, 3, 5)]),
    "relu6": (lambda x: F.relu6(5 * x), [(2, 3, 9)]),
    "hardtanh": (lambda x: F.hardtanh(x, -0.5, 0.75), [(2, 3, 9)]),
    "hardtanh default": (F.hardtanh, [(2, 3, 9)]),
    "softmax": (lambda x: F.softmax(x, -1), [(2, 3, 5)]),
    "softmax over tokens": (lambda x: x.softmax(1), [(2, 3, 5)]),
    "softmax in another type": (lambda x: torch.softmax(x.float(), -1, dtype=torch.float64), [(2, 3, 5)]),
    "matmul": (torch.matmul, SEPARATE),
    "matmul as an operator": (lambda a, b: a @ b, SEPARATE),
    "matmul as a method": (lambda a, b: a.matmul(b), SEPARATE),
    "matmul of heads": (torch.matmul, [(2, 2, 3, 4), (2, 2, 4, 5)]),
    "matmul, transposed": (lambda a, b: a @ b.mT, [(2, 2, 3, 4), (2, 2, 5, 4)]),
    "bmm": (torch.bmm, SEPARATE),
    "bmm as a method": (lambda a, b: a.bmm(b), SEPARATE),
    "attention": (attention, QKV),
    "attention scale": (partial(attention, scale=0.3), QKV),
    "attention float mask": (attention, [*QKV, (2, 1, 3, 5)]),
    "attention constant float mask": (masked(torch.linspace(-2, 2, 10).double().view(2, 1, 1, 5)), QKV),
    "attention bool mask": (masked(MASK), QKV),
    "normalize": (lambda x: F.normalize(x, dim=-1), [(2, 3, 5)]),
    "normalize of small values": (lambda x: F.normalize(x / 1000, dim=-1), [(2, 3, 5)]),
    "normalize of channels": (F.normalize, [(2, 3, 5)]),
    "normalize of zeros": (lambda x: F.normalize(torch.cat([x, 0 * x], -1), dim=1), [(2, 3, 5)]),
    "scale": (lambda x, s: x * s, [(2, 3, 8), (8,)]),
    "scale first": (torch.mul, [(8,), (2, 3, 8)]),
    "scale of maps": (lambda x, s: x.mul(s), [(2, 4, 3, 5), (4, 1, 1)]),
    "scale of samples": (lambda x, s: x * s, [(2, 4, 5), (2, 1, 1)]),
    "logit scale": (lambda x, s: x * s.exp(), [(2, 8), ()]),
    "avg_pool2d": (lambda x: F.avg_pool2d(x, 2), [(2, 3, 6, 8)]),
    "adaptive_avg_pool2d": (lambda x: F.adaptive_avg_pool2d(x, (2, 3)), [(2, 3, 6, 8)]),
    "adaptive_avg_pool2d to one": (lambda x: F.adaptive_avg_pool2d(x, 1), [(2, 3, 6, 8)]),
    "adaptive_avg_pool2d of rows": (nn.AdaptiveAvgPool2d((None, 1)), [(2, 3, 6, 8)]),
    "max_pool2d": (lambda x: F.max_pool2d(x, 2), [(2, 3, 6, 8)]),
    "max_pool2d of a ResNet": (nn.MaxPool2d(3, 2, 1), [(2, 3, 7, 8)]),
    "max_pool2d dilated": (
        lambda x: torch.max_pool2d(x, (3, 2), (2, 1), (1, 0), (1, 3), ceil_mode=True),
        [(2, 3, 6, 8)],
    ),
    "max_pool2d channels last": (channels_last(partial(F.max_pool2d, kernel_size=3, stride=2)), [(2, 4, 7, 9)]),
    "avg_pool2d padded": (
        lambda x: F.avg_pool2d(x, (3, 2), (2, 1), 1, ceil_mode=True, count_include_pad=False),
        [(2, 3, 6, 8)],
    ),
}


# ------------------------------------------------------------------------------------------------ all operations
def inputs_of_everything() -> list[Tensor]:
    shapes = [(2, 12, 16), (16, 16), (16, 32), (16,), (16,), (16,), (5, 16, 3, 3)]
    return [(t.detach() / 4).requires_grad_() if t.dim() != 3 else t for t in tensors(*shapes)]


def network_of_everything(x, w_in, w_out, gamma, beta, scale, kernel):
    h = F.layer_norm(x, (16,), gamma, beta)
    q = F.linear(h, w_in).unflatten(-1, (2, 8)).transpose(1, 2)
    h = x + F.linear(attention(q, q, q).transpose(1, 2).flatten(2), w_in) * scale
    h = h + F.linear(F.gelu(F.linear(h, w_out.mT)), w_out)
    maps = F.relu6(F.conv2d(h.mT.unflatten(2, (3, 4)), kernel, padding=1))
    return F.normalize(F.avg_pool2d(maps, (1, 2)).flatten(1), dim=-1)
