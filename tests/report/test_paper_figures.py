"""Tests of the papers' figures from records: they draw the numbers of the runs and report missing data."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from efficient_ft.cli.commands import run_command
from efficient_ft.core.errors import UserError
from efficient_ft.record.rows import MetricsFile
from efficient_ft.record.step_stats import step_stats_file
from efficient_ft.report.charts import Chart
from efficient_ft.report.paper_figures import FIGURES, paper_figure
from efficient_ft.report.runs import collect_paths
from tests.record.test_collection import write


def finished(folder: Path, test: float, method: dict[str, Any], flops: float, **changes: Any) -> None:
    write(folder, test, method=method, **changes)
    results = json.loads((folder / "results.json").read_text())
    results["cost"]["executed"].update(backward_flops=flops * 1e6, saved_bytes=flops * 2**20)
    results["cost"]["measured"]["peak_bytes"] = 2 * flops * 2**20
    results["totals"].update(flops=flops * 1e12, seconds=10 * flops)
    (folder / "results.json").write_text(json.dumps(results))
    rows = MetricsFile(folder)
    for step in (1, 2):
        rows.append(
            {"step": step, "epoch": step, "train_loss": 2 / step, "flops": flops * step * 1e12, "seconds": step}
        )
        rows.append({"step": step, "epoch": step, "val_accuracy": test * step / 2, "flops": flops * step * 1e12,
                     "seconds": step})  # fmt: skip


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    root = tmp_path / "runs"
    finished(root / "full", 0.9, {"full": {}}, 4)
    for order, flops, test in ((2, 1, 0.6), (4, 2, 0.8)):
        for seed in (0, 1):
            finished(root / f"lbp{order}{seed}", test + 0.02 * seed, {"lbp_wht": {"order": order}}, flops, seed=seed)
    for sparsity, prune in ((0.8, "backward"), (0.9, "backward"), (0.9, "both")):
        finished(
            root / f"razor{sparsity}{prune}", sparsity / 2, {"back_razor": {"sparsity": sparsity, "prune": prune}}, 3
        )
    for layers in (1, 2):
        finished(root / f"alast{layers}", 0.7, {"alast": {"num_layers": layers}}, layers)
        stats = step_stats_file(root / f"alast{layers}")
        for step in range(1, 5):
            trained = ["blocks.0"] if step % 2 and layers == 1 else ["blocks.0", "blocks.1"]
            row = {"step": step, "blocks": ["blocks.0", "blocks.1"], "budgets": [1.0, step / 4], "trained": trained}
            stats.append(row)
    return root


def drawn_from(name: str, *paths: Path) -> Chart:
    return paper_figure(name, collect_paths(paths))


def series(runs: Path, name: str, panel: int = 0) -> dict[str, tuple[list[Any], list[float]]]:
    return {s.name: (list(s.x), list(s.y)) for s in drawn_from(name, runs).panels[panel].series}


def test_what_is_not_drawn_is_said(runs: Path) -> None:
    for layers in (3, 4, 5, 6):
        shutil.copytree(runs / "alast1", runs / f"alast_{layers}")
        results = json.loads((runs / f"alast_{layers}/results.json").read_text())
        results["config"]["method"]["alast"]["num_layers"] = layers
        (runs / f"alast_{layers}/results.json").write_text(json.dumps(results))
    budgets = drawn_from("alast/figure_10", runs)
    assert len(budgets.panels) == 4
    assert "num_layers=" in budgets.notes[0]
    assert budgets.notes[0].startswith("The budgets of ")
    assert "are not drawn." in drawn_from("alast/figure_7", runs).notes[0]


def test_figure_5_needs_another_method_next_to_full(runs: Path) -> None:
    with pytest.raises(UserError, match="requires runs of other methods"):
        drawn_from("alast/figure_5", runs / "full")


def test_accuracy_by_order_and_its_slope(runs: Path) -> None:
    found = series(runs, "lbp_wht/figure_3")
    assert found["LBP-WHT"] == ([1.0, 2.0], pytest.approx([61, 81]))
    assert found["full"] == ([4.0], [90.0])
    assert series(runs, "lbp_wht/figure_4")["LBP-WHT"] == ([4], pytest.approx([20 / 1e-3]))


def test_accuracy_by_sparsity_tells_what_is_pruned(runs: Path) -> None:
    found = series(runs, "back_razor/figure_3")
    assert found["backward only"] == ([0.8, 0.9], pytest.approx([40, 45]))
    assert found["forward and backward"] == ([0.9], pytest.approx([45]))
    assert series(runs, "back_razor/figure_3", 1)["backward only"][1] == [3, 3]
    assert series(runs, "back_razor/figure_4")["full"] == ([1, 2], [2, 1])


def test_relative_numbers_are_those_of_full(runs: Path) -> None:
    found = series(runs, "alast/figure_5")["lbp_wht order=4"]
    assert found == (["FLOPs", "memory", "time", "accuracy"], pytest.approx([0.5, 0.5, 0.5, 81 / 90]))


def test_curves_over_flops_and_layers(runs: Path) -> None:
    assert series(runs, "alast/figure_6")["full"] == ([4, 8], pytest.approx([45, 90]))
    assert series(runs, "alast/figure_6", 1)["full"] == ([8], [90])
    assert series(runs, "alast/figure_8")["alast num_layers=2"] == ([2, 4], pytest.approx([35, 70]))
    assert series(runs, "alast/figure_9")["alast num_layers=1"] == (["0", "1"], [1, 0.5])
    assert series(runs, "alast/figure_10")["1"] == ([1, 2, 3, 4], [0.25, 0.5, 0.75, 1])
    assert len(drawn_from("alast/figure_7", runs).panels) == 2


def with_metric(folder: Path, metric: str | None, split: str = "val") -> None:
    """Change the metric and the split of a run in its results and in its curves."""
    results = json.loads((folder / "results.json").read_text())
    results["accuracy"].update({"split": split} if metric is None else {"metric": metric, "split": split})
    (folder / "results.json").write_text(json.dumps(results))
    rows = (folder / "metrics.jsonl").read_text()
    (folder / "metrics.jsonl").write_text(rows.replace("val_accuracy", f"{split}_{metric or 'accuracy'}"))


@pytest.mark.parametrize("name", ["lbp_wht/figure_3", "lbp_wht/figure_4", "back_razor/figure_3", "alast/figure_5",
                                  "alast/figure_6", "alast/figure_8", "bsr/figure_1", "bsr/figure_5"])  # fmt: skip
def test_runs_with_different_metrics_do_not_share_an_axis(runs: Path, name: str) -> None:
    with_metric(runs / "lbp20", "r2")
    with pytest.raises(UserError, match=r"requires runs with the same metric, got accuracy \(.*full.*\), R² \(lbp20\)"):
        drawn_from(name, runs)
    assert "full" in series(runs, "back_razor/figure_4"), "The loss has its own axis."


@pytest.mark.parametrize(("metric", "axis", "factor"), [("r2", "R²", 0.01), ("mean_average_precision", "mAP %", 1)])
def test_the_axis_has_the_metric_of_the_runs(runs: Path, metric: str, axis: str, factor: float) -> None:
    for folder in runs.iterdir():
        with_metric(folder, metric)
    for name in ("lbp_wht/figure_3", "back_razor/figure_3", "alast/figure_6", "bsr/figure_1", "bsr/figure_5"):
        assert drawn_from(name, runs).panels[0].y == axis
    assert series(runs, "alast/figure_6")["full"] == ([4, 8], pytest.approx([45 * factor, 90 * factor]))
    assert series(runs, "bsr/figure_1")["full"] == ([40], pytest.approx([90 * factor]))
    assert series(runs, "alast/figure_5")["lbp_wht order=4"][0][-1] == axis.removesuffix(" %")


def test_a_curve_shows_the_split_of_its_run_and_missing_curves_are_named(runs: Path) -> None:
    with_metric(runs / "alast1", None, "test")
    (runs / "lbp20/metrics.jsonl").unlink()
    chart = drawn_from("alast/figure_8", runs)
    found = {one.name: list(one.y) for one in chart.panels[0].series}
    assert found["alast num_layers=1"] == pytest.approx([35, 70])
    missing, splits = chart.notes
    assert missing == "These runs have no curve, because they did not record both flops and val_accuracy: lbp20."
    assert splits.startswith("The curves show the accuracy on different splits: test (alast1), val (alast2, full")
    assert list(drawn_from("alast/figure_6", runs).notes) == [missing, splits]
    (note,) = drawn_from("back_razor/figure_4", runs).notes
    assert note == "These runs have no curve, because they did not record both step and train_loss: lbp20."


def test_points_and_bars_of_methods(runs: Path) -> None:
    assert series(runs, "bsr/figure_1")["full"] == ([40], [90])
    assert series(runs, "bsr/figure_5")["full"] == (["vit_digits"], [90])


@pytest.mark.first(3, "slow")
@pytest.mark.parametrize("name", sorted(set(FIGURES) - {"bsr/figure_4"}))
def test_every_figure_is_written_with_its_data(runs: Path, tmp_path: Path, name: str) -> None:
    run_command("figure", [name, str(runs), "--out", str(tmp_path / "out")])
    path = tmp_path / "out" / name.replace("/", "_")
    with Image.open(path.with_suffix(".png")) as image:
        assert min(image.size) > 300
        assert len(image.convert("L").getcolors() or [None] * 257) > 8, "something is drawn"
    rows = list(csv.DictReader(path.with_suffix(".csv").read_text().splitlines()))
    drawn = drawn_from(name, runs)
    assert len(rows) == sum(len(s.x) for panel in drawn.panels for s in panel.series)


def test_runs_of_different_settings_are_never_one_point(runs: Path) -> None:
    finished(runs / "other_rate", 0.1, {"lbp_wht": {"order": 2}}, 1, optim__lr=0.5)
    for name in ("lbp_wht/figure_3", "bsr/figure_5"):
        with pytest.raises(UserError, match=r"would be one point of this figure, but differ in optim\.lr \("):
            drawn_from(name, runs)
    assert set(series(runs, "alast/figure_10")) == {"1", "0"}, "a figure that averages nothing"


def test_what_a_figure_needs_is_said(runs: Path) -> None:
    with pytest.raises(UserError, match="requires a run of full fine-tuning"):
        drawn_from("alast/figure_5", runs / "lbp20")
    with pytest.raises(UserError, match=r"at least two values of method.lbp_wht.order, got 1"):
        drawn_from("lbp_wht/figure_3", runs / "lbp20", runs / "full")
    with pytest.raises(UserError, match=r"step_stats\.interval=1"):
        drawn_from("alast/figure_9", runs / "full")
    with pytest.raises(UserError, match=r"contains no model.safetensors with the fine-tuned weights"):
        drawn_from("bsr/figure_4", runs / "full")
    with pytest.raises(UserError, match=r"figure must be one of lbp_wht/figure_3.*Did you mean 'alast/figure_9'"):
        drawn_from("alast/figure9", runs)
