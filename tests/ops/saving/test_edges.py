"""Tests of edge cases against torch in float64: fully masked queries, shared heads, small norms and large means.

Other tests check the names of tensors and non-finite values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from efficient_ft.ops.saving import PackedOperations, PackingState, Policy
from efficient_ft.ops.storage import Dense, EightBits, GroupBits, Half, PackContext, Packed, Packer, Sparse
from tests.ops.saving.cases import EXACT, around, everywhere, gradients, tensors

BOOL_MASK = torch.tensor([[1, 1, 0, 1, 0], [0, 0, 0, 0, 0], [1, 0, 0, 0, 0]]).bool()
FLOAT_MASK = torch.zeros(3, 5).double().masked_fill(BOOL_MASK.logical_not(), -torch.inf)
QKV = [(2, 2, 3, 4), (2, 2, 5, 4), (2, 2, 5, 6)]
attention = F.scaled_dot_product_attention


def with_mask(mask: Tensor) -> Callable[..., Tensor]:
    return lambda q, k, v: attention(q, k, v, mask)


def trained_mask(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return attention(q, k, v, bias + FLOAT_MASK)


EDGES: dict[str, tuple[Callable[..., Tensor], list[tuple[int, ...]]]] = {
    "float mask, a query masked out": (with_mask(FLOAT_MASK), QKV),
    "float mask of each image and head": (with_mask(FLOAT_MASK.expand(2, 2, 3, 5)), QKV),
    "bool mask, a query masked out": (with_mask(BOOL_MASK), QKV),
    "trained mask, a query masked out": (trained_mask, [*QKV, (2, 1, 3, 5)]),
    "one key head": (attention, [(2, 4, 3, 4), (2, 1, 5, 4), (2, 1, 5, 6)]),
    "one value head": (attention, [(2, 4, 3, 4), (2, 4, 5, 4), (2, 1, 5, 6)]),
    "one query head": (attention, [(2, 1, 3, 4), (2, 4, 5, 4), (2, 4, 5, 6)]),
    "one key head, masked": (with_mask(FLOAT_MASK), [(2, 4, 3, 4), (2, 1, 5, 4), (2, 1, 5, 6)]),
    "grouped queries": (
        lambda q, k, v: attention(q, k, v, enable_gqa=True),
        [(2, 4, 3, 4), (2, 2, 5, 4), (2, 2, 5, 6)],
    ),
    "three dimensions": (attention, [(2, 3, 4), (2, 5, 4), (2, 5, 6)]),
    "normalize below eps": (lambda x: F.normalize(x, dim=-1, eps=50.0), [(2, 3, 5)]),
    "normalize around eps": (lambda x: F.normalize(x, dim=-1, eps=2.2), [(2, 8, 5)]),
    "normalize of zeros and small": (lambda x: F.normalize(torch.cat([0 * x, 1e-14 * x, x]), dim=-1), [(2, 3, 5)]),
    "layer_norm of constant rows": (
        lambda x, *wb: F.layer_norm(x.mean(-1, True) + 0 * x, (5,), *wb),
        [(2, 3, 5), (5,)],
    ),
    "layer_norm of small rows": (lambda x, *wb: F.layer_norm(1e-3 * x, (5,), *wb), [(2, 3, 5), (5,), (5,)]),
    "rms_norm of zeros": (lambda x, w: F.rms_norm(0 * x, (5,), w, 1e-6), [(2, 3, 5), (5,)]),
    "rms_norm of small rows": (lambda x, w: F.rms_norm(1e-4 * x, (5,), w, 1e-6), [(2, 3, 5), (5,)]),
    "group_norm of constants": (lambda x, w: F.group_norm(0 * x + 3, 2, w), [(2, 4, 3, 5), (4,)]),
    "group_norm of small values": (lambda x, w: F.group_norm(1e-3 * x + 3, 2, w), [(2, 4, 3, 5), (4,)]),
    "batch_norm of constants": (
        lambda x, w: F.batch_norm(0 * x + 3, None, None, w, training=True),
        [(2, 4, 3, 5), (4,)],
    ),
}
FORMS: dict[str, Policy] = {
    "kept as published": everywhere(Dense()),
    "derived": everywhere(Dense(), normalized=True, derived=True, derived_all=True),
    "fused": everywhere(Dense(), normalized=True, derived=True, derived_all=True, fused=Dense()),
    "position network": everywhere(Dense(), position_network=True),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("edge", EDGES)
def test_edges_are_those_of_torch(edge: str, form: str) -> None:
    function, shapes = EDGES[edge]
    inputs = tensors(*shapes)
    with around(FORMS[form]):
        y = function(*inputs)
    plain = function(*inputs)
    torch.testing.assert_close(y, plain, **EXACT)
    for found, expected in zip(gradients(y, inputs), gradients(plain, inputs), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("eps", [None, 1e-3])
def test_rms_norm_has_torch_s_eps_under_autocast(eps: float | None) -> None:
    x, w = (
        t.detach().to(dtype).requires_grad_()
        for t, dtype in zip(tensors((2, 3, 64), (64,)), (torch.bfloat16, torch.float32), strict=True)
    )
    with torch.autocast("cpu", torch.bfloat16):
        plain = F.rms_norm(1e-2 * x, (64,), w, eps)
        with around(everywhere(Dense())):
            y = F.rms_norm(1e-2 * x, (64,), w, eps)
    torch.testing.assert_close(y.float(), plain.float(), rtol=0.02, atol=0.02)


@pytest.mark.parametrize("form", FORMS)
def test_rms_norm_of_large_values_in_fp16_is_that_of_torch(form: str) -> None:
    """The squares of the values exceed the range of fp16."""
    x, w = (t.detach().half().requires_grad_() for t in tensors((2, 3, 64), (64,)))
    with around(FORMS[form]):
        y = F.rms_norm(2000 * x, (64,), w)
    wide = [t.detach().double().requires_grad_() for t in (x, w)]
    plain = F.rms_norm(2000 * wide[0], (64,), wide[1], 0.0)
    assert y.dtype == torch.float16
    torch.testing.assert_close(y.double(), plain, rtol=3e-3, atol=3e-3)
    of_w, expected = (torch.autograd.grad(out.sum(), weight)[0] for out, weight in ((y, w), (plain, wide[1])))
    torch.testing.assert_close(of_w.double(), expected, rtol=1e-2, atol=1e-2)


def test_batch_norm_of_one_value_per_channel_is_refused_by_torch() -> None:
    x, mean, var = torch.randn(1, 4, 1, 1, requires_grad=True), torch.zeros(4), torch.ones(4)
    with around(everywhere(Dense())), pytest.raises(ValueError, match="Expected more than 1 value per channel"):
        F.batch_norm(x, mean, var, None, None, True)
    assert torch.equal(var, torch.ones(4))


@pytest.mark.parametrize("form", FORMS)
def test_complex_products_have_the_gradients_of_torch(form: str) -> None:
    """Networks with spectral filters or complex rotary embeddings multiply by complex parameters."""
    x, w = tensors((2, 3, 4, 2), (3, 4, 2))

    def filtered(x: Tensor, w: Tensor) -> Tensor:
        y = torch.view_as_complex(x) * torch.view_as_complex(w)
        return torch.view_as_real(y * y.mul(torch.view_as_complex(x)))

    with around(FORMS[form]):
        y = filtered(x, w)
    for found, expected in zip(gradients(y, [x, w]), gradients(filtered(x, w), [x, w]), strict=True):
        torch.testing.assert_close(found, expected, **EXACT)


@pytest.mark.parametrize("packer", [Dense(), Sparse(0.0), Sparse(0.8)])
@pytest.mark.parametrize("far", [0.0, 1.0, 1e2, 1e3])
def test_gamma_of_a_frozen_batch_norm_does_not_depend_on_the_mean(packer: Packer, far: float) -> None:
    """The float32 gradient of γ is close to the float64 gradient. With pruning, the mean does not change its error."""
    generator = torch.Generator().manual_seed(0)
    x, g = (torch.randn(16, 8, 14, 14, generator=generator) for _ in range(2))
    policy = everywhere(packer, normalized=True, derived=True, derived_all=packer == Dense())

    def error(mean: float) -> float:
        def gradient(dtype: torch.dtype, mode: Any) -> Tensor:
            w = torch.ones(8, dtype=dtype, requires_grad=True)
            statistics = torch.full((8,), mean, dtype=dtype), torch.ones(8, dtype=dtype)
            with mode:
                y = F.batch_norm((x + mean).to(dtype), *statistics, w, torch.zeros(8, dtype=dtype), False)
            return torch.autograd.grad(y, w, g.to(dtype))[0].double()

        exact = gradient(torch.float64, torch.enable_grad())
        found = gradient(torch.float32, PackedOperations(policy, PackingState(), "r", 16))
        return ((found - exact).norm() / exact.norm()).item()

    assert error(far) <= (1e-5 if packer != Sparse(0.8) else 1.02 * error(0.0))


# ------------------------------------------------------------------------------------------------ names
class Named:
    """A packer that records the names of tensors."""

    named = True

    def __init__(self) -> None:
        self.names: list[str] = []

    def pack(self, x: Tensor, context: PackContext) -> Packed:
        self.names.append(context.name)
        return Dense().pack(x, context)


class Block(nn.Module):
    """A module that calls an activation module and a linear layer twice."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2, self.act = nn.Linear(6, 6), nn.Linear(6, 6), nn.GELU()

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.act(self.fc2(self.act(self.fc1(x)))))


def names_in(block: nn.Module, x: Tensor, calls: int = 1, state: PackingState | None = None) -> list[str]:
    packer, state = Named(), PackingState() if state is None else state
    modules = {module: name for name, module in block.named_modules()}
    for _ in range(calls):
        with PackedOperations(everywhere(packer), state, "blocks.0", 2, None, modules):
            x = block(x)
    if x.requires_grad:
        x.sum().backward()
    return packer.names


def test_names_are_those_of_modules_and_roles_whatever_trains() -> None:
    block = Block()
    names = names_in(block, torch.randn(2, 3, 6))
    assert names == [
        "blocks.0/fc1/linear/input",
        "blocks.0/act/gelu/input",
        "blocks.0/fc2/linear/input",
        "blocks.0/act/gelu(2)/input",
        "blocks.0/fc2/linear(2)/input",
    ]
    block.fc1.requires_grad_(False)  # the first call of the activation function saves nothing
    assert names_in(block, torch.randn(2, 3, 6)) == names[2:]
    block.requires_grad_(False)
    assert names_in(block, torch.randn(2, 3, 6, requires_grad=True)) == [names[1], names[3]]
    assert not nn.modules.module._global_forward_hooks


def test_a_part_that_runs_twice_has_names_for_both_calls() -> None:
    block, state = Block(), PackingState()
    for _ in range(2):  # the backward pass resets the counters of calls
        names = names_in(block, torch.randn(2, 3, 6), 2, state)
        assert [name.partition("/")[0] for name in names] == ["blocks.0"] * 5 + ["blocks.0(2)"] * 5
    assert len(set(names)) == 10


# ------------------------------------------------------------------------------------------------ non-finite values
@pytest.mark.vary_one
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("packer", [EightBits(), Sparse(0.5, eight_bits=True), GroupBits(4), Half(torch.bfloat16)])
@pytest.mark.parametrize("with_steps", [True, False])
def test_a_tensor_that_is_not_finite_leaves_no_trace(
    packer: Packer, dtype: torch.dtype, bad: float, with_steps: bool
) -> None:
    state = PackingState()

    def pack(x: Tensor, name: str = "x") -> Tensor:
        packed = packer.pack(x.to(dtype), PackContext(name, 2, state.ranges, state.overflow, noise=state.noise))
        return packed.unpack(*packed.tensors)

    def ranges() -> dict[str, Any]:
        return {name: (low.tolist(), high.tolist()) for name, (low, high) in state.ranges.by_name.items()}

    x, wrong = torch.rand(2, 64), torch.rand(2, 64) * 9
    wrong[0, 3] = bad
    for first in (wrong, x, wrong):
        before = ranges()
        back = pack(first)
        if first is wrong:
            assert not back.isfinite().all(), "packing hides no value that is not finite"
            if with_steps:
                pack(5 * x, "y")  # a finite tensor in a step with a non-finite tensor
        if with_steps:
            state.end_step()
        if first is wrong:
            assert ranges() == before
    assert pack(x).isfinite().all()


def test_a_range_that_paused_moves_as_far_as_it_would_have() -> None:
    state = PackingState()
    x = torch.tensor([-1.0, 1.0]).view(1, 1, 2)
    state.ranges.update("x", x)
    for _ in range(4):
        state.end_step()
    assert state.ranges.update("x", 3 * x)[1].item() == pytest.approx(1 + 2 * (1 - 0.9**4))
