"""Run the default job with several seeds and numbers of threads, and record the accuracy of each run.

    python scripts/default_job.py --json benchmarks/default_job_cpu.json

Each run is `efficient-ft trainer.precision=fp32 seed=SEED` in a separate process, one at a time. Runs of this processor
that are already in the file are not repeated.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from efficient_ft.core.text import table
from efficient_ft.record.environment import environment

_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def main() -> None:
    """Run the jobs that are not in the file yet."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--json", type=Path, required=True, metavar="FILE")
    options = parser.parse_args()
    command = f"python scripts/default_job.py --json benchmarks/{options.json.name}"
    report: dict[str, Any] = {"command": command, "kind": "default_job", "runs": []}
    if options.json.is_file():
        report = json.loads(options.json.read_text(encoding="utf-8"))
    device = environment("cpu", packages=())["device"]
    done = {(run["device"], run["seed"], run["threads"]) for run in report["runs"]}
    for seed in range(options.seeds):
        for threads in options.threads:
            if (device, seed, threads) in done:
                continue
            report["runs"].append({"device": device, "seed": seed, "threads": threads, **run(seed, threads)})
            here = environment("cpu", packages=("torch", "timm"))
            report["environment"] = {key: value for key, value in here.items() if key != "load"}  # no time is measured
            options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
            print(report["runs"][-1], flush=True)
    print(summary(report["runs"]))


def run(seed: int, threads: int) -> dict[str, float]:
    """Run the default job once.

    Returns:
        ``test``, ``val``: accuracies of the exported weights, between 0 and 1; ``seconds`` of the whole process.
    """
    with tempfile.TemporaryDirectory() as place:
        settings = ["trainer.precision=fp32", f"seed={seed}", f"hydra.run.dir={place}/run"]
        command = [sys.executable, "-m", "efficient_ft", *settings]
        start = time.perf_counter()
        ended = subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, **dict.fromkeys(_VARIABLES, str(threads))},
        )
        seconds = time.perf_counter() - start
        if ended.returncode:
            raise SystemExit(f"{' '.join(command)}\n{ended.stderr}")
        accuracy = json.loads((Path(place) / "run" / "results.json").read_text(encoding="utf-8"))["accuracy"]
    return {"test": accuracy["test"], "val": accuracy["best"], "seconds": seconds}


def summary(runs: list[dict[str, Any]]) -> str:
    """Return a table of the accuracy on the test images by processor and number of threads."""
    rows = [["processor", "threads", "runs", "mean", "lowest", "highest", "seconds"]]
    for device, threads in sorted({(run["device"], run["threads"]) for run in runs}):
        of = [run for run in runs if (run["device"], run["threads"]) == (device, threads)]
        tested = [run["test"] for run in of]
        values = [f"{number:.2%}" for number in (statistics.mean(tested), min(tested), max(tested))]
        seconds = statistics.median(run["seconds"] for run in of)
        rows.append([device, str(threads), str(len(of)), *values, f"{seconds:.0f}"])
    return table(rows)


if __name__ == "__main__":
    main()
