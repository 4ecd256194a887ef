"""Checkpointing: blocks that run again give the same, once, and lower the peak."""

from __future__ import annotations

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import Tensor

from efficient_ft.core.errors import UserError
from efficient_ft.cost import executed
from efficient_ft.methods import (
    Checkpointing,
    Method,
)
from efficient_ft.ops.packing import Dense, Overflow, PackContext, Ranges
from efficient_ft.ops.recompute import recompute
from efficient_ft.testing import MODELS, gradients, largest_difference, model_of


def test_recomputation_repeats_dropout_and_moves_statistics_once() -> None:
    def trained(*methods: Method) -> dict[str, Tensor | None]:
        torch.manual_seed(0)
        model = MODELS["vit"].create(drop_rate=0.2, drop_path_rate=0.3).double()
        for method in methods:
            method.apply(model)
        torch.manual_seed(1)
        F.cross_entropy(model.train()(torch.randn(2, 3, 32, 32).double()), torch.tensor([0, 1])).backward()
        return {n: p.grad for n, p in model.named_parameters()}

    assert largest_difference(trained(), trained(Checkpointing())) < 1e-10

    network, checkpointed = model_of("resnet"), model_of("resnet")
    Checkpointing().apply(checkpointed)
    gradients(network, "resnet")
    gradients(checkpointed, "resnet")
    for (name, one), other in zip(network.named_buffers(), checkpointed.buffers(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12, msg=name)


def test_recomputation_hides_no_other_argument_of_a_block() -> None:
    """Masks by position and by keyword, inside a list too, are saved where autograd's hook sees them."""
    x, masks = torch.randn(2, 4, requires_grad=True), [torch.rand(2, 4) for _ in range(3)]
    place = PackContext("block", 2, Ranges(), Overflow())

    def block(x: Tensor, first: Tensor, factor: float, *, rest: list[Tensor]) -> Tensor:
        return (x * first * factor).exp() * rest[0] * rest[1]

    seen: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(t) or t, lambda t: t):
        y = recompute(block, x, (masks[0], 3.0), {"rest": masks[1:]}, [], Dense(), place)
    for mask in masks:
        assert any(t.data_ptr() == mask.data_ptr() for t in seen)
    exact = torch.autograd.grad(block(x, masks[0], 3.0, rest=masks[1:]).sum(), x)
    torch.testing.assert_close(torch.autograd.grad(y.sum(), x), exact)
    with pytest.raises(UserError, match="another argument needs one"):
        recompute(block, x, (masks[0], 3.0), {"rest": [x, x]}, [], Dense(), place)


def test_recomputation_lowers_the_peak() -> None:
    model = timm.create_model("deit_tiny_patch16_224")
    plain, checkpointed = (executed(model, 16, (224, 224), methods=m) for m in ([], [Checkpointing()]))
    activations = plain.peak_bytes - plain.model_bytes, checkpointed.peak_bytes - checkpointed.model_bytes
    assert activations[0] > 5 * activations[1]
    assert checkpointed.backward_flops == pytest.approx(plain.backward_flops + plain.forward_flops, rel=0.02)
