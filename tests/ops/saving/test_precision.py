"""Tests of 8-bit ranges and mixed precision."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from efficient_ft.ops.saving import PackedOperations, PackingState
from efficient_ft.ops.storage import Dense, EightBits, Sparse
from tests.ops.saving.cases import (
    EXACT,
    attention,
    bytes_of,
    everywhere,
    gradients,
    inputs_of_everything,
    network_of_everything,
    others,
    packed,
    saved_while,
    tensors,
)
from tests.ops.saving.formulas import softmax


def test_ranges_are_per_head_and_kept_from_step_to_step():
    session, x = PackingState(), tensors((2, 5, 3 * 4 * 6))[0]

    def step(x: Tensor) -> Tensor:
        with PackedOperations(everywhere(EightBits()), session, "block", 2, heads=4):
            q, k, v = x.unflatten(-1, (3, 4, 6)).permute(2, 0, 3, 1, 4).unbind(0)
            return attention(q, k, v).transpose(1, 2).flatten(2)

    y = step(x)
    assert [len(low) for low, _ in session.ranges.by_name.values()] == [4, 4, 4, 4]
    assert all(name.startswith("block/") for name in session.ranges.by_name)
    highs = [high for _, high in session.ranges.by_name.values()]
    q, k, v = x.unflatten(-1, (3, 4, 6)).permute(2, 0, 3, 1, 4).unbind(0)
    p = softmax(q @ k.mT / 6**0.5)
    by_hand = [t.amax((0, 2, 3)).float() for t in (q, k, p, v)]
    for expected in by_hand:
        assert any(torch.allclose(expected, high) for high in highs)
    exact = gradients(attention(q, k, v).transpose(1, 2).flatten(2), (x,))[0]
    found = gradients(y, (x,))[0]
    assert 1e-5 < ((found - exact).norm() / exact.norm()).item() < 0.03
    step(2 * x)
    assert len(session.ranges.by_name) == 4, "the next step has the same places"
    for (_, high), before in zip(session.ranges.by_name.values(), highs, strict=True):
        assert not torch.equal(high, before)


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"normalized": True, "derived": True}, {"fused": Sparse(0.0)}])
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


@pytest.mark.parametrize("form", ["plain", "biased", "three dimensions", "dropout"])
def test_errors_of_unfused_attention_in_bf16_are_at_most_those_of_fused_attention(form):
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(2, 3, 50, 32, generator=generator).bfloat16() for _ in range(3)]
    inputs[0] *= 4  # large scores have large rounding errors
    bias = torch.randn(2, 3, 50, 50, generator=generator).bfloat16() if form == "biased" else None
    if form == "three dimensions":
        inputs = [t.flatten(0, 1) for t in inputs]

    def unfused(*args: Tensor | None) -> Tensor:
        return packed(lambda *args: attention(*args, 1e-12 if form == "dropout" else 0.0), args, everywhere(Dense()))

    def errors(function: Callable[..., Tensor]) -> list[float]:
        found = [output_and_gradients(f, inputs, bias, dtype) for f, dtype in ((function, half), (attention, exact))]
        return [((a.double() - b).norm() / b.norm()).item() for a, b in zip(*found, strict=True)]

    half, exact = torch.bfloat16, torch.float64
    for off, plainly_off in zip(errors(unfused), errors(attention), strict=True):
        assert off < 1.4 * plainly_off
        assert off < 0.01


def output_and_gradients(
    function: Callable[..., Tensor], inputs: Sequence[Tensor], bias: Tensor | None, dtype: torch.dtype
) -> list[Tensor]:
    inputs = [t.to(dtype).requires_grad_() for t in inputs]
    y = function(*inputs, None if bias is None else bias.to(dtype))
    return [y.detach(), *gradients(y, inputs)]


@pytest.mark.parametrize("settings", [{}, {"normalized": True, "derived": True}, {"fused": Sparse(0.0)}])
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
