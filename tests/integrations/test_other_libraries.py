"""Tests of every method with other libraries: copies, checkpointing, parameter groups, peft and 8-bit optimizers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import timm.optim
import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn import functional as F

from efficient_ft import MethodSession
from efficient_ft.core.errors import UserError
from efficient_ft.methods import METHODS
from efficient_ft.methods.base import Method
from efficient_ft.methods.declarations import Adds, Axis
from efficient_ft.testing import CLASSES, Gradients, batch_of, evaluate, largest_difference, lively, model_of
from efficient_ft.testing.steps import gradients_of
from tests.integrations.loops import assert_same_weights
from tests.methods.settings import ROWS

#: Name and first network of the first row in `ROWS`, by method.
FIRST = {row.method.name: (name, row.models[0]) for name, row in reversed(ROWS.items())}
#: Name of the first row in `ROWS`, by method. Only methods that support the small ViT.
ON_VIT = {row.method.name: name for name, row in reversed(ROWS.items()) if "vit" in row.models}


def session_of(method: str) -> tuple[nn.Module, MethodSession, str]:
    row, name = FIRST[method]
    model = model_of(name)
    torch.manual_seed(1)
    return model, MethodSession(model, ROWS[row].create(), frozen_bn=False).apply(), name


def train(model: nn.Module, session: MethodSession, name: str, steps: range, after: Any = lambda: None) -> None:
    optimizer = torch.optim.SGD(session.parameters(), lr=0.05, momentum=0.9)
    model.train()
    for step in steps:
        images, labels = batch_of(name, seed=step)
        with session.step(step):
            torch.manual_seed(step)
            session.loss(F.cross_entropy(model(images), labels)).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        after()


@pytest.mark.slow
@pytest.mark.parametrize("method", FIRST)
def test_a_copy_of_the_network_for_averaged_weights(method: str) -> None:
    """A copy with the same weights has the same outputs, and does not affect the training of the network."""
    expected, session, name = session_of(method)
    train(expected, session, name, range(3))
    model, session, _ = session_of(method)
    averaged = copy.deepcopy(model)

    def update() -> None:
        averaged.load_state_dict(model.state_dict())
        if method != "swat":  # the thresholds of the copy belong to its own weights
            torch.testing.assert_close(evaluate(averaged, name), evaluate(model, name), rtol=0, atol=0)

    train(model, session, name, range(3), update)
    assert_same_weights(expected, model)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    F.cross_entropy(averaged(batch_of(name)[0]), batch_of(name)[1]).backward()
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    shared = {id(module) for module in model.modules()} & {id(module) for module in averaged.modules()}
    assert not shared
    session.remove()
    assert list(averaged.state_dict()) == list(before), "removing the methods does not change the copy"


@pytest.mark.parametrize("method", FIRST)
def test_the_names_of_weights(method: str) -> None:
    """`model.state_dict()` has the names of the plain network, unless the method adds modules."""
    model, session, name = session_of(method)
    train(model, session, name, range(1))
    if Adds.MODULES not in METHODS[method].adds:
        plain = model_of(name)
        plain.load_state_dict(model.state_dict(), strict=True)
        assert list(plain.state_dict()) == list(model.state_dict())


@pytest.mark.parametrize("method", FIRST)
def test_parameter_groups_by_name(method: str) -> None:
    """The parameter groups of timm contain exactly the trained parameters of the session."""
    model, session, _ = session_of(method)
    groups = timm.optim.param_groups_weight_decay(model, 0.05)
    grouped = {id(p) for group in groups for p in group["params"]}  # type: ignore[attr-defined]
    assert grouped == {id(p) for p in session.parameters()}
    assert {id(p) for _, p in session.named_parameters()} == grouped
    session.check_optimizers([torch.optim.AdamW(groups)])


# ------------------------------------------------------------------------------------------ checkpointing
def transformer() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.ViTConfig(
        hidden_size=32, num_attention_heads=2, intermediate_size=48, num_hidden_layers=4, image_size=32, patch_size=4,
        num_labels=CLASSES,
    )  # fmt: skip
    return lively(transformers.ViTForImageClassification(config)).double()


def one_step(model: nn.Module, method: Method) -> Gradients:
    images, labels = batch_of("vit")
    model.train()
    method.step_begin(0)
    torch.manual_seed(5)
    found: Any = model(images)
    loss = F.cross_entropy(found.logits if hasattr(found, "logits") else found, labels)
    method.total_loss(loss).backward()
    return gradients_of(model)


def refusal_or_gradients(model: Any, method: Method, enable: Any) -> str | Gradients:
    """Return the message of the UserError that a training step raises, or the gradients of the step."""
    try:
        method.apply(model)
        enable()
        return one_step(model, method)
    except UserError as error:
        return str(error)


@pytest.mark.parametrize("method", ON_VIT)
@pytest.mark.parametrize("library", ["timm", "transformers"])
def test_checkpointing_of_the_library_is_coordinated_or_rejected(method: str, library: str) -> None:
    """Gradients do not change if the network recomputes its blocks, or the error names the call that disables this."""
    found = []
    for recomputes in (False, True):
        model: Any = model_of("vit") if library == "timm" else transformer()
        enable = model.set_grad_checkpointing if library == "timm" else model.gradient_checkpointing_enable
        torch.manual_seed(1)
        found.append(refusal_or_gradients(model, ROWS[ON_VIT[method]].create(), enable if recomputes else lambda: None))
    plain, recomputed = found
    if isinstance(plain, str):  # the method does not support networks of transformers
        assert plain.startswith(f"method {method}: ")
    elif isinstance(recomputed, str):
        call = "set_grad_checkpointing(False)" if library == "timm" else "gradient_checkpointing_disable()"
        assert recomputed.startswith(f"method {method}: ")
        assert call in recomputed
    else:
        assert METHODS[method].axis != Axis.MEMORY
        assert largest_difference(plain, recomputed) < 1e-10


# ------------------------------------------------------------------------------------------ peft
#: Methods that set `requires_grad`, which peft also sets. SWAT, applied after peft, also makes adapters sparse.
_NOT_WITH_PEFT = {m for m in ON_VIT if {Axis.SELECTION, Axis.ADAPTERS} & set(ROWS[ON_VIT[m]].create().axes)} | {"swat"}


@pytest.mark.parametrize("method", [method for method in ON_VIT if method not in _NOT_WITH_PEFT])
def test_peft_is_applied_before_or_after_a_method(method: str) -> None:
    """Adapters of peft have the same gradients, whether peft is applied before or after the method."""
    found: list[Gradients] = []
    about = LoraConfig(r=2, target_modules=["qkv"], init_lora_weights=False)
    for order in ("peft first", "method first"):
        model, own = model_of("vit"), ROWS[ON_VIT[method]].create()
        for seed in (2, 1) if order == "peft first" else (1, 2):
            torch.manual_seed(seed)
            _ = get_peft_model(model, about) if seed == 2 else own.apply(model)  # type: ignore[arg-type]
        one_step(model, own)
        found.append({n: p.grad for n, p in model.named_parameters() if ".lora_" in n})
    assert all(g is not None and g.any() for g in found[0].values())
    assert largest_difference(*found) < 1e-10


# ------------------------------------------------------------------------------------------ optimizers
def eight_bit(library: str, parameters: Any) -> torch.optim.Optimizer:
    """Create an optimizer of another library with 8-bit states."""
    if library == "bitsandbytes":
        optim = pytest.importorskip("bitsandbytes.optim")
        optimizer: torch.optim.Optimizer = optim.AdamW8bit(parameters, lr=1e-3, min_8bit_size=256)
    else:
        optimizer = pytest.importorskip("torchao.optim").AdamW8bit(parameters, lr=1e-3)
    return optimizer


@pytest.mark.slow
@pytest.mark.parametrize("library", ["bitsandbytes", "torchao"])
@pytest.mark.parametrize("method", ["lora", "lisa", "low_bit", "alast"])
def test_optimizers_with_8_bit_states(library: str, method: str) -> None:
    """A session ends its step when such an optimizer steps. The weights equal those of a loop without a session."""
    models = []
    for by_hand in (True, False):
        model = model_of("vit").float()
        own = ROWS[FIRST[method][0]].create()
        torch.manual_seed(1)
        session = MethodSession(model, own, frozen_bn=False).apply()
        optimizer = eight_bit(library, session.parameters())
        for number in range(3):
            images, labels = batch_of("vit", torch.float32, seed=number)
            torch.manual_seed(number)
            if by_hand:
                own.step_begin(number)
                own.total_loss(F.cross_entropy(model(images), labels)).backward()
                optimizer.step()
                own.step_end()
            else:
                with session.step(number):
                    session.loss(F.cross_entropy(model(images), labels)).backward()
                    optimizer.step()
                assert session.current_step is None
            optimizer.zero_grad()
        models.append(model)
    assert_same_weights(*models)
    assert all(p.isfinite().all() for p in models[0].parameters())
