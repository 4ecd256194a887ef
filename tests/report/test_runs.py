"""Tests of the page of several runs: its data, and its document in a browser."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from efficient_ft.cli.commands import run_command
from efficient_ft.core.errors import UserError
from efficient_ft.record.rows import MetricsFile
from efficient_ft.record.step_stats import step_stats_file
from efficient_ft.report.runs import MAX_POINTS, collect_paths, names_of, page_data, write_runs_page
from tests.conftest import unwrapped
from tests.record.test_collection import write

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def filled(root: Path) -> Path:
    """Write three runs of two methods with metrics. One run has budgets."""
    for name, test, changes in (
        ("a", 0.5, {"seed": 0}),
        ("b", 0.7, {"seed": 1}),
        ("c", 0.9, {"method": {"lora": {"rank": 4}}}),
    ):
        write(root / name, test, **changes)
        rows = MetricsFile(root / name)
        for step in range(1, 301):
            rows.append({"step": step, "epoch": 1, "train_loss": 3 / step, "lr": 0.1, "flops": 1e10 * step,
                         "seconds": 0.1 * step, "images": 8 * step})  # fmt: skip
        rows.append({"step": 300, "epoch": 1, "train_loss_epoch": 1.0, "val_accuracy": 0.6, "val_loss": 1.0,
                     "flops": 3e12, "seconds": 30.0, "images": 2400})  # fmt: skip
    stats = step_stats_file(root / "c")
    for step in range(1, 4):
        stats.append({"step": step, "blocks": ["blocks.0", "blocks.1"], "trained": ["blocks.1"],
                      "budgets": [0.9, 1 - 0.1 * step]})  # fmt: skip
    results = json.loads((root / "b/results.json").read_text())
    results["totals"]["flops"] = 5e12
    (root / "b/results.json").write_text(json.dumps(results))
    (root / "d").mkdir()
    shutil.copy(root / "a/config.yaml", root / "d")
    return root


def test_names_tell_runs_of_a_method_from_each_other(tmp_path: Path) -> None:
    lora = {"rank": 4, "alpha": 8}
    changes: dict[str, dict[str, Any]] = {
        "a": {"method": {"full": {}}},
        "b": {"method": {"lora": lora}},
        "c": {"method": {"lora": {**lora, "rank": 8}}},
        "d": {"method": {"lora": {**lora, "alpha": 16}}, "optim__lr": 0.5, "optim__weight_decay": 0.1},
    }
    for name, change in changes.items():
        write(tmp_path / name, 0.5, seed=0, **change)
    names = names_of(collect_paths([tmp_path]).runs)
    assert len(set(names)) == 4, "also of runs that differ in four settings"
    assert names[0] == "full seed=0", "what tells the others from each other says nothing about this one"
    for part in ("rank=4", "alpha=16", "lr=0.5", "weight_decay=0.1", "seed=0"):
        assert part in names[3].split()


def test_the_page_has_every_run_with_its_curves(tmp_path: Path) -> None:
    root = filled(tmp_path / "</script>")
    found = page_data(collect_paths([root]))
    assert [run["name"] for run in found["runs"]] == ["full seed=0", "full seed=1", "lora seed=233"]
    assert [run["accuracy"] for run in found["runs"]] == [50, 70, 90]
    assert found["runs"][0]["colour"] == found["runs"][1]["colour"] != found["runs"][2]["colour"]
    rows = found["runs"][0]["rows"]
    assert len(rows) == MAX_POINTS + 1, "the loss, and the accuracy of the one epoch"
    assert rows[0] == {"step": 1, "epoch": 1, "TFLOPs": 0.01, "seconds": 0.1, "images": 8, "loss": 3.0}
    assert rows[-1]["accuracy %"] == 60
    assert found["runs"][2]["budgets"] == {"steps": [1, 2, 3], "blocks": ["0", "1"],
                                           "values": [[0.9, 0.9], [0.9, 0.8], [0.9, 0.7]]}  # fmt: skip
    assert "joules" not in found["costs"], "no machine measured it"
    assert any("Running, interrupted and failed runs are not included: " in note for note in found["notes"])
    page = write_runs_page([root], tmp_path / "out").read_text(encoding="utf-8")
    assert page.count("</script>") == 2, "a name cannot end the script"
    assert not re.search(r"https?://(?!www\.w3\.org)", page), "needs no network"


def test_curves_keep_the_best_epoch_among_many_rows_of_steps(tmp_path: Path) -> None:
    write(tmp_path / "a", 0.9)
    rows = MetricsFile(tmp_path / "a")
    for epoch in range(1, 301):
        for step in range(8 * epoch - 7, 8 * epoch + 1):
            rows.append({"step": step, "epoch": epoch, "train_loss": 1 / step})
        rows.append({"step": 8 * epoch, "epoch": epoch, "val_accuracy": 0.9 if epoch == 198 else 0.5})
    (run,) = page_data(collect_paths([tmp_path / "a"]))["runs"]
    accuracies = [row["accuracy %"] for row in run["rows"] if "accuracy %" in row]
    assert MAX_POINTS <= len(accuracies) <= MAX_POINTS + 1
    assert max(accuracies) == 90
    assert sum("loss" in row for row in run["rows"]) == MAX_POINTS


def test_runs_of_the_same_name_keep_their_own_curves_and_count_once(tmp_path: Path) -> None:
    for folder, accuracy in (("A", 0.1), ("B", 0.9)):
        write(tmp_path / folder / "x", accuracy, seed=int(10 * accuracy))
        MetricsFile(tmp_path / folder / "x").append({"step": 1, "epoch": 1, "val_accuracy": accuracy})
    for paths in ([tmp_path / "A", tmp_path / "B"], [tmp_path / "A/x", tmp_path / "B/x", tmp_path / "A"]):
        found = collect_paths(paths)
        assert [run.folder for run in found.runs] == [f"{tmp_path.as_posix()}/{name}/x" for name in "AB"]
        data = page_data(found)
        assert [run["rows"][0]["accuracy %"] for run in data["runs"]] == [run["accuracy"] for run in data["runs"]]


def test_runs_and_folders_of_runs_may_be_mixed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = filled(tmp_path / "runs")
    found = page_data(collect_paths([root / "a", root / "c"]))
    assert [run["name"] for run in found["runs"]] == ["full seed=0", "lora seed=233"]
    assert all(run["rows"] for run in found["runs"])
    run_command("report", [str(root), "--out", str(tmp_path / "out")])
    assert capsys.readouterr().out.strip() == str(tmp_path / "out" / "report.html")
    with pytest.raises(UserError, match="does not exist"):
        write_runs_page([tmp_path / "none"], tmp_path / "out")


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_a_browser_draws_sorts_and_marks(tmp_path: Path) -> None:
    page = write_runs_page([filled(tmp_path / "runs")], tmp_path)
    drawn = dom(page)
    assert 'data-drawn="yes"' in drawn
    scatter = drawn[drawn.index('id="scatter"') : drawn.index('id="curves"')]
    assert scatter.count("<circle") == 3
    assert "joins the runs that no other run beats in both: lora seed=233" in scatter
    curves = drawn[drawn.index('id="curves"') : drawn.index('id="budgets"')]
    assert curves.count('class="curve') == 3
    assert drawn[drawn.index('id="budgets"') : drawn.index("<h2>Runs")].count('class="curve') == 2
    assert first_column(drawn) == ["c", "b", "a"], "the most accurate first"
    script = """
      [...document.querySelectorAll("th button")].find(b => b.textContent === "run").click();
      [...document.querySelectorAll("th button")].find(b => b.textContent === "run").click();
      document.querySelectorAll("#runs tbody tr")[0].click();
      document.getElementById("scale").value = "logarithmic";
      document.getElementById("scale").dispatchEvent(new Event("change"));
    """
    changed = page.with_name("changed.html")
    changed.write_text(page.read_text(encoding="utf-8").replace("</body>", f"<script>{script}</script></body>"))
    after = dom(changed)
    assert first_column(after) == ["a", "b", "c"]
    assert re.search(r'<tr class="chosen"><td class="word">a<', after)
    assert after.count('class="other"') >= 2


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_runs_on_different_data_have_fronts_of_their_own(tmp_path: Path) -> None:
    write(tmp_path / "a", 0.9, seed=0)
    write(tmp_path / "b", 0.4, seed=0, data__name="cifar10")
    drawn = dom(write_runs_page([tmp_path], tmp_path))
    scatter = drawn[drawn.index('id="scatter"') : drawn.index('id="curves"')]
    assert scatter.count('class="front"') == 2
    assert re.search(r"that no other run beats in both: on digits: .*; on cifar10: ", scatter)


def dom(page: Path) -> str:
    """Return the document after its scripts have run."""
    assert CHROMIUM is not None
    command: list[Any] = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom", page.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


def first_column(document: str) -> list[str]:
    body = document[document.index("<tbody>") :]
    return re.findall(r'<tr[^>]*><td class="word">(\w+)<', body)


def test_a_page_that_cannot_be_written_names_the_option(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = filled(tmp_path / "runs")
    (tmp_path / "file").touch()
    for out in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(SystemExit) as left:
            run_command("report", [str(runs), "--out", str(out)])
        assert left.value.code == 2
        said = unwrapped(capsys.readouterr().err).strip()
        assert said.startswith(f"The file {out}")
        assert said.endswith("Change --out.")
