"""Tests of text runs on stored features: results equal those of a run that computes everything."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from efficient_ft.config import Config, check
from efficient_ft.core.errors import UserError
from efficient_ft.record.step_stats import step_stats_file
from efficient_ft.training.features.fill import fill_features
from efficient_ft.training.output import checkpoint
from efficient_ft.training.run import run
from tests.training.runs import interrupted_at
from tests.training.test_features import (
    assert_interruptions_change_nothing,
    assert_same_training,
    assert_stored_features_change_nothing,
    stores,
)
from tests.training.test_text_run import plain_text, write_place

pytestmark = pytest.mark.usefixtures("without_cost")
TRAIN, VAL = 102, 26
#: Dropout in the frozen part would end the prefix.
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "classifier_dropout": 0.1}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a BERT, and texts of very different lengths, so that the batches have different lengths."""
    folder = write_place(tmp_path_factory.mktemp("texts"))
    lines = (folder / "texts.csv").read_text().splitlines()[1:]
    longer = [f"{line.partition(',')[0]} {'was seen near them and then ' * (k % 5)},{line.partition(',')[2]}"
              for k, line in enumerate(lines)]  # fmt: skip
    (folder / "texts.csv").write_text("\n".join(["text,label", *longer]) + "\n")
    return folder


@pytest.fixture
def small(place: Path, tmp_path: Path) -> Callable[..., Config]:
    """Return the configuration of a run that trains the last block of a BERT with 4 blocks."""

    def configured(**changes: Any) -> Config:
        model = {"kwargs": NO_DROPOUT, "max_length": 40, **changes.pop("model", {})}
        settings = {
            "data": {"batch_size": 8},
            "method": {"blocks": {"blocks": [-1]}},
            "optim__warmup_steps": 0,
            "trainer__cache_features": "on",
            "trainer__cache_folder": str(tmp_path / "features"),
            "trainer__cache_dtype": "fp32",
            **changes,
        }
        return check(plain_text(place, model=model, **settings))

    return configured


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "end"),
    [
        ({"last_stage": {}}, "bert.encoder.layer.2"),
        pytest.param({"blocks": {"blocks": [-2]}}, "bert.encoder.layer.1", marks=pytest.mark.slow),
        pytest.param({"head": {}}, "bert.pooler", marks=pytest.mark.slow),
        pytest.param({"blocks": {"blocks": [-1]}, "lora": {}}, "bert.encoder.layer.2", marks=pytest.mark.slow),
        pytest.param({"last_stage": {}, "mesa": {}}, "bert.encoder.layer.2", marks=pytest.mark.slow),
        pytest.param({"last_stage": {}, "back_razor": {}}, "bert.encoder.layer.2", marks=pytest.mark.slow),
        pytest.param({"last_stage": {}, "checkpointing": {}}, "bert.encoder.layer.2", marks=pytest.mark.slow),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, dict) else value,
)
def test_with_a_view_for_every_epoch_in_fp32_a_run_is_the_one_without_bit_for_bit(
    tmp_path: Path, small: Callable[..., Config], method: dict[str, Any], end: str
) -> None:
    assert assert_stored_features_change_nothing(tmp_path, small, TRAIN, VAL, method=method)["end"] == end


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, {"trainer__precision": "bf16"}, {"trainer__cache_dtype": "int8"}])
def test_interrupted_it_continues_with_the_features_that_are_there(
    tmp_path: Path, small: Callable[..., Config], changes: dict[str, Any]
) -> None:
    settings: dict[str, Any] = {"trainer__epochs": 3, "trainer__views": 1, "method": {"last_stage": {}}, **changes}
    results = assert_interruptions_change_nothing(tmp_path, small, (4, 14, 30), **settings)
    assert results["features"]["read"] > 0


@pytest.mark.slow
def test_an_interrupted_run_with_a_view_for_every_epoch_is_the_one_without(
    tmp_path: Path, small: Callable[..., Config]
) -> None:
    settings: dict[str, Any] = {"method": {"last_stage": {}}, "trainer__views": 2}
    run(small(**settings, trainer__cache_features="off"), tmp_path / "plain")
    interrupted_at(17, small(**settings), tmp_path / "stored")
    run(small(**settings), tmp_path / "stored")
    assert_same_training(tmp_path / "plain", tmp_path / "stored")


@pytest.mark.slow
def test_one_view_is_enough_because_texts_are_not_augmented(
    tmp_path: Path, small: Callable[..., Config], capsys: pytest.CaptureFixture[str]
) -> None:
    settings: dict[str, Any] = {"trainer__epochs": 3, "trainer__views": 1, "method": {"last_stage": {}}}
    plain = run(small(**settings, trainer__cache_features="off"), tmp_path / "plain")
    capsys.readouterr()
    results = run(small(**settings), tmp_path / "stored")
    printed = " ".join(capsys.readouterr().out.split())
    # A row has 40 tokens of 32 values in fp32, and 40 bytes of the attention mask.
    assert results["features"]["bytes"] == (TRAIN + VAL) * (40 * 32 * 4 + 40)
    (store,) = stores(tmp_path)
    assert (store / "rows").stat().st_size == results["features"]["bytes"]
    assert "Features of bert.encoder.layer.2 (40 × 32, fp32): 1 view of 102 training texts and 26 val texts" in printed
    assert "All views" not in printed
    assert (results["features"]["computed"], results["features"]["read"]) == (TRAIN + VAL, 2 * (TRAIN + VAL))
    states = [checkpoint.read(tmp_path / name / checkpoint.NAME)["state_dict"] for name in ("plain", "stored")]
    for name, value in states[0].items():  # batches are padded to other lengths, which changes the rounding
        torch.testing.assert_close(states[1][name], value, rtol=1e-3, atol=1e-4)
    assert results["accuracy"] == plain["accuracy"]


@pytest.mark.slow
def test_features_can_be_stored_in_advance(
    tmp_path: Path, small: Callable[..., Config], capsys: pytest.CaptureFixture[str]
) -> None:
    config = small(trainer__epochs=2, trainer__views=2)
    features = fill_features(config)
    assert sum(store.missing() for store in features.stores) == 0
    assert "All views are equal, because the texts are not augmented. Set trainer.views=1." in " ".join(
        capsys.readouterr().out.split()
    )
    results = run(config, tmp_path / "stored")
    assert results["features"]["computed"] == 0
    run(small(trainer__epochs=2, trainer__cache_features="off"), tmp_path / "plain")
    assert_same_training(tmp_path / "plain", tmp_path / "stored")


@pytest.mark.slow
def test_dropout_ends_the_prefix_and_the_setting_is_named(
    tmp_path: Path, small: Callable[..., Config], capsys: pytest.CaptureFixture[str]
) -> None:
    model = {"kwargs": {}}
    report = run(small(model=model, trainer__max_steps=2), tmp_path / "on")["features"]
    assert report["end"] == "bert.embeddings.LayerNorm"
    reason = "bert.embeddings.dropout draws random numbers, unless dropout is disabled (for BERT,"
    assert reason in " ".join(capsys.readouterr().out.split())
    settings: dict[str, Any] = {"trainer__cache_features": "auto", "trainer__views": 1, "trainer__max_steps": 20}
    assert "features" not in run(small(model=model, **settings), tmp_path / "auto")
    assert "Features are not stored (trainer.cache_features=auto): computing the features takes only" in " ".join(
        capsys.readouterr().out.split()
    )


@pytest.mark.slow
def test_what_cannot_be_stored_is_refused(tmp_path: Path, small: Callable[..., Config]) -> None:
    with pytest.raises(
        UserError,
        match=r"cache_features=on: The network has no frozen prefix \(layers with constant outputs\): bert\..*trains",
    ):
        run(small(method={"full": {}}), tmp_path / "full")
    with pytest.raises(UserError, match=r"The method lisa selects the trained parameters in each step"):
        run(small(method={"lisa": {}}), tmp_path / "lisa")
    with pytest.raises(UserError, match=r"trainer\.cache_limit must be at least"):
        run(small(trainer__cache_limit="1KB"), tmp_path / "limit")
    assert not stores(tmp_path)


@pytest.mark.slow
def test_step_statistics_compare_no_padding(tmp_path: Path, small: Callable[..., Config]) -> None:
    """With stored features, the statistics of the blocks after the prefix also exclude padding."""
    rows = []
    for name in ("off", "on", "on"):
        folder = tmp_path / f"run{len(rows)}"
        run(small(trainer__cache_features=name, trainer__views=1, step_stats__interval=1, trainer__max_steps=2), folder)
        rows.append([row["compared"][2:] for row in step_stats_file(folder).read()])
    assert rows[0] == rows[1] == rows[2]
