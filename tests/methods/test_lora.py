"""Tests of LoRA as defined by the LBP-WHT baselines: adapted layers, rank, scale and trainable parameters."""

from __future__ import annotations

import inspect
import math
import re
from pathlib import Path
from typing import Literal

import pytest
import timm
import torch
import torch.nn.functional as F
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor, nn

from efficient_ft.core.errors import UserError
from efficient_ft.methods import (
    LBPWHT,
    BitFit,
    Blocks,
    HeadOnly,
    LastStage,
    LoRA,
    LoRAFA,
    Method,
    apply_methods,
    plain_state_dict,
)
from efficient_ft.methods.adapters import lora as lora_module
from efficient_ft.models.view import Reason, view
from efficient_ft.testing import MODELS, USUAL, batch_of, evaluate, gradients, lively, model_of, train_a_little
from tests.methods.test_selection import trains

Targets = Literal["attention", "all"]


def adapters(model: nn.Module) -> dict[str, nn.Module]:
    return {n: m for n, m in model.named_modules() if hasattr(m, "lora_A") and hasattr(m, "base_layer")}


def stirred(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.3)
    return model


# ------------------------------------------------------------------------------------------------ rank and scale
def test_rank_scale_and_start_are_the_baselines() -> None:
    model = timm.create_model("vit_tiny_patch16_224", depth=1, img_size=32, patch_size=4, num_classes=3)
    torch.manual_seed(0)
    LoRA().apply(model)
    layers = adapters(model)
    assert set(layers) == {"blocks.0.attn.qkv", "blocks.0.attn.proj"}
    for name, rank in (("blocks.0.attn.qkv", 24), ("blocks.0.attn.proj", 8)):
        layer = layers[name]
        a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
        assert a.shape == (rank, 192)
        assert b.shape[1] == rank
        assert layer.scaling["default"] == pytest.approx(8 / rank)
        assert not b.any()
        # Kaiming-uniform initialization with a = √5 is uniform in ±1/√(fan-in).
        bound = 1 / math.sqrt(192)
        assert a.abs().max() <= bound
        assert a.abs().max() > 0.95 * bound
        assert a.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.1)


def test_an_adapted_layer_computes_its_equation() -> None:
    model = model_of("vit")
    LoRA(rank=3, alpha=6, targets="all").apply(model)
    stirred(model)
    layer = adapters(model)["blocks.1.mlp.fc1"]
    x = torch.randn(2, 65, 48, dtype=torch.float64)
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    expected = F.linear(x, layer.base_layer.weight + 6 / 3 * b @ a, layer.base_layer.bias)
    torch.testing.assert_close(layer(x), expected, rtol=1e-12, atol=1e-12)


def test_dropout_is_of_the_adapter_s_input_and_only_in_training() -> None:
    model = model_of("vit")
    LoRA(rank=2, dropout=0.5).apply(model)
    stirred(model)
    images, _ = batch_of("vit")
    model.eval()
    assert torch.equal(model(images), model(images))
    model.train()
    assert not torch.equal(model(images), model(images))


# ------------------------------------------------------------------------------------------------ adapted layers
NAMED = {
    "vit_tiny_patch16_224": {
        "attention": {f"blocks.{b}.attn.{x}" for b in (9, 10, 11) for x in ("qkv", "proj")},
        "all": {f"blocks.{b}.{x}" for b in (9, 10, 11) for x in ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")},
    },
    "efficientformer_l1": {
        "attention": {f"stages.3.blocks.4.token_mixer.{x}" for x in ("qkv", "proj")},
        "all": {f"stages.3.blocks.{b}.mlp.{x}" for b in (0, 1, 2, 4) for x in ("fc1", "fc2")}
        | {f"stages.3.blocks.4.token_mixer.{x}" for x in ("qkv", "proj")},
    },
    "efficientformerv2_s0": {
        "attention": {f"stages.3.blocks.{b}.token_mixer.{x}.conv" for b in (2, 3) for x in ("q", "k", "v", "proj")},
        "all": {f"stages.3.blocks.{b}.token_mixer.{x}.conv" for b in (2, 3) for x in ("q", "k", "v", "proj")}
        | {f"stages.3.blocks.{b}.mlp.{x}.conv" for b in range(4) for x in ("fc1", "fc2")},
    },
    "swinv2_tiny_window8_256": {
        "attention": {f"layers.3.blocks.{b}.attn.{x}" for b in (0, 1) for x in ("qkv", "proj")},
        "all": {f"layers.3.blocks.{b}.{x}" for b in (0, 1) for x in ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")}
        | {"layers.3.downsample.reduction"},
    },
}
SMALLER = {"vit_tiny_patch16_224": {"img_size": 32, "patch_size": 4}, "swinv2_tiny_window8_256": {"img_size": 128}}


@pytest.mark.slow
@pytest.mark.vary_one
@pytest.mark.parametrize("targets", ["attention", "all"])
@pytest.mark.parametrize("architecture", NAMED)
def test_the_named_layers_are_adapted_and_reached(architecture: str, targets: Targets) -> None:
    """In training, A and B of every adapter run once per call of the layer and receive a gradient."""
    torch.manual_seed(0)
    model = lively(timm.create_model(architecture, num_classes=3, **SMALLER.get(architecture, {})))
    lora = LoRA(targets=targets)
    apply_methods(model, [LastStage(), lora])
    assert lora.applied is not None
    assert set(lora.applied.touched) == set(adapters(model)) == NAMED[architecture][targets]
    stirred(model)

    calls: dict[str, int] = {}
    for name, module in model.named_modules():
        if name.endswith((".lora_A.default", ".lora_B.default", ".base_layer")):
            module.register_forward_hook(lambda m, i, o, n=name: calls.update({n: calls.get(n, 0) + 1}))
    size = SMALLER.get(architecture, {}).get("img_size", 224)
    model.train()(torch.randn(2, 3, size, size)).square().mean().backward()
    expected = {f"{n}.{part}" for n in adapters(model) for part in ("lora_A.default", "lora_B.default", "base_layer")}
    assert calls == dict.fromkeys(expected, 1)
    for name, layer in adapters(model).items():
        for part in (layer.lora_A, layer.lora_B):
            assert part["default"].weight.grad.norm() > 0, name
        assert layer.base_layer.weight.grad is None


@pytest.mark.slow
def test_layers_no_wider_than_the_rank_are_left_and_train_as_other_convolutions() -> None:
    model = timm.create_model("efficientformerv2_s0", num_classes=3)
    lora = LoRA(targets="all")
    apply_methods(model, [LastStage(), lora])
    assert lora.applied is not None
    heads = [f"stages.3.blocks.{b}.token_mixer.talking_head{k}" for b in (2, 3) for k in (1, 2)]
    for name in heads:
        assert str(lora.applied.skipped[name]) == "the rank 8 is not below min(in, out) = 8 channels"
        assert lora.applied.skipped[name].reason == Reason.TOO_NARROW
        assert f"{name}.weight" in trains(model)
    lora.remove(model)
    with pytest.raises(UserError, match=r"all layers of .* have too few channels .*rank 4096 is not below.*lower rank"):
        LoRA(rank=4096, targets="all").apply(model)


def test_without_a_selection_it_goes_everywhere_but_stem_and_head() -> None:
    model = model_of("vit")
    assert set(LoRA(rank=2, targets="all").apply(model).touched) == {
        f"blocks.{b}.{x}" for b in range(4) for x in ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")
    }
    assert "patch_embed.proj" not in adapters(model)


@pytest.mark.slow
def test_it_goes_where_the_selection_trains() -> None:
    model = model_of("vit")
    apply_methods(model, [LoRA(rank=2), Blocks(blocks=[0, 2])])
    assert set(adapters(model)) == {f"blocks.{b}.attn.{x}" for b in (0, 2) for x in ("qkv", "proj")}


@pytest.mark.parametrize("selection", [HeadOnly(), BitFit()])
def test_a_selection_that_trains_no_such_weight_is_refused(selection: Method) -> None:
    model = model_of("vit")
    selection.apply(model)
    before = trains(model)
    with pytest.raises(UserError, match=r"all 8 layers .* are frozen by the selection"):
        LoRA().apply(model)
    assert trains(model) == before
    selection.remove(model)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "layer"),
    [
        ("pit_ti_224", "transformers.1.blocks.0.attn.qkv"),  # The class token is not part of a probed grid.
        ("mobilevit_xxs", "stages.2.1.transformer.0.attn.qkv"),  # The tokens are the pixels of a patch.
        ("convit_tiny", "blocks.0.attn.qk"),  # The qkv layer has a different name.
    ],
)
def test_adapters_need_no_grid(architecture: str, layer: str) -> None:
    model = timm.create_model(architecture, num_classes=3)
    assert layer in LoRA(rank=4).apply(model).touched
    assert all("attn" in n for n in adapters(model))


# ------------------------------------------------------------------------------------------------ trainable parameters
@pytest.mark.parametrize("name", ["vit", "efficientformer", "swinv2"])
def test_with_attention_adapters_and_head_train_and_nothing_else(name: str) -> None:
    model = model_of(name)
    apply_methods(model, [LastStage(), LoRA(rank=2)])
    heads = {f"{h}.{p}" for h in ("head", "head_dist", "head.fc") for p in ("weight", "bias")}
    assert trains(model) == {n for n, _ in model.named_parameters() if "lora_" in n or n in heads}


@pytest.mark.parametrize("selection", [LastStage, None])
@pytest.mark.parametrize("name", USUAL)
def test_with_all_everything_trains_but_the_adapted_weights(name: str, selection: type[Method] | None) -> None:
    model = model_of(name)
    methods = [LoRA(rank=2, targets="all"), *([selection()] if selection else [])]
    reference = model_of(name)
    if selection:
        selection().apply(reference)
    apply_methods(model, methods)
    adapted = adapters(model)
    expected = {n for n in trains(reference) if n.rpartition(".")[0] not in adapted or n.endswith(".bias")}
    assert {n.replace(".base_layer", "") for n in trains(model) if "lora_" not in n} == expected
    assert {n for n, _ in model.named_parameters() if "lora_" in n} <= trains(model)


# ------------------------------------------------------------------------------------------------ names, checkpoints
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
@pytest.mark.parametrize("name", USUAL)
def test_merged_weights_give_the_adapted_output(name: str, dtype: torch.dtype, tolerance: float) -> None:
    model, lora = model_of(name).to(dtype), LoRA(rank=2, targets="all")
    before = evaluate(model, name)
    lora.apply(model)
    stirred(model)
    adapted = evaluate(model, name)
    scale = adapted.abs().max().item()
    assert (adapted - before).abs().max() > 1e-3 * scale
    fresh = MODELS[name].create().to(dtype)
    fresh.load_state_dict(plain_state_dict(model, [lora]), strict=True)
    assert (evaluate(fresh, name) - adapted).abs().max().item() < tolerance * scale
    lora.remove(model)
    assert (evaluate(model, name) - adapted).abs().max().item() < tolerance * scale
    assert not adapters(model)
    assert not hasattr(model, "peft_config")


def test_layers_that_share_a_weight_are_not_adapted() -> None:
    """Merging two adapters into one weight would change the output."""
    model, lora = model_of("vit"), LoRA(rank=2, targets="all")
    one, other = (model.get_submodule(f"blocks.{i}.mlp.fc1") for i in (0, 1))
    other.weight = one.weight
    report = lora.apply(model)
    assert {n for n, why in report.skipped.items() if why.reason == Reason.SHARED} == {
        "blocks.0.mlp.fc1",
        "blocks.1.mlp.fc1",
    }
    stirred(model)
    adapted = evaluate(model, "vit")
    lora.remove(model)
    torch.testing.assert_close(evaluate(model, "vit"), adapted)


def test_a_network_can_read_the_attributes_of_an_adapted_convolution() -> None:
    class Padded(nn.Module):
        """A network whose forward method reads the kernel size, like DaViT."""

        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Conv2d(3, 16, 4, 4)
            self.conv = nn.Conv2d(16, 16, 2, 2)
            self.head = nn.Linear(16, 5)

        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x)
            height, width = self.conv.kernel_size
            x = F.pad(x, (0, -x.shape[-1] % width, 0, -x.shape[-2] % height))
            logits: Tensor = self.head(self.conv(x).mean((2, 3)))
            return logits

    model = Padded()
    images = torch.randn(2, 3, 28, 28)
    before = model(images)
    LoRAFA(rank=2).apply(model)
    assert adapters(model)
    torch.testing.assert_close(model(images), before)


def test_swinv2_s_attention_computes_qkv_as_before_once_removed() -> None:
    model, lora = model_of("swinv2"), LoRA(rank=2)
    attention = model.get_submodule("layers.0.blocks.0.attn")
    assert attention.qkv_bias_separate is False
    lora.apply(model)
    assert attention.qkv_bias_separate is True
    lora.remove(model)
    assert attention.qkv_bias_separate is False


def test_a_checkpoint_of_an_adapted_model_loads_into_another(tmp_path: Path) -> None:
    model, lora = model_of("vit"), LoRA(rank=2)
    lora.apply(model)
    train_a_little(model, lora, "vit")
    torch.save(model.state_dict(), tmp_path / "last.ckpt")
    other = model_of("vit")
    LoRA(rank=2).apply(other)
    other.load_state_dict(torch.load(tmp_path / "last.ckpt", weights_only=True), strict=True)
    assert torch.equal(evaluate(other, "vit"), evaluate(model, "vit"))


def test_a_model_with_other_adapters_is_refused() -> None:
    model = model_of("vit")
    LoRA(rank=2).apply(model)
    with pytest.raises(UserError, match=r"lora has been applied .* both methods add modules"):
        LoRA(rank=4).apply(model)
    model = model_of("vit")
    inject_adapter_in_model(LoraConfig(target_modules=["qkv"]), model)
    with pytest.raises(UserError, match="has adapters of peft"):
        LoRA(rank=4).apply(model)
    assert not any("lora" in layer.name for layer in view(model).layers)


def test_peft_is_imported_only_when_it_is_needed() -> None:
    """`import efficient_ft.methods` does not import peft, whose import takes seconds."""
    top = [line for line in inspect.getsource(lora_module).splitlines() if re.match(r"(import|from) ", line)]
    assert top
    assert not any("peft" in line for line in top)


# ------------------------------------------------------------------------------------ with low-rank backward
@pytest.mark.slow
def test_low_rank_backward_serves_the_base_layers_and_leaves_a_and_b_exact() -> None:
    """At full rank, the stack equals LoRA alone. At low rank, only the gradients below a base layer differ."""

    def step(*methods: Method) -> dict[str, Tensor | None]:
        model = model_of("vit")
        torch.manual_seed(0)
        apply_methods(model, methods)
        return gradients(stirred_alike(model), "vit")

    def stirred_alike(model: nn.Module) -> nn.Module:
        torch.manual_seed(1)
        return stirred(model)

    alone = step(LoRA(rank=2))
    full = step(LoRA(rank=2), LBPWHT(order=15, as_published=True))
    low = step(LBPWHT(order=2, as_published=True), LoRA(rank=2))
    assert alone.keys() == full.keys() == low.keys()
    for name, gradient in alone.items():
        if gradient is None:
            assert full[name] is None
            assert low[name] is None
        else:
            torch.testing.assert_close(full[name], gradient, rtol=1e-8, atol=1e-10)
    highest = "blocks.3.attn.proj.lora_B.default.weight"
    lowest = "blocks.0.attn.qkv.lora_B.default.weight"
    errors = {n: ((low[n] - alone[n]).norm() / alone[n].norm()).item() for n in (highest, lowest)}
    assert errors[lowest] > 1e-2
    # The highest adapter has an exact gradient, apart from the error of the MLP above.
    assert errors[highest] < errors[lowest]


def test_low_rank_backward_reports_the_base_layers_and_never_the_adapters() -> None:
    model, low_rank = model_of("swinv2"), LBPWHT(order=2, as_published=True)
    apply_methods(model, [low_rank, LoRA(rank=2, targets="all")])
    assert low_rank.applied is not None
    assert not any("lora_" in n for n in (*low_rank.applied.touched, *low_rank.applied.skipped))
    assert "layers.0.blocks.0.attn.qkv.base_layer" in low_rank.applied.touched
