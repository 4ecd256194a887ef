"""Tests of the candidates of a plan: their names, their order and the number of examined candidates."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from efficient_ft.methods.build import build_methods
from efficient_ft.planning import Candidate, Exactness, Examined, Limits, planner
from efficient_ft.planning.candidates import candidates, split
from efficient_ft.planning.text import plan_text
from tests.planning.common import SETTINGS, a_plan, configure

pytestmark = pytest.mark.usefixtures("wide")


@pytest.mark.exhaustive
def test_every_candidate_is_a_command_of_its_own() -> None:
    base = configure([*SETTINGS, "method=full"])
    every = candidates(base, 6)
    assert len({one.name for one in every}) == len(every) > 25
    for one in every:
        config = configure([*SETTINGS, *one.arguments(base)])
        build_methods(config)
        assert config.optim.state_bits == one.state_bits
        assert config.optim.in_backward == one.in_backward


def test_the_users_own_choices_are_kept() -> None:
    base = configure([*SETTINGS, "method=lora", "optim.state_bits=8"])
    every = candidates(base, 6, ["lora"], True)
    assert {one.methods[0] for one in every} == {"lora"}
    assert {one.state_bits for one in every} == {8}
    assert not any(argument.startswith("optim.") for one in every for argument in one.arguments(base))
    assert {one.methods for one in candidates(base, 6, ["lora", "mesa"], False)} == {("lora", "mesa")}


def test_a_batch_is_split_into_equal_parts() -> None:
    base = configure([*SETTINGS, "method=full", "data.batch_size=12"])
    parts = list(split(Candidate(("full",)), base))
    assert [one.micro_batches for one in parts] == [2, 4]
    assert parts[0].arguments(base)[-2:] == ["data.batch_size=6", "trainer.grad_accum_steps=2"]
    assert not list(split(Candidate(("full",), in_backward=True), base))


def test_an_effective_batch_size_determines_the_accumulation() -> None:
    sizes = {}
    for more in (["trainer.grad_accum_steps=3"], ["data.effective_batch_size=36"]):
        settings = [*SETTINGS, "data.batch_size=12", *more]
        made, steps = planner.start_planning(settings, configure, Limits(10**12))
        option = made.option(Candidate(("full",)))
        sizes[more[0]] = steps, option.counted, made.option(next(split(Candidate(("full",)), made.base))).counted
        parts = next(split(Candidate(("full",)), made.base)).arguments(made.base)
        assert ("trainer.grad_accum_steps=6" in parts) == (more[0] == "trainer.grad_accum_steps=3")
    one, other = sizes.values()
    assert one == other


def test_the_smallest_recipes_come_first_then_plain_fine_tuning() -> None:
    base = configure([*SETTINGS, "method=full"])
    assert [one.name for one in candidates(base, 4)][:3] == ["head", "last_stage", "full"]


@pytest.mark.slow
@pytest.mark.first(1, "slow")
@pytest.mark.parametrize("memory", [10**12, None])
def test_head_and_last_stage_are_examined_with_the_smallest_planning_time(
    memory: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planner, "resident_bytes", lambda: 10**9)  # other tests increase the process memory
    seen: list[Examined] = []
    # The smaller budget fits no candidate.
    found = a_plan(memory or 10**9 + 10**7, planning_seconds=1e-6, ready=seen.append)
    assert [(one.number, one.name) for one in seen] == [(1, "head"), (2, "last_stage")]
    assert all(one.fits == (memory is not None) for one in seen)
    assert found.examined == 2
    assert len(found.not_examined) == seen[0].of - 2 > 25
    text = plan_text(found)
    assert f"Not examined ({len(found.not_examined)}): planning took " in text
    assert "To examine more recipes, use --planning-time 1m." in text
    impossible = text.partition("Not possible (2; the budget is 963 MiB):")[2].partition("Not examined")[0]
    assert ("head" in impossible and "last_stage" in impossible and "needs 1." in impossible) == (memory is None)
    assert sum(not one["examined"] for one in found.as_dict()["excluded"]) == len(found.not_examined)


def test_recipes_are_examined_until_one_can_be_recommended(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter(range(9))  # each recipe takes one second
    monkeypatch.setattr(planner, "clock", SimpleNamespace(perf_counter=lambda: next(seconds)))
    usable = SimpleNamespace(
        option=lambda candidate: candidate,
        fits=lambda _: True,
        bound=lambda _: 1,
        _refuse_too_little=lambda _: None,
        choose=lambda options: next((one for one in options if one.exactness is Exactness.EXACT), None),
        say=lambda text: None,
    )
    todo = [Candidate((name,), exactness=Exactness.PART) for name in ("head", "last_stage", "bitfit")]
    todo += [Candidate(("full",), exactness=Exactness.EXACT), Candidate(("lora",))]
    found, excluded = planner.Planner.examine(
        usable,  # type: ignore[arg-type]
        todo,
        times=(0.5, 3.5),
        ready=lambda examined: None,
    )
    assert [candidate.name for candidate in found] == ["head", "last_stage", "bitfit", "full"]
    assert [one.name for one in excluded] == ["lora"]
