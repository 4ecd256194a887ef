"""``efficient-ft report RUN``: figures of what a run has recorded."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

DESCRIPTION = """\
Draw what a run has recorded of its steps (step_stats.interval=1): budgets over time, how often each block trained,
tokens after each block, relative magnitudes, and the kept tokens on images of the run's own evaluation split. Writes
PNG files, and report.html, one page that needs no network.
"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Draw the run that `arguments` (default: the command line's) name, and print the files written.

    Raises:
        UserError: RUN cannot be reported, or matplotlib is missing.
    """
    options = _parser().parse_args(arguments)

    from efficient_ft.report import write_report

    written = write_report(options.run, options.out or options.run / "report", options.images)
    for note in written.notes:
        print(f"note: {note}")
    print("\n".join(map(str, written.files)))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="efficient-ft report", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, help="a run folder")
    parser.add_argument("--images", type=_count, default=6, metavar="N", help="images with kept tokens (default 6)")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="output folder (default: RUN/report)")
    return parser


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"must be an integer >= 0, got {text}.")
    return int(text)
