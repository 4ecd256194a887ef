"""Tests of LoRA-FA: trainable parameters, exact gradients of B, saved bytes and stacks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from efficient_ft.core.errors import UserError
from efficient_ft.cost import executed
from efficient_ft.methods import (
    LBPWHT,
    BackRazor,
    Blocks,
    Checkpointing,
    EViT,
    LastStage,
    LoRA,
    LoRAFA,
    Mesa,
    Method,
    PatchDropout,
    apply_methods,
    check_stack,
    plain_state_dict,
)
from efficient_ft.methods.forwards import forwards_of
from efficient_ft.models.view import Reason
from efficient_ft.testing import MODELS, USUAL, batch_of, evaluate, gradients, largest_difference, model_of
from tests.methods.test_lora import adapters, stirred
from tests.methods.test_selection import trains

EXACT = {"sparsity": 0.0, "value_dtype": "same"}
HEADS = ("head", "head_dist", "head.fc", "fc", "classifier")


def applied(name: str, *others: Method, **settings: Any) -> tuple[nn.Module, LoRAFA]:
    model, method = model_of(name), LoRAFA(rank=2, **settings)
    torch.manual_seed(0)
    apply_methods(model, [method, *others])
    torch.manual_seed(1)
    return stirred(model), method


def merged(layer: Any, b: Tensor) -> Tensor:
    """Return the merged weight W + s B A of an adapted linear layer or convolution, with the given B."""
    a, scale = layer.lora_A["default"].weight, layer.scaling["default"]
    delta = b @ a if a.dim() == 2 else torch.einsum("or,rikl->oikl", b[:, :, 0, 0], a)
    return layer.base_layer.weight + scale * delta


# ------------------------------------------------------------------------------------------------ gradients
@pytest.mark.parametrize("name", [*USUAL, "mobilenet"])
def test_gradients_of_b_equal_those_through_the_dense_weights(name: str) -> None:
    """The gradients of B equal the gradients of a plain float64 model with the merged weights W + s B A."""
    model, _ = applied(name)
    found = gradients(model, name)
    layers = adapters(model)
    bs = {n: layer.lora_B["default"].weight.detach().clone().requires_grad_() for n, layer in layers.items()}  # type: ignore[index, union-attr]

    plain = model_of(name)
    for module in plain.modules():  # SwinV2 calls the forward method of qkv in the adapted model.
        if getattr(module, "qkv_bias_separate", None) is False:
            module.qkv_bias_separate = True  # type: ignore[assignment]
    images, labels = batch_of(name)
    weights = {f"{n}.weight": merged(layer, bs[n]) for n, layer in layers.items()}
    F.cross_entropy(functional_call(plain, weights, (images,)), labels).backward()

    assert len(layers) >= 4
    assert name not in ("resnet", "mobilenet") or any(b.grad.dim() == 4 for b in bs.values() if b.grad is not None)
    for n, b in bs.items():
        own = found[f"{n}.lora_B.default.weight"]
        assert own is not None
        assert own.norm() > 0
        torch.testing.assert_close(own, b.grad, rtol=1e-9, atol=1e-12)


# ------------------------------------------------------------------------------------------------ trainable parameters
@pytest.mark.parametrize("targets", ["all", "attention"])
@pytest.mark.parametrize("selection", [None, LastStage])
@pytest.mark.parametrize("name", ["vit", "swinv2", "efficientformer"])
def test_b_and_the_head_train_and_nothing_else(name: str, selection: Any, targets: Any) -> None:
    model, _ = applied(name, *([selection()] if selection else []), targets=targets)
    heads = {f"{h}.{p}" for h in HEADS for p in ("weight", "bias")}
    assert trains(model) == {n for n, _ in model.named_parameters() if "lora_B" in n or n in heads}


def test_convolutions_of_any_kernel_are_adapted_and_others_named() -> None:
    model, method = applied("resnet")
    assert method.applied is not None
    kernels = {model.get_submodule(n).base_layer.kernel_size for n in method.applied.touched}  # type: ignore[union-attr]
    assert kernels == {(1, 1), (3, 3)}
    strides = {model.get_submodule(n).base_layer.stride for n in method.applied.touched}  # type: ignore[union-attr]
    assert strides == {(1, 1), (2, 2)}
    _, method = applied("mobilenet")
    assert method.applied is not None
    assert {why.reason for why in method.applied.skipped.values()} >= {Reason.GROUPED_CONVOLUTION, Reason.HEAD}


@pytest.mark.slow
def test_convolutions_that_an_adapter_would_not_follow_are_left() -> None:
    """Convolutions with TensorFlow's padding or dilation get no adapter, because peft's adapters support neither."""
    with torch.device("meta"):
        same = timm.create_model("tf_efficientnetv2_b0", num_classes=3)
        dilated = timm.create_model("resnet26", num_classes=3, output_stride=8)
    for model, why in ((same, "the class Conv2dSame"), (dilated, "dilated")):
        report = LoRAFA(rank=4).apply(model)
        left = [n for n, skipped in report.skipped.items() if why in str(skipped)]
        assert left
        for name in report.touched:
            layer: Any = model.get_submodule(name).base_layer
            assert type(layer) in (nn.Conv2d, nn.Linear)
            assert layer.dilation == (1, 1)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [LoRA, LoRAFA])
def test_standardized_weights_are_refused(kind: Any) -> None:
    """Layers with standardized weights are rejected, because an adapter cannot be merged into the computed weight."""
    with torch.device("meta"):
        model = timm.create_model("resnetv2_50x1_bit", num_classes=3)
    with pytest.raises(UserError, match=r"resnetv2_50x1_bit has no .* that can be adapted"):
        kind(rank=4, targets="all").apply(model)


@pytest.mark.parametrize("name", ["resnet", "mobilenet", "vit"])
def test_merged_weights_give_the_adapted_output(name: str) -> None:
    model, method = applied(name)
    adapted = evaluate(model, name)
    fresh = MODELS[name].create().double()
    fresh.load_state_dict(plain_state_dict(model, [method]), strict=True)
    torch.testing.assert_close(evaluate(fresh, name), adapted, rtol=1e-10, atol=1e-11)
    method.remove(model)
    torch.testing.assert_close(evaluate(model, name), adapted, rtol=1e-10, atol=1e-11)
    assert not any(forwards_of(module) for module in model.modules())


# ------------------------------------------------------------------------------------------------ saved bytes
def kept_bytes(layer: nn.Module, x: Tensor) -> int:
    """Return the number of bytes that a layer saves for the backward pass, without its parameters."""
    own = {p.untyped_storage().data_ptr() for p in layer.parameters()}
    kept: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        held = layer(x.requires_grad_())
    del held
    return sum(kept.values())


@pytest.mark.parametrize(
    ("name", "layer", "shape", "positions"),
    [
        ("vit", "blocks.1.mlp.fc1", (2, 65, 48), 65),
        ("vit", "blocks.1.attn.qkv", (2, 65, 48), 3 * 65),  # three times the rank
        ("resnet", "layer3.0.conv2", (2, 32, 8, 8), 4 * 4),  # 3×3, stride 2
        ("resnet", "layer3.0.conv3", (2, 32, 4, 4), 4 * 4),
    ],
)
def test_a_layer_keeps_rank_values_per_position(name: str, layer: str, shape: Any, positions: int) -> None:
    x = torch.randn(shape, dtype=torch.float64)
    model, _ = applied(name)
    assert kept_bytes(model.get_submodule(layer), x.clone()) == 2 * positions * 2 * 8
    plain = model_of(name)
    LoRA(rank=2, targets="all").apply(plain)
    assert kept_bytes(plain.get_submodule(layer), x.clone()) >= x.numel() * 8


@pytest.mark.first(1, "exhaustive")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "size"), [("deit_tiny_patch16_224", 224), ("resnet26", 64), ("convnext_atto", 64)]
)
def test_saved_bytes_of_a_whole_step_grow_by_a_x_alone(architecture: str, size: int) -> None:
    """The saved bytes of rank 8 and rank 4 differ by 4 values per position of each adapted layer."""
    counts, positions = [], 0
    for rank in (4, 8):
        model, method = timm.create_model(architecture, num_classes=10), LoRAFA(rank=rank)
        method.apply(model)
        counts.append(executed(model, 2, (size, size), methods=[method]).saved_bytes)
    assert method.applied is not None

    def count(module: nn.Module, _: Any, output: Tensor) -> None:
        nonlocal positions
        positions += output.numel() // 8 // 2  # divided by the rank and the batch size

    for layer in adapters(model).values():
        layer.lora_A["default"].register_forward_hook(count)  # type: ignore[index, union-attr]
    model(torch.randn(2, 3, size, size))
    assert counts[1] - counts[0] == positions * 4 * 4


@pytest.mark.slow
def test_what_is_saved_on_deit_small() -> None:
    """Only norms, attention and GELU save values: 10 instead of 16 values per token and channel."""
    full, fa, lora = (
        executed(model, 1, (224, 224), methods=methods).saved_bytes / 2**20
        for model, methods in (
            (timm.create_model("deit_small_patch16_224", num_classes=100), m)
            for m in ([], [LoRAFA()], [LoRA(targets="all")])
        )
    )
    assert lora > full > 56
    assert 35 < fa < 36


@pytest.mark.slow
def test_the_measurement_of_peft_on_resnet50_repeated() -> None:
    """Full fine-tuning saves 1311 MiB for 16 images (peft#2196). LoRA-FA with bit masks for ReLU saves under 30 MiB."""

    def mib(*methods: Method) -> float:
        model = timm.create_model("resnet50", num_classes=1)
        apply_methods(model, methods)
        return executed(model, 16, (224, 224), methods=methods).saved_bytes * 16 / 2**20

    assert mib() == pytest.approx(1310.95, abs=0.5)
    assert mib(LoRAFA(rank=4)) < 560
    assert mib(LoRAFA(rank=4), BackRazor(**EXACT)) < 30  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------ stacks
@pytest.mark.vary_one(slow=True)
@pytest.mark.parametrize(
    "other", [lambda: Checkpointing(), lambda: BackRazor(**EXACT)], ids=["checkpointing", "packed"]
)
@pytest.mark.parametrize("name", ["vit", "resnet", "swinv2"])
def test_exact_memory_methods_change_no_gradient(name: str, other: Any) -> None:
    alone, _ = applied(name)
    both, _ = applied(name, other())
    assert largest_difference(gradients(alone, name), gradients(both, name)) < 1e-9


@pytest.mark.exhaustive
@pytest.mark.parametrize("other", [lambda: Mesa(), lambda: BackRazor(), lambda: Checkpointing(), lambda: EViT([1, 2])])
def test_each_stack_keeps_less_than_either(other: Any) -> None:
    def saved(*methods: Method) -> float:
        model = timm.create_model("vit_tiny_patch16_224", depth=4, num_classes=10)
        apply_methods(model, methods)
        return executed(model, 2, (224, 224), methods=methods).saved_bytes

    both = saved(LoRAFA(), other())
    assert both < saved(LoRAFA())
    assert both < saved(other())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["vit", "efficientformer"])
def test_low_rank_backward_serves_the_base_layers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At full rank, all gradients stay equal. At low rank, the gradients below a base layer differ."""
    alone, _ = applied(name)
    expected = gradients(alone, name)
    low, _ = applied(name, LBPWHT(order=2))
    assert largest_difference(expected, gradients(low, name)) > 1e-2
    monkeypatch.setattr(LBPWHT, "_costs_more", lambda *_: None)
    full, _ = applied(name, LBPWHT(order=15))
    assert largest_difference(expected, gradients(full, name)) < 1e-8


@pytest.mark.slow
def test_with_dropped_tokens_and_patches_it_learns() -> None:
    model, _ = applied("vit", EViT([1, 2]), PatchDropout())
    assert all(g is None or g.norm() > 0 for n, g in gradients(model, "vit").items() if "lora_B" in n)
    assert set(adapters(applied("vit", Blocks(blocks=[0, 2]))[0])) == {
        f"blocks.{b}.{x}" for b in (0, 2) for x in ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")
    }


def test_lora_and_lora_fa_are_refused_together() -> None:
    with pytest.raises(UserError, match=r"lora and lora_fa both add modules to the model\. Name only one of"):
        check_stack([LoRA(), LoRAFA()])


def test_a_convolution_that_trains_again_has_its_gradient() -> None:
    """A convolution that the user unfreezes after `apply` computes its weight gradient."""
    model, _ = applied("resnet")
    weight = model.get_parameter("layer1.0.conv1.base_layer.weight").requires_grad_()
    found = gradients(copy.deepcopy(model), "resnet")["layer1.0.conv1.base_layer.weight"]
    assert weight.grad is None
    assert found is not None
    assert found.norm() > 0
