"""Tests of whole runs: their files and their errors."""

from __future__ import annotations

import csv
import json
import shutil
from functools import partial

import pytest
import torch
from lightning.pytorch.utilities import rank_zero_only
from safetensors import safe_open
from safetensors.torch import load_file
from timm.layers import HybridEmbed
from timm.models import VisionTransformer
from timm.models.vision_transformer_hybrid import ConvStem

from efficient_ft.core.errors import DivergedError, SettingError, UserError
from efficient_ft.data.digits import read_digits
from efficient_ft.record.formats import FORMAT
from efficient_ft.record.results import read_results
from efficient_ft.training.output import checkpoint
from efficient_ft.training.run import run
from tests.training.runs import rows_of


def test_results_have_the_agreed_keys_and_true_values(finished):
    folder, config, results = finished
    assert read_results(folder) == results
    assert set(results) == {
        "format", "accuracy", "cost", "trainable_parameters", "total_parameters", "methods", "config", "environment",
        "data", "totals", "seed", "arguments", "changed", "memory",
    }  # fmt: skip
    assert results["format"] == FORMAT
    assert set(results["accuracy"]) == {"best", "last", "split", "test"}
    groups = {
        "executed": {"forward_flops", "backward_flops", "saved_bytes", "step_peak_bytes", "optimizer_bytes"},
        "measured": {"step_seconds", "peak_bytes"},
    }
    for cost in (results["cost"], results["cost"]["baseline"]):
        assert {name: set(cost[name]) for name in groups} == groups
        assert all(value > 0 for name in groups for value in cost[name].values())
    # The method is the baseline `full`.
    assert results["cost"]["executed"] == results["cost"]["baseline"]["executed"]
    assert results["trainable_parameters"] == results["total_parameters"] > 5_000
    assert results["methods"]["full"]["touched"]
    assert results["config"] == config.model_dump(mode="json")
    assert results["changed"]["model.name"] == config.model.name
    assert results["changed"]["method.full"] == {}
    assert "data.augment.vertical_flip" not in results["changed"], "it is off by default"
    assert {"efficient_ft", "torch", "timm", "lightning", "threads", "allocator"} < set(results["environment"])
    evaluated = [row["val_accuracy"] for row in rows_of(folder) if "val_accuracy" in row]
    assert results["data"]["digest"] == read_digits().digest()
    test = results["data"]["accuracy"]["test"]
    assert results["accuracy"] == {"best": max(evaluated), "last": evaluated[-1], "split": "val", "test": test}
    assert results["seed"] == config.seed
    losses = [row["train_loss_epoch"] for row in rows_of(folder) if "train_loss_epoch" in row]
    assert losses[1] < losses[0]
    # The exported file gives the accuracy of the best epoch in a new model.
    assert results["data"]["accuracy"]["val"] == pytest.approx(results["accuracy"]["best"], abs=1e-6)


def test_the_csv_is_the_jsonl(finished):
    folder, _, _ = finished
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    with open(folder / "metrics.csv", newline="") as file:
        table = list(csv.DictReader(file))
    assert len(table) == len(rows) == 22 + 2
    for line, row in zip(table, rows, strict=True):
        assert {k: float(v) for k, v in line.items() if v} == pytest.approx(row)


def test_the_export_loads_into_plain_timm(finished):
    folder, _, results = finished
    stem = ConvStem(depth=4, channels=(4, 8, 16, 16), stride=(1, 2, 2, 1), kernel_size=3, act_layer=torch.nn.GELU)
    plain = VisionTransformer(
        img_size=32, patch_size=1, embed_dim=16, depth=2, num_heads=2, num_classes=10,
        embed_layer=partial(HybridEmbed, backbone=stem, proj=False),
    )  # fmt: skip
    plain.load_state_dict(load_file(folder / "model.safetensors"), strict=True)
    with safe_open(folder / "model.safetensors", "pt") as file:
        about = file.metadata()
    assert json.loads(about["class_names"]) == [str(k) for k in range(10)]
    assert float(about["accuracy"]) == results["accuracy"]["best"]


@pytest.mark.slow
def test_max_steps_ends_the_run_at_that_step(tmp_path, configuration, without_cost):
    config = configuration(trainer__max_steps=13, trainer__epochs=5)
    results = run(config, tmp_path)
    assert checkpoint.read(tmp_path / checkpoint.NAME)["global_step"] == 13
    (tmp_path / "results.json").unlink()  # simulates a kill before the results were written
    again = run(config, tmp_path)
    assert checkpoint.read(tmp_path / checkpoint.NAME)["global_step"] == 13
    assert again["accuracy"] == results["accuracy"]


# ---------------------------------------------------------------------------------------------- errors
def test_a_loss_that_is_not_finite_stops_the_run_and_says_what_to_try(tmp_path, configuration):
    with pytest.raises(UserError, match=r"loss is (nan|inf) at step \d+ \(epoch 1.*optim\.lr") as caught:
        run(configuration(optim__lr=1e30, optim__grad_clip_norm=None, optim__warmup_steps=0), tmp_path)
    assert "optim.grad_clip_norm=1" in str(caught.value)
    assert not (tmp_path / checkpoint.NAME).exists()


@pytest.mark.parametrize("steps", [22, 1000])
def test_a_warm_up_as_long_as_the_run_is_refused(steps, tmp_path, configuration):
    with pytest.raises(SettingError) as caught:
        run(configuration(optim__warmup_steps=steps, optim__lr=0.01), tmp_path)
    assert str(caught.value) == (
        f"optim.warmup_steps must be less than 22, the number of optimizer steps for trainer.epochs=2, got {steps}."
        " The learning rate would never reach optim.lr=0.01. With optim.warmup_steps=null, the warm-up takes a quarter"
        " of the run, but at most 100 steps."
    )
    assert not (tmp_path / checkpoint.NAME).exists()


@pytest.mark.slow
def test_a_run_that_is_cut_within_its_warm_up_says_so(tmp_path, configuration, without_cost, capsys):
    run(configuration(optim__warmup_steps=5, optim__lr=0.01, trainer__max_steps=5), tmp_path)
    assert (
        "warning: trainer.max_steps=5 ends the run before the warm-up of optim.warmup_steps=5 steps is complete."
        " The learning rate never reaches optim.lr=0.01."
    ) in " ".join(capsys.readouterr().out.split())


def test_the_number_of_a_process_left_in_the_environment_is_named(tmp_path, configuration, monkeypatch):
    """LOCAL_RANK=1 without a first process is rejected, because the first process prepares the folder."""
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(rank_zero_only, "rank", 1)
    with pytest.raises(UserError, match=r"^The environment variable LOCAL_RANK=1 means .* Unset LOCAL_RANK\.$"):
        run(configuration(), tmp_path)
    assert not list(tmp_path.iterdir())


def test_an_optimizer_step_takes_no_more_batches_than_an_epoch_has(tmp_path, configuration):
    with pytest.raises(UserError, match=r"^trainer\.grad_accum_steps must be at most 11, .*, got 12"):
        run(configuration(trainer__grad_accum_steps=12), tmp_path)


@pytest.mark.parametrize(
    ("lr", "message"),
    [(3e38, r"\d+ of \d+ trained parameters are not finite after step 1 \("), (1e30, r"val loss is (nan|inf) after")],
)
def test_a_last_update_that_is_not_finite_is_no_result(lr, message, tmp_path, configuration):
    """A run of one step checks its weights and its validation loss, because no later training loss exists."""
    with pytest.raises(DivergedError, match=message) as caught:
        run(configuration(optim__lr=lr, optim__warmup_steps=0, trainer__max_steps=1), tmp_path)
    assert "a smaller optim.lr" in str(caught.value)
    for left in (checkpoint.NAME, "model.safetensors", "results.json"):
        assert not (tmp_path / left).exists()


def test_missing_weights_and_data_are_named_in_one_message(tmp_path, configuration, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    config = configuration(
        model={"name": "resnet18"}, data={"name": "folder", "root": str(tmp_path / "nowhere")}, trainer__epochs=1
    )
    with pytest.raises(UserError) as caught:
        run(config, tmp_path / "run")
    text = str(caught.value)
    assert "resnet18" in text
    assert "model.weights=FILE" in text
    assert "model.pretrained=false" in text
    assert "nowhere" in text


def test_fp16_on_the_cpu_is_refused(tmp_path, configuration):
    with pytest.raises(UserError, match=r"trainer\.precision must be fp32 or bf16 on a CPU, got fp16"):
        run(configuration(trainer__precision="fp16", trainer__accelerator="auto"), tmp_path)


def test_files_known_to_be_unreadable_are_refused_before_anything_is_written(folders, tmp_path, configuration):
    root = tmp_path / "images"
    shutil.copytree(folders / "colours", root)
    broken = sorted(root.rglob("*.png"))[0]
    broken.write_bytes(broken.read_bytes()[:40])
    data = {"name": "folder", "root": str(root), "num_workers": 0}
    with pytest.raises(UserError, match=rf"{broken.name}: the file is not readable .* set data\.on_corrupt=skip"):
        run(configuration(data=data), tmp_path / "run")
    assert not list((tmp_path / "run").glob("metrics*"))
