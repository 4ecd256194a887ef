"""Packed operations against plain torch where nothing is dropped, and against the paper's formulas where something is.

Every test is in float64. The dense references prune each tensor independently and write the backward pass out by hand.
"""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction

from efficient_ft.ops import packed as packed_module
from efficient_ft.ops.packed import PackedOperations, Policy, Session, running
from efficient_ft.ops.packing import Dense, EightBits, Packed, Packer, Place, Sparse

EXACT = {"rtol": 1e-10, "atol": 1e-12}
SAMPLES = 2


@dataclass
class Counting:
    """Keeps everything, and counts what it was given."""

    shapes: list[tuple[int, ...]] = field(default_factory=list)

    def pack(self, x: Tensor, place: Place) -> Packed:
        self.shapes.append(tuple(x.shape))
        return Sparse(0.0).pack(x, place)

    __hash__ = object.__hash__


def everywhere(packer: Packer, **settings: object) -> Policy:
    return Policy(packer, packer, packer, packer, **settings)


def around(policy: Policy, samples: int = SAMPLES, heads: int | None = None) -> PackedOperations:
    return PackedOperations(policy, Session(), "r", samples, heads)


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
    """Zero what is smaller than the k-th smallest magnitude of each sample; no ties here."""
    rows = x.detach().reshape(samples, -1)
    k = min(max(math.floor(rows.shape[1] * sparsity), 1), rows.shape[1])
    threshold = rows.abs().sort(1).values[:, k - 1 : k]
    return torch.where(rows.abs() >= threshold, rows, 0).reshape(x.shape)


def saved_while(function: Callable[[], Tensor]) -> tuple[Tensor, list[Tensor]]:
    """What `function` gives, and one tensor of each storage that it saves for the backward pass."""
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = function()
    return y, list({t.untyped_storage().data_ptr(): t for t in kept}.values())


def others(saved: list[Tensor], known: Sequence[Tensor]) -> list[Tensor]:
    """Those of `saved` that lie in the storage of none of `known`."""
    storages = {t.untyped_storage().data_ptr() for t in known}
    return [t for t in saved if t.untyped_storage().data_ptr() not in storages]


# ------------------------------------------------------------------------------------------------ nothing dropped
def channels_last(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda x, *rest: function(x.contiguous(memory_format=torch.channels_last), *rest)


def batch_norm(training: bool) -> Callable[..., Tensor]:
    def function(x: Tensor, *affine: Tensor) -> Tensor:
        mean, var = torch.linspace(-1, 1, 4).double(), torch.linspace(0.5, 2, 4).double()
        return F.batch_norm(x, mean, var, *affine, training=training)

    return function


def masked(mask: Tensor) -> Callable[..., Tensor]:
    return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, mask)


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
    "batch_norm eval": (batch_norm(False), [(2, 4, 3, 5), (4,), (4,)]),
    "batch_norm eval 2-D": (batch_norm(False), [(6, 4), (4,), (4,)]),
    "batch_norm eval bare": (batch_norm(False), [(2, 4, 3, 5)]),
    "batch_norm training": (batch_norm(True), [(2, 4, 3, 5), (4,), (4,)]),
    "batch_norm training bare": (batch_norm(True), [(2, 4, 3, 5)]),
    "gelu": (F.gelu, [(2, 3, 5)]),
    "gelu tanh": (partial(F.gelu, approximate="tanh"), [(2, 3, 5)]),
    "silu": (F.silu, [(2, 3, 5)]),
    "hardswish": (lambda x: F.hardswish(3 * x), [(2, 3, 9)]),
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


@pytest.mark.parametrize("normalised", [False, True])
@pytest.mark.parametrize("name", OPERATIONS)
def test_where_nothing_is_dropped_everything_is_as_in_plain_torch(name, normalised):
    function, shapes = OPERATIONS[name]
    inputs = tensors(*shapes)
    y, plain = packed(function, inputs, everywhere(Sparse(0.0), normalised=normalised)), function(*inputs)
    assert isinstance(y.grad_fn, BackwardCFunction), "torch's own operation ran"
    torch.testing.assert_close(y, plain, **EXACT)
    found, expected = gradients(y, inputs), gradients(plain, inputs)
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == torch.float64
        torch.testing.assert_close(a, b, **EXACT)


@pytest.mark.parametrize("name", ["linear 3-D", "conv", "layer_norm", "attention float mask", "batch_norm training"])
def test_each_gradient_alone_is_that_of_plain_torch(name):
    # What another gradient would have needed is not kept then.
    function, shapes = OPERATIONS[name]
    for wanted in range(len(shapes)):
        inputs = [t.detach().requires_grad_(i == wanted) for i, t in enumerate(tensors(*shapes))]
        found = gradients(packed(function, inputs, everywhere(Sparse(0.0))), [inputs[wanted]])[0]
        torch.testing.assert_close(found, gradients(function(*inputs), [inputs[wanted]])[0], **EXACT)


@pytest.mark.parametrize(
    ("name", "normalised"),
    [
        ("linear 3-D", False),
        ("conv groups", False),
        ("layer_norm", False),
        ("layer_norm", True),
        ("batch_norm training", False),
        ("gelu", False),
        ("adaptive_avg_pool2d", False),
        ("max_pool2d of a ResNet", False),
        ("max_pool2d dilated", False),
        ("attention float mask", False),
        ("normalize", False),
    ],
)
def test_gradcheck_where_nothing_is_dropped(name, normalised):
    function, shapes = OPERATIONS[name]
    policy = everywhere(Sparse(0.0), normalised=normalised)
    assert torch.autograd.gradcheck(lambda *inputs: packed(function, inputs, policy), tensors(*shapes))


def test_training_batch_norm_updates_running_statistics():
    x, weight, bias = tensors((2, 4, 3, 5), (4,), (4,))
    found, expected = ([torch.zeros(4).double(), torch.ones(4).double()] for _ in range(2))
    with around(everywhere(Sparse(0.5))):
        y = F.batch_norm(x, *found, weight, bias, True, 0.3)
    torch.testing.assert_close(y, F.batch_norm(x, *expected, weight, bias, True, 0.3), **EXACT)
    torch.testing.assert_close(found, expected, **EXACT)


def test_an_operation_in_place_gives_its_result():
    x, w = tensors((2, 3, 5), (4, 5))
    for function in (F.relu, F.relu6, F.hardtanh, F.silu, F.hardswish):

        def network(x: Tensor, w: Tensor, function: Callable[..., Tensor] = function) -> Tensor:
            return function(F.linear(x, w), inplace=True)

        y, plain = packed(network, (x, w), everywhere(Sparse(0.0))), network(x, w)
        for a, b in zip((y, *gradients(y, (x, w))), (plain, *gradients(plain, (x, w))), strict=True):
            torch.testing.assert_close(a, b, **EXACT)


# ------------------------------------------------------------------------------------------------ the paper's formulas
def by_hand_linear(p, g, x, w, b):
    return torch.einsum("bno,oi->bni", g, w), torch.einsum("bno,bni->oi", g, p(x)), g.sum((0, 1))


def by_hand_conv(p, g, x, w, b):
    columns = F.unfold(p(x), w.shape[2:], padding=1, stride=2)
    g_x = F.fold(w.flatten(1).T @ g.flatten(2), x.shape[2:], w.shape[2:], padding=1, stride=2)
    return g_x, torch.einsum("bol,bkl->ok", g.flatten(2), columns).view(w.shape), g.sum((0, 2, 3))


def by_hand_layer_norm(p, g, x, w, b, normalised=False):
    mean = x.mean(-1, keepdim=True)
    rstd = 1 / (x.var(-1, keepdim=True, unbiased=False) + 1e-5).sqrt()
    x_hat = p((x - mean) * rstd) if normalised else (p(x) - mean) * rstd
    h = g * w
    g_x = rstd * (h - h.mean(-1, keepdim=True) - x_hat * (h * x_hat).mean(-1, keepdim=True))
    return g_x, (g * x_hat).sum((0, 1)), g.sum((0, 1))


def by_hand_matmul(p, g, a, b):
    return g @ p(b).mT, p(a).mT @ g


def by_hand_softmax(p, g, x):
    y = p(softmax(x))
    return (y * (g - (y * g).sum(-1, keepdim=True)),)


def softmax(x):
    return x.exp() / x.exp().sum(-1, keepdim=True)


def by_hand_attention(p, g, q, k, v, mask):
    probabilities = p(softmax(q @ k.mT / 2 + mask))
    g_p = g @ p(v).mT
    g_s = probabilities * (g_p - (probabilities * g_p).sum(-1, keepdim=True))
    return g_s @ p(k) / 2, g_s.mT @ p(q) / 2, probabilities.mT @ g, g_s.sum(1, keepdim=True)


def by_hand_batch_norm(p, g, x, w, b):
    mean, var = x.mean((0, 2, 3), keepdim=True), x.var((0, 2, 3), keepdim=True, unbiased=False)
    x_hat, n = (p(x) - mean) / (var + 1e-5).sqrt(), x.numel() / x.shape[1]
    g_w, g_b = (g * x_hat).sum((0, 2, 3)), g.sum((0, 2, 3))
    w, spread = w.view(-1, 1, 1), (var + 1e-5).sqrt()
    return w / spread * (g - g_b.view(-1, 1, 1) / n - x_hat * g_w.view(-1, 1, 1) / n), g_w, g_b


def by_hand_frozen_batch_norm(p, g, x, w, b):
    mean, var = (t.double().view(-1, 1, 1) for t in (torch.linspace(-1, 1, 4), torch.linspace(0.5, 2, 4)))
    x_hat = (p(x) - mean) / (var + 1e-5).sqrt()
    return g * w.view(-1, 1, 1) / (var + 1e-5).sqrt(), (g * x_hat).sum((0, 2, 3)), g.sum((0, 2, 3))


def by_hand_gelu(p, g, x):
    x = p(x)
    return (g * ((1 + (x / 2**0.5).erf()) / 2 + x * (-(x**2) / 2).exp() / (2 * math.pi) ** 0.5),)


def by_hand_relu(p, g, x):
    return (g * (x > 0),)


def by_hand_normalize(p, g, x):
    norm = (x**2).sum(-1, keepdim=True).sqrt()
    y = p(x / norm)
    return ((g - y * (g * y).sum(-1, keepdim=True)) / norm,)


def by_hand_scale(p, g, x, s):
    return g * s, (g * p(x)).sum((0, 1))


# operation, its formulas, which gradients stay exact
PRUNED: dict[str, tuple[Callable[..., Tensor], Callable[..., tuple[Tensor, ...]], list, set[int]]] = {
    "linear": (F.linear, by_hand_linear, [(2, 3, 6), (5, 6), (5,)], {0, 2}),
    "conv": (
        partial(conv, stride=2, padding=1),
        by_hand_conv,
        [(2, 4, 7, 9), (6, 4, 3, 3), (6,)],
        {0, 2},
    ),
    "layer_norm": (OPERATIONS["layer_norm"][0], by_hand_layer_norm, [(2, 3, 5), (5,), (5,)], {2}),
    "matmul": (torch.matmul, by_hand_matmul, [(2, 2, 3, 4), (2, 2, 4, 5)], set()),
    "softmax": (partial(F.softmax, dim=-1), by_hand_softmax, [(2, 2, 3, 5)], set()),
    "attention": (attention, by_hand_attention, [*QKV, (2, 1, 3, 5)], set()),
    "batch_norm training": (batch_norm(True), by_hand_batch_norm, [(2, 4, 3, 5), (4,), (4,)], {2}),
    "batch_norm eval": (batch_norm(False), by_hand_frozen_batch_norm, [(2, 4, 3, 5), (4,), (4,)], {0, 2}),
    "gelu": (F.gelu, by_hand_gelu, [(2, 3, 5)], set()),
    "relu": (F.relu, by_hand_relu, [(2, 3, 5)], {0}),
    "normalize": (partial(F.normalize, dim=-1), by_hand_normalize, [(2, 3, 5)], set()),
    "scale": (torch.mul, by_hand_scale, [(2, 3, 5), (5,)], {0}),
}


@pytest.mark.parametrize("sparsity", [0.0, 0.5, 0.8])
@pytest.mark.parametrize("name", [*PRUNED, "layer_norm normalised"])
def test_gradients_are_the_papers_formulas_on_pruned_tensors(name, sparsity):
    normalised = name.endswith(" normalised")
    function, by_hand, shapes, exact = PRUNED[name.removesuffix(" normalised")]
    if normalised:
        by_hand = partial(by_hand, normalised=True)
    inputs = tensors(*shapes, seed=1)
    y, plain = packed(function, inputs, everywhere(Sparse(sparsity), normalised=normalised)), function(*inputs)
    torch.testing.assert_close(y, plain, **EXACT)
    with torch.no_grad():
        expected = by_hand(partial(prune, sparsity=sparsity), upstream(y), *inputs)
    found, unpruned = gradients(y, inputs), gradients(plain, inputs)
    for i, (a, b, c) in enumerate(zip(found, expected, unpruned, strict=True)):
        torch.testing.assert_close(a, b, **EXACT)
        assert torch.allclose(a, c, **EXACT) == (i in exact or sparsity == 0)


# What a control that prunes in the forward pass too returns, from pruned tensors; `by_hand` has its gradients.
FORWARD: dict[str, Callable[..., Tensor]] = {
    "linear": lambda p, x, w, b: p(x) @ w.T + b,
    "conv": lambda p, x, w, b: conv(p(x), w, b, stride=2, padding=1),
    "layer_norm": lambda p, x, w, b: F.layer_norm(p(x), (5,), w, b),
    "layer_norm normalised": lambda p, x, w, b: p(F.layer_norm(x, (5,))) * w + b,
    "matmul": lambda p, a, b: p(a) @ p(b),
    "softmax": lambda p, x: p(softmax(x)),
    "attention": lambda p, q, k, v, mask: p(softmax(p(q) @ p(k).mT / 2 + mask)) @ p(v),
    "batch_norm training": lambda p, x, w, b: batch_norm(True)(p(x), w, b),
    "batch_norm eval": lambda p, x, w, b: batch_norm(False)(p(x), w, b),
    "gelu": lambda p, x: F.gelu(x),
    "relu": lambda p, x: F.relu(x),
    "normalize": lambda p, x: p(x / (x**2).sum(-1, keepdim=True).sqrt()),
    "scale": lambda p, x, s: p(x) * s,
}


@pytest.mark.parametrize("sparsity", [0.0, 0.5, 0.8])
@pytest.mark.parametrize("name", FORWARD)
def test_pruned_in_the_forward_pass_too(name, sparsity):
    """The result is that of the pruned tensors, the gradients are the same formulas on them, straight through."""
    normalised = name.endswith(" normalised")
    function, _, shapes, _ = PRUNED[name.removesuffix(" normalised")]
    inputs, p = tensors(*shapes, seed=1), partial(prune, sparsity=sparsity)
    y = packed(function, inputs, everywhere(Sparse(sparsity), normalised=normalised, forward=True))
    torch.testing.assert_close(y, FORWARD[name](p, *inputs), **EXACT)
    pruned_somewhere = sparsity and name not in ("gelu", "relu")
    assert torch.allclose(y, function(*inputs)) != bool(pruned_somewhere)

    def straight_through(x: Tensor) -> Tensor:
        return x + (p(x) - x).detach()

    plain = Policy(Sparse(sparsity), Sparse(sparsity), Sparse(sparsity), Dense(), normalised=normalised, forward=True)
    found = gradients(packed(function, inputs, plain), inputs)
    if name in ("softmax", "attention", "normalize", "layer_norm normalised"):
        # Formulas in the operation's result, or in x̂: Back Razor puts what is pruned there, autograd what is not.
        by_hand = BY_HAND_FORWARD[name]
        with torch.no_grad():
            expected = by_hand(p, upstream(y), *inputs)
    else:
        expected = gradients(FORWARD[name](straight_through, *inputs), inputs)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, **EXACT)


def by_hand_attention_forward(p, g, q, k, v, mask):
    return by_hand_attention(p, g, p(q), p(k), v, mask)


BY_HAND_FORWARD: dict[str, Callable[..., tuple[Tensor, ...]]] = {
    "softmax": by_hand_softmax,
    "attention": by_hand_attention_forward,
    "normalize": by_hand_normalize,
    "layer_norm normalised": partial(by_hand_layer_norm, normalised=True),
}


@pytest.mark.parametrize("derived", [True, False])
def test_pruned_in_the_forward_pass_too_costs_no_more_bytes(derived):
    settings = {"normalised": True, "derived": derived}
    kept = []
    for forward in (False, True):
        inputs = inputs_of_everything()
        policy = everywhere(Sparse(0.7), **settings, forward=forward)
        y, saved = saved_while(lambda i=inputs, p=policy: packed(network_of_everything, i, p))
        kept.append(bytes_of(others(saved, inputs)))
        assert all(g.isfinite().all() and g.norm() > 0 for g in gradients(y, inputs))
    assert kept[0] == kept[1]


def test_a_samples_budget_is_over_all_of_its_windows():
    x, w = tensors((8, 3, 6), (5, 6))
    y = packed(F.linear, (x, w), everywhere(Sparse(0.5)))
    expected = torch.einsum("bno,bni->oi", upstream(y), prune(x, 0.5, samples=2))
    torch.testing.assert_close(gradients(y, (w,))[0], expected, **EXACT)


def test_each_kind_of_tensor_has_its_own_packer():
    def network(x, w, gamma, beta, q, k, v, s):
        y = F.linear(F.gelu(F.layer_norm(x, (6,), gamma, beta)), w)
        return y + F.scaled_dot_product_attention(q, k, v) + F.relu(y) * s

    shapes = [(2, 3, 6), (4, 6), (6,), (6,), (2, 3, 4), (2, 3, 4), (2, 3, 4), (1,)]
    product, norm, attention, activation = (Counting() for _ in range(4))
    packed(network, tensors(*shapes), Policy(product, norm, attention, activation))
    assert product.shapes == [(2, 3, 6)]
    assert norm.shapes == [(2, 3, 6), (2, 3, 4)]
    assert attention.shapes == [(2, 3, 4), (2, 3, 4), (2, 3, 3), (2, 3, 4)]
    assert activation.shapes == [(2, 3, 6)]


@pytest.mark.parametrize("sparsity", [0.5, 0.8])
def test_fused_attention_is_recomputed_from_what_is_kept(sparsity):
    qkv = tensors(*QKV)
    y = packed(attention, qkv, everywhere(Dense(), fused=Sparse(sparsity)))
    torch.testing.assert_close(y, attention(*qkv), **EXACT)
    pruned = [prune(t, sparsity).requires_grad_() for t in qkv]
    found, expected, unpruned = (
        gradients(y, qkv),
        gradients(attention(*pruned), pruned),
        gradients(attention(*qkv), qkv),
    )
    for a, b, c in zip(found, expected, unpruned, strict=True):
        torch.testing.assert_close(a, b, **EXACT)
        assert not torch.allclose(a, c, rtol=1e-3)


@pytest.mark.parametrize("scale", [None, 0.3])
def test_fused_attention_equals_plain_attention_where_nothing_is_dropped(scale):
    qkv = tensors(*QKV)
    attend = partial(attention, scale=scale)
    y, saved = saved_while(lambda: packed(attend, qkv, everywhere(Sparse(0.9), fused=Sparse(0.0))))
    assert len(saved) == 6, "values and bits of q, k and v"
    torch.testing.assert_close(y, attend(*qkv), **EXACT)
    for a, b in zip(gradients(y, qkv), gradients(attend(*qkv), qkv), strict=True):
        torch.testing.assert_close(a, b, **EXACT)


def test_fused_attention_with_a_constant_bias_keeps_it_as_it_is():
    qkv, bias = tensors(*QKV), torch.linspace(-2, 2, 10, dtype=torch.float64).view(2, 1, 1, 5)
    y, saved = saved_while(lambda: packed(masked(bias), qkv, everywhere(Sparse(0.9), fused=Sparse(0.0))))
    assert len(saved) == 7, "values and bits of q, k and v, and the bias"
    torch.testing.assert_close(y, masked(bias)(*qkv), **EXACT)
    for a, b in zip(gradients(y, qkv), gradients(masked(bias)(*qkv), qkv), strict=True):
        torch.testing.assert_close(a, b, **EXACT)


def test_attention_with_a_learned_mask_is_not_fused():
    # The backward pass has no gradient for it: it is attention in its parts, whose packer the policy names.
    inputs = tensors(*QKV, (2, 1, 3, 5))
    y = packed(attention, inputs, Policy(Dense(), Dense(), Sparse(0.0), Dense(), fused=Sparse(0.9)))
    for a, b in zip(gradients(y, inputs), gradients(attention(*inputs), inputs), strict=True):
        torch.testing.assert_close(a, b, **EXACT)


def test_dropout_of_attention_drops_forward_and_backward():
    q, k = tensors((2, 1, 3, 4), (2, 1, 3, 4))
    v = torch.eye(3).double().expand(2, 1, 3, 3).clone().requires_grad_()  # the result is what P was made of
    torch.manual_seed(0)
    y = packed(partial(attention, dropout_p=0.5), (q, k, v), everywhere(Sparse(0.0)))
    p = softmax(q @ k.mT / 2)
    dropped = y == 0
    assert 0 < dropped.sum() < y.numel()
    torch.testing.assert_close(y, torch.where(dropped, 0, 2 * p), **EXACT)
    expected = torch.autograd.grad(torch.where(dropped, 0, 2 * p), (q, k), upstream(y))
    for a, b in zip(gradients(y, (q, k)), expected, strict=True):
        torch.testing.assert_close(a, b, **EXACT)


# ------------------------------------------------------------------------------------------------ derived
def two_layers(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
    return F.linear(F.gelu(F.linear(x, first)), second)


@pytest.mark.parametrize("derived", [True, False])
def test_a_product_after_gelu_gets_its_input_from_gelus(derived):
    x, first, second = tensors((2, 3, 6), (5, 6), (4, 5))
    policy = Policy(Sparse(0.9), Dense(), Dense(), Dense(), derived=derived)
    y, saved = saved_while(lambda: packed(two_layers, (x, first, second), policy))
    plain = two_layers(x, first, second)
    torch.testing.assert_close(y, plain, **EXACT)
    g_first, g_second = gradients(y, (first, second))
    exact_first, exact_second = gradients(plain, (first, second))
    assert torch.allclose(g_second, exact_second, **EXACT) == derived
    assert not torch.allclose(g_first, exact_first, **EXACT)
    # Values and bits of x, gelu's input, and of its output only where it is not derived.
    assert len(others(saved, (first, second))) == (3 if derived else 5)


@pytest.mark.parametrize(("weight", "bias"), [(True, True), (True, False), (False, True), (False, False)])
def test_a_product_after_a_layer_norm_gets_its_input_from_the_normalised_one(weight, bias):
    x, gamma, beta, w = tensors((2, 3, 6), (6,), (6,), (4, 6))
    gamma, beta = gamma if weight else None, beta if bias else None
    policy = everywhere(Sparse(0.5), normalised=True, derived=True)
    y, saved = saved_while(lambda: packed(lambda x: F.linear(F.layer_norm(x, (6,), gamma, beta), w), (x,), policy))
    x_hat = (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True, unbiased=False) + 1e-5).sqrt()
    h = prune(x_hat, 0.5) * (1 if gamma is None else gamma) + (0 if beta is None else beta)
    expected = torch.einsum("bno,bni->oi", upstream(y), h)
    torch.testing.assert_close(gradients(y, (w,))[0], expected, **EXACT)
    parameters = [p for p in (gamma, beta, w) if p is not None]
    assert len(others(saved, parameters)) == 3, "values and bits of x̂, and rstd"


def test_derived_takes_only_what_is_normalised():
    x, gamma, beta, w = tensors((2, 3, 6), (6,), (6,), (4, 6))
    policy = everywhere(Sparse(0.5), derived=True)
    y = packed(lambda x: F.linear(F.layer_norm(x, (6,), gamma, beta), w), (x,), policy)
    expected = torch.einsum("bno,bni->oi", upstream(y), prune(F.layer_norm(x, (6,), gamma, beta), 0.5))
    torch.testing.assert_close(gradients(y, (w,))[0], expected, **EXACT)


def test_what_changed_since_is_not_derived():
    x, w = tensors((2, 3, 6), (4, 6))
    policy = Policy(Sparse(0.0), Dense(), Dense(), Dense(), derived=True)

    def network(x, w):
        return F.linear(F.gelu(x).add_(1.0), w)

    found = gradients(packed(network, (x, w), policy), (x, w))
    for a, b in zip(found, gradients(network(x, w), (x, w)), strict=True):
        torch.testing.assert_close(a, b, **EXACT)


# ------------------------------------------------------------------------------------------------ packed once
def test_a_tensor_that_two_layers_take_is_packed_once():
    x, q, k = tensors((2, 3, 6), (4, 6), (4, 6))

    def network():
        return packed(lambda x: torch.cat([F.linear(x, q), F.linear(x, k)], -1), (x,), everywhere(Sparse(0.5)))

    y, saved = saved_while(network)
    assert len(others(saved, (q, k))) == 2, "values and bits"
    g_q, g_k = gradients(y, (q, k))
    expected = torch.einsum("bno,bni->oi", upstream(y), prune(x, 0.5))
    torch.testing.assert_close(torch.cat([g_q, g_k]), expected, **EXACT)


def test_softmax_and_the_product_after_it_keep_its_output_once():
    x, v = tensors((2, 2, 3, 5), (2, 2, 5, 4))
    _, saved = saved_while(lambda: packed(lambda x, v: F.softmax(x, -1) @ v, (x, v), everywhere(Sparse(0.5))))
    assert len(saved) == 4, "values and bits of P and of v"
    _, saved = saved_while(lambda: packed(attention, tensors(*QKV), everywhere(Sparse(0.5))))
    assert len(saved) == 8, "values and bits of q, k, v and P"


def test_a_tensor_and_its_transpose_are_packed_once():
    a, b = tensors((2, 3, 4), (2, 3, 4))
    counting = Counting()

    def network(a, b):
        return (a.mT @ b) @ (b.mT @ a)

    y = packed(network, (a, b), everywhere(counting))
    assert len(counting.shapes) == 4, "a, b and the two products"
    for found, expected in zip(gradients(y, (a, b)), gradients(network(a, b), (a, b)), strict=True):
        torch.testing.assert_close(found, expected, **EXACT)


def test_equal_shapes_at_different_places_are_different_tensors():
    x, w = tensors((2, 3, 2, 6), (4, 6))

    def network(x, w):
        return F.linear(x[:, :, 0], w) - F.linear(x[:, :, 1], w)

    y = packed(network, (x, w), everywhere(Sparse(0.0)))
    for found, expected in zip(gradients(y, (x, w)), gradients(network(x, w), (x, w)), strict=True):
        torch.testing.assert_close(found, expected, **EXACT)


def test_what_changed_since_is_packed_again():
    x, first, second = tensors((2, 3, 6), (4, 6), (4, 6))
    with around(everywhere(Sparse(0.0))):
        h = x.detach().clone()
        y = F.linear(h, first)
        h.add_(1)
        y = y + F.linear(h, second)
    g_first, g_second = gradients(y, (first, second))
    torch.testing.assert_close(g_first, torch.einsum("bno,bni->oi", upstream(y), x), **EXACT)
    torch.testing.assert_close(g_second, torch.einsum("bno,bni->oi", upstream(y), x + 1), **EXACT)


def test_memory_used_again_is_another_tensor(monkeypatch):
    """What lay at an address before is not what lies there now; here every tensor has one address."""
    lying = packed_module._lying

    def at_one_address(x):
        order, memory, identity = lying(x)
        return order, memory, (0, *identity[1:])

    monkeypatch.setattr(packed_module, "_lying", at_one_address)
    (w,) = tensors((4, 600))
    total = torch.zeros(2, 4).double()
    with around(everywhere(Sparse(0.0))):
        for i in range(20):
            x = torch.full((2, 600), float(i), dtype=torch.float64)
            total = total + F.linear(x, w)
            del x
    expected = upstream(total).sum(0)[:, None].expand(4, 600) * sum(range(20))
    torch.testing.assert_close(gradients(total, (w,))[0], expected, **EXACT)

    # Nor does it stand in the way of what can be computed from what is kept.
    (h,), counting = tensors((2, 600)), Counting()
    with around(Policy(counting, Dense(), Dense(), Dense(), derived=True)):
        x = torch.ones(2, 600, dtype=torch.float64)
        F.linear(x, w)
        del x
        F.linear(F.gelu(h), w)
    assert len(counting.shapes) == 1


# ------------------------------------------------------------------------------------------------ nothing to keep
def bytes_of(saved: list[Tensor]) -> int:
    return sum(t.untyped_storage().nbytes() for t in saved)


@pytest.mark.parametrize("name", ["linear 3-D", "conv", "batch_norm eval", "scale"])
def test_a_frozen_weight_keeps_no_input(name):
    function, shapes = OPERATIONS[name]
    x, weight, *bias = tensors(*shapes)
    weight = weight.detach()
    counting = Counting()
    y, saved = saved_while(lambda: packed(function, (x, weight, *bias), everywhere(counting)))
    assert counting.shapes == []
    assert bytes_of(others(saved, (weight,))) <= 8 * 8, "no more than statistics of four channels"
    for a, b in zip(gradients(y, (x, *bias)), gradients(function(x, weight, *bias), (x, *bias)), strict=True):
        torch.testing.assert_close(a, b, **EXACT)


def test_a_product_keeps_only_what_the_other_needs():
    a, b = tensors(*SEPARATE)
    for inputs, kept in (((a, b.detach()), b), ((a.detach(), b), a)):
        counting = Counting()
        packed(torch.matmul, inputs, everywhere(counting))
        assert counting.shapes == [tuple(kept.shape)]


def test_a_bias_alone_keeps_nothing():
    x, weight, bias = tensors((2, 3, 6), (5, 6), (5,))
    y, saved = saved_while(lambda: packed(F.linear, (x.detach(), weight.detach(), bias), everywhere(Sparse(0.5))))
    assert saved == []
    torch.testing.assert_close(gradients(y, (bias,))[0], upstream(y).sum((0, 1)), **EXACT)


def test_relus_keep_a_bit_for_each_element():
    (x,) = tensors((2, 3, 50))
    for function in (F.relu, F.relu6, F.hardtanh):
        _, saved = saved_while(lambda function=function: packed(function, (x,), everywhere(Dense())))
        assert bytes_of(saved) == math.ceil(300 / 8)


@pytest.mark.parametrize("pool", [partial(F.avg_pool2d, kernel_size=2), partial(F.adaptive_avg_pool2d, output_size=2)])
def test_average_pooling_keeps_nothing(pool):
    _, saved = saved_while(lambda: packed(pool, tensors((2, 3, 6, 8)), everywhere(Dense())))
    assert saved == []


def test_maximum_pooling_keeps_a_byte_for_each_result():
    _, saved = saved_while(lambda: packed(lambda x: F.max_pool2d(x, 2), tensors((2, 3, 6, 8)), everywhere(Dense())))
    assert bytes_of(saved) == 2 * 3 * 3 * 4


def test_the_budget_holds_for_what_is_saved():
    x, w = tensors((4, 50, 40), (8, 40))
    _, saved = saved_while(lambda: packed(F.linear, (x, w), everywhere(Sparse(0.8)), samples=4))
    assert bytes_of(others(saved, (w,))) == 4 * (401 * 8 + 250)


@pytest.mark.parametrize("name", OPERATIONS)
def test_without_gradients_nothing_is_packed(name):
    function, shapes = OPERATIONS[name]
    inputs = tensors(*shapes)
    counting = Counting()
    with torch.no_grad():
        y = packed(function, inputs, everywhere(counting))
    detached = packed(function, [t.detach() for t in inputs], everywhere(counting))
    assert counting.shapes == []
    assert not y.requires_grad
    assert not detached.requires_grad
    with torch.no_grad():
        torch.testing.assert_close(y, function(*inputs), rtol=0, atol=0)


EMPTY: list = [
    # name, how many of the inputs are activations
    ("linear 3-D", 1),
    ("conv", 1),
    ("layer_norm", 1),
    ("gelu", 1),
    ("relu", 1),
    ("softmax", 1),
    ("matmul", 2),
    ("attention", 3),
    ("normalize", 1),
    ("scale", 1),
    ("avg_pool2d", 1),
    ("max_pool2d", 1),
]


@pytest.mark.parametrize("packer", [Sparse(0.5), EightBits(), Dense()], ids=repr)
@pytest.mark.parametrize("name", ["softmax", "normalize"])
def test_a_forward_pass_without_a_backward_pass_frees_its_memory(name, packer):
    function, shapes = OPERATIONS[name]
    y = packed(function, tensors(*shapes), everywhere(packer))
    storage = weakref.ref(y.untyped_storage())
    del y
    gc.collect()
    assert storage() is None


@pytest.mark.parametrize("samples", [0, 2])
@pytest.mark.parametrize(("name", "activations"), EMPTY)
def test_an_empty_batch_gives_the_plain_result(name, activations, samples):
    function, shapes = OPERATIONS[name]
    inputs = tensors(*((0, *s[1:]) if i < activations else s for i, s in enumerate(shapes)))
    y, plain = packed(function, inputs, everywhere(Sparse(0.5)), samples=samples), function(*inputs)
    assert y.shape == plain.shape
    assert y.requires_grad
    for a, b in zip(gradients(y, inputs), gradients(plain, inputs), strict=True):
        assert a.shape == b.shape
        assert not a.any()


def test_what_is_no_activation_of_the_batch_runs_plainly():
    # Position embeddings, relative position biases: their first dimension is no multiple of the batch.
    counting = Counting()
    x, w = tensors((3, 6), (5, 6))
    y = packed(F.linear, (x, w), everywhere(counting))
    assert counting.shapes == []
    torch.testing.assert_close(gradients(y, (w,))[0], upstream(y).T @ x, **EXACT)


def test_a_product_of_two_activations_runs_plainly():
    # Only a scale with far fewer values than x makes packing x worth it.
    counting = Counting()
    a, b = tensors((2, 3, 6), (2, 3, 6))
    y = packed(torch.mul, (a, b), everywhere(counting))
    assert counting.shapes == []
    assert not isinstance(y.grad_fn, BackwardCFunction)


def test_suspended_leaves_operations_plain():
    x, w = tensors((2, 3, 6), (5, 6))
    counting = Counting()
    with around(everywhere(counting)) as mode:
        with mode.suspended():
            with mode.suspended():
                pass
            y = F.gelu(F.linear(x, w))
        assert counting.shapes == []
        assert not isinstance(y.grad_fn, BackwardCFunction)
        with pytest.raises(KeyError), mode.suspended():
            raise KeyError
        F.linear(x, w)
        assert counting.shapes == [(2, 3, 6)]


def test_the_mode_that_runs_is_the_innermost():
    assert running() is None
    with around(everywhere(Dense())) as outer:
        assert running() is outer
        with around(everywhere(Dense())) as inner:
            assert running() is inner
        assert running() is outer
    assert running() is None


def test_an_error_leaves_no_mode_behind():
    with pytest.raises(RuntimeError), around(everywhere(Dense())):
        F.linear(*tensors((2, 3), (5, 4)))
    assert running() is None
    assert not isinstance(F.linear(*tensors((2, 4), (5, 4))).grad_fn, BackwardCFunction)


# ------------------------------------------------------------------------------------------------ odd calls
def as_in_plain_torch(function: Callable[..., Tensor], inputs: Sequence[Tensor], **where: int) -> None:
    y, plain = packed(function, inputs, everywhere(Sparse(0.0)), **where), function(*inputs)
    torch.testing.assert_close(y, plain, **EXACT)
    for a, b in zip(gradients(y, inputs), gradients(plain, inputs), strict=True):
        torch.testing.assert_close(a, b, **EXACT)


PLAIN: dict[str, tuple[Callable[..., Tensor], list[tuple[int, ...]]]] = {
    "normalize in another norm": (lambda x: F.normalize(x, p=1.0, dim=-1), [(2, 3, 5)]),
    "normalize over two": (lambda x: F.normalize(x, dim=(1, 2)), [(2, 3, 5)]),
    "attention, causal": (partial(attention, is_causal=True), [(2, 2, 3, 4)] * 3),
    "attention of fewer heads": (partial(attention, enable_gqa=True), [(2, 4, 3, 4), (2, 2, 3, 4), (2, 2, 3, 4)]),
    "conv same of an even kernel": (partial(conv, padding="same"), [(2, 4, 7, 6), (6, 4, 2, 2)]),
    "max_pool2d of one image": (lambda x: F.max_pool2d(x, 2), [(4, 6, 8)]),
    "max_pool2d with its places": (lambda x: F.max_pool2d(x, 2, return_indices=True)[0], [(2, 3, 6, 8)]),
    "max_pool2d of large windows": (lambda x: F.max_pool2d(x, (17, 16)), [(2, 1, 17, 32)]),
    "conv of one image": (conv, [(4, 7, 6), (6, 4, 2, 2)]),
    "matmul with a matrix": (torch.matmul, [(2, 3, 4), (4, 5)]),
}


@pytest.mark.parametrize("name", PLAIN)
def test_what_has_no_packed_form_runs_plainly(name):
    function, shapes = PLAIN[name]
    as_in_plain_torch(function, tensors(*shapes))


def test_bmm_by_its_arguments_names():
    as_in_plain_torch(lambda a, b: torch.bmm(input=a, mat2=b), tensors(*SEPARATE))


def test_softmax_with_a_type_as_its_third_argument():
    as_in_plain_torch(lambda x: torch.softmax(x.float(), -1, torch.float64), tensors((2, 3, 5)))


def test_attention_of_a_row_that_may_look_at_nothing():
    mask = MASK.clone()
    mask[1] = False
    as_in_plain_torch(masked(mask), tensors(*QKV))


@pytest.mark.parametrize("samples", [0, 2])
def test_a_product_of_two_empty_tensors(samples):
    as_in_plain_torch(torch.mul, tensors((0, 3), (0, 3)), samples=samples)


def test_a_vector_is_normalised_where_there_are_heads():
    as_in_plain_torch(lambda x: F.normalize(x, dim=0), tensors((4,)), heads=2)


# ------------------------------------------------------------------------------------------------ 8 bits, precision
def test_ranges_are_per_head_and_kept_from_step_to_step():
    session, x = Session(), tensors((2, 5, 3 * 4 * 6))[0]

    def step(x: Tensor) -> Tensor:
        with PackedOperations(everywhere(EightBits()), session, "block", 2, heads=4):
            q, k, v = x.unflatten(-1, (3, 4, 6)).permute(2, 0, 3, 1, 4).unbind(0)
            return attention(q, k, v).transpose(1, 2).flatten(2)

    y = step(x)
    assert [len(low) for low, _ in session.ranges.of.values()] == [4, 4, 4, 4]
    assert all(name.startswith("block/") for name in session.ranges.of)
    highs = [high for _, high in session.ranges.of.values()]
    q, k, v = x.unflatten(-1, (3, 4, 6)).permute(2, 0, 3, 1, 4).unbind(0)
    p = softmax(q @ k.mT / 6**0.5)
    by_hand = [t.amax((0, 2, 3)).float() for t in (q, k, p, v)]
    for expected in by_hand:
        assert any(torch.allclose(expected, high) for high in highs)
    exact = gradients(attention(q, k, v).transpose(1, 2).flatten(2), (x,))[0]
    found = gradients(y, (x,))[0]
    assert 1e-5 < ((found - exact).norm() / exact.norm()).item() < 0.03
    step(2 * x)
    assert len(session.ranges.of) == 4, "the next step has the same places"
    for (_, high), before in zip(session.ranges.of.values(), highs, strict=True):
        assert not torch.equal(high, before)


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


@pytest.mark.parametrize("settings", [{}, {"normalised": True, "derived": True}, {"fused": Sparse(0.0)}])
def test_mixed_precision_gives_gradients_of_the_parameters_type_near_the_plain_ones(settings):
    inputs = [t.detach().float().requires_grad_() for t in inputs_of_everything()]
    exact = gradients(network_of_everything(*inputs), inputs)
    with torch.autocast("cpu", torch.bfloat16):
        plain = network_of_everything(*inputs)
        y = packed(network_of_everything, inputs, everywhere(Sparse(0.0), **settings))
    assert y.dtype == plain.dtype
    for a, b, c, t in zip(gradients(y, inputs), gradients(plain, inputs), exact, inputs, strict=True):
        assert a.dtype == t.dtype == torch.float32
        off, plainly_off = (((g - c).norm() / c.norm()).item() for g in (a, b))
        assert off < 2 * plainly_off


@pytest.mark.parametrize("settings", [{}, {"normalised": True, "derived": True}, {"fused": Sparse(0.0)}])
def test_a_network_of_everything_is_exact_where_nothing_is_dropped(settings):
    inputs = inputs_of_everything()
    y = packed(network_of_everything, inputs, everywhere(Sparse(0.0), **settings))
    plain = network_of_everything(*inputs)
    torch.testing.assert_close(y, plain, **EXACT)
    for a, b in zip(gradients(y, inputs), gradients(plain, inputs), strict=True):
        assert b.norm() > 0.01
        torch.testing.assert_close(a, b, **EXACT)


def test_a_kept_tensor_takes_the_type_of_the_product_under_autocast():
    x, w = (t.detach().float().requires_grad_() for t in tensors((2, 3, 16), (5, 16)))
    with torch.autocast("cpu", torch.bfloat16):
        _, saved = saved_while(lambda: packed(F.linear, (x, w), everywhere(Sparse(0.0))))
    assert sorted(bytes_of([t]) for t in others(saved, (w,))) == [2 * 6, 2 * 48 * 2]
