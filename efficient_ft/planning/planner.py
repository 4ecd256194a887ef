"""Find the recipes of a run that fit a memory budget, and recommend one.

Every candidate is counted on fake tensors, and the memory of its process is predicted from the counts. The preferred
candidates that fit are timed on this machine. The times of the other candidates are estimated from FLOPs. If weights
and images are available, the cosine between the gradient and the exact gradient is measured on the user's images.
Losses of accuracy come from finished studies. The recommended recipe runs for a few steps in a separate process, which
measures the memory and the time.
"""

from __future__ import annotations

import time as clock
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import psutil
import torch

from efficient_ft.config import Config, data_configs, fingerprint
from efficient_ft.core.allocator import allocator_in_use
from efficient_ft.core.errors import SettingError, UserError, first_line
from efficient_ft.core.format import bytes_setting, format_bytes, format_seconds
from efficient_ft.core.process_memory import (
    memory_limit_bytes,
    release_freed_memory,
    release_library_pages,
    resident_bytes,
)
from efficient_ft.cost import predict
from efficient_ft.cost.predict import RUN_ONLY
from efficient_ft.data import class_count
from efficient_ft.methods.build import build_methods
from efficient_ft.methods.declarations import Axis, Exactness
from efficient_ft.models import factory
from efficient_ft.planning.candidates import SMALLEST, Candidate, candidates, split
from efficient_ft.planning.closeness import Closeness
from efficient_ft.planning.counting import Counter, RunPhases
from efficient_ft.planning.options import Excluded, Option, preference, recommend, with_cosine, with_front
from efficient_ft.planning.plan import Examined, Limits, Plan
from efficient_ft.planning.prior import points_lost
from efficient_ft.planning.timing import Trial, step_seconds
from efficient_ft.training.datamodule import run_length
from efficient_ft.training.kinds.registry import kind_of
from efficient_ft.training.memory.batch_size import with_effective_batch_size
from efficient_ft.training.memory.libraries import LibrarySizes, libraries
from efficient_ft.training.precision import resolve_precision
from efficient_ft.training.trainer import on_device

#: Function that returns the checked configuration of a run. The argument is a list of settings, as on the command line.
Configure = Callable[[Sequence[str]], Config]
#: Function that tries a recipe in a separate process (see `timing.try_recipe`). The function receives the command-line
#: arguments, the number of classes and a limit in seconds, and raises a UserError if the process fails.
Attempt = Callable[[Sequence[str], int, float], Trial]

#: Assumed number of classes if there are no images. ImageNet has the same number of classes.
_UNKNOWN_CLASSES = 1000
#: Safety factors for the predicted growth and for the growth measured in a trial. The product of the growth and its
#: factor must fit the budget.
MARGIN, TRIAL_MARGIN = 1.12, 1.1
#: Fractions of the planning time for counting, timing and comparing gradients. The remaining time is for startup and
#: trials.
_COUNTING, _TIMING, _COMPARING = 0.4, 2 / 15, 2 / 15
#: Maximum time of a timed step in seconds, for most recipes and for the recommended recipe. If a step would take
#: longer, only a part of the batch is used.
_STEP, _FINAL_STEP = 0.7, 4.0
#: Maximum time of a trial in seconds, maximum time of a step in a trial, and maximum number of trials of a plan.
_TRIAL, _TRIED_STEP, _TRIALS = 9.0, 4.0, 2


def make_plan(
    settings: Sequence[str],
    configure: Configure,
    limits: Limits,
    *,
    chosen: Sequence[str] = (),
    attempt: Attempt | None = None,
    say: Callable[[str], None] = lambda text: None,
    ready: Callable[[Examined], None] = lambda examined: None,
) -> Plan:
    """Plan a run, as described at the top of this module.

    `settings` are the settings of the run. If the settings contain methods, `chosen` must list them as options of the
    group ``method``. Every recipe keeps these methods. If `attempt` is given, the function is called to try the
    recommended recipe. `say` is called with a description of each planning step, and `ready` with each examined recipe.

    Raises:
        UserError: If a setting cannot be used, or the model cannot be built.
        SettingError: If the budget is smaller than the weights, or a time budget is given without images.
    """
    began, seconds = clock.perf_counter(), limits.planning_seconds
    planner, steps = start_planning(settings, configure, limits, chosen=chosen, say=say)
    base = planner.base
    memory_free = not any(getattr(method, "axis", None) is Axis.MEMORY for method in build_methods(base))
    todo = candidates(base, planner.counter.blocks, chosen, memory_free or not chosen)
    end = began + seconds * (_COUNTING + _TIMING + _COMPARING)
    found, excluded = planner.examine(todo, (began + seconds * _COUNTING, end), ready)
    fitting = planner.fitting(found, limits.split_batch)
    above = [option for option in found if option not in fitting]
    fitting = planner.with_times(fitting, min(clock.perf_counter() + seconds * _TIMING, end))
    fitting = planner.with_losses(fitting, min(clock.perf_counter() + seconds * _COMPARING, end))
    best, options, refused = planner.with_trial(sorted(fitting, key=preference), attempt)
    excluded += [*refused, *(planner.above_budget(option) for option in above)]
    least = min(found, key=planner.bound)
    options = with_front(options)
    return Plan(
        planner.memory_bytes,
        limits.memory_bytes,
        planner.base_bytes,
        planner.allocator,
        str(planner.device),
        tuple(options),
        tuple(excluded),
        next((option for option in options if option.name == best), None),
        planner.bound(least),
        least.name,
        steps,
        clock.perf_counter() - began,
        seconds,
    )


def start_planning(
    settings: Sequence[str],
    configure: Configure,
    limits: Limits,
    *,
    chosen: Sequence[str] = (),
    say: Callable[[str], None] = lambda text: None,
) -> tuple[Planner, int | None]:
    """Return a planner for the run that `settings` describe, and the number of its optimizer steps.

    The number is None without images. The arguments and errors are those of `make_plan`.
    """
    memory_bytes = limits.memory_bytes
    base = configure([*settings, *([] if chosen else ["method=full"])])
    if base.trainer.compile:
        do = "The plan does not predict the memory of the compiler."
        raise SettingError("trainer.compile", "true", "false in a plan", do)
    device = on_device(base)
    base = with_effective_batch_size(resolve_precision(base, device), lambda line: None)
    precision = base.trainer.precision
    if device.type == "cpu":
        memory_bytes = min(memory_bytes, memory_limit_bytes())
    steps = None
    if not kind_of(base).missing(base):
        steps = run_length(base, kind_of(base).open(base, factory.input_of(base.model)), 1)[1]
    if limits.seconds is not None and steps is None:
        given = format_seconds(limits.seconds)
        raise SettingError("time", given, "left out without images", "Images determine the number of steps.")
    counts = [class_count(data) for data in data_configs(base)]
    release_library_pages()
    planner = Planner(
        settings=[word for word in settings if not (chosen and word.startswith("method="))],
        configure=lambda words: with_effective_batch_size(
            configure(words).with_precision(precision), lambda line: None
        ),
        base=base,
        device=device,
        chosen=bool(chosen),
        memory_bytes=memory_bytes,
        loss=limits.loss,
        step_limit=None if limits.seconds is None or steps is None else limits.seconds / steps,
        say=say,
        base_bytes=0 if device.type == "cuda" else resident_bytes(),
        counter=Counter(base, counts[0] or _UNKNOWN_CLASSES),
        phases=RunPhases(base),
    )
    return planner, steps


@dataclass
class Planner:
    """Steps of planning and their shared state."""

    settings: list[str]
    configure: Configure
    base: Config
    device: torch.device
    chosen: bool
    memory_bytes: int
    loss: float
    step_limit: float | None
    say: Callable[[str], None]
    base_bytes: int
    counter: Counter
    phases: RunPhases
    allocator: str = field(default_factory=allocator_in_use)
    sizes: LibrarySizes = field(default_factory=LibrarySizes)
    #: Recipe and configuration of each option, by name.
    recipes: dict[str, tuple[Candidate, Config]] = field(default_factory=dict)
    #: Ratio of the measured to the predicted growth in trials that did not fit. This ratio is assumed for all recipes.
    excess: float = 1.0

    def examine(
        self, todo: Sequence[Candidate], times: tuple[float, float], ready: Callable[[Examined], None]
    ) -> tuple[list[Option], list[Excluded]]:
        """Count the candidates until a deadline.

        The deadline is the first value of `times`. If no candidate that fits can be recommended, the second value is
        used.

        Returns:
            The options of the usable candidates, and the excluded candidates.
        """
        found: list[Option] = []
        excluded: list[Excluded] = []
        enough = False
        for number, candidate in enumerate(todo, start=1):
            late = clock.perf_counter() > times[0 if enough else 1]
            if late and found and candidate.methods not in SMALLEST:
                excluded.append(Excluded(candidate.name, "The planning time limit was reached.", examined=False))
                continue
            self.say(f"counting the recipe {candidate.name} ({number} of {len(todo)})")
            try:
                option = self.option(candidate)
            except UserError as error:
                excluded.append(Excluded(candidate.name, first_line(error)))
                ready(Examined(number, len(todo), candidate.name, None, False))
                continue
            if not found:
                self._refuse_too_little(option)
            found.append(option)
            fits = self.fits(option)
            # A recipe of unknown exactness can be recommended after its cosine has been measured.
            measurable = option.exactness is Exactness.UNKNOWN
            enough = enough or (fits and (measurable or self.choose([option]) is not None))
            ready(Examined(number, len(todo), option.name, self.bound(option), fits))
        if not found:
            raise UserError(f"No recipe can be used with this model: {excluded[0].reason}")
        return found, excluded

    def choose(self, options: Sequence[Option]) -> Option | None:
        """Return the option to recommend, or None if no option is within the limits."""
        return recommend(options, self.loss, self.step_limit)

    def fitting(self, found: Sequence[Option], split_batch: bool) -> list[Option]:
        """Return the options that fit. If no exact option fits, options with a split batch are added."""
        fits = [option for option in found if self.fits(option)]
        if not split_batch or any(option.exactness is Exactness.EXACT for option in fits):
            return fits
        for option in [option for option in found if option not in fits]:
            for parts in split(self.recipes[option.name][0], self.base):
                smaller = self.option(parts)
                if self.fits(smaller):
                    fits.append(smaller)
                    break
        return fits

    def _refuse_too_little(self, option: Option) -> None:
        """Raise a SettingError if the process exceeds the budget before the first step."""
        weights = self.base_bytes + option.counted.resident_bytes
        if weights > self.memory_bytes:
            raise SettingError(
                "memory",
                format_bytes(self.memory_bytes),
                f"at least {bytes_setting(weights)}",
                f"Before the first step, the interpreter and its libraries use {format_bytes(self.base_bytes)}, and the"
                f" model and a batch use {format_bytes(weights - self.base_bytes)}. Choose a smaller model,"
                " data.batch_size or model.image_size.",
            )

    def option(self, candidate: Candidate, resumed: bool = False) -> Option:
        """Count the FLOPs and bytes of a recipe, and predict its memory in the same way as at the start of a run.

        If `resumed` is True, the prediction includes reading a checkpoint.
        """
        own = candidate.arguments(self.base)
        taken = {argument.partition("=")[0] for argument in own}
        settings = [s for s in self.settings if s.partition("=")[0] not in taken]
        config = self.configure([*settings, *own])
        methods = build_methods(config)
        # The size of the libraries is measured before counting, because counting also loads them.
        added = 0 if self.device.type == "cuda" else self.sizes(libraries(config.optim.state_bits, methods))
        counted = self.counter(config, methods)
        self.recipes[candidate.name] = candidate, config
        exactness = candidate.exactness
        if exactness is Exactness.UNKNOWN and counted.trainable < self.counter.parameters:
            exactness = Exactness.PART
        demand = replace(self.phases.demand(config, counted), resumed=resumed)
        return Option(
            candidate.name,
            (*settings, *own),
            exactness,
            counted,
            predict(demand, self.base_bytes + added, self.allocator, self.device.type).peak_bytes,
            fingerprint(config),
            points_lost=points_lost(candidate.row),
            cosine=1.0 if candidate.exactness is Exactness.EXACT else None,
            added=candidate.added,
            evidence=candidate.evidence,
        )

    def bound(self, option: Option) -> int:
        """Return the budget that an option needs: its peak plus a margin, and at least the predicted peak."""
        margin = max(MARGIN, self.excess * TRIAL_MARGIN) if option.measured_bytes is None else TRIAL_MARGIN
        return max(round(option.peak_bytes + (margin - 1) * self.growth_bytes(option)), option.process_bytes)

    def growth_bytes(self, option: Option) -> int:
        """Return the predicted growth of the process memory in a step, without the model and the batch."""
        return option.peak_bytes - self.base_bytes - option.counted.resident_bytes

    def fits(self, option: Option) -> bool:
        """Return True if the option stays within the budget."""
        return self.bound(option) <= self.memory_bytes

    def _rough(self, option: Option) -> tuple[int, float]:
        """Return the sort key of an option that has not been timed: exactness class, then FLOPs."""
        candidate, _ = self.recipes[option.name]
        flops = option.counted.flops * candidate.time_factor * (1.02 if candidate.in_backward else 1)
        return option.exactness, flops

    def with_times(self, fitting: list[Option], deadline: float) -> list[Option]:
        """Time the preferred options until the deadline, and estimate the times of the other options from FLOPs."""
        best_of: dict[Exactness, list[Option]] = {}
        for option in sorted(fitting, key=self._rough):
            best_of.setdefault(option.exactness, []).append(option)
        queue = [of[at] for at in range(2) for of in (best_of[key] for key in sorted(best_of)) if at < len(of)]
        timed: dict[str, float] = {}
        rates: dict[str, float] = {}
        rate = 0.0
        for option in queue:
            if deadline < clock.perf_counter() and timed:
                break
            self.say(f"timing {option.name}")
            candidate, config = self.recipes[option.name]
            if not rate:  # a first step with one image determines the number of images in the timed steps
                rate = step_seconds(config, self.counter, self.device, 1, 0.5) / option.counted.flops
            timed[option.name] = self._step_seconds(config, rate * option.counted.flops, _STEP, 3 * _STEP)
            rate = rates[option.name] = timed[option.name] / option.counted.flops / candidate.time_factor
        usual = sorted(rates.values())[len(rates) // 2] if rates else None
        factors = {option.name: self.recipes[option.name][0].time_factor for option in fitting}
        return [
            replace(o, step_seconds=timed[o.name], timed=True)
            if o.name in timed
            else replace(o, step_seconds=None if usual is None else usual * o.counted.flops * factors[o.name])
            for o in fitting
        ]

    def _step_seconds(self, config: Config, estimate: float, step: float, limit: float) -> float:
        """Time a step whose estimated time is `estimate`, for at most `limit` seconds.

        If a step would take longer than `step` seconds, only a part of the batch is used.
        """
        whole = estimate / config.trainer.grad_accum_steps
        images = max(1, min(config.data.batch_size, int(config.data.batch_size * step / max(whole, 1e-9))))
        return step_seconds(config, self.counter, self.device, images, limit)

    def with_trial(
        self, options: list[Option], attempt: Attempt | None
    ) -> tuple[str | None, list[Option], list[Excluded]]:
        """Try the best option in a separate process. If the option exceeds the budget, try the next option.

        Returns:
            The name of the recommended option, the options that fit, and the options that were excluded.
        """
        refused: list[Excluded] = []
        for number in range(_TRIALS + 1):
            best = self.choose(options)
            if best is None:
                break
            if attempt is None or number == _TRIALS or not self._can_be_tried(best):
                self.say(f"timing {best.name}")
                seconds = best.step_seconds or 1.0
                seconds = self._step_seconds(self.recipes[best.name][1], seconds, _FINAL_STEP, 2 * _FINAL_STEP)
                timed = replace(best, step_seconds=seconds, timed=True)
                return best.name, [timed if option == best else option for option in options], refused
            self.say(f"trying {best.name}")
            release_freed_memory()
            try:
                trial = attempt(self._with_precision(best.arguments), self.counter.classes, _TRIAL)
            except UserError as error:
                refused.append(Excluded(best.name, f"the trial failed: {first_line(error)}"))
                options = [option for option in options if option != best]
                continue
            tried = replace(
                best,
                measured_bytes=trial.peak_bytes + (0 if self.device.type == "cuda" else self.base_bytes + RUN_ONLY),
                step_seconds=trial.step_seconds,
                timed=True,
            )
            options = [tried if option == best else option for option in options]
            if self.fits(tried):
                return tried.name, options, refused
            self.excess = max(self.excess, self.growth_bytes(tried) / self.growth_bytes(best))
            over = [option for option in options if not self.fits(option)]
            refused += [self.above_budget(option) for option in over]
            options = [option for option in options if option not in over]
        return None, options, refused

    def _with_precision(self, arguments: Sequence[str]) -> list[str]:
        """Return the arguments of a recipe with the precision that was selected for the plan."""
        own = [word for word in arguments if not word.startswith("trainer.precision=")]
        return [*own, f"trainer.precision={self.base.trainer.precision}"]

    def above_budget(self, option: Option) -> Excluded:
        """Convert an option that exceeds the budget to an excluded recipe."""
        bound = self.bound(option)
        measured = f"the process used {format_bytes(bound)} in a trial, including a margin"
        reason = f"the process may use {format_bytes(bound)}" if option.measured_bytes is None else measured
        return Excluded(option.name, reason, bound, option.exactness)

    def _can_be_tried(self, option: Option) -> bool:
        """Return True if the steps of an option are short enough for a trial, and enough memory is free."""
        if option.step_seconds is None or option.step_seconds > _TRIED_STEP:
            return False
        room = min(memory_limit_bytes() - resident_bytes(), psutil.virtual_memory().available)
        return self.device.type != "cpu" or room >= self.bound(option)

    def with_losses(self, fitting: list[Option], deadline: float) -> list[Option]:
        """Compare the gradients of inexact options with the exact gradients, if weights and images are available."""
        measurable = [Exactness.NEAR, Exactness.APPROXIMATE, Exactness.UNKNOWN]
        if self.chosen:
            measurable.append(Exactness.PART)
        open_ = [o for o in fitting if o.exactness in measurable and self.recipes[o.name][0].micro_batches == 1]
        model = self.base.model
        if not open_ or factory.missing_weights(model) is not None or kind_of(self.base).missing(self.base):
            return fitting
        if not model.pretrained and model.weights is None:
            return fitting  # gradients of random weights are meaningless
        self.say("comparing gradients")
        closeness = Closeness(self.base, self.device)
        by_methods: dict[str, float | None] = {}
        measured: dict[str, float | None] = {}
        for option in sorted(open_, key=lambda option: option.exactness):
            _, config = self.recipes[option.name]
            key = config.model_dump_json(include={"method"})
            if key not in by_methods and clock.perf_counter() < deadline:
                by_methods[key] = closeness.cosine(config)
            measured[option.name] = by_methods.get(key)
        return [with_cosine(o, measured.get(o.name), o.counted.trainable >= self.counter.parameters) for o in fitting]
