"""Search for the best model within a memory budget and a time budget.

The search trains recipes from finished studies (`search.arms`) by successive halving (`search.halving`). Every recipe
is a normal training run that is paused and continued (``pause_at``), so no step is lost. During the race, the learning
rates are constant after the warm-up. The best recipe is then trained to the end, with a decreasing learning rate in
the last steps. The test split is evaluated only once, at the end.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from filelock import FileLock, Timeout

from efficient_ft.core.errors import SettingError, UserError
from efficient_ft.core.format import format_metric, format_seconds
from efficient_ft.core.text import hydra_quoted
from efficient_ft.record.files import LOCK
from efficient_ft.search.earlier import PROPOSALS, remove_proposals, stop_earlier
from efficient_ft.search.halving import networks_first, overhead, ranked, rate, rungs
from efficient_ft.search.state import NAME, Arm, Final, Proposed, Running, SearchState, Slice, read_state, write_state

#: Fractions of the budget for the proposals and for the race. The remaining budget is for the best recipe.
PROPOSING, RACING = 0.08, 0.42
#: Fraction of the remaining budget in which the learning rate of the best recipe is still constant, and the smallest
#: time in seconds for which the constant part is a separate slice.
CONSTANT, LEAST_CONSTANT = 0.55, 60.0
#: Smallest and largest number of arms, and the time in seconds that the first slice of an arm should have.
FEWEST, MOST, FIRST = 3, 12, 20.0
#: The first slice of an arm should have this number of steps if the budget is a number of steps, and smallest budget.
FIRST_STEPS, LEAST_STEPS = 40, 100
#: Assumed time in seconds in which a process loads the network and the data, before a slice was measured.
LOADING = 3.0
#: Assumed time in seconds for the cost report, the files and the pages at the end, without the evaluation.
FINISHING = 12.0
#: Number of processes for a slice of training that may be killed, for example by another program or for lack of memory
#: on the machine, or that may exceed the memory budget. Each process continues from the checkpoint of the previous one.
KILLS = 2
#: Beginning of `Arm.stopped` for an arm whose process failed.
FAILED = "failed: "


class Ended(NamedTuple):
    """Outcome of a process: its results, or the reason for its failure.

    `own` is True if the recipe itself is the reason: its loss was not finite, or it exceeded its memory budget.
    `killed` is True if a signal ended the process. `exceeded` is True if the process exceeded its memory budget.
    """

    results: dict[str, Any] | None
    failure: str = ""
    own: bool = False
    killed: bool = False
    exceeded: bool = False


#: Function that runs one slice in a separate process. Its arguments are the command-line arguments of the run and the
#: log file.
RunSlice = Callable[[Sequence[str], Path], Ended]


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
    say: Callable[[str], None] = print
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._began = self.clock() - self.state.elapsed
        #: Used budget of interrupted slices, keyed by arm. In the unit "steps", only finished slices use the budget.
        self._interrupted: dict[str, float] = {}
        #: Number of killed processes in the current slice of each arm.
        self._kills: Counter[str] = Counter()

    @property
    def elapsed(self) -> float:
        """The used part of the budget, in its unit."""
        if self.state.unit == "steps":
            final = self.state.final
            ended = 0 if final is None or not self.state.finished else final.steps - self.state.arm(final.arm).step
            return float(sum(arm.step for arm in self.state.arms) + ended)
        return self.clock() - self._began

    @property
    def left(self) -> float:
        """The remaining part of the budget, in its unit."""
        return self.state.budget - self.elapsed

    def run(self) -> SearchState:
        """Run the search, or continue it, and return its state.

        Raises:
            UserError: If another process uses the folder, or if no recipe can be trained within the budget.
        """
        state = self.state
        if state.finished:
            return state
        with self._locked():
            self._resume()
            if state.final is None:
                for arm in state.arms:
                    if arm.retried:
                        arm.stopped, arm.retried = None, False
            if not state.arms:
                try:
                    self._propose()
                except UserError:
                    remove_proposals(self.folder)
                    (self.folder / NAME).unlink(missing_ok=True)  # nothing has been trained
                    raise
            while not state.finished:
                if state.final is not None:
                    self._finish()
                elif not self._race():
                    self._choose()
        return state

    @contextmanager
    def _locked(self) -> Iterator[None]:
        lock = FileLock(self.folder / LOCK, timeout=0)
        try:
            lock.acquire()
        except Timeout:
            raise UserError(
                f"The folder {self.folder} is in use: the same search is running in another process. Wait until that"
                " process ends."
            ) from None
        try:
            yield
        finally:
            lock.release()

    def _save(self) -> None:
        self.state.elapsed = self.elapsed
        write_state(self.folder, self.state)

    def _begin(self, arm: Arm | None) -> None:
        """Record that a process starts, so that its time counts even if the search is killed."""
        self.state.running = Running(arm=None if arm is None else arm.name, elapsed=self.elapsed, time=time.time())
        self._save()

    def _resume(self) -> None:
        """Add the time of a process that was interrupted. The steps of a run are kept in its checkpoint."""
        running = self.state.running
        if running is None:
            return
        self.say("Continuing the search.")
        arm = None if running.arm is None else self.state.arm(running.arm)
        files = [self.folder / PROPOSALS if arm is None else self._log(arm)]
        stop_earlier(files[0], self.say)
        if arm is not None:
            run = self.folder / arm.folder
            files += [run / name for name in ("checkpoint.ckpt", "checkpoint.ckpt.prev", "metrics.jsonl")]
        written = [file.stat().st_mtime for file in files if file.is_file()]
        lost = max([running.time, *written]) - running.time
        if arm is not None:
            self._lose(arm, lost)
        used = max(self.state.elapsed, running.elapsed + lost)
        self._began -= used - self.state.elapsed
        self.state.running = None
        self._save()

    def _lose(self, arm: Arm, seconds: float) -> None:
        """Record that a slice was interrupted after a time in seconds. Its steps are kept in the checkpoint."""
        lost = seconds if self.state.unit == "seconds" else 0.0
        self._interrupted[arm.name] = self._interrupted.get(arm.name, 0.0) + lost

    def _propose(self) -> None:
        state = self.state
        self._begin(None)
        began = self.clock()
        found = self.propose(self._count(), PROPOSING * state.budget if state.unit == "seconds" else math.inf)
        state.arms, state.refused, state.networks, state.data = found.arms, found.refused, found.networks, found.data
        state.start = max(0.0, self.clock() - began - found.seconds)
        state.running = None
        least = 2 * (self._overhead() + self._shortest) / RACING
        if state.unit == "seconds" and state.budget < least:
            state.arms = []
            self._save()
            do = "Each recipe must train for longer than its process takes to start."
            least = 10 * math.ceil(1.1 * least / 10)  # the measured times vary
            raise SettingError("time", format_seconds(state.budget), f"at least {least}s on this machine", do)
        state.rungs = rungs(len(state.arms))
        self._save()
        self.say(f"The search compares {len(state.arms)} recipes: {', '.join(arm.name for arm in state.arms)}.")

    def _count(self) -> int:
        """Return the number of arms for which the first slices have a sensible length."""
        first = FIRST_STEPS if self.state.unit == "steps" else 2 * LOADING + FIRST
        return max(FEWEST, min(MOST, int(RACING * self.state.budget / 2 / first)))

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
            if share < self._overhead() + self._shortest and len(state.shares) <= number and len(waiting) > 1:
                if number:  # the arms have already been compared
                    return False
                waiting[-1].stopped = "not trained: the time is too short"
                self._save()
                return True
            if len(state.shares) <= number:
                state.shares.append(share)
            self._slice(waiting[0], state.shares[number])
            return True
        return False

    def _eliminate(self, count: int, number: int) -> None:
        """Keep the best `count` arms after round `number`."""
        better = self._ranked(self.state.alive)
        # A network whose steps take longer is behind after the first round, so no network is eliminated in this round.
        order = networks_first(better) if number == 1 else better
        for arm in order[count:]:
            displaced = arm in better[:count]
            why = "the best recipe of each network continued" if displaced else f"{count} recipes were better"
            arm.stopped = f"round {number}: {why}"
        self.say(f"After round {number}: {', '.join(self._described(arm) for arm in order[:count])} continue.")
        self._save()

    def _ranked(self, arms: Sequence[Arm]) -> list[Arm]:
        # The losses in studies are losses of accuracy, so they are not subtracted from other metrics.
        return ranked(arms, self._left) if self._metric == "accuracy" else ranked(arms)

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
        return max(0.0, self.left) / (1.0 if self.state.unit == "steps" else max(rate(arm), 1e-9))

    def _steps(self, arm: Arm, seconds: float) -> int:
        """Return the number of steps that an arm can train in `seconds` seconds (at least 1)."""
        if self.state.unit == "steps":
            return max(1, round(seconds))
        return max(1, int((seconds - self._overhead(arm)) / max(rate(arm), 1e-9)))

    def _overhead(self, arm: Arm | None = None) -> float:
        """Return the time of a slice that is not spent on training, in general or for the network of an arm."""
        if self.state.unit == "steps":
            return 0.0
        usual = overhead(self.state.arms, self.state.start + LOADING)
        same = [one for one in self.state.arms if arm is not None and one.network == arm.network]
        return overhead(same, usual)

    def _slice(self, arm: Arm, seconds: float) -> bool:
        """Train an arm for about `seconds` seconds (or steps). Return True if the slice is finished.

        If the run fails, the arm is stopped. If the process is killed, the next call continues the slice.
        """
        seconds -= self._interrupted.get(arm.name, 0.0)
        if self.state.unit == "steps":
            until = str(arm.step + max(1, round(seconds)))
        else:
            until = f"{max(1, round(seconds - self._overhead(arm)))}s"
        ended, taken = self._train(arm, [f"pause_at={until}"])
        if ended.results is None:
            return False
        paused = ended.results.get("paused")
        self.state.running = None
        if paused is None:
            arm.stopped = f"{FAILED}the run ended before it was paused"
            self._save()
            return False
        self.state.metric = paused["metric"]
        arm.slices.append(
            Slice(
                step=paused["step"],
                seconds=taken,
                trained=paused["seconds"],
                evaluated=paused["evaluation_seconds"],
                value=paused["value"],
                loss=paused["loss"],
                peak_bytes=paused["peak_bytes"],
            )
        )
        self._save()
        left = f", {format_seconds(max(0.0, self.left))} left" if self.state.unit == "seconds" else ""
        self.say(f"{self._described(arm)} after {arm.step} steps{left}")
        return True

    def _log(self, arm: Arm) -> Path:
        return self.folder / f"{arm.folder}.log"

    def _train(self, arm: Arm, more: Sequence[str]) -> tuple[Ended, float]:
        """Run a process that trains an arm, and stop the arm if the process fails. Also return the time in seconds.

        The arm is not stopped if a new process may continue its training.
        """
        self._begin(arm)
        began = self.clock()
        folder = self.folder / arm.folder
        ended = self.run_slice([*arm.arguments, *more, f"hydra.run.dir={hydra_quoted(str(folder))}"], self._log(arm))
        taken = self.clock() - began
        if ended.results is not None:
            self._interrupted.pop(arm.name, None)
            self._kills.pop(arm.name, None)
        elif self._continues(arm, ended):
            self._kills[arm.name] += 1
            self._lose(arm, taken)
            self.state.running = None
            self._save()
            self.say(f"{arm.name}: {ended.failure}. The training continues from the last checkpoint.")
        else:
            arm.stopped, arm.retried = f"{FAILED}{ended.failure or 'it returned no result'}", not ended.own
            self.state.running = None
            self._save()
            self.say(f"{arm.name} {arm.stopped}")
        return ended, taken

    def _continues(self, arm: Arm, ended: Ended) -> bool:
        """Return True if a new process continues the training of an arm after the failure of its process.

        A process whose memory grew slowly to the budget is continued too, because the memory of a new process is not
        fragmented. In the first slice of an arm, the recipe itself may exceed the budget.
        """
        may_continue = ended.killed or (ended.exceeded and bool(arm.slices))
        return may_continue and self._kills[arm.name] < KILLS

    def _choose(self) -> None:
        """Choose the best arm, which is then trained to the end."""
        state = self.state
        raced = [arm for arm in state.alive if arm.slices]
        if not raced:
            reasons = "; ".join(f"{arm.name} {arm.stopped}" for arm in state.arms)
            for arm in state.arms:  # the reason may be temporary, so the same command tries the recipes again
                arm.stopped = None
            state.shares = []
            self._save()
            raise UserError(f"No recipe could be trained: {reasons}. The logs are in {self.folder}.")
        best, *others = self._ranked(raced)
        for arm in others:
            arm.stopped = f"round {len(state.rungs)}: {best.name} was better"
        state.final = Final(arm=best.name)
        self._save()
        self.say(f"{self._described(best)} is the best recipe and is trained until the budget is used.")

    def _finish(self) -> None:
        """Train the best arm to the end: first with a constant, then with a decreasing learning rate."""
        state, final = self.state, self.state.final
        assert final is not None
        arm = state.arm(final.arm)
        if not final.steps:
            used = self._interrupted.get(arm.name, 0.0)
            constant = CONSTANT * (self.left + used - self._ending())
            # After an interruption, only the run itself knows the number of its steps.
            unknown = arm.name in self._interrupted
            long = len(arm.slices) <= len(state.rungs) and constant > max(LEAST_CONSTANT, 4 * self._overhead())
            if (unknown or long) and not self._slice(arm, constant):
                if arm.stopped is not None:
                    self._another(arm)
                return
            decay = self._steps(arm, self.left - self._ending())
            final.steps, final.decay = arm.step + decay, decay
            self._save()
        ended, _ = self._train(arm, [f"trainer.max_steps={final.steps}", f"optim.decay_steps={final.decay}"])
        if ended.results is None:
            if arm.stopped is not None:
                self._another(arm, ended.own)
            return
        accuracy = ended.results["accuracy"]
        final.metric, final.value, final.test = self._metric, accuracy["best"], accuracy.get("test")
        final.peak_bytes = ended.results.get("memory", {}).get("peak_bytes")
        final.trained = ended.results.get("totals", {}).get("seconds")
        final.selected = _selected(ended.results)
        state.running = None
        final.seconds = 0.0  # the run is finished, and its steps count
        final.seconds = self.elapsed
        self._save()

    def _another(self, arm: Arm, own: bool = True) -> None:
        """Choose another arm if the recipe of the best arm failed. For other failures, raise an error."""
        state = self.state
        others = [one for one in state.arms if one is not arm and one.slices and _lost(one)]
        if not own or not others:
            reason, arm.stopped, arm.retried = arm.stopped, None, False
            self._save()
            raise UserError(f"The training of {arm.name} {reason}. The log is {self._log(arm)}.")
        state.final = None
        self._ranked(others)[0].stopped = None
        self._save()

    def _ending(self) -> float:
        """Return the time in seconds that the end of the last run takes: evaluation, cost report and files."""
        if self.state.unit == "steps":
            return 0.0
        assert self.state.data is not None
        data = self.state.data
        # With stored features, evaluations during training are shorter than the final evaluation of the whole network.
        network = None if self.state.final is None else self.state.arm(self.state.final.arm).network
        same = [arm for arm in self.state.arms if network in (None, arm.network)]
        slowest = max((one.evaluated for arm in same for one in arm.slices), default=0.0)
        return FINISHING + slowest * (data.val + data.test) / data.val


def _selected(results: dict[str, Any]) -> list[str]:
    """Return the settings whose values a run selected by measuring times, so that another run uses the same values."""
    precision, prefix = results.get("environment", {}).get("precision"), results.get("prefix")
    found = [] if precision is None else [f"trainer.precision={precision}"]
    return found if prefix is None else [*found, f"trainer.prefix={prefix['form']}"]


def _lost(arm: Arm) -> bool:
    """Return True if an arm was stopped because other arms were better."""
    return arm.stopped is not None and arm.stopped.startswith("round")


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
        UserError: If the state in the folder is damaged, or belongs to a search with other settings.
        SettingError: If the budget is too small to train a recipe.
    """
    if unit == "seconds" and budget < 60:
        do = "A process needs several seconds to start, and several recipes are compared."
        raise SettingError("time", format_seconds(budget), "at least 1min", do)
    if unit == "steps" and budget < LEAST_STEPS:
        do = "Several recipes are compared, and each recipe must train for more steps than its warm-up."
        raise SettingError("steps", int(budget), f"at least {LEAST_STEPS}", do)
    state = read_state(folder)
    if state is None:
        folder.mkdir(parents=True, exist_ok=True)
        state = SearchState(settings=list(settings), memory_bytes=memory_bytes, budget=budget, unit=unit)
        write_state(folder, state)
    elif sorted(state.settings) != sorted(settings):
        raise UserError(
            f"The folder {folder} contains a search with other settings: {' '.join(state.settings)}. Choose another"
            " folder."
        )
    return Search(folder, state, propose, run_slice, say)
