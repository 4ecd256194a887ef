"""Tests of blocks with a custom forward pass. Methods that run a block in two halves must not bypass this pass."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from timm.models.vision_transformer import Block
from torch import Tensor, nn

from efficient_ft.core.errors import UserError
from efficient_ft.methods import (
    BSR,
    SWAT,
    ALaST,
    BSRMoE,
    Checkpointing,
    EViT,
    Method,
    MoE,
    ToMe,
)
from efficient_ft.methods.forwards import OwnForward, forwards_of, put_around, take_away
from tests.methods.settings import small_vit


def pictures() -> Tensor:
    return torch.randn(2, 3, 32, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


class Doubled(Block):
    """A timm block with a custom forward pass."""

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        return 2 * super().forward(x)


class Renamed(Block):
    """A subclass of timm's block with the inherited forward pass."""


METHODS_IN_HALVES = [ToMe(4), EViT([1]), BSR([3], drop_at=[1]), ALaST(2), BSRMoE(4, 2, [3], drop_at=[1])]


@pytest.mark.parametrize("method", METHODS_IN_HALVES, ids=lambda method: method.name)
def test_a_block_with_a_forward_pass_of_its_own_is_refused(method: Method) -> None:
    method = type(method)(**method.settings())
    model: Any = small_vit("vit_tiny_patch16_224")
    model.blocks[1].__class__ = Doubled
    before = model.eval()(pictures())
    with pytest.raises(UserError, match=rf"method {method.name}: the block blocks\.1 of .*\(Doubled\) has a custom"):
        method.apply(model)
    torch.testing.assert_close(model.eval()(pictures()), before, rtol=0, atol=0)
    model.blocks[1].__class__ = Renamed
    method.apply(model)


@pytest.mark.parametrize("method", METHODS_IN_HALVES, ids=lambda method: method.name)
def test_a_block_whose_forward_pass_was_replaced_is_refused(method: Method) -> None:
    method = type(method)(**method.settings())
    model: Any = small_vit("vit_tiny_patch16_224")
    own = model.blocks[1].forward
    model.blocks[1].forward = lambda x: 2 * own(x)
    with pytest.raises(UserError, match=r"has a custom forward pass"):
        method.apply(model)


def test_a_block_that_drops_no_tokens_may_have_a_forward_pass_of_its_own() -> None:
    model: Any = small_vit("vit_tiny_patch16_224").eval()
    EViT([1]).apply(model)
    plain = model(pictures())
    model: Any = small_vit("vit_tiny_patch16_224").eval()
    model.blocks[2].__class__ = Doubled
    EViT([1]).apply(model)
    assert (model(pictures()) - plain).abs().max() > 1e-6


def test_the_forward_pass_that_another_library_gave_a_module_runs_inside_ours_and_comes_back() -> None:
    model: Any = small_vit("vit_tiny_patch16_224")
    own, calls = model.blocks[1].forward, []

    def counted(x: Tensor) -> Tensor:
        calls.append(len(x))
        return own(x)

    model.blocks[1].forward = counted
    checkpointing = Checkpointing()
    checkpointing.apply(model)
    model.train()(pictures()).sum().backward()
    assert calls == [2, 2]  # recomputed in the backward pass
    checkpointing.remove(model)
    assert model.blocks[1].forward is counted


@pytest.mark.parametrize("method", METHODS_IN_HALVES, ids=lambda method: method.name)
def test_functions_that_need_all_tokens_are_rejected_until_the_method_is_removed(method: Method) -> None:
    method = type(method)(**method.settings())
    model: Any = small_vit("vit_tiny_patch16_224").eval()
    method.apply(model)
    for call in (model.forward_intermediates, model.get_intermediate_layers):
        with pytest.raises(UserError, match=rf"requires all tokens of each block.*{method.name}\.remove\(model\)"):
            call(pictures())
    method.remove(model)
    assert len(model.forward_intermediates(pictures())[1]) == 4


@pytest.mark.parametrize("method", [ToMe(4), EViT([1])], ids=lambda method: method.name)
def test_an_export_to_onnx_by_torchscript_is_rejected(method: Method, tmp_path: Path) -> None:
    model = small_vit("vit_tiny_patch16_224").eval()
    type(method)(**method.settings()).apply(model)
    with pytest.raises(UserError, match=r"does not support dropping .* Use dynamo=True"):
        torch.onnx.export(model, (pictures(),), str(tmp_path / "x.onnx"), dynamo=False)


@pytest.mark.slow
@pytest.mark.first(1, "slow")
@pytest.mark.parametrize("method", [ToMe(4), EViT([1])], ids=lambda method: method.name)
def test_an_export_computes_the_same_and_to_onnx_without_a_stable_sort(
    method: Method, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An exported network gives equal outputs. An ONNX export contains no stable sort, which ONNX does not support."""
    model = small_vit("vit_tiny_patch16_224").eval()
    type(method)(**method.settings()).apply(model)
    other = 2 - pictures()
    sorts = []
    for onnx in (False, True):
        with monkeypatch.context() as patch:
            patch.setattr(torch.onnx, "is_in_onnx_export", lambda onnx=onnx: onnx)
            exported = torch.export.export(model, (pictures(),))
        graphs = [m.graph for m in exported.graph_module.modules() if isinstance(m, torch.fx.GraphModule)]
        sorts.append(any("sort.stable" in str(node.target) for graph in graphs for node in graph.nodes))
        torch.testing.assert_close(exported.module()(other), model(other))
    assert sorts == [True, False]


@pytest.mark.parametrize("method", [SWAT(), MoE(num_experts=2, top_k=1, blocks=[1])], ids=lambda method: method.name)
def test_an_export_that_would_be_silently_wrong_is_rejected(method: Method) -> None:
    """Exports with dense instead of sparse weights, or with a fixed number of tokens per expert, raise an error."""
    model = small_vit("vit_tiny_patch16_224").eval()
    type(method)(**method.settings()).apply(model)
    for export in (torch.export.export, torch.jit.trace):
        with pytest.raises(UserError, match=rf"method {method.name}: .* exported network would"):
            export(model, (pictures(),))


class Direct(OwnForward):
    """A replacement that an extension stores directly, without `put_around`."""

    same_values = True

    def __call__(self, x: Tensor) -> Tensor:
        return self.within(x)


def test_a_replacement_that_is_stored_directly_is_found() -> None:
    module: Any = nn.Linear(2, 2)
    module.forward = direct = Direct(module)
    assert forwards_of(module) == [direct]
    put_around(module, outer := Direct(module))
    assert forwards_of(module) == [outer, direct]
    take_away(module, Direct)
    assert "forward" not in vars(module)
