"""Tests of compiled and wrapped networks, and of networks with adapters of peft."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from peft import IA3Config, LoraConfig, get_peft_model
from timm.utils import ModelEmaV2, ModelEmaV3
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from efficient_ft.core.errors import SettingError, UserError
from efficient_ft.integrations.session import MethodSession
from efficient_ft.methods import (
    BSR,
    LBPDCT,
    LBPWHT,
    LISA,
    ALaST,
    BackRazor,
    BitFit,
    Checkpointing,
    Compact,
    EViT,
    Full,
    HeadOnly,
    LastStage,
    LoRA,
    Method,
    ToMe,
    apply_methods,
)
from tests.methods.settings import small_vit


def network() -> Any:
    return small_vit("vit_tiny_patch16_224")


def images() -> Tensor:
    return torch.randn(2, 3, 32, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


class Outer(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.net = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


def _compiled_in_place(model: nn.Module) -> nn.Module:
    model.compile(backend="eager")
    return model


#: Functions that wrap a network, and parts of the message.
WRAPPERS: dict[str, tuple[Callable[[nn.Module], nn.Module], str]] = {
    "DataParallel": (nn.DataParallel, r"got DataParallel\. Apply the methods to model\.module, and wrap"),
    "compiled": (torch.compile, r"OptimizedModule\. Apply the methods to model\._orig_mod, and call torch\.compile"),
    "compiled in place": (_compiled_in_place, r"a compiled network \(.*\. Apply .* call model\.compile\(\) aft"),
    "compiled inside": (
        lambda model: Outer(torch.compile(model)),  # type: ignore[arg-type]
        r"got OptimizedModule at net\. Apply the methods to model\.net\._orig_mod, and call torch\.compile",
    ),
    "wrapped and compiled": (
        lambda model: torch.compile(nn.DataParallel(model)),  # type: ignore[return-value]
        r"got OptimizedModule\. Apply the methods to model\._orig_mod\.module, and wrap and compile the network after",
    ),
    "compiled part": (
        lambda model: nn.Sequential(torch.compile(model), nn.Linear(2, 2)),  # type: ignore[arg-type]
        r"got OptimizedModule at 0\. Apply the methods before 0 is compiled\.$",
    ),
    "wrapped part": (
        lambda model: nn.Sequential(nn.DataParallel(model), nn.Linear(2, 2)),
        r"got DataParallel at 0\. Apply the methods before 0 is wrapped\.$",
    ),
    "average inside": (lambda model: nn.Sequential(AveragedModel(model), nn.Linear(2, 2)), r"It is an averaged copy"),
    "sharded": (
        lambda model: type("FSDPModule", (Outer,), {})(model),
        r"got FSDPModule\. Methods require unsharded parameters, but FSDP shards the parameters\. Use Distributed",
    ),
    "EMA 2": (ModelEmaV2, r"got ModelEmaV2\. It is an averaged copy, which is not trained"),
    "EMA 3": (ModelEmaV3, r"got ModelEmaV3\. It is an averaged copy"),
    "average": (AveragedModel, r"got AveragedModel\. It is an averaged copy"),
    "peft": (
        lambda model: get_peft_model(model, LoraConfig(target_modules=["qkv"])),  # type: ignore[arg-type]
        r"got PeftModel\. Apply the methods to model\.base_model\.model\. The adapters of peft remain in the network\."
        r" In a callback, pass network='base_model\.model', or network='NAME\.base_model\.model' if",
    ),
    "quantized": (
        lambda model: torch.ao.quantization.quantize_dynamic(model, {nn.Linear}),
        r"got a quantized Linear at .*\. Its weights cannot be trained\. Apply .* before it is quantized",
    ),
    "scripted": (
        lambda model: Outer(torch.jit.script(nn.Linear(2, 2))),
        r"got ScriptModule at net\. Apply the methods before",
    ),
}  # fmt: skip


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_wrapped_network_is_rejected_with_the_network_to_pass(wrapper: str) -> None:
    wrap, message = WRAPPERS[wrapper]
    with pytest.raises(UserError, match=message):
        LastStage().apply(wrap(network()))
    with pytest.raises(UserError, match=message):
        MethodSession(wrap(network()), Checkpointing()).apply()


@pytest.mark.parametrize("model", ["vit", Outer, {"net": 1}], ids=["name", "class", "mapping"])
def test_a_model_that_is_no_module_is_rejected(model: Any) -> None:
    calls: list[Callable[[], Any]] = [
        lambda: apply_methods(model, [Full()]),
        lambda: Full().apply(model),
        lambda: MethodSession(model, [Full()]),
    ]
    for call in calls:
        with pytest.raises(SettingError, match=r"model must be a torch\.nn\.Module, got .* Pass the model first\."):
            call()


def test_a_module_without_forward_is_not_run() -> None:
    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = network()

    with pytest.raises(UserError, match=r"Holder has no forward method\. .* network inside it \(model\.net\)"):
        LBPDCT(2).apply(Holder())


def _lora(**settings: Any) -> LoraConfig:
    return LoraConfig(target_modules=["qkv", "fc1"], modules_to_save=["head"], init_lora_weights=False, **settings)


ADAPTERS: dict[str, Callable[[], Any]] = {
    "LoRA": _lora,
    "DoRA": partial(_lora, use_dora=True),
    "IA3": lambda: IA3Config(
        target_modules=["qkv", "fc1"], feedforward_modules=["fc1"], modules_to_save=["head"], init_ia3_weights=False
    ),
}
EXACT: list[Callable[[], Method]] = [
    partial(LBPWHT, order=15),
    partial(BackRazor, sparsity=0.0, value_dtype="same"),
    Compact,
    Checkpointing,
    partial(EViT, [1], keep_rate=1.0),
    partial(ToMe, 0),
]


def gradients(model: nn.Module) -> dict[str, Tensor]:
    model.zero_grad()
    model(images()).square().sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("adapters", ADAPTERS)
@pytest.mark.parametrize("make", EXACT, ids=lambda make: make().name)
def test_methods_keep_the_gradients_of_adapters_of_peft(make: Callable[[], Method], adapters: str) -> None:
    torch.manual_seed(0)
    wrapped: Any = get_peft_model(network(), ADAPTERS[adapters]()).double()
    plain = gradients(copy.deepcopy(wrapped))
    trained = {name for name, p in wrapped.named_parameters() if p.requires_grad}
    make().apply(wrapped.base_model.model)
    assert {name for name, p in wrapped.named_parameters() if p.requires_grad} == trained == plain.keys()
    for name, grad in gradients(wrapped).items():
        torch.testing.assert_close(grad, plain[name], rtol=1e-10, atol=1e-12, msg=name)


@pytest.mark.parametrize(
    "make",
    [Full, HeadOnly, LastStage, BitFit, partial(LISA, 1), partial(ALaST, 2), partial(BSR, [3], drop_at=[1]), LoRA],
    ids=lambda make: make().name,
)
def test_methods_that_select_parameters_do_not_freeze_adapters_of_peft(make: Callable[[], Method]) -> None:
    model: Any = get_peft_model(network(), _lora()).base_model.model
    before = {name: p.requires_grad for name, p in model.named_parameters()}
    with pytest.raises(UserError, match=rf"method {make().name}: the network has adapters of peft, which already"):
        make().apply(model)
    assert {name: p.requires_grad for name, p in model.named_parameters()} == before


@pytest.mark.parametrize("make", EXACT, ids=lambda make: make().name)
def test_adapters_of_peft_can_be_added_after_methods(make: Callable[[], Method]) -> None:
    found = []
    for methods in ([], [make()]):
        model = network()
        with MethodSession(model, methods) as session:
            torch.manual_seed(0)
            wrapped = get_peft_model(model, _lora()).double()  # type: ignore[arg-type]
            found.append(gradients(wrapped))
            assert len(session.parameters()) == len(found[-1])
    assert found[0].keys() == found[1].keys()
    for name, grad in found[1].items():
        torch.testing.assert_close(grad, found[0][name], rtol=1e-10, atol=1e-12, msg=name)
