"""Measure process memory and step time with each memory allocator.

    python scripts/allocators.py --json benchmarks/allocators_cpu.json

`efficient-ft bench memory` measures each recipe with each allocator in turn, each time in a separate process.
Allocators that are not installed are left out. Recipes that are already in the file are kept.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

ALLOCATORS = ("keep", "mimalloc", "tcmalloc")

#: Model, batch, allocators, and recipes by name.
MODELS: dict[str, tuple[int, tuple[str, ...], dict[str, str]]] = {
    "deit_small": (
        16,
        ALLOCATORS,
        {
            "full": "full",
            "compact": "compact",
            "mesa": "mesa",
            "back_razor": "back_razor",
            "low_bit": "low_bit",
            "checkpointing": "checkpointing",
            "bsr": "bsr",
            "bsr+low_bit+lbp_dct": "bsr+low_bit+lbp_dct",
        },
    ),
    "vit_base": (
        8,
        ("mimalloc", "tcmalloc"),
        {
            "full": "full",
            "back_razor": "back_razor",
            "low_bit": "low_bit",
            "checkpointing": "checkpointing",
        },
    ),
}


def main() -> None:
    """Measure the recipes that are not in the file yet."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True, metavar="FILE")
    parser.add_argument("--steps", type=int, default=4, help="steps measured (default 4)")
    options = parser.parse_args()
    models: dict[str, Any] = {}
    if options.json.is_file():
        models = json.loads(options.json.read_text(encoding="utf-8"))["models"]
    for model, (batch, allocators, recipes) in MODELS.items():
        of_model = models.setdefault(model, {"batch": batch, "recipes": {}})
        for name, recipe in recipes.items():
            of_recipe = of_model["recipes"].setdefault(name, {})
            for allocator in allocators:
                if allocator in of_recipe:
                    continue
                found = measure(model, batch, recipe, allocator, options.steps)
                if found is None:
                    continue
                environment, of_recipe[allocator] = found
                report = {
                    "command": f"python scripts/allocators.py --json benchmarks/{options.json.name}",
                    "environment": environment,
                    "kind": "allocators",
                    "dtype": "fp32",
                    "models": models,
                }
                options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def measure(
    model: str, batch: int, recipe: str, allocator: str, steps: int
) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """Measure one recipe with one allocator; return None if the allocator is not installed."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "memory.json"
        words = ["bench", "memory", f"x={recipe}", "--model", model, "--batch", str(batch), "--steps", str(steps)]
        words += ["--allocator", allocator, "--json", str(file)]
        ended = subprocess.run(
            [sys.executable, "-m", "efficient_ft", *words], cwd=ROOT, capture_output=True, text=True, check=False
        )
        if not file.is_file():
            print(f"{model} {recipe} {allocator}: {(ended.stdout + ended.stderr).strip().splitlines()[-1]}", flush=True)
            return None
        report = json.loads(file.read_text(encoding="utf-8"))
    one = report["recipes"]["x"]
    kept = ("counted_bytes", "optimizer_bytes", "interpreter_bytes", "with_model_bytes", "memory", "seconds")
    growth = one["memory"]["growth_bytes"] / one["counted_bytes"]
    print(f"{model} {recipe} {allocator}: growth / counted = {growth:.2f}", flush=True)
    environment = report["environment"]
    load = environment.pop("load", None)  # belongs to this measurement, like the allocator
    del environment["allocator"]
    return environment, {**{key: one[key] for key in kept}, "load": load}


if __name__ == "__main__":
    main()
