"""Tests of a search on a simulated machine, whose runs learn and take time as the recipes in `RECIPES` say."""

from __future__ import annotations

import math
import os
import random
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from efficient_ft.core.errors import SettingError, UserError
from efficient_ft.search.earlier import PROPOSALS
from efficient_ft.search.halving import rungs
from efficient_ft.search.search import Ended, Search, open_search
from efficient_ft.search.state import NAME, Arm, Data, Proposed, SearchState, read_state
from efficient_ft.search.text import command_of, interrupted_text, result_text

#: For each recipe: the accuracy after infinitely many steps, the number of steps for half of it, and the step time.
RECIPES = {"stack": (0.89, 150, 0.3), "full": (0.9, 300, 1.0), "head": (0.6, 20, 0.2), "lora": (0.88, 200, 0.8),
           "norms": (0.8, 300, 0.7), "blocks": (0.85, 200, 0.5)}  # fmt: skip
#: Loss of accuracy of the recipes in studies, in percentage points.
LOST = {"head": 25.0, "norms": 5.0}
#: Time in seconds in which a process starts and ends, in which the recipes are proposed, and of an evaluation.
START, PROPOSING, EVALUATION = 6.0, 20.0, 4.0
DATA = Data(train=1000, val=200, test=500, epoch_steps=32)


class KilledError(Exception):
    """Error that simulates a signal, which kills the search."""


class Machine:
    """A simulated machine.

    The runs in `steps` keep their steps if the search is killed. `kill` is the number of calls after which the machine
    raises `KilledError` in the middle of a slice, or None. `broken` are recipes whose runs fail.
    """

    def __init__(self, kill: int | None = None, broken: Sequence[str] = (), noise: float = 0.0) -> None:
        self.now, self.steps, self.calls = 0.0, dict[str, int](), list[tuple[str, list[str]]]()
        self.trained: dict[str, float] = {}
        self.lengths: set[tuple[str, str | None]] = set()
        self.kill, self.broken, self.noise = kill, broken, random.Random(0) if noise else None
        self.spread = noise

    def clock(self) -> float:
        return self.now

    def _dies(self, seconds: float) -> None:
        if self.kill is not None:
            self.kill -= 1
            if self.kill < 0:
                self.kill = None
                self.now += seconds
                raise KilledError

    def propose(self, count: int, seconds: float) -> Proposed:
        self._dies(PROPOSING)
        self.now += PROPOSING
        arms = [
            Arm(name=name, recipe=name, arguments=[f"method={name}"], folder=name, lr=1e-3, source="", needed_bytes=1,
                points_lost=LOST.get(name, 0.0))
            for name in list(RECIPES)[:count]
        ]  # fmt: skip
        return Proposed(arms=arms, refused={"bsr": "needs memory=3GB"}, data=DATA, seconds=PROPOSING - 5)

    def run_slice(self, arguments: Sequence[str], log: Path) -> Ended:
        name = arguments[0].partition("=")[2]
        self.calls.append((name, list(arguments[1:-1])))
        assert arguments[-1] == f"hydra.run.dir='{log.parent / name}'"
        assert log.name == f"{name}.log"
        if name in self.broken:
            self.now += START
            return Ended(None, "the loss is not finite", True)
        values = dict(word.split("=") for word in arguments[1:-1])
        best, half, step = RECIPES[name]
        if self.noise is not None:
            step *= 1 + self.spread * (self.noise.random() - 0.5)
        before = self.steps.get(name, 0)
        given = values.get("pause_at", values.get("trainer.max_steps", "0"))
        until = before + math.ceil(float(given[:-1]) / step) if given.endswith("s") else int(given)
        decay, length = int(values.get("optim.decay_steps", 0)), (name, values.get("trainer.max_steps"))
        same = length in self.lengths
        assert same or before <= until - decay, "the run would be refused, because its rate decreased earlier"
        self.lengths.add(length)
        if self.kill == 0:
            self._train(name, (until - before) // 2, step)  # the run has saved a checkpoint
        self._dies(START + step * ((until - before) // 2))
        self._train(name, until - before, step)
        self.now += START + step * (until - before) + EVALUATION
        self.trained[name] += EVALUATION
        value = best * until / (until + half)
        done = {"value": value, "loss": 1 - value, "metric": "accuracy", "peak_bytes": 10**9}
        done |= {"seconds": self.trained[name], "evaluation_seconds": EVALUATION}
        if "pause_at" in values:
            return Ended({"paused": {"step": until, **done}})
        self.now += 8 + EVALUATION * DATA.test / DATA.val
        results = {"accuracy": {"best": value + 0.02, "test": value + 0.01}, "memory": {"peak_bytes": 10**9}}
        selected = {"environment": {"precision": "bf16"}, "prefix": {"form": "folded"}}
        return Ended({**results, **selected, "totals": {"seconds": self.trained[name]}})

    def _train(self, name: str, steps: int, step: float) -> None:
        self.steps[name] = self.steps.get(name, 0) + steps
        self.trained[name] = self.trained.get(name, 0.0) + step * steps


def search(folder: Path, machine: Machine, budget: float = 600, unit: str = "seconds") -> Search:
    found = open_search(folder, ["model=x"], 2 * 10**9, budget, unit, machine.propose, machine.run_slice)
    found.clock = machine.clock
    found.__post_init__()
    return found


def test_rounds_keep_a_third() -> None:
    assert [rungs(n) for n in (1, 2, 3, 4, 6, 9, 12)] == [[], [2], [3], [4, 2], [6, 2], [9, 3], [12, 4, 2]]


@pytest.mark.parametrize("budget", [300, 600, 1800])
def test_the_best_recipe_is_trained_to_the_end_in_time(tmp_path: Path, budget: float) -> None:
    machine = Machine()
    state = search(tmp_path, machine, budget).run()
    assert state.final is not None
    assert state.finished
    best = state.final.arm
    assert best == "stack"
    assert 0.85 * budget <= machine.now <= 1.02 * budget
    assert state.final.test == pytest.approx((state.final.value or 0) - 0.01)
    last = [call for call in machine.calls if call[0] == best][-1]
    assert last[1] == [f"trainer.max_steps={state.final.steps}", f"optim.decay_steps={state.final.decay}"]
    # At most 55 % of the time is spent on everything except training the best recipe.
    assert machine.steps[best] * RECIPES[best][2] >= 0.45 * machine.now or budget < 600
    text = result_text(state, tmp_path)
    assert "bsr: not used, because it needs memory=3GB." in text
    assert command_of(state)[-2:] == last[1]


def test_all_recipes_of_a_round_get_the_same_time(tmp_path: Path) -> None:
    state = search(tmp_path, Machine(), 1800).run()
    for number in range(2):
        taken = [arm.slices[number].seconds for arm in state.arms if len(arm.slices) > number + 1 - bool(number)]
        assert max(taken) <= 1.15 * min(taken)


def test_a_search_is_deterministic_given_its_timings(tmp_path: Path) -> None:
    states = [search(tmp_path / name, Machine(noise=0.3)).run() for name in ("a", "b")]
    assert states[0] == states[1]


def test_with_a_budget_of_steps_the_timings_have_no_effect(tmp_path: Path) -> None:
    found = []
    for name, noise in (("a", 0.0), ("b", 0.8)):
        machine = Machine(noise=noise)
        state = search(tmp_path / name, machine, 3000, "steps").run()
        assert state.final is not None
        found.append(
            (
                state.final.model_copy(update={"trained": None}),
                [[(s.step, s.value) for s in arm.slices] for arm in state.arms],
            )
        )
        assert sum(machine.steps.values()) == pytest.approx(3000, abs=10)
    assert found[0] == found[1]


@pytest.mark.parametrize("kill", range(12))
def test_a_killed_search_continues(tmp_path: Path, kill: int) -> None:
    whole = Machine()
    expected = search(tmp_path / "whole", whole, 3000, "steps").run()
    machine = Machine(kill % (len(whole.calls) + 1))
    with pytest.raises(KilledError):
        search(tmp_path / "killed", machine, 3000, "steps").run()
    state = search(tmp_path / "killed", machine, 3000, "steps").run()
    assert state.final == expected.final
    assert [arm.slices[-1].step for arm in state.arms] == [arm.slices[-1].step for arm in expected.arms]


@pytest.mark.parametrize("budget", [330, 420, 600, 1800])
@pytest.mark.parametrize("kill", range(12))
def test_a_search_that_is_killed_twice_ends_in_time(tmp_path: Path, kill: int, budget: float) -> None:
    whole = Machine()
    search(tmp_path / "whole", whole, budget).run()
    machine = Machine(kill % (len(whole.calls) + 1))
    with pytest.raises(KilledError):
        search(tmp_path / "killed", machine, budget).run()
    machine.kill = kill % 3
    try:
        state = search(tmp_path / "killed", machine, budget).run()
    except KilledError:
        state = search(tmp_path / "killed", machine, budget).run()
    assert state.finished
    # The simulated clock moves during interrupted slices, but the files have no times, so this time does not count.
    assert machine.now <= 1.05 * budget + 2 * (START + PROPOSING + budget / 2)


def test_a_killed_search_keeps_its_time(tmp_path: Path) -> None:
    machine = Machine(kill=3)
    with pytest.raises(KilledError):
        search(tmp_path, machine).run()
    machine.now += 10_000  # the machine is switched off
    began = machine.now
    state = search(tmp_path, machine).run()
    assert state.finished
    assert machine.now - began < 600


@pytest.mark.parametrize("unit", ["seconds", "steps"])
def test_the_time_of_an_interrupted_slice_counts_only_if_the_budget_is_a_time(tmp_path: Path, unit: str) -> None:
    expected = search(tmp_path / "whole", Machine(), 3000, unit).run()
    machine = Machine(kill=3)
    with pytest.raises(KilledError):
        search(tmp_path / "killed", machine, 3000, unit).run()
    found = read_state(tmp_path / "killed")
    assert found is not None
    assert found.running is not None
    assert found.running.arm is not None
    run = tmp_path / "killed" / found.running.arm
    run.mkdir()
    (run / "checkpoint.ckpt").touch()
    written = found.running.time + 30
    os.utime(run / "checkpoint.ckpt", (written, written))
    state = search(tmp_path / "killed", machine, 3000, unit).run()
    if unit == "steps":
        steps = [[[one.step for one in arm.slices] for arm in of.arms] for of in (state, expected)]
        assert steps[0] == steps[1]
        assert state.final is not None
        assert expected.final is not None
        assert (state.final.arm, state.final.steps) == (expected.final.arm, expected.final.steps)
    else:
        assert state.elapsed == pytest.approx(expected.elapsed, rel=0.02)
        (slice_of,) = state.arm(found.running.arm).slices[:1]
        # The slice was shortened by the 30 seconds of the killed process.
        assert slice_of.seconds == pytest.approx(expected.arm(found.running.arm).slices[0].seconds - 30, abs=2)


def test_the_time_of_killed_proposals_counts_as_far_as_it_is_known(tmp_path: Path) -> None:
    machine = Machine(kill=0)
    with pytest.raises(KilledError):
        search(tmp_path, machine).run()
    found = read_state(tmp_path)
    assert found is not None
    assert found.running is not None
    (tmp_path / PROPOSALS).touch()
    written = found.running.time + 12
    os.utime(tmp_path / PROPOSALS, (written, written))
    began = machine.now
    state = search(tmp_path, machine).run()
    assert state.finished
    assert state.elapsed == pytest.approx(machine.now - began + 12, abs=0.1)


KILLED = Ended(None, "killed by SIGKILL, probably for lack of memory", killed=True)
EXCEEDED = Ended(None, "the run was stopped", own=True, exceeded=True)


def killing(machine: Machine, kills: Sequence[int], ended: Ended = KILLED) -> list[int]:
    """End the processes with the given numbers. Return a list that will contain the numbers of all processes."""
    run_slice, numbers = machine.run_slice, list[int]()

    def run(arguments: Sequence[str], log: Path) -> Ended:
        numbers.append(len(numbers))
        if numbers[-1] in kills:
            machine.now += 3.0
            return ended
        return run_slice(arguments, log)

    machine.run_slice = run  # type: ignore[method-assign]
    return numbers


@pytest.mark.parametrize("unit", ["seconds", "steps"])
def test_processes_that_are_killed_are_repeated(tmp_path: Path, unit: str) -> None:
    expected = search(tmp_path / "whole", Machine(), 3000, unit).run()
    machine = Machine()
    numbers = killing(machine, [0, 1, 5, 9])
    state = search(tmp_path / "killed", machine, 3000, unit).run()
    last = len(numbers) - 1
    other = Machine()
    killing(other, [last - 4])  # the last process, because no other process is killed
    again = search(tmp_path / "last", other, 3000, unit).run()
    for found in (state, again):
        assert found.finished
        assert not [one.name for one in found.arms if (one.stopped or "").startswith("failed")]
        assert found.final is not None
        assert expected.final is not None
        assert found.final.arm == expected.final.arm
        if unit == "steps":
            assert found == expected
        else:
            assert found.elapsed == pytest.approx(expected.elapsed, rel=0.02)


def test_a_recipe_that_exceeds_its_memory_after_some_time_continues_in_a_new_process(tmp_path: Path) -> None:
    first = Machine()
    numbers = killing(first, [0], EXCEEDED)
    search(tmp_path / "first", first).run()
    both = Machine()
    killing(both, [0, numbers[-1]], EXCEEDED)
    state = search(tmp_path / "both", both).run()
    assert state.finished
    assert [one.name for one in state.arms if one.stopped == "failed: the run was stopped"] == [state.arms[0].name]
    assert len(both.calls) == len(first.calls)


def test_a_recipe_whose_processes_are_always_killed_is_stopped(tmp_path: Path) -> None:
    machine = Machine()
    killing(machine, [0, 1, 2])
    state = search(tmp_path, machine).run()
    assert state.finished
    assert state.arm("stack").stopped == "failed: killed by SIGKILL, probably for lack of memory"
    assert state.arm("stack").retried


def test_an_interrupted_search_names_its_state_and_its_best_recipe(tmp_path: Path) -> None:
    whole, texts = Machine(), []
    search(tmp_path / "whole", whole).run()
    for kill in (0, 3, last := len(whole.calls)):
        machine = Machine(kill)
        with pytest.raises(KilledError):
            search(tmp_path / str(kill), machine).run()
        state = read_state(tmp_path / str(kill))
        assert state is not None
        texts.append(interrupted_text(state, tmp_path / str(kill)))
        assert texts[-1].startswith(f"The state of the search is kept in {tmp_path / str(kill) / NAME}.")
        assert "The same command continues the search." in texts[-1]
    assert texts[0].endswith("No round is finished, so there is no best recipe yet.")
    assert texts[1].endswith("No round is finished, so there is no best recipe yet.")
    weights = tmp_path / str(last) / "stack" / "model.safetensors"
    best = r"Best recipe so far: stack with optim\.lr=0\.001, val accuracy \d\d\.\d\d % after \d+ steps\."
    assert re.search(best, texts[2])
    assert texts[2].endswith(f"Weights: {weights}")
    state = search(tmp_path / str(last), machine).run()
    assert interrupted_text(state, tmp_path).endswith("The search is finished, and the same command prints its result.")


def test_a_finished_search_does_nothing(tmp_path: Path) -> None:
    machine = Machine()
    state = search(tmp_path, machine).run()
    calls = len(machine.calls)
    assert search(tmp_path, machine).run() == state
    assert len(machine.calls) == calls


def test_recipes_that_fail_do_not_end_the_search(tmp_path: Path) -> None:
    state = search(tmp_path, Machine(broken=["stack", "full"])).run()
    assert state.final is not None
    assert state.final.arm in ("head", "lora", "blocks")
    assert state.arm("stack").stopped == "failed: the loss is not finite"


def test_if_all_recipes_fail_the_reasons_are_named_and_the_search_can_be_repeated(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"No recipe could be trained: stack failed: the loss is not finite; full"):
        search(tmp_path, Machine(broken=list(RECIPES))).run()
    assert search(tmp_path, Machine()).run().finished


def test_if_the_best_recipe_fails_at_the_end_the_next_one_is_trained(tmp_path: Path) -> None:
    machine = Machine()
    whole = search(tmp_path / "whole", Machine()).run()
    assert whole.final is not None
    best, run_slice = whole.final.arm, machine.run_slice

    def breaking(arguments: Sequence[str], log: Path) -> Ended:
        last = any(word.startswith("trainer.max_steps") for word in arguments)
        if last and arguments[0] == f"method={best}":
            return Ended(None, "the loss is not finite", True)
        return run_slice(arguments, log)

    machine.run_slice = breaking  # type: ignore[method-assign]
    state = search(tmp_path / "broken", machine).run()
    assert state.finished
    assert state.final is not None
    assert state.final.arm != best
    assert (state.arm(best).stopped or "").startswith("failed")


def test_a_failure_that_is_not_caused_by_the_recipe_ends_the_search_until_it_is_repeated(tmp_path: Path) -> None:
    machine = Machine()
    run_slice = machine.run_slice

    def full_disk(arguments: Sequence[str], log: Path) -> Ended:
        if any(word.startswith("trainer.max_steps") for word in arguments):
            return Ended(None, "No space left on device")
        return run_slice(arguments, log)

    machine.run_slice = full_disk  # type: ignore[method-assign]
    with pytest.raises(UserError, match=r"failed: No space left on device\. The log is"):
        search(tmp_path, machine).run()
    machine.run_slice = run_slice  # type: ignore[method-assign]
    assert search(tmp_path, machine).run().finished


def test_a_repeated_search_tries_a_recipe_again_that_did_not_cause_its_failure(tmp_path: Path) -> None:
    machine = Machine()
    run_slice, calls = machine.run_slice, 0

    def failing(arguments: Sequence[str], log: Path) -> Ended:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise KilledError
        return Ended(None, "No space left on device") if calls == 1 else run_slice(arguments, log)

    machine.run_slice = failing  # type: ignore[method-assign]
    with pytest.raises(KilledError):
        search(tmp_path, machine).run()
    found = read_state(tmp_path)
    assert found is not None
    assert found.arm("stack").stopped == "failed: No space left on device"
    machine.run_slice = run_slice  # type: ignore[method-assign]
    state = search(tmp_path, machine).run()
    assert state.finished
    assert state.arm("stack").slices


def test_the_command_names_what_the_run_selected(tmp_path: Path) -> None:
    state = search(tmp_path, Machine()).run()
    assert state.final is not None
    assert state.final.selected == ["trainer.precision=bf16", "trainer.prefix=folded"]
    state.arm(state.final.arm).arguments += ["trainer.prefix=auto", "resume=auto", "cost.steps=1"]
    words = command_of(state)
    assert words[-4:-2] == state.final.selected
    assert not {"trainer.prefix=auto", "resume=auto", "cost.steps=1"} & set(words)


def test_a_run_that_ends_by_itself_leaves_the_race(tmp_path: Path) -> None:
    machine = Machine()
    run_slice = machine.run_slice

    def ending(arguments: Sequence[str], log: Path) -> Ended:
        return Ended({"accuracy": {"best": 1.0}}) if arguments[0] == "method=full" else run_slice(arguments, log)

    machine.run_slice = ending  # type: ignore[method-assign]
    state = search(tmp_path, machine).run()
    assert state.finished
    assert state.arm("full").stopped == "failed: the run ended before it was paused"


def test_only_one_process_uses_a_folder(tmp_path: Path) -> None:
    machine = Machine()
    first, run_slice = search(tmp_path, machine), machine.run_slice

    def second(*given: Any) -> Ended:
        with pytest.raises(UserError, match="the same search is running in another process"):
            search(tmp_path, Machine()).run()
        return run_slice(*given)

    machine.run_slice = second  # type: ignore[method-assign]
    assert first.run().finished


def test_a_search_with_other_settings_is_not_continued(tmp_path: Path) -> None:
    search(tmp_path, Machine()).run()
    with pytest.raises(UserError, match="contains a search with other settings: model=x"):
        open_search(tmp_path, ["model=y"], 1, 600, "seconds", Machine().propose, Machine().run_slice)


def test_a_time_in_which_no_recipe_can_be_compared_names_the_minimum(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"time must be at least \d+s on this machine, got 80 s"):
        search(tmp_path, Machine(), 80).run()


def test_a_short_time_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"time must be at least 1min, got 30 s"):
        search(tmp_path, Machine(), 30)


@pytest.mark.parametrize("text", ["{", "[]", '{"format": 1, "settings": 3}', '{"format": 99}'])
def test_a_damaged_state_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / NAME).write_text(text)
    with pytest.raises(UserError, match=re.escape(NAME)):
        read_state(tmp_path)


def test_the_state_is_usable_after_every_slice(tmp_path: Path) -> None:
    machine = Machine()
    read: list[SearchState | None] = []
    run_slice: Callable[..., Any] = machine.run_slice

    def reading(*given: Any) -> Any:
        ended = run_slice(*given)
        read.append(read_state(tmp_path))
        return ended

    machine.run_slice = reading  # type: ignore[method-assign]
    search(tmp_path, machine).run()
    assert all(state is not None and state.running is not None for state in read)
