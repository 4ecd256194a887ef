"""Tests of the low-rank backward pass against exact backpropagation and a dense reference, in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from efficient_ft.ops.projection import (
    CosineProjector,
    Projection,
    SubsetProjection,
    WalshProjector,
    low_pass_l1,
    low_pass_linf,
    low_rank_conv1x1,
    low_rank_linear,
)
from tests.ops import reference
from tests.ops.saving.cases import Counting, everywhere, packed, tensors
from tests.ops.saving.cases import gradients as packed_gradients

GRIDS = [(7, 7), (8, 8), (14, 14), (5, 9), (16, 16)]
SELECT = {"l1": low_pass_l1, "linf": low_pass_linf}
FULL = {"l1": 15, "linf": 8}
TOLERANCE = {"rtol": 1e-9, "atol": 1e-10}


def case(grid, prefix, c_in=3, c_out=4, batch=2, seed=0):
    """Return x, weight, bias and an upstream gradient in float64."""
    generator = torch.Generator().manual_seed(seed)
    tokens = prefix + grid[0] * grid[1]
    shapes = (batch, tokens, c_in), (c_out, c_in), (c_out,), (batch, tokens, c_out)
    x, weight, bias, g = (torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes)
    return x.requires_grad_(), weight.requires_grad_(), bias.requires_grad_(), g


def gradients(function, x, weight, bias, g):
    return torch.autograd.grad((function(x, weight, bias) * g).sum(), (x, weight, bias))


def low_rank(projection: Projection):
    return lambda x, weight, bias: low_rank_linear(x, weight, bias, projection)


@pytest.mark.parametrize("prefix", [0, 1, 2])
@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("padding", ["ortho", "zero"])
def test_all_bases_equal_exact_backpropagation(grid, prefix, padding):
    projection = WalshProjector(low_pass_l1(15), padding).projection(grid, prefix, (3, 4))
    arguments = case(grid, prefix)
    for low, exact in zip(gradients(low_rank(projection), *arguments), gradients(F.linear, *arguments), strict=True):
        torch.testing.assert_close(low, exact, **TOLERANCE)


@pytest.mark.parametrize("grid", GRIDS)
def test_full_rank_cosine_equals_exact(grid):
    projection = CosineProjector(15).projection(grid, 1, (3, 4))
    arguments = case(grid, 1)
    for low, exact in zip(gradients(low_rank(projection), *arguments), gradients(F.linear, *arguments), strict=True):
        torch.testing.assert_close(low, exact, **TOLERANCE)


@settings(max_examples=40)
@given(
    grid=st.sampled_from([(7, 7), (5, 9), (20, 20)]),
    prefix=st.integers(0, 2),
    kept=st.integers(1, 30),
    fused=st.integers(0, 2),
    order=st.sampled_from([2, 4, 15]),
    padding=st.sampled_from(["ortho", "zero", "reflect"]),
    seed=st.integers(0, 99),
)
def test_kept_tokens_are_projected_where_they_lie(grid, prefix, kept, fused, order, padding, seed):
    """The projection of a subset equals the projection of the whole map with zeros for dropped tokens.

    Fused tokens and prefix tokens are exact. At full rank, all gradients are exact.
    """
    if padding == "reflect" and min(grid) < 7:
        return
    whole = WalshProjector(low_pass_l1(order), padding).projection(grid, prefix, (3, 4))
    positions = grid[0] * grid[1]
    generator = torch.Generator().manual_seed(seed)
    # Grid indices, followed by the indices of fused tokens, in random order. Some images lack some fused tokens.
    places = torch.stack([torch.randperm(positions + fused, generator=generator)[:kept] for _ in range(2)])
    columns = torch.cat([torch.arange(prefix).expand(2, -1), places + prefix], 1)
    at = columns.numpy()
    tokens = columns.shape[1]
    x, g = (torch.randn(2, tokens, c, generator=generator, dtype=torch.float64) for c in (3, 4))
    weight, bias = torch.randn(4, 3, dtype=torch.float64), torch.zeros(4, dtype=torch.float64)
    arguments = x.requires_grad_(), weight.requires_grad_(), bias.requires_grad_(), g
    projection = SubsetProjection.from_columns(whole, columns, fused, torch.float64)
    found = gradients(low_rank(projection), *arguments)

    analysis, synthesis = (np.zeros((whole.rank + fused, whole.tokens + fused)) for _ in range(2))
    eye = torch.eye(whole.tokens, dtype=torch.float64)
    constants = whole.constants(torch.device("cpu"), torch.float64)
    analysis[: whole.rank, : whole.tokens] = whole.project(eye[None], constants)[0]
    eye = torch.eye(whole.rank, dtype=torch.float64)
    synthesis[: whole.rank, : whole.tokens] = whole.back(eye[None], constants)[0].T
    for matrix in (analysis, synthesis):
        matrix[whole.rank :, whole.tokens :] = np.eye(fused)
    g_w = np.zeros((4, 3))
    for b in range(2):
        a, s = analysis[:, at[b]], synthesis[:, at[b]]
        g_hat = a @ g[b].numpy()
        g_w += g_hat.T @ (a @ x[b].detach().numpy())
        np.testing.assert_allclose(found[0][b], s.T @ g_hat @ weight.detach().numpy(), **TOLERANCE)
    np.testing.assert_allclose(found[1], g_w, **TOLERANCE)
    np.testing.assert_allclose(found[2], g.sum((0, 1)), **TOLERANCE)
    if order == 15 and padding == "ortho":
        for low, exact in zip(found, gradients(F.linear, *arguments), strict=True):
            torch.testing.assert_close(low, exact, **TOLERANCE)


def test_reflect_is_not_exact_at_any_rank():
    # The published method counts mirrored rows twice, which adds about 40 % of g_w at 7×7.
    projection = WalshProjector(low_pass_l1(15), "reflect").projection((7, 7), 0, (3, 4))
    arguments = case((7, 7), 0)
    g_x, g_w, g_b = gradients(low_rank(projection), *arguments)
    x, w, b = gradients(F.linear, *arguments)
    torch.testing.assert_close(g_x, x, **TOLERANCE)
    torch.testing.assert_close(g_b, b, **TOLERANCE)
    assert 0.2 < ((g_w - w).norm() / w.norm()).item() < 2


@pytest.mark.parametrize("padding", ["ortho", "zero", "reflect"])
@pytest.mark.parametrize(("bases", "order"), [("l1", r) for r in range(1, 16)] + [("linf", r) for r in range(1, 9)])
def test_every_order_equals_the_dense_reference_and_differs_from_exact(bases, order, padding):
    for grid, prefix in (((7, 7), 0), ((5, 9), 2)):
        x, weight, bias, g = case(grid, prefix, seed=order)
        projection = WalshProjector(SELECT[bases](order), padding).projection(grid, prefix, (3, 4))
        low = gradients(low_rank(projection), x, weight, bias, g)
        arrays = (t.detach().numpy() for t in (x, g, weight))
        expected = reference.low_rank_backward(*arrays, grid, prefix, reference.chosen(bases, order), padding)
        for a, b in zip(low, expected, strict=True):
            np.testing.assert_allclose(a.numpy(), b, rtol=1e-8, atol=1e-9)
        exact = gradients(F.linear, x, weight, bias, g)
        torch.testing.assert_close(low[2], exact[2], **TOLERANCE)
        # Fewer than 64 bases can already span a cropped map.
        full = projection.rank >= projection.tokens if padding == "ortho" else order == FULL[bases]
        assert torch.allclose(low[1], exact[1], **TOLERANCE) == (full and padding != "reflect")


@pytest.mark.slow
@settings(max_examples=40)
@given(
    grid=st.tuples(st.integers(2, 20), st.integers(2, 20)),
    prefix=st.integers(0, 5),
    order=st.integers(1, 15),
    padding=st.sampled_from(["ortho", "zero", "reflect"]),
    channels=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    batch=st.integers(1, 3),
)
def test_any_shape_equals_the_dense_reference(grid, prefix, order, padding, channels, batch):
    projector = WalshProjector(low_pass_l1(order), padding)
    if padding == "reflect" and any(reference.padding_of(n)[0] >= n for n in grid):
        with pytest.raises(ValueError, match="mirrored rows"):
            projector.projection(grid, prefix, channels)
        return
    x, weight, bias, g = case(grid, prefix, *channels, batch, seed=order)
    low = gradients(low_rank(projector.projection(grid, prefix, channels)), x, weight, bias, g)
    arrays = (t.detach().numpy() for t in (x, g, weight))
    expected = reference.low_rank_backward(*arrays, grid, prefix, reference.chosen("l1", order), padding)
    for a, b in zip(low, expected, strict=True):
        np.testing.assert_allclose(a.numpy(), b, rtol=1e-7, atol=1e-8)


@settings(max_examples=25)
@given(
    grid=st.tuples(st.integers(2, 17), st.integers(2, 17)),
    order=st.integers(1, 15),
    padding=st.sampled_from(["ortho", "zero"]),
    channels_last=st.booleans(),
)
def test_window_convolution_and_map_give_the_same_as_tokens(grid, order, padding, channels_last):
    x, weight, bias, g = case(grid, 0)
    projection = WalshProjector(low_pass_l1(order), padding).projection(grid, 0, (3, 4))
    expected = gradients(low_rank(projection), x, weight, bias, g)

    def as_map(tokens):
        return tokens.unflatten(1, grid)

    def of_map(x, weight, bias):
        return low_rank_linear(as_map(x), weight, bias, projection).flatten(1, 2)

    def of_convolution(x, weight, bias):
        first = as_map(x).permute(0, 3, 1, 2)
        first = first if channels_last else first.contiguous()
        y = low_rank_conv1x1(first, weight[:, :, None, None], bias, projection)
        return y.flatten(2).transpose(1, 2)

    for function in (of_map, of_convolution):
        for a, b in zip(gradients(function, x, weight, bias, g), expected, strict=True):
            torch.testing.assert_close(a, b, **TOLERANCE)


@pytest.mark.parametrize("grid", [(28, 28), (17, 20), (56, 56)])
@pytest.mark.parametrize("padding", ["ortho", "zero", "reflect"])
def test_tiles_of_large_maps_equal_the_dense_reference(grid, padding):
    x, weight, bias, g = case(grid, 1, 2, 3, 1)
    projection = WalshProjector(low_pass_l1(3), padding).projection(grid, 1, (2, 3))
    assert projection.groups[0].positions is not None
    assert sum(group.tiles for group in projection.groups) > 4
    low = gradients(low_rank(projection), x, weight, bias, g)
    mode = padding if padding != "ortho" or grid != (56, 56) else "zero"  # a side of 56 needs no padding
    arrays = (t.detach().numpy() for t in (x, g, weight))
    expected = reference.low_rank_backward(*arrays, grid, 1, reference.chosen("l1", 3), mode)
    for a, b in zip(low, expected, strict=True):
        np.testing.assert_allclose(a.numpy(), b, rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("needs", [(True, False), (False, True)])
def test_only_what_is_needed_is_computed_and_kept(needs):
    x, weight, bias, _g = case((7, 7), 0)
    x, weight = x.detach().requires_grad_(needs[0]), weight.detach().requires_grad_(needs[1])
    projection = WalshProjector(low_pass_l1(4)).projection((7, 7), 0, (3, 4))
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = low_rank_linear(x, weight, bias, projection)
    shapes = {tuple(t.shape) for t in saved}
    assert tuple(x.shape) not in shapes, "x itself must never be kept"
    assert ((2, 10, 3) in shapes) == needs[1]
    assert ((4, 3) in shapes) == needs[0]
    y.sum().backward()
    assert (x.grad is not None, weight.grad is not None, bias.grad is not None) == (*needs, True)


@pytest.mark.parametrize("autocast", [False, True])
def test_layers_that_read_one_tensor_have_one_projection(autocast):
    projection = WalshProjector(low_pass_l1(4)).projection((7, 7), 0, (3, 4))
    x = case((7, 7), 0)[0].detach().float()
    other = x.clone()
    weights = [torch.randn(4, 3, requires_grad=True) for _ in range(3)]
    saved = []

    def run(*inputs):
        saved.clear()
        with (
            torch.autocast("cpu", torch.bfloat16, enabled=autocast),
            torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t),
        ):
            y = sum(low_rank_linear(t, w, None, projection).float() for t, w in zip(inputs, weights, strict=True))
        x_hats = len({t.data_ptr() for t in saved if t.shape == (2, 10, 3)})
        return x_hats, torch.autograd.grad(y.square().sum(), weights)

    kept, shared = run(x, x, x)
    assert kept == 1
    kept, alternating = run(x, other, x)
    assert kept == 3
    for a, b in zip(shared, alternating, strict=True):
        assert torch.equal(a, b)


def test_a_shared_projection_is_packed_once_and_unpacked_for_every_layer():
    projection = WalshProjector(low_pass_l1(4)).projection((7, 7), 0, (3, 4))
    x = case((7, 7), 0)[0].detach()
    weights = tensors((4, 3), (4, 3), (4, 3))
    counting = Counting()

    def layers(x, *weights):
        return torch.cat([low_rank_linear(x, w, None, projection) for w in weights], -1)

    y = packed(layers, (x, *weights), everywhere(counting))
    assert counting.shapes == [(2, 10, 3)]
    for a, b in zip(packed_gradients(y, weights), packed_gradients(layers(x, *weights), weights), strict=True):
        torch.testing.assert_close(a, b, **TOLERANCE)


@pytest.mark.parametrize("autocast", [False, True])
def test_a_tensor_changed_in_place_is_projected_again(autocast):
    projection = WalshProjector(low_pass_l1(4)).projection((7, 7), 0, (3, 4))
    x, weight = (t.detach().float() for t in case((7, 7), 0)[:2])
    weight.requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        first = low_rank_linear(x, weight, None, projection)
        x.mul_(2)
        second = low_rank_linear(x, weight, None, projection)
    (before,) = torch.autograd.grad(first.float().sum(), weight)
    (after,) = torch.autograd.grad(second.float().sum(), weight)
    torch.testing.assert_close(after, 2 * before)


def test_gradcheck_at_full_rank():
    x, weight, bias, _ = case((3, 5), 1, 2, 2, 1)
    projection = WalshProjector(low_pass_l1(15)).projection((3, 5), 1, (2, 2))
    assert torch.autograd.gradcheck(low_rank(projection), (x, weight, bias))


@pytest.mark.parametrize("form", ["tokens", "convolution"])
def test_mixed_precision_projects_in_the_autocast_type_and_returns_fp32_gradients(form):
    x, weight, bias, g = (t.detach().float() for t in case((7, 7), 0, 16, 24, 8))
    for t in (x, weight, bias):
        t.requires_grad_()
    projection = WalshProjector(low_pass_l1(4)).projection((7, 7), 0, (16, 24))

    def conv(x, weight, bias):
        first = x.transpose(1, 2).unflatten(2, (7, 7))
        return low_rank_conv1x1(first, weight[:, :, None, None], bias, projection).flatten(2).transpose(1, 2)

    function = low_rank(projection) if form == "tokens" else conv
    expected = gradients(function, x, weight, bias, g)
    saved = []
    with (
        torch.autocast("cpu", torch.bfloat16),
        torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t),
    ):
        y = function(x, weight, bias)
    assert y.dtype == torch.bfloat16
    assert any(t.shape == (8, 10, 16) and t.dtype == torch.bfloat16 for t in saved)
    low = torch.autograd.grad((y.float() * g).sum(), (x, weight, bias))
    for a, b in zip(low, expected, strict=True):
        assert a.dtype == torch.float32
        assert ((a - b).norm() / b.norm()).item() < 0.02


def test_a_projection_traced_on_fake_tensors_keeps_real_constants():
    from torch._subclasses.fake_tensor import FakeTensorMode

    projection = WalshProjector(low_pass_l1(4)).projection((6, 7), 3, (2, 2))
    with FakeTensorMode(allow_non_fake_inputs=True):
        low_rank_linear(torch.randn(1, 45, 2, requires_grad=True), torch.randn(2, 2), None, projection).sum().backward()
    matrix = projection.constants(torch.device("cpu"), torch.float32).matrices[0]
    assert type(matrix) is torch.Tensor
    assert matrix.isfinite().all()


class Operations(TorchDispatchMode):
    """Mode that lists the names of the executed operations."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(function.__name__.partition(".")[0])
        return function(*args, **kwargs or {})


def test_a_small_layer_executes_few_operations():
    """With small tensors, every operation takes as long as a product. The constants are expanded only once."""
    x, weight, bias, g = case((2, 2), 1, batch=1)
    projection = CosineProjector(1).projection((2, 2), 1, (3, 4))
    low_rank_linear(x.detach().clone(), weight, bias, projection)
    with Operations() as forward:
        y = low_rank_linear(x, weight, bias, projection)
    with Operations() as backward:
        y.backward(g)
    products = [sum(n in ("bmm", "mm", "mv", "addmm") for n in mode.names) for mode in (forward, backward)]
    assert products == [2, 5]
    assert "expand" not in forward.names + backward.names
    assert len(forward.names) <= 6, forward.names
    assert len(backward.names) <= 14, backward.names


@pytest.mark.parametrize("batch", [0, 1, 2, 3])
def test_every_batch_size_has_its_own_expanded_matrices(batch):
    projection = WalshProjector(low_pass_l1(15)).projection((3, 3), 1, (3, 4))
    arguments = case((3, 3), 1, batch=batch)
    for low, exact in zip(gradients(low_rank(projection), *arguments), gradients(F.linear, *arguments), strict=True):
        torch.testing.assert_close(low, exact, **TOLERANCE)
