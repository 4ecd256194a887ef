"""Tests of runs with task=text, from a file of texts and a pretrained network to predicted classes."""

from __future__ import annotations

import io
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from efficient_ft.cli.commands import predict
from efficient_ft.config import Config, check
from efficient_ft.core.errors import SettingError, UserError
from efficient_ft.models import factory
from efficient_ft.record.step_stats import step_stats_file
from efficient_ft.training.costs import cost_only
from efficient_ft.training.evaluate import evaluate
from efficient_ft.training.module import FineTuner
from efficient_ft.training.output import export
from efficient_ft.training.run import run
from tests.models.text_models import write_model, write_texts
from tests.training.runs import assert_same_run, interrupted_at, plain_config


def write_place(folder: Path) -> Path:
    """Write texts.csv and the network folder bert."""
    write_texts(folder / "texts.csv", 160)
    write_model(folder / "bert")
    return folder


def plain_text(place: Path, **changes: Any) -> dict[str, Any]:
    """Return the configuration of a run on the files of `write_place`, as plain containers."""
    data = {
        "name": "text_folder",
        "root": str(place / "texts.csv"),
        "batch_size": 16,
        "num_workers": 0,
        "val_fraction": 0.2,
        "text": {},
    }
    model = {"name": "bert", "weights": str(place / "bert"), "max_length": 16, **changes.pop("model", {})}
    plain = plain_config(**changes)
    return {**plain, "task": "text", "model": model, "data": data | changes.get("data", {})}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_place(tmp_path_factory.mktemp("texts"))


@pytest.fixture(scope="module")
def text_run(place: Path) -> Callable[..., Config]:
    def make(**changes: Any) -> Config:
        return check(plain_text(place, **changes))

    return make


@pytest.fixture(scope="module")
def trained(
    tmp_path_factory: pytest.TempPathFactory, text_run: Callable[..., Config]
) -> tuple[Path, Config, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("trained") / "run"
    config = text_run(trainer__epochs=12, optim__lr=3e-3, optim__warmup_steps=0, method={"full": {}})
    return folder, config, run(config, folder)


@pytest.mark.usefixtures("without_cost")
def test_step_statistics_compare_no_padding(
    tmp_path: Path, text_run: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    step, tokens = FineTuner.training_step, []

    def count(self: FineTuner, batch: Any, batch_idx: int) -> Any:
        mask = batch[0]["attention_mask"]
        tokens.append(int(mask.sum()) / len(mask))
        assert not mask.all()
        return step(self, batch, batch_idx)

    monkeypatch.setattr(FineTuner, "training_step", count)
    config = text_run(step_stats__interval=1, trainer__max_steps=2, method={"full": {}})
    run(config, tmp_path / "run")
    rows = step_stats_file(tmp_path / "run").read()
    assert [row["compared"] for row in rows] == [[pytest.approx(n, rel=1e-5)] * 4 for n in tokens]


@pytest.mark.slow
def test_a_run_learns_and_records_its_accuracy(trained: tuple[Path, Config, dict[str, Any]]) -> None:
    _, _, results = trained
    accuracy = results["accuracy"]
    assert accuracy["best"] > 0.9, "by chance half"
    assert accuracy["test"] > 0.9
    assert results["data"]["splits"] == {"train": 102, "val": 26, "test": 32}
    assert results["cost"]["executed"]["backward_flops"] > 0
    assert results["cost"]["measured"]["step_seconds"] > 0
    assert results["totals"]["images"] == 12 * 102


@pytest.mark.slow
def test_the_best_weights_are_evaluated_without_the_folder_of_the_network(
    trained: tuple[Path, Config, dict[str, Any]], place: Path, tmp_path: Path
) -> None:
    folder, _, results = trained
    moved = place / "elsewhere"
    (place / "bert").rename(moved)
    try:
        found = evaluate(shutil.copytree(folder, tmp_path / "copy"))
    finally:
        moved.rename(place / "bert")
    assert found["accuracy"]["test"] == results["accuracy"]["test"]


@pytest.mark.slow
def test_lines_are_predicted(
    trained: tuple[Path, Config, dict[str, Any]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder, *_ = trained
    lines = ["we took the old apple", "then a copper was seen near them", "one melon and the house"]
    (tmp_path / "lines.txt").write_text("\n\n".join(lines))
    predict.main([str(folder), str(tmp_path / "lines.txt"), "--top", "1"])
    printed = capsys.readouterr().out.splitlines()
    assert printed[::2] == lines
    assert [line.split()[0] for line in printed[1::2]] == ["fruit", "metal", "fruit"]
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO("\ufeffthe zinc\u2028iron\n".encode())))
    predict.main([str(folder / "model.safetensors"), "-"])
    assert capsys.readouterr().out.split("\n")[1].split()[0] == "metal"
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\n")))
    with pytest.raises(UserError, match="these files contain no text"):
        predict.main([str(folder), "-"])
    (tmp_path / "lines.txt").write_text("a\tb\n")
    with pytest.raises(UserError, match=r"line 1: each line must have the form one text without tabs"):
        predict.main([str(folder), str(tmp_path / "lines.txt")])
    with pytest.raises(UserError, match=r"task=segmentation"):
        predict.main([str(folder), str(tmp_path / "lines.txt"), "--overlay"])
    (tmp_path / "lines.txt").write_text("the zinc", encoding="utf-16-le")
    with pytest.raises(UserError, match=r"lines\.txt contains NUL characters, so it is not UTF-8 text"):
        predict.main([str(folder), str(tmp_path / "lines.txt")])


@pytest.mark.slow
def test_pairs_are_trained_on_and_predicted(
    text_run: Callable[..., Config], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [("the apple", "an old pear", "fruit"), ("zinc", "we took the iron", "metal"), ("", "lead", "metal")] * 12
    lines = "".join(f"{a}\t{b}\t{c}\n" for a, b, c in rows)
    (tmp_path / "pairs.tsv").write_text("first\tsecond\tkind\n" + lines)
    text = {"columns": ["first", "second"], "label": "kind"}
    data = {"root": str(tmp_path / "pairs.tsv"), "text": text, "on_corrupt": "skip", "num_workers": 1}
    results = run(text_run(data=data, trainer__epochs=1), tmp_path / "run")
    assert results["data"]["skipped"] == 12
    (tmp_path / "new.txt").write_text("one plum \t a cherry\n")
    predict.main([str(tmp_path / "run"), str(tmp_path / "new.txt"), "--top", "1"])
    assert "one plum\ta cherry\n" in capsys.readouterr().out
    (tmp_path / "new.txt").write_text("one plum\t \n")
    with pytest.raises(UserError, match=r"line 1: each line must have the form FIRST<tab>SECOND"):
        predict.main([str(tmp_path / "run"), str(tmp_path / "new.txt")])


@pytest.mark.slow
def test_the_file_is_one_of_transformers_weights(trained: tuple[Path, Config, dict[str, Any]]) -> None:
    folder, config, _ = trained
    with safe_open(folder / export.NAME, "pt") as file:
        names = set(file.keys())
        about = file.metadata()
    model = factory.random_model(config.model, 2)
    assert names == set(model.state_dict())
    assert about["task"] == "text"
    again = config.model.model_copy(update={"weights": str(folder / export.NAME), "kwargs": {}, "name": "bert_tiny"})
    with pytest.raises(SettingError, match=r"model\.weights"):
        factory.create_model(again, 2)  # the network has another width


@pytest.mark.slow
def test_an_interrupted_run_continues_as_if_it_had_not_stopped(text_run: Callable[..., Config], tmp_path: Path) -> None:
    config = text_run(trainer__epochs=3)
    run(config, tmp_path / "whole")
    interrupted_at(9, config, tmp_path / "parts")
    run(config, tmp_path / "parts")
    assert_same_run(tmp_path / "whole", tmp_path / "parts")


@pytest.mark.first(1, "exhaustive")
@pytest.mark.slow
@pytest.mark.parametrize("method", ["back_razor", "low_bit", "checkpointing", "lora", "bitfit", "last_stage", "lisa"])
def test_methods_train_a_text_classifier(text_run: Callable[..., Config], tmp_path: Path, method: str) -> None:
    results = run(text_run(method={method: {}}, trainer__epochs=1), tmp_path)
    assert results["methods"][method]["touched"]
    assert 0 <= results["accuracy"]["test"] <= 1
    assert evaluate(tmp_path)["accuracy"]["test"] == results["accuracy"]["test"]


def test_low_rank_backward_says_why_it_cannot_serve_texts(text_run: Callable[..., Config], tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"lbp_wht: .*without positions on a grid"):
        run(text_run(method={"lbp_wht": {}}), tmp_path)


@pytest.mark.slow
def test_costs_need_no_files(text_run: Callable[..., Config], capsys: pytest.CaptureFixture[str]) -> None:
    config = text_run(
        model={"name": "bert_tiny", "weights": None},
        data={"root": "nowhere"},
        method={"back_razor": {}},
        cost__baseline="full",
    )
    found = cost_only(config)
    assert found["executed"]["saved_bytes"] < found["baseline"]["executed"]["saved_bytes"] / 2
    assert "bert_tiny, 16 tokens, " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"trainer__compile": True}, r"trainer\.compile must be false with task=text.* The length of the texts"),
        ({"trainer__prefix": "bf16"}, r"trainer\.prefix must be fp32 or auto with task=text"),
        ({"model": {"image_size": 32}}, r"model\.image_size must be null with task=text.*model\.max_length"),
        (
            {"data": {"text": {"columns": ["label"]}}},
            r"data\.text\.columns must be distinct columns that do not include label",
        ),
        ({"model": {"max_length": None}}, r"model\.name must be a text classifier with task=text"),
        ({"data": {"text": None}}, r"data\.text must be a mapping with the keys columns and label"),
        ({"data": {"text": {"columns": []}}}, r"data\.text\.columns"),
    ],
)
def test_settings_without_meaning_are_refused(
    text_run: Callable[..., Config], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(SettingError, match=message):
        text_run(**changes)


def test_texts_belong_to_their_task(text_run: Callable[..., Config]) -> None:
    plain = text_run().model_dump(mode="json")
    for task in ("classification", "segmentation"):
        with pytest.raises(SettingError, match=r"task=text|a data set with masks"):
            check({**plain, "task": task})
