"""Tests that the packing mode applies to activations of the batch, unless packing is suspended."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.autograd.function import BackwardCFunction

from efficient_ft.ops.saving import current_packing, packing_suspended
from efficient_ft.ops.storage import Dense
from tests.ops.saving.cases import EXACT, Counting, around, everywhere, gradients, packed, tensors, upstream


def test_what_is_no_activation_of_the_batch_runs_plainly():
    # The first dimension of position embeddings and relative position biases is not a multiple of the batch size.
    counting = Counting()
    x, w = tensors((3, 6), (5, 6))
    y = packed(F.linear, (x, w), everywhere(counting))
    assert counting.shapes == []
    torch.testing.assert_close(gradients(y, (w,))[0], upstream(y).T @ x, **EXACT)


def test_a_product_of_two_activations_packs_both():
    counting = Counting()
    a, b = tensors((2, 3, 6), (2, 3, 6))
    packed(torch.mul, (a, b), everywhere(counting))
    assert counting.shapes == [(2, 3, 6), (2, 3, 6)]


def test_a_product_with_a_constant_keeps_nothing_of_the_activation():
    counting = Counting()
    a, b = tensors((2, 3, 6), (2, 3, 6))
    y = packed(torch.mul, (a, b.detach()), everywhere(counting))
    assert counting.shapes == []
    assert not isinstance(y.grad_fn, BackwardCFunction)


def test_suspended_leaves_operations_plain():
    x, w = tensors((2, 3, 6), (5, 6))
    counting = Counting()
    with around(everywhere(counting)):
        with packing_suspended():
            with packing_suspended():
                pass
            y = F.gelu(F.linear(x, w))
        assert counting.shapes == []
        assert not isinstance(y.grad_fn, BackwardCFunction)
        with pytest.raises(KeyError), packing_suspended():
            raise KeyError
        F.linear(x, w)
        assert counting.shapes == [(2, 3, 6)]


def test_the_mode_that_runs_is_the_innermost():
    assert current_packing() is None
    with around(everywhere(Dense())) as outer:
        assert current_packing() is outer
        with around(everywhere(Dense())) as inner:
            assert current_packing() is inner
        assert current_packing() is outer
    assert current_packing() is None


def test_an_error_leaves_no_mode_behind():
    with pytest.raises(RuntimeError), around(everywhere(Dense())):
        F.linear(*tensors((2, 3), (5, 4)))
    assert current_packing() is None
    assert not isinstance(F.linear(*tensors((2, 4), (5, 4))).grad_fn, BackwardCFunction)
