"""Tests of session files: the trained part, all weights, and rejected files."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from efficient_ft import MethodSession
from efficient_ft.core.errors import UserError
from efficient_ft.integrations.saving import decode, encode
from efficient_ft.methods import (
    BackRazor,
    BitFit,
    Full,
    LoRA,
)
from efficient_ft.testing import MODELS, batch_of, model_of
from tests.integrations.loops import assert_same_weights, batches_of, states_of
from tests.integrations.sessions import SAVED, sgd_of, train


def outputs(model: nn.Module, name: str) -> list[Tensor]:
    """Return the outputs in evaluation mode and in training mode."""
    x, _ = batch_of(name)
    torch.manual_seed(5)
    with torch.no_grad():
        return [model.eval()(x), model.train()(x)]


def trained_session(stack: str) -> MethodSession:
    name, make = SAVED[stack]
    torch.manual_seed(1)
    model = model_of(name)
    with MethodSession(model, make()) as session:
        train(model, session, batches_of(name, 3))
    return session


@pytest.mark.parametrize("stack", SAVED)
def test_the_trained_part_gives_identical_outputs(stack: str, tmp_path: Path) -> None:
    name, make = SAVED[stack]
    session, file = trained_session(stack), tmp_path / "new" / "part.safetensors"
    session.save(file)
    torch.manual_seed(2)  # different initial values of the adapters
    other = model_of(name)
    with MethodSession(other, make()) as loaded:
        optimizer = sgd_of(loaded)
        loaded.load(file)
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        assert held == {id(p) for p in loaded.parameters()}
    assert all(torch.equal(a, b) for a, b in zip(outputs(session.model, name), outputs(other, name), strict=True))
    assert_same_weights(session.model, other)
    assert states_of(loaded.methods) == states_of(session.methods)


def bytes_by_hand(stack: str) -> int:
    """Return the bytes of the trained part of the small ViT, with 4 blocks of width 48 and 5 classes in float64."""
    head = 5 * 48 + 5
    linear = [(48, 144), (48, 48), (48, 192), (192, 48)]
    biases = sum(out for _, out in linear) + 2 * 48
    count = {
        "lora": head + 4 * (3 * 2 * (48 + 144) + 2 * (48 + 48)),  # three times the rank for q, k and v
        "bitfit": head + 4 * biases + 48 + 48,  # final norm and patch embedding
        "blocks+evit": head + sum(i * o + o for i, o in linear) + 4 * 48 + 2 * 48,
    }[stack]
    return 8 * count


@pytest.mark.parametrize("stack", ["lora", "bitfit", "blocks+evit"])
def test_the_trained_part_has_no_more_bytes_than_its_tensors(stack: str, tmp_path: Path) -> None:
    session, file = trained_session(stack), tmp_path / "part.safetensors"
    session.save(file)
    with safe_open(file, "pt") as opened:
        tensors = [opened.get_tensor(name) for name in opened.keys()]  # noqa: SIM118
    assert sum(t.nbytes for t in tensors) == bytes_by_hand(stack)
    assert bytes_by_hand(stack) < file.stat().st_size < bytes_by_hand(stack) + 8000


@pytest.mark.parametrize("stack", ["lora", "lora_fa"])
def test_the_trained_part_of_adapters_is_adapters_and_head(stack: str, tmp_path: Path) -> None:
    session, file = trained_session(stack), tmp_path / "part.safetensors"
    session.save(file)
    with safe_open(file, "pt") as opened:
        assert set(opened.keys()) == {n for n in session.model.state_dict() if "lora_" in n or n.startswith("head.")}


@pytest.mark.slow
def test_the_trained_part_of_a_large_model_is_small(tmp_path: Path) -> None:
    model = timm.create_model("deit_small_patch16_224", num_classes=10)
    session = MethodSession(model, LoRA(rank=8)).apply()
    session.save(tmp_path / "part.safetensors")
    session.save(tmp_path / "whole.safetensors", whole=True)
    part, whole = (tmp_path / f"{name}.safetensors" for name in ("part", "whole"))
    assert part.stat().st_size < 2**21
    assert whole.stat().st_size > 80 * 2**20


@pytest.mark.parametrize("stack", ["last_stage", "lora", "lora_fa", "bitfit", "back_razor"])
def test_all_weights_have_timms_names(stack: str, tmp_path: Path) -> None:
    session, file = trained_session(stack), tmp_path / "whole.safetensors"
    name = SAVED[stack][0]
    session.save(file, whole=True)
    small = MODELS[name]
    plain = small.create(checkpoint_path=str(file)).double()  # timm's loader, in float32
    expected, _ = outputs(session.model, name)
    with torch.no_grad():
        found = plain.eval()(batch_of(name)[0])
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
    other = model_of(name)
    MethodSession(other, Full()).load(file)  # before `apply`
    torch.testing.assert_close(outputs(other, name)[0], expected, rtol=1e-9, atol=1e-9)


def test_all_weights_with_added_modules_are_loaded_after_applying(tmp_path: Path) -> None:
    session, file = trained_session("repnet"), tmp_path / "whole.safetensors"
    session.save(file, whole=True)
    other = model_of("mobilenet")
    loaded = MethodSession(other, SAVED["repnet"][1]())
    with pytest.raises(UserError, match=r"does not fit MobileNetV3|does not fit EfficientNet.*after the methods"):
        loaded.load(file)
    loaded.apply().load(file)
    assert_same_weights(session.model, other)


@pytest.mark.parametrize(
    ("methods", "change", "text"),
    [
        ([LoRA(rank=4)], None, r"was saved with other methods or settings: lora\[.*This session has lora\["),
        ([Full()], None, "was saved with other methods or settings"),
        ([LoRA(rank=2), BackRazor()], None, "was saved with other methods or settings"),
        ([LoRA(rank=2)], "weights", "whose frozen weights differ from those of this model"),
        ([LoRA(rank=2)], "dtype", "the same pretrained weights and dtype"),
        ([LoRA(rank=2)], "classes", r"head\.bias has the shape \(5,\) in the file and \(7,\) in the model"),
        ([LoRA(rank=2)], "frozen", r"the model has no tensor head\.bias \(1 in total\)"),
    ],
)
def test_a_file_of_another_session_is_rejected(methods: Any, change: str | None, text: str, tmp_path: Path) -> None:
    session, file = trained_session("lora"), tmp_path / "part.safetensors"
    session.save(file)
    model = model_of("vit")
    if change == "classes":
        model.head = nn.Linear(48, 7).double()
    if change == "weights":
        with torch.no_grad():
            model.pos_embed += 1e-6
    model = model.float() if change == "dtype" else model
    fresh = [type(method)(**method.settings()) for method in methods]
    with MethodSession(model, fresh) as other:
        if change == "frozen":
            model.head.bias.requires_grad_(False)
        before = copy.deepcopy(model.state_dict())
        with pytest.raises(UserError, match=text):
            other.load(file)
        assert all(torch.equal(before[n], t) for n, t in model.state_dict().items())


def test_files_that_cannot_be_read_or_written(tmp_path: Path) -> None:
    session = MethodSession(model_of("vit"), BitFit()).apply()
    with pytest.raises(UserError, match=r"does not exist\. Pass a file written by session\.save"):
        session.load(tmp_path / "none.safetensors")
    broken = tmp_path / "broken.safetensors"
    broken.write_bytes(b"not tensors")
    with pytest.raises(UserError, match="is not a valid"):
        session.load(broken)
    with pytest.raises(UserError, match="cannot be written"):
        session.save(broken / "part.safetensors")


def rewritten(file: Path, metadata: str | Callable[[dict[str, Any]], None]) -> None:
    """Replace the metadata of a trained part, or change the object in the metadata."""
    with safe_open(file, "pt") as opened:
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        about = json.loads(opened.metadata()["efficient_ft_trained_part"])
    if not isinstance(metadata, str):
        metadata(about)
        metadata = json.dumps(about)
    save_file({n: t + 1 for n, t in tensors.items()}, file, {"efficient_ft_trained_part": metadata})


def tensor(values: Any, dtype: Any) -> Callable[[dict[str, Any]], None]:
    """Return a function that adds an encoded tensor to the state of the first method."""
    return lambda about: (
        about["state"].setdefault(about["methods"][0], {}).update(of={"__tensor__": values, "dtype": dtype})
    )


@pytest.mark.parametrize(
    ("metadata", "text"),
    [
        ("{", "malformed metadata"),
        ("", "malformed metadata"),
        ("[1]", "it must be a JSON object, got list"),
        ("null", "it must be a JSON object, got NoneType"),
        ("[" * 200_000, "nested too deeply"),
        ('{"methods": [], "other_weights": "", "state": {"a": {"b": ' + "[" * 3000 + "]" * 3000 + "}}}", "too deeply"),
        (lambda about: about.pop("methods"), "it lacks methods"),
        (lambda about: about.pop("state"), "it lacks state"),
        (lambda about: about.update(methods="top_layers"), "methods must be a list of strings"),
        (lambda about: about.update(methods=[1]), "methods must be a list of strings"),
        (lambda about: about.update(state=[]), "state must be a JSON object"),
        (lambda about: about.update(state=dict.fromkeys(about["methods"], 3)), "state must be a JSON object"),
        (lambda about: about.update(other_weights=None), "other_weights must be a string"),
        (tensor([1.0], "load"), "a tensor has the unknown dtype 'load'"),
        (tensor([1.0], ["float32"]), "a tensor has the unknown dtype"),
        (tensor([1.0], None), "a tensor has the unknown dtype None"),
        (tensor(["a"], "float32"), "the values of a tensor cannot be read"),
        (tensor({}, "float32"), "the values of a tensor cannot be read"),
        (tensor([[1], [2, 3]], "float32"), "the values of a tensor cannot be read"),
        (tensor([2**80], "int8"), "the values of a tensor cannot be read"),
        (
            lambda about: about["state"][about["methods"][0]].pop("steps"),
            r"method top_layers is invalid \(KeyError: 'steps'",
        ),
        (lambda about: about["state"][about["methods"][0]].update(steps="2"), "top_layers.steps must be int, got str"),
        (lambda about: about["state"][about["methods"][0]].update(top=5), "top_layers.top must be list, got int"),
    ],
)
def test_a_file_with_malformed_metadata_changes_nothing(metadata: Any, text: str, tmp_path: Path) -> None:
    session, file = trained_session("top_layers"), tmp_path / "part.safetensors"
    session.save(file)
    rewritten(file, metadata)
    before, states = copy.deepcopy(session.model.state_dict()), copy.deepcopy(states_of(session.methods))
    with pytest.raises(UserError, match=text) as raised:
        session.load(file)
    assert str(raised.value).startswith(f"The file {file} has malformed metadata: ")
    assert all(torch.equal(before[n], t) for n, t in session.model.state_dict().items())
    assert states_of(session.methods) == states


def test_states_are_encoded_and_decoded() -> None:
    dtypes = (torch.float64, torch.bfloat16, torch.int64, torch.bool)
    state = {"a": [torch.ones(2, 3, dtype=dtype) for dtype in dtypes], "b": {"c": None, "d": [1, 2.5, "e", True]}}
    found = decode(json.loads(json.dumps(encode(state))))
    assert found["b"] == state["b"]
    for one, other in zip(found["a"], state["a"], strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
