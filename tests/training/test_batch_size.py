"""Tests of data.batch_size=auto and data.effective_batch_size."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from efficient_ft.config import Config, check, fingerprint
from efficient_ft.core.errors import SettingError, UserError
from efficient_ft.cost import Demand, Prediction
from efficient_ft.models import factory
from efficient_ft.record.config_file import read_config
from efficient_ft.training.kinds.registry import kind_of
from efficient_ft.training.memory import batch_size, budget
from efficient_ft.training.memory.batch_size import candidates, largest_fitting, provisional, with_selected_batch_size
from efficient_ft.training.memory.budget import Predictor
from efficient_ft.training.run import run
from tests.data.mask_pictures import write_folder
from tests.training.runs import assert_same_run, interrupted_at, plain_config
from tests.training.test_segmentation_run import plain_segmentation
from tests.training.test_text_run import plain_text, write_place

GB = 10**9


def auto(**changes: Any) -> Config:
    return check(plain_config(data__batch_size="auto", **changes))


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """A machine with `room` bytes, on which a run takes `each` bytes for each sample of a batch."""
    machine = {"room": 100 * GB, "each": GB}

    def predict(self: Predictor, config: Config) -> Prediction:
        return Prediction(0, {"training": machine["each"] * config.data.batch_size})

    monkeypatch.setattr(Predictor, "__call__", predict)
    monkeypatch.setattr(Predictor, "demand", lambda self, config: Demand(0, 0, 0, 0, 0, 0))
    monkeypatch.setattr(batch_size, "room_bytes", lambda: machine["room"])
    for module in (batch_size, budget):
        monkeypatch.setattr(module, "memory_limit_bytes", lambda: 10**15)
    return machine


@pytest.mark.slow
def test_a_run_selects_records_and_prints_its_batch_size(
    memory: dict[str, int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = auto(trainer__max_steps=6)
    results = run(config, tmp_path / "run")
    printed = " ".join(capsys.readouterr().out.split())
    assert "Batch size: 64, 21 steps per epoch (data.batch_size=auto; 96 would not fit)." in printed
    assert "predicted to need 59.6 GiB of memory, and may use 83.8 GiB (90 % of the 93.1 GiB that" in printed
    assert (results["config"]["data"]["batch_size"], results["memory"]["predicted_peak_bytes"]) == (64, 64 * GB)
    stored = read_config(tmp_path / "run")
    assert stored.data.batch_size == 64
    assert stored.data.batch_size_selected
    assert fingerprint(stored) == fingerprint(config) != fingerprint(check(plain_config(data__batch_size=64)))


@pytest.mark.slow
def test_a_resumed_run_keeps_its_batch_size_and_equals_a_run_with_this_size(
    memory: dict[str, int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The steps equal those of an uninterrupted run whose batch size is set, although less memory is available."""
    effective = {"data__effective_batch_size": 128}
    run(check(plain_config(data__batch_size=64, **effective)), tmp_path / "whole")
    interrupted_at(12, auto(**effective), tmp_path / "run")
    memory["room"] = 10 * GB
    run(auto(**effective), tmp_path / "run")
    printed = " ".join(capsys.readouterr().out.split())
    assert "Accumulation: 64 × 2 accumulated batches = 128 samples per optimizer step" in printed
    assert "Batch size: 64 × 2 accumulated batches = 128 samples per optimizer step, which the run selected" in printed
    assert_same_run(tmp_path / "whole", tmp_path / "run")


@pytest.mark.slow
def test_no_batch_size_fits(memory: dict[str, int], tmp_path: Path) -> None:
    memory["each"] = 200 * GB
    with pytest.raises(UserError) as error:
        run(auto(), tmp_path / "run")
    assert str(error.value).startswith("data.batch_size=auto: no batch size fits into 90 % of the 93.1 GiB that this")
    assert "With data.batch_size=1, the run needs about 186 GiB, most of it for training." in str(error.value)
    assert not (tmp_path / "run").exists()
    with pytest.raises(UserError, match=r"memory=90GB \(83.8 GiB\): the run would take about 186 GiB of memory"):
        run(auto(memory="90GB"), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["segmentation", "text"])
def test_other_kinds_select_a_batch_size(kind: str, memory: dict[str, int], tmp_path: Path) -> None:
    if kind == "text":
        plain = plain_text(write_place(tmp_path), data={"batch_size": "auto"})
    else:
        images = write_folder(tmp_path / "shapes", {"train": 24, "val": 6, "test": 6})
        plain = plain_segmentation(images, data={"batch_size": "auto", "effective_batch_size": 12})
        memory["room"] = 5 * GB
    config = provisional(check(plain))
    data = kind_of(config).open(config, factory.input_of(config.model))
    chosen, predicted, _ = with_selected_batch_size(config, data, None)
    assert predicted is not None
    assert (chosen.data.batch_size, chosen.trainer.grad_accum_steps) == ((8, 1) if kind == "text" else (4, 3))
    assert len(next(iter(data.train_loader()))[1]) == chosen.data.batch_size


@pytest.mark.slow
def test_the_predicted_memory_is_within_the_budget(tmp_path: Path) -> None:
    results = run(auto(memory="3GB", trainer__max_steps=3), tmp_path / "run")
    found = results["memory"]
    assert found["predicted_peak_bytes"] <= found["budget_bytes"] == 3 * GB
    assert json.loads((tmp_path / "run" / "results.json").read_text())["config"]["data"]["batch_size"] >= 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"data__batch_size": "auto1"},
            r"data.batch_size must be an integer >= 1 and <= 65536 or auto, got auto1",
        ),
        ({"data__batch_size": 0}, r"data.batch_size must be an integer >= 1 and <= 65536 or auto, got 0"),
        ({"data__effective_batch_size": 0}, r"data.effective_batch_size must be an integer >= 1 .* got 0"),
        (
            {"data__batch_size": 24, "data__effective_batch_size": 64},
            r"data.effective_batch_size must be a multiple of data.batch_size=24, got 64. With data.batch_size=auto",
        ),
        (
            {"data__batch_size": "auto", "data__effective_batch_size": 64, "trainer__grad_accum_steps": 2},
            r"trainer.grad_accum_steps must be 1 with data.batch_size=auto, got 2. .* Remove trainer.grad_accum_steps",
        ),
        (
            {"data__batch_size": "auto", "trainer__compile": True},
            r"data.batch_size must be an integer with trainer.compile=true, got auto",
        ),
        (
            {"data__batch_size": "auto", "jobs": 2},
            r"data.batch_size must be an integer with jobs=2 and memory=null, got auto. .* Set memory=SIZE",
        ),
    ],
)
def test_settings_that_exclude_each_other(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        check(plain_config(**changes))


@pytest.mark.slow
def test_accumulation_that_contradicts_the_effective_size_is_rejected(tmp_path: Path) -> None:
    config = check(plain_config(data__batch_size=16, data__effective_batch_size=64, trainer__grad_accum_steps=2))
    with pytest.raises(SettingError, match=r"trainer.grad_accum_steps must be 4 with data.effective_batch_size=64"):
        run(config, tmp_path / "run")
    large = check(plain_config(data__batch_size=128, data__effective_batch_size=128 * 64))
    with pytest.raises(SettingError, match=r"effective_batch_size must be at most the number of training samples"):
        run(large, tmp_path / "run")
    with pytest.raises(SettingError, match=r"must be a multiple of 1, .* and at most 100, the number of training"):
        candidates(100, 1, 128)


def test_a_cost_report_rejects_an_automatic_batch_size(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"an integer with efficient-ft cost, got auto. Only efficient-ft train and"):
        run(auto(cost_only=True), tmp_path)


def test_the_identity_contains_the_budget_but_not_the_selected_size() -> None:
    names = {str(size): fingerprint(auto().with_batch_size(size, 1)) for size in (8, 64)} | {
        "auto": fingerprint(auto())
    }
    assert len(set(names.values())) == 1
    assert len({fingerprint(auto(memory=size)) for size in ("1GB", "1000MB", "2GB")}) == 2
    effective = {"data__effective_batch_size": 64}
    selected = [auto(**effective).with_batch_size(*sizes) for sizes in ((16, 4), (64, 1))]
    assert len({fingerprint(one) for one in [auto(**effective), *selected]}) == 1
    assert fingerprint(auto(**effective)) != fingerprint(auto())
    fixed = [check(plain_config(**effective, trainer__grad_accum_steps=steps, data__batch_size=16)) for steps in (1, 4)]
    assert fingerprint(fixed[0]) == fingerprint(fixed[1])


def test_the_candidates_are_powers_of_two_and_one_and_a_half_times_these() -> None:
    assert candidates(10**6, 1, None)[0][:9] == [1, 2, 3, 4, 6, 8, 12, 16, 24]
    assert candidates(10**6, 1, None)[0][-1] == 1024
    assert candidates(1293, 1, None) == (
        [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128],
        "an epoch must have at least 10 batches",
    )
    assert candidates(1293, 4, 96)[0] == [1, 2, 3, 4, 6, 8, 12, 24]
    assert candidates(1293, 2, 96, whole=True)[0] == [48]
    assert candidates(3, 1, None)[0] == [1]


@given(st.integers(0, 1200), st.sampled_from([None, 1, 6, 64, 97, 360]))
def test_the_largest_fitting_size_is_found_without_much_larger_sizes(most: int, effective: int | None) -> None:
    sizes, _ = candidates(10**6, 1, effective)
    asked: list[int] = []

    def excess(size: int) -> int:
        asked.append(size)
        return size - most

    expected = max((size for size in sizes if size <= most), default=None)
    assert largest_fitting(sizes, excess) == expected
    if effective is None:
        assert max(asked) <= max(8, 2 * most)
