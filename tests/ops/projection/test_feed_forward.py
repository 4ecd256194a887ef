"""Tests of low-rank feed-forward networks that run as one operation, against separate layers in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from efficient_ft.ops.optional import optional_module
from efficient_ft.ops.projection import (
    CosineProjector,
    Projection,
    WalshProjector,
    kernels,
    low_pass_l1,
    low_rank_conv1x1,
    low_rank_feed_forward,
    low_rank_linear,
    pool_mixer,
)

#: Projections with one tile, tiles and prefix tokens, a dense matrix, groups of tiles, and different matrices.
PROJECTIONS = {
    "one tile": WalshProjector(low_pass_l1(4)).projection((7, 7), 0, (3, 4)),
    "tiles": WalshProjector(low_pass_l1(3)).projection((9, 14), 2, (3, 4)),
    "dense": CosineProjector(2).projection((5, 9), 1, (3, 4)),
    "groups": WalshProjector(low_pass_l1(2)).projection((17, 20), 1, (3, 4)),
    "reflect": WalshProjector(low_pass_l1(4), "reflect").projection((7, 14), 0, (3, 4)),
}
#: Largest relative error of each gradient. bfloat16 rounds each tensor between two operations.
ERROR = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2e-2}

needs_numba = pytest.mark.skipif(
    optional_module("efficient_ft.ops.projection.numba_kernels") is None, reason="numba is not installed"
)


def _case(tokens: int, widths: tuple[int, int, int] = (24, 150, 20), batch: int = 3) -> tuple[list[Tensor], Tensor]:
    """Return x, the residual tensor, the weights, scales and shifts of two layers, and an upstream gradient."""
    generator = torch.Generator().manual_seed(0)
    c, hidden, out = widths
    shapes: list[Any] = [(batch, tokens, c), (batch, tokens, out), (hidden, c), hidden, hidden, (out, hidden), out, out]
    inputs = [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]
    inputs[2] /= c**0.5
    inputs[5] /= hidden**0.5
    return inputs, torch.randn(batch, tokens, out, generator=generator, dtype=torch.float64)


def _separate(
    projection: Projection, x: Tensor, residual: Tensor | None, w1: Any, a1: Any, b1: Any, w2: Any, a2: Any, b2: Any
) -> Tensor:
    y = F.gelu(low_rank_linear(x, w1, None, projection) * a1 + b1)
    y = low_rank_linear(y, w2, None, projection) * a2 + b2
    return y if residual is None else residual + y


def _fused(projection: Projection, x: Tensor, residual: Tensor | None, *layers: Tensor) -> Tensor:
    return low_rank_feed_forward(x, layers[:3], layers[3:], projection, residual)  # type: ignore[arg-type]


def _gradients(function: Any, projection: Projection, inputs: list[Tensor], g: Tensor, dtype: torch.dtype) -> Any:
    half = dtype is torch.bfloat16
    leaves = [t.to(torch.float32 if half else dtype).requires_grad_() for t in inputs]
    with torch.autocast("cpu", torch.bfloat16, enabled=half):
        y = function(projection, *leaves)
    return y, torch.autograd.grad(y, leaves, g.to(y.dtype))


def _error(found: Tensor, expected: Tensor) -> float:
    return ((found.double() - expected).norm() / expected.norm()).item()


@pytest.mark.slow
@needs_numba
@pytest.mark.parametrize("dtype", list(ERROR))
@pytest.mark.parametrize("name", list(PROJECTIONS))
def test_outputs_and_gradients_equal_those_of_separate_layers(name: str, dtype: torch.dtype) -> None:
    projection = PROJECTIONS[name]
    inputs, g = _case(projection.tokens)
    y, gradients = _gradients(_fused, projection, inputs, g, dtype)
    expected, exact = _gradients(_separate, projection, inputs, g, torch.float64)
    assert y.dtype == (dtype if dtype is torch.float64 else torch.float32)
    assert _error(y, expected) < ERROR[dtype]
    for found, value, leaf in zip(gradients, exact, inputs, strict=True):
        assert found.shape == leaf.shape
        assert _error(found, value) < ERROR[dtype]


@pytest.mark.slow
@needs_numba
def test_in_bfloat16_gradients_are_closer_to_float64_than_those_of_separate_layers() -> None:
    projection = PROJECTIONS["one tile"]
    inputs, g = _case(49, (64, 256, 64), 16)
    _, exact = _gradients(_separate, projection, inputs, g, torch.float64)
    _, fused = _gradients(_fused, projection, inputs, g, torch.bfloat16)
    _, separate = _gradients(_separate, projection, inputs, g, torch.bfloat16)
    for a, b, value in zip(fused, separate, exact, strict=True):
        assert _error(a, value) <= 1.05 * _error(b, value) + 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_without_numba_torchs_operations_compute_it(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_kernels", lambda: None)
    for projection in PROJECTIONS.values():
        inputs, g = _case(projection.tokens)
        _, found = _gradients(_fused, projection, inputs, g, dtype)
        _, exact = _gradients(_separate, projection, inputs, g, torch.float64)
        assert all(_error(a, b) < ERROR[dtype] for a, b in zip(found, exact, strict=True))


@pytest.mark.slow
def test_one_gradient_is_added_if_the_input_is_the_residual_tensor() -> None:
    projection = PROJECTIONS["one tile"]
    inputs, g = _case(49, (24, 150, 24))
    for dtype in ERROR:
        leaves = [t.to(torch.float64 if dtype is torch.float64 else torch.float32).requires_grad_() for t in inputs]
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype is torch.bfloat16):
            y = _fused(projection, leaves[0], leaves[0], *leaves[2:])
        (found,) = torch.autograd.grad(y, leaves[0], g.to(y.dtype))
        x = inputs[0].clone().requires_grad_()
        (exact,) = torch.autograd.grad(_separate(projection, x, x, *inputs[2:]), x, g)
        assert _error(found, exact) < ERROR[dtype]


@pytest.mark.parametrize("needed", [(0,), (2,), (3, 4), (5,), (6,), (7,), (0, 5)])
def test_only_required_tensors_are_computed_and_saved(needed: tuple[int, ...]) -> None:
    projection = PROJECTIONS["one tile"]
    inputs, g = _case(49)
    leaves = [t.requires_grad_(k in needed) for k, t in enumerate(inputs)]
    saved: list[tuple[int, ...]] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(tuple(t.shape)) or t, lambda t: t):
        y = _fused(projection, leaves[0], None, *leaves[2:])
    found = torch.autograd.grad(y, [leaves[k] for k in needed], g)
    exact = torch.autograd.grad(_separate(projection, leaves[0], None, *leaves[2:]), [leaves[k] for k in needed], g)
    assert all(_error(a, b) < 1e-12 for a, b in zip(found, exact, strict=True))
    maps = {s for s in saved if len(s) == 3}
    assert ((3, 10, 24) in maps) == (2 in needed)
    assert ((3, 49, 150) in maps) == bool({0, 2, 3, 4} & set(needed))
    assert ((3, 10, 150) in maps) == (5 in needed)
    assert ((3, 49, 20) in maps) == (6 in needed)
    assert (3, 49, 24) not in maps, "x itself must never be saved"


@pytest.mark.slow
@needs_numba
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fake_tensors_save_the_same_bytes_and_results_do_not_depend_on_threads(dtype: torch.dtype) -> None:
    projection = PROJECTIONS["tiles"]
    inputs, g = _case(projection.tokens)
    saved: list[int] = []

    def run(leaves: list[Tensor]) -> Tensor:
        saved.clear()
        with (
            torch.autocast("cpu", torch.bfloat16, enabled=dtype is torch.bfloat16),
            torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.nbytes) or t, lambda t: t),
        ):
            return _fused(projection, *leaves)

    results, threads = [], torch.get_num_threads()
    try:
        for number in (1, 2):
            torch.set_num_threads(number)
            leaves = [t.float().requires_grad_() for t in inputs]
            y = run(leaves)
            results.append([y.detach(), *torch.autograd.grad(y, (leaves[0], *leaves[3:5], *leaves[6:]), g.float())])
    finally:
        torch.set_num_threads(threads)
    for one, two in zip(*results, strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=0 if dtype is torch.float32 else 1e-2)
    real = sorted(saved)
    plain = [t.float() for t in inputs]
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        run([mode.from_tensor(t).requires_grad_() for t in plain]).sum().backward()
    assert sorted(saved) == real


@needs_numba
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("prefix", [0, 2])
def test_the_kernels_give_the_gradients_of_a_single_layer(dtype: torch.dtype, prefix: int) -> None:
    projection = WalshProjector(low_pass_l1(4)).projection((7, 7), prefix, (24, 150))
    inputs, _ = _case(49 + prefix)
    x, weight, bias = inputs[0].float(), inputs[2].float(), inputs[3].float()
    g = torch.randn(3, 49 + prefix, 150, generator=torch.Generator().manual_seed(1))

    def tokens(x: Tensor, weight: Tensor, bias: Tensor, fused: bool) -> Tensor:
        return low_rank_linear(x, weight, bias, projection, fused)

    def convolution(x: Tensor, weight: Tensor, bias: Tensor, fused: bool) -> Tensor:
        map_ = x.transpose(1, 2).unflatten(2, (7, 7))
        y = low_rank_conv1x1(map_, weight[:, :, None, None], bias, projection, fused)
        return y.flatten(2).transpose(1, 2)

    def run(layer: Any, fused: bool, half: bool, *of: Tensor) -> Any:
        leaves = [t.clone().requires_grad_() for t in of]
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            y = layer(*leaves, fused)
        return torch.autograd.grad(y, leaves, g.to(y.dtype))

    expected = run(tokens, False, False, x.double(), weight.double(), bias.double())
    for layer in (tokens,) if prefix else (tokens, convolution):
        found = run(layer, True, dtype is torch.bfloat16, x, weight, bias)
        assert all(_error(a, b) < ERROR[dtype] for a, b in zip(found, expected, strict=True))


@pytest.mark.slow
@needs_numba
def test_parameters_in_bfloat16_have_gradients_in_bfloat16() -> None:
    projection = PROJECTIONS["one tile"]
    inputs, g = _case(49)
    leaves = [t.bfloat16().requires_grad_() for t in inputs]
    y = _fused(projection, *leaves)
    assert y.dtype == torch.bfloat16
    exact = torch.autograd.grad(_separate(projection, *(t.double() for t in leaves)), leaves, g)
    for found, expected in zip(torch.autograd.grad(y, leaves, g.bfloat16()), exact, strict=True):
        assert found.dtype == torch.bfloat16
        assert _error(found, expected.double()) < ERROR[torch.bfloat16]


@needs_numba
def test_a_nan_stays_a_nan_in_bfloat16() -> None:
    projection = PROJECTIONS["one tile"]
    f = torch.full((1, 49, 3), float("nan"), dtype=torch.bfloat16)
    f[:, :, 1] = 1
    y, y_hat = kernels.activate(f, torch.ones(3), torch.zeros(3), projection, True)
    assert y_hat is not None
    assert [bool(t.isnan().all()) for t in (y[..., 0], y_hat[..., 0], y[..., 2])] == [True] * 3
    assert not y[..., 1].isnan().any()
    assert not y_hat[..., 1].isnan().any()


@needs_numba
def test_the_rounded_derivative_of_gelu_is_close() -> None:
    projection = WalshProjector(low_pass_l1(15)).projection((8, 8), 0, (3, 4))
    assert projection.rank == 64
    u = torch.linspace(-9, 9, 6400).view(1, 64, 100).bfloat16()
    ones = projection.project(torch.ones(1, 64, 100), projection.constants(u.device, torch.float32)).bfloat16()
    _, _, of_shift = kernels.activate_backward(ones, u, torch.ones(100), torch.zeros(100), projection)
    exact = torch.ops.aten.gelu_backward(torch.ones(1, 64, 100, dtype=torch.float64), u.double())
    assert (of_shift.double() - exact.sum((0, 1))).abs().max() / 64 < 3e-5


@needs_numba
@pytest.mark.parametrize("types", [(torch.float64,) * 2, (torch.float32,) * 2, (torch.bfloat16, torch.float32)])
@pytest.mark.parametrize("size", [(7, 7), (1, 3), (2, 1), (5, 9)])
def test_the_pool_mixer_equals_pooling_and_layer_scale(size: tuple[int, int], types: tuple[torch.dtype, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    x, g = (torch.randn(2, 150, *size, generator=generator, dtype=torch.float64) for _ in range(2))
    x, g = (t.to(memory_format=torch.channels_last) for t in (x.to(types[0]), g))
    scale = torch.randn(150, generator=generator, dtype=torch.float64)

    def run(mixer: Any, dtype: torch.dtype, dtype_x: torch.dtype) -> Any:
        leaves = x.to(dtype_x).requires_grad_(), scale.to(dtype).requires_grad_()
        y = mixer(*leaves)
        return y, *torch.autograd.grad(y, leaves, g.to(y.dtype))

    def plain(x: Tensor, scale: Tensor) -> Tensor:
        return x + (F.avg_pool2d(x, 3, 1, 1, count_include_pad=False) - x) * scale[:, None, None]

    found, expected = run(pool_mixer, types[1], types[0]), run(plain, torch.float64, torch.float64)
    assert found[0].dtype == types[1]
    assert found[0].is_contiguous(memory_format=torch.channels_last)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=ERROR[types[0]], atol=40 * ERROR[types[0]])
