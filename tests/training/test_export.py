"""Tests of model.safetensors: its contents, and the files that are rejected."""

from __future__ import annotations

import json
import os
import shutil
import stat
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from efficient_ft.config import ModelConfig
from efficient_ft.core.errors import UserError
from efficient_ft.core.input_spec import InputSpec
from efficient_ft.data import Decoding, Transform
from efficient_ft.methods import LBPWHT, EViT, HeadOnly, LoRA, LowBit, Method, apply_methods
from efficient_ft.methods.base import plain_state_dict
from efficient_ft.record.formats import OtherVersionError
from efficient_ft.training.kinds.registry import kind_named
from efficient_ft.training.output import export
from efficient_ft.training.run import run


def test_loaded_weights_do_not_train(finished):
    trained = export.load(finished[0])
    assert not trained.model.training
    assert not any(p.requires_grad for p in trained.model.parameters())
    assert trained.class_names == [str(k) for k in range(10)]
    assert trained.input.size == (32, 32)
    probabilities = kind_named("classification").outputs(trained.model, torch.zeros(1, 3, 32, 32))
    assert torch.equal(probabilities.sum(-1).round(decimals=5), torch.ones(1))


@pytest.mark.skipif(os.name == "nt", reason="no umask on Windows")
def test_the_exported_file_has_the_rights_of_any_other(finished):
    folder, _, _ = finished
    rights = {stat.S_IMODE((folder / name).stat().st_mode) for name in (export.NAME, "results.json")}
    assert len(rights) == 1


def test_a_file_that_no_run_wrote_is_refused(tmp_path, finished):
    save_file(load_file(finished[0] / export.NAME), tmp_path / export.NAME)
    with pytest.raises(UserError, match="not written by a run"):
        export.load(tmp_path)
    shutil.copy(finished[0] / export.NAME, tmp_path / export.NAME)
    os.truncate(tmp_path / export.NAME, 1000)
    with pytest.raises(UserError, match="cannot be read"):
        export.load(tmp_path)


def test_a_file_of_one_task_has_no_other(finished):
    assert export.load(finished[0]).tasks == {}
    with pytest.raises(UserError, match="has no task a: it was trained on a single data set"):
        export.load(finished[0], "a")


# ---------------------------------------------------------------------------------------------- memory of a save
@pytest.mark.parametrize(
    ("methods", "copied"),
    [
        ([HeadOnly(), LowBit()], []),
        ([LBPWHT(order=1), HeadOnly()], []),
        ([LoRA(rank=2)], "all"),
    ],
    ids=["low_bit", "lbp_wht", "lora"],
)
def test_weights_are_copied_only_where_a_method_changes_them(methods: list[Method], copied: object) -> None:
    model = timm.create_model("vit_digits", depth=2, embed_dim=16, num_heads=2)
    apply_methods(model, methods)
    model(torch.zeros(2, 3, 32, 32)).sum().backward()
    addresses = {value.data_ptr() for value in model.state_dict().values()}
    trains = {n: (p.requires_grad, p.grad is not None) for n, p in model.named_parameters()}
    weights = plain_state_dict(model, methods, copy_weights=False)
    other = [name for name, weight in weights.items() if weight.data_ptr() not in addresses]
    assert other == (list(weights) if copied == "all" else copied)
    assert {n: (p.requires_grad, p.grad is not None) for n, p in model.named_parameters()} == trains
    assert any(grad for _, grad in trains.values())


def test_the_same_weights_are_the_same_bytes(tmp_path: Path) -> None:
    """The same weights and metadata give the same file, with class names that JSON must escape."""
    model = timm.create_model("vit_digits", depth=1, embed_dim=16, num_heads=2, num_classes=3)
    config = ModelConfig(name="vit_digits", pretrained=False, kwargs={"depth": 1, "embed_dim": 16, "num_heads": 2})
    spec = InputSpec((32, 32), (0.5,) * 3, (0.5,) * 3)
    names = ["кот \u2028", "a\n\t\x01\x7f/", '"\\ 🐈']
    for k in range(4):
        export.save(tmp_path / f"{k}", model.state_dict(), config, names, spec, {"epoch": 1, "note": names[1]})
    first = (tmp_path / "0").read_bytes()
    assert all((tmp_path / f"{k}").read_bytes() == first for k in range(4))
    assert load_file(tmp_path / "0").keys() == model.state_dict().keys()
    with safe_open(tmp_path / "0", "pt") as file:
        about = file.metadata()
    assert json.loads(about["class_names"]) == names
    assert about["note"] == names[1]
    assert list(json.loads(first[8 : 8 + int.from_bytes(first[:8], "little")])["__metadata__"]) == sorted(about)


def test_tensors_of_one_storage_are_written_apart(tmp_path):
    whole = torch.arange(12.0).reshape(4, 3)
    weights = {"a": whole, "tied": whole, "part": whole[1:3], "other": torch.ones(2)}
    file = tmp_path / export.NAME
    config = ModelConfig(name="vit_digits", pretrained=False)
    export.save(file, weights, config, ["a"], InputSpec((32, 32), (0.5,) * 3, (0.5,) * 3), {})
    written = load_file(file)
    assert written.keys() == weights.keys()
    assert all(torch.equal(written[name], weights[name]) for name in weights)


@pytest.mark.slow
def test_how_images_are_read_is_kept(tmp_path: Path, configuration, without_cost) -> None:
    """`predict` scales 12-bit images with the value range of the training."""
    values = np.linspace(0, 4095, 20 * 24).reshape(20, 24).astype(np.uint16)
    for k, name in enumerate(("up", "down")):
        for i in range(6):
            file = tmp_path / f"images/{name}/{i}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(np.roll(values[::-1] if k else values, i, axis=1)).save(file)
    data = {"data__name": "folder", "data__root": str(tmp_path / "images"), "data__keep_decoded": "off"}
    config = configuration(**data, data__value_range=[0, 4095], data__max_pixels=10**9, trainer__max_steps=1)
    results = run(config, tmp_path / "run")
    assert results["data"]["summary"][""]["stored_values"] == [0, 4095]
    trained = export.load(tmp_path / "run")
    assert trained.decoding == Decoding((0, 4095), 10**9)
    pixels = Transform(trained.input, decoding=trained.decoding)(tmp_path / "images/up/0.png")
    assert float(pixels.max() - pixels.min()) == pytest.approx(1 / trained.input.std[0], rel=0.01)
    plain = configuration(**data, trainer__max_steps=1)
    run(plain, tmp_path / "plain")
    assert export.load(tmp_path / "plain").decoding == Decoding()


# ---------------------------------------------------------------------------------------------- recorded methods
KWARGS = {"depth": 3, "embed_dim": 16, "num_heads": 2}


@pytest.fixture(scope="module")
def pruned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with a recorded method: EViT, which also drops tokens in evaluation."""
    model, method = timm.create_model("vit_digits", **KWARGS, num_classes=3), EViT(drop_at=[1], keep_rate=0.5)
    method.apply(model)
    file = tmp_path_factory.mktemp("pruned") / export.NAME
    config = ModelConfig(name="vit_digits", pretrained=False, kwargs=KWARGS)
    spec = InputSpec((32, 32), (0.5,) * 3, (0.5,) * 3)
    export.save(file, plain_state_dict(model, [method]), config, ["a", "b", "c"], spec, {"epoch": 1}, [method])
    return file


def renoted(pruned: Path, folder: Path, **changes: object) -> Path:
    """Write a copy of the file in which the method's record is changed."""
    with safe_open(pruned, "pt") as opened:
        about = opened.metadata()
    (part,) = json.loads(about["added"])
    about["added"] = json.dumps([{**part, **changes}])
    save_file(load_file(pruned), folder / export.NAME, about)
    return folder / export.NAME


def test_a_noted_method_is_applied(pruned):
    tokens = []
    trained = export.load(pruned)
    trained.model.blocks[1].register_forward_hook(lambda module, args, output: tokens.append(output.shape[1]))
    trained.model(torch.zeros(1, 3, 32, 32))
    assert tokens == [1 + 32 + 1]
    assert trained.notes["epoch"] == "1"


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"settings": {"drop_at": [1], "keep": 0.5}}, "the file contains method.evit.keep, which this version"),
        ({"method": "evit_old"}, "the file contains the method evit_old, which is unknown"),
        ({"settings": {"drop_at": [1], "keep_rate": 50}}, "not support the settings of evit: keep_rate must be"),
    ],
)
def test_notes_of_another_version_are_refused(pruned, tmp_path, changes, named):
    with pytest.raises(OtherVersionError) as caught:
        export.load(renoted(pruned, tmp_path, **changes))
    assert named in str(caught.value)
    assert "version of efficient-ft (" in str(caught.value)
    assert "Train again with this version" in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"class_names": "{}"}, r"class_names"),
        ({"class_names": '{"a": []}'}, r"class_names"),
        ({"class_names": '["a", "b"]'}, r"head.bias has the shape 3, but the metadata require the shape 2"),
        ({"class_names": "[]"}, "class_names"),
        ({"class_names": "3"}, "class_names"),
        ({"class_names": '["a", "b", 3]'}, "class_names"),
        ({"class_names": "no json"}, "class_names"),
        ({"std": "[0, 0.5, 0.5]"}, "std"),
        ({"std": "[0.5]"}, "mean and std must contain one number per channel"),
        ({"mean": "[NaN, 0.5, 0.5]"}, "mean"),
        ({"image_size": "[32]"}, "image_size must contain one number if there is a tokenizer"),
        ({"image_size": "[100000, 100000]"}, "image_size"),
        ({"image_size": "[-32, 32]"}, "image_size"),
        ({"image_size": "[48, 48]"}, "pos_embed"),
        ({"interpolation": "sharp"}, "interpolation"),
        ({"decoding": '{"": {"value_range": [5, 1]}}'}, "decoding"),
        ({"decoding": '{"": {"max_pixels": 0}}'}, "decoding"),
        ({"decoding": "7"}, "decoding"),
        ({"model_kwargs": '{"depth": -1, "embed_dim": 16, "num_heads": 2}'}, "depth"),
        ({"model_kwargs": '{"typo": 1}'}, "typo"),
        ({"model_kwargs": "[]"}, "model_kwargs"),
        ({"architecture": "vit_unknown"}, "vit_unknown"),
        ({"encoder": "resnet18"}, "encoder"),
        ({"added": "{}"}, "added"),
        ({"tokenizer": "{}"}, "image_size must contain one number if there is a tokenizer"),
        ({"tokenizer": "{}", "image_size": "[32]", "mean": "[]", "std": "[]"}, "tokenizer cannot be read"),
        ({"task": "segmentation"}, "class_ids must contain one number for each class"),
    ],
)
@pytest.mark.parametrize("noted", [True, False], ids=["with a method", "plain"])
def test_altered_metadata_is_refused(
    pruned: Path, tmp_path: Path, changes: dict[str, str], named: str, noted: bool
) -> None:
    with safe_open(pruned, "pt") as opened:
        about = {**opened.metadata(), **({} if noted else {"added": "[]"}), **changes}
    file = tmp_path / export.NAME
    save_file(load_file(pruned), file, about)
    with pytest.raises(UserError, match=named) as caught:
        export.load(file)
    assert str(caught.value).startswith(f"The file {file}")
    assert "\n" not in str(caught.value)


def test_outputs_that_are_not_finite_are_no_prediction(pruned: Path, tmp_path: Path) -> None:
    weights = load_file(pruned)
    weights["head.bias"][1] = torch.nan
    with safe_open(pruned, "pt") as opened:
        save_file(weights, tmp_path / export.NAME, opened.metadata())
    trained = export.load(tmp_path)
    with pytest.raises(UserError, match="outputs are not finite"):
        kind_named("classification").outputs(trained.model, torch.zeros(1, 3, 32, 32))
