"""Tests of `torch.compile` with methods: compiling changes neither the gradients nor the saved bytes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from efficient_ft.testing import batch_of, model_of
from tests.methods.settings import ROWS

#: Rows of the quick tests. The other rows are marked as exhaustive.
OFTEN = ("checkpointing", "lbp_wht")


def rows() -> list[Any]:
    """Return the first row of each method that supports the small ViT."""
    on_vit = {row.method: name for name, row in reversed(ROWS.items()) if "vit" in row.models}.values()
    return [name if name in OFTEN else pytest.param(name, marks=pytest.mark.exhaustive) for name in on_vit]


def two_steps(row: str, compiled: bool) -> list[tuple[int, dict[str, Tensor]]]:
    """Run two steps and return the bytes saved by autograd and the gradients of each step."""
    torch.compiler.reset()
    network: nn.Module = model_of("vit").train()
    torch.manual_seed(1)
    method = ROWS[row].create()
    method.apply(network)
    run: Any = torch.compile(network, backend="aot_eager") if compiled else network
    own = {p.untyped_storage().data_ptr() for p in network.parameters()}
    found = []
    for step in range(2):
        images, labels = batch_of("vit", torch.float64, seed=step)
        saved: dict[int, int] = {}

        def pack(tensor: Tensor, saved: dict[int, int] = saved) -> Tensor:
            saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        method.step_begin(step)
        torch.manual_seed(5)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = method.total_loss(F.cross_entropy(run(images), labels))
        loss.backward()
        gradients = {n: p.grad.clone() for n, p in network.named_parameters() if p.grad is not None}
        method.step_end()
        network.zero_grad()
        found.append((sum(n for at, n in saved.items() if at not in own), gradients))
    return found


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Assert equal names, and equal values up to rounding."""
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-10, atol=1e-12, msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("row", rows())
def test_a_compiled_network_has_the_same_gradients_and_keeps_as_little(row: str) -> None:
    plain = two_steps(row, False)
    for (kept, expected), (bytes_, gradients) in zip(plain, two_steps(row, True), strict=True):
        assert_same(gradients, expected)
        assert bytes_ <= 1.05 * kept  # The compiled graph has different autograd nodes.
    assert_same(two_steps(row, False)[0][1], plain[0][1])  # Tracing has no side effects.
