"""``efficient-ft gradient-error``: measure the gradient error of low-rank backward passes."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from efficient_ft.cli.terminal import Help, add_columns_option, count, integer, seed
from efficient_ft.config.schema import LARGEST_SIDE
from efficient_ft.core.sheet import Cell, Column, render
from efficient_ft.core.text import paragraph

DESCRIPTION = """\
Measure the gradient error of low-rank backward passes, on a trained network and real images.

    efficient-ft gradient-error --weights vit_micro.safetensors --images tinyimagenet100/val \\
        --finetune cifar10 --headroom --json benchmarks/gradient_error.json

With --finetune and --headroom, image sizes of 28, 32 and 56 pixels take about 15 minutes on two idle cores. --json
keeps existing rows of other image sizes, so that sizes can be measured separately.
"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the study, print its tables, and write the results as JSON if `--json` is given."""
    program = "efficient-ft gradient-error"
    parser = argparse.ArgumentParser(prog=program, description=DESCRIPTION, formatter_class=Help, allow_abbrev=False)
    weights = "trained weights with timm's parameter names"
    parser.add_argument("--weights", type=Path, required=True, metavar="FILE", help=weights)
    images = "folder of held-out images (FOLDER/CLASS/*, classes in sorted order)"
    parser.add_argument("--images", type=Path, required=True, metavar="FOLDER", help=images)
    parser.add_argument("--model", default="vit_micro", help="timm name of the network (default: vit_micro)")
    side = integer(1, LARGEST_SIDE)
    parser.add_argument(
        "--sizes",
        type=side,
        nargs="+",
        default=[28, 32, 56],
        metavar="N",
        help="image sizes in pixels (default 28 32 56)",
    )
    parser.add_argument(
        "--orders",
        type=count,
        nargs="+",
        default=[4, 6],
        metavar="N",
        help="orders of the LP_L1 bases, which determine the cost (default 4 6)",
    )
    parser.add_argument("--batch", type=count, default=64, metavar="N", help="batch size (default 64)")
    parser.add_argument(
        "--batches", type=count, default=4, metavar="N", help="number of disjoint batches to measure (default 4)"
    )
    profile = "number of separate batches for selecting the bases of LHE (default 4)"
    parser.add_argument("--profile-batches", type=count, default=4, metavar="N", help=profile)
    parser.add_argument("--headroom", action="store_true", help="also measure bases calibrated on gradients")
    finetune = "also measure on the images of FOLDER/test during fine-tuning on FOLDER/train"
    parser.add_argument("--finetune", type=Path, metavar="FOLDER", help=finetune)
    steps = "number of fine-tuning steps (default 200)"
    parser.add_argument("--finetune-steps", type=count, default=200, metavar="N", help=steps)
    batch = "batch size of fine-tuning (default 16)"
    parser.add_argument("--finetune-batch", type=count, default=16, metavar="N", help=batch)
    rate = "learning rate of fine-tuning (default 3e-4)"
    parser.add_argument("--finetune-lr", type=_rate, default=3e-4, metavar="LR", help=rate)
    batches = "number of disjoint batches to measure in each state of fine-tuning (default 2)"
    parser.add_argument("--finetune-batches", type=count, default=2, metavar="N", help=batches)
    parser.add_argument("--seed", type=seed, default=0, help="random seed (default 0)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all results to FILE")
    add_columns_option(parser)
    settings = vars(parser.parse_args(arguments))
    sizes, file, columns = (settings.pop(key) for key in ("sizes", "json", "columns"))
    from efficient_ft.bench.gradient_error import Study, group_rows, network_rows, read_records, run_study, save

    study = Study(**settings)
    results: list[dict[str, Any]] = []
    if file is not None:
        read_records(file)  # A damaged file must raise an error before the measurement.
    for size in sizes:
        results += run_study(study, size, lambda text: print(paragraph(text), file=sys.stderr, flush=True))
        if file is not None:
            save(file, study, results)
    for state in dict.fromkeys(r["state"] for r in results):
        print(f"\nRelative error (and cosine) of all gradients, {state}; * marks the smallest error of a row\n")
        print(_table(*network_rows(results, state), columns))
        print(f"\nRelative error of each group of gradients, {state}\n")
        print(_table(*group_rows(results, state), columns))


def _rate(given: str) -> float:
    try:
        rate = float(given)
    except ValueError:
        rate = 0.0
    if not 0 < rate < math.inf:
        raise argparse.ArgumentTypeError(f"must be a positive number, got {given}")
    return rate


def _table(header: Sequence[str], rows: Sequence[Sequence[Cell]], chosen: Sequence[str]) -> str:
    columns = {name: Column(rank, words=name in ("grid, cost of", "method")) for rank, name in enumerate(header)}
    return render(header, rows, "text", columns=columns, chosen=chosen)
