"""Tests of the memory budget: a run is rejected before it writes a file, or stopped when it exceeds the budget."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from efficient_ft.config import Config, check
from efficient_ft.core.errors import MemoryLimitError, SettingError, UserError
from efficient_ft.core.process_memory import HighWaterMark, lifetime_peak_bytes, release_freed_memory, resident_bytes
from efficient_ft.cost import Demand, Forward, Prediction, count_evaluation, predict
from efficient_ft.models import factory
from efficient_ft.training.callbacks.recorder import stop_on_interrupt
from efficient_ft.training.costs import step_spec
from efficient_ft.training.kinds.registry import kind_of
from efficient_ft.training.memory import budget
from efficient_ft.training.memory import watch as memory_watch
from efficient_ft.training.memory.budget import Predictor
from efficient_ft.training.memory.watch import within_budget
from efficient_ft.training.run import _within_budget, run
from tests.conftest import unwrapped
from tests.data.mask_pictures import write_folder
from tests.planning.common import SETTINGS, configure
from tests.training.test_segmentation_run import plain_segmentation
from tests.training.test_text_run import plain_text, write_place


def of_run(*settings: str, memory: str) -> Config:
    return configure([*SETTINGS, "method=full", "trainer.progress=false", *settings, f"memory={memory}"])


@pytest.mark.parametrize("wrong", ["4", "4.5", "fourGB", "0GB"])
def test_a_budget_needs_a_unit(wrong: str) -> None:
    with pytest.raises(SettingError, match=rf"memory must be a number with one of the units .* got {wrong}\."):
        of_run(memory=wrong)


@pytest.mark.slow
def test_a_run_above_its_budget_is_rejected_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"memory=200MB \(191 MiB\): the run would take about .* No recipe for this model fits"
    ):
        run(of_run(memory="200MB"), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize("bf16", [300, 900])
def test_a_run_that_fits_only_in_bf16_uses_bf16(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], bf16: int
) -> None:
    peaks = {"fp32": 800 * 2**20, "bf16": bf16 * 2**20}
    monkeypatch.setattr("efficient_ft.training.precision.has_bf16_units", lambda device: True)
    asked = _predicting(monkeypatch, lambda config: {"training": peaks[config.trainer.precision]})
    plain = of_run(memory="500MiB").model_dump(mode="json")
    plain["trainer"]["precision"] = "auto"
    config = check(plain).with_precision("fp32")
    data = kind_of(config).open(config, factory.input_of(config.model))
    predictor = Predictor(config, data, 0, torch.device("cpu"))
    if bf16 > 500:
        with pytest.raises(MemoryLimitError, match=r"the run would take about 800 MiB"):
            _within_budget(config, data, tmp_path, predictor, tmp_path)
        return
    chosen, predicted = _within_budget(config, data, tmp_path, predictor, tmp_path)
    assert chosen.trainer.precision == "bf16"
    assert predicted is not None
    assert predicted.peak_bytes == peaks["bf16"]
    assert "Precision: bf16, because the run does not fit" in unwrapped(capsys.readouterr().out)
    assert {one.trainer.precision for one in asked} == {"fp32", "bf16"}


def _predicting(monkeypatch: pytest.MonkeyPatch, phases: Callable[[Config], dict[str, int]]) -> list[Config]:
    """Replace the predictor by `phases`, and return the list of predicted configurations."""
    asked: list[Config] = []

    def predict(self: Predictor, config: Config) -> Prediction:
        asked.append(config)
        return Prediction(0, phases(config))

    monkeypatch.setattr(Predictor, "__call__", predict)
    monkeypatch.setattr(Predictor, "demand", lambda self, config: Demand(0, 0, 0, 0, 0, 0))
    monkeypatch.setattr(budget, "memory_limit_bytes", lambda: 10**15)
    return asked


def _rejected(folder: Path, *settings: str) -> str:
    with pytest.raises(UserError) as error:
        run(of_run(*settings, memory="2TB"), folder / "run")
    return str(error.value)


@pytest.mark.slow
def test_the_rejection_names_the_batch_that_would_fit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked = _predicting(monkeypatch, lambda config: {"training": 250 * 10**9 * config.data.batch_size})
    text = _rejected(tmp_path, "data.batch_size=32")
    assert [one.data.batch_size for one in asked] == [32, 32, 16, 8]
    assert "The run needs the most memory for training (data.batch_size=32, model.image_size=32)." in text
    assert (
        "With data.batch_size=8 trainer.grad_accum_steps=4, the run is predicted to fit. To find recipes that fit, run"
        in text
    )


@pytest.mark.slow
def test_the_rejection_names_the_evaluation_batch_that_would_fit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def phases(config: Config) -> dict[str, int]:
        return {"evaluation": 10**11 * (config.data.eval_batch_size or 0), "training": 10**10 * config.data.batch_size}

    _predicting(monkeypatch, phases)
    text = _rejected(tmp_path, "data.eval_batch_size=64")
    assert "The run needs the most memory for evaluation (data.eval_batch_size=64, model.image_size=32)." in text
    assert "With data.eval_batch_size=16, the run is predicted to fit. To find recipes that fit, run" in text


@pytest.mark.slow
def test_the_rejection_names_workers_and_the_image_size(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _predicting(monkeypatch, lambda config: {"reading training batches": 10**13 * (config.data.num_workers == 0)})
    assert "With data.num_workers=1, the run is predicted to fit" in _rejected(tmp_path)
    _predicting(monkeypatch, lambda config: {"training": 10**13 * (config.model.image_size != 32)})
    assert "With model.image_size=32, the run is predicted to fit" in _rejected(tmp_path, "model.image_size=48")


@pytest.mark.slow
def test_evaluation_and_smaller_parts_count() -> None:
    config = of_run("data.batch_size=128", "data.eval_batch_size=8", memory="1TB")
    images = kind_of(config).open(config, factory.input_of(config.model))
    predictor = Predictor(config, images, 0, torch.device("cpu"))

    def demand(**sizes: int) -> Demand:
        return predictor.demand(config.model_copy(update={"data": config.data.model_copy(update=sizes)}))

    whole, part, large = demand(), demand(batch_size=32), demand(eval_batch_size=128)
    assert whole.step_bytes > part.step_bytes > whole.optimizer_bytes
    assert large.evaluation.peak_bytes > 8 * whole.evaluation.peak_bytes
    assert large.phases("mimalloc")["evaluation"] > whole.phases("mimalloc")["evaluation"]


def test_every_phase_is_in_the_peak() -> None:
    plain = Demand(10**8, 10**8, 0, 10**8, 10**6, 0, evaluation=Forward(0, 10**7, 10**6))
    peak = predict(plain, 10**9, "system", "cpu").peak_bytes
    changes: list[dict[str, Any]] = [
        {"evaluation": Forward(10**9, 0, 0)},
        {"evaluation": Forward(0, 10**9, 0)},
        {"load_bytes": 10**9},
        {"evaluation_load_bytes": 10**9},
        {"examples": Forward(0, 10**9, 0)},
        {"examples_load_bytes": 10**9},
        {"inspection_bytes": 2 * 10**9},  # data are inspected before the weights are loaded
        {"copies": 10},
        {"weights_bytes": 10**9},
    ]
    for change in changes:
        assert predict(replace(plain, **change), 10**9, "system", "cpu").peak_bytes > peak + 5 * 10**8, change


def test_a_step_in_16_bits_needs_memory_for_its_products() -> None:
    plain = Demand(10**8, 10**8, 0, 10**8, 10**6, 0)
    plain, half = (replace(plain, autocast=autocast).phases("mimalloc") for autocast in (False, True))
    assert half["training"] == plain["training"] + 25 * 2**20
    assert {name for name in plain if plain[name] != half[name]} == {"training"}


def test_every_phase_can_be_the_largest() -> None:
    """Each phase can have the largest demand, except the first loading of the weights."""
    plain = Demand(10**8, 10**8, 0, 10**8, 10**6, 0, evaluation=Forward(0, 10**7, 10**6))
    large = Forward(0, 10**10, 0)
    changes: dict[str, dict[str, Any]] = {
        "inspecting the data": {"inspection_bytes": 10**10},
        "training": {"step_bytes": 10**10},
        "reading training batches": {"load_bytes": 10**10},
        "evaluation": {"evaluation": large, "copies": 2},
        "reading evaluation batches": {"evaluation_load_bytes": 10**10, "optimizer_bytes": 10**9},
        "loading the saved weights": {"weights_bytes": 10**10},
        "evaluating the saved weights": {"evaluation": large},
        "predicting examples": {"examples": large},
        "counting the cost": {"weights_bytes": 10**10, "copies": 10},
        "continuing": {"resumed": True, "optimizer_bytes": 10**9, "step_bytes": 11 * 10**8},
    }
    for name, change in changes.items():
        assert predict(replace(plain, **change), 10**9, "system", "cpu").phase == name
    assert replace(plain, resumed=True).phases("system").keys() - changes.keys() == {"loading the weights"}


@pytest.mark.slow
def test_a_run_with_texts_and_one_with_masks_have_budgets(tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    place = write_place(tmp_path / "texts")
    images = write_folder(tmp_path / "shapes", {"train": 12, "val": 4, "test": 4})
    for plain in (plain_text(place, method={"full": {}}), plain_segmentation(images)):
        config = check({**plain, "memory": "1MB"})
        with pytest.raises(UserError, match=r"memory=1MB .*: the run would take about"):
            run(config, tmp_path / "rejected")
        assert not (tmp_path / "rejected").exists()
        results = run(check({**plain, "memory": "1TB"}), tmp_path / f"run_{config.task}")
        memory = results["memory"]
        assert memory["peak_bytes"] >= memory["step_peak_bytes"]
        assert memory["peak_bytes"] == pytest.approx(lifetime_peak_bytes(), rel=0.01)
        assert memory["predicted_peak_bytes"] > memory["before_model_bytes"]


@pytest.mark.slow
def test_workers_are_printed_and_count_in_the_container(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    limit = resident_bytes() + 10**9
    monkeypatch.setattr(budget, "memory_limit_bytes", lambda: limit)
    config = of_run(memory="1TB")
    config = config.model_copy(update={"data": config.data.model_copy(update={"num_workers": 64})})
    with pytest.raises(UserError, match=r"data\.num_workers=64: the run needs about .* this machine or its container"):
        run(config, tmp_path / "run")
    assert "The worker processes (data.num_workers=64) need about " in unwrapped(capsys.readouterr().out)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_the_watch_covers_evaluation_and_costs(tmp_path: Path) -> None:
    run(_plain(["method=full", "trainer.progress=false"]), tmp_path / "run")
    for settings in (["cost_only=true"], [f"evaluate={tmp_path / 'run'}"]):
        with pytest.raises(UserError, match=r"memory=1MB .*: the run was stopped, because"):
            run(of_run(*settings, memory="1MB"), tmp_path / "other")


@pytest.mark.skipif(sys.platform != "linux", reason="the system's mark")
def test_marks_before_a_measurement_count_in_the_peak() -> None:
    held = torch.ones(60 * 2**18)  # 60 MiB
    peak = lifetime_peak_bytes()
    del held
    release_freed_memory()
    with HighWaterMark():
        pass
    assert lifetime_peak_bytes() >= peak - 2**22  # the kernel's counter is inexact by a few pages


@pytest.mark.slow
def test_a_run_is_stopped_when_it_passes_its_budget(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _predicting(monkeypatch, lambda config: {"training": 0})
    with pytest.raises(
        UserError, match=r"memory=100MB \(95\.4 MiB\): .* stopped, because .* [MG]iB of memory was used by the process"
    ):
        run(of_run(memory="100MB"), tmp_path / "run")


def test_the_guard_stops_between_two_operations_and_leaves_nothing_behind() -> None:
    import threading

    before = signal.getsignal(memory_watch._SIGNAL)
    config = of_run(memory="1MB")

    def work() -> None:
        with within_budget(config, torch.device("cpu")):
            for _ in range(1000):
                time.sleep(0.01)

    with pytest.raises(UserError, match="memory=1MB"):
        work()
    assert signal.getsignal(memory_watch._SIGNAL) is before
    assert not any(thread.name == "memory budget" for thread in threading.enumerate())


def test_a_slurm_job_above_its_budget_is_not_requeued(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    recorder: Any = SimpleNamespace(stop_requested=None, handler=None)
    config = of_run(memory="1MB")

    def work() -> None:
        with within_budget(config, torch.device("cpu")), stop_on_interrupt(recorder):
            for _ in range(300):
                time.sleep(0.01)

    with pytest.raises(UserError, match="memory=1MB"):
        work()
    assert recorder.stop_requested is None


def test_a_request_to_stop_that_comes_while_the_watch_ends_has_no_effect(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error raised in the block, such as a message about the data, is kept."""
    config, join = of_run(memory="1MB"), memory_watch._Watch.join

    def late(watch: memory_watch._Watch) -> None:
        signal.raise_signal(memory_watch._SIGNAL)
        join(watch)

    monkeypatch.setattr(memory_watch._Watch, "join", late)

    def read() -> None:
        with within_budget(config, torch.device("cpu"), armed=False):
            time.sleep(0.3)
            memory_watch.stop_from_now_on(config)

    with pytest.raises(UserError, match="while the data were read"):
        read()
    assert memory_watch._Watch.running is None


@pytest.mark.parametrize(("live", "stopped"), [(90, False), (98, False), (105, True)])
def test_freed_memory_is_given_back_before_a_run_is_stopped(
    monkeypatch: pytest.MonkeyPatch, live: int, stopped: bool
) -> None:
    held, released = [8], []

    class Process:
        def memory_info(self) -> Any:
            return SimpleNamespace(rss=(live + held[0]) * 10**6)

    def release() -> None:
        released.append(held[0])
        held[0] = 0

    monkeypatch.setattr(memory_watch.psutil, "Process", Process)
    monkeypatch.setattr(memory_watch, "release_freed_memory", release)
    expected = pytest.raises(UserError, match="used by the process") if stopped else nullcontext()
    with expected, within_budget(of_run(memory="100MB"), torch.device("cpu")):
        time.sleep(0.3)
    assert released == [8]


@pytest.mark.parametrize(("size", "often"), [(98.0, False), (99.5, True)])
def test_memory_is_released_more_often_very_close_to_the_budget(
    monkeypatch: pytest.MonkeyPatch, size: float, often: bool
) -> None:
    released: list[float] = []
    process = SimpleNamespace(memory_info=lambda: SimpleNamespace(rss=size * 10**6))
    monkeypatch.setattr(memory_watch.psutil, "Process", lambda: process)
    monkeypatch.setattr(memory_watch, "release_freed_memory", lambda: released.append(size))
    with within_budget(of_run(memory="100MB"), torch.device("cpu")):
        time.sleep(0.4)  # less than the time between two releases further away from the budget
    assert (len(released) > 1) == often
    assert released


def _plain(settings: Sequence[str]) -> Config:
    return configure([*SETTINGS, *settings])


def test_without_a_budget_nothing_is_watched() -> None:
    import threading

    with within_budget(_plain(["method=full"]), torch.device("cpu")):
        assert not any(thread.name == "memory budget" for thread in threading.enumerate())


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="limits the memory of a process")
def test_the_limits_of_the_process_count(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(budget, "process_limit_bytes", lambda: resident_bytes() + 2**20)
    with pytest.raises(UserError, match=r"the limits of this process allow .*ulimit -v"):
        run(of_run(memory="1TB"), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_evaluation_in_bf16_counts_the_last_layer_in_fp32(tmp_path: Path) -> None:
    """A U-Net with a wide last layer. Evaluation converts the input of this layer, its largest tensor, to fp32."""
    images = write_folder(tmp_path / "shapes", {"train": 12, "val": 4, "test": 4})
    kwargs = {"decoder_channels": [16, 16, 16, 16, 64]}
    examples = []
    for precision in ("bf16", "fp32"):
        config = check(plain_segmentation(images, model={"kwargs": kwargs}, trainer__precision=precision))
        predictor = Predictor(
            config, kind_of(config).open(config, factory.input_of(config.model)), 0, torch.device("cpu")
        )
        demand = predictor.demand(config)
        counted = demand.evaluation
        examples.append(demand.examples)
        size = predictor.readings(config)[1].size
        pixels = counted.batch_bytes // (3 * 4 + 8)  # fp32 images and int64 masks
        samples = pixels // (size[0] * size[1])
        plain = count_evaluation(predictor.network(config), step_spec(config), samples, size)
        if precision == "fp32":
            assert counted == plain
        else:
            # The input exists in both precisions. The logits of the three classes are in fp32.
            assert counted.largest_bytes == pixels * 64 * 4 > plain.largest_bytes
            assert counted.peak_bytes >= pixels * (64 * (2 + 4) + 3 * 4)
    assert examples[0] == examples[1], "examples are predicted in fp32"
    assert examples[0].peak_bytes > 0
