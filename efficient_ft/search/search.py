"""Search for the best model within a memory budget and a time budget.

The search trains recipes from finished studies (`search.arms`) by successive halving (`search.halving`). Every recipe
is a normal training run that is paused and continued (``pause_at``), so no step is lost. During the race, the learning
rates are constant after the warm-up. The best recipe is then trained to the end, with a decreasing learning rate in
the last steps. The test split is evaluated only once, at the end.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from efficient_ft.core.errors import SettingError, UserError
from efficient_ft.core.format import format_metric, format_seconds
from efficient_ft.search.halving import overhead, ranked, rate, rungs
from efficient_ft.search.state import Arm, Final, Proposed, Running, SearchState, Slice, read_state, write_state

#: Fractions of the budget for the proposals and for the race. The remaining budget is for the best recipe.
PROPOSING, RACING = 0.08, 0.42
#: Fraction of the remaining budget in which the learning rate of the best recipe is still constant, and the smallest
#: remaining budget in seconds for which the constant part is a slice of its own.
CONSTANT, LEAST_CONSTANT = 0.55, 60.0
#: Smallest and largest number of arms, and the time in seconds that the first slice of an arm should have.
FEWEST, MOST, FIRST = 3, 12, 20.0
#: Assumed time in seconds in which a process loads the network and the data, before a slice was measured.
LOADING = 3.0
#: Assumed time in seconds for the cost report, the files and the pages at the end, without the evaluation.
FINISHING = 12.0


#: Function that runs one slice in a separate process. Its arguments are the command-line arguments of the run and the
#: log file. It returns the results of the run, or None and the reason for the failure.
RunSlice = Callable[[Sequence[str], Path], tuple[dict[str, Any] | None, str | None]]


class Propose(Protocol):
    """Function that proposes up to `count` arms, and examines recipes for at most about `seconds` seconds."""

    def __call__(self, count: int, seconds: float) -> Proposed:
        """Return the arms, the reasons why other recipes are not used, and the sizes of the data."""


@dataclass
class Search:
    """A search in a folder.

    Args:
        folder: the folder of the search.
        state: the state, which is new or was read from the folder.
        propose: function that proposes arms.
        run_slice: function that trains a run until it is paused or finished.
        say: function that prints a line.
        clock: function that returns the time in seconds.
    """

    folder: Path
    state: SearchState
    propose: Propose
    run_slice: RunSlice
    say: Callable[[str], None] = lambda text: None
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._began = self.clock() - self.state.elapsed

    @property
    def elapsed(self) -> float:
        """The used part of the budget, in its unit."""
        if self.state.unit == "steps":
            return float(sum(arm.step for arm in self.state.arms))
        return self.clock() - self._began

    @property
    def left(self) -> float:
        """The remaining part of the budget, in its unit."""
        return self.state.budget - self.elapsed

    def run(self) -> SearchState:
        """Run the search, or continue it, and return its state.

        Raises:
            UserError: If no recipe can be trained within the budget.
        """
        state = self.state
        self._resume()
        if not state.arms:
            self._propose()
        while state.final is None:
            if not self._race():
                self._choose()
        self._finish()
        return state

    def _save(self) -> None:
        self.state.elapsed = self.elapsed
        write_state(self.folder, self.state)

    def _resume(self) -> None:
        """Add the time of a slice that was interrupted. Its steps are kept in the checkpoint of the run."""
        running = self.state.running
        if running is None:
            return
        files = (self.folder / self.state.arm(running.arm).folder).rglob("*")
        written = [file.stat().st_mtime for file in files if file.is_file()]
        lost = max([running.time, *written]) - running.time
        used = max(self.state.elapsed, running.elapsed + lost)
        self._began -= used - self.state.elapsed
        self.state.running = None
        self._save()

    def _propose(self) -> None:
        state = self.state
        began = self.clock()
        found = self.propose(self._count(), self._planning())
        state.arms, state.refused, state.data = found.arms, found.refused, found.data
        state.start = max(0.0, self.clock() - began - found.seconds)
        state.rungs = rungs(len(state.arms))
        self._save()
        self.say(f"{len(state.arms)} recipes take part: {', '.join(arm.name for arm in state.arms)}.")

    def _planning(self) -> float:
        return PROPOSING * self.state.budget if self.state.unit == "seconds" else 60.0

    def _count(self) -> int:
        """Return the number of arms for which the first slices have a sensible length."""
        if self.state.unit == "steps":
            return MOST
        first = RACING * self.state.budget / 2
        return max(FEWEST, min(MOST, int(first / (2 * LOADING + FIRST))))

    def _race(self) -> bool:
        """Train the next arm of the current round for one slice. Return False if the race is decided."""
        state = self.state
        for number, count in enumerate(state.rungs):
            alive = state.alive
            waiting = [arm for arm in alive if len(arm.slices) <= number]
            if not waiting:
                continue
            if number and len(alive) > count:
                self._eliminate(count, number)
                return True
            end = (PROPOSING + RACING * (number + 1) / len(state.rungs)) * state.budget
            share = (end - self.elapsed) / len(waiting)
            if share < self._overhead() + self._shortest and len(waiting) > 1:
                waiting[-1].stopped = "not trained: the time is too short"
                self._save()
            else:
                self._slice(waiting[0], share)
            return True
        return False

    def _eliminate(self, count: int, number: int) -> None:
        """Keep the best `count` arms after round `number`."""
        order = ranked(self.state.alive, self._left)
        for arm in order[count:]:
            arm.stopped = f"round {number}: {len(order[:count])} recipes were better"
        self.say(f"After round {number}: {', '.join(self._described(arm) for arm in order[:count])} continue.")
        self._save()

    def _described(self, arm: Arm) -> str:
        assert arm.value is not None
        return f"{arm.name} ({format_metric(arm.value, self._metric)})"

    @property
    def _shortest(self) -> float:
        """The least useful training time of a slice, in the unit of the budget."""
        return 1.0 if self.state.unit == "steps" else FIRST / 2

    @property
    def _metric(self) -> str:
        return self.state.metric or "accuracy"

    def _left(self, arm: Arm) -> float:
        """Return the number of steps that an arm could train in the rest of the budget."""
        return max(0.0, self.left) / (1.0 if self.state.unit == "steps" else rate(arm))

    def _steps(self, arm: Arm, seconds: float) -> int:
        """Return the number of steps that an arm can train in `seconds` seconds (at least 1)."""
        if self.state.unit == "steps":
            return max(1, round(seconds))
        return max(1, int((seconds - self._overhead()) / rate(arm)))

    def _overhead(self) -> float:
        return 0.0 if self.state.unit == "steps" else overhead(self.state.arms, self.state.start + LOADING)

    def _slice(self, arm: Arm, seconds: float) -> None:
        """Train an arm for about `seconds` seconds (or steps), or stop the arm if its run fails."""
        if self.state.unit == "steps":
            until = str(arm.step + max(1, round(seconds)))
        else:
            until = f"{max(1.0, seconds - self._overhead()):.1f}s"
        results, taken = self._train(arm, [f"pause_at={until}"])
        paused = (results or {}).get("paused")
        if paused is None:
            return
        self.state.metric = paused["metric"]
        arm.slices.append(
            Slice(
                step=paused["step"],
                seconds=taken,
                trained=paused["seconds"],
                value=paused["value"],
                loss=paused["loss"],
                peak_bytes=paused["peak_bytes"],
            )
        )
        self.state.running = None
        self._save()
        left = f", {format_seconds(max(0.0, self.left))} left" if self.state.unit == "seconds" else ""
        self.say(f"{self._described(arm)} after {arm.step} steps{left}")

    def _train(self, arm: Arm, more: Sequence[str]) -> tuple[dict[str, Any] | None, float]:
        """Run a process that trains an arm. Return its results, or None if it failed, and its time in seconds."""
        self.state.running = Running(arm=arm.name, elapsed=self.elapsed, time=time.time())
        self._save()
        began = self.clock()
        folder = self.folder / arm.folder
        quoted = str(folder).replace("\\", "\\\\").replace("'", "\\'")
        log = folder.with_name(f"{folder.name}.log")
        results, failure = self.run_slice([*arm.arguments, *more, f"hydra.run.dir='{quoted}'"], log)
        taken = self.clock() - began
        if results is None:
            arm.stopped = f"failed: {failure or 'it returned no result'}"
            self.state.running = None
            self._save()
            self.say(f"{arm.name} {arm.stopped}")
        return results, taken

    def _choose(self) -> None:
        """Choose the best arm, which is then trained to the end."""
        state = self.state
        raced = [arm for arm in state.alive if arm.slices]
        if not raced:
            reasons = "; ".join(f"{arm.name} {arm.stopped}" for arm in state.arms)
            raise UserError(f"No recipe could be trained: {reasons}. The logs are in {self.folder}.")
        best, *others = ranked(raced, self._left)
        for arm in others:
            arm.stopped = f"round {len(state.rungs)}: {best.name} was better"
        state.final = Final(arm=best.name)
        self._save()
        self.say(f"{self._described(best)} is the best recipe and is trained to the end.")

    def _finish(self) -> None:
        """Train the best arm to the end: first with a constant, then with a decreasing learning rate."""
        state, final = self.state, self.state.final
        assert final is not None
        if final.seconds is not None:
            return
        arm = state.arm(final.arm)
        if not final.steps:
            constant = CONSTANT * (self.left - self._ending(arm))
            if len(arm.slices) <= len(state.rungs) and constant > max(LEAST_CONSTANT, 4 * self._overhead()):
                self._slice(arm, constant)
                if arm.stopped is not None:
                    self._replace_failed()
                    return
            decay = self._steps(arm, self.left - self._ending(arm))
            final.steps, final.decay = arm.step + decay, decay
            self._save()
        results, _ = self._train(arm, [f"trainer.max_steps={final.steps}", f"optim.decay_steps={final.decay}"])
        if results is None:
            self._replace_failed()
            return
        accuracy = results["accuracy"]
        final.metric, final.value, final.test = self._metric, accuracy["best"], accuracy.get("test")
        final.peak_bytes = results.get("memory", {}).get("peak_bytes")
        state.running = None
        final.seconds = self.elapsed
        self._save()

    def _replace_failed(self) -> None:
        """Raise an error, because the training of the best arm failed."""
        assert self.state.final is not None
        arm = self.state.arm(self.state.final.arm)
        reason, arm.stopped = arm.stopped, None
        self._save()
        raise UserError(f"The training of {arm.name} {reason}. The same command continues the search.")

    def _ending(self, arm: Arm) -> float:
        """Return the time in seconds that the end of the last run takes: evaluation, cost report and files."""
        if self.state.unit == "steps":
            return 0.0
        assert self.state.data is not None
        evaluated = self.state.data.val + self.state.data.test
        return FINISHING + evaluated * self._seconds_per_sample(arm)

    def _seconds_per_sample(self, arm: Arm) -> float:
        """Return an upper estimate of the evaluation time of a sample: the time of a training step per sample."""
        assert self.state.data is not None
        batch = max(1.0, self.state.data.train / self.state.data.epoch_steps)
        return rate(arm) / batch


def open_search(
    folder: Path,
    settings: Sequence[str],
    memory_bytes: int,
    budget: float,
    unit: str,
    propose: Propose,
    run_slice: RunSlice,
    say: Callable[[str], None] = lambda text: None,
) -> Search:
    """Start the search in a folder, or continue the search that the folder contains.

    Raises:
        UserError: If the state in the folder is damaged.
        SettingError: If the budget is too small to train a recipe.
    """
    if unit == "seconds" and budget < 60:
        do = "A process needs several seconds to start, and several recipes are compared."
        raise SettingError("time", format_seconds(budget), "at least 1min", do)
    state = read_state(folder)
    if state is None:
        folder.mkdir(parents=True, exist_ok=True)
        state = SearchState(settings=list(settings), memory_bytes=memory_bytes, budget=budget, unit=unit)
        write_state(folder, state)
    return Search(folder, state, propose, run_slice, say)
