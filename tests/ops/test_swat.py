"""Tests of SWAT's products against dense float64 references: results, saved tensors and threshold updates."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from efficient_ft.ops.swat import SparseProducts, Thresholds
from tests.ops.saving.cases import (
    EXACT,
    bytes_of,
    gradients,
    others,
    saved_while,
    tensors,
    upstream,
)
from tests.ops.saving.formulas import by_hand_conv, by_hand_linear


def top(x: Tensor, sparsity: float) -> Tensor:
    """Set all but the ⌈n(1 − s)⌉ largest magnitudes of the whole tensor to zero. Magnitudes must be distinct."""
    x = x.detach()
    kept = x.numel() - int(x.numel() * sparsity)
    smallest = x.abs().flatten().sort(descending=True).values[kept - 1]
    return x * (x.abs() >= smallest)


def around(thresholds: Thresholds, *weights: Tensor, training: bool = True) -> SparseProducts:
    return SparseProducts(thresholds, "r", 2, {id(w): f"w{i}" for i, w in enumerate(weights)}, training)


PRODUCTS: dict[str, tuple[Callable[..., Tensor], Callable[..., tuple[Tensor, ...]], list[tuple[int, ...]]]] = {
    "linear": (F.linear, by_hand_linear, [(2, 3, 6), (5, 6), (5,)]),
    "conv": (partial(F.conv2d, stride=2, padding=1), by_hand_conv, [(2, 4, 7, 9), (6, 4, 3, 3), (6,)]),
}


@pytest.mark.parametrize("sparsity", [0.0, 0.5, 0.8])
@pytest.mark.parametrize("name", PRODUCTS)
def test_results_and_gradients_are_the_papers(name: str, sparsity: float) -> None:
    function, by_hand, shapes = PRODUCTS[name]
    x, w, b = inputs = tensors(*shapes, seed=1)
    with around(Thresholds(sparsity=sparsity), w):
        y = function(x, w, b)
    torch.testing.assert_close(y, function(x, top(w, sparsity), b), **EXACT)
    with torch.no_grad():
        expected = by_hand(partial(top, sparsity=sparsity), upstream(y), x, top(w, sparsity), b)
    found, plain = gradients(y, inputs), gradients(function(*inputs), inputs)
    for i, (a, e, exact) in enumerate(zip(found, expected, plain, strict=True)):
        torch.testing.assert_close(a, e, **EXACT)
        assert torch.allclose(a, exact, **EXACT) == (i == 2 or sparsity == 0)
    assert (found[1] != 0).all(), "the gradient of a dropped weight is there"


def test_thresholds_hold_until_the_step_in_which_they_are_refreshed() -> None:
    thresholds, (x, w) = Thresholds(sparsity=0.5, refresh=3), tensors((2, 8, 6), (5, 6))
    seen = []
    for step in range(7):
        thresholds.step = step
        scale = 1 + step / 10
        with torch.no_grad():
            w.mul_(1.1)
        with around(thresholds, w):
            y = F.linear(x * scale, w)
        seen.append(dict(thresholds.by_name))
        held = 1.1 ** (step % 3)
        expected = (upstream(y).flatten(0, 1).T @ _from(x * scale, seen[step]["r/linear/input"]).flatten(0, 1),)
        torch.testing.assert_close(gradients(y, (w,)), expected, **EXACT)
        torch.testing.assert_close(
            y, F.linear(x * scale, _from(w, w.abs().flatten().sort().values[15].item() / held)), **EXACT
        )
    assert seen[0] == seen[1] == seen[2] != seen[3] == seen[4] == seen[5] != seen[6]
    assert set(seen[0]) == {"w0", "r/linear/input"}


def test_the_threshold_of_a_layer_that_was_frozen_is_not_that_of_long_ago() -> None:
    """A layer that is frozen in a refresh step computes a new threshold when it trains again, and then keeps it."""
    thresholds, (x, w) = Thresholds(sparsity=0.5, refresh=4), tensors((2, 8, 6), (5, 6))
    seen = {}
    for step in range(12):
        thresholds.step = step
        w.requires_grad_(step not in (3, 4, 5))
        with around(thresholds, w):
            F.linear(x * (1 + step), w)
        thresholds.end_step()
        seen[step] = thresholds.by_name["r/linear/input"] / thresholds.by_name["w0"]
    base = seen[0]
    assert seen == pytest.approx({step: base * (1 if step < 6 else 7 if step < 8 else 9) for step in range(12)})


def _from(x: Tensor, threshold: float) -> Tensor:
    return (x * (x.abs() > threshold * (1 - 1e-9))).detach()


def test_what_is_kept_are_values_and_bits_and_never_a_zero() -> None:
    x, w = tensors((2, 4, 10, 10), (6, 4, 3, 3))
    with around(Thresholds(sparsity=0.5), w) as mode:
        _, saved = saved_while(lambda: F.conv2d(x, w))
    assert bytes_of(others(saved, (w,))) == 400 * 8 + 100
    assert mode.policy.product is mode.thresholds
    zeros = x.detach() * (torch.rand_like(x) < 0.1)  # more zeros than values to drop, so the threshold is 0
    with around(Thresholds(sparsity=0.5), w):
        y, saved = saved_while(lambda: F.conv2d(zeros, w))
    assert bytes_of(others(saved, (w,))) == int((zeros != 0).sum()) * 8 + 100
    torch.testing.assert_close(gradients(y, (w,)), gradients(F.conv2d(zeros, w), (w,)), **EXACT)


def test_evaluation_uses_the_weights_of_training_and_moves_nothing() -> None:
    x, w = tensors((2, 3, 6), (5, 6))
    thresholds = Thresholds(sparsity=0.5)
    with torch.no_grad(), around(thresholds, w, training=False):
        y = F.linear(x, weight=w)
    torch.testing.assert_close(y, F.linear(x, top(w, 0.5)), **EXACT)
    assert thresholds.by_name == {}
    thresholds.by_name["w0"] = 1.0
    for context in (torch.no_grad(), torch.enable_grad()):
        with context, around(thresholds, w, training=False):
            y = F.linear(x, w)
        torch.testing.assert_close(y, F.linear(x, _from(w, 1.0)), **EXACT)
    assert thresholds.by_name == {"w0": 1.0}


def test_below_what_trains_weights_are_sparse_and_nothing_is_kept() -> None:
    x, w = (t.detach() for t in tensors((2, 3, 6), (5, 6)))
    with around(Thresholds(sparsity=0.5), w):
        y, saved = saved_while(lambda: F.linear(x, w))
    torch.testing.assert_close(y, F.linear(x, top(w, 0.5)), **EXACT)
    assert saved == []


def test_other_operations_and_other_weights_are_dense() -> None:
    x, w = tensors((2, 3, 6), (5, 6))
    mode = around(Thresholds(sparsity=0.5))
    y = packed_in(mode, lambda: F.gelu(F.linear(x, w)))
    torch.testing.assert_close(y, F.gelu(F.linear(x, w)), **EXACT)
    (z,) = tensors((2, 3, 50))
    _, saved = saved_while(lambda: packed_in(mode, lambda: F.relu(z)))
    assert bytes_of(saved) == 38


def packed_in(mode: SparseProducts, function: Callable[[], Tensor]) -> Tensor:
    with mode:
        return function()


def test_thresholds_travel() -> None:
    one = Thresholds(sparsity=0.5, step=7, by_name={"a": 0.1 + 0.2}, computed={"a": 7})
    other = Thresholds(sparsity=0.5)
    other.load_state_dict(one.state_dict())
    assert (other.step, other.by_name) == (7, {"a": 0.1 + 0.2})
    assert other.computed == {"a": 7}
    one.by_name["a"] = 0.0
    assert other.by_name["a"] == 0.1 + 0.2
