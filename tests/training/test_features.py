"""Tests of runs on stored features of the frozen prefix: results equal those of computed features."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from efficient_ft.config import Config, check, fingerprint
from efficient_ft.core.errors import SettingError, UserError
from efficient_ft.data import row_store
from efficient_ft.data.row_store import RowStore, StoreFullError
from efficient_ft.models.prefix_form import Form
from efficient_ft.training.features import prefix as features_module
from efficient_ft.training.features.fill import fill_features
from efficient_ft.training.output import checkpoint
from efficient_ft.training.run import run
from tests.training.runs import assert_same_run, interrupted_at, plain_config, rows_of

pytestmark = pytest.mark.usefixtures("without_cost")

#: Numbers of training and validation images of the digits.
TRAIN, VAL = 1293, 145


@pytest.fixture
def small(tmp_path: Path) -> Callable[..., Config]:
    """Return the configuration of a run that trains the last block, with a deterministic prefix."""

    def configured(**changes: Any) -> Config:
        return check(
            plain_config(
                **{
                    "model__drop_path_rate": 0.0,
                    "model__drop_rate": 0.0,
                    "model__frozen_bn": True,
                    "method": {"blocks": {"blocks": [-1]}},
                    "trainer__cache_features": "on",
                    "trainer__cache_folder": str(tmp_path / "features"),
                    **changes,
                }
            )
        )

    return configured


def assert_same_training(a: Path, b: Path) -> None:
    """Assert that weights, losses and accuracies of two runs are equal. FLOPs may differ."""
    one, other = checkpoint.read(a / checkpoint.NAME), checkpoint.read(b / checkpoint.NAME)
    assert all(torch.equal(value, other["state_dict"][name]) for name, value in one["state_dict"].items())
    losses = [[row.get("train_loss_epoch") for row in rows_of(folder)] for folder in (a, b)]
    assert losses[0] == losses[1]
    accuracies = [[row.get("val_accuracy") for row in rows_of(folder)] for folder in (a, b)]
    assert accuracies[0] == accuracies[1]


def assert_stored_features_change_nothing(
    tmp_path: Path, small: Callable[..., Config], train: int, val: int, **settings: Any
) -> dict[str, Any]:
    """Assert that runs that store and read a view for every epoch in fp32 equal a run without stored features.

    Return the report of the run that stores the features.
    """
    plain = run(small(trainer__cache_features="off", **settings), tmp_path / "plain")
    assert "features" not in plain
    stored = small(trainer__views=2, trainer__cache_dtype="fp32", **settings)
    results = run(stored, tmp_path / "stored")
    assert_same_run(tmp_path / "plain", tmp_path / "stored")
    report: dict[str, Any] = results["features"]
    assert (report["computed"], report["read"]) == (2 * train + val, val)
    # All features are stored, so another run with this prefix computes none.
    again = run(stored, tmp_path / "again")
    assert_same_training(tmp_path / "plain", tmp_path / "again")
    assert (again["features"]["computed"], again["features"]["read"]) == (0, 2 * train + 2 * val)
    assert again["accuracy"] == results["accuracy"] == plain["accuracy"]
    assert again["totals"]["flops"] < results["totals"]["flops"] == plain["totals"]["flops"]
    return report


def assert_interruptions_change_nothing(
    tmp_path: Path, small: Callable[..., Config], steps: Sequence[int], **settings: Any
) -> dict[str, Any]:
    """Assert that a run that is interrupted in some steps equals an uninterrupted run. Return its results."""
    run(small(**settings), tmp_path / "straight")
    other = small(**settings, trainer__cache_folder=str(tmp_path / "other"))
    for step in steps:
        interrupted_at(step, other, tmp_path / "broken")
    results: dict[str, Any] = run(other, tmp_path / "broken")
    assert_same_training(tmp_path / "straight", tmp_path / "broken")
    return results


def stores(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "features").glob("*"))


# ------------------------------------------------------------------------------------------------ results
@pytest.mark.slow
def test_with_a_view_for_every_epoch_in_fp32_a_run_is_the_one_without_bit_for_bit(
    tmp_path: Path, small: Callable[..., Config]
) -> None:
    report = assert_stored_features_change_nothing(tmp_path, small, TRAIN, VAL)
    assert (report["end"], report["reason"]) == ("blocks.0", "blocks.1.norm1 trains")


@pytest.mark.slow
def test_views_that_no_epoch_uses_are_not_counted_as_missing(
    tmp_path: Path, small: Callable[..., Config], capsys: pytest.CaptureFixture[str]
) -> None:
    config = small(trainer__views=3, trainer__epochs=2)
    run(config, tmp_path / "first")
    said = " ".join(capsys.readouterr().out.split())
    assert "The run uses 2 of 3 views (trainer.epochs=2)." in said
    assert f"{2 * TRAIN + VAL} of {2 * TRAIN + VAL} features must be computed" in said
    run(config, tmp_path / "second")
    assert "All features are stored" in capsys.readouterr().out
    assert fill_features(config).report()["computed"] == TRAIN  # efficient-ft cache stores all views
    said = " ".join(capsys.readouterr().out.split())
    assert f"{TRAIN} of {3 * TRAIN + VAL} features must be computed" in said


@pytest.mark.slow
def test_augmented_views_are_stored_and_mixed_images_are_not(
    tmp_path: Path, small: Callable[..., Config], capsys: pytest.CaptureFixture[str]
) -> None:
    augment = {"name": "strong", "mixup": 0.0, "cutmix": 0.0}
    run(small(trainer__cache_features="off", data__augment=augment), tmp_path / "plain")
    run(small(trainer__views=2, trainer__cache_dtype="fp32", data__augment=augment), tmp_path / "stored")
    assert_same_run(tmp_path / "plain", tmp_path / "stored")
    capsys.readouterr()
    mixed = run(small(trainer__cache_features="auto", data__augment__mixup=0.2), tmp_path / "mixed")
    said = " ".join(capsys.readouterr().out.split())
    assert "Features are not stored (trainer.cache_features=auto): data.augment.mixup must be 0" in said
    assert "features" not in mixed


@pytest.mark.first(1, "exhaustive")
@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["fp16", "int8"])
def test_later_epochs_read_what_the_first_ones_stored(
    tmp_path: Path, small: Callable[..., Config], dtype: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = small(trainer__views=1, trainer__epochs=3, trainer__cache_dtype=dtype, data__num_workers=1)
    results = run(config, tmp_path / "run")
    report = results["features"]
    assert (report["computed"], report["read"]) == (TRAIN + VAL, 2 * TRAIN + 2 * VAL)
    assert results["accuracy"]["last"] > 0.3
    (store,) = stores(tmp_path)
    assert (store / "rows").stat().st_size == report["bytes"]
    printed = " ".join(capsys.readouterr().out.split())
    assert f"Features of blocks.0 (65 × 16, {dtype}): 1 view of {TRAIN} training images" in printed
    run(config, tmp_path / "again")
    assert_same_training(tmp_path / "run", tmp_path / "again")


@pytest.mark.slow
def test_interrupted_it_continues_with_the_features_that_are_there(
    tmp_path: Path, small: Callable[..., Config]
) -> None:
    assert_interruptions_change_nothing(tmp_path, small, (4, 14, 24), trainer__epochs=3)


@pytest.mark.slow
def test_one_store_serves_every_run_with_the_same_prefix_and_no_other(
    tmp_path: Path, small: Callable[..., Config]
) -> None:
    first = run(small(trainer__max_steps=3), tmp_path / "0")["features"]
    assert first["computed"] > 0
    low_rank = {"blocks": {"blocks": [-1]}, "lbp_wht": {"bases": "l1", "order": 2}}
    same = [small(trainer__max_steps=3, method=low_rank), small(trainer__max_steps=3, optim__lr=1e-3)]
    for number, config in enumerate(same):
        assert run(config, tmp_path / f"same{number}")["features"]["computed"] == 0
    assert len(stores(tmp_path)) == 1
    others: list[dict[str, Any]] = [
        {"seed": 1},  # changes the random weights, the order and the augmentation
        {"trainer__views": 1},
        {"trainer__cache_dtype": "fp32"},
        {"data__augment__flip": True},
        {"data__val_fraction": 0.2},
        {"method": {"head": {}}},
    ]
    for number, changes in enumerate(others):
        assert run(small(trainer__max_steps=1, **changes), tmp_path / f"other{number}")["features"]["computed"] > 0
        assert len(stores(tmp_path)) == 2 + number


# ------------------------------------------------------------------------------------------------ failures
@pytest.mark.slow
def test_damaged_features_are_computed_again_and_it_is_said(
    tmp_path: Path, small: Callable[..., Config], capsys: pytest.CaptureFixture[str]
) -> None:
    run(small(), tmp_path / "straight")
    (store,) = stores(tmp_path)
    with open(store / "rows", "r+b") as file:
        file.seek(5000)
        file.write(b"\xff" * 4000)
    capsys.readouterr()
    results = run(small(), tmp_path / "damaged")
    assert f"Some features in {store} are damaged. These features are computed again." in " ".join(
        capsys.readouterr().out.split()
    )
    assert_same_training(tmp_path / "straight", tmp_path / "damaged")
    assert 0 < results["features"]["computed"] < TRAIN
    assert run(small(), tmp_path / "again")["features"]["computed"] == 0


@pytest.mark.slow
def test_a_disk_that_fills_ends_the_filling_and_not_the_run(
    tmp_path: Path,
    small: Callable[..., Config],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write, calls = RowStore.write, []

    def full_after_three(self: RowStore, *args: Any) -> None:
        calls.append(args)
        if len(calls) > 3:
            raise StoreFullError
        write(self, *args)

    monkeypatch.setattr(RowStore, "write", full_after_three)
    run(small(trainer__views=1), tmp_path / "full")
    assert len(calls) == 4
    printed = " ".join(capsys.readouterr().out.split())
    assert (
        printed.count("is full. The run continues, and features that are not stored are computed in every epoch") == 1
    )
    monkeypatch.undo()
    other = small(trainer__views=1, trainer__cache_folder=str(tmp_path / "other"))
    run(other, tmp_path / "room")
    assert_same_training(tmp_path / "full", tmp_path / "room")


# ------------------------------------------------------------------------------------------------ rejected settings
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"method": {"full": {}}},
            r"trainer\.cache_features=on: The network has no frozen prefix \(layers with constant outputs\): .* trains"
            r".* Use trainer\.cache_features=off, or a method that trains only the last part",
        ),
        ({"method": {"lisa": {}}}, r"The method lisa selects the trained parameters in each step"),
        (
            {"trainer__cache_limit": "1MB"},
            r"trainer\.cache_limit must be at least 0\.02GiB for these",
        ),
        ({"trainer__cache_limit": "1"}, r"trainer\.cache_limit must be a number with one of the units"),
        ({"trainer__views": 0}, r"trainer\.views must be"),
        ({"trainer__cache_features": "yes"}, r"trainer\.cache_features must be"),
    ],
)
def test_what_cannot_be_stored_is_refused_before_training(
    tmp_path: Path, small: Callable[..., Config], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        run(small(**changes), tmp_path / "run")


def test_a_disk_without_room_is_refused(
    tmp_path: Path, small: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_store.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 1000})())
    with pytest.raises(SettingError, match=r"trainer\.cache_folder must be on a disk with .* of free space for these"):
        run(small(), tmp_path / "run")
    assert not stores(tmp_path)


@pytest.mark.first(2, "exhaustive")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"method": {"full": {}}}, "The network has no frozen prefix"),
        ({"trainer__epochs": 2}, "with trainer.epochs=2 and trainer.views=2, no features would be used twice."),
        ({"method": {"lisa": {}}}, "The method lisa selects the trained parameters in each step"),
        ({"trainer__cache_limit": "1KB"}, "trainer.cache_limit must be at least"),
        ({"model__frozen_bn": False}, "of the FLOPs of a training step"),
    ],
)
def test_auto_stores_none_where_nothing_is_gained_and_says_why(
    tmp_path: Path,
    small: Callable[..., Config],
    changes: dict[str, Any],
    reason: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    settings = {"trainer__cache_features": "auto", "trainer__epochs": 3, "trainer__views": 2, **changes}
    results = run(small(**settings), tmp_path / "run")
    assert "features" not in results
    printed = " ".join(capsys.readouterr().out.split())
    assert "Features are not stored (trainer.cache_features=auto):" in printed
    assert reason in printed


@pytest.mark.slow
def test_auto_stores_what_is_used_again(tmp_path: Path, small: Callable[..., Config]) -> None:
    results = run(small(trainer__cache_features="auto", trainer__epochs=3, trainer__views=1), tmp_path / "run")
    assert results["features"]["read"] == 2 * TRAIN + 2 * VAL


def test_settings_of_stored_features_name_another_run_only_where_they_are_on(small: Callable[..., Config]) -> None:
    off = small(trainer__cache_features="off")
    assert fingerprint(small(trainer__cache_features="off", trainer__views=7)) == fingerprint(off)
    on = small()
    assert fingerprint(on) != fingerprint(off)
    assert fingerprint(small(trainer__views=7)) != fingerprint(on)
    assert fingerprint(small(trainer__cache_folder="elsewhere", trainer__cache_limit="1TB")) == fingerprint(on)


# ------------------------------------------------------------------------------------------------ forms of the prefix
@pytest.mark.first(1, "exhaustive")
@pytest.mark.slow
@pytest.mark.parametrize("cache", ["off", "on"])
def test_a_form_of_the_prefix_is_used_and_recorded(tmp_path: Path, small: Callable[..., Config], cache: str) -> None:
    """The prefix of the digits network has a convolution with BatchNorm, which can be folded."""
    plain = run(small(trainer__cache_features=cache), tmp_path / "plain")
    folded = run(small(trainer__cache_features=cache, trainer__prefix="folded"), tmp_path / "folded")
    assert plain.get("prefix", {"form": "fp32"})["form"] == "fp32"
    assert folded["prefix"]["form"] == "folded"
    assert abs(folded["accuracy"]["last"] - plain["accuracy"]["last"]) < 0.02
    if cache == "on":
        assert len(stores(tmp_path)) == 2, "features of another form are others"


@pytest.mark.slow
def test_a_resumed_run_keeps_the_form_that_was_chosen(
    tmp_path: Path, small: Callable[..., Config], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = small(trainer__cache_features="off", trainer__prefix="auto")
    monkeypatch.setattr(features_module, "choose_form", lambda run, forms, exact: (Form.FOLDED, {}, {"folded": 0.0}))
    run(config, tmp_path / "whole")
    interrupted_at(4, config, tmp_path / "resumed")
    assert "use 'folded'. Their output deviates from fp32 by" in " ".join(capsys.readouterr().out.split())
    monkeypatch.setattr(features_module, "choose_form", lambda run, forms, exact: pytest.fail("chosen twice"))
    results = run(config, tmp_path / "resumed")
    assert results["prefix"]["form"] == "folded"
    assert_same_training(tmp_path / "whole", tmp_path / "resumed")


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", "null", '{"form": "fp33", "end": "", "reason": ""}', '{"form": "fp32"}', '{"form": 3}',
             "\x00", '{"form": "fp32", "end": 1, "reason": ""}',
             '{"form": "fp32", "end": "", "reason": "", "seconds": 3}'],
)  # fmt: skip
def test_a_damaged_choice_of_the_form_is_one_message(tmp_path: Path, text: str) -> None:
    file = tmp_path / features_module.PREFIX
    file.write_text(text)
    with pytest.raises(UserError, match=r"prefix\.json is damaged\. Remove this file to select"):
        features_module._read_choice(file)


@pytest.mark.slow
def test_auto_takes_the_form_in_which_features_are_stored(
    tmp_path: Path, small: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    run(small(trainer__prefix="folded"), tmp_path / "first")
    monkeypatch.setattr(features_module, "choose_form", lambda run, forms, exact: pytest.fail("measured"))
    results = run(small(trainer__prefix="auto"), tmp_path / "second")
    assert results["prefix"]["form"] == "folded"
    assert results["features"]["computed"] == 0
    assert len(stores(tmp_path)) == 1


@pytest.mark.slow
def test_a_form_where_nothing_is_frozen_is_refused_and_auto_says_so(
    tmp_path: Path, small: Callable[..., Config], capsys: pytest.CaptureFixture[str]
) -> None:
    settings: dict[str, Any] = {"method": {"full": {}}, "trainer__cache_features": "off"}
    with pytest.raises(UserError, match=r"folded: The network has no frozen prefix .* Use trainer\.prefix=fp32"):
        run(small(**settings, trainer__prefix="folded"), tmp_path / "refused")
    results = run(small(**settings, trainer__prefix="auto"), tmp_path / "auto")
    assert "prefix" not in results
    printed = " ".join(capsys.readouterr().out.split())
    assert "The network is not changed (trainer.prefix=auto): The network has no frozen prefix" in printed


@pytest.mark.parametrize(
    ("precision", "prefix", "used"),
    [("fp32", None, "fp32"), ("bf16", None, "auto"), ("fp16", None, "fp32"), ("bf16", "fp32", "fp32"),
     ("fp32", "auto", "auto")],
)  # fmt: skip
def test_the_prefix_is_faster_by_default_only_in_bf16(
    small: Callable[..., Config], precision: str, prefix: str | None, used: str
) -> None:
    trainer = small(trainer__cache_features="off").trainer.model_copy(update={"precision": precision, "prefix": prefix})
    assert trainer.frozen_prefix == used


@pytest.mark.slow
def test_in_bf16_the_prefix_is_folded_by_default(
    tmp_path: Path, small: Callable[..., Config], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The form is measured in the run. Only a form that is clearly slower is rejected."""
    monkeypatch.setattr(features_module, "bf16_is_emulated", lambda device: False)
    monkeypatch.setattr("efficient_ft.models.prefix_form._VETO", 1e9)
    off = {"trainer__cache_features": "off", "trainer__precision": "bf16", "trainer__epochs": 1}
    results = run(small(**off), tmp_path / "default")
    assert results["prefix"]["form"] == "bf16"
    assert results["prefix"]["deviation"]["bf16"] <= 1.1 * results["prefix"]["deviation"]["fp32"]
    assert "use 'bf16'. Their output deviates from fp32 by" in " ".join(capsys.readouterr().out.split())
    unchanged = run(small(**off, trainer__prefix="fp32"), tmp_path / "unchanged")
    assert "prefix" not in unchanged
    assert results["totals"]["flops"] == unchanged["totals"]["flops"]
    assert abs(results["accuracy"]["last"] - unchanged["accuracy"]["last"]) < 0.05


@pytest.mark.slow
def test_in_bf16_a_run_without_frozen_layers_says_nothing_about_a_prefix(
    tmp_path: Path, small: Callable[..., Config], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(features_module, "run_prefix", lambda *arguments: pytest.fail("searched"))
    results = run(
        small(method={"full": {}}, trainer__cache_features="off", trainer__precision="bf16", trainer__epochs=1),
        tmp_path,
    )
    assert "prefix" not in results
    assert "trainer.prefix" not in capsys.readouterr().out


# ------------------------------------------------------------------------------------------------ hint after a run
@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "hint"),
    [({"trainer__views": 1}, "With trainer.cache_features=on, this run would have been faster by about"),
     ({"data__augment__name": "none"}, "With trainer.cache_features=on trainer.views=1, this run would have been"),
     ({"trainer__views": 2}, None),
     ({"trainer__views": 1, "trainer__cache_limit": "1KB"}, None),
     ({"trainer__views": 1, "method": {"full": {}}}, None)],
    ids=["saved", "no augmentation", "no view is used twice", "no room", "nothing is frozen"],
)  # fmt: skip
def test_a_run_mentions_stored_features_that_would_have_saved_time(
    tmp_path: Path, small: Callable[..., Config], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    changes: dict[str, Any], hint: str | None,
) -> None:  # fmt: skip
    """The run has two epochs. Its images are augmented at random unless `changes` disables the augmentation."""
    monkeypatch.setattr(features_module, "_MENTIONED", 0.0)
    run(small(**{"trainer__cache_features": "off", **changes}), tmp_path / "run")
    output = " ".join(capsys.readouterr().out.split())
    if hint is None:
        assert "would have been faster" not in output
    else:
        assert hint in output
        assert "): epochs 2 to 2 would have read the features of blocks.0 from disk (" in output
