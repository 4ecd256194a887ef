"""Tests that the gradients of packed operations equal the paper's formulas on pruned tensors."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from efficient_ft.ops.saving import Policy
from efficient_ft.ops.storage import Dense, Sparse
from tests.ops.saving.cases import (
    EXACT,
    OPERATIONS,
    QKV,
    Counting,
    attention,
    batch_norm,
    bytes_of,
    conv,
    everywhere,
    gradients,
    inputs_of_everything,
    masked,
    network_of_everything,
    others,
    packed,
    prune,
    saved_while,
    tensors,
    upstream,
)
from tests.ops.saving.formulas import (
    by_hand_attention,
    by_hand_batch_norm,
    by_hand_conv,
    by_hand_frozen_batch_norm,
    by_hand_gelu,
    by_hand_group_norm,
    by_hand_layer_norm,
    by_hand_linear,
    by_hand_matmul,
    by_hand_normalize,
    by_hand_product,
    by_hand_relu,
    by_hand_rms_norm,
    by_hand_scale,
    by_hand_softmax,
    softmax,
)

# By name: the operation, its formulas, the shapes of its inputs, and the indices of the exact gradients.
PRUNED: dict[str, tuple[Callable[..., Tensor], Callable[..., tuple[Tensor, ...]], list, set[int]]] = {
    "linear": (F.linear, by_hand_linear, [(2, 3, 6), (5, 6), (5,)], {0, 2}),
    "conv": (
        partial(conv, stride=2, padding=1),
        by_hand_conv,
        [(2, 4, 7, 9), (6, 4, 3, 3), (6,)],
        {0, 2},
    ),
    "layer_norm": (OPERATIONS["layer_norm"][0], by_hand_layer_norm, [(2, 3, 5), (5,), (5,)], {2}),
    "rms_norm": (lambda x, w: F.rms_norm(x, (5,), w, 1e-5), by_hand_rms_norm, [(2, 3, 5), (5,)], set()),
    "group_norm": (OPERATIONS["group_norm"][0], by_hand_group_norm, [(2, 4, 3, 5), (4,), (4,)], {2}),
    "product": (torch.mul, by_hand_product, [(2, 3, 5), (2, 3, 5)], set()),
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
@pytest.mark.parametrize("name", [*PRUNED, *(f"{norm}_norm normalized" for norm in ("layer", "rms", "group"))])
def test_gradients_are_the_papers_formulas_on_pruned_tensors(name, sparsity):
    normalized = name.endswith(" normalized")
    function, by_hand, shapes, exact = PRUNED[name.removesuffix(" normalized")]
    if normalized:
        by_hand = partial(by_hand, normalized=True)
    inputs = tensors(*shapes, seed=1)
    y, plain = packed(function, inputs, everywhere(Sparse(sparsity), normalized=normalized)), function(*inputs)
    torch.testing.assert_close(y, plain, **EXACT)
    with torch.no_grad():
        expected = by_hand(partial(prune, sparsity=sparsity), upstream(y), *inputs)
    found, unpruned = gradients(y, inputs), gradients(plain, inputs)
    for i, (a, b, c) in enumerate(zip(found, expected, unpruned, strict=True)):
        torch.testing.assert_close(a, b, **EXACT)
        assert torch.allclose(a, c, **EXACT) == (i in exact or sparsity == 0)


# Results of operations that are also pruned in the forward pass. `by_hand` computes the gradients.
FORWARD: dict[str, Callable[..., Tensor]] = {
    "linear": lambda p, x, w, b: p(x) @ w.T + b,
    "conv": lambda p, x, w, b: conv(p(x), w, b, stride=2, padding=1),
    "layer_norm": lambda p, x, w, b: F.layer_norm(p(x), (5,), w, b),
    "layer_norm normalized": lambda p, x, w, b: p(F.layer_norm(x, (5,))) * w + b,
    "rms_norm": lambda p, x, w: F.rms_norm(p(x), (5,), w, 1e-5),
    "rms_norm normalized": lambda p, x, w: p(F.rms_norm(x, (5,), None, 1e-5)) * w,
    "group_norm": lambda p, x, w, b: F.group_norm(p(x), 2, w, b),
    "group_norm normalized": lambda p, x, w, b: p(F.group_norm(x, 2)) * w.view(-1, 1, 1) + b.view(-1, 1, 1),
    "product": lambda p, a, b: p(a) * p(b),
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
    """The result and the gradients are computed from pruned tensors, with a straight-through estimator."""
    normalized = name.endswith(" normalized")
    function, _, shapes, _ = PRUNED[name.removesuffix(" normalized")]
    inputs, p = tensors(*shapes, seed=1), partial(prune, sparsity=sparsity)
    y = packed(function, inputs, everywhere(Sparse(sparsity), normalized=normalized, forward=True))
    torch.testing.assert_close(y, FORWARD[name](p, *inputs), **EXACT)
    pruned_somewhere = sparsity and name not in ("gelu", "relu")
    assert torch.allclose(y, function(*inputs)) != bool(pruned_somewhere)

    def straight_through(x: Tensor) -> Tensor:
        return x + (p(x) - x).detach()

    plain = Policy(Sparse(sparsity), Sparse(sparsity), Sparse(sparsity), Dense(), normalized=normalized, forward=True)
    found = gradients(packed(function, inputs, plain), inputs)
    if name in BY_HAND_FORWARD:
        # These formulas use the operation's result or x̂. Back Razor inserts the pruned tensor, autograd the full one.
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
    "rms_norm normalized": partial(by_hand_rms_norm, normalized=True),
    "group_norm normalized": partial(by_hand_group_norm, normalized=True),
    "normalize": by_hand_normalize,
    "layer_norm normalized": partial(by_hand_layer_norm, normalized=True),
}


@pytest.mark.parametrize("derived", [True, False])
def test_pruned_in_the_forward_pass_too_costs_no_more_bytes(derived):
    settings = {"normalized": True, "derived": derived}
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
    # The fused backward pass has no gradient for the mask, so attention runs as separate operations.
    inputs = tensors(*QKV, (2, 1, 3, 5))
    y = packed(attention, inputs, Policy(Dense(), Dense(), Sparse(0.0), Dense(), fused=Sparse(0.9)))
    for a, b in zip(gradients(y, inputs), gradients(attention(*inputs), inputs), strict=True):
        torch.testing.assert_close(a, b, **EXACT)


def test_dropout_of_attention_drops_forward_and_backward():
    q, k = tensors((2, 1, 3, 4), (2, 1, 3, 4))
    v = torch.eye(3).double().expand(2, 1, 3, 3).clone().requires_grad_()  # v is the identity, so the result is P
    torch.manual_seed(0)
    y = packed(partial(attention, dropout_p=0.5), (q, k, v), everywhere(Sparse(0.0)))
    p = softmax(q @ k.mT / 2)
    dropped = y == 0
    assert 0 < dropped.sum() < y.numel()
    torch.testing.assert_close(y, torch.where(dropped, 0, 2 * p), **EXACT)
    expected = torch.autograd.grad(torch.where(dropped, 0, 2 * p), (q, k), upstream(y))
    for a, b in zip(gradients(y, (q, k)), expected, strict=True):
        torch.testing.assert_close(a, b, **EXACT)
