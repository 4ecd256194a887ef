"""Tests of text reports: committed reports print, ratios are consistent, and a busy machine is reported."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from efficient_ft.bench.tables import report_text
from tests.conftest import REPOSITORY

pytestmark = pytest.mark.usefixtures("wide")

#: The kinds of benches. Other records in benchmarks/ are counts, which the documentation shows.
KINDS = {"step", "layer", "loop", "gradient", "optimizer", "overhead"}
REPORTS = sorted(
    path
    for path in (REPOSITORY / "benchmarks").glob("*.json")
    if json.loads(path.read_text(encoding="utf-8")).get("kind") in KINDS
)


def test_there_are_committed_reports_of_each_kind():
    kinds = {json.loads(path.read_text(encoding="utf-8"))["kind"] for path in REPORTS}
    assert kinds == KINDS


@pytest.mark.parametrize("path", REPORTS, ids=lambda path: path.stem)
def test_committed_reports_print(path):
    report = json.loads(path.read_text(encoding="utf-8"))
    text = report_text(report)
    names = next(report[k] for k in ("recipes", "shapes", "jobs", "optimizers") if report.get(k))
    assert all(name in text for name in names)
    load = report["environment"].get("load")
    busy = load is not None and load > 0.5 and report["kind"] != "gradient"
    assert ("The machine was busy" in text) == busy
    if busy:
        assert f"the load at the start ({load:.1f})" in text


def step_report(load: float) -> dict[str, Any]:
    def part(median: float, faster: float) -> dict[str, Any]:
        spread = {"median": median, "q1": median, "q3": median}
        return {**spread, "seconds": [median] * 3, "times_faster": {"median": faster}}

    def recipe(median: float, faster: float, flops: float) -> dict[str, Any]:
        measured = {name: part(median, faster) for name in ("forward", "backward", "step")}
        counted = {"backward_flops": flops, "saved_bytes": 2**20}
        return {"measured": measured, "executed": counted, "peak_bytes": 2**21}

    recipes = {"plain": recipe(0.1, 1.0, 2e6), "quick": recipe(0.04, 2.5, 1e6)}
    about = {"kind": "step", "model": "m", "batch": 3, "dtype": "fp32", "baseline": "plain"}
    return {**about, "recipes": recipes, "environment": {"load": load}, "notes": ["a note"]}


def test_a_ratio_is_the_recipe_divided_by_the_baseline():
    *_, head, _, plain, quick, note = report_text(step_report(0.5)).splitlines()
    assert [head.count(f"× the {what}") for what in ("step time", "backward time", "backward FLOPs")] == [1, 1, 1]
    milliseconds = ["100", "[100–100]"]
    parts = [
        "plain",
        *milliseconds,
        "1.00×",
        *milliseconds,
        "1.00×",
        "1.00×",
        "3.00",
        "MiB",
        "2.00",
        "MiB",
        "2.00",
        "M",
    ]
    assert plain.split() == [*parts, *milliseconds, "–", "–"]
    assert [word for word in quick.split() if word.endswith("×")] == ["0.40×", "0.40×", "0.50×"]
    assert note == "note: a note"


def test_each_precision_has_its_own_baseline():
    report = step_report(0.1)
    report["recipes"]["plain"]["baseline"] = "plain"
    report["recipes"]["quick"].update(baseline="quick", dtype="bf16")
    *_, plain, quick, _ = report_text(report, ["× the backward FLOPs"]).splitlines()
    assert (plain.split()[-1], quick.split()[-1]) == ("1.00×", "1.00×")
    assert "baseline: plain and quick" in report_text(report)


def test_a_busy_machine_is_noted_under_the_table():
    last = report_text(step_report(0.51)).splitlines()[-1]
    assert last.startswith("note: The machine was busy: the load at the start (0.5) was above 0.5.")


def test_process_memory_is_next_to_counted_bytes():
    report = step_report(0.1)
    memory = {"growth_bytes": 3 * 2**20, "before_bytes": 2**30, "device": None}
    report["recipes"]["quick"]["process"] = {"memory": memory, "counted_bytes": 2 * 2**20}
    *_, head, _, plain, quick, _ = report_text(report, ["process", "counted"]).splitlines()
    assert head.split() == ["recipe", "process", "process", "/", "counted"]
    assert plain.split() == ["plain", "–", "–"]
    assert quick.split() == ["quick", "3.00", "MiB", "1.50×"]


def test_memory_on_a_device_is_what_is_reserved_there():
    device = {"before_bytes": 2**20, "allocated_bytes": 6 * 2**20, "reserved_bytes": 9 * 2**20}
    record = {
        "interpreter_bytes": 700 * 2**20,
        "with_model_bytes": 800 * 2**20,
        "counted_bytes": 5 * 2**20,
        "memory": {"growth_bytes": 8 * 2**20, "before_bytes": 900 * 2**20, "device": device},
        "step_seconds": 0.25,
        "optimizer": "adamw",
    }
    about = {"kind": "memory", "model": "m", "batch": 3, "dtype": "fp32", "attention": "unfused", "notes": []}
    report = {**about, "recipes": {"one": record, "lost": {"failure": "killed"}}}
    *_, head, _, one, lost = report_text(report).splitlines()
    assert "allocated  reserved" in head
    sizes = "8.00 MiB|5.00 MiB|1.60×|250 ms|6.00 MiB|9.00 MiB|700 MiB|800 MiB|900 MiB"
    assert re.split(r"\s{2,}", one) == ["one", *sizes.split("|")]
    assert lost.split() == ["lost", *["–"] * 9]
