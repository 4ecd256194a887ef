"""``efficient-ft dashboard RUN|DIR...``: finished runs, and a report with the papers' panels, on Weights & Biases."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from efficient_ft.cli.terminal import Help
from efficient_ft.core.terminal import show, shown_path
from efficient_ft.core.text import plain_line

DESCRIPTION = """\
Upload finished runs to Weights & Biases, and create a report with accuracy against FLOPs, memory and
time, and curves over training. --offline writes the runs for `wandb sync` and the panels as JSON instead of uploading
them. `efficient-ft report DIR` draws the same figures without an account.
"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Upload runs, and print their addresses or the files written."""
    parser = argparse.ArgumentParser(prog="efficient-ft dashboard", description=DESCRIPTION, formatter_class=Help)
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN|DIR", help="run folders, or folders of runs")
    parser.add_argument("--project", default="efficient-ft", help="default: efficient-ft")
    parser.add_argument("--entity", help="user or team (default: the one logged in)")
    parser.add_argument("--title", default="efficient-ft", help="title of the report")
    parser.add_argument("--offline", action="store_true", help="write what would be sent; also with WANDB_MODE=offline")
    parser.add_argument("--out", type=Path, default=Path("outputs/dashboard"), help="default: outputs/dashboard")
    options = parser.parse_args(arguments)

    from efficient_ft.record.collection import notes
    from efficient_ft.report.dashboard import create_report, upload, write_panels
    from efficient_ft.report.runs import collect_paths

    found = collect_paths(options.runs)
    for sentence in notes(found, means=False):
        show(f"note: {sentence}", sys.stderr)
    offline = options.offline or os.environ.get("WANDB_MODE") in ("offline", "dryrun", "disabled")
    names = upload(found, project=options.project, entity=options.entity, offline=offline, out=options.out)
    print("\n".join(map(plain_line, names)))
    panels = options.out / "panels.json"
    write_panels(panels, options.title)
    if offline:
        show(f"Written: {shown_path(options.out / 'wandb')} (`wandb sync` sends it), {shown_path(panels)}")
        return
    print(create_report(options.title, options.project, options.entity))
