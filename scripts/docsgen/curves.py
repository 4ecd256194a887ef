"""Generated parts of the page on time to accuracy, from the curves that `scripts/time_to_accuracy.py` records."""

from __future__ import annotations

import math
import statistics
from typing import Any

from docsgen import records
from docsgen.markdown import block, table
from docsgen.records import LABELS

BASELINE = "full"

#: For each epoch, the seconds since the start of training and the test accuracy after the epoch.
Curve = list[tuple[float, float]]


def of_network(network: str) -> dict[str, Any]:
    """Return the recorded settings and runs of a network. ``NETWORK@bf16`` selects the record in bf16."""
    name, _, precision = network.partition("@")
    found: dict[str, Any] = records.load(f"accuracy_{precision}" if precision else "accuracy")["networks"][name]
    return found


def of_recipes(recorded: dict[str, Any]) -> dict[str, list[Curve]]:
    """Return one curve for each run of each recorded recipe."""
    return {name: [run["curve"] for run in recipe["runs"]] for name, recipe in recorded.items()}


def recipes(network: str) -> dict[str, list[Curve]]:
    """Return one curve for each run of each recipe of a network."""
    return of_recipes(of_network(network)["recipes"])


def last(runs: list[Curve]) -> list[float]:
    """Return the accuracy of each run after its last epoch."""
    return [run[-1][1] for run in runs]


def seconds(runs: list[Curve]) -> float:
    """Return the total time of all epochs in seconds, averaged over the runs."""
    return statistics.mean(run[-1][0] for run in runs)


def until(runs: list[Curve], accuracy: float) -> float:
    """Return the mean time in seconds until the end of the first epoch that reaches `accuracy`, or infinity."""
    return statistics.mean(next((at for at, found in run if found >= accuracy), math.inf) for run in runs)


def mean(runs: list[Curve]) -> Curve:
    """Return the mean curve of the runs."""
    return [tuple(map(statistics.mean, zip(*epoch, strict=True))) for epoch in zip(*runs, strict=True)]


def target(network: str) -> float:
    """Return the target accuracy, which is a fraction of the final accuracy of full fine-tuning."""
    share: float = records.load("accuracy")["share"]
    return share * statistics.mean(last(recipes(network)[BASELINE]))


@block
def time_to_accuracy(network: str) -> str:
    """Show the recipes, sorted by the time until they reach the target accuracy."""
    goal, of = target(network), recipes(network)
    base = until(of[BASELINE], goal)
    assert base < math.inf, f"{network}: a run of {BASELINE} did not reach the target accuracy {goal:.1%}"
    rows = []
    for name, runs in sorted(of.items(), key=lambda item: until(item[1], goal)):
        needed, accuracies = until(runs, goal), last(runs)
        accuracy = f"{100 * statistics.mean(accuracies):.1f} %"
        if len(runs) > 1:
            accuracy += f" [{100 * min(accuracies):.1f}…{100 * max(accuracies):.1f}]"
        reached = [f"{needed:.0f}", f"{base / needed:.1f}"] if needed < math.inf else ["not reached", "–"]
        rows.append([LABELS["curves"][name], *reached, f"{seconds(runs):.0f}", accuracy, str(len(runs))])
    head = ["recipe", f"seconds to {100 * goal:.1f} %", "times faster", "seconds for all epochs"]
    return table([*head, "accuracy after the last epoch", "seeds"], rows)


@block
def time_to_accuracy_settings(network: str) -> str:
    """Return a line with the settings of the runs."""
    return f"Settings: `{' '.join(of_network(network)['settings'])}`."
