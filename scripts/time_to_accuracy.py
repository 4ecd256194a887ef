"""Train a network with each method, and record the time until it reaches nearly the accuracy of full fine-tuning.

    python scripts/time_to_accuracy.py --network deit_tiny --weights FILE --images DIR --json FILE

DIR has class folders in train/ and test/. Each run is a command in a separate process, one at a time. Its accuracy on
the test images is measured after each epoch, and so is the time since training began, with evaluation. Runs whose
name contains `cached` store the features of their frozen part, in a folder that is empty before the first of them.
Runs that are already in the file are not repeated. All runs of a network in a file have the same precision
(`--precision`), except recipes whose names state a precision. A table is printed.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from docsgen import curves

from efficient_ft.cli.hydra.rows import merged
from efficient_ft.core.text import table
from efficient_ft.record.environment import environment
from efficient_ft.record.rows import MetricsFile

#: Settings of the networks. Learning rates are those that did best in short trials with one seed.
NETWORKS = {
    "deit_tiny": ["model=deit_tiny", "model.image_size=112", "optim.head_lr_mult=20", "optim.lr=1e-4"],
    "efficientnet_lite0": ["model=timm", "model.name=tf_efficientnet_lite0", "model.image_size=128", "optim.lr=5e-4"],
}
_CACHED = ["trainer.cache_features=on", "trainer.views=2", "trainer.prefix=auto"]
_CACHED_4 = ["trainer.cache_features=on", "trainer.views=4", "trainer.prefix=auto"]
_UPPER_BLOCKS = ["method=blocks", "method.blocks.blocks=[6,7,8,9,10,11]", "optim.lr=5e-4", "optim.head_lr_mult=4"]
RECIPES = {
    "deit_tiny": {
        "full": ["method=full"],
        "full, fp32": ["method=full", "trainer.precision=fp32"],
        "upper half": _UPPER_BLOCKS,
        "upper half, cached": [*_UPPER_BLOCKS, *_CACHED],
        "bitfit": ["method=bitfit", "optim.lr=5e-3", "optim.head_lr_mult=1"],
        "full+lbp_dct": ["method=[full,lbp_dct]"],
        "full+lora": ["method=[full,lora]", "optim.lr=2e-3", "optim.head_lr_mult=1"],
        "head, cached": ["method=head", "optim.lr=2e-3", "optim.head_lr_mult=1", *_CACHED],
        "bsr": ["method=bsr", "optim.lr=1e-3", "optim.head_lr_mult=2"],
    },
    "efficientnet_lite0": {
        "full": ["method=full", "model.frozen_bn=false"],
        "full, fp32": ["method=full", "model.frozen_bn=false", "trainer.precision=fp32"],
        "full+lbp_dct": ["method=[full,lbp_dct]", "model.frozen_bn=false"],
        "last_stage": ["method=last_stage"],
        "last_stage, prefix": ["method=last_stage", "trainer.prefix=auto"],
        "last_stage, cached": ["method=last_stage", *_CACHED],
        "last_stage, 4 views cached": ["method=last_stage", *_CACHED_4],
        "last_stage+lbp_dct": ["method=[last_stage,lbp_dct]"],
        "last_stage+lbp_dct, cached": ["method=[last_stage,lbp_dct]", *_CACHED],
    },
}
#: The target accuracy as a fraction of the accuracy of `BASELINE`.
SHARE = 0.95


def main() -> None:
    """Train the runs that are not in the file yet."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", choices=NETWORKS, required=True)
    parser.add_argument("--weights", type=Path, required=True, metavar="FILE", help="pretrained, in timm's names")
    parser.add_argument("--images", type=Path, required=True, metavar="DIR")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", action="append", metavar="RECIPE", help="may be repeated (default: all)")
    parser.add_argument("--json", type=Path, required=True, metavar="FILE")
    options = parser.parse_args()
    command = "python scripts/time_to_accuracy.py --network NETWORK --weights FILE --images DIR"
    command += f" --precision {options.precision} --json benchmarks/{options.json.name}"
    report: dict[str, Any] = {"command": command, "kind": "time_to_accuracy", "share": SHARE, "networks": {}}
    if options.json.is_file():
        report = json.loads(options.json.read_text(encoding="utf-8"))
    recipes = RECIPES[options.network]
    settings = [*NETWORKS[options.network], f"trainer.epochs={options.epochs}", "data.batch_size=32"]
    settings.append(f"trainer.precision={options.precision}")
    of = report["networks"].setdefault(options.network, {"settings": settings, "recipes": {}})
    if of["settings"] != settings:
        parser.error(f"{options.json} has runs with {' '.join(of['settings'])}")
    folder = [f"model.weights={options.weights.resolve()}", f"data.root={options.images.resolve()}"]
    for seed in range(options.seeds):
        with tempfile.TemporaryDirectory() as place:
            for name in options.only or recipes:
                runs = of["recipes"].setdefault(name, {"settings": recipes[name], "runs": []})["runs"]
                if any(run["seed"] == seed for run in runs):
                    continue
                curve, seconds = train(merged(*settings, *folder, *recipes[name], f"seed={seed}"), Path(place))
                runs.append({"seed": seed, "seconds": seconds, "curve": curve})
                report["environment"] = environment("cpu", packages=("torch", "timm"))
                options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
                print(seed, name, curve[-1], flush=True)
    print(summary(of["recipes"]))


def train(settings: Sequence[str], place: Path) -> tuple[list[tuple[float, float]], float]:
    """Train once.

    Returns:
        Seconds since the training began and accuracy after each epoch; and the seconds of the whole process.
    """
    fixed = ["data=folder", "data.select_best_on=test", "data.num_workers=0", "cost.baseline=none"]
    fixed += ["trainer.progress=false", f"trainer.cache_folder={place / 'features'}", "data.keep_decoded=off"]
    with tempfile.TemporaryDirectory(dir=place) as run:
        command = [sys.executable, "-m", "efficient_ft", *settings, *fixed, f"hydra.run.dir={run}"]
        start = time.perf_counter()
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
        seconds = time.perf_counter() - start
        if ended.returncode:
            raise SystemExit(f"{' '.join(command)}\n{ended.stderr}")
        rows = MetricsFile(Path(run)).read()
    return [(row["seconds"], row["test_accuracy"]) for row in rows if "test_accuracy" in row], seconds


def summary(of: dict[str, Any]) -> str:
    """Return a table of the final accuracy, and of the seconds until the target accuracy."""
    recipes = curves.of_recipes(of)
    if curves.BASELINE not in recipes:
        return f"The file contains no run of {curves.BASELINE} yet. The target accuracy is therefore unknown."
    goal = SHARE * statistics.mean(curves.last(recipes[curves.BASELINE]))
    rows = [["recipe", "accuracy", f"seconds to {goal:.1%}", "seconds of training"]]
    for name, runs in recipes.items():
        needed = curves.until(runs, goal)
        reached = f"{needed:.0f}" if needed < math.inf else "not reached"
        rows.append([name, f"{statistics.mean(curves.last(runs)):.2%}", reached, f"{curves.seconds(runs):.0f}"])
    return table(rows)


if __name__ == "__main__":
    main()
