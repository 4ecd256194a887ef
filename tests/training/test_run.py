"""Whole runs: what they leave, that they can be continued after any end, and that mistakes end them clearly."""

from __future__ import annotations

import csv
import json
import os
import shutil
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from timm.layers import HybridEmbed
from timm.models import VisionTransformer
from timm.models.vision_transformer_hybrid import ConvStem

from efficient_ft.core.errors import UserError
from efficient_ft.training import checkpoint
from efficient_ft.training.callbacks import Recorder
from efficient_ft.training.run import run

SCRIPT = """
import json, os, signal, sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from efficient_ft.config import check
from efficient_ft.training import callbacks
from efficient_ft.training.run import run
plain, folder, at = json.loads(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
callbacks.RECORD_EVERY, callbacks.STEP_CHECKPOINT_SECONDS = 4, 0.0
end = callbacks.Recorder.on_train_batch_end
def dying(self, trainer, *args):
    end(self, trainer, *args)
    if trainer.global_step == at:
        os.kill(os.getpid(), signal.SIGKILL)
callbacks.Recorder.on_train_batch_end = dying
run(check(plain), folder)
"""


def rows_of(folder: Path) -> list[dict]:
    """Metrics without wall time."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if k != "seconds"} for row in rows]


def assert_same_run(a: Path, b: Path) -> None:
    """Bit for bit: last weights, best weights, metrics, optimizer state."""
    one, other = checkpoint.read(a / checkpoint.NAME), checkpoint.read(b / checkpoint.NAME)
    assert one["state_dict"].keys() == other["state_dict"].keys()
    for name, value in one["state_dict"].items():
        assert torch.equal(value, other["state_dict"][name]), name
    for name, value in load_file(a / "model.safetensors").items():
        assert torch.equal(value, load_file(b / "model.safetensors")[name]), name
    states = (one["optimizer_states"][0]["state"], other["optimizer_states"][0]["state"])
    for key, state in states[0].items():
        assert all(torch.equal(value, states[1][key][name]) for name, value in state.items())
    assert rows_of(a) == rows_of(b)


# ---------------------------------------------------------------------------------------------- what a run leaves
def test_results_have_the_agreed_keys_and_true_values(finished):
    folder, config, results = finished
    assert json.loads((folder / "results.json").read_text()) == results
    assert set(results) == {
        "accuracy", "cost", "trainable_parameters", "total_parameters", "methods", "config", "environment", "data",
    }  # fmt: skip
    assert set(results["accuracy"]) == {"best", "last", "split"}
    groups = {
        "executed": {"forward_flops", "backward_flops", "saved_bytes"},
        "measured": {"step_seconds", "peak_bytes"},
    }
    for cost in (results["cost"], results["cost"]["full"]):
        assert {name: set(cost[name]) for name in groups} == groups
        assert all(value > 0 for name in groups for value in cost[name].values())
    # `full` is its own yardstick.
    assert results["cost"]["executed"] == results["cost"]["full"]["executed"]
    assert results["trainable_parameters"] == results["total_parameters"] > 5_000
    assert results["methods"]["full"]["touched"]
    assert results["config"] == config.model_dump(mode="json")
    evaluated = [row["val_accuracy"] for row in rows_of(folder) if "val_accuracy" in row]
    assert results["accuracy"] == {"best": max(evaluated), "last": evaluated[-1], "split": "val"}
    losses = [row["train_loss_epoch"] for row in rows_of(folder) if "train_loss_epoch" in row]
    assert losses[1] < losses[0]
    # The exported file, read anew into a plain model, gives the best epoch's accuracy.
    assert results["data"]["accuracy"]["val"] == pytest.approx(results["accuracy"]["best"], abs=1e-6)


def test_the_csv_is_the_jsonl(finished):
    folder, _, _ = finished
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    with open(folder / "metrics.csv", newline="") as file:
        table = list(csv.DictReader(file))
    assert len(table) == len(rows) == 22 // 4 + 2
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


def test_a_checkpoint_holds_plain_containers_only(finished):
    folder, _, _ = finished
    # read() loads with weights_only=True: nothing but tensors and plain containers passes.
    held = checkpoint.read(folder / checkpoint.NAME)
    assert held["global_step"] == 2 * 11


# ---------------------------------------------------------------------------------------------- continuing
def test_a_finished_run_is_shown_not_trained(finished, capsys):
    folder, config, results = finished
    before = {f.name: f.stat().st_mtime_ns for f in folder.iterdir() if f.name != "config.yaml"}
    assert run(config, folder) == results
    assert {f.name: f.stat().st_mtime_ns for f in folder.iterdir() if f.name != "config.yaml"} == before
    shown = capsys.readouterr().out
    assert "finished already" in shown
    assert f"{results['accuracy']['best']:.2%}" in shown


@pytest.mark.parametrize(
    ("changes", "killed_at"),
    [
        ({}, 18),
        pytest.param({"trainer__grad_accum_steps": 2, "data__num_workers": 2}, 10, marks=pytest.mark.slow),
    ],
)
def test_killed_in_the_middle_of_an_epoch_it_continues_bit_for_bit(
    tmp_path, configuration, finished, changes, killed_at
):
    from tests.training.conftest import plain_config

    plain = plain_config(**changes)
    broken, straight = tmp_path / "broken", tmp_path / "straight"
    config = configuration(**changes)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(plain), str(broken), str(killed_at)], capture_output=True, text=True
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert not (broken / "results.json").exists()
    held = checkpoint.read(broken / checkpoint.NAME)
    per_epoch = -(-11 // plain["trainer"].get("grad_accum_steps", 1))
    assert per_epoch < held["global_step"] < 2 * per_epoch, "the kill was meant for the middle of an epoch"
    run(config, broken)
    if changes:
        run(config, straight)
    assert_same_run(broken, straight if changes else finished[0])


def interrupted_at(step: int, config, folder: Path) -> None:
    """Run until Ctrl-C comes in optimizer step `step`."""
    end = Recorder.on_train_batch_end

    def interrupted(self, trainer, *args):
        if trainer.global_step == step:
            signal.raise_signal(signal.SIGINT)
        end(self, trainer, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Recorder, "on_train_batch_end", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run(config, folder)
    assert checkpoint.read(folder / checkpoint.NAME)["global_step"] == step


def test_ctrl_c_leaves_a_checkpoint_and_the_command_continues(tmp_path, configuration, finished, capsys):
    folder = tmp_path / "run"
    config = configuration()
    interrupted_at(14, config, folder)
    run(config, folder)
    assert "Continuing" in capsys.readouterr().out
    assert_same_run(folder, finished[0])


def test_what_a_method_learnt_continues_too(tmp_path, configuration):
    """LHE stopped while it profiles (5 steps of 8) and again after it has chosen (14): as if never stopped."""
    method = {"full": {}, "lbp_wht": {"bases": "lhe", "order": 2, "profile_steps": 8}}
    config, broken, straight = configuration(method=method), tmp_path / "broken", tmp_path / "straight"
    run(config, straight)
    interrupted_at(5, config, broken)
    interrupted_at(14, config, broken)
    run(config, broken)
    states = [checkpoint.read(folder / checkpoint.NAME)["callbacks"] for folder in (broken, straight)]
    (of_broken,), (of_straight,) = ([v for k, v in s.items() if k.startswith("lbp_wht")] for s in states)
    assert of_broken == of_straight
    assert (of_broken["steps"], of_broken["energy"]) == (8, {})
    assert len(of_broken["chosen"]) > 4
    assert_same_run(broken, straight)


@pytest.mark.parametrize("method", [{"mesa": {}}, {"swat": {"refresh_interval": 4}}], ids=["mesa", "swat"])
def test_what_packing_remembers_and_rounding_at_random_continue_too(method, tmp_path, configuration):
    config, broken, straight = configuration(method=method), tmp_path / "broken", tmp_path / "straight"
    run(config, straight)
    interrupted_at(5, config, broken)
    run(config, broken)
    assert_same_run(broken, straight)


PER_STEP = {
    "alast": {"num_layers": 1, "budget_init": 0.8, "budget_min": 0.2, "budget_lr": 0.01, "first_delta": "same"},
    "lisa": {"num_layers": 1, "interval": 4},
    "top_layers": {"num_layers": 1, "profile_steps": 8},
    "uniform_layers": {"num_layers": 1},
}


def state_of(name: str, folder: Path) -> dict:
    (state,) = (v for k, v in checkpoint.read(folder / checkpoint.NAME)["callbacks"].items() if k.startswith(name))
    return state


@pytest.mark.parametrize("name", ["alast", "lisa", "top_layers"])
def test_what_is_chosen_per_step_continues_too(name, tmp_path, configuration):
    """Stopped twice: in the middle of a profile and of steps that share a choice, and after it."""
    config = configuration(method={name: PER_STEP[name]})
    broken, straight = tmp_path / "broken", tmp_path / "straight"
    run(config, straight)
    interrupted_at(5, config, broken)
    assert name != "top_layers" or (state_of(name, broken)["steps"], state_of(name, broken)["top"]) == (5, [])
    interrupted_at(14, config, broken)
    run(config, broken)
    if name != "lisa":
        assert state_of(name, broken) == state_of(name, straight)
    if name == "alast":
        assert len({budget for budget, _ in state_of(name, broken).values()} - {0.8, 0.2, 1.0}) == 2, "they have moved"
    if name == "top_layers":
        assert len(state_of(name, broken)["top"]) == 1
    assert_same_run(broken, straight)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["alast", "top_layers"])
def test_killed_it_continues_with_its_choices(name, tmp_path, configuration):
    from tests.training.conftest import plain_config

    changes = {"method": {name: PER_STEP[name]}, "trainer__grad_accum_steps": 2}
    broken, straight = tmp_path / "broken", tmp_path / "straight"
    for killed_at in (4, 10):
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, json.dumps(plain_config(**changes)), str(broken), str(killed_at)],
            capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == -signal.SIGKILL, done.stderr
    run(configuration(**changes), broken)
    run(configuration(**changes), straight)
    assert state_of(name, broken) == state_of(name, straight)
    assert_same_run(broken, straight)


def test_resume_never_moves_the_old_run_aside(tmp_path, configuration, finished, capsys):
    folder = tmp_path / "run"
    shutil.copytree(finished[0], folder)
    old = {f.name: f.read_bytes() for f in folder.iterdir() if f.name != ".lock"}
    run(configuration(resume="never", trainer__max_steps=2), folder)
    aside = tmp_path / "run.1"
    assert {f.name: f.read_bytes() for f in aside.iterdir()} == old
    assert checkpoint.read(folder / checkpoint.NAME)["global_step"] == 2
    assert str(aside) in capsys.readouterr().out


def test_the_same_command_twice_at_once_is_refused(tmp_path, configuration):
    folder, config = tmp_path / "run", configuration(trainer__max_steps=2)
    folder.mkdir()
    code = "import sys, time; from filelock import FileLock; lock = FileLock(sys.argv[1]); lock.acquire();"
    code += "print(1, flush=True); time.sleep(60)"
    other = subprocess.Popen([sys.executable, "-c", code, str(folder / ".lock")], stdout=subprocess.PIPE)
    try:
        assert other.stdout is not None
        assert other.stdout.readline()
        with pytest.raises(UserError, match=r"is in use: the same command is running .*hydra\.run\.dir"):
            run(config, folder)
        assert [file.name for file in folder.iterdir()] == [".lock"]
    finally:
        other.kill()
        other.communicate()
    run(config, folder)
    run(configuration(resume="never", trainer__max_steps=2), folder)


def test_another_run_in_the_folder_is_refused(configuration, finished):
    with pytest.raises(UserError, match=r"optim\.lr: 0\.01 there, 0\.001 here"):
        run(configuration(optim__lr=1e-3), finished[0])


def test_max_steps_ends_the_run_at_that_step(tmp_path, configuration):
    config = configuration(trainer__max_steps=13, trainer__epochs=5)
    results = run(config, tmp_path)
    assert checkpoint.read(tmp_path / checkpoint.NAME)["global_step"] == 13
    (tmp_path / "results.json").unlink()  # killed just before the results were written
    again = run(config, tmp_path)
    assert checkpoint.read(tmp_path / checkpoint.NAME)["global_step"] == 13
    assert again["accuracy"] == results["accuracy"]


# ---------------------------------------------------------------------------------------------- damage and mistakes
def test_a_truncated_checkpoint_falls_back_to_the_one_before(tmp_path, configuration, finished, caplog, monkeypatch):
    monkeypatch.setattr("efficient_ft.training.callbacks.EPOCH_CHECKPOINT_SECONDS", 0.0)
    folder = tmp_path / "run"
    run(configuration(), folder)
    (folder / "results.json").unlink()
    latest = folder / checkpoint.NAME
    with open(latest, "rb+") as file:
        file.truncate(latest.stat().st_size // 2)
    assert checkpoint.read(latest)["global_step"] == 11
    assert "damaged" in caplog.text
    run(configuration(), folder)
    assert_same_run(folder, finished[0])


def test_damaged_checkpoints_end_in_one_clear_message(tmp_path, configuration, finished):
    folder = tmp_path / "run"
    shutil.copytree(finished[0], folder)
    (folder / "results.json").unlink()
    for file in (folder / checkpoint.NAME, checkpoint.previous(folder / checkpoint.NAME)):
        file.write_bytes(b"PK\x03\x04 not a checkpoint")
    with pytest.raises(UserError, match="resume=never"):
        run(configuration(), folder)


def test_a_loss_that_is_not_finite_stops_the_run_and_says_what_to_try(tmp_path, configuration):
    with pytest.raises(UserError, match=r"loss is (nan|inf) at step \d+ \(epoch 1.*optim\.lr") as caught:
        run(configuration(optim__lr=1e30, optim__grad_clip_norm=None, optim__warmup_steps=0), tmp_path)
    assert "optim.grad_clip_norm=1" in str(caught.value)
    assert not (tmp_path / checkpoint.NAME).exists()


def test_weights_and_data_that_are_missing_are_told_together(tmp_path, configuration, monkeypatch):
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


# ---------------------------------------------------------------------------------------------- other ways to run
def test_cost_only_needs_no_data_and_no_weights_and_leaves_nothing(tmp_path, configuration, capsys):
    config = configuration(
        cost_only=True,
        cost__compare_full=True,
        model={"name": "resnet18", "image_size": 64, "select": "last_stage"},
        data={"name": "folder", "root": str(tmp_path / "nowhere"), "batch_size": 4},
        method={"last_stage": {}},
    )
    costs = run(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()
    assert costs["executed"]["backward_flops"] < 0.5 * costs["full"]["executed"]["backward_flops"]
    shown = capsys.readouterr().out
    assert "1000 classes" in shown
    assert "full" in shown


def test_evaluate_tells_the_accuracy_on_every_split(configuration, finished, capsys):
    folder, _, results = finished
    found = run(configuration(evaluate=str(folder)), folder)
    assert found["accuracy"] == pytest.approx(results["data"]["accuracy"])
    assert set(found["accuracy"]) == {"val", "test"}
    assert "test" in capsys.readouterr().out


@pytest.mark.parametrize("what", ["nowhere", "empty"])
def test_evaluate_of_no_run_is_refused(tmp_path, configuration, what):
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=what):
        run(configuration(evaluate=str(tmp_path / what)), tmp_path)


# ---------------------------------------------------------------------------------------------- loggers
def test_wandb_offline_continues_the_same_run(tmp_path, configuration, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    end = Recorder.on_train_batch_end

    def interrupted(self, trainer, *args):
        self.stop_asked = trainer.global_step == 4
        end(self, trainer, *args)

    config = configuration(logger={"name": "wandb", "mode": "offline"}, trainer__epochs=1)
    folder = tmp_path / "group" / "name"
    with monkeypatch.context() as patch:
        patch.setattr(Recorder, "on_train_batch_end", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run(config, folder)
    run_id = (folder / "run_id").read_text().strip()
    (folder / "run_id").unlink()  # the checkpoint knows it too
    run(config, folder)
    started = sorted(p.name for p in (folder / "wandb").iterdir() if p.name.startswith("offline-run-"))
    assert len(started) == 2
    assert all(name.endswith(f"-{run_id}") for name in started)


def test_tensorboard_gets_the_metrics(tmp_path, configuration):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    run(configuration(logger={"name": "tensorboard"}, trainer__epochs=1), tmp_path)
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    row = rows_of(tmp_path)[-1]
    assert events.Scalars("val_accuracy")[0].value == pytest.approx(row["val_accuracy"])


@pytest.mark.parametrize("name", ["wandb", "tensorboard"])
def test_a_logger_that_is_not_installed_names_the_extra(tmp_path, configuration, monkeypatch, name):
    import lightning.pytorch.loggers as loggers

    class Missing:
        def __init__(self, *args, **kwargs):
            raise ModuleNotFoundError(name)

    monkeypatch.setattr(loggers, {"wandb": "WandbLogger", "tensorboard": "TensorBoardLogger"}[name], Missing)
    with pytest.raises(UserError, match=rf"pip install -e '\.\[{name}\]'"):
        run(configuration(logger={"name": name}), tmp_path)


# ---------------------------------------------------------------------------------------------- several processes
def run_in_two(plain: dict, folder: Path) -> None:
    script = (
        "import json, sys; from pathlib import Path; import torch; torch.set_num_threads(1)\n"
        "from efficient_ft.config import check\nfrom efficient_ft.training.run import run\n"
        "run(check(json.loads(sys.argv[1])), Path(sys.argv[2]))\n"
    )
    file = folder.with_name("ddp.py")
    file.write_text(script)
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    done = subprocess.run(
        [sys.executable, str(file), json.dumps(plain), str(folder)],
        capture_output=True, text=True, timeout=300, env=env,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("name", PER_STEP)
def test_two_processes_choose_and_train_as_one(name, tmp_path, configuration):
    """Nothing random in the network, SGD: 64 images on each of two processes or 128 on one."""
    from tests.training.conftest import plain_config

    quiet = {
        "model__drop_rate": 0.0,
        "model__drop_path_rate": 0.0,
        "model__frozen_bn": True,
        "trainer__max_steps": 9,
        "optim__warmup_steps": 0,
        "optim__name": "sgd",
        "method": {name: PER_STEP[name]},
    }
    run_in_two(plain_config(**quiet, trainer__devices=2, data__batch_size=64), tmp_path / "two")
    run(configuration(**quiet), tmp_path / "one")
    assert (tmp_path / "two" / "results.json").is_file(), "its cost was counted by one process alone"
    two, one = (checkpoint.read(tmp_path / folder / checkpoint.NAME)["state_dict"] for folder in ("two", "one"))
    for key, value in one.items():
        torch.testing.assert_close(two[key], value, rtol=1e-4, atol=1e-5)
    if name == "top_layers":
        assert state_of(name, tmp_path / "two")["top"] == state_of(name, tmp_path / "one")["top"] != []
    if name == "alast":
        budgets = [torch.tensor(list(state_of(name, tmp_path / folder).values())) for folder in ("two", "one")]
        torch.testing.assert_close(*budgets, rtol=1e-4, atol=1e-5)
        assert not ((budgets[0][:, 0] == 0.8) | (budgets[0][:, 0] == 0.2)).any()


@pytest.mark.slow
def test_two_processes_train_one_model(tmp_path):
    """DDP over gloo: both ranks see their half, the replicas stay equal, one of them writes."""
    from tests.training.conftest import plain_config

    run_in_two(plain_config(trainer__devices=2, data__batch_size=64), tmp_path / "run")
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert checkpoint.read(tmp_path / "run" / checkpoint.NAME)["global_step"] == 2 * 11
    assert results["data"]["accuracy"]["val"] == pytest.approx(results["accuracy"]["best"], abs=1e-6)
