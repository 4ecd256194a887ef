"""Tests of runs on several data sets in turn: their files, their resumption and their errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from efficient_ft.config import Config, check
from efficient_ft.core.errors import SettingError, UserError
from efficient_ft.methods import Full
from efficient_ft.training.module import FineTuner
from efficient_ft.training.output import checkpoint, export
from efficient_ft.training.run import run
from tests.conftest import unwrapped
from tests.training.runs import assert_same_run, interrupted_at, killed_at, plain_config, rows_of
from tests.training.test_predict import predict

BSR_MOE = {"bsr_moe": {"num_experts": 4, "top_k": 2, "blocks": [1, 3], "drop_at": [1, 2]}}


def plain_tasks(folders: Path, **changes: Any) -> dict[str, Any]:
    """Return a configuration whose epoch has six batches per data set. The four batches of `planes` are repeated."""
    small: dict[str, Any] = {
        "method": BSR_MOE,
        "model__kwargs": {"depth": 4, "embed_dim": 16, "num_heads": 2},
        "data": {},
        "trainer__epochs": 3,
    }
    plain = plain_config(**{**small, **changes})
    one = {"name": "folder", "batch_size": 4, "num_workers": 0, "augment": {"scale": [0.9, 1.0], "flip": False}}
    tasks = {task: {**one, "root": str(folders / task)} for task in ("colours", "planes")}
    plain["tasks"] = {task: {**data, **plain.get("tasks", {}).get(task, {})} for task, data in tasks.items()}
    return plain


def config_of(folders: Path, **changes: Any) -> Config:
    return check(plain_tasks(folders, **changes))


@pytest.fixture(scope="session")
def straight(tmp_path_factory: pytest.TempPathFactory, folders: Path) -> tuple[Path, dict[str, Any]]:
    """A finished run and its results. Tests must not change its folder."""
    folder = tmp_path_factory.mktemp("run") / "straight"
    return folder, run(config_of(folders), folder)


# ---------------------------------------------------------------------------------------------- behavior of a run
@pytest.mark.slow
def test_every_step_is_of_the_next_task_and_moves_nothing_of_the_others(tmp_path: Path, folders: Path) -> None:
    seen: list[tuple[int, str, set[str]]] = []

    def look(self: FineTuner, optimizer: Any) -> None:
        moved = {n for n, p in self.model.named_parameters() if p.grad is not None}
        assert self.tasks is not None
        seen.append((self.global_step, self.tasks.active, moved))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FineTuner, "on_before_optimizer_step", look)
        run(config_of(folders, method={"full": {}}, trainer__grad_accum_steps=2, trainer__epochs=2), tmp_path)
    # Three steps of two batches cover the larger data set once.
    assert [step for step, _, _ in seen] == list(range(2 * 3 * 2))
    assert [task for _, task, _ in seen] == ["colours", "planes"] * 6
    for _, task, moved in seen:
        assert {n for n in moved if n.startswith("head.")} == {f"head.{task}.weight", f"head.{task}.bias"}
        assert "blocks.0.attn.qkv.weight" in moved


@pytest.mark.slow
def test_results_are_given_by_task_and_as_their_mean(straight: tuple[Path, dict[str, Any]]) -> None:
    folder, results = straight
    accuracy = results["accuracy"]
    assert set(accuracy["tasks"]) == {"colours", "planes"}
    rows = [row for row in rows_of(folder) if "val_accuracy" in row]
    assert len(rows) == 3
    for row in rows:
        for what in ("accuracy", "loss"):
            each = [row[f"val_{what}_{task}"] for task in accuracy["tasks"]]
            assert row[f"val_{what}"] == pytest.approx(sum(each) / 2)
    best = max(rows, key=lambda row: row["val_accuracy"])
    assert accuracy["best"] == best["val_accuracy"]
    assert accuracy["last"] == rows[-1]["val_accuracy"]
    for task, of in accuracy["tasks"].items():
        assert of == {"best": best[f"val_accuracy_{task}"], "last": rows[-1][f"val_accuracy_{task}"]}
        # The exported file gives the same accuracy.
        data = results["data"]["tasks"][task]
        assert len(data["digest"]) == 8
        assert data["accuracy"]["val"] == pytest.approx(of["best"], abs=1e-6)
    assert results["data"]["tasks"]["planes"]["splits"] == {"train": 15, "val": 12}
    assert results["data"]["accuracy"]["val"] == pytest.approx(accuracy["best"], abs=1e-6)
    assert json.loads((folder / "results.json").read_text()) == results
    assert checkpoint.read(folder / checkpoint.NAME)["global_step"] == 3 * 6 * 2


@pytest.mark.slow
def test_both_tasks_are_learnt(tmp_path: Path, folders: Path) -> None:
    settings: dict[str, Any] = {"method": {"full": {}}, "model__drop_rate": 0.0, "model__drop_path_rate": 0.0}
    results = run(config_of(folders, **settings, trainer__epochs=8), tmp_path)
    assert min(of["best"] for of in results["accuracy"]["tasks"].values()) > 0.8


@pytest.mark.slow
def test_the_file_holds_all_heads_and_their_classes(
    straight: tuple[Path, dict[str, Any]], folders: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, results = straight
    weights = load_file(folder / export.NAME)
    assert weights["head.colours.weight"].shape == (2, 16)
    assert weights["head.planes.weight"].shape == (3, 16)
    assert weights["blocks.3.mlp.gate.planes.weight"].shape == (4, 16)
    assert weights["blocks.3.mlp.experts.2.fc1.weight"].shape == (64, 16)
    for task, names in (("colours", ["green", "red"]), ("planes", ["left", "middle", "right"])):
        trained = export.load(folder, task)
        assert trained.class_names == trained.tasks[task] == names
        assert trained.model(torch.zeros(1, 3, 32, 32)).shape == (1, len(names))
        assert json.loads(trained.notes["task_accuracy"])[task] == results["accuracy"]["tasks"][task]["best"]
    assert export.load(folder).class_names == ["green", "red"]
    with pytest.raises(UserError, match="has no task cats: its tasks are colours, planes"):
        export.load(folder, "cats")

    image = folders / "planes" / "val" / "left" / "0.png"
    assert predict(folder, image, "--device", "cpu") == 2
    assert "--task colours or planes" in unwrapped(capsys.readouterr().err)
    assert predict(folder, image, "--device", "cpu", "--task", "planes") == 0
    classes, _, counts = capsys.readouterr().out.partition("\n\n")
    assert {line.split()[0] for line in classes.splitlines()[1:]} == {"left", "middle", "right"}
    assert "accuracy over 1 image in class folders" in counts


def test_a_run_of_one_data_set_does_not_mention_tasks(finished: tuple[Path, Config, dict[str, Any]]) -> None:
    assert "tasks" not in yaml.safe_load((finished[0] / "config.yaml").read_text())
    assert "tasks" not in finished[2]["config"]


@pytest.mark.slow
def test_evaluate_gives_the_accuracy_of_each_task(
    straight: tuple[Path, dict[str, Any]], folders: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, results = straight
    found = run(config_of(folders, evaluate=str(folder)), folder)
    assert found["tasks"] == {task: of["accuracy"] for task, of in results["data"]["tasks"].items()}
    assert found["accuracy"] == results["data"]["accuracy"]
    shown = capsys.readouterr().out
    assert "planes val" in shown
    assert "mean val" in shown
    run(config_of(folders), folder)
    shown = capsys.readouterr().out
    assert "colours, planes in turn with bsr_moe" in shown
    assert "mean, val" in shown


@pytest.mark.slow
def test_cost_only_is_of_a_step_of_the_first_task(
    tmp_path: Path, folders: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    costs = run(config_of(folders, cost_only=True, cost__baseline="full"), tmp_path / "run")
    assert costs["executed"]["backward_flops"] > 0
    assert costs["baseline"]["executed"]["forward_flops"] > 0
    assert "2+3 classes" in capsys.readouterr().out


class _Doubled(Full):
    def total_loss(self, loss: torch.Tensor) -> torch.Tensor:
        return 2 * loss


@pytest.mark.slow
def test_a_method_s_own_loss_is_minimized_and_recorded(tmp_path: Path, folders: Path) -> None:
    """A method that doubles the loss doubles the recorded loss."""
    losses = []
    for method in (Full(), _Doubled()):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("efficient_ft.training.train.build_methods", lambda config, method=method: [method])
            patch.setattr("efficient_ft.training.callbacks.recorder.RECORD_EVERY", 1)
            config = config_of(folders, model__drop_rate=0.0, model__drop_path_rate=0.0, trainer__max_steps=1)
            folder = tmp_path / type(method).__name__
            run(config, folder)
        losses.append(json.loads((folder / "metrics.jsonl").read_text().splitlines()[0])["train_loss"])
    assert losses[1] == 2 * losses[0]


# ---------------------------------------------------------------------------------------------- resuming
@pytest.mark.slow
@pytest.mark.parametrize("step", [5, 8, 19])
def test_interrupted_anywhere_it_continues_bit_for_bit(
    step: int, tmp_path: Path, folders: Path, straight: tuple[Path, dict[str, Any]]
) -> None:
    """The interruptions cover the first and a later pass over the smaller data set."""
    interrupted_at(step, config_of(folders), tmp_path)
    run(config_of(folders), tmp_path)
    assert_same_run(tmp_path, straight[0])
    assert json.loads((tmp_path / "results.json").read_text())["accuracy"] == straight[1]["accuracy"]


@pytest.mark.slow
@pytest.mark.parametrize("workers", [pytest.param(0, marks=pytest.mark.exhaustive), 1])
def test_killed_and_resumed_equals_straight(workers: int, tmp_path: Path, folders: Path) -> None:
    changes: dict[str, Any] = {
        "method": {"bsr_moe": {**BSR_MOE["bsr_moe"], "aux_loss_coef": 0.01, "norm_topk_prob": True}},
        "trainer__grad_accum_steps": 2,
        "tasks": {"planes": {"num_workers": workers}},
    }
    plain = plain_tasks(folders, **changes)
    broken, whole = tmp_path / "broken", tmp_path / "whole"
    killed_at(10, plain, broken)
    assert checkpoint.read(broken / checkpoint.NAME)["global_step"] == 8, "in the second epoch of six steps"
    run(check(plain), broken)
    run(check(plain), whole)
    assert_same_run(broken, whole)


# ---------------------------------------------------------------------------------------------- errors
def test_the_missing_images_of_every_task_are_named(tmp_path: Path, folders: Path) -> None:
    nowhere = {task: {"root": str(tmp_path / f"no_{task}")} for task in ("colours", "planes")}
    with pytest.raises(UserError) as caught:
        run(config_of(folders, tasks=nowhere), tmp_path / "run")
    assert "no_colours" in str(caught.value)
    assert "no_planes" in str(caught.value)


def test_a_setting_of_one_task_is_named_as_such(tmp_path: Path, folders: Path) -> None:
    on_test = {task: {"select_best_on": "test"} for task in ("colours", "planes")}
    with pytest.raises(SettingError, match=r"^tasks\.colours\.select_best_on must be .*val, got test\. There are no"):
        run(config_of(folders, tasks=on_test), tmp_path / "run")


@pytest.mark.slow
def test_evaluate_refuses_other_classes(tmp_path: Path, folders: Path, straight: tuple[Path, dict[str, Any]]) -> None:
    swapped = {"colours": {"root": str(folders / "planes")}}
    with pytest.raises(UserError, match=r"the classes in .*planes.* differ from the classes of the run"):
        run(config_of(folders, evaluate=str(straight[0]), tasks=swapped), tmp_path)
    with pytest.raises(UserError, match=r"tasks\.planes\.val_fraction=0\.5 \(the run has 0\.1\)"):
        run(config_of(folders, evaluate=str(straight[0]), tasks={"planes": {"val_fraction": 0.5}}), tmp_path)
