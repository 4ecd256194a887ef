"""``efficient-ft lr KEY=VALUE...``: find a learning rate with a learning rate range test."""

from __future__ import annotations

import argparse
import math
import shlex
from collections.abc import Sequence
from pathlib import Path

from efficient_ft.cli.hydra.compose import configured
from efficient_ft.cli.hydra.rows import check_settings, merged
from efficient_ft.cli.hydra.variants import folder_of
from efficient_ft.cli.terminal import Help, integer, status
from efficient_ft.core.allocator import restart_with, use_allocator
from efficient_ft.core.errors import UserError
from efficient_ft.core.text import paragraph, plain_line
from efficient_ft.record.environment import environment
from efficient_ft.record.lr_test import NAME, suggest, write_lr_test

DESCRIPTION = """\
Find a learning rate with a learning rate range test (Smith 2017, arXiv:1506.01186, Section 3.3).

    efficient-ft lr method=lora model=deit_tiny data=folder data.root=DIR
    efficient-ft lr method=full data=cifar10 --steps 200 --out lr

The test trains like a run with the same settings, but the learning rate grows exponentially from --from to --to. The
test stops when the loss diverges. It ignores optim.lr, optim.schedule and optim.warmup_steps, and applies all other
settings. The test suggests a learning rate, prints the command of the run, and writes lr_test.png, lr_test.csv and
lr_test.json. It does not change run folders.
"""

#: Fewest and most steps of a test.
_FEWEST, _MOST = 20, 2_000


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a learning rate range test, and print the suggestion. The exit status is 1 if there is no suggestion."""
    parser = argparse.ArgumentParser(prog="efficient-ft lr", description=DESCRIPTION, formatter_class=Help)
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE", help="settings of the run")
    number = integer(_FEWEST, _MOST)
    parser.add_argument(
        "--steps", type=number, default=100, metavar="N", help="number of optimizer steps (default 100)"
    )
    parser.add_argument(
        "--from", type=_rate, default=1e-6, metavar="LR", dest="lowest", help="first learning rate (default 1e-6)"
    )
    parser.add_argument(
        "--to", type=_rate, default=1.0, metavar="LR", dest="highest", help="last learning rate (default 1)"
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="output folder (default outputs/lr_tests/...)")
    options = parser.parse_intermixed_args(arguments)
    check_settings(options.settings)
    if options.highest < 100 * options.lowest:
        raise UserError(f"--to must be at least 100 times --from={options.lowest:g}, got {options.highest:g}.")
    config = configured(options.settings, automatic=True)
    out = options.out or Path("outputs", "lr_tests", *folder_of(config).parts[1:])
    if out.exists() and not out.is_dir():
        raise UserError(f"--out must be a folder, got the file {out}.")
    restart_with(config.allocator)
    use_allocator(config.allocator)
    from efficient_ft.report.charts import write_chart
    from efficient_ft.report.figures import require_matplotlib
    from efficient_ft.report.lr_figure import lr_chart
    from efficient_ft.training.lr_test import range_test

    require_matplotlib()
    test = range_test(
        config, options.steps, options.lowest, options.highest,
        lambda step, rate: status(f"learning rate range test: step {step} of {options.steps}, lr {rate:.2g}"),
    )  # fmt: skip
    status("")
    found = suggest(test)
    more = {"config": config.model_dump(mode="json"), "environment": environment()}
    out.mkdir(parents=True, exist_ok=True)
    written = [write_lr_test(out, test, found, options.settings, more)]
    written += write_chart(lr_chart(test, found, "+".join(config.method)), out / Path(NAME).stem)
    ran = f"{len(test.losses)} steps with learning rates from {test.rates[0]:.2g} to {test.rates[-1]:.2g}."
    print(paragraph(" ".join(filter(None, (ran, test.ended, found.reason)))))
    if found.lr is not None:
        words = merged(*options.settings, f"optim.lr={found.lr:g}")
        print(f"Suggested learning rate: {found.lr:g}\n\n  efficient-ft {shlex.join(words)}\n")
    print(f"Written: {', '.join(plain_line(str(file)) for file in written)}")
    if found.lr is None:
        raise SystemExit(1)


def _rate(given: str) -> float:
    try:
        value = float(given)
    except ValueError:
        value = math.nan
    if not 1e-12 <= value <= 1e3:
        raise argparse.ArgumentTypeError(f"must be a learning rate from 1e-12 to 1000, got {given}.")
    return value
