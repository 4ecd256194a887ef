"""Tests of untrusted files with payloads: no command that reads them executes code."""

from __future__ import annotations

import contextlib
import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from efficient_ft.cli.commands import collect, predict, report
from efficient_ft.config import ModelConfig
from efficient_ft.core.errors import UserError
from efficient_ft.models import factory
from efficient_ft.training.evaluate import evaluate
from efficient_ft.training.output import checkpoint, export
from efficient_ft.training.run import run
from tests.promises.payloads import Payload, array, pickled, saved


@pytest.fixture
def mark(tmp_path: Path) -> Path:
    """The path of the file that a payload creates."""
    return tmp_path / "MARK"


def test_the_payload_works(mark: Path) -> None:
    pickle.loads(pickle.dumps(Payload(str(mark)))).close()
    assert mark.exists()


FORMS = [pickled, saved, array]
Write = Callable[[Path, str], None]
_RUN_FILES = ["checkpoint.ckpt", "model.safetensors", "results.json", "config.yaml", "images", "run_id"]


@pytest.fixture
def given(finished: Any, tmp_path: Path) -> Path:
    """An untrusted run folder."""
    return Path(shutil.copytree(finished[0], tmp_path / "given"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "write"),  # ``efficient-ft selftest 7`` tests all combinations
    list(zip(_RUN_FILES, FORMS * 2, strict=True)),
)
def test_no_file_of_a_run_folder_is_unpickled(
    write: Write, name: str, given: Path, mark: Path, finished: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    write(given / name, str(mark))
    for file in (checkpoint.previous(given / checkpoint.NAME), given / "metrics.jsonl", given / "run_id"):
        write(file, str(mark))
    image = given / "image.png"
    image.write_bytes(b"")
    resumed = given.with_name("resumed")
    shutil.copytree(given, resumed)
    (resumed / "results.json").unlink()
    for command in (
        lambda: evaluate(given),
        lambda: predict.main([str(given), str(image)]),
        lambda: report.main([str(given)]),
        lambda: collect.main([str(given.parent)]),
        lambda: run(finished[1], given),
        lambda: run(finished[1], resumed),
    ):
        with contextlib.suppress(UserError):
            command()
        assert not mark.exists(), "code in a file was executed"
    capsys.readouterr()


@pytest.mark.slow
def test_links_in_a_run_folder_are_not_written_through(
    given: Path, finished: Any, tmp_path: Path, without_cost: None
) -> None:
    """A run replaces links in its folder and does not write to their targets."""
    victim, place = tmp_path / "victim", tmp_path / "run"
    victim.write_text("kept")
    place.mkdir()
    names = sorted(file.name for file in given.iterdir() if file.name != ".lock")
    for name in names:
        (place / f"{name}.tmp").symlink_to(victim)
    for name in ("metrics.csv", "run_id", "model.safetensors"):
        (place / name).symlink_to(tmp_path / "nowhere")
    run(finished[1], place)
    assert victim.read_text() == "kept"
    assert not (tmp_path / "nowhere").exists()
    assert all((place / name).is_file() and not (place / name).is_symlink() for name in names)
    report.main([str(place)])
    predictions = tmp_path / "predictions"
    predictions.mkdir()
    shutil.rmtree(place / "report")
    (place / "report").symlink_to(predictions)
    with pytest.raises(UserError, match=r"report is a link to .*Remove the link, or choose another folder\."):
        report.main([str(place)])
    assert list(predictions.iterdir()) == []


@pytest.mark.parametrize("name", ["metrics.jsonl", "step_stats.jsonl", "tensorboard", ".lock"])
def test_a_run_does_not_append_through_a_link(name: str, finished: Any, tmp_path: Path) -> None:
    victim, place = tmp_path / "victim", tmp_path / "run"
    victim.write_text("kept")
    place.mkdir()
    (place / name).symlink_to(victim)
    with pytest.raises(UserError, match=rf"{name} is a link to"):
        run(finished[1], place)
    assert victim.read_text() == "kept"


@pytest.mark.parametrize(
    ("name", "write"), list(zip(["w.pth", "w.pt", "w.bin", "w.ckpt", "w.safetensors", "w.npz"], FORMS * 2, strict=True))
)
def test_no_file_of_weights_is_unpickled(write: Write, name: str, tmp_path: Path, mark: Path) -> None:
    file = tmp_path / name
    write(file, str(mark))
    with pytest.raises(UserError) as caught:
        factory.create_model(ModelConfig(name="vit_tiny_patch16_224", weights=str(file)), 3)
    assert not mark.exists(), "code in a file was executed"
    assert str(file) in str(caught.value)
    assert "weights_only" not in str(caught.value)


@pytest.mark.parametrize("weights", [{"head.weight": "a"}, {"head.weight": None}, ["a"], {1: torch.ones(1)}])
def test_a_checkpoint_without_weights_is_one_message(weights: Any, tmp_path: Path) -> None:
    torch.save({"state_dict": weights, "efficient_ft_format": checkpoint.FORMAT}, tmp_path / checkpoint.NAME)
    with pytest.raises(UserError, match="the file is not a checkpoint of a run"):
        checkpoint.read(tmp_path / checkpoint.NAME)


def test_class_names_do_not_reach_the_terminal_as_they_are(
    given: Path, digit: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Escape sequences in class names are printed as text, because a terminal would execute them."""
    file = given / export.NAME
    with safe_open(file, "pt") as opened:
        about = opened.metadata()
    names = [f"\x1b[2J{k}\x9b5n\u202e\n/other.png" for k in range(10)]
    save_file(load_file(file), file, {**about, "class_names": json.dumps(names)})
    predict.main([str(given), str(digit), "--top", "10"])
    printed = capsys.readouterr().out
    assert not set(printed) & set("\x1b\x9b\u202e")
    assert printed.count("\\x1b[2J") == 10
    assert "\n/other.png" not in printed, "a name could look like another file"


@pytest.fixture
def digit(tmp_path: Path) -> Path:
    from PIL import Image

    from efficient_ft.data.digits import load_digits

    file = tmp_path / "digit.png"
    Image.fromarray((load_digits()[0][3] * 15).astype(np.uint8)).convert("RGB").save(file)
    return file
