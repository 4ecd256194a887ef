"""Tests of ``efficient-ft selftest``: selected trials, output, records, and the detection of broken promises."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from efficient_ft.cli.commands import selftest
from efficient_ft.core.errors import UserError
from efficient_ft.methods import METHODS
from efficient_ft.training.output import checkpoint
from tests.promises import promises
from tests.promises.methods import method_cases, methods_of
from tests.promises.runs import require_close, require_same_run
from tests.promises.trial import BrokenPromiseError, Promise, Trial, require


def _holds(folder: Path, value: float) -> dict[str, float]:
    assert not any(folder.iterdir()), "each trial has an empty folder"
    return {"largest_value": value, "kills": 1}


def _breaks(folder: Path) -> None:
    require(False, "it was lost")


def _trials(long: bool) -> Iterator[Trial]:
    yield Trial("one", _holds, (1.0,))
    yield Trial("two", _holds, (2.0,), alone=True)
    if long:
        yield Trial("three", _breaks)


@pytest.fixture
def two_promises(monkeypatch: pytest.MonkeyPatch) -> None:
    made = tuple(Promise(number, f"Promise {number}", "text", "tried", _trials) for number in (1, 2))
    monkeypatch.setattr(promises, "PROMISES", made)


@pytest.mark.usefixtures("two_promises")
def test_trials_are_counted_and_measured_by_promise(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "record.json"
    assert selftest.main(["--json", str(file)]) == 0
    assert "4 trials, 0 failed" in capsys.readouterr().out
    record = json.loads(file.read_text())
    assert record["form"] == "short"
    assert record["promises"].keys() == {"1", "2"}
    assert record["promises"]["1"]["measured"] == {"largest_value": 2.0, "kills": 2}
    assert record["promises"]["1"]["environment"]["torch"]


@pytest.mark.parametrize("jobs", ["0", "two"])
def test_a_number_of_jobs_that_cannot_be_used_is_refused(jobs: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        selftest.main(["--jobs", jobs])
    assert f"argument --jobs: must be an integer >= 1, got {jobs}" in capsys.readouterr().err


@pytest.mark.usefixtures("two_promises")
def test_a_broken_promise_is_named_and_the_others_stay_in_the_record(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "record.json"
    assert selftest.main(["--long", "1", "--json", str(file)]) == 1
    assert selftest.main(["--long", "2", "--json", str(file)]) == 1
    printed = capsys.readouterr()
    assert "3 trials, 1 failed" in printed.out
    assert "Promise 2, three:\nBrokenPromiseError: it was lost" in printed.err
    record = json.loads(file.read_text())["promises"]
    assert record["1"]["trials"] == 3
    assert [one["name"] for one in record["2"]["failed"]] == ["three"]
    with pytest.raises(UserError, match="is not the record of a short selftest"):
        selftest.main(["1", "--json", str(file)])


def test_the_record_is_written_promise_by_promise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Finished promises are recorded despite an interruption. An unwritable file is reported before the trials."""

    def interrupted(long: bool) -> Iterator[Trial]:
        raise KeyboardInterrupt

    made = (Promise(1, "1", "text", "tried", _trials), Promise(2, "2", "text", "tried", interrupted))
    monkeypatch.setattr(promises, "PROMISES", made)
    file = tmp_path / "record.json"
    with pytest.raises(KeyboardInterrupt):
        selftest.main(["--json", str(file)])
    assert json.loads(file.read_text())["promises"].keys() == {"1"}
    with pytest.raises(FileExistsError):
        selftest.main(["2", "--json", str(file / "below_a_file")])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["12"], "There is no promise 12"),
        (["1", "--only", "nothing"], "no trial has this"),
        (["1", "--only", "disk", "--json", "record.json"], "--json records whole promises"),
    ],
)
def test_mistakes_are_one_message(arguments: list[str], said: str) -> None:
    with pytest.raises(UserError, match=said):
        selftest.main(arguments)


def test_without_a_checkout_the_message_names_the_place_of_the_trials(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(selftest, "_ROOT", tmp_path)
    with pytest.raises(UserError, match=r"are in tests/promises of the repository, .* `efficient-ft selftest`"):
        selftest.main(["1"])


def test_every_method_is_tried() -> None:
    assert {name for case in method_cases() for name in methods_of(case)} == METHODS.keys()
    assert set(method_cases(long=False)) < set(method_cases())


@pytest.mark.parametrize("long", [False, True])
def test_the_names_of_a_promise_s_trials_differ(long: bool) -> None:
    for promise in promises.PROMISES:
        names = [trial.name for trial in promise.trials(long)]
        assert names
        assert len(names) == len(set(names)), promise.title
    assert [promise.number for promise in promises.PROMISES] == list(range(1, 12))


def _run(folder: Path, weight: float = 1.0, accuracy: float = 0.5, metric: float = 0.25) -> Path:
    """Write the compared files of a finished run."""
    folder.mkdir()
    tensors = {"a": torch.tensor([weight, 2.0])}
    held = {"state_dict": tensors, "optimizer_states": [{"state": {0: {"m": torch.ones(2)}}}], "lr_schedulers": [],
            "global_step": 6, "epoch": 2, "callbacks": {}}  # fmt: skip
    torch.save({**held, "efficient_ft_format": checkpoint.FORMAT}, folder / checkpoint.NAME)
    save_file(tensors, folder / "model.safetensors")
    (folder / "metrics.jsonl").write_text(json.dumps({"step": 1, "loss": metric, "seconds": id(folder)}) + "\n")
    (folder / "results.json").write_text(json.dumps({"accuracy": {"best": accuracy}}))
    return folder


def test_any_difference_of_two_runs_is_noticed(tmp_path: Path) -> None:
    one = _run(tmp_path / "one")
    require_same_run(one, _run(tmp_path / "same"))
    for number, (change, named) in enumerate(
        [({"weight": 1 + 1e-7}, "state_dict.a"), ({"accuracy": 0.6}, "accuracy"), ({"metric": 0.3}, "metrics")]
    ):
        with pytest.raises(BrokenPromiseError, match=named):
            require_same_run(one, _run(tmp_path / str(number), **change))
    near = _run(tmp_path / "near", weight=1 + 1e-6)
    assert require_close(one, near, 0.0, 1e-5) == pytest.approx(1e-6, rel=0.2)
    with pytest.raises(BrokenPromiseError, match="a differs by"):
        require_close(one, near, 0.0, 1e-7)
