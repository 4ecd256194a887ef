"""``efficient-ft dashboard RUN|DIR...``: upload finished runs to Weights & Biases, and create a report."""

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
Upload finished runs to Weights & Biases, and create a report with training curves and plots of accuracy against FLOPs,
memory and time. --offline stores the runs for `wandb sync`, and the panels as JSON, instead of uploading them.
`efficient-ft report DIR` draws the same figures without an account.
"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Upload runs. Print the run names. Also print the address of the report, or the paths of the written files."""
    parser = argparse.ArgumentParser(prog="efficient-ft dashboard", description=DESCRIPTION, formatter_class=Help)
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN|DIR", help="run folders, or folders of runs")
    parser.add_argument("--project", default="efficient-ft", help="project name (default: efficient-ft)")
    parser.add_argument("--entity", help="user or team that owns the project (default: the logged-in user)")
    parser.add_argument("--title", default="efficient-ft", help="title of the report")
    store = "store the runs instead of uploading them, as with WANDB_MODE=offline"
    parser.add_argument("--offline", action="store_true", help=store)
    out = "output folder (default: outputs/dashboard)"
    parser.add_argument("--out", type=Path, default=Path("outputs/dashboard"), help=out)
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
        show(f"Written: {shown_path(options.out / 'wandb')} (for `wandb sync`) and {shown_path(panels)}")
        return
    print(create_report(options.title, options.project, options.entity))
