"""Tests of networks in which some layers are quantized."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from efficient_ft.core.errors import UserError
from efficient_ft.integrations.session import MethodSession
from efficient_ft.methods import (
    BSR,
    LBPDCT,
    LBPWHT,
    LISA,
    SWAT,
    ALaST,
    BackRazor,
    BitFit,
    Checkpointing,
    Compact,
    Full,
    HeadOnly,
    LastStage,
    LoRA,
    LoRAFA,
    LowBit,
    Mesa,
    Method,
    MoE,
    PatchDropout,
    ToMe,
)
from efficient_ft.models.view import Reason


class Quantized(Tensor):
    """A weight in 8 bits for linear layers, which implements few operations, as tensor subclasses of torchao do."""

    @staticmethod
    def __new__(cls, data: Tensor, scale: Tensor) -> Quantized:
        return Tensor._make_wrapper_subclass(cls, data.shape, dtype=scale.dtype)  # type: ignore[attr-defined,no-any-return]

    def __init__(self, data: Tensor, scale: Tensor) -> None:
        self.data_of, self.scale = data, scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["data_of", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], *_: Any) -> Quantized:
        return cls(inner["data_of"], inner["scale"])

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear:
            x, weight, *bias = args
            return F.linear(x, weight.data_of * weight.scale, *bias)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.clone.default):
            return cls(func(args[0].data_of), func(args[0].scale))
        raise NotImplementedError(f"{func}")


def quantize(model: nn.Module, where: Callable[[str], bool]) -> None:
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and where(name):
            scale = module.weight.detach().abs().max() / 127
            data = (module.weight.detach() / scale).round().to(torch.int8)
            module.weight = nn.Parameter(Quantized(data, scale), requires_grad=False)


def quantize_torchao(model: nn.Module, where: Callable[[str], bool]) -> None:
    torchao = pytest.importorskip("torchao.quantization")
    torchao.quantize_(
        model, torchao.Int8WeightOnlyConfig(), filter_fn=lambda m, name: isinstance(m, nn.Linear) and where(name)
    )


KINDS = {"Quantized": quantize, "Int8Tensor": quantize_torchao}


def network(kind: str, where: Callable[[str], bool]) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = timm.create_model("vit_tiny_patch16_224", num_classes=5, depth=4, img_size=64, embed_dim=48)
    KINDS[kind](model, where)
    return model


#: Methods, the verb in the message, and the first layer that is named if all layers except the head are quantized.
REJECTED: list[tuple[Callable[[], Method], str, str]] = [
    (Full, "train", "blocks.0.attn.qkv"),
    (lambda: LISA(1), "train", "blocks.0.attn.qkv"),
    (LastStage, "train", "blocks.3.attn.qkv"),
    (lambda: BSR([2], [1]), "train", "blocks.2.attn.qkv"),
    (lambda: ALaST(2), "train", "blocks.0.attn.qkv"),
    (LoRA, "adapt", "blocks.0.attn.qkv"),
    (LoRAFA, "adapt", "blocks.0.attn.qkv"),
    (lambda: MoE(blocks=[1]), "change", "blocks.1.mlp.fc1"),
    (lambda: LBPWHT(order=1), "change", "blocks.0.attn.qkv"),
    (lambda: LBPDCT(1), "change", "blocks.0.attn.qkv"),
    (Mesa, "change", "blocks.0.attn.qkv"),
    (BackRazor, "change", "blocks.0.attn.qkv"),
    (LowBit, "change", "blocks.0.attn.qkv"),
    (Compact, "change", "blocks.0.attn.qkv"),
    (SWAT, "change", "blocks.0.attn.qkv"),
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("create", "verb", "layer"), REJECTED)
def test_methods_that_change_quantized_layers_are_rejected(
    kind: str, create: Callable[[], Method], verb: str, layer: str
) -> None:
    model = network(kind, lambda name: name != "head")
    before = {name: p.requires_grad for name, p in model.named_parameters()}
    message = rf"method \w+: the layer {layer} is quantized \(.*\)\. .* cannot {verb} a weight of type {kind}\. Apply"
    with pytest.raises(UserError, match=message):
        create().apply(model)
    assert {name: p.requires_grad for name, p in model.named_parameters()} == before
    assert all("forward" not in vars(module) for module in model.modules())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("create", [HeadOnly, BitFit, LoRA])
def test_a_quantized_head_is_not_left_frozen(kind: str, create: Callable[[], Method]) -> None:
    with pytest.raises(UserError, match=r"the layer head is quantized\. .* cannot train a weight"):
        create().apply(network(kind, lambda name: name == "head"))


def test_integer_weights_are_quantized() -> None:
    """The weights of bitsandbytes are integers."""
    model = network("Quantized", lambda name: False)
    layer: Any = model.get_submodule("blocks.1.mlp.fc1")
    layer.weight = nn.Parameter(torch.zeros(192, 48, dtype=torch.uint8), requires_grad=False)
    with pytest.raises(UserError, match=r"layer blocks\.1\.mlp\.fc1 is quantized\. .* a weight of type uint8\."):
        LBPDCT(1).apply(model)


#: Methods that do not change the quantized layers in `_in_mlp`.
ACCEPTED: list[Callable[[], Method]] = [
    HeadOnly,
    BitFit,
    LoRA,
    LoRAFA,
    Checkpointing,
    PatchDropout,
    lambda: ToMe(1),
    lambda: LBPDCT(1, skip=["mlp"]),
]


def _in_mlp(name: str) -> bool:
    return ".mlp." in name


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("create", ACCEPTED)
def test_other_methods_train_networks_with_quantized_layers(
    kind: str, create: Callable[[], Method], tmp_path: Path
) -> None:
    model = network(kind, _in_mlp)
    before = model.get_submodule("blocks.1.mlp.fc1").weight.dequantize() if kind == "Int8Tensor" else None  # type: ignore[operator,union-attr]
    with MethodSession(model, create()) as session:
        optimizer = torch.optim.SGD(session.parameters(), 0.1)
        with session.step(0):
            session.loss(model(torch.randn(2, 3, 64, 64)).square().mean()).backward()
            assert all(p.grad is not None for p in session.parameters() if p is not getattr(model, "cls_token", None))
            optimizer.step()
        session.save(tmp_path / "trained.safetensors")
        session.load(tmp_path / "trained.safetensors")
        with pytest.raises(UserError, match=r"cannot contain quantized weights \(.*fc1\.weight, .*\)\. Save the"):
            session.save(tmp_path / "whole.safetensors", whole=True)
    if before is not None:
        assert torch.equal(model.get_submodule("blocks.1.mlp.fc1").weight.dequantize(), before)  # type: ignore[operator,union-attr]


def test_the_checksum_of_frozen_weights_covers_quantized_weights(tmp_path: Path) -> None:
    path = tmp_path / "trained.safetensors"
    with MethodSession(network("Quantized", _in_mlp), HeadOnly()) as session:
        session.save(path)
    other = network("Quantized", _in_mlp)
    other.get_submodule("blocks.1.mlp.fc1").weight.data_of[0, 0] += 1  # type: ignore[union-attr,index]
    with MethodSession(other, HeadOnly()) as session, pytest.raises(UserError, match="frozen weights differ"):
        session.load(path)


def test_reports_state_which_layers_are_quantized() -> None:
    report = LoRA(targets="all").apply(network("Quantized", _in_mlp))
    assert len(report.touched) == 8
    assert report.skipped["blocks.0.mlp.fc1"].reason is Reason.QUANTIZED
    assert str(report.skipped["blocks.0.mlp.fc1"]) == "quantized (Quantized)"
