"""Tests that packed operations equal plain torch if no value is dropped."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from efficient_ft.ops.storage import Sparse
from tests.ops.saving.cases import (
    EXACT,
    MASK,
    OPERATIONS,
    QKV,
    SEPARATE,
    around,
    attention,
    conv,
    everywhere,
    gradients,
    masked,
    packed,
    tensors,
)


@pytest.mark.parametrize("normalized", [False, True])
@pytest.mark.parametrize("name", OPERATIONS)
def test_where_nothing_is_dropped_everything_is_as_in_plain_torch(name, normalized):
    function, shapes = OPERATIONS[name]
    inputs = tensors(*shapes)
    y, plain = packed(function, inputs, everywhere(Sparse(0.0), normalized=normalized)), function(*inputs)
    node = y.grad_fn
    while type(node).__name__ == "TransposeBackward0":  # nn.MultiheadAttention transposes its result
        node = node.next_functions[0][0]
    assert isinstance(node, BackwardCFunction), "torch's own operation ran"
    torch.testing.assert_close(y, plain, **EXACT)
    found, expected = gradients(y, inputs), gradients(plain, inputs)
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == torch.float64
        torch.testing.assert_close(a, b, **EXACT)


@pytest.mark.parametrize("name", ["linear 3-D", "conv", "layer_norm", "attention float mask", "batch_norm training"])
def test_each_gradient_alone_is_that_of_plain_torch(name):
    # The operation saves only the tensors that the required gradient needs.
    function, shapes = OPERATIONS[name]
    for wanted in range(len(shapes)):
        inputs = [t.detach().requires_grad_(i == wanted) for i, t in enumerate(tensors(*shapes))]
        found = gradients(packed(function, inputs, everywhere(Sparse(0.0))), [inputs[wanted]])[0]
        torch.testing.assert_close(found, gradients(function(*inputs), [inputs[wanted]])[0], **EXACT)


@pytest.mark.parametrize(
    ("name", "normalized"),
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
def test_gradcheck_where_nothing_is_dropped(name, normalized):
    function, shapes = OPERATIONS[name]
    policy = everywhere(Sparse(0.0), normalized=normalized)
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


# ------------------------------------------------------------------------------------------------ unusual calls
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


def test_a_vector_is_normalized_where_there_are_heads():
    as_in_plain_torch(lambda x: F.normalize(x, dim=0), tensors((4,)), heads=2)
