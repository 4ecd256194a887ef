"""The result of a learning rate range test, the rule that suggests a learning rate, and the file lr_test.json."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from efficient_ft.core.errors import UserError
from efficient_ft.core.parsing import parse_json
from efficient_ft.record.files import json_text, write_text_atomically
from efficient_ft.record.formats import FORMAT

NAME = "lr_test.json"
#: Standard deviation of the smoothing, in decades of the learning rate.
WIDTH = 0.2
#: The suggestion is this fraction of the learning rate with the lowest smoothed loss. See docs/guides/learning-rate.md
#: for a comparison with other rules.
FRACTION = 1 / 3
#: A decrease of the loss must exceed this number of standard deviations of the losses of single batches.
NOISE = 2.0


@dataclass(frozen=True)
class RangeTest:
    """The result of a range test.

    Attributes:
        rates: learning rate of each optimizer step, without the factors for the classifier and the layers.
        losses: training loss of each step, which is computed before the update with this learning rate.
        ended: sentence that explains why the test stopped before its last step, or an empty string.
    """

    rates: Sequence[float]
    losses: Sequence[float]
    ended: str = ""

    @property
    def smoothed(self) -> list[float]:
        """The smoothed losses. See `smooth`."""
        return smooth(self.rates, self.losses)


class Suggestion(NamedTuple):
    """A suggested learning rate, rounded to 1 or 3 times a power of ten, or None if there is none.

    Attributes:
        lr: the suggestion.
        exact: the learning rate before rounding.
        reason: a sentence that explains the result.
    """

    lr: float | None
    exact: float | None
    reason: str


def smooth(rates: Sequence[float], losses: Sequence[float]) -> list[float]:
    """Return the mean of the losses around each rate, with Gaussian weights of the width `WIDTH` in log10 of the rates.

    Unlike an exponential moving average, this mean is not delayed.
    """
    return [mean_around(rate, rates, losses) for rate in rates]


def mean_around(rate: float, rates: Sequence[float], losses: Sequence[float]) -> float:
    """Return the smoothed loss at a rate. See `smooth`."""
    weights = [math.exp(-0.5 * (math.log10(other / rate) / WIDTH) ** 2) for other in rates]
    return math.fsum(map(operator.mul, weights, losses)) / math.fsum(weights)


def suggest(test: RangeTest) -> Suggestion:
    """Return `FRACTION` of the learning rate with the lowest smoothed loss, rounded to 1 or 3 times a power of ten.

    There is no suggestion if the loss does not decrease by more than `NOISE` standard deviations of single losses from
    their mean.
    """
    rates, smoothed = test.rates, test.smoothed
    lowest = smoothed.index(min(smoothed))
    noise = [loss - mean for loss, mean in zip(test.losses[: lowest + 1], smoothed, strict=False)]
    deviation = math.sqrt(math.fsum(one**2 for one in noise) / len(noise))
    if max(smoothed[: lowest + 1]) - smoothed[lowest] <= NOISE * deviation:
        reason = (
            "No learning rate is suggested, because the loss did not decrease by more than its noise"
            f" ({deviation:.2g}). Use more --steps, or another range (--from, --to)."
        )
        return Suggestion(None, None, reason)
    exact = FRACTION * rates[lowest]
    grid = (digit * 10.0**power for power in range(-13, 4) for digit in (1, 3))
    lr = min(grid, key=lambda one: abs(math.log(one / exact)))
    reason = (
        f"The smoothed loss is lowest at a learning rate of {rates[lowest]:.2g}. The suggestion is a third of this"
        " value, rounded to 1 or 3 times a power of ten."
    )
    if lowest == len(rates) - 1 and not test.ended:
        reason += " The loss still decreased at the end of the test. Repeat the test with a larger --to."
    return Suggestion(float(f"{lr:.0e}"), exact, reason)


def write_lr_test(folder: Path, test: RangeTest, found: Suggestion, arguments: Sequence[str], more: Any) -> Path:
    """Write lr_test.json, and return its path. `more` contains further entries."""
    record = {"format": FORMAT, "suggestion": found._asdict(), "arguments": list(arguments), "ended": test.ended}
    values = {"rates": list(test.rates), "losses": list(test.losses), "smoothed": test.smoothed}
    write_text_atomically(folder / NAME, json_text({**record, **values, **more}) + "\n")
    return folder / NAME


def read_suggestion(folder: Path) -> float | None:
    """Return the learning rate that the test in `folder` suggests, or None if the test suggests none.

    Raises:
        UserError: If the file is missing or damaged.
    """
    file = folder / NAME
    try:
        record: Mapping[str, Any] = parse_json(file.read_text(encoding="utf-8"))
        lr = record["suggestion"]["lr"]
        return None if lr is None else float(lr)
    except (OSError, ValueError, TypeError, LookupError) as error:
        raise UserError(f"The file {file} is missing or damaged. Run the learning rate test again.") from error
