"""Tests that a tensor is packed once for all its users, and that derivable tensors are not saved."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from efficient_ft.ops.saving import Policy, mode
from efficient_ft.ops.storage import Dense, Sparse
from tests.ops.saving.cases import (
    EXACT,
    QKV,
    Counting,
    around,
    attention,
    everywhere,
    gradients,
    others,
    packed,
    prune,
    saved_while,
    tensors,
    upstream,
)


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
    # The saved tensors are the values and bits of x and of gelu's input. Without derivation, gelu's output is also
    # saved.
    assert len(others(saved, (first, second))) == (3 if derived else 5)


@pytest.mark.parametrize(("weight", "bias"), [(True, True), (True, False), (False, True), (False, False)])
def test_a_product_after_a_layer_norm_gets_its_input_from_the_normalized_one(weight, bias):
    x, gamma, beta, w = tensors((2, 3, 6), (6,), (6,), (4, 6))
    gamma, beta = gamma if weight else None, beta if bias else None
    policy = everywhere(Sparse(0.5), normalized=True, derived=True)
    y, saved = saved_while(lambda: packed(lambda x: F.linear(F.layer_norm(x, (6,), gamma, beta), w), (x,), policy))
    x_hat = (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True, unbiased=False) + 1e-5).sqrt()
    h = prune(x_hat, 0.5) * (1 if gamma is None else gamma) + (0 if beta is None else beta)
    expected = torch.einsum("bno,bni->oi", upstream(y), h)
    torch.testing.assert_close(gradients(y, (w,))[0], expected, **EXACT)
    parameters = [p for p in (gamma, beta, w) if p is not None]
    assert len(others(saved, parameters)) == 3, "values and bits of x̂, and rstd"


def test_derived_takes_only_what_is_normalized():
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
    """An address in memory does not identify a tensor. In this test, every tensor has the same address."""
    memory_order = mode.memory_order

    def at_one_address(x):
        order, memory, identity = memory_order(x)
        return order, memory, (0, *identity[1:])

    monkeypatch.setattr(mode, "memory_order", at_one_address)
    (w,) = tensors((4, 600))
    total = torch.zeros(2, 4).double()
    with around(everywhere(Sparse(0.0))):
        for i in range(20):
            x = torch.full((2, 600), float(i), dtype=torch.float64)
            total = total + F.linear(x, w)
            del x
    expected = upstream(total).sum(0)[:, None].expand(4, 600) * sum(range(20))
    torch.testing.assert_close(gradients(total, (w,))[0], expected, **EXACT)

    # A tensor that is derived from a saved tensor is not identified by its address either.
    (h,), counting = tensors((2, 600)), Counting()
    with around(Policy(counting, Dense(), Dense(), Dense(), derived=True)):
        x = torch.ones(2, 600, dtype=torch.float64)
        F.linear(x, w)
        del x
        F.linear(F.gelu(h), w)
    assert len(counting.shapes) == 1


# ------------------------------------------------------------------------------------------------ products and maps
def swiglu(x: Tensor, first: Tensor, second: Tensor, out: Tensor) -> Tensor:
    return F.linear(F.silu(F.linear(x, first)) * F.linear(x, second), out)


@pytest.mark.parametrize("derived", [True, False])
def test_the_product_of_swiglu_is_computed_from_its_factors(derived):
    inputs = tensors((2, 3, 6), (5, 6), (5, 6), (4, 5))
    policy = everywhere(Sparse(0.0), derived=derived)
    y, saved = saved_while(lambda: packed(swiglu, inputs, policy))
    plain = swiglu(*inputs)
    for a, b in zip(gradients(y, inputs), gradients(plain, inputs), strict=True):
        torch.testing.assert_close(a, b, **EXACT)
    # The saved tensors are the values and bits of x, of the gate before SiLU and of the other factor. Without
    # derivation, the gate after SiLU and the product are also saved.
    assert len(others(saved, inputs[1:])) == (6 if derived else 10)


def test_the_product_of_swiglu_is_that_of_the_packed_factors():
    inputs = tensors((2, 3, 6), (5, 6), (5, 6), (4, 5))
    y = packed(swiglu, inputs, everywhere(Sparse(0.5), derived=True))
    x, first, second, _ = inputs
    h = F.silu(prune(F.linear(x, first), 0.5)) * prune(F.linear(x, second), 0.5)
    expected = torch.einsum("bno,bni->oi", upstream(y), h)
    torch.testing.assert_close(gradients(y, inputs[3:])[0], expected, **EXACT)


def inverted_residual(
    x: Tensor, first: Tensor, gamma: Tensor, beta: Tensor, second: Tensor, *, training: bool, act: object
) -> Tensor:
    mean, var = (t.double() for t in (torch.linspace(-1, 1, 5), torch.linspace(0.5, 2, 5)))
    h = F.batch_norm(F.conv2d(x, first), mean, var, gamma, beta, training=training)
    h = act(h)
    h = h * h.mean((2, 3), keepdim=True).sigmoid()
    return F.conv2d(h, second)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("act", [F.silu, F.relu, F.relu6, F.hardswish])
def test_what_follows_a_batch_norm_is_computed_from_its_input(act, training):
    inputs = tensors((2, 4, 6, 6), (5, 4, 1, 1), (5,), (5,), (3, 5, 1, 1))
    function = partial(inverted_residual, training=training, act=act)
    expected = gradients(function(*inputs), inputs)
    sizes = {}
    for maps in (True, False):
        policy = everywhere(Dense(), derived=True, derived_all=maps)
        y, saved = saved_while(lambda policy=policy: packed(function, inputs, policy))
        for a, b in zip(gradients(y, inputs), expected, strict=True):
            torch.testing.assert_close(a, b, **EXACT)
        sizes[maps] = sum(t.numel() * 8 for t in others(saved, inputs) if t.numel() >= 360)
    assert sizes[True] == 2 * 5 * 36 * 8, "only BatchNorm's input is kept"
    assert sizes[False] >= 2 * sizes[True]


def test_a_relu_that_follows_no_batch_norm_is_kept_by_the_next_layer():
    x, first, second = tensors((2, 4, 6, 6), (5, 4, 1, 1), (3, 5, 1, 1))

    def network(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
        return F.conv2d(F.relu(F.conv2d(x, first)), second)

    y = packed(network, (x, first, second), everywhere(Dense(), derived=True, derived_all=True))
    plain = network(x, first, second)
    for a, b in zip(gradients(y, (x, first, second)), gradients(plain, (x, first, second)), strict=True):
        torch.testing.assert_close(a, b, **EXACT)
