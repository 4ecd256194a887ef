"""Tests of ``efficient-ft report`` on short runs: its figures, its messages and its self-contained page."""

from __future__ import annotations

import base64
import io
import re
import shutil
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from efficient_ft.cli.commands import run_command
from efficient_ft.config import Config, check
from efficient_ft.core.errors import UserError
from efficient_ft.core.format import format_percent
from efficient_ft.record.rows import Rows
from efficient_ft.report.figures import draw_budgets, draw_magnitudes, draw_tokens, draw_trained
from efficient_ft.report.kept_tokens import _dimmed, kept_tokens
from efficient_ft.report.page import table
from efficient_ft.report.record import describe, read
from efficient_ft.training.run import run
from tests.conftest import unwrapped
from tests.training.runs import plain_config
from tests.training.test_step_stats import METHODS, VIT

SIGNATURE = b"\x89PNG\r\n\x1a\n"


def configured(method: dict[str, Any], **changes: Any) -> Config:
    return check(
        plain_config(
            model=VIT,
            method=method,
            data__batch_size=16,
            trainer__max_steps=6,
            trainer__limit_eval_batches=1,
            step_stats__interval=1,
            **changes,
        )
    )


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return the folder of a finished run of one of METHODS. Tests must copy the folder before they change it."""
    folders: dict[str, Path] = {}

    def made(name: str) -> Path:
        if name not in folders:
            folders[name] = tmp_path_factory.mktemp("report") / name
            run(configured(METHODS[name]), folders[name])
        return folders[name]

    return made


class Page(HTMLParser):
    """Parser that collects all tags with their attributes, and the cells of the table."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.cells: list[str] = []
        self.open: list[str] = []
        self.feed(text)
        assert not self.open, "tags that are not closed"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "td":
            self.cells.append(data)


FIGURES = {
    "full": ["trained.png", "tokens.png", "magnitudes.png"],
    "bsr": ["trained.png", "tokens.png", "magnitudes.png", "kept_tokens.png"],
    "alast": ["budgets.png", "trained.png", "tokens.png", "magnitudes.png", "kept_tokens.png"],
}


@pytest.mark.first(1, "exhaustive")
@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_the_figures_are_files_and_one_page_of_its_own(name, recorded, tmp_path, capsys):
    out = tmp_path / "out"
    run_command("report", [str(recorded(name)), "--out", str(out), "--images", "2"])
    assert sorted(f.name for f in out.iterdir()) == sorted([*FIGURES[name], "report.html"])
    files = [(out / file).read_bytes() for file in FIGURES[name]]
    for data in files:
        assert data.startswith(SIGNATURE)
        with Image.open(io.BytesIO(data)) as image:
            image.load()
            assert min(image.size) > 300
            assert len(np.unique(np.asarray(image.convert("L")))) > 20, "not an empty sheet"
    text = (out / "report.html").read_text(encoding="utf-8")
    assert "http" not in (bare := re.sub(r"base64,[A-Za-z0-9+/=]+", "", text))
    assert not re.search(r"//|url\(|@import|<link", bare)
    page = Page(text)
    head = "data:image/png;base64,"
    images = [attributes for tag, attributes in page.tags if (attributes.get("src") or "").startswith(head)]
    assert [base64.b64decode((image["src"] or "").removeprefix(head), validate=True) for image in images] == files
    assert all(len(image["alt"] or "") > 40 for image in images)
    for fact in (name, "vit_digits", "digits", "from random weights", "% (val, best)", "% (test, best)", "6 optimizer"):
        assert fact in text
    assert page.cells.count("blocks.3") == 1
    shown = capsys.readouterr().out
    assert str(out / "report.html") in shown
    assert ("no budgets" in shown) == (name != "alast")
    assert "drop no tokens" not in shown, "the network is not run for a method that does not drop tokens"


@pytest.mark.slow
def test_the_numbers_of_the_table_are_those_of_the_record(recorded):
    record = read(recorded("alast"))
    rows = Rows(recorded("alast") / "step_stats.jsonl").read()
    header, lines = table(record)
    assert len(lines) == 4
    for index, line in enumerate(lines):
        cells = dict(zip(header, line, strict=True))
        assert cells["block"] == f"blocks.{index}"
        share = sum(f"blocks.{index}" in row["trained"] for row in rows) / len(rows)
        assert cells["trained"] == format_percent(share)
        assert float(cells["budget, first"]) == pytest.approx(rows[0]["budgets"][index], abs=5e-5)
        assert float(cells["budget, last"]) == pytest.approx(rows[-1]["budgets"][index], abs=5e-5)
        assert float(cells["relative magnitude, last"]) == pytest.approx(rows[-1]["magnitudes"][index], abs=5e-5)
        mean = sum(row["tokens"][index] for row in rows) / len(rows)
        assert float(cells["tokens after it"]) == pytest.approx(mean, abs=0.051)


@pytest.mark.slow
def test_kept_tokens_are_where_the_network_keeps_them(recorded):
    """BSR shows the tokens kept in evaluation, and ALaST the tokens kept by the checkpoint's budgets."""
    from efficient_ft.training.output import checkpoint

    folder = recorded("bsr")
    kept = kept_tokens(folder, describe(folder, read(folder))[1], 3)
    assert kept.blocks == ["1", "2"]
    first, second = kept.masks
    assert first.shape == second.shape == (3, 8, 8)
    assert (first.sum((1, 2)) == 20).all()
    assert set((second.sum((1, 2)) - 7).tolist()) <= {0, -1}, "the first fused token may be one of the 7"
    assert not (second & ~first).any(), "what is gone does not come back"
    assert kept.pixels.shape == (3, 32, 32, 3)
    assert 0 <= kept.pixels.min() < 0.1 < 0.9 < kept.pixels.max() <= 1

    folder = recorded("alast")
    kept = kept_tokens(folder, describe(folder, read(folder))[1], 2)
    held = checkpoint.read(folder / checkpoint.NAME)["callbacks"]
    (budgets,) = (state for key, state in held["MethodCallback"].items() if key.startswith("alast"))
    patches = 64
    for index, mask in zip(kept.blocks, kept.masks, strict=True):
        patches = int(budgets[f"blocks.{index}"][0] * patches + 1e-9)
        assert (mask.sum((1, 2)) == patches).all()
    assert kept.blocks == ["0", "1", "2"], "no token leaves the last block"
    assert "after step 6" in kept.shown
    assert "Evaluation keeps all tokens." in kept.shown


def test_dropped_patches_are_dark_and_kept_ones_as_they_were():
    pixels = np.random.default_rng(0).uniform(0.5, 1, (6, 9, 3))
    mask = np.array([[True, False, True], [False, False, True]])
    dimmed = _dimmed(pixels, mask)
    for row in range(6):
        for column in range(9):
            if mask[row // 3, column // 3]:
                assert (dimmed[row, column] == pixels[row, column]).all()
            else:
                assert (dimmed[row, column] < 0.9 * pixels[row, column]).all()


def test_the_page_states_why_merged_tokens_have_no_figure(tmp_path):
    with pytest.raises(UserError, match=r"^tome merges tokens, so a token has no single position in the image\.$"):
        kept_tokens(tmp_path, configured({"full": {}, "tome": {"r": 1}}), 1)


@pytest.mark.slow
def test_a_run_that_goes_on_still_or_has_lost_its_images_is_drawn_as_far_as_it_goes(recorded, tmp_path, capsys):
    folder = tmp_path / "run"
    shutil.copytree(recorded("alast"), folder)
    (folder / "results.json").unlink()
    (folder / "model.safetensors").unlink()
    rows = Rows(folder / "step_stats.jsonl")
    rows.rewind(1)
    run_command("report", [str(folder)])
    assert "Kept tokens are not drawn." in capsys.readouterr().out
    assert sorted(f.name for f in (folder / "report").glob("*.png")) == sorted(FIGURES["alast"][:-1])
    text = (folder / "report" / "report.html").read_text(encoding="utf-8")
    assert "has not finished" in text
    assert "model.safetensors" in text


@pytest.mark.slow
def test_maps_without_magnitudes_and_deep_networks_are_drawn(tmp_path):
    """Magnitudes may be null, and labels are omitted if names are too long or too many."""
    generator = np.random.default_rng(0)
    for count, name in ((8, "layer{}.conv"), (40, "blocks.{}")):
        folder = tmp_path / str(count)
        folder.mkdir()
        blocks = [name.format(i) for i in range(count)]
        for step in (1, 4, 9):
            values: list[float | None] = generator.uniform(size=count).tolist()
            row = {"trained": blocks[::2], "tokens": [None, *[9] * (count - 1)], "magnitudes": [None, *values[1:]]}
            Rows(folder / "step_stats.jsonl").append({"step": step, "blocks": blocks, "budgets": values, **row})
        record = read(folder)
        for draw in (draw_budgets, draw_trained, draw_tokens, draw_magnitudes):
            assert draw(record).png.startswith(SIGNATURE)
        assert table(record)[1][0][2] == "–"


def other(folder: Path) -> None:
    """Write a run of another version, whose record has another name."""
    folder.mkdir()
    (folder / "config.yaml").write_text("data: {workers: 2}")
    (folder / "insight.jsonl").write_text("{}")


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda folder: None, "run does not exist"),
        (
            lambda folder: folder.mkdir(),
            "run contains no record (step_stats.jsonl). Train with step_stats.interval=n",
        ),
        (lambda folder: Rows(folder / "step_stats.jsonl").rewind(0), "resume=never"),
        (other, "config.yaml was written by another version of efficient-ft (it has the setting data.workers"),
    ],
    ids=["nowhere", "unrecorded", "empty", "other"],
)
def test_mistakes_end_with_one_message_and_status_2(tmp_path, capsys, make, text):
    make(tmp_path / "run")
    with pytest.raises(SystemExit) as stopped:
        run_command("report", [str(tmp_path / "run")])
    assert stopped.value.code == 2
    assert text in unwrapped(capsys.readouterr().err)


@pytest.mark.parametrize(
    ("file", "content", "text"),
    [
        ("results.json", "{", "results.json is damaged: it is not valid JSON. Repeat the run."),
        ("results.json", "{}", "results.json was written by another version"),
        ("step_stats.jsonl", '{"step": 1}\n', "step_stats.jsonl is incomplete: a row has no step, blocks or trained."),
        ("step_stats.jsonl", '{"step": 1, "blocks": 3, "trained": []}\n', "step_stats.jsonl is damaged"),
        ("step_stats.jsonl", '{"step": 1, "blocks": [], "trained": []}\n', "damaged (a row contains no block)"),
        ("step_stats.jsonl", '{"step": 1, "blocks": ["b"], "trained": null}\n', "step_stats.jsonl is damaged"),
        (
            "step_stats.jsonl",
            '{"step": 1, "blocks": ["b"], "trained": [], "budgets": [1, 2]}\n'
            '{"step": 2, "blocks": ["b"], "trained": [], "budgets": [1]}\n',
            "step_stats.jsonl is damaged",
        ),
        (
            "config.yaml",
            "data: {workers: 2}",
            "(it has the setting data.workers, which is unknown to this version). Repeat the run",
        ),
    ],
    ids=["damaged", "earlier", "rows", "blocks", "no blocks", "trained", "unequal", "unknown"],
)
def test_files_that_cannot_be_read_are_named(recorded, tmp_path, capsys, file, content, text):
    run = tmp_path / "run"
    shutil.copytree(recorded("full"), run)
    (run / file).write_text(content)
    with pytest.raises(SystemExit) as stopped:
        run_command("report", [str(run)])
    assert stopped.value.code == 2
    assert text in unwrapped(capsys.readouterr().err)


def test_a_number_of_images_below_0_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit) as stopped:
        run_command("report", [str(tmp_path), "--images", "-1"])
    assert stopped.value.code == 2
    assert "must be an integer >= 0, got -1" in unwrapped(capsys.readouterr().err)


def test_without_matplotlib_the_message_names_the_extra(recorded, monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SystemExit) as stopped:
        run_command("report", [str(recorded("full")), "--out", str(tmp_path / "out")])
    assert stopped.value.code == 2
    assert "pip install 'efficient-ft[report]'" in unwrapped(capsys.readouterr().err)
    assert not (tmp_path / "out").exists()
