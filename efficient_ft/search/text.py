"""Text of the result of a search."""

from __future__ import annotations

import math
import shlex
from pathlib import Path

from efficient_ft.core import text
from efficient_ft.core.format import format_bytes, format_metric, format_seconds
from efficient_ft.core.terminal import shown_path
from efficient_ft.search.halving import ranked
from efficient_ft.search.state import NAME, Arm, Final, SearchState


def command_of(state: SearchState) -> list[str]:
    """Return the words of the command line that trains the final model alone, with the same result."""
    assert state.final is not None
    arm = state.arm(state.final.arm)
    length = [f"trainer.max_steps={state.final.steps}", f"optim.decay_steps={state.final.decay}"]
    selected = state.final.selected
    left_out = ("cost.", "trainer.progress=", "resume=", *(f"{word.partition('=')[0]}=" for word in selected))
    words = [word for word in arm.arguments if not word.startswith(left_out)]
    return ["efficient-ft", *words, *selected, *length]


def standard_error(value: float, samples: int) -> float:
    """Return the standard error of an accuracy (a fraction) on a number of samples."""
    return math.sqrt(max(value * (1 - value), 1 / (4 * samples)) / samples)


def result_text(state: SearchState, folder: Path) -> str:
    """Return the table of all arms, and a summary of the final model."""
    assert state.final is not None
    assert state.data is not None
    final, data, metric = state.final, state.data, state.metric or "accuracy"
    arm = state.arm(final.arm)
    rows = [("network", "recipe", "lr", f"val {metric}", "steps", "training time", "peak", "stopped")]
    raced = [one for one in state.arms if one.slices]
    for one in [*ranked(raced), *(other for other in state.arms if not other.slices)]:
        rows.append((one.network, *_row(one, metric, final if one is arm else None)))
    if state.several_networks:
        lines = [text.table(rows, left=(0, 1, 7), rule="")]
    else:
        lines = [text.table([row[1:] for row in rows], left=(0, 6), rule="")]
    lines += [f"{name}: not used, because it {reason}." for name, reason in state.refused.items()
              if reason.startswith("needs")]  # fmt: skip
    lines += [f"{name} is excluded. {reason}" for name, reason in state.networks.items()]
    if final.value is not None:
        lines.append("")
        model = f"model={arm.network} and " if arm.network else ""
        said = f"{arm.recipe} with {model}optim.lr={arm.lr:.2g}: val {metric} {format_metric(final.value, metric)}"
        if final.test is not None:
            error = f" ± {format_metric(standard_error(final.test, data.test), metric)} (standard error)"
            said += f", test {metric} {format_metric(final.test, metric)}{error if metric == 'accuracy' else ''}"
        lines.append(f"{said}.")
        lines += _uncertainty(state, arm, metric)
        used = f"The search took {format_seconds(final.seconds or 0.0)} of {format_seconds(state.budget)}"
        if state.unit == "steps":
            used = f"The search took {final.seconds:.0f} steps"
        peak = "" if final.peak_bytes is None else f", and the largest process used {format_bytes(peak_bytes(state))}"
        lines.append(f"{used}{peak} of {format_bytes(state.memory_bytes)}.")
        lines.append("The following command trains this model alone, with the same result:")
        lines.append("  " + " ".join(map(shlex.quote, command_of(state))))
    lines.append(f"Model: {shown_path(folder / arm.folder)}")
    return "\n".join(lines)


def interrupted_text(state: SearchState, folder: Path) -> str:
    """Return the text after an interruption: the folder with the state, and the best recipe if a round is finished."""
    kept = f"The state of the search is kept in {shown_path(folder / NAME)}."
    if state.finished:
        return f"{kept} The search is finished, and the same command prints its result."
    kept += " The same command continues the search."
    raced = [arm for arm in state.alive if arm.slices]
    if not raced or any(not arm.slices for arm in state.alive):
        return f"{kept} No round is finished, so there is no best recipe yet."
    best, metric = state.arm(state.final.arm) if state.final else ranked(raced)[0], state.metric or "accuracy"
    assert best.value is not None
    return (
        f"{kept}\nBest recipe so far: {best.recipe} with optim.lr={best.lr:.2g}, val {metric}"
        f" {format_metric(best.value, metric)} after {best.step} steps. Weights:"
        f" {shown_path(folder / best.folder / 'model.safetensors')}"
    )


def peak_bytes(state: SearchState) -> int:
    """Return the peak memory of the largest training process in bytes."""
    peaks = [one.peak_bytes for arm in state.arms for one in arm.slices]
    return max([*peaks, 0 if state.final is None else state.final.peak_bytes or 0])


def _row(arm: Arm, metric: str, final: Final | None) -> tuple[str, str, str, str, str, str, str]:
    """Return a row of the table. `final` contains the results of the best arm, and is None for other arms."""
    value, steps, trained = arm.value, arm.step, arm.slices[-1].trained if arm.slices else None
    peaks = [one.peak_bytes for one in arm.slices]
    if final is not None and final.value is not None:
        value, steps, trained = final.value, final.steps, final.trained or trained
        peaks.append(final.peak_bytes or 0)
    return (
        arm.recipe,
        f"{arm.lr:.2g}",
        "–" if value is None else format_metric(value, metric),
        str(steps),
        "–" if trained is None else format_seconds(trained),
        format_bytes(max(peaks)) if peaks else "–",
        arm.stopped or "best",
    )


def _uncertainty(state: SearchState, best: Arm, metric: str) -> list[str]:
    """Return sentences about the uncertainty of the choice, and about the baselines after the same time."""
    assert state.data is not None
    if metric != "accuracy" or best.value is None:
        return []
    count = state.data.val
    error = format_metric(standard_error(best.value, count), metric)
    lines = [f"The recipes were compared on {count} validation images (standard error of an accuracy: {error})."]
    first = best.slices[0]
    others = [
        f"{format_metric(one.slices[0].value, metric)} for {one.name}"
        for one in state.arms
        if one is not best and one.slices and one.baseline
    ]
    if others:
        lines.append(
            "After the first round, in which all recipes trained equally long, the validation accuracy was"
            f" {format_metric(first.value, metric)} for the best recipe, {', '.join(others)}."
        )
    return lines
