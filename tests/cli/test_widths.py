"""Tests of line widths: no command prints a line wider than the terminal, except paths."""

from __future__ import annotations

import importlib
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from efficient_ft.bench import gradient_error as gradients
from efficient_ft.bench.tables import report_text
from efficient_ft.cli.commands import (
    COMMANDS,
    collect,
    figure,
    gradient_error,
    plan,
    predict,
    study,
    table,
    table_costs,
)
from efficient_ft.cli.exits import fail
from efficient_ft.cli.hydra import jobs
from efficient_ft.config import check
from efficient_ft.core.errors import UserError
from efficient_ft.core.text import display_width, plain_line
from efficient_ft.papers.published import published_table, table_names
from efficient_ft.planning import Exactness, Examined, Excluded, Option, Plan
from efficient_ft.planning.counting import Counted
from efficient_ft.planning.text import plan_text
from efficient_ft.record.config_file import write_config
from efficient_ft.training.kinds.base import Prediction, Predictions
from efficient_ft.training.kinds.classes import confusion_lines
from tests.conftest import REPOSITORY
from tests.record.some import some_results
from tests.training.runs import plain_config

STACK = "full+lora:rank=8,alpha=16+low_bit:bits=4+checkpointing:input_dtype=int4+tome:r=16+lbp_dct:order=4"
WIDE = "猫の写真の分類" * 20

# Only the narrowest terminal is tested by default.
pytestmark = [
    pytest.mark.parametrize("width", [80, 100, 120]),
    pytest.mark.first(1, "exhaustive", of="width"),
]


@pytest.fixture(autouse=True)
def terminal(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(width))


@pytest.fixture
def fits(width: int, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Assert that all lines of a text and of the output fit. A line of one word is a path and may be longer."""

    def checked(text: str = "") -> str:
        captured = capsys.readouterr()
        shown = "\n".join([text, captured.out, captured.err])
        assert shown.strip(), "nothing was printed"
        for line in shown.splitlines():
            assert display_width(line) <= width or len(line.split()) == 1, line
        return shown

    return checked


@pytest.mark.parametrize("command", list(COMMANDS))
def test_help(command: str, fits: Callable[..., str]) -> None:
    with pytest.raises(SystemExit) as left:
        importlib.import_module(COMMANDS[command]).main(["--help"])
    assert left.value.code == 0
    fits()


def test_the_help_of_the_program(width: int, monkeypatch: pytest.MonkeyPatch, fits: Callable[..., str]) -> None:
    from efficient_ft.cli import main

    monkeypatch.setattr(sys, "argv", ["efficient-ft", "--help"])
    with pytest.raises(SystemExit):
        main.main()
    shown = " ".join(fits().split())
    assert "uniform_layers" in shown, "every option"
    assert "a sweep; repeating it skips finished jobs" in shown


def test_mistakes(width: int, capsys: pytest.CaptureFixture[str], fits: Callable[..., str]) -> None:
    setting = f"'data.splits={{train: {'Training ' * 9}, test: Testing}}'"
    path = f"/a/{'folder/' * 20}"
    with pytest.raises(SystemExit) as left:
        fail(UserError(f"{path}: a sentence that is longer than a terminal. It names settings: {setting} or others."))
    assert left.value.code == 2
    lines = capsys.readouterr().err.splitlines()
    assert any(path in line for line in lines), "paths stay whole"
    assert any(setting in line for line in lines), "and quoted settings"
    with pytest.raises(SystemExit):
        fail(f"{'word ' * 100}{WIDE[:30]}")
    fits()


def test_the_line_of_a_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fits: Callable[..., str]) -> None:
    monkeypatch.chdir(tmp_path)
    folders = [tmp_path / "outputs" / str(number) for number in range(2)]
    for seed, folder in enumerate(folders):
        config = check(plain_config(seed=seed))
        folder.mkdir(parents=True)
        write_config(folder, config)
        (folder / "results.json").write_text(json.dumps({**some_results(), "config": config.model_dump(mode="json")}))
    jobs.write_sweep_table(tmp_path / "outputs", folders)
    assert "Table of the sweep: outputs/sweeps/" in fits(), "no absolute path"


@pytest.mark.parametrize("columns", [[], ["--columns", "all"]])
def test_collect(columns: list[str], tmp_path: Path, fits: Callable[..., str]) -> None:
    methods: list[dict[str, Any]] = [{"full": {}}, {"full": {}, "lora": {"rank": 4}, "mesa": {}, "tome": {"r": 2}}]
    for seed in range(12):
        for number, method in enumerate(methods):
            folder = tmp_path / WIDE[:40] / STACK.replace(":", "-") / str(number) / str(seed)
            config = check(plain_config(seed=seed, method=method, optim__lr=0.1 / (1 + number)))
            folder.mkdir(parents=True)
            write_config(folder, config)
            results = {**some_results(), "config": config.model_dump(mode="json")}
            results["accuracy"]["test"] = 0.5
            (folder / "results.json").write_text(json.dumps(results))
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "results.json").write_text("{")
    for more in ([], ["--runs"]):
        collect.main([str(tmp_path), *more, *columns])
        assert "50.00 %" in fits()
    assert str(tmp_path) not in fits("x"), "no absolute path"


@pytest.mark.slow
@pytest.mark.first(1, "exhaustive", of="columns")
@pytest.mark.parametrize("columns", [[], ["--columns", "all"]])
def test_published_tables(columns: list[str], fits: Callable[..., str]) -> None:
    table.main(columns)
    figure.main([])
    reported = set()  # only one report per paper is tested, because a report composes configurations
    for name in table_names():
        table.main([name, *columns])
        first, paper = published_table(name).rows[0], name.partition("/")[0]
        if first.runs and not columns and paper not in reported:
            reported.add(paper)
            table.main([name, "--report", "--rows", first.name])
    fits()
    assert reported or columns


@pytest.mark.first(1, "exhaustive", of="name")
@pytest.mark.parametrize("columns", [[], ["all"]])
@pytest.mark.parametrize("name", ["lbp_wht/2", "bsr/3", "alast/7", "back_razor/1"])
def test_costs(columns: list[str], name: str, monkeypatch: pytest.MonkeyPatch, fits: Callable[..., str]) -> None:
    monkeypatch.setattr(table_costs, "_known", {})
    monkeypatch.setattr(table_costs, "_counted", table_costs._typical)
    published = published_table(name)
    table_costs.print_costs(published, published.rows, "text", columns)
    shown = fits()
    assert all(row.name.split(".")[-1] in shown for row in published.rows)


@pytest.mark.parametrize("columns", [[], ["all"]])
@pytest.mark.parametrize("folder", sorted((REPOSITORY / "results").iterdir()), ids=lambda folder: folder.name)
def test_studies(columns: list[str], folder: Path, fits: Callable[..., str]) -> None:
    from efficient_ft.record.study import Records

    records = Records(folder)
    fits(study.report(records, list(records.study.rows), columns))


@pytest.mark.parametrize("columns", [[], ["all"]])
def test_benches(columns: list[str], fits: Callable[..., str]) -> None:
    kinds = set()
    for file in sorted((REPOSITORY / "benchmarks").glob("*.json")):
        report = json.loads(file.read_text(encoding="utf-8"))
        if report.get("kind") in ("step", "layer", "loop", "gradient", "memory"):
            kinds.add(report["kind"])
            if "recipes" in report and report["kind"] != "step":
                report["recipes"] = {f"{STACK}{WIDE[:30]}{name}": of for name, of in report["recipes"].items()}
            fits(report_text(report, columns if report["kind"] != "loop" else ()))
    assert len(kinds) >= 4


def test_gradient_errors(fits: Callable[..., str]) -> None:
    results = json.loads((REPOSITORY / "benchmarks" / "gradient_error.json").read_text(encoding="utf-8"))["results"]
    for state in dict.fromkeys(one["state"] for one in results):
        for make in (gradients.network_rows, gradients.group_rows):
            for chosen in ([], ["all"]):
                fits(gradient_error._table(*make(results, state), chosen))


def a_plan(**changes: Any) -> Plan:
    counted = Counted(10**8, 10**8, 10**6, 10**6, 1e12, 10**6)
    options = tuple(
        Option(
            f"{STACK}, 8-bit moments, steps in backward" if number else "head",
            tuple(f"method.lora.some_setting_{i}=[1,2,3]" for i in range(12)),
            Exactness(number),
            counted,
            10**9 * (number + 1),
            step_seconds=1.5,
            points_lost={"a": 1.0, "b": 18.25},
            on_front=True,
        )
        for number in range(4)
    )
    excluded = [Excluded(f"{STACK}{i}, 4-bit moments", "", 10**9 * (5 + i // 3), Exactness.NEAR) for i in range(20)]
    excluded += [Excluded(f"{STACK}{i}", "not examined", examined=False) for i in range(20)]
    excluded += [Excluded(WIDE[:30], "a reason that is long " * 9)]
    plan = Plan(4 * 10**9, 8 * 10**9, 10**9, "mimalloc", "cpu", options, tuple(excluded), options[1], 1, "x", 10**4, 60)
    return Plan(**{**vars(plan), **changes})


def test_plans(fits: Callable[..., str]) -> None:
    for changes in ({}, {"recommended": None}, {"recommended": None, "options": ()}):
        for columns in ([], ["all"]):
            for every in (False, True):
                fits(plan_text(a_plan(**changes), every=every, columns=columns))
    for number in (1, 12):
        plan._print_examined(Examined(number, 38, STACK * 2, 10**9, True))
    fits()


class _Found(Predictions):
    """The same wrong prediction for three samples."""

    total, header = 3, ("path", "class")

    def __init__(self, heading: str, names: list[str]) -> None:
        self._names, self._heading = names, heading

    def __iter__(self) -> Iterator[Prediction]:
        for _ in range(self.total):
            yield Prediction(self._heading, [(name, "30 %") for name in reversed(self._names)], {}, [])

    def summary(self) -> list[str]:
        return confusion_lines(Counter({(self._names[0], self._names[-1]): self.total}), self.total)


def test_predictions(fits: Callable[..., str]) -> None:
    names = [plain_line(name) for name in (WIDE, "a name of a class " * 20, "x")]
    predict._print(_Found("some/where.png", names), names, None)
    assert "accuracy over 3 images in class folders: 0 %" in fits()


def test_jobs(fits: Callable[..., str]) -> None:
    folders = ("outputs/digits/vit/full/1", "outputs/digits/vit/full/2")
    many: list[Any] = [
        SimpleNamespace(title=f"seed=0 method=[{STACK}]", results=some_results(), failure=None, trains=True, folder=one)
        for one in map(Path, folders)
    ]
    shown = jobs.summary(many)
    assert all(shown.count(folder) == 1 for folder in folders), "paths are whole"
    for folder in folders:
        shown = shown.replace(folder, "")
    fits(shown)
