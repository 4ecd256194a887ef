"""Tests of the page of one run: its numbers, its samples, and its document in a browser, for each kind of task."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from efficient_ft.cli.commands import run_command
from efficient_ft.config import check
from efficient_ft.core.errors import UserError
from efficient_ft.core.format import format_percent
from efficient_ft.record import predictions
from efficient_ft.record.class_results import class_results
from efficient_ft.record.predictions import SHOWN, read_predictions, selections, write_predictions
from efficient_ft.record.results import read_results, write_results
from efficient_ft.report.page import PAGE, write_report
from efficient_ft.report.summary import bootstrap_interval, wilson_interval
from efficient_ft.report.svg import Line, line_chart, matrix
from efficient_ft.task.gathered import average_precision
from efficient_ft.training.output import export
from efficient_ft.training.output.extremes import extreme_samples
from efficient_ft.training.run import run
from tests.conftest import unwrapped
from tests.data.mask_pictures import write_folder
from tests.report.test_report import Page
from tests.training.conftest import folders as folders  # a fixture
from tests.training.conftest import without_cost as without_cost  # a fixture
from tests.training.runs import plain_config
from tests.training.test_label_runs import config_of as label_config
from tests.training.test_label_runs import root as root  # a fixture
from tests.training.test_segmentation_run import plain_segmentation
from tests.training.test_text_run import plain_text, write_place


def write_classes(root: Path, size: int = 24) -> Path:
    """Write images of two classes, whose names contain characters with a meaning in HTML."""
    random = np.random.default_rng(0)
    for split, count in (("train", 12), ("test", 10)):
        for bright, name in enumerate(("a<b>&'c", "</script>")):
            folder = root / split / name.replace("/", "∕")
            folder.mkdir(parents=True)
            for i in range(count):
                pixels = random.integers(0, 120, (size, size, 3)) + 60 * bright
                Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{i}.png")
    return root


def folder_config(root: Path, **changes: Any) -> Any:
    plain = plain_config(optim__warmup_steps=0, **changes)
    plain["data"] |= {"name": "folder", "root": str(root), "batch_size": 8}
    return check(plain)


@pytest.fixture(scope="module")
def classified(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run on two classes. Tests must copy the folder before they change it."""
    folder = tmp_path_factory.mktemp("page")
    run(folder_config(write_classes(folder / "data")), folder / "run", ["data=folder", "optim.lr=1e-2", "x=a b"])
    return folder / "run"


def report(folder: Path, out: Path) -> tuple[str, list[str]]:
    notes = write_report(folder, out).notes
    return (out / PAGE).read_text(encoding="utf-8"), notes


@pytest.mark.slow
def test_the_page_of_a_classifier(classified: Path, tmp_path: Path) -> None:
    text, notes = report(classified, tmp_path / "out")
    assert not notes
    page, results = Page(text), read_results(classified)
    assert [f.name for f in (tmp_path / "out").iterdir()] == [PAGE], "neither matplotlib nor a record is required"
    bare = re.sub(r"base64,[A-Za-z0-9+/=]+", "", text)
    assert not re.search(r"https?:|//|url\(|@import|<link", bare), "needs no network"
    assert bare.count("</script>") == 2, "a class name cannot end a script"
    assert "a<b>" not in bare
    assert "a&lt;b&gt;&amp;" in bare
    assert "efficient-ft data=folder optim.lr=1e-2 &#x27;x=a b&#x27;" in bare
    found = results["data"]["classes"]["test"]
    low, high = wilson_interval(sum(found["correct"]), 20)
    assert f"95 % interval {100 * low:.2f} % to {100 * high:.2f} %, 20 images" in bare
    for index in range(2):
        recall = found["correct"][index] / 10
        assert f'data-value="{recall:.6g}">{format_percent(recall, digits=1)}' in bare
    for title in ("Classes", "Individual images", "Training curves", "Costs", "Changes by the methods"):
        assert f">{title}</h2>" in bare
    for name in ("Loss", "Accuracy", "Learning rate", "Memory"):
        assert f"<h3>{name}</h3>" in bare
    images = [attributes for tag, attributes in page.tags if tag == "img"]
    wrong = 20 - sum(found["correct"])
    assert len(images) == min(wrong, SHOWN) + 20
    assert all((image["src"] or "").startswith("data:image/jpeg;base64,") for image in images)
    assert all(re.search(r", predicted .* \([\d.]+ %\)", image["alt"] or "") for image in images)
    svgs = [attributes for tag, attributes in page.tags if tag == "svg"]
    assert len(svgs) == 6, "four curves, the matrix, and the calibration"
    assert all(svg["role"] == "img" and len(svg["aria-label"] or "") > 20 for svg in svgs)
    regions = [attributes for tag, attributes in page.tags if attributes.get("class") == "wide"]
    assert regions
    assert all(one["tabindex"] == "0" and one["aria-label"] for one in regions)


def test_recorded_predictions_are_those_of_the_images(classified: Path) -> None:
    """The predictions of predictions.npz are equal to predictions that are computed from the image files."""
    from efficient_ft.training.kinds.registry import kind_of

    config = folder_config(classified.parent / "data")
    trained, recorded = export.load(classified), read_predictions(classified)[""]
    data: Any = kind_of(config).open(config, trained.input)
    assert sorted(recorded) == sorted(read_results(classified)["data"]["accuracy"])
    for split, found in recorded.items():
        inputs, labels = data.eval_loader(split).dataset.__getitems__([(0, int(i)) for i in found["index"]])
        rows = trained.model(inputs).softmax(1)
        assert sorted(found["index"].tolist()) == list(range(data.splits[split]))
        np.testing.assert_array_equal(found["label"], labels.numpy())
        np.testing.assert_array_equal(found["predicted"], rows.argmax(1).numpy())
        np.testing.assert_allclose(found["probability"], rows.amax(1).numpy(), rtol=1e-5)
    assert (classified / predictions.NAME).stat().st_size < 5000


def test_selections_are_ordered_and_keep_the_order_of_ties() -> None:
    samples = {
        "label": np.array([0, 1, 2, 0, 1]),
        "predicted": np.array([1, 1, 0, 2, 1]),
        "probability": np.array([0.5, 0.2, 0.9, 0.9, 0.6], dtype=np.float32),
    }
    assert {key: rows.tolist() for key, rows in selections(samples).items()} == {
        "mispredictions": [2, 3, 0],
        "least_certain": [1, 0, 4, 2, 3],
    }
    target = np.array([[0.0, 0.0], [1.0, 100.0], [2.0, 200.0]])
    errors = {"target": target, "predicted": target + np.array([[0.5, 1], [0, 60], [0.1, 0]])}
    assert selections(errors)["largest_errors"].tolist() == [1, 0, 2], "errors are relative to the spread of a target"


def test_damaged_predictions_are_named(tmp_path: Path) -> None:
    assert read_predictions(tmp_path) == {}
    write_predictions(tmp_path, {"": {"val": {"index": np.arange(3), "predicted": np.arange(2)}}})
    with pytest.raises(UserError, match="arrays do not match"):
        read_predictions(tmp_path)
    (tmp_path / predictions.NAME).write_bytes(b"PK\x03\x04")
    with pytest.raises(UserError, match=r"predictions\.npz is damaged"):
        read_predictions(tmp_path)


def test_missing_and_changed_images_are_reported_in_a_line(
    classified: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(classified.parent, tmp_path / "copy")
    run_folder, data = tmp_path / "copy" / "run", tmp_path / "copy" / "data"
    config = (run_folder / "config.yaml").read_text().replace(str(classified.parent), str(tmp_path / "copy"))
    (run_folder / "config.yaml").write_text(config)
    one = next(iter((data / "test").rglob("*.png")))
    one.rename(one.with_name("renamed.png"))
    assert report(run_folder, tmp_path / "out")[1] == [
        "The data have changed since the run. The page therefore shows no individual samples."
    ]
    shutil.rmtree(data)
    run_command("report", [str(run_folder)])
    assert "The page therefore shows no individual samples." in unwrapped(capsys.readouterr().out)
    text = (run_folder / "report" / PAGE).read_text(encoding="utf-8")
    assert "<img" not in text
    assert "Confusion matrix" in text


def test_runs_of_earlier_versions_have_a_page(classified: Path, tmp_path: Path) -> None:
    """Results without classes and without predictions have the other sections."""
    folder = tmp_path / "run"
    shutil.copytree(classified, folder)
    (folder / predictions.NAME).unlink()
    results = json.loads((folder / "results.json").read_text())
    del results["data"]["classes"], results["data"]["scores"]
    (folder / "results.json").write_text(json.dumps(results))
    text, notes = report(folder, tmp_path / "out")
    assert not notes
    assert "Training curves</h2>" in text
    assert "Classes</h2>" not in text
    assert "No interval is computed for the accuracy." in text


@pytest.mark.slow
@pytest.mark.usefixtures("without_cost")
def test_several_labels(root: Path, tmp_path: Path) -> None:
    """The results of each label are those of the stored probabilities."""
    folder, config = tmp_path / "run", label_config(root, "multilabel", "tags")
    run(config, folder)
    results = read_results(folder)
    found, scores = results["data"]["labels"]["test"], results["data"]["scores"]["test"]
    from efficient_ft.training.kinds.registry import kind_of

    trained = export.load(folder)
    data: Any = kind_of(config).open(config, trained.input)
    inputs, targets = data.eval_loader("test").dataset.__getitems__([(0, i) for i in range(20)])
    with torch.no_grad():
        logits = trained.model(inputs)
    expected = average_precision(logits.double(), targets.double()).tolist()
    assert found["average_precision"] == pytest.approx(expected, abs=1e-6)
    assert np.mean(expected) == pytest.approx(scores["mean_average_precision"], abs=1e-6)
    assert found["support"] == (targets > 0).sum(0).tolist()
    columns = zip(found["correct"], found["support"], found["predicted"], strict=True)
    f1 = [2 * correct / max(a + b, 1) for correct, a, b in columns]
    assert np.mean(f1) == pytest.approx(scores["f1_macro"], abs=1e-6)
    text, notes = report(folder, tmp_path / "out")
    assert not notes
    for share in (*expected, *f1):
        assert f"{format_percent(share, digits=1)}" in text
    assert "Confusion matrix" not in text
    samples = read_predictions(folder)[""]["test"]
    order = samples["index"].tolist()
    with torch.no_grad():
        flags = logits.sigmoid() >= torch.tensor(json.loads(trained.notes["thresholds"]), dtype=torch.float32)
    assert samples["labels"].tolist() == (targets[order] > 0).tolist()
    assert (samples["predicted"] == flags[order].numpy()).mean() > 0.95  # rounding near a threshold
    wrong = int((samples["labels"] != samples["predicted"]).any(1).sum())
    assert text.count("<img") == wrong
    assert "Most wrong labels" in text
    assert "Show only samples" not in text
    moved = {**samples, "labels": ~samples["labels"]}
    with pytest.raises(UserError, match="differ from those of the evaluation"):
        extreme_samples(data, trained.input, "test", moved)


@pytest.mark.slow
@pytest.mark.usefixtures("without_cost")
def test_numbers(root: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run(label_config(root, "regression", ["price", "loss"]), folder)
    samples, results = read_predictions(folder)[""]["test"], read_results(folder)
    errors = np.abs(samples["predicted"] - samples["target"]).mean(0)
    scores = results["data"]["scores"]["test"]
    assert errors.tolist() == pytest.approx([scores["mae_price"], scores["mae_loss"]], rel=1e-4)
    low, high = bootstrap_interval(samples)
    assert low < scores["r2"] < high
    text, notes = report(folder, tmp_path / "out")
    assert not notes
    assert f"95 % interval {low:.4f} to {high:.4f}, 20 images" in text
    assert text.count('class="point"') == 2 * 20, "one scatter plot for each target"
    assert text.count("<img") == 20, "the 24 largest errors"
    assert "Largest errors" in text
    assert 'class="filter"' not in text
    results["data"]["summary"][""]["class_names"].append("weight")
    write_results(folder, results)
    with pytest.raises(UserError, match=r"predictions\.npz is damaged: it does not match the results"):
        report(folder, tmp_path / "out")


@pytest.mark.slow
@pytest.mark.usefixtures("without_cost")
def test_masks_and_texts(tmp_path: Path) -> None:
    images = write_folder(tmp_path / "shapes", {"train": 12, "val": 3, "test": 3})
    run(check(plain_segmentation(images, trainer__epochs=1)), tmp_path / "masks")
    text, notes = report(tmp_path / "masks", tmp_path / "out")
    assert not notes
    iou = read_results(tmp_path / "masks")["data"]["scores"]["test"]["iou"]
    for name, value in iou.items():
        assert f'<td class="word">{name}</td><td data-value="{value:.6g}">' in text
    assert "data:image/png;base64," in text, "images with masks"
    assert "No interval is computed for the mean IoU." in text

    run(check(plain_text(write_place(tmp_path), method={"head": {}}, trainer__epochs=1)), tmp_path / "texts")
    text, notes = report(tmp_path / "texts", tmp_path / "out")
    assert not notes
    assert "Individual texts</h2>" in text
    assert text.count('<p class="text">') > 10
    assert "Least certain predictions" in text
    assert "<img" not in text


@pytest.mark.slow
def test_several_tasks_have_their_own_sections(folders: Path, tmp_path: Path) -> None:
    from tests.training.test_tasks import config_of

    run(config_of(folders, trainer__epochs=1), tmp_path / "run")
    text, notes = report(tmp_path / "run", tmp_path / "out")
    for task in ("colours", "planes"):
        assert f">Classes of {task}</h2>" in text
        assert f">Individual images of {task}</h2>" in text
    assert "(mean of the tasks)" in text
    assert all("Kept tokens" in note for note in notes)


def test_the_interval_of_wilson() -> None:
    assert wilson_interval(8, 10) == pytest.approx((0.4902, 0.9433), abs=1e-4)
    assert wilson_interval(0, 10)[0] == pytest.approx(0)
    assert wilson_interval(10, 10)[1] == pytest.approx(1)


@pytest.mark.parametrize(("classes", "names", "numbers"), [(2, True, True), (10, True, True), (49, True, False),
                                                           (101, False, False), (1000, False, False)])  # fmt: skip
def test_matrices_of_any_size_have_every_entry(classes: int, names: bool, numbers: bool) -> None:
    random = np.random.default_rng(0)
    targets, predicted = random.integers(0, classes, (2, 3000))
    bins = [np.zeros(15, dtype=int), np.zeros(15), np.zeros(15)]
    text = matrix(class_results(targets, predicted, classes, bins), [f"class {i}" for i in range(classes)])
    entries = len(np.unique(targets * classes + predicted))
    assert text.count("M") - text.count("Matrix") - text.count("Confusion M") == entries
    assert (">class 1</text>" in text) == names
    assert (text.count('class="middle"') == entries) == numbers
    assert len(text) < 300_000


def test_a_chart_of_one_point_or_of_equal_values_is_drawn() -> None:
    for line in (Line("a", [3], [0.5]), Line("a", [1, 2], [0.0, 0.0]), Line("a", [1, 2], [-1.0, 1e30])):
        assert "nan" not in line_chart("title", "step", [line])


CHECKED = """() => ({
  width: document.documentElement.scrollWidth, ready: document.documentElement.dataset.ready,
  unnamed: [...document.querySelectorAll("img, svg, select, button, [tabindex]")].filter(one => !(one.alt ||
    one.ariaLabel || one.labels?.length || one.textContent.trim())).length})"""


@pytest.mark.slow
def test_in_a_browser_the_page_is_narrow_and_usable_with_the_keyboard(classified: Path, tmp_path: Path) -> None:
    """Requires playwright and Chromium."""
    api = pytest.importorskip("playwright.sync_api")
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("Chromium is not installed")
    report(classified, tmp_path)
    with api.sync_playwright() as play:
        browser = play.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for width in (1280, 400):
            page, errors = browser.new_page(viewport={"width": width, "height": 900}), []
            page.on("console", lambda message, seen=errors: seen.append(message.text))
            page.on("pageerror", lambda error, seen=errors: seen.append(str(error)))
            page.goto((tmp_path / PAGE).as_uri())
            assert page.evaluate(CHECKED) == {"width": width, "ready": "yes", "unnamed": 0}
            assert not errors
        first = page.locator("table.sort").first
        first.get_by_role("button", name="class", exact=True).press("Enter")
        assert first.locator("th").first.get_attribute("aria-sort") == "ascending"
        before = first.locator("tbody tr").all_inner_texts()
        first.get_by_role("button", name="class", exact=True).press("Enter")
        assert first.locator("tbody tr").all_inner_texts() == before[::-1]
        region = page.locator(".matrix .wide")
        region.focus()
        region.press("ArrowRight")
        assert re.search(r"predicted .*: \d+ of 10", page.locator(".matrix output").inner_text())
        page.locator("select.filter").select_option(index=1)
        assert "samples are shown" in page.locator(".filtered output").inner_text()
        browser.close()
