"""``efficient-ft predict RUN FILE...``: predict classes of images or texts, or masks of images, with a trained run."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from efficient_ft.cli.device import require_device
from efficient_ft.cli.terminal import Help, count, note, run_folders, status
from efficient_ft.core.errors import UserError
from efficient_ft.core.sheet import render
from efficient_ft.core.text import display_width, json_plain, padded, plain_line, shortened, terminal_width
from efficient_ft.record.files import json_text

if TYPE_CHECKING:
    from efficient_ft.training.kinds.base import Predictions

#: Maximum width of class names, in columns of the terminal.
_WIDEST = 60

DESCRIPTION = """\
Predict classes of images or texts, or labels, numbers or masks of images, with a trained run.

    efficient-ft predict RUN photo.jpg folder/of/photos
    efficient-ft predict RUN test --top 1 --csv > classes.csv
    efficient-ft predict RUN lines.txt --json

If the images are in folders named after classes, the command also prints the accuracy and the most frequent confusions.
--csv and --json write all predictions to standard output, and the accuracy to standard error.
"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the most probable classes of each image or line of text, or write the predicted masks of images.

    Raises:
        UserError: If the run, a file or the device does not exist, or a file cannot be read.
    """
    parser = argparse.ArgumentParser(prog="efficient-ft predict", description=DESCRIPTION, formatter_class=Help)
    run = "run folder or its model.safetensors, or an exported folder or its ONNX file"
    parser.add_argument("run", type=Path, nargs="?", help=run)
    files = "image files or folders of images; for texts, files with one text per line (- for standard input)"
    parser.add_argument("files", type=Path, nargs="*", metavar="FILE", help=files)
    parser.add_argument("--task", help="data set whose classes are predicted (for runs on several data sets)")
    parser.add_argument("--top", type=count, default=5, metavar="K", help="classes to print for each item (default 5)")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--csv", dest="form", action="store_const", const="csv", help="print CSV with one row per item")
    form.add_argument("--json", dest="form", action="store_const", const="json", help="print items as a JSON list")
    parser.add_argument("--batch-size", type=count, default=32, metavar="N", help="batch size (default 32)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder for masks (default: RUN/masks)")
    parser.add_argument("--overlay", action="store_true", help="also write images with overlaid class colors")
    parser.add_argument("--device", help="cpu, cuda or mps (default: cuda if available)")
    options = parser.parse_args(arguments)
    if options.run is None:
        print(run_folders("predict", "RUN FILE..."))
        return
    if not options.files:
        raise UserError("No files are given. Pass image files, folders of images, or text files (task=text).")
    import torch

    from efficient_ft.training.kinds.base import PredictOptions
    from efficient_ft.training.kinds.registry import kind_named
    from efficient_ft.training.publish import folder

    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    require_device(device)
    trained = folder.load(options.run, options.task, note)
    if trained.tasks and options.task is None:
        raise UserError(
            f"The run {options.run} was trained on several data sets. Pass --task {' or '.join(trained.tasks)}."
        )
    try:
        trained.model.to(device)
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"--device {device}: the device cannot be used ({str(error).splitlines()[0]}).") from error
    keys = ("run", "files", "top", "batch_size", "form", "out", "overlay")
    chosen = PredictOptions(**{key: getattr(options, key) for key in keys})
    _print(kind_named(trained.task).predictions(trained, chosen), trained.class_names, options.form)


def _print(predictions: Predictions, names: Sequence[str], form: str | None) -> None:
    width = min(_WIDEST, terminal_width() - 11, max(display_width(plain_line(name)) for name in names))
    kept = []
    for number, one in enumerate(predictions, start=1):
        if form is not None:
            status(f"predicted {number} of {predictions.total}")
            kept.append(one)
            continue
        print(one.heading)
        for name, value in one.values:
            print(f"  {padded(shortened(name, width), width)}  {value:>7}")
    status("")
    if form == "json":
        print(json_plain(json_text([one.record for one in kept], indent=1)))
    elif form == "csv":
        print(render(predictions.header, [one.row for one in kept], "csv"))
    for line in predictions.summary():
        print(line, file=sys.stdout if form is None else sys.stderr)
