"""Generated text of the promises, with the last results of their trials from benchmarks/selftest_*.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from docsgen.markdown import block

ROOT = Path(__file__).resolve().parents[2]

#: For each form, the file that ``efficient-ft selftest [--long] --json FILE`` has written.
_RECORDS = {form: ROOT / "benchmarks" / f"selftest_{form}_cpu.json" for form in ("short", "long")}


@block
def promises() -> str:
    """Show each promise, its trials, and the last results of the trials in both forms."""
    from tests.promises.promises import PROMISES

    records = {
        form: json.loads(file.read_text(encoding="utf-8"))["promises"] if file.is_file() else {}
        for form, file in _RECORDS.items()
    }
    parts = []
    for promise in PROMISES:
        parts.append(f"## {promise.number}. {promise.title}\n\n{promise.text}\n\nTrials: {promise.tried}")
        if promise.not_covered:
            parts.append(f"Not covered: {promise.not_covered}")
        lines = [_result(form, held.get(str(promise.number))) for form, held in records.items()]
        parts.append("\n".join(f"- {line}" for line in lines))
    return "\n\n".join(parts)


def _result(form: str, held: dict[str, Any] | None) -> str:
    """Return one line about the last run of a form."""
    if held is None:
        return f"The {form} form has not been run yet."
    failed, here = len(held["failed"]), held["environment"]
    trials = held["trials"]
    outcome = (
        f"The trial passed in {held['seconds']:.0f} s."
        if trials == 1
        else f"All {trials} trials passed. Their total time was {held['seconds']:.0f} s."
    )
    if failed:
        outcome = f"{failed} of {trials} trials failed: {'; '.join(one['name'] for one in held['failed'])}."
    measured = "; ".join(f"{key.replace('_', ' ')} {_shown(key, value)}" for key, value in held["measured"].items())
    where = f"{str(here['date'])[:10]}, {here['device']}, torch {here['torch']}"
    return f"Last {form} run ({where}): {outcome}" + (f" Measured values: {measured}." if measured else "")


def _shown(key: str, value: float) -> str:
    if key.startswith("largest"):
        return f"{value:.1e}"
    if key.startswith(("peak_bytes", "growth_bytes")):
        return f"{value / 2**20:.1f} MiB"
    return f"{value:.1f} s" if key.startswith("seconds") else f"{value:,.0f}"
