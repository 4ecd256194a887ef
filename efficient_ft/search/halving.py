"""Successive halving: train all arms for a while, keep the best third, and give the remaining arms more of the budget.

The algorithm is that of Jamieson and Talwalkar, "Non-stochastic Best Arm Identification and Hyperparameter
Optimization" (AISTATS 2016), with a factor of 3. All functions are pure.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence

from efficient_ft.search.state import Arm

#: Factor by which the number of arms decreases after each round.
FACTOR = 3


def rungs(arms: int) -> list[int]:
    """Return the number of arms in each round of the race. After the last round, one arm remains."""
    counts = []
    while arms > 1:
        counts.append(arms)
        arms = math.ceil(arms / FACTOR)
    return counts


def score(arm: Arm, left: float) -> float:
    """Return the expected accuracy of an arm after further `left` steps, relative to full fine-tuning.

    Recipes that train few parameters are ahead after few steps, but not at the end. The loss of accuracy in studies is
    therefore subtracted, weighted with the fraction of the steps that are left. The loss is relative to full
    fine-tuning of the same network. Nothing is subtracted for the network, because no study predicts how much the
    accuracy of a network increases in the remaining steps. See `networks_first`.
    """
    last = arm.slices[-1]
    return last.value - left / (last.step + left) * (arm.points_lost or 0.0) / 100


def ranked(arms: Sequence[Arm], left: Callable[[Arm], float] = lambda arm: 0.0) -> list[Arm]:
    """Return arms in decreasing order of their `score`. Ties are resolved by the validation loss, then by the order.

    `left` returns the number of steps that an arm can still train. By default, arms are compared as they are.
    """
    return sorted(arms, key=lambda arm: (-score(arm, left(arm)), arm.slices[-1].loss))


def networks_first(order: Sequence[Arm]) -> list[Arm]:
    """Return ranked arms so that the best arm of each network precedes all other arms."""
    best: dict[str, Arm] = {}
    for arm in order:
        best.setdefault(arm.network, arm)
    return [*best.values(), *(arm for arm in order if best[arm.network] is not arm)]


def rate(arm: Arm) -> float:
    """Return the time of an optimizer step in the last slice of an arm in seconds.

    The time includes waiting for data and evaluations at the ends of epochs, but not the evaluation after the slice.
    """
    last, before = arm.slices[-1], arm.slices[-2] if len(arm.slices) > 1 else None
    steps = last.step - (before.step if before else 0)
    return max(0.0, last.trained - (before.trained if before else 0.0) - last.evaluated) / max(steps, 1)


def overhead(arms: Sequence[Arm], default: float) -> float:
    """Return the median time of a slice in seconds that is not spent on training.

    This time includes the start of the process and the evaluation after the slice.
    """
    found = []
    for arm in arms:
        before = 0.0
        for one in arm.slices:
            found.append(max(0.0, one.seconds - (one.trained - before)) + one.evaluated)
            before = one.trained
    return statistics.median(found) if found else default
