"""Tests of plans: the recipes that fit a budget, the recommended recipe, and rejected settings."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import efficient_ft
from efficient_ft.core.errors import SettingError, UserError
from efficient_ft.core.format import bytes_setting, format_bytes
from efficient_ft.methods import Exactness
from efficient_ft.models import factory
from efficient_ft.planning import Limits, Plan, Trial, make_plan, planner
from efficient_ft.planning.text import plan_text
from efficient_ft.planning.timing import try_recipe
from efficient_ft.report.plan_figure import plan_chart
from tests.planning.common import SETTINGS, a_plan, configure, few

pytestmark = pytest.mark.usefixtures("wide")


@pytest.mark.slow
@pytest.mark.usefixtures("three")
def test_a_plan_with_room_recommends_plain_fine_tuning() -> None:
    found = a_plan()
    assert {one.name for one in found.options} == {
        "full", "full+low_bit", "full+checkpointing, steps in backward"}  # fmt: skip
    assert found.recommended is not None
    assert found.recommended.exactness is Exactness.EXACT
    assert found.steps == 5
    assert all(one.step_seconds for one in found.options)
    text = plan_text(found)
    assert found.recommended.command in text
    assert "memory=1000GB" in text
    configure(list(found.recommended.arguments))
    series = {one.name: one for one in plan_chart(found).panels[0].series}
    assert series["exact"].y == [one.step_seconds for one in found.options if one.exactness is Exactness.EXACT]


@pytest.mark.exhaustive
@pytest.mark.usefixtures("three")
def test_a_tight_budget_excludes_and_names_the_smallest_that_would_do() -> None:
    wide = a_plan()
    by_name = {one.name: one for one in wide.options}
    growth = {name: one.process_bytes - wide.base_bytes for name, one in by_name.items()}
    assert growth["full+checkpointing, steps in backward"] < growth["full"]
    weights = max(one.counted.resident_bytes for one in wide.options)
    tight = a_plan(memory=wide.base_bytes + weights + 2**22)
    assert tight.options == ()
    assert tight.recommended is None
    assert {one.name for one in tight.excluded} == set(by_name)
    assert f"No recipe fits. The smallest sufficient budget is {bytes_setting(tight.smallest_bytes)}" in plan_text(
        tight
    )
    again = a_plan(memory=tight.smallest_bytes + 2**24)
    assert tight.smallest in {one.name for one in again.options}


@pytest.mark.slow
@pytest.mark.usefixtures("three")
def test_a_budget_below_the_weights_is_refused() -> None:
    with pytest.raises(SettingError, match=r"memory must be at least .* Choose a smaller model, data.batch_size"):
        a_plan(memory=10**6)


def test_a_time_without_images_is_refused(tmp_path: Path) -> None:
    settings = ("model=deit_tiny", "data=cifar100", f"data.root={tmp_path}")
    with pytest.raises(SettingError, match="time must be left out without images"):
        make_plan(settings, configure, Limits(10**12, seconds=60))


def test_a_compiled_run_is_refused() -> None:
    with pytest.raises(SettingError, match=r"trainer.compile must be false in a plan, got true\. The plan does not"):
        make_plan((*SETTINGS, "trainer.compile=true"), configure, Limits(10**12))


@pytest.mark.slow
@pytest.mark.usefixtures("three")
def test_a_container_with_less_memory_sets_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "memory_limit_bytes", lambda: 3 * 10**9)
    found = a_plan(memory=8 * 10**9)
    assert (found.memory_bytes, found.asked_bytes) == (3 * 10**9, 8 * 10**9)
    assert "The requested budget is 7.45 GiB, but this machine or its container has only 2.79 GiB" in plan_text(found)


@pytest.mark.slow
@pytest.mark.usefixtures("three")
def test_the_recommended_recipe_is_tried() -> None:
    asked = []

    def attempt(arguments: Sequence[str], classes: int, seconds: float) -> Trial:
        asked.append((list(arguments), classes))
        return Trial(peak_bytes=7 * 10**8, step_seconds=0.25)

    found = a_plan(attempt=attempt)
    assert found.recommended is not None
    own = [word for word in found.recommended.arguments if word != "trainer.precision=fp32"]
    assert asked == [([*own, "trainer.precision=fp32"], 10)]
    above = 7 * 10**8 + planner.RUN_ONLY
    assert found.recommended.measured_bytes == found.recommended.peak_bytes == found.base_bytes + above
    assert (found.recommended.step_seconds, found.recommended.timed) == (0.25, True)
    assert [one.measured_bytes is not None for one in found.options].count(True) == 1
    text = plan_text(found, every=True)
    shown = format_bytes(found.base_bytes + above)
    assert shown in text
    assert f"≈ {shown}" not in text
    assert "The recommended recipe ran for a few steps in a separate process" in text


@pytest.mark.exhaustive
@pytest.mark.usefixtures("three")
def test_a_recipe_that_does_not_keep_the_budget_in_its_trial_gives_way_to_the_next() -> None:
    wide = a_plan()
    need = {one.name: one.process_bytes - wide.base_bytes for one in wide.options}
    memory = wide.base_bytes + 2 * max(need.values())
    tried = []

    def attempt(arguments: Sequence[str], classes: int, seconds: float) -> Trial:
        tried.append(next(name for name, of in by_arguments.items() if of == tuple(arguments)))
        above = memory if len(tried) == 1 else need[tried[-1]]
        return Trial(above, 0.1)

    by_arguments = {one.name: one.arguments for one in wide.options}
    found = a_plan(memory=memory, attempt=attempt)
    # The excess of the first trial over its prediction is added to all others, and none of them fits.
    assert len(tried) == 1
    assert found.recommended is None
    (reason,) = [one.reason for one in found.excluded if one.name == tried[0]]
    assert reason.startswith("the process used ")
    assert reason.endswith(" in a trial, including a margin")
    assert found.smallest_bytes > memory

    tried.clear()

    def fails_first(arguments: Sequence[str], classes: int, seconds: float) -> Trial:
        trial = attempt(arguments, classes, seconds)
        if len(tried) == 1:
            raise UserError("killed by SIGKILL, probably for lack of memory")
        return trial

    found = a_plan(memory=memory, attempt=fails_first)
    assert len(set(tried)) == 2
    assert found.recommended is not None
    assert found.recommended.name == tried[1]
    assert "the trial failed: killed by SIGKILL, probably for lack of memory" in {one.reason for one in found.excluded}


@pytest.mark.exhaustive
@pytest.mark.usefixtures("three")
def test_steps_that_are_too_long_and_machines_without_room_have_no_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    def attempt(*arguments: object) -> Trial:
        raise AssertionError("tried")

    with pytest.raises(AssertionError, match="tried"):
        a_plan(attempt=attempt)
    with monkeypatch.context() as less:
        less.setattr(planner, "memory_limit_bytes", lambda: 2 * 10**9)  # this process already uses half of the limit
        assert a_plan(attempt=attempt).recommended is not None
    with monkeypatch.context() as less:
        less.setattr(planner.psutil, "virtual_memory", lambda: SimpleNamespace(available=10**6))
        assert a_plan(attempt=attempt).recommended is not None
    monkeypatch.setattr(planner, "_TRIED_STEP", 0.0)
    assert a_plan(attempt=attempt).recommended is not None


@pytest.mark.slow
def test_a_trial_takes_steps_of_the_whole_batch() -> None:
    config = configure([*SETTINGS, "method=[full,low_bit]", "data.batch_size=16", "trainer.grad_accum_steps=2"])
    trial = try_recipe(config, 10, max_seconds=1e-9)
    assert trial.step_seconds > 0
    assert trial.peak_bytes > 2**20, "the network and its step"


@pytest.mark.slow
def test_a_split_batch_fits_where_the_whole_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "candidates", few(["full"]))
    monkeypatch.setattr(planner.Planner, "fits", lambda self, o: o.counted.resident_bytes <= self.memory_bytes)
    monkeypatch.setattr(planner, "resident_bytes", lambda: -(2**30))
    (whole,) = a_plan().options
    found = a_plan(memory=whole.counted.resident_bytes - 1, split_batch=True)  # the resident bytes include the batch
    assert [one.name for one in found.options] == ["full, 2 micro-batches"]
    assert "trainer.grad_accum_steps=2" in found.options[0].arguments


@pytest.mark.exhaustive
@pytest.mark.usefixtures("three")
def test_the_library_function_is_the_plan() -> None:
    found = efficient_ft.plan(*SETTINGS, memory="900GB")
    assert isinstance(found, Plan)
    assert found.memory_bytes == 900 * 10**9
    with pytest.raises(UserError, match="memory must be a number with one of the units"):
        efficient_ft.plan(*SETTINGS, memory="4")
    with pytest.raises(AttributeError, match="no attribute 'plans'"):
        efficient_ft.plans  # noqa: B018
    json.dumps(found.as_dict())


@pytest.mark.exhaustive
def test_gradients_are_compared_on_the_users_own_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    network = factory.random_model(configure([*SETTINGS, "method=full"]).model, 10)
    torch.save(network.state_dict(), tmp_path / "weights.pth")
    names = ["full+low_bit:bits=8, 8-bit moments", "full+low_bit:bits=2", "full+lora+low_bit"]
    monkeypatch.setattr(planner, "candidates", few(names))
    settings = (*SETTINGS, f"model.weights={tmp_path / 'weights.pth'}")
    found = {one.name: one for one in make_plan(settings, configure, Limits(10**12)).options}
    assert found[names[0]].cosine is not None
    assert found[names[0]].cosine > 0.99
    coarse = found[names[1]].cosine
    assert coarse is not None
    assert 0 < coarse < found[names[0]].cosine
    assert found[names[2]].cosine is None, "adapters have no exact gradient to compare with"
