"""Recipes of a plan: their cost and loss of accuracy, their order, and the recommended recipe."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from efficient_ft.methods.declarations import Exactness
from efficient_ft.planning.counting import Counted

#: A gradient counts as near exact if its cosine with the exact gradient is at least this value.
CLOSE = 0.98
#: Recipes whose step times differ by less than this factor count as equally fast.
_TIE = 1.03


@dataclass(frozen=True)
class Option:
    """Recipe of a plan with its cost and loss of accuracy.

    Attributes:
        name: name in tables.
        arguments: all command-line arguments of the run.
        exactness: declared or measured exactness class of the updates.
        counted: counts of a step.
        process_bytes: predicted peak memory of the process or, on a GPU, predicted peak memory reserved on the device.
        measured_bytes: peak memory measured in a trial of the recipe, or None if there was no trial.
        step_seconds: time of an optimizer step in seconds, or None if the time was neither measured nor estimated.
        timed: True if the step was timed on this machine. Otherwise, the time is estimated from FLOPs.
        fingerprint: fingerprint of the run's configuration. The fingerprint identifies the results of the run.
        cosine: cosine between the gradient and the exact gradient of the trained parameters, on the user's images. The
            cosine is 1 if the recipe is exact, and None if the cosine was not measured.
        added: exactness class of the methods that the plan adds to the user's methods, or None if the user named no
            methods.
        evidence: for each part of the recipe, the evidence that the updates are exact.
        points_lost: a dict from studies to the loss of test accuracy relative to full fine-tuning, in percentage
            points. The recipe was studied without its memory method.
        on_front: True if the option is on the Pareto front of peak, step time and exactness.
    """

    name: str
    arguments: tuple[str, ...]
    exactness: Exactness
    counted: Counted
    process_bytes: int
    fingerprint: str = ""
    step_seconds: float | None = None
    timed: bool = False
    measured_bytes: int | None = None
    cosine: float | None = None
    points_lost: dict[str, float] = field(default_factory=dict)
    on_front: bool = False
    added: Exactness | None = None
    evidence: tuple[str, ...] = ()

    @property
    def choice(self) -> Exactness:
        """Exactness class of the methods and the optimizer that the plan chooses. Options are ordered by this class."""
        return self.exactness if self.added is None else self.added

    @property
    def peak_bytes(self) -> int:
        """Peak memory measured in a trial, or the predicted peak memory if there was no trial."""
        return self.process_bytes if self.measured_bytes is None else self.measured_bytes

    @property
    def words(self) -> list[str]:
        """Words of the command line that trains the recipe, quoted for a shell."""
        return ["efficient-ft", *map(shlex.quote, self.arguments)]

    @property
    def command(self) -> str:
        """Command line that trains the recipe."""
        return " ".join(self.words)


@dataclass(frozen=True)
class Excluded:
    """Recipe that is not an option, because it cannot be used, exceeds the budget, or was not examined.

    Attributes:
        name: name of the recipe in tables.
        reason: reason why the recipe is excluded.
        process_bytes: budget that the recipe needs, or None if the recipe was not counted.
        exactness: exactness class of the updates, or None if the recipe was not counted.
        examined: False if planning reached the time limit before this recipe. In this case, the recipe might be usable.
    """

    name: str
    reason: str
    process_bytes: int | None = None
    exactness: Exactness | None = None
    examined: bool = True


def with_cosine(option: Option, cosine: float | None, whole: bool = True) -> Option:
    """Return a copy of an inexact option with the measured `cosine` and the resulting exactness class.

    If `cosine` is None, the option is returned unchanged. `whole` is True if all parameters of the network are trained.
    """
    if cosine is None:
        return option
    exactness = option.exactness
    if exactness is Exactness.UNKNOWN:
        exactness = Exactness.PART if not whole else Exactness.NEAR
    if exactness is Exactness.NEAR and cosine < CLOSE:
        exactness = Exactness.APPROXIMATE
    return replace(option, cosine=cosine, exactness=exactness)


def preference(option: Option) -> tuple[int, float, int]:
    """Return the sort key of an option: exactness class, then time, then memory."""
    return option.choice, option.step_seconds or 0.0, option.peak_bytes


def with_front(options: list[Option]) -> list[Option]:
    """Return copies of the options, and mark those on the Pareto front of peak memory, step time and exactness."""

    def values(o: Option) -> tuple[float, float, float]:
        loss = float(o.choice) if o.cosine is None else float(o.choice) + (1 - o.cosine) / 2
        return o.peak_bytes, o.step_seconds or 0.0, loss

    def better(a: Option, b: Option) -> bool:
        va, vb = values(a), values(b)
        return va != vb and all(x <= y for x, y in zip(va, vb, strict=True))

    return [replace(o, on_front=not any(better(other, o) for other in options)) for o in options]


def recommend(options: Sequence[Option], loss: float, step_limit: float | None) -> Option | None:
    """Return the fastest option of the best exactness class within the limits.

    If several options are equally fast, the option that uses the least memory is returned. `loss` is the maximum
    loss of test accuracy relative to full fine-tuning, in percentage points. `step_limit` is the maximum time of a step
    in seconds.
    """

    def allowed(o: Option) -> bool:
        if step_limit is not None and (o.step_seconds or 0.0) > step_limit:
            return False
        if o.choice <= Exactness.NEAR:
            return True
        return bool(o.points_lost) and max(o.points_lost.values()) <= loss

    left = [o for o in options if allowed(o)]
    if not left:
        return None
    best = min(o.choice for o in left)
    left = [o for o in left if o.choice == best]
    fastest = min(o.step_seconds or 0.0 for o in left)
    return min((o for o in left if (o.step_seconds or 0.0) <= fastest * _TIE), key=lambda o: o.peak_bytes)
