"""``efficient-ft plan KEY=VALUE... memory=SIZE``: find recipes that fit a memory budget."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from efficient_ft.cli.exits import report_outcome
from efficient_ft.cli.hydra import processes
from efficient_ft.cli.hydra.compose import configured
from efficient_ft.cli.hydra.rows import check_settings
from efficient_ft.cli.terminal import Help, add_columns_option, status
from efficient_ft.core.allocator import restart_with, use_allocator
from efficient_ft.core.errors import SettingError, UserError
from efficient_ft.core.files import write_text_atomically
from efficient_ft.core.format import format_bytes
from efficient_ft.core.text import plain_line, terminal_width, wrapped
from efficient_ft.core.units import parse_bytes, parse_seconds
from efficient_ft.record.files import json_text

if TYPE_CHECKING:
    from efficient_ft.planning import Examined, Plan, Trial

DESCRIPTION = """\
Find recipes for a run that fit a memory budget, and recommend one.

    efficient-ft plan model=vit_base data=folder data.root=DIR memory=4GB
    efficient-ft plan model=deit_small data=cifar100 memory=3GiB time=2h loss=1 split=true
    efficient-ft plan method=lora model=vit_base memory=2GB     use this method in every recipe
    efficient-ft plan --calibration outputs                     compare predictions with measurements

memory is the memory budget of the training process. On a GPU, memory limits the reserved memory. Data-loading workers
use additional memory. time is the maximum training time. loss is the maximum loss of test accuracy compared with full
fine-tuning, in percentage points (default 1). split=true allows micro-batches. All other settings are settings of the
run.

A recipe is a combination of methods. The plan counts the costs of recipes until --planning-time is over, and times some
recipes on random images. It runs a few steps of the recommended recipe in a separate process. If the weights and images
of the run are available, it compares the gradients of inexact recipes with the exact gradients.

The plan recommends the fastest recipe from the best class that contains recipes within all limits. The classes, from
best to worst, are 'exact', 'near exact', 'approximate' and 'trains a part'. A run with memory=SIZE is stopped if its
memory exceeds the budget.
"""

#: Settings that only the plan command accepts.
OF_A_PLAN = ("memory", "time", "loss", "split")


def main(arguments: Sequence[str] | None = None) -> None:
    """Plan a run and print the plan. The exit status is 1 if no recipe is within the limits."""
    parser = argparse.ArgumentParser(prog="efficient-ft plan", description=DESCRIPTION, formatter_class=Help)
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE", help="memory=SIZE and settings of the run")
    parser.add_argument("--all", action="store_true", help="print all fitting recipes, not only the Pareto front")
    limit = "time after which no further recipe is examined, e.g. 5m (default 60s)"
    parser.add_argument("--planning-time", default="60s", metavar="TIME", help=limit)
    add_columns_option(parser)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the plan to FILE")
    parser.add_argument("--figure", type=Path, metavar="FILE", help="also plot memory and time (FILE.png, FILE.csv)")
    parser.add_argument("--trial", nargs=2, type=float, help=argparse.SUPPRESS)
    calibration = "compare predictions with measurements of runs that set memory=SIZE"
    parser.add_argument("--calibration", type=Path, nargs="+", metavar="DIR", help=calibration)
    options = parser.parse_intermixed_args(arguments)
    if options.calibration is not None:
        from efficient_ft.planning.calibration import calibration_text

        print(calibration_text(options.calibration))
        return
    if options.trial is not None:
        # Try a recipe in this process, and pass the outcome to the parent process.
        _set_allocator(options.settings)
        from efficient_ft.planning.timing import try_recipe

        num_classes, max_seconds = options.trial
        report_outcome(results=asdict(try_recipe(configured(options.settings), int(num_classes), max_seconds)))
        return
    check_settings(options.settings)
    own = dict(word.split("=", 1) for word in options.settings if word.partition("=")[0] in OF_A_PLAN)
    settings = [word for word in options.settings if word.partition("=")[0] not in OF_A_PLAN]
    if "memory" not in own:
        raise UserError("The memory budget is missing. Pass memory=SIZE, for example memory=4GB.")
    parse_bytes("memory", own["memory"])  # Report invalid settings before the libraries are loaded.
    if "time" in own:
        parse_seconds("time", own["time"])
    loss, split = own.get("loss", "1"), own.get("split", "false").lower()
    if not re.fullmatch(r"\d+(\.\d+)?|\.\d+", loss):
        raise SettingError("loss", loss, "a number of percentage points >= 0", "Example: loss=1.")
    if split not in ("true", "false"):
        raise SettingError("split", own["split"], ("true", "false"))
    parse_seconds("--planning-time", options.planning_time)
    figure = None if options.figure is None else _figure_path(options.figure)
    _set_allocator(settings)
    found = plan(
        *settings,
        memory=own["memory"],
        time=own.get("time"),
        loss=float(loss),
        split=split == "true",
        planning_time=options.planning_time,
        say=status,
        ready=_print_examined,
    )
    status("")
    from efficient_ft.planning.calibration import record
    from efficient_ft.planning.text import plan_text

    record(found, Path("outputs"))
    print("\n" + plan_text(found, every=options.all, columns=options.columns))
    if options.json is not None:
        write_text_atomically(options.json, json_text(found.as_dict(), indent=1) + "\n")
    if figure is not None:
        from efficient_ft.report.charts import write_chart
        from efficient_ft.report.plan_figure import plan_chart

        for file in write_chart(plan_chart(found), figure):
            print(plain_line(str(file)))
    if found.recommended is None:
        raise SystemExit(1)


def _figure_path(path: Path) -> Path:
    """Return `path` without the extension ``.png`` or ``.csv``. Raise a `SettingError` if `path` has no file name."""
    if path.name in ("", ".."):
        raise SettingError("--figure", path, "the path of a file", "Example: --figure plan.png.")
    return path.with_suffix("") if path.suffix.lower() in (".png", ".csv") else path


def _print_examined(one: Examined) -> None:
    status("")
    if one.number == 1:
        print("Examined recipes, and the memory budget that each recipe requires:", flush=True)
    needs = "" if one.needed_bytes is None else format_bytes(one.needed_bytes)
    verdict = "fits" if one.fits else "above the budget" if one.needed_bytes is not None else "not possible"
    start = f"{one.number:>{len(str(one.of))}}/{one.of}  {needs:>8}  {verdict:<16}  "
    print("\n".join(wrapped(start + one.name, terminal_width(), " " * len(start))), flush=True)


def _set_allocator(settings: Sequence[str]) -> None:
    allocator = next((word.partition("=")[2] for word in settings if word.startswith("allocator=")), "auto")
    restart_with(allocator)
    use_allocator(allocator)


def plan(
    *settings: str,
    memory: str,
    time: str | None = None,
    loss: float = 1.0,
    split: bool = False,
    planning_time: str = "60s",
    say: Callable[[str], None] = lambda text: None,
    ready: Callable[[Examined], None] = lambda examined: None,
) -> Plan:
    """Find recipes for a run that fit a memory budget. This function is also available as ``efficient_ft.plan``.

    Args:
        settings: settings of the run as on the command line (``"model=deit_small", "data=cifar100"``). With
            ``method=...``, every recipe uses these methods.
        memory: memory budget with a unit, e.g. ``"4GB"``. On a CPU, the budget applies to the process including the
            interpreter and libraries. On a GPU, the budget applies to the reserved memory.
        time: budget of training time with a unit, e.g. ``"2h"``, or None for no limit.
        loss: acceptable loss of test accuracy relative to full fine-tuning, in percentage points.
        split: if True, allow micro-batches with gradient accumulation.
        planning_time: time limit with a unit. No further recipe is examined after this time. The smallest recipes are
            always examined.
        say: function that is called with a description of the current step.
        ready: function that is called with each examined recipe.

    Returns:
        An `efficient_ft.planning.Plan` that contains the options, the excluded recipes with reasons, and the
        recommended option.

    Raises:
        UserError: If a setting cannot be used.
    """
    memory_bytes = parse_bytes("memory", memory)
    seconds = None if time is None else parse_seconds("time", time)
    planning_seconds = parse_seconds("--planning-time", planning_time)
    from efficient_ft.planning import Limits, make_plan

    return make_plan(
        settings,
        configured,
        Limits(memory_bytes, seconds, loss, split, planning_seconds),
        chosen=_methods(settings),
        attempt=_attempt,
        say=say,
        ready=ready,
    )


def _attempt(arguments: Sequence[str], num_classes: int, max_seconds: float) -> Trial:
    """Try a recipe in a separate process. See `efficient_ft.planning.planner.Attempt`."""
    from efficient_ft.planning import Trial

    words = ["plan", *arguments, "--trial", str(num_classes), str(max_seconds)]
    ended = processes.run([sys.executable, "-m", "efficient_ft", *words], environment={})
    if ended.results is None:
        raise UserError(ended.failure or "the process returned no result")
    return Trial(**ended.results)


def _methods(settings: Sequence[str]) -> list[str]:
    values = [word.partition("=")[2] for word in settings if word.startswith("method=")]
    return [name.strip() for name in values[-1].strip("[]").split(",") if name.strip()] if values else []
