"""Tests that the programs in `scripts/` can be loaded, and that they summarize the records of the repository."""

from __future__ import annotations

import json
import random
import runpy
from pathlib import Path
from typing import Any

import pytest

from efficient_ft.cli.hydra.groups import register

REPOSITORY = Path(__file__).resolve().parents[1]
SCRIPTS = REPOSITORY / "scripts"
#: Records whose counts must be those of the current code. Records of a GPU are left out, because the attention kernels
#: of a CPU save other tensors.
RECOUNTED = [
    *sorted(file for file in (REPOSITORY / "benchmarks").glob("*.json") if not file.stem.endswith("h200")),
    *sorted(REPOSITORY.glob("results/*/records.json")),
]


def load(name: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Execute a script without its main function, and return its names."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return runpy.run_path(str(SCRIPTS / f"{name}.py"))


@pytest.mark.parametrize("name", sorted(path.stem for path in SCRIPTS.glob("*.py")))
def test_every_script_can_be_loaded(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load(name, monkeypatch)["__doc__"]


@pytest.mark.slow
@pytest.mark.parametrize("file", RECOUNTED, ids=lambda file: f"{file.parent.name}-{file.stem}")
def test_a_random_sample_of_the_recorded_counts_is_current(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recount = load("recount", monkeypatch)
    register()
    record = json.loads(file.read_text(encoding="utf-8"))
    of_study = file.name == "records.json"
    entries = recount["study_entries"](file.parent) if of_study else recount["entries"](record)
    if record.get("kind") == "step":
        assert [entry.name for entry in entries] == list(record["recipes"])
    if not entries:
        pytest.skip("This record contains no counts that need neither weights nor training.")
    assert recount["changed"](file, 1, random.Random()) == []


def test_a_changed_count_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recount = load("recount", monkeypatch)
    register()
    record = json.loads((REPOSITORY / "benchmarks" / "published_rule.json").read_text(encoding="utf-8"))
    record["tables"] = [table for table in record["tables"] if table["table"] == "bsr/3"]
    file = tmp_path / "published_rule.json"
    file.write_text(json.dumps(record), encoding="utf-8")
    assert recount["changed"](file, None, random.Random()) == []
    record["tables"][0]["rows"][0]["memory"] += 1
    file.write_text(json.dumps(record), encoding="utf-8")
    (line,) = recount["changed"](file, None, random.Random())
    assert line.startswith(f"published_rule.json: bsr/3 {record['tables'][0]['rows'][0]['row']}: recorded ")


@pytest.mark.slow
def test_new_counts_replace_old_counts_and_leave_the_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recount = load("recount", monkeypatch)
    register()
    record = json.loads((REPOSITORY / "benchmarks" / "compiled_deit_small_cpu.json").read_text(encoding="utf-8"))
    record["recipes"] = {"full": record["recipes"]["full"]}
    file = tmp_path / "step.json"
    of = record["recipes"]["full"]
    changed = {**of, "peak_bytes": 1, "executed": {**of["executed"], "peak_bytes": 1}}
    file.write_text(json.dumps({**record, "recipes": {"full": changed}}), encoding="utf-8")
    (line,) = recount["changed"](file, None, random.Random(), write=True)
    assert line.endswith(f"recorded {{'peak_bytes': 1}}, counted {{'peak_bytes': {of['executed']['peak_bytes']}}}")
    assert json.loads(file.read_text(encoding="utf-8"))["recipes"] == record["recipes"]


def test_time_to_accuracy_summarizes_a_record(monkeypatch: pytest.MonkeyPatch) -> None:
    record = json.loads((REPOSITORY / "benchmarks" / "time_to_accuracy_cpu.json").read_text(encoding="utf-8"))
    recipes = record["networks"]["deit_tiny"]["recipes"]
    summary = load("time_to_accuracy", monkeypatch)["summary"]
    rows = {line.split("  ")[0].strip(): line for line in summary(recipes).splitlines()}
    last = recipes["full"]["runs"][0]["curve"][-1][1]
    assert f"seconds to {0.95 * last:.1%}" in summary(recipes).splitlines()[0]
    assert f"{last:.2%}" in rows["full"]
    assert "not reached" in rows["bsr"]
    assert "no run of full" in summary({"bsr": recipes["bsr"]})


def test_the_record_of_searches_has_known_trials_with_their_results(monkeypatch: pytest.MonkeyPatch) -> None:
    record = json.loads((REPOSITORY / "benchmarks" / "searches_cpu.json").read_text(encoding="utf-8"))
    script = load("searches", monkeypatch)
    assert set(record["trials"]) <= {trial.name for trial in script["TRIALS"]}
    for of in record["trials"].values():
        found = of["search"]
        assert found["recipe"] in {" ".join(name.split()[:-1]) for name in found["arms"]}
        assert f"{found['test']:.1%}" in script["summary"](record["trials"])


@pytest.mark.parametrize("name", ["backbones", "encoders"])
def test_the_record_contains_all_networks_and_recipes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    script = load("backbones", monkeypatch)
    record = json.loads((REPOSITORY / "benchmarks" / f"{name}.json").read_text(encoding="utf-8"))
    assert list(record["networks"]) == list(script["networks"](name))
    recipes = list(script["LISTS"][name]["recipes"])
    assert all(list(entry["recipes"]) == recipes for entry in record["networks"].values())


def test_the_page_of_backbones_shows_all_recipes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    from docsgen.backbones import GROUPS

    shown = [recipe for group in GROUPS.values() for recipe in group]
    assert sorted(["full", *shown]) == sorted(load("backbones", monkeypatch)["LISTS"]["backbones"]["recipes"])
