"""Time to accuracy: the curves of `scripts/time_to_accuracy.py`, and the time until each is near full fine-tuning."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

from docsgen import records
from docsgen.labels import LABELS
from docsgen.markdown import block, table

BASELINE = "full"


@dataclass(frozen=True)
class Recipe:
    """The runs of a recipe, one per seed.

    Attributes:
        name: in the record.
        runs: seconds since the training began and test accuracy, after each epoch.
    """

    name: str
    runs: tuple[tuple[tuple[float, float], ...], ...]

    @property
    def last(self) -> list[float]:
        """Return the accuracy of each run after its last epoch."""
        return [run[-1][1] for run in self.runs]

    @property
    def seconds(self) -> float:
        """Return the seconds of all epochs, the mean of the runs."""
        return statistics.mean(run[-1][0] for run in self.runs)

    def until(self, accuracy: float) -> float | None:
        """Return the mean seconds until an accuracy is reached at the end of an epoch, or None if a run missed it."""
        reached = [next((at for at, found in run if found >= accuracy), None) for run in self.runs]
        found = [at for at in reached if at is not None]
        return statistics.mean(found) if len(found) == len(reached) else None

    @property
    def curve(self) -> list[tuple[float, float]]:
        """Return seconds and accuracy after each epoch, the means of the runs."""
        return [
            (statistics.mean(at for at, _ in epoch), statistics.mean(accuracy for _, accuracy in epoch))
            for epoch in zip(*self.runs, strict=True)
        ]


def recipes(network: str) -> dict[str, Recipe]:
    """Return the recipes that were run, by name."""
    return recorded(records.load("accuracy")["networks"][network]["recipes"])


def recorded(of: dict[str, Any], seeds: set[int] | None = None) -> dict[str, Recipe]:
    """Return the recipes of a record that have runs, by name; with `seeds` their runs with these seeds."""
    runs = {
        name: tuple(tuple(map(tuple, run["curve"])) for run in recipe["runs"] if seeds is None or run["seed"] in seeds)
        for name, recipe in of.items()
    }
    return {name: Recipe(name, own) for name, own in runs.items() if own}


def pair(network: str, recipe: str, other: str) -> tuple[Recipe, Recipe]:
    """Return two recipes, each with the runs of the seeds that both have."""
    of = records.load("accuracy")["networks"][network]["recipes"]
    found = recorded(of, {run["seed"] for run in of[recipe]["runs"]} & {run["seed"] for run in of[other]["runs"]})
    return found[recipe], found[other]


def target(network: str) -> float:
    """Return the target accuracy: the record's share of full fine-tuning's last one."""
    share: float = records.load("accuracy")["share"]
    return share * statistics.mean(recipes(network)[BASELINE].last)


@block
def time_to_accuracy(network: str) -> str:
    """Show the recipes by the seconds that they need."""
    goal, of = target(network), recipes(network)
    base = of[BASELINE].until(goal)
    assert base is not None, f"{network}: a run of {BASELINE} did not reach {goal:.1%}"
    rows = []
    for recipe in sorted(of.values(), key=lambda r: r.until(goal) or float("inf")):
        until = recipe.until(goal)
        accuracy = f"{statistics.mean(recipe.last):.1%}".replace("%", " %")
        if len(recipe.last) > 1:
            accuracy += f" [{100 * min(recipe.last):.1f}…{100 * max(recipe.last):.1f}]"
        reached = ["not reached", "–"] if until is None else [f"{until:.0f}", f"{base / until:.1f}"]
        rows.append([LABELS["curves"][recipe.name], *reached, f"{recipe.seconds:.0f}", accuracy, str(len(recipe.runs))])
    head = ["recipe", f"seconds to {goal:.1%}".replace("%", " %"), "times faster", "seconds, all epochs"]
    return table([*head, "accuracy after the last", "seeds"], rows)


@block
def time_to_accuracy_conditions(network: str) -> str:
    """State the conditions of the runs."""
    settings = records.load("accuracy")["networks"][network]["settings"]
    return f"Settings: `{' '.join(settings)}`. {records.conditions('accuracy', 'one run at a time')}"
