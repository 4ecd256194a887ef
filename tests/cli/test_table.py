"""Tests of ``efficient-ft table``: listed tables, commands, costs, runs and their report."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import timm
from torch import nn

from efficient_ft.cli.commands import table, table_costs
from efficient_ft.cli.commands.table_costs import cost_cells
from efficient_ft.core.errors import UserError
from efficient_ft.papers.published import chosen_rows, published_table, table_names
from tests.cli.program import REPOSITORY, composed
from tests.record.some import some_results

pytestmark = pytest.mark.usefixtures("wide")


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    table.main(list(arguments))
    return capsys.readouterr().out


def test_the_list_has_every_table_and_figure_and_what_can_be_done_here(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    lines = printed(capsys).splitlines()
    for name in (*table_names(), "alast/figure_9"):
        assert any(line.startswith(f"{name} ") for line in lines), name
    text = next(line for line in lines if line.startswith("back_razor/6 "))
    assert "costs; 0 of 2 runs: not in ./data: rte" in text
    segmentation = next(line for line in lines if line.startswith("lbp_wht/3 "))
    assert "costs; 0 of 24 runs: not in ./data: cityscapes, voc2012_aug" in segmentation
    missing = next(line for line in lines if line.startswith("bsr/3 "))
    assert "costs; 0 of 6 runs: not in ./data: cifar10, cifar100" in missing
    assert next(line for line in lines if line.startswith("bsr/1 ")).split()[-2:] == ["costs", "3"]
    rows = json.loads(printed(capsys, "--form", "json"))
    assert {row["table"] for row in rows} >= set(table_names())


def test_costs_have_numbered_reasons_in_a_terminal_and_whole_ones_as_data(capsys: pytest.CaptureFixture[str]) -> None:
    shown = printed(capsys, "back_razor/4", "--cost")
    assert re.search(r"ft_full +22631 +1\n", shown)
    assert shown.count("benchmarks/memory_vit_base_unfused_h200.json") == 1
    assert "\n- 1: GPU memory MB: The paper measured " in shown
    assert "\n% 1: GPU memory MB: The paper measured " in printed(capsys, "back_razor/4", "--cost", "--form", "latex")
    rows = json.loads(printed(capsys, "back_razor/4", "--cost", "--form", "json"))
    assert all(row["reason"].endswith("other sparsities and FT-Last were not measured") for row in rows)


def test_what_a_row_is_compared_with_is_counted_ahead_and_nothing_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[tuple[str, ...]] = []
    monkeypatch.setattr(table_costs, "_known", {})
    monkeypatch.setattr(table_costs, "_counted", lambda arguments: counted.append(arguments))
    several = published_table("bsr/6")
    baseline, ours = chosen_rows(several, ["vit_b_moe.moe_baseline", "vit_b_moe.moe_ours"])
    shown: list[tuple[int, int]] = []
    for _ in range(2):
        assert list(table_costs.count_rows(several, [ours], 1, lambda done, of: shown.append((done, of)))) == [ours]
    assert counted == [ours.arguments, baseline.arguments]
    assert shown == [(0, 2), (1, 2), (1, 2), (2, 2)]
    measured = published_table("back_razor/4")
    assert len(list(table_costs.count_rows(measured, measured.rows, 1))) == len(measured.rows)
    assert len(counted) == 2, "its memory is measured"


@pytest.mark.slow
def test_saved_bytes_are_counted_at_the_batch_size_of_the_run() -> None:
    """In bf16, the casts of the weights are saved once per batch, so their size per image depends on the batch size."""
    arguments = ("model=deit_tiny", "data=cifar10", "recipe=bsr_deit/cifar10", "method=full")
    few, many = table_costs._counted((*arguments, "data.batch_size=2")), table_costs._counted(arguments)
    assert (few.batch_size, many.batch_size) == (2, 128)
    modules = timm.create_model("deit_tiny_patch16_224", num_classes=10).modules()
    casts = sum(2 * module.weight.numel() for module in modules if isinstance(module, nn.Linear | nn.Conv2d))
    assert few.saved_bytes - many.saved_bytes == pytest.approx(casts * (1 / 2 - 1 / 128), rel=0.01)


@pytest.mark.slow
def test_processes_count_the_same_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_costs, "_known", {})
    flowers = published_table("alast/7")
    rows = chosen_rows(flowers, ["deit_t.ft_head", "deit_t.tome"])
    assert list(table_costs.count_rows(flowers, rows, 2)) == list(rows)
    assert table_costs._known == {row.arguments: table_costs._counted(row.arguments) for row in rows}


@pytest.mark.parametrize("weights", [True, False])
def test_runs_need_data_and_weights(monkeypatch: pytest.MonkeyPatch, weights: bool) -> None:
    monkeypatch.setattr(table, "present", lambda data, root: (data, root) == ("cifar10", "elsewhere"))
    monkeypatch.setattr(table, "_weights", lambda model, of_task: weights)
    state = table.state_of(published_table("bsr/3"), "elsewhere")
    assert state == (
        "costs; 3 of 6 runs: not in elsewhere: cifar100"
        if weights
        else "costs; 0 of 6 runs: not in elsewhere: cifar100; missing weights: deit_small"
    )


def test_the_list_says_what_the_data_in_a_folder_allow(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(table, "present", lambda data, root: (data, root) == ("cifar10", "DIR"))
    monkeypatch.setattr(table, "_weights", lambda model, of_task: True)
    listed = {row["table"]: row["here"] for row in csv.DictReader(io.StringIO(
        printed(capsys, "data.root=DIR", "--form", "csv")))}  # fmt: skip
    assert listed["bsr/3"] == "costs; 3 of 6 runs: not in DIR: cifar100"
    with pytest.raises(UserError, match="The table must come first"):
        table.main(["data.root=DIR", "seed=1"])


def test_a_table_is_shown_as_printed_with_what_differs_here(capsys: pytest.CaptureFixture[str]) -> None:
    shown = printed(capsys, "back_razor/1")
    assert re.search(r"ft_full .* 366 +FT-Full\n", shown)
    assert "The published network was pretrained with GroupNorm" in " ".join(shown.split())
    assert "the accuracy on Cars increases" in shown
    rows = list(csv.DictReader(io.StringIO(printed(capsys, "bsr/3", "--form", "csv", "--rows", "ours"))))
    assert [(row["row"], row["acc_cifar10"]) for row in rows] == [("ours", "97.5")]
    assert "\\toprule" in printed(capsys, "bsr/3", "--form", "latex")
    assert printed(capsys, "bsr/3", "--form", "markdown").count("| --- | --: |") == 1


def test_tables_of_formulas_and_sizes_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert re.search(r"vanilla_bp +vanilla_bp +4C_xC_yL.* Vanilla BP\n", printed(capsys, "lbp_wht/1"))
    assert printed(capsys, "bsr/1", "--cost").count("0.87") >= 1
    for row in published_table("bsr/1").rows:
        (cell,) = cost_cells(published_table("bsr/1"), row)
        assert round(cell.rule or 0, 2) == cell.printed


def test_commands_are_those_of_the_cells(capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed(capsys, "alast/7", "--commands", "--rows", "deit_t.alast", "--seeds", "0,1", "data.root=DIR")
    assert lines.splitlines() == [
        "efficient-ft model=deit_tiny data=flowers102 recipe=alast/flowers102 method=alast method.alast.num_layers=9"
        f" published=0.79 seed={seed} data.root=DIR"
        for seed in (0, 1)
    ]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["lbp_wth/2"], "table must be one of lbp_wht/1"),
        (["lbp_wht/figure_5"], "lbp_wht/figure_5 is a figure. To draw it, run efficient-ft figure lbp_wht/figure_5"),
        (["bsr/3", "--rows", "our"], "got our. Did you mean 'ours'?"),
        (["bsr/1", "--run"], "bsr/1 has no reproducible accuracies. This table lists sizes of tensors"),
        (["bsr/3", "seeds"], "seeds: settings must have the form KEY=VALUE"),
        (["--run"], "The table must come first"),
        (["bsr/3", "--cost", "optim.lr=1"], "--cost does not accept settings"),
        (["bsr/3", "--commands", "--form", "json"], "--form json cannot be combined with --commands"),
        (["bsr/3", "--run", "--form", "csv"], "--form csv cannot be combined with --run. Use --report after the runs."),
        (
            ["bsr/3", "--run", "cost_only=true"],
            "does not train with cost_only or evaluate. For costs, use --cost.",
        ),
        (["bsr/3", "--report", "optim.lrr=1"], "optim.lrr=1: there is no such setting"),
        (["bsr/3", "--report", "data=digits", "recipe=none"], "identical to another run"),
        (["lbp_wht/1", "--cost"], "lbp_wht/1 contains no costs that can be counted. This table lists formulas"),
    ],
)
def test_mistakes_are_one_clear_line(arguments: list[str], said: str) -> None:
    with pytest.raises(UserError) as caught:
        table.main(arguments)
    assert said in str(caught.value)


@pytest.mark.slow
def test_a_report_has_published_and_obtained_side_by_side(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mean covers the existing seeds of runs with the same settings, and missing runs are listed."""
    monkeypatch.chdir(tmp_path)
    chosen = chosen_rows(published_table("alast/7"), ["deit_t.alast"])[0].cells["acc_flowers"].arguments
    from efficient_ft.cli.hydra.variants import folder_of

    for best, more in ((0.70, ["seed=0"]), (0.74, ["seed=1"]), (0.10, ["seed=2", "optim.lr=0.5"])):
        (config,) = composed(*chosen, *more)
        folder = folder_of(config)
        folder.mkdir(parents=True)
        results: Any = {**some_results(), "config": config.model_dump(mode="json")}
        results["accuracy"]["best"] = best
        (folder / "results.json").write_text(json.dumps(results))
    shown = printed(capsys, "alast/7", "--report", "--rows", "deit_t.alast,deit_t.bsr", "--seeds", "0,1,2")
    assert re.search(r"deit_t.alast +79.00 +72.00 \[70.00…74.00\], 2 of 3 seeds", shown)
    assert re.search(r"deit_t.bsr +73.00", shown)
    assert "4 of 6 runs are missing: deit_t.bsr acc_flowers seed=0, " in shown
    assert "deit_t.alast acc_flowers seed=2." in shown
    assert "differ from the table" not in shown
    rows = json.loads(printed(capsys, "alast/7", "--report", "--rows", "deit_t.alast,deit_t.bsr", "--seeds", "0,1,2",
                              "--form", "json"))  # fmt: skip
    assert [tuple(row.values()) for row in rows] == [
        ("deit_t.bsr", 73.0, None, None, None, 0),
        ("deit_t.alast", 79.0, 72.0, 70.0, 74.0, 2),
    ]
    other = printed(capsys, "alast/7", "--report", "--rows", "deit_t.alast", "--seeds", "0,2", "optim.lr=0.5",
                    "trainer.limit_eval_batches=1", "data.root=DIR")  # fmt: skip
    assert "settings that differ from the table: optim.lr=0.5 trainer.limit_eval_batches=1." in other
    assert "Repeat the settings passed to --run" in " ".join(other.split())
    assert "restricts the evaluated images" not in other, "there is no such run"


@pytest.mark.slow
def test_a_report_takes_the_accuracy_on_the_test_images_and_names_what_it_cannot_read(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from efficient_ft.cli.hydra.variants import folder_of

    monkeypatch.chdir(tmp_path)
    chosen = chosen_rows(published_table("alast/7"), ["deit_t.alast"])[0].cells["acc_flowers"].arguments
    results: Any = some_results()
    for seed in (0, 1, 2):
        (config,) = composed(*chosen, f"seed={seed}", "data.select_best_on=val")
        results["config"] = config.model_dump(mode="json")
        results["accuracy"].update(best=0.9, test=0.5)
        folder = folder_of(config)
        folder.mkdir(parents=True)
        (folder / "results.json").write_text(json.dumps({**results, "format": 2 if seed == 1 else results["format"]}))
        if seed == 2:
            (folder / "results.json").write_text('{"format": 1, "accur')
    shown = printed(capsys, "alast/7", "--report", "--rows", "deit_t.alast", "--seeds", "0,1,2",
                    "data.select_best_on=val")  # fmt: skip
    assert re.search(r"deit_t.alast +79.00 +50.00, 1 of 3 seeds", shown)
    assert re.search(r"Not read: deit_t.alast acc_flowers seed=1: .*\(it has format 2, but this version reads", shown)
    assert re.search(r"Not read: deit_t.alast acc_flowers seed=2: .*not valid JSON", shown)


@pytest.mark.exhaustive
def test_the_images_that_costs_are_counted_for_are_those_that_train() -> None:
    """The recipes train on the 1,020 training images of Flowers-102, without the validation images."""
    rows = [row for n in range(1, 8) for row in published_table(f"alast/{n}").rows if "compute_pflops" in row.costs]
    configs = [composed(*row.arguments)[0] for row in rows if row.arguments]
    assert {config.data.name for config in configs} == {"flowers102", "cifar100", "food101"}
    for config in configs:
        assert config.data.name in table_costs.IMAGES
        if config.data.name == "flowers102":
            assert (config.data.select_best_on, config.data.train_on_val) == ("test", False)


def test_settings_of_the_data_hold_for_every_data_set_of_a_row(capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed(capsys, "bsr/6", "--commands", "data.root=DIR").splitlines()
    several = [line for line in lines if " tasks=bsr_moe " in line]
    assert len(several) == 2
    for line in several:
        assert line.endswith(" ".join(f"tasks.{name}.root=DIR" for name in published_table("bsr/6").rows[-1].tasks))
    assert all(line.endswith(" data.root=DIR") for line in lines if line not in several)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bsr/3", "back_razor/2", "bsr/5"])
def test_costs_are_the_published_ones_by_the_papers_rule_or_say_why(name: str) -> None:
    found = published_table(name)
    cells = [(row, cell) for row in found.rows for cell in cost_cells(found, row)]
    assert cells
    near = 0
    for row, cell in cells:
        if not cell.agrees:
            assert cell.reason, (row.name, cell.column)
            assert cell.reason != "measured, not counted" or cell.rule is None
        else:
            assert cell.reason is None
            near += 1
    assert near >= len(cells) / 2


@pytest.mark.slow
def test_costs_as_data_have_a_column_each_and_are_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    rows = json.loads(printed(capsys, "bsr/3", "--cost", "--form", "json"))
    full = rows[0]
    assert full["training memory MB"] == 8649
    assert full["training memory MB, by its rule"] == pytest.approx(8649.7, rel=1e-4)
    assert full["forward GMACs, by its rule"] == pytest.approx(588.61, rel=1e-4)
    assert abs(full["forward GMACs, deviation"]) < 0.002
    header = next(csv.reader(io.StringIO(printed(capsys, "bsr/3", "--cost", "--form", "csv"))))
    assert len(set(header)) == len(header)


@pytest.mark.exhaustive
def test_of_the_costs_that_follow_a_rule_95_percent_agree_and_all_others_have_a_reason() -> None:
    """All tables are counted, which takes about ten minutes."""
    tables = [published_table(name) for name in table_names()]
    cells = [(t.name, row.name, cell) for t in tables for row in t.rows for cell in cost_cells(t, row)]
    assert len(cells) == 587
    assert [where for *where, cell in cells if not cell.agrees and not cell.reason] == []
    by_rule = [cell for *_, cell in cells if cell.rule is not None]
    assert len(by_rule) == 115
    assert sum(cell.agrees for cell in by_rule) >= 0.95 * len(by_rule)


@pytest.mark.exhaustive
def test_a_row_runs_and_is_reported(shared_data: Path, tmp_path: Path) -> None:
    """A row runs DeiT-Tiny on Flowers-102 for two steps; the repeated command runs nothing."""
    shutil.unpack_archive(shared_data / "flowers102_64.tar.gz", tmp_path, filter="data")
    few = ["trainer.max_steps=2", "trainer.limit_eval_batches=1", "model.image_size=64", "trainer.progress=false"]
    here = ["data.root=flowers102_64", "data.download=false", f"model.weights={shared_data / 'deit_tiny.safetensors'}"]
    given = [
        "alast/7",
        "--run",
        "--rows",
        "deit_t.ft_head",
        "--seeds",
        "0,1",
        *few,
        *here,
        "data.batch_size=16",
        "cost.baseline=none",
    ]
    command = [sys.executable, "-m", "efficient_ft", "table", *given]
    for said in (
        r"deit_t.ft_head +51.00 +\d+\.\d\d \[.*\], 2 seeds",
        "already finished",
        "Table of the sweep: outputs/sweeps/",
    ):
        done = subprocess.run(
            command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(REPOSITORY)}, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        assert re.search(said, done.stdout)
