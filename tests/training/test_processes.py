"""Tests of runs in two processes (DDP over gloo): they train like one process, and only one process writes.

Tests with Slurm are in tests/training/test_slurm.py.
"""

from __future__ import annotations

import hashlib
import json
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from efficient_ft.training.output import checkpoint, export
from efficient_ft.training.run import run
from tests.conftest import unwrapped
from tests.data.mask_pictures import VOID, write_folder
from tests.data.pictures import save
from tests.promises.runs import in_processes
from tests.training.runs import (
    assert_same_run,
    killed_process,
    method_states,
    plain_config,
    rows_of,
    run_by_torchrun,
    run_in_processes,
)
from tests.training.test_segmentation_run import plain_segmentation
from tests.training.test_tasks import plain_tasks
from tests.training.test_text_run import plain_text, write_place

pytestmark = pytest.mark.slow

#: Settings that disable randomness in the network.
QUIET: dict[str, Any] = {"model__drop_rate": 0.0, "model__drop_path_rate": 0.0, "model__frozen_bn": True}


def same_rows(two: Path, one: Path) -> None:
    """Assert that the recorded losses and numbers of images are equal."""
    rows = [rows_of(folder) for folder in (two, one)]
    values = [
        [(row["step"], k, v) for row in of for k, v in row.items() if "loss" in k or k == "images"] for of in rows
    ]
    assert len(values[0]) == len(values[1]) > 2
    for (*place, found), (*other, expected) in zip(*values, strict=True):
        assert place == other
        assert found == pytest.approx(expected, rel=1e-4 if "loss" in place[1] else 0), place


def test_uneven_halves_of_the_last_batch_count_by_their_images(tmp_path, configuration):
    """The last batch has 45 images: 23 in one process and 22 in the other."""
    quiet = {**QUIET, "trainer__epochs": 1, "optim__warmup_steps": 0, "optim__name": "sgd"}
    run_in_processes(plain_config(**quiet, trainer__devices=2, data__batch_size=24), tmp_path / "two")
    run(configuration(**quiet, data__batch_size=48), tmp_path / "one")
    two, one = (checkpoint.read(tmp_path / folder / checkpoint.NAME) for folder in ("two", "one"))
    assert two["global_step"] == one["global_step"] == 27
    same_rows(tmp_path / "two", tmp_path / "one")
    for key, value in one["state_dict"].items():
        torch.testing.assert_close(two["state_dict"][key], value, rtol=1e-4, atol=1e-6)


def test_a_process_without_a_validation_image_evaluates_as_the_others_do(tmp_path):
    """With one validation image, the second process repeats the image, and the copy does not count."""
    for split, count in (("train", 9), ("val", 1), ("test", 1)):
        for k in range(count):
            save(tmp_path / "images" / split / "ab"[k % 2] / f"{k}.png", 1000 * (k % 2) + k)
    quiet = {**QUIET, "trainer__epochs": 2, "optim__warmup_steps": 0, "optim__name": "sgd"}
    for name, devices, batch in (("one", 1, 4), ("two", 2, 2)):
        data = {"name": "folder", "root": str(tmp_path / "images"), "batch_size": batch, "num_workers": 0}
        run_in_processes(plain_config(**quiet, trainer__devices=devices, data=data), tmp_path / name)
    same_rows(tmp_path / "two", tmp_path / "one")
    found = [json.loads((tmp_path / name / "results.json").read_text())["accuracy"] for name in ("one", "two")]
    assert found[0] == found[1]


@pytest.mark.exhaustive  # numba compiles 20 kernels in each of five processes
def test_two_processes_choose_the_same_bits(tmp_path):
    """Each process measures its half of the images, and both choose bits from the sum. The choice is reproducible."""
    method = {"full": {}, "low_bit": {"bits": "auto", "budget": 3.3, "profile_steps": 2}}
    changes = {**QUIET, "trainer__max_steps": 4, "method": method}
    states = []
    for processes in (2, 2, 1):
        folder = tmp_path / str(len(states))
        run_in_processes(plain_config(**changes, trainer__devices=processes, data__batch_size=128 // processes), folder)
        states.append(method_states(folder)["low_bit"])
    assert states[0] == states[1]
    two, one = ({n: sum(c for *_, c in of) for n, of in state["changes"].items()} for state in (states[0], states[2]))
    ratios = [two[n] / one[n] for n in one]
    assert len(ratios) > 8
    assert all(1.4 < ratio < 6 for ratio in ratios), "the sum over two processes, not one process's own"


@pytest.mark.exhaustive
def test_two_processes_train_one_model(tmp_path):
    """Each process reads half of the images, and only one process writes files."""
    plain = plain_config(trainer__devices=2, data__batch_size=64, step_stats__interval=4)
    run_in_processes(plain, tmp_path / "run")
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert checkpoint.read(tmp_path / "run" / checkpoint.NAME)["global_step"] == 2 * 11
    assert results["data"]["accuracy"]["val"] == pytest.approx(results["accuracy"]["best"], abs=1e-6)
    rows = [json.loads(line) for line in (tmp_path / "run" / "step_stats.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 5, 9, 13, 17, 21]
    assert all(len(row["magnitudes"]) == len(row["trained"]) == 2 for row in rows)


@pytest.mark.exhaustive
def test_two_processes_train_several_tasks_as_one(tmp_path: Path, folders: Path) -> None:
    """Two processes with half batches train the same weights as one process, up to rounding."""
    exact: dict[str, Any] = {
        **QUIET,
        "optim": {"name": "sgd", "lr": 0.05, "weight_decay": 0.0, "warmup_steps": 0, "grad_clip_norm": 1.0},
    }
    halves = {task: {"batch_size": 2} for task in ("colours", "planes")}
    for name, changes in (("one", {}), ("two", {"trainer__devices": 2, "tasks": halves})):
        run_in_processes(plain_tasks(folders, **exact, **changes, trainer__max_steps=6), tmp_path / name)
    one, two = (load_file(tmp_path / name / export.NAME) for name in ("one", "two"))
    for key, value in one.items():
        torch.testing.assert_close(two[key], value, rtol=1e-4, atol=1e-5, msg=key)
    results = [json.loads((tmp_path / name / "results.json").read_text())["accuracy"] for name in ("one", "two")]
    assert results[0] == results[1]
    assert one["blocks.3.mlp.gate.planes.weight"].any()


def same_weights_and_scores(tmp_path: Path, one: dict[str, Any], two: dict[str, Any]) -> None:
    """Train `one` in one process and `two` in two processes, and compare the results."""
    for name, plain in (("one", one), ("two", two)):
        run_in_processes(plain, tmp_path / name)
    same_rows(tmp_path / "two", tmp_path / "one")
    weights = [checkpoint.read(tmp_path / name / checkpoint.NAME)["state_dict"] for name in ("one", "two")]
    for key, value in weights[0].items():
        torch.testing.assert_close(weights[1][key], value, rtol=1e-4, atol=1e-5, msg=key)
    results = [json.loads((tmp_path / name / "results.json").read_text()) for name in ("one", "two")]
    assert results[0]["data"]["splits"] == results[1]["data"]["splits"]
    for key in ("best", "last", "test"):
        assert results[1]["accuracy"][key] == pytest.approx(results[0]["accuracy"][key], abs=1e-3), key


def test_two_processes_train_a_segmentation_as_one(tmp_path: Path) -> None:
    """The halves of a batch have different numbers of labeled pixels, and each pixel has the same weight."""
    images = write_folder(tmp_path / "shapes", {"train": 24, "val": 6, "test": 6})
    for k in range(0, 24, 3):  # a third of the masks are labeled only in the upper half
        file = images / "train" / "masks" / f"{k:03}.png"
        mask = np.array(Image.open(file))
        mask[len(mask) // 2 :] = VOID
        Image.fromarray(mask).save(file)
    quiet: dict[str, Any] = {
        "model": {"frozen_bn": True},
        "method": {"full": {}},
        "optim": {"name": "sgd", "lr": 0.05, "warmup_steps": 0},
        "trainer__max_steps": 8,
    }
    one = plain_segmentation(images, **quiet)
    two = plain_segmentation(images, **quiet, trainer__devices=2, data={"batch_size": 3})
    same_weights_and_scores(tmp_path, one, two)


@pytest.mark.exhaustive
def test_two_processes_train_on_texts_as_one(tmp_path: Path) -> None:
    """The halves of a batch are padded to different lengths."""
    place = write_place(tmp_path)
    quiet: dict[str, Any] = {
        "model": {"kwargs": {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}},
        "method": {"back_razor": {"sparsity": 0.0}},
        "optim": {"name": "sgd", "lr": 0.05, "warmup_steps": 0},
        "trainer__max_steps": 8,
    }
    one = plain_text(place, **quiet)
    two = plain_text(place, **quiet, trainer__devices=2, data={"batch_size": 8})
    same_weights_and_scores(tmp_path, one, two)


@pytest.mark.slow
@pytest.mark.parametrize("lost", [pytest.param(0, marks=pytest.mark.exhaustive), 1])
def test_a_killed_process_ends_the_other_one_and_the_run_can_be_continued(lost: int, tmp_path: Path) -> None:
    plain = plain_config(**QUIET, trainer__devices=2, data__batch_size=64)
    done = killed_process(plain, tmp_path / "run", process=lost, at=15)
    assert done.returncode != 0
    if lost == 1 and done.returncode != -signal.SIGKILL:  # Lightning may kill the process at the same time
        assert "Another process of this run has ended" in unwrapped(done.stderr)
        assert "Traceback" not in unwrapped(done.stderr)
    assert checkpoint.read(tmp_path / "run" / checkpoint.NAME)["global_step"] in (11, 12)
    for folder in ("run", "straight"):
        run_in_processes(plain, tmp_path / folder)
    assert_same_run(tmp_path / "run", tmp_path / "straight")


def test_two_nodes_of_torchrun_train_as_one_process(tmp_path: Path, configuration: Any) -> None:
    quiet = {**QUIET, "trainer__max_steps": 6, "optim__warmup_steps": 0, "optim__name": "sgd"}
    two = plain_config(**quiet, trainer__num_nodes=2, data__batch_size=64)
    # The second process must not read the earlier run before the first process has moved it.
    run(configuration(**quiet, trainer__num_nodes=1, seed=5), tmp_path / "two")
    ended = run_by_torchrun({**two, "resume": "never"}, tmp_path / "two")
    assert [done.returncode for done in ended] == [0, 0], ended[0].stderr + ended[1].stderr
    assert "Results:" in ended[0].stdout
    assert "Results:" not in ended[1].stdout
    assert (tmp_path / "two.1" / "results.json").is_file()
    run(configuration(**quiet), tmp_path / "one")
    states = [checkpoint.read(tmp_path / folder / checkpoint.NAME)["state_dict"] for folder in ("two", "one")]
    for key, value in states[1].items():
        torch.testing.assert_close(states[0][key], value, rtol=1e-4, atol=1e-5)


def test_another_number_of_processes_is_refused(tmp_path: Path) -> None:
    ended = run_by_torchrun(plain_config(trainer__num_nodes=3), tmp_path / "run")
    said = "trainer.devices x trainer.num_nodes must be 2, the number of processes that torchrun started, got 1 x 3."
    assert [done.returncode for done in ended] == [1, 1]
    assert any(said in unwrapped(done.stderr) for done in ended)
    assert not (tmp_path / "run").exists()


def test_a_signal_to_one_process_stops_both_with_a_checkpoint(tmp_path: Path) -> None:
    plain = plain_config(**QUIET, trainer__devices=2, data__batch_size=64)
    done = killed_process(plain, tmp_path / "run", process=1, at=14, by=signal.SIGTERM)
    assert done.returncode == 143, done.stderr
    assert checkpoint.read(tmp_path / "run" / checkpoint.NAME)["global_step"] == 15
    for folder in ("run", "straight"):
        run_in_processes(plain, tmp_path / folder)
    assert_same_run(tmp_path / "run", tmp_path / "straight")


@pytest.mark.parametrize("state_bits", [32, pytest.param(8, marks=pytest.mark.exhaustive)])
def test_two_processes_round_weights_in_bf16_to_the_same_bits(tmp_path: Path, state_bits: int) -> None:
    """After each step, both processes have the same weights, and an interrupted run continues with the same bits."""
    kwargs = {"depth": 2, "embed_dim": 64, "num_heads": 2}
    in_bf16 = {"trainer__precision": "bf16", "trainer__weight_dtype": "bf16", "trainer__grad_accum_steps": 2}
    plain = plain_config(
        **in_bf16, model__kwargs=kwargs, trainer__max_steps=6, trainer__devices=2, data__batch_size=32,
        optim__state_bits=state_bits,
    )  # fmt: skip
    straight = in_processes(2, _hashes_of_weights, plain, tmp_path / "straight", output=tmp_path / "straight")
    assert straight[0] == straight[1]
    assert list(straight[0]) == [0, 1, 2, 3, 4, 5, 6]  # 0: after the first batch of the first step
    assert len(set(straight[0].values())) == 7
    stopped = killed_process(plain, tmp_path / "broken", process=1, at=3, by=signal.SIGTERM)
    assert stopped.returncode == 143, stopped.stderr
    assert checkpoint.read(tmp_path / "broken" / checkpoint.NAME)["global_step"] < 6
    resumed = in_processes(2, _hashes_of_weights, plain, tmp_path / "broken", output=tmp_path / "broken")
    assert resumed[0] == resumed[1] == {step: straight[0][step] for step in resumed[0]}
    assert min(resumed[0]) >= 3
    assert max(resumed[0]) == 6
    assert_same_run(tmp_path / "broken", tmp_path / "straight")
    state = checkpoint.read(tmp_path / "broken" / checkpoint.NAME)["state_dict"]
    assert state["model.blocks.0.attn.qkv.weight"].dtype == torch.bfloat16


def _hashes_of_weights(plain: dict[str, Any], folder: Path) -> dict[int, str]:
    """Train in this process, and return the hash of its weights after each batch, by step."""
    from efficient_ft.config import check
    from efficient_ft.training.callbacks.recorder import Recorder

    found: dict[int, str] = {}
    end = Recorder.on_train_batch_end

    def hashed(self: Recorder, trainer: Any, module: Any, *args: Any) -> None:
        weights = b"".join(p.detach().float().numpy().tobytes() for p in module.parameters())
        found[trainer.global_step] = hashlib.sha256(weights).hexdigest()
        end(self, trainer, module, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Recorder, "on_train_batch_end", hashed)
        run(check(plain), folder)
    return found
