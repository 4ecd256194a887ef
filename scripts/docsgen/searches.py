"""Generated tables of the page on searches, from the trials that `scripts/searches.py` records."""

from __future__ import annotations

from typing import Any

from scipy.stats import spearmanr

from docsgen import records
from docsgen.markdown import block, table

#: Labels of the data sets and networks in the names of trials.
_IMAGES = {"caltech101": "Caltech-101, 128 px", "cars49": "Cars, 49 classes, 224 px", "cifar10": "CIFAR-10, 128 px"}
_NETWORKS = {"deit_tiny": "DeiT-T", "efficientnet_lite0": "EfficientNet-Lite0"}


def finished() -> dict[str, Any]:
    """Return the recorded trials whose search is finished, by name."""
    return {name: of for name, of in records.load("searches")["trials"].items() if "search" in of}


def _trial(name: str) -> list[str]:
    images, network, time = name.split(", ")
    return [_IMAGES[images], _NETWORKS[network], time]


@block
def searches() -> str:
    """Show the result of each search, and full fine-tuning after the same time."""
    rows = []
    for name, of in finished().items():
        found, full = of["search"], of.get("full")
        rows.append(
            [
                *_trial(name),
                f"`{found['recipe']}`",
                f"{found['lr']:.2g}",
                f"{100 * found['test']:.1f} %",
                "–" if full is None else f"{100 * full['test']:.1f} %",
            ]
        )
    head = ["images", "network", "time", "recipe", "learning rate", "test accuracy", "`full`, same time"]
    return table(head, rows, left=4)


@block
def search_decay() -> str:
    """Compare short runs at a constant and at a decreasing learning rate as predictions of longer runs."""
    rows = []
    for name, of in records.load("searches")["trials"].items():
        if "decay" not in of:
            continue
        runs = [one for arm, one in of["decay"].items() if arm != "steps"]
        best = max(one["whole"] for one in runs)
        for how in ("constant", "decreased"):
            chosen = max(runs, key=lambda one: float(one[how]))
            ranks = spearmanr([one[how] for one in runs], [one["whole"] for one in runs]).statistic
            rows.append(
                [*_trial(name)[:2], str(len(runs)), how, f"{ranks:.2f}", f"{100 * (best - chosen['whole']):.1f}"]
            )
    head = ["images", "network", "runs", "learning rate of the short runs", "rank correlation", "points lost"]
    return table(head, rows, left=4)


@block
def search_budgets() -> str:
    """Show how much of its budgets each search used."""
    rows = []
    for name, of in finished().items():
        found = of["search"]
        parts = (found["memory_bytes"], found["peak_bytes"])
        rows.append(
            [
                *_trial(name),
                *(f"{part / 1e9:.2f} GB" for part in parts),
                f"{found['seconds'] / 60:.1f} min",
                str(len([one for one in found["arms"].values() if one["steps"]])),
                f"{100 * found['winner_seconds'] / found['seconds']:.0f} %",
            ]
        )
    head = ["images", "network", "time", "memory budget", "largest process", "time used", "recipes trained"]
    return table([*head, "time for the chosen recipe"], rows, left=3)
