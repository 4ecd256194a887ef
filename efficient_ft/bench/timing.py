"""Time functions alternately, and summarize the times."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

#: Times in seconds, keyed by name and part, with one value for each round.
Rounds = dict[str, dict[str, list[float]]]


def alternate(calls: Mapping[str, Callable[[], dict[str, float]]], rounds: int, warmup: int) -> Rounds:
    """Run all functions once per round, so that machine drift affects all functions equally.

    Each function must return a dict from part names to times in seconds. `warmup` rounds run before the `rounds` timed
    rounds.
    """
    seconds: Rounds = {name: {} for name in calls}
    for number in range(warmup + rounds):
        for name, call in calls.items():
            parts = call()
            if number >= warmup:
                for part, value in parts.items():
                    seconds[name].setdefault(part, []).append(value)
    return seconds


def quartiles(values: Sequence[float]) -> dict[str, float]:
    """Return the median, quartiles and mean of `values`."""
    if len(values) == 1:
        return {"median": values[0], "q1": values[0], "q3": values[0], "mean": values[0]}
    q1, median, q3 = statistics.quantiles(values, n=4, method="inclusive")
    return {"median": median, "q1": q1, "q3": q3, "mean": statistics.fmean(values)}


def summary(seconds: Rounds, baselines: str | Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """Return the median, quartiles, mean and all values (``seconds``) of the times of each name and part.

    ``times_faster`` contains the same statistics for the ratio baseline / recipe of each round. `baselines` is the name
    of the baseline, or a mapping from each name to the name of its baseline.
    """
    out: dict[str, dict[str, Any]] = {name: {} for name in seconds}
    for name, parts in seconds.items():
        baseline = baselines if isinstance(baselines, str) else baselines[name]
        for part, values in parts.items():
            out[name][part] = {**quartiles(values), "seconds": values}
            if base := seconds[baseline].get(part):
                out[name][part]["times_faster"] = quartiles([b / v for b, v in zip(base, values, strict=True)])
    return out


def waiter(device: torch.device | str) -> Callable[[], None]:
    """Return a function that waits for the work of `device`. On a CPU, the function does nothing."""
    return torch.cuda.synchronize if torch.device(device).type == "cuda" else lambda: None
