"""Tests of weights in bfloat16: which parameters are stored, and every method computes as with rounded fp32 weights."""

from __future__ import annotations

import copy

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from efficient_ft.methods import LoRA, plain_state_dict
from efficient_ft.methods.base import Method
from efficient_ft.models.prefix import find_prefix
from efficient_ft.models.weight_dtype import autocast_for, store_weights, stores_bf16, to_float32
from efficient_ft.testing.models import batch_of, model_of
from tests.methods.settings import ROWS


def test_only_weights_that_autocast_converts_are_stored_in_bf16() -> None:
    model = store_weights(timm.create_model("efficientformer_l1", num_classes=5), "bf16")
    stored = {name for name, p in model.named_parameters() if p.dtype == torch.bfloat16}
    layers = {f"{n}.weight" for n, m in model.named_modules() if isinstance(m, nn.Linear | nn.Conv2d)}
    assert stored == layers
    assert all(b.dtype != torch.bfloat16 for b in model.buffers())
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    assert size < 0.51 * 4 * sum(p.numel() for p in model.parameters())


def test_layers_with_their_own_forward_stay_in_fp32() -> None:
    """A convolution that standardizes its weights would compute their mean and variance in bf16."""
    model = store_weights(timm.create_model("resnetv2_50x1_bit", num_classes=5), "bf16")
    assert model.stages[0].blocks[0].conv1.weight.dtype == torch.float32
    assert model.head.fc.weight.dtype == torch.bfloat16


def _trained(model: nn.Module, method: Method, name: str) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss and the gradients of one step under autocast to bf16, after the warm-up steps of a method."""
    method.apply(model)
    images, labels = batch_of(name, torch.float32)
    for step in range(method.warmup_steps + 1):
        torch.manual_seed(step)
        method.step_begin(step)
        model.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = method.total_loss(F.cross_entropy(model(images), labels))
        loss.backward()
        if step < method.warmup_steps:
            method.step_end()
    return loss.detach(), {n: p.grad.float() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.slow
@pytest.mark.parametrize("row", [pytest.param(r, marks=pytest.mark.slow) if "auto" in r else r for r in ROWS])
def test_every_method_computes_as_with_rounded_fp32_weights(row: str) -> None:
    """Storing weights in bf16 removes a conversion, but changes neither the loss nor the gradients.

    TinyTL standardizes its frozen filters, which are then rounded to bf16 again.
    """
    name, tolerance = ROWS[row].models[0], 0.05 if row.startswith("tinytl") else 1e-6
    stored = ROWS[row].initial_model(model_of(name)).float().train()
    store_weights(stored, "bf16")
    rounded = copy.deepcopy(stored)
    to_float32(rounded)
    assert stores_bf16(stored)
    assert not stores_bf16(rounded)
    losses, gradients = [], []
    for model in (stored, rounded):
        torch.manual_seed(0)
        loss, found = _trained(model, ROWS[row].method(**ROWS[row].settings), name)
        losses.append(loss)
        gradients.append(found)
    assert gradients[0].keys() == gradients[1].keys()
    torch.testing.assert_close(losses[0], losses[1], rtol=tolerance, atol=0)
    for key, found in gradients[0].items():
        difference = (found - gradients[1][key]).norm() / gradients[1][key].norm().clamp_min(1e-30)
        assert difference <= tolerance, key


def test_parameters_that_methods_add_stay_in_fp32() -> None:
    for row, added in (("lora_all", "lora_"), ("moe", "gate"), ("tinytl", "lite_residual"), ("repnet", "side")):
        model = store_weights(model_of(ROWS[row].models[0]).float(), "bf16")
        if row == "repnet":
            model = store_weights(model_of("resnet").float(), "bf16")
        before = {name for name, _ in model.named_parameters()}
        ROWS[row].method(**ROWS[row].settings).apply(model)
        new = {n: p.dtype for n, p in model.named_parameters() if n not in before and "base_layer" not in n}
        assert {dtype for name, dtype in new.items() if added in name or row == "repnet"} == {torch.float32}, row


def test_merged_adapters_are_exported_in_fp32_and_other_weights_as_stored() -> None:
    """An update of an adapter is smaller than the distance between bf16 values, and must survive the merge."""
    model = store_weights(model_of("vit").float(), "bf16")
    plain = plain_state_dict(model, [])
    assert plain["blocks.0.attn.qkv.weight"].dtype == torch.bfloat16
    lora = LoRA(rank=2)
    lora.apply(model)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.fill_(1e-5)
    merged = plain_state_dict(model, [lora])
    update = merged["blocks.0.attn.qkv.weight"] - plain["blocks.0.attn.qkv.weight"].float()
    layer = model.get_submodule("blocks.0.attn.qkv")
    expected = layer.scaling["default"] * (layer.lora_B["default"].weight @ layer.lora_A["default"].weight)
    torch.testing.assert_close(update, expected, rtol=0, atol=1e-7)
    assert model.get_submodule("blocks.0.attn.qkv").base_layer.weight.dtype == torch.bfloat16


def test_a_frozen_prefix_is_found_and_computed_in_bf16() -> None:
    model = store_weights(model_of("vit").float(), "bf16")
    for name, p in model.named_parameters():
        p.requires_grad_(name.startswith(("blocks.3", "norm", "head")))
    images, _ = batch_of("vit", torch.float32)
    prefix = find_prefix(model, images)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        whole = model(images)
        with prefix.input(images) as placeholder:
            assert torch.equal(model(placeholder), whole)


def test_a_model_that_the_user_converted_is_not_changed() -> None:
    model = model_of("vit").bfloat16()
    to_float32(model)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    with autocast_for(model):
        assert not torch.is_autocast_enabled("cpu")
