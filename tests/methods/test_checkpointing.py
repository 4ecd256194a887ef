"""Tests of checkpointing: recomputed blocks give equal gradients, update statistics once and lower the memory peak."""

from __future__ import annotations

import copy

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from efficient_ft.cost import executed
from efficient_ft.methods import (
    Checkpointing,
    Method,
    TinyTL,
    apply_methods,
)
from efficient_ft.ops.recompute import recompute
from efficient_ft.ops.storage import Dense, Overflow, PackContext, Ranges
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


def test_a_normalization_that_is_replaced_counts_no_batches() -> None:
    """Checkpointing does not change the batch counter of a BatchNorm that TinyTL replaces by GroupNorm."""
    model = model_of("mobilenet")
    apply_methods(model, [TinyTL(), Checkpointing()])
    before = {name: value.clone() for name, value in model.named_buffers()}
    gradients(model, "mobilenet")
    assert before
    for name, value in model.named_buffers():
        assert torch.equal(value, before[name]), name


def test_recomputation_hides_no_other_argument_of_a_block() -> None:
    """Autograd's saved-tensor hooks see tensor arguments by position, by keyword and in lists."""
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


def test_recomputation_gives_every_argument_its_gradient_and_every_result() -> None:
    """Recomputation supports tuple results (MViTv2) and keyword arguments that require gradients (GC ViT)."""
    x, query = (torch.randn(2, 4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    weight = torch.randn(4, 4, dtype=torch.float64, requires_grad=True)
    place = PackContext("block", 2, Ranges(), Overflow())

    def block(x: Tensor, size: list[int], *, query: Tensor) -> tuple[dict[str, Tensor], list[int], Tensor]:
        y = (x @ weight).exp() * query
        return {"y": y}, [size[0] // 2], query.detach().argmax(1)

    plain = block(x, [8], query=query)
    recomputed = recompute(block, x, ([8],), {"query": query}, [weight], Dense(), place)
    assert recomputed[1] == plain[1] == [4]
    assert torch.equal(recomputed[2], plain[2])
    exact, found = (torch.autograd.grad((y[0]["y"] * query).sum(), [x, query, weight]) for y in (plain, recomputed))
    torch.testing.assert_close(found, exact, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("architecture", ["mvitv2_tiny", "gcvit_xxtiny", "regnetx_002", "dla46_c"])
def test_blocks_with_more_arguments_or_results_are_recomputed(architecture: str) -> None:
    def trained(*methods: Method) -> dict[str, Tensor | None]:
        torch.manual_seed(0)
        settings = {"drop_path_rate": 0.3, "img_size": 64} if architecture.endswith("tiny") else {}
        model = timm.create_model(architecture, num_classes=2, **settings).double().train()
        for method in methods:
            method.apply(model)
        torch.manual_seed(1)
        images = torch.randn(2, 3, 64, 64, dtype=torch.float64)
        F.cross_entropy(model(images), torch.tensor([0, 1])).backward()
        return {n: p.grad for n, p in model.named_parameters()}

    assert largest_difference(trained(), trained(Checkpointing())) < 1e-10


class _ByName(nn.Module):
    """A network that passes the input of its blocks by name, before and after another tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 4, 4)
        self.blocks = nn.ModuleList(_Block() for _ in range(2))
        self.head = nn.Linear(8, 2)

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem(images).flatten(2).mT
        for block in self.blocks:
            x = block(hidden_states=x, scale=x.detach().mean())
        logits: Tensor = self.head(x.mean(1))
        return logits


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, hidden_states: Tensor, scale: Tensor) -> Tensor:
        return hidden_states + self.linear(self.norm(hidden_states)).tanh() * scale


def test_the_input_of_a_block_can_be_passed_by_name() -> None:
    torch.manual_seed(0)
    plain = _ByName().double().train()
    recomputed = copy.deepcopy(plain)
    Checkpointing().apply(recomputed, "head", image_size=32)
    images = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    for model in (plain, recomputed):
        model(images).square().sum().backward()
    grads = [{n: p.grad for n, p in model.named_parameters()} for model in (plain, recomputed)]
    assert largest_difference(*grads) < 1e-12
    assert torch.equal(plain.eval()(images), recomputed.eval()(images))


@pytest.mark.slow
def test_recomputation_lowers_the_peak() -> None:
    model = timm.create_model("deit_tiny_patch16_224")
    plain, checkpointed = (executed(model, 16, (224, 224), methods=m) for m in ([], [Checkpointing()]))
    activations = plain.peak_bytes - plain.model_bytes, checkpointed.peak_bytes - checkpointed.model_bytes
    assert activations[0] > 5 * activations[1]
    assert checkpointed.backward_flops == pytest.approx(plain.backward_flops + plain.forward_flops, rel=0.02)
