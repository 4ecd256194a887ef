"""Tests that packed operations save only the tensors that their backward pass needs."""

from __future__ import annotations

import gc
import math
import weakref
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from efficient_ft.ops.storage import Dense, EightBits, Sparse
from tests.ops.saving.cases import (
    EXACT,
    OPERATIONS,
    SEPARATE,
    Counting,
    bytes_of,
    everywhere,
    gradients,
    others,
    packed,
    saved_while,
    tensors,
    upstream,
)


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
    # name, number of inputs that are activations
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


@pytest.mark.slow
@pytest.mark.vary_one
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
