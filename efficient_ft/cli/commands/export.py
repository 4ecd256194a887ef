"""``efficient-ft export RUN --to onnx|pt2``: export a trained run to a folder that can be published."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from efficient_ft.cli.terminal import Help, count, run_folders
from efficient_ft.core.errors import UserError
from efficient_ft.core.text import paragraph, plain_line

DESCRIPTION = """\
Export a trained run as ONNX or as an exported PyTorch program (PT2), and check the result.

    efficient-ft export RUN --to onnx
    efficient-ft export RUN --to onnx --out DIR --check photos --license apache-2.0
    efficient-ft export RUN --to pt2 --batch 1

The folder contains the network, model.safetensors, the preprocessing, the class names and a model card (README.md). The
batch size is dynamic unless --batch is given. The command compares the exported network with the run, and writes
nothing if a predicted class differs.
"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Export a run, and print the path of the folder and the result of the check.

    Raises:
        UserError: If the run cannot be loaded or exported, or if the exported network differs from the run.
    """
    parser = argparse.ArgumentParser(prog="efficient-ft export", description=DESCRIPTION, formatter_class=Help)
    parser.add_argument("run", type=Path, nargs="?", help="run folder, or its model.safetensors")
    parser.add_argument("--to", metavar="FORMAT", help="file format: onnx or pt2")
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder to create (default: RUN/export_FORMAT)")
    check = "image files or folders (for texts, files with one text per line) for the check; default: test data of RUN"
    parser.add_argument("--check", type=Path, nargs="+", default=[], metavar="FILE", help=check)
    samples = "number of images or texts for the check (default 64)"
    parser.add_argument("--samples", type=count, default=64, metavar="N", help=samples)
    batch = "fixed batch size of the exported network (default: any batch size)"
    parser.add_argument("--batch", type=count, metavar="N", help=batch)
    parser.add_argument(
        "--batch-size", type=count, default=32, metavar="N", help="batch size of the check (default 32)"
    )
    license = "license identifier in the model card, e.g. apache-2.0 (default: unknown)"
    parser.add_argument("--license", default="unknown", metavar="ID", help=license)
    parser.add_argument("--task", help="data set whose classes are exported (for runs on several data sets)")
    options = parser.parse_args(arguments)
    if options.run is None:
        print(run_folders("export", "RUN --to onnx|pt2"))
        return
    if options.to is None:
        raise UserError("No file format is given. Pass --to onnx or --to pt2.")
    from efficient_ft.training.publish.folder import ExportOptions, export_run

    out, lines = export_run(ExportOptions(**vars(options)))
    for line in lines:
        print(paragraph(plain_line(line), "  "))
    print(plain_line(str(out)))
