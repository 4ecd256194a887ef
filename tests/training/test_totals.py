"""Tests of the totals of a training: FLOPs, time and energy, also after a resume."""

from __future__ import annotations

import itertools
import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import timm
import torch

from efficient_ft.cost import executed
from efficient_ft.cost.run_flops import FlopsCounter
from efficient_ft.methods import LBPWHT, LISA, SWAT, ALaST, BackRazor, BitFit, Full
from efficient_ft.record import energy
from efficient_ft.training.callbacks.totals import same_each_step
from efficient_ft.training.run import run
from tests.training.runs import interrupted_at, rows_of

#: Each step trains one of the two blocks and no layer below it.
LISA_SETTINGS = {"lisa": {"num_layers": 1, "interval": 1, "train_embeddings": False}}


@pytest.mark.slow
def test_totals_of_equal_steps_are_the_counted_step_times_the_images(finished: tuple[Path, Any, dict[str, Any]]):
    folder, _, results = finished
    totals, cost = results["totals"], results["cost"]["executed"]
    train = results["data"]["splits"]["train"]
    assert totals["images"] == 2 * train
    assert totals["steps"] == totals["batches"] == 22
    assert totals["counted_batches"] == 2  # one full batch and the smaller last batch of the epoch
    assert totals["flops"] == pytest.approx((cost["forward_flops"] + cost["backward_flops"]) * totals["images"])
    rows = rows_of(folder)
    assert [row["images"] for row in rows if "val_accuracy" in row] == [train, 2 * train]
    assert all(a["flops"] <= b["flops"] for a, b in itertools.pairwise(rows))
    assert rows[-1]["flops"] == totals["flops"]
    seconds = [json.loads(line)["seconds"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert 0 < seconds[0] <= seconds[-1] <= totals["seconds"]
    assert 0 < totals["step_seconds"] * totals["steps"] / 2 < totals["seconds"], "at least half take the median"


@pytest.mark.slow
def test_steps_that_differ_are_each_counted(tmp_path: Path, configuration: Any, without_cost: None):
    """LISA trains one of two blocks per step, so the cost differs between steps."""
    config = configuration(method=LISA_SETTINGS)
    totals = run(config, tmp_path / "run")["totals"]
    assert totals["counted_batches"] == totals["batches"] == 22
    rows = [row for row in rows_of(tmp_path / "run") if "lr" in row]
    window = [b["flops"] - a["flops"] for a, b in itertools.pairwise(rows)]
    assert len(set(window)) > 1


@pytest.mark.slow
def test_an_interrupted_run_has_the_totals_of_a_whole_one(tmp_path: Path, configuration: Any, without_cost: None):
    config = configuration(
        method={"lisa": {"num_layers": 1, "interval": 1, "train_embeddings": False}}, trainer__grad_accum_steps=2
    )
    whole = run(config, tmp_path / "whole")["totals"]
    interrupted_at(4, config, tmp_path / "resumed")
    resumed = run(config, tmp_path / "resumed")["totals"]
    for key in ("steps", "images", "flops", "batches", "counted_batches"):
        assert resumed[key] == whole[key], key
    assert 0 < resumed["step_seconds"] < resumed["seconds"]
    assert rows_of(tmp_path / "whole") == rows_of(tmp_path / "resumed")


def test_which_methods_cost_the_same_in_each_step():
    assert same_each_step([Full(), BackRazor(sparsity=0.9)])
    assert same_each_step([BitFit(), LBPWHT(bases="l1", order=4)])
    for method in (ALaST(num_layers=1, seed=0), LISA(num_layers=1, interval=1, seed=0), SWAT(), LBPWHT(bases="lhe")):
        assert not same_each_step([Full(), method]), method


@pytest.mark.slow
@pytest.mark.parametrize("name", ["deit_tiny_patch16_224", "resnet18"])
def test_a_real_step_with_fused_attention_has_the_flops_of_the_count(name: str):
    model = timm.create_model(name, num_classes=5, **({"img_size": 64} if "deit" in name else {})).train()
    counted = executed(model, 2, (64, 64), frozen_bn=False)
    with FlopsCounter() as counter:
        torch.nn.functional.cross_entropy(model(torch.randn(2, 3, 64, 64)), torch.zeros(2, dtype=torch.long)).backward()
    assert counter.flops == pytest.approx(2 * counted.flops)


def test_frozen_layers_are_not_counted():
    model = timm.create_model("vit_tiny_patch16_224", num_classes=5, img_size=64, depth=3, embed_dim=24, num_heads=2)
    model.train()
    for block in model.blocks[:-1]:
        block.requires_grad_(False)
    model.patch_embed.requires_grad_(False)
    model.pos_embed.requires_grad_(False)
    model.cls_token.requires_grad_(False)
    counted = executed(model, 2, (64, 64))
    with FlopsCounter() as counter:
        torch.nn.functional.cross_entropy(model(torch.randn(2, 3, 64, 64)), torch.zeros(2, dtype=torch.long)).backward()
    assert counter.flops == pytest.approx(2 * counted.flops)


def test_energy_of_processor_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(energy, "POWERCAP", tmp_path)
    assert energy.EnergyMeter().source is None
    assert energy.EnergyMeter().joules is None
    for name, microjoules in (("intel-rapl:0", 5_000_000), ("intel-rapl:1", 1_000_000), ("intel-rapl:0:0", 7)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "energy_uj").write_text(f"{microjoules}\n")
    meter = energy.EnergyMeter()
    meter.start()
    assert meter.source == "processor packages"
    (tmp_path / "intel-rapl:0" / "energy_uj").write_text("9000000")
    assert meter.joules == pytest.approx(4.0)
    (tmp_path / "intel-rapl:0" / "energy_uj").write_text("10")  # the counter wrapped around
    (tmp_path / "intel-rapl:1" / "energy_uj").write_text("3000000")
    assert meter.joules == pytest.approx(6.0)
    (tmp_path / "intel-rapl:1" / "energy_uj").unlink()  # the counter is temporarily unreadable
    assert meter.joules == pytest.approx(6.0)
    (tmp_path / "intel-rapl:1" / "energy_uj").write_text("7000000")
    assert meter.joules == pytest.approx(6.0), "not all that the counter has ever counted"


def test_energy_of_the_gpu_that_cuda_uses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """With ``CUDA_VISIBLE_DEVICES=1``, the CUDA device 0 is the GPU 1 of NVML."""
    used = {"GPU-a": 5_000, "GPU-b": 100_000}  # mJ
    readable = True

    class NVMLError(Exception):
        pass

    def consumption(handle: str) -> int:
        if not readable:
            raise NVMLError
        return used[handle]

    nvml = types.SimpleNamespace(
        NVMLError=NVMLError,
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByIndex=lambda index: list(used)[index],
        nvmlDeviceGetHandleByUUID=lambda uuid: uuid,
        nvmlDeviceGetTotalEnergyConsumption=consumption,
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: types.SimpleNamespace(uuid="ba"[index]))
    monkeypatch.setattr(energy, "POWERCAP", tmp_path)
    meter = energy.EnergyMeter(gpu=0)
    assert meter.source == "GPU"
    meter.start()
    used.update({"GPU-a": 9_000, "GPU-b": 103_000})
    assert meter.joules == pytest.approx(3.0)
    readable = False  # the counter is temporarily unreadable
    assert meter.joules == pytest.approx(3.0)
    readable = True
    assert meter.joules == pytest.approx(3.0), "not all that the counter has ever counted"
    used["GPU-b"] += 2_000
    assert meter.joules == pytest.approx(5.0)
