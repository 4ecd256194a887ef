"""Tests of runs with augmentation, MixUp, averaged weights and early stopping: the same bits after an interruption."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from timm.utils import ModelEmaV3
from torch import nn

from efficient_ft.config import Config, check
from efficient_ft.methods.base import apply_methods
from efficient_ft.methods.build import build_methods
from efficient_ft.models.frozen_batch_norm import freeze_batch_norm
from efficient_ft.planning.counting import Counter, RunPhases
from efficient_ft.record.results import read_results
from efficient_ft.training.callbacks.ema import averaged_tensors, ema_bytes, ema_decay
from efficient_ft.training.callbacks.recorder import Recorder
from efficient_ft.training.costs import cost_only
from efficient_ft.training.kinds.registry import kind_of
from efficient_ft.training.memory.budget import Predictor
from efficient_ft.training.module import FineTuner
from efficient_ft.training.output import checkpoint
from efficient_ft.training.run import run
from tests.data.mask_pictures import write_folder
from tests.training.runs import assert_same_run, interrupted_at, rows_of
from tests.training.test_segmentation_run import plain_segmentation

pytestmark = pytest.mark.usefixtures("without_cost")

Make = Callable[..., Config]

STRONG = {"name": "strong", "scale": [0.6, 1.0], "flip": False}


def losses(folder: Path) -> list[Any]:
    return [row["train_loss_epoch"] for row in rows_of(folder) if "train_loss_epoch" in row]


# ------------------------------------------------------------------------------------------------------- augmentation
@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_mixed_run_continues_bit_for_bit(
    tmp_path: Path, configuration: Make, workers: int, capsys: pytest.CaptureFixture[str]
) -> None:
    config = configuration(data__augment=STRONG, optim__label_smoothing=0.1, data__num_workers=workers)
    run(config, tmp_path / "straight")
    said = " ".join(capsys.readouterr().out.split())
    assert "Training images are also transformed by policy=randaugment erase_prob=0.25 mixup=0.8 cutmix=1.0" in said
    interrupted_at(14, config, tmp_path / "broken")
    run(config, tmp_path / "broken")
    assert_same_run(tmp_path / "broken", tmp_path / "straight")
    run(configuration(optim__label_smoothing=0.1), tmp_path / "plain")
    assert losses(tmp_path / "plain")[-1] < losses(tmp_path / "straight")[-1], "mixed images are harder"


@pytest.mark.slow
def test_several_tasks_are_mixed_with_their_own_classes(tmp_path: Path, configuration: Make, folders: Path) -> None:
    part = {"name": "folder", "batch_size": 4, "num_workers": 0}
    tasks = {
        "colours": {**part, "root": str(folders / "colours"), "augment": {"mixup": 0.5, "cutmix": 1.0}},
        "planes": {**part, "root": str(folders / "planes"), "augment": {"erase_prob": 0.5}},
    }
    config = configuration(tasks=tasks)
    run(config, tmp_path / "straight")
    interrupted_at(5, config, tmp_path / "broken")
    run(config, tmp_path / "broken")
    assert_same_run(tmp_path / "broken", tmp_path / "straight")


# --------------------------------------------------------------------------------------------------- averaged weights
def average_of(folder: Path) -> dict[str, Any]:
    held: dict[str, Any] = checkpoint.read(folder / checkpoint.NAME)["callbacks"]["WeightAverage"]
    return held


PER_STEP = {
    "lisa": {"lisa": {"num_layers": 1, "interval": 4}},
    "alast": {"alast": {"num_layers": 1, "budget_init": 0.8, "budget_min": 0.2, "budget_lr": 1e-4}},
    "bsr": {"bsr": {"blocks": [1], "drop_at": [0], "keep_rate": 0.7}},
    "lora": {"full": {}, "lora": {"rank": 2}},
    "last_stage": {"last_stage": {}},
}


@pytest.mark.slow
@pytest.mark.first(1, "exhaustive")
@pytest.mark.parametrize("method", PER_STEP)
def test_averages_continue_bit_for_bit_and_cover_the_trained_weights(
    tmp_path: Path, configuration: Make, method: str
) -> None:
    config = configuration(trainer__ema=0.9, method=PER_STEP[method])
    run(config, tmp_path / "straight")
    for step in (5, 14):
        interrupted_at(step, config, tmp_path / "broken")
    run(config, tmp_path / "broken")
    assert_same_run(tmp_path / "broken", tmp_path / "straight")
    one, other = average_of(tmp_path / "broken"), average_of(tmp_path / "straight")
    assert one["updates"] == other["updates"] == 22
    assert one["averages"].keys() == other["averages"].keys()
    assert all(torch.equal(value, other["averages"][name]) for name, value in one["averages"].items())
    state = checkpoint.read(tmp_path / "straight" / checkpoint.NAME)["state_dict"]
    assert all(not torch.equal(value, state[f"model.{name}"]) for name, value in one["averages"].items())
    if method == "last_stage":
        frozen = {name for name in state if name.startswith("model.blocks.0.")}
        assert frozen
        assert not any(f"model.{name}" in frozen for name in one["averages"]), "frozen weights have no copies"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("accumulated", "changes"),
    [
        (1, {}),
        pytest.param(2, {}, marks=pytest.mark.slow),
        pytest.param(1, {"optim__in_backward": True, "optim__grad_clip_norm": None}, marks=pytest.mark.slow),
        pytest.param(1, {"trainer__precision": "bf16", "trainer__weight_dtype": "bf16"}, marks=pytest.mark.slow),
    ],
    ids=["plain", "accumulated", "in_backward", "bf16"],
)
def test_the_average_of_all_steps_is_evaluated_and_exported(
    tmp_path: Path, configuration: Make, monkeypatch: pytest.MonkeyPatch, accumulated: int, changes: dict[str, Any]
) -> None:
    """The averages equal those that are computed in float64 from the weights after every step."""
    weights: list[dict[str, torch.Tensor]] = []
    evaluated: list[dict[str, torch.Tensor]] = []
    end, validate = Recorder.on_train_batch_end, FineTuner.validation_step

    def noted(self: Recorder, trainer: Any, module: Any, *more: Any) -> None:
        if trainer.global_step > len(weights):
            weights.append({name: t.detach().double().clone() for name, t in module.model.state_dict().items()})
        end(self, trainer, module, *more)

    def validated(self: FineTuner, *more: Any) -> None:
        if len(weights) == steps and not evaluated:
            evaluated.append({name: t.detach().clone() for name, t in self.model.state_dict().items()})
        validate(self, *more)

    monkeypatch.setattr(Recorder, "on_train_batch_end", noted)
    monkeypatch.setattr(FineTuner, "validation_step", validated)
    steps = 11 if accumulated == 1 else 6
    config = configuration(trainer__ema=0.7, trainer__epochs=1, trainer__grad_accum_steps=accumulated, **changes)
    run(config, tmp_path / "run")
    expected = weights[0]
    for number, after in enumerate(weights[1:], start=1):
        decay = min(0.7, 1 - (1 + number) ** (-2 / 3))
        expected = {name: decay * value + (1 - decay) * after[name] for name, value in expected.items()}
    assert len(weights) == average_of(tmp_path / "run")["updates"] == steps
    for name, value in average_of(tmp_path / "run")["averages"].items():
        assert value.dtype == torch.float32
        torch.testing.assert_close(value.double(), expected[name], rtol=1e-5, atol=1e-6)
    exported = load_file(tmp_path / "run" / "model.safetensors")
    for name, value in average_of(tmp_path / "run")["averages"].items():
        rounded = value.to(evaluated[0][name].dtype)
        assert torch.equal(rounded, evaluated[0][name])
        assert torch.equal(rounded, exported[name])
    state = checkpoint.read(tmp_path / "run" / checkpoint.NAME)["state_dict"]
    for name, value in weights[-1].items():
        assert torch.equal(state[f"model.{name}"].double(), value), "training continues with the plain weights"


def test_live_batch_norm_statistics_are_averaged_and_frozen_ones_are_not() -> None:
    network = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.BatchNorm2d(4, track_running_stats=False))
    network[0].requires_grad_(False)
    assert list(averaged_tensors(network)) == ["1.weight", "1.bias", "2.weight", "2.bias", "1.running_mean",
                                               "1.running_var"]  # fmt: skip
    assert ema_bytes(network, 0.9) == 4 * 6 * 4
    assert ema_bytes(network, None) == 0
    freeze_batch_norm(network)
    assert list(averaged_tensors(network)) == ["1.weight", "1.bias", "2.weight", "2.bias"]


@pytest.mark.slow
def test_averages_of_a_segmentation_network_with_live_batch_norm_continue(tmp_path: Path) -> None:
    images = write_folder(tmp_path / "shapes", {"train": 24, "val": 6, "test": 6})
    config = check(plain_segmentation(images, trainer__ema=0.9, trainer__patience=1))
    run(config, tmp_path / "straight")
    interrupted_at(3, config, tmp_path / "broken")
    run(config, tmp_path / "broken")
    assert_same_run(tmp_path / "broken", tmp_path / "straight")
    averages = average_of(tmp_path / "straight")["averages"]
    state = checkpoint.read(tmp_path / "straight" / checkpoint.NAME)["state_dict"]
    statistics = [name for name in averages if name.endswith(".running_var")]
    assert statistics
    assert all(not torch.equal(averages[name], state[f"model.{name}"]) for name in statistics)


def test_the_decay_has_timm_s_warm_up() -> None:
    timm = ModelEmaV3(nn.Linear(1, 1), decay=0.99, use_warmup=True)
    for updates in (0, 1, 2, 10, 100, 10_000):
        assert ema_decay(0.99, updates) == pytest.approx(timm.get_decay(updates + 1))


@pytest.mark.slow
def test_the_bytes_of_the_averages_are_counted(configuration: Make) -> None:
    device, method = torch.device("cpu"), {"last_stage": {}}
    plain, averaged = (configuration(trainer__ema=ema, method=method, cost__baseline="full") for ema in (None, 0.99))
    reports = [cost_only(config) for config in (plain, averaged)]
    network = kind_of(averaged).random_network(averaged.model, 10)
    apply_methods(network, build_methods(averaged))
    size = sum(4 * p.numel() for p in network.parameters() if p.requires_grad)
    size += sum(4 * t.numel() for name, t in network.named_buffers() if ".running_" in name)
    assert "ema_bytes" not in reports[0]["executed"]
    assert reports[1]["executed"]["ema_bytes"] == size
    assert reports[1]["baseline"]["executed"]["ema_bytes"] > size
    assert {**reports[1]["executed"], "ema_bytes": None} == {**reports[0]["executed"], "ema_bytes": None}
    predictor = Predictor(plain, None, 0, device)
    demands = [predictor.demand(config) for config in (plain, averaged)]
    assert demands[1].optimizer_bytes - demands[0].optimizer_bytes == size
    assert demands[1].step_bytes - demands[0].step_bytes == size
    counter = Counter(plain, 10)
    counted = [counter(config) for config in (plain, averaged)]
    assert counted[1].step_bytes - counted[0].step_bytes == counted[1].ema_bytes == size
    phases = RunPhases(plain)
    planned = [phases.demand(*pair) for pair in zip((plain, averaged), counted, strict=True)]
    assert planned[1].optimizer_bytes - planned[0].optimizer_bytes == size


# ----------------------------------------------------------------------------------------------------- early stopping
@pytest.fixture
def no_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the accuracy of the evaluations during training be 0.1, 0.3, 0.2, 0.3, 0.1, 0.4."""
    evaluate = FineTuner.on_validation_epoch_end

    def planned(self: FineTuner) -> None:
        evaluate(self)
        assert self.evaluated is not None
        accuracy = [0.1, 0.3, 0.2, 0.3, 0.1, 0.4][self.current_epoch]
        self.evaluated = self.evaluated._replace(accuracy=accuracy)

    monkeypatch.setattr(FineTuner, "on_validation_epoch_end", planned)


@pytest.mark.slow
@pytest.mark.usefixtures("no_progress")
def test_training_stops_after_epochs_without_improvement_and_stays_stopped(
    tmp_path: Path, configuration: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    config = configuration(trainer__epochs=6, trainer__patience=2, trainer__ema=0.9)
    results = run(config, tmp_path / "straight")
    said = " ".join(capsys.readouterr().out.split())
    line = (
        "Training stopped after epoch 4 of 6, because the val accuracy has not improved since epoch 2"
        " (trainer.patience=2)."
    )
    assert said.count(line) == 1
    assert "(training stopped after epoch 4 of 6: trainer.patience=2)" in said
    assert results["stopped"] == {"epoch": 4, "epochs": 6, "patience": 2}
    assert (results["accuracy"]["best"], results["accuracy"]["last"]) == (0.3, 0.3)
    assert results["totals"]["steps"] == 44
    assert read_results(tmp_path / "straight")["stopped"] == results["stopped"]
    # A run that is interrupted later in the waiting time stops in the same epoch.
    interrupted_at(40, config, tmp_path / "broken")
    run(config, tmp_path / "broken")
    assert_same_run(tmp_path / "broken", tmp_path / "straight")
    # A process that ended between the last checkpoint and results.json does not train further epochs.
    (tmp_path / "broken" / "results.json").unlink()
    again = run(config, tmp_path / "broken")
    assert (again["stopped"], again["totals"]["steps"]) == (results["stopped"], 44)
    assert_same_run(tmp_path / "broken", tmp_path / "straight")


@pytest.mark.slow
@pytest.mark.usefixtures("no_progress")
def test_patience_that_is_never_exhausted_changes_nothing(tmp_path: Path, configuration: Make) -> None:
    plain = run(configuration(trainer__epochs=6), tmp_path / "plain")
    patient = run(configuration(trainer__epochs=6, trainer__patience=4), tmp_path / "patient")
    assert_same_run(tmp_path / "plain", tmp_path / "patient")
    assert "stopped" not in plain
    assert "stopped" not in patient
