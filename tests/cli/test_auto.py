"""Tests of ``efficient-ft auto``: mistakes, and a search that is interrupted and continued."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from efficient_ft.cli.commands.auto import auto, main
from efficient_ft.core.errors import UserError
from efficient_ft.search.state import read_state
from efficient_ft.search.text import command_of
from tests.training.runs import rows_of

MISTAKES = {
    "time=5m": r"The memory budget is missing\. Pass memory=SIZE",
    "memory=2GB": r"Pass either time=TIME, for example time=30m, or steps=N\.",
    "memory=2GB time=5m steps=10": r"Pass either time=TIME",
    "memory=2 time=5m": r"memory must be a number with one of the units",
    "memory=2GB time=soon": r"time must be a number with one of the units",
    "memory=2GB time=20s": r"time must be at least 1min, got 20 s",
    "memory=2GB steps=0": r"steps must be an integer >= 1, got 0",
    "memory=2GB steps=60": r"steps must be at least 100, got 60",
    "memory=2GB time=5m method=lora": r"method must be left out, because the search determines this setting, got lora",
    "memory=2GB time=5m method.lora.rank=2": r"method\.lora\.rank must be left out",
    "memory=2GB time=5m optim.lr=1e-3": r"optim\.lr must be left out",
    "memory=2GB time=5m trainer.epochs=3": r"trainer\.epochs must be left out",
    "memory=2GB time=5m trainer.patience=2": r"trainer\.patience must be left out",
    "memory=2GB time=5m resume=never": r"resume must be left out",
    "memory=2GB time=5m hydra.run.dir=x": r"hydra\.run\.dir must be left out",
    "memory=2GB time=5m trainer={max_steps:5}": r"trainer must be an option of the group",
    "memory=2GB time=5m optim=sgd": r"optim must be adam or adamw in a search, got sgd",
    "memory=2GB time=5m optim.warmup_steps=null": r"optim\.warmup_steps must be an integer in a search, got null",
    "memory=2GB time=5m data.val_fraction=0": r"data\.val_fraction must be a fraction > 0 in a search",
    "memory=2GB time=5m data.select_best_on=test": r"data\.select_best_on must be val in a search",
    "memory=2GB time=5m data=folder data.root=nowhere": r"data\.root must be a folder of images, got nowhere",
    "memory=2GB time=5m optim.learning_rate=1": r"optim\.learning_rate",
}


@pytest.mark.parametrize("words", MISTAKES)
def test_mistakes_leave_no_folder(words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=MISTAKES[words]):
        main(words.split())
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_search_finds_a_model_and_its_command_repeats_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("efficient_ft.search.search.MOST", 3)
    settings = ["model=vit_digits", "data.num_workers=0"]
    lines: list[str] = []
    state = auto(*settings, memory="4GB", steps=240, say=lines.append)
    text = "\n".join(lines)
    assert "Settings of all runs: recipe=none optim=adam" in text
    assert "data: digits, classification, 10 classes" in text
    assert "vit_digits starts from RANDOM weights" in text
    assert state.final is not None
    assert state.final.test is not None
    arm = state.arm(state.final.arm)
    (folder,) = Path("outputs/auto/digits/vit_digits").iterdir()
    assert read_state(folder) == state
    run = folder / arm.folder
    results = json.loads((run / "results.json").read_text())
    assert results["totals"]["steps"] == state.final.steps
    assert sum(one.step for one in state.arms if one is not arm) + state.final.steps == pytest.approx(240, abs=3)
    rates = [row["lr"] for row in rows_of(run) if "lr" in row]
    assert rates[-1] < 0.2 * max(rates)
    assert f"Model: {run}" in lines[-2]
    assert "test accuracy" in lines[-2]
    assert lines[-1] == f"Report: {folder / 'report' / 'report.html'}"
    page = (folder / "report/report.html").read_text()
    assert f'href="../{arm.folder}/report/report.html"' in page
    assert (run / "report/report.html").is_file()
    again = auto(*settings, memory="4GB", steps=240)
    assert again == state
    # The printed command trains the same weights alone.
    from safetensors.torch import load_file

    from efficient_ft.cli.hydra import processes

    words = [*command_of(state)[1:], "hydra.run.dir=alone"]
    assert processes.run([sys.executable, "-m", "efficient_ft", *words], {}, tmp_path / "log").failure is None
    first, second = load_file(run / "model.safetensors"), load_file("alone/model.safetensors")
    assert all(first[name].equal(second[name]) for name in first)
    capfd.readouterr()
