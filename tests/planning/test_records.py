"""Tests of the records of plans and studies."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

from efficient_ft.core.errors import UserError
from efficient_ft.planning.calibration import FILE, calibration, calibration_text, record
from efficient_ft.planning.prior import points_lost
from tests.planning.common import a_plan, configure

REPOSITORY = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.usefixtures("wide")


def test_what_rows_lost_comes_from_the_finished_studies() -> None:
    assert all(value == 0 for value in points_lost("full").values())
    assert points_lost("head")["DeiT-Tiny on Caltech-101, 112 px, 2 epochs"] > 5
    assert points_lost(None) == points_lost("no such row") == {}


@pytest.mark.slow
def test_the_table_of_studies_is_current(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(REPOSITORY / "scripts"))
    recording = importlib.import_module("recording")
    rows = json.loads((REPOSITORY / "efficient_ft/planning/prior.json").read_text(encoding="utf-8"))
    assert rows == json.loads(json.dumps(recording.prior())), "run: python scripts/docs.py --record prior"


@pytest.mark.parametrize("line", ["{", "[]", '{"run": 3}', "[" * 100_000, "\udcff"])
def test_damaged_records_of_plans_are_refused(line: str, tmp_path: Path) -> None:
    (tmp_path / FILE).write_bytes(line.encode(errors="surrogateescape"))
    with pytest.raises(UserError, match=r"plans\.jsonl is damaged \(.*\)\. Remove the line"):
        calibration([tmp_path])


@pytest.mark.exhaustive
@pytest.mark.usefixtures("three")
def test_predictions_stand_next_to_what_runs_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from efficient_ft.training.run import run

    with pytest.raises(UserError, match="has no plans"):
        calibration([tmp_path])
    found = a_plan()
    record(found, tmp_path)
    assert (tmp_path / FILE).read_text().count("\n") == len(found.options)
    with pytest.raises(UserError, match="None of the planned runs has finished"):
        calibration_text([tmp_path])
    (full,) = [one for one in found.options if one.name == "full"]
    results = run(configure([*full.arguments, "memory=100GB", "trainer.progress=false"]), tmp_path / "run")
    assert results["memory"]["budget_bytes"] == 100 * 10**9
    assert results["memory"]["predicted_peak_bytes"] < 100 * 10**9
    (pair,) = calibration([tmp_path])
    assert pair["memory"] == (full.process_bytes, results["memory"]["peak_bytes"])
    assert pair["counted"][0] == pytest.approx(pair["counted"][1], rel=0.02)
    assert pair["within_budget"]
    assert "1 planned runs have finished. 0 of these runs exceeded their budget." in calibration_text([tmp_path])
