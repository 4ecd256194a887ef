"""The recipes of a plan: what each costs and loses, how they are ordered, and which one is recommended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from efficient_ft.methods.declarations import Exactness
from efficient_ft.planning.counting import Counted

#: The cosine of a gradient with the exact one from which on it counts as near exact.
CLOSE = 0.98
#: Recipes whose step times differ by less are equally fast.
_TIE = 1.03


@dataclass(frozen=True)
class Option:
    """A recipe of a plan with what it costs and loses.

    Attributes:
        name: in tables.
        arguments: of the command line, all that make the run.
        exactness: its class: declared, or measured.
        counted: what a step takes.
        process_bytes: predicted peak of the process (on a GPU: of the memory reserved on it).
        measured_bytes: the same peak, measured in a trial of the recipe; None: it was not tried.
        step_seconds: of an optimizer step; None: neither timed nor estimated.
        timed: the step was timed here; False: the time is estimated from FLOPs.
        fingerprint: of the run's configuration, by which its results are found again.
        cosine: of the gradient with the exact one, over the parameters that the recipe trains, on the user's own
            images; 1 where it is exact; None: not measured.
        added: the class of what the plan adds to the methods that the user named; None: the user named none.
        evidence: what shows that it is exact, part by part.
        points_lost: by study: points of test accuracy below full fine-tuning, without the memory method.
        on_front: no other option that fits is better in peak, step time and exactness at once.
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
        """The class by which options are ordered: of what the plan decides."""
        return self.exactness if self.added is None else self.added

    @property
    def peak_bytes(self) -> int:
        """The peak of the process as measured in a trial, or else as predicted."""
        return self.process_bytes if self.measured_bytes is None else self.measured_bytes

    @property
    def words(self) -> list[str]:
        """The words of the command line that trains the recipe, quoted for a shell."""
        return ["efficient-ft", *(f"'{a}'" if any(c in a for c in "[]{}, ") else a for a in self.arguments)]

    @property
    def command(self) -> str:
        """The command line that trains the recipe."""
        return " ".join(self.words)


@dataclass(frozen=True)
class Excluded:
    """A recipe that is not an option.

    Attributes:
        name: name in tables.
        reason: why the recipe cannot be used.
        process_bytes: the budget that the recipe needs; None if it was not counted.
        exactness: its class; None if it was not counted.
        examined: False if the planning time ended before, so that the recipe may be possible.
    """

    name: str
    reason: str
    process_bytes: int | None = None
    exactness: Exactness | None = None
    examined: bool = True


def with_cosine(option: Option, cosine: float | None, whole: bool = True) -> Option:
    """The option with a measured cosine, and the class that follows from it.

    Args:
        option: the option; an exact one is not measured.
        cosine: of its gradient with the exact one; None: not measured.
        whole: every parameter of the network trains.
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
    """Sorts options: by class, then by time, then by memory."""
    return option.choice, option.step_seconds or 0.0, option.peak_bytes


def with_front(options: list[Option]) -> list[Option]:
    """Mark the options that no other one is better than in peak, step time and exactness at once."""

    def values(o: Option) -> tuple[float, float, float]:
        loss = float(o.choice) if o.cosine is None else float(o.choice) + (1 - o.cosine) / 2
        return o.peak_bytes, o.step_seconds or 0.0, loss

    def better(a: Option, b: Option) -> bool:
        va, vb = values(a), values(b)
        return va != vb and all(x <= y for x, y in zip(va, vb, strict=True))

    return [replace(o, on_front=not any(better(other, o) for other in options)) for o in options]


def recommend(options: Sequence[Option], loss: float, step_limit: float | None) -> Option | None:
    """The option of the best class within the limits, the fastest in it, exact or small where equally fast."""

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
