"""Run searches (``efficient-ft auto``), and train full fine-tuning and hand-picked recipes for the same time.

    python scripts/searches.py --data DIR --weights DIR --json benchmarks/searches_cpu.json

The `--data` folder contains the folders caltech101_128, cars49_224 and cifar10, each with class folders in train/ and
test/. The `--weights` folder contains deit_tiny.safetensors and efficientnet_lite0.safetensors. For CIFAR-10, the first
200 training images and the first 100 test images of each class are used, in the order of the file names.

The parts of a trial are run separately (`--part`), and parts that are already in the file are not repeated:

- ``search``: the search. The memory budget is the process memory before the model is built plus `room`. Nothing else
  may run on the machine. The time of a step of full fine-tuning is then measured.
- ``full``: full fine-tuning at the default learning rate without a memory budget. The run has as many steps as fit into
  the time of the search, so other programs may run meanwhile.
- ``hand``: five recipes that a user would choose within the memory budget, each with three learning rates and as many
  steps as fit into the time of the search. A recipe that exceeds the memory budget is recorded with the reason.
- ``decay``: the same recipes and learning rates, each with 60 steps at a constant learning rate, with 60 steps at a
  learning rate that decreases in the last 27 steps, and with 180 steps, at a learning rate that decreases in the last
  81 steps. The first and the last run are one run, which is paused and continued, as in a search. This part does not
  depend on the time of the trial.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from efficient_ft.cli.commands.auto import COMMON, CROPS
from efficient_ft.cli.hydra import processes
from efficient_ft.cli.hydra.rows import merged
from efficient_ft.core.text import table
from efficient_ft.record.environment import cpu_name, environment
from efficient_ft.search.state import SearchState, read_state
from efficient_ft.search.text import peak_bytes

NETWORKS = {
    "deit_tiny": ["model=deit_tiny"],
    "efficientnet_lite0": ["model=timm", "model.name=tf_efficientnet_lite0"],
}
#: Folder and image size in pixels of each data set.
IMAGES = {"caltech101": ("caltech101_128", 128), "cars49": ("cars49_224", 224), "cifar10": ("cifar10", 128)}
#: Numbers of images of each class of CIFAR-10.
CIFAR10 = {"train": 200, "test": 100}
_SMALL = ["data.batch_size=8", "trainer.grad_accum_steps=4"]
#: Recipes that a user would choose if memory is scarce.
HAND = {
    "head": ["method=head"],
    "last_stage": ["method=last_stage"],
    "norm_last": ["method=norm_last", *_SMALL],
    "full+lora": ["method=[full,lora]", "method.lora.targets=all", *_SMALL],
    "full+checkpointing": ["method=[full,checkpointing]", *_SMALL],
}
RATES = ("1e-4", "1e-3", "1e-2")
#: Time in seconds for which the step time of a recipe is measured.
TIMED = 40
#: Numbers of steps of the part ``decay``, and the fraction of them in which the learning rate decreases.
RUNG, WHOLE, DECAY = 60, 180, 0.45


@dataclass(frozen=True)
class Trial:
    """A search: network, data set, memory in bytes above the process before the model is built, and time in seconds."""

    network: str
    images: str
    room: int
    seconds: int

    @property
    def name(self) -> str:
        """Name of the trial, e.g. ``cars49, deit_tiny, 10 min``."""
        return f"{self.images}, {self.network}, {self.seconds // 60} min"


TRIALS = [
    *(Trial(network, images, 400_000_000, 600) for images in IMAGES for network in NETWORKS),
    Trial("deit_tiny", "cars49", 1_500_000_000, 1800),
    Trial("efficientnet_lite0", "caltech101", 1_500_000_000, 1800),
]


def main() -> None:
    """Run the parts of the trials that are not in the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, metavar="DIR")
    parser.add_argument("--weights", type=Path, required=True, metavar="DIR")
    parser.add_argument("--part", choices=tuple(PARTS), default="search", help="default search")
    parser.add_argument("--only", action="append", metavar="NAME", help="may be repeated (default: all trials)")
    parser.add_argument("--place", type=Path, metavar="DIR", help="folder for the runs (default: a temporary folder)")
    parser.add_argument("--json", type=Path, required=True, metavar="FILE")
    options = parser.parse_args()
    names = [trial.name for trial in TRIALS]
    if unknown := [name for name in options.only or () if name not in names]:
        parser.error(f"--only {unknown[0]}: the trials are {'; '.join(names)}")
    command = f"python scripts/searches.py --data DIR --weights DIR --json benchmarks/{options.json.name}"
    report: dict[str, Any] = {"command": command, "kind": "searches", "trials": {}}
    if options.json.is_file():
        report = json.loads(options.json.read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory() as temporary:
        place = (options.place or Path(temporary)).resolve()
        for trial in TRIALS:
            if options.only and trial.name not in options.only:
                continue
            settings = settings_of(trial, options.data.resolve(), options.weights.resolve(), place)
            of = report["trials"].setdefault(trial.name, {})
            for change in PARTS[options.part](trial, settings, of, place / re.sub(r"\W+", "_", trial.name)):
                of.update(change)
                report["environment"] = environment("cpu", packages=("torch", "timm"))
                options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
            if not of:
                del report["trials"][trial.name]
    print(summary(report["trials"]))


def settings_of(trial: Trial, data: Path, weights: Path, place: Path) -> list[str]:
    """Return the settings of the network and the data of a trial."""
    folder, size = IMAGES[trial.images]
    root = data / folder
    if trial.images == "cifar10":
        root = place / "cifar10_2000"
        for split, count in CIFAR10.items():
            for source in sorted((data / folder / split).iterdir()):
                to = root / split / source.name
                to.mkdir(parents=True, exist_ok=True)
                for file in sorted(source.iterdir())[:count]:
                    if not (to / file.name).exists():
                        shutil.copy(file, to)
    files = [f"model.weights={weights / trial.network}.safetensors", f"data.root={root}"]
    return [*NETWORKS[trial.network], f"model.image_size={size}", "data=folder", *files]


def search(trial: Trial, settings: Sequence[str], of: dict[str, Any], place: Path) -> Any:
    """Run the search, and measure the step time of full fine-tuning."""
    if "search" not in of:
        before = run(settings, ["method=head", "trainer.max_steps=2"], place)["memory"]["before_model_bytes"]
        memory = int((before + trial.room) / 1e6)
        place.mkdir(parents=True, exist_ok=True)
        load = os.getloadavg()[0]
        words = [*settings, f"memory={memory}MB", f"time={trial.seconds}s"]
        start = time.perf_counter()
        with (place / "search.log").open("ab") as log:
            ended = subprocess.run(
                [sys.executable, "-m", "efficient_ft", "auto", *words], cwd=place, stdout=log, stderr=log, check=False
            )
        seconds = time.perf_counter() - start
        (folder,) = {file.parent for file in place.glob("outputs/auto/*/*/*/search.json")} or {place}
        state = read_state(folder)
        if ended.returncode or state is None:
            raise SystemExit(f"The search failed. Its output is in {place / 'search.log'}.")
        about = {"before_bytes": before, "load": load, "device": cpu_name(), "seconds": seconds}
        yield {"search": {**about, **described(state)}}
    if "full_step_seconds" not in of:
        timed = run(settings, ["method=full", "optim.schedule=constant", f"pause_at={TIMED}s"], place)["paused"]
        yield {"full_step_seconds": step_seconds(timed)}


def described(state: SearchState) -> dict[str, Any]:
    """Return the results of a finished search, without the paths of its settings."""
    assert state.final is not None
    final, arm = state.final, state.arm(state.final.arm)
    arms = {
        one.name: {
            "steps": [part.step for part in one.slices],
            "values": [part.value for part in one.slices],
            "seconds": [part.seconds for part in one.slices],
            "stopped": one.stopped,
        }
        for one in state.arms
    }
    return {
        "memory_bytes": state.memory_bytes,
        "budget_seconds": state.budget,
        "counted_seconds": final.seconds,
        "peak_bytes": peak_bytes(state),
        "recipe": arm.recipe,
        "lr": arm.lr,
        "steps": final.steps,
        "decay_steps": final.decay,
        "val": final.value,
        "test": final.test,
        "winner_seconds": final.trained,
        "images": None if state.data is None else state.data.model_dump(),
        "arms": arms,
        "refused": state.refused,
    }


def full(trial: Trial, settings: Sequence[str], of: dict[str, Any], place: Path) -> Any:
    """Train full fine-tuning at the default learning rate for as many steps as fit into the time of the search."""
    if "full" not in of and "full_step_seconds" in of:
        steps = int(trial.seconds / of["full_step_seconds"])
        found = run(settings, ["method=full", f"trainer.max_steps={steps}"], place)["accuracy"]
        yield {"full": {"steps": steps, "val": found["best"], "test": found["test"]}}


def hand(trial: Trial, settings: Sequence[str], of: dict[str, Any], place: Path) -> Any:
    """Train the hand-picked recipes within the memory budget."""
    if "search" not in of:
        return
    memory = f"memory={int(of['search']['memory_bytes'] / 1e6)}MB"
    recipes: dict[str, Any] = of.setdefault("hand", {})
    for name, methods in HAND.items():
        recipe: dict[str, Any] = recipes.setdefault(name, {})
        if "refused" in recipe:
            continue
        if "step_seconds" not in recipe:
            try:
                timed = run(settings, [*methods, memory, "optim.schedule=constant", f"pause_at={TIMED}s"], place)
            except RuntimeError as error:
                recipe["refused"] = str(error)
                yield {"hand": recipes}
                continue
            recipe["step_seconds"] = step_seconds(timed["paused"])
            yield {"hand": recipes}
        steps = int(trial.seconds / recipe["step_seconds"])
        for lr in RATES:
            if lr not in recipe:
                found = run(settings, [*methods, f"optim.lr={lr}", f"trainer.max_steps={steps}"], place)["accuracy"]
                recipe[lr] = {"steps": steps, "val": found["best"], "test": found["test"]}
                yield {"hand": recipes}


def decay(trial: Trial, settings: Sequence[str], of: dict[str, Any], place: Path) -> Any:
    """Train recipes for `RUNG` steps at a constant and at a decreasing learning rate, and for `WHOLE` steps."""
    place.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = of.setdefault("decay", {"steps": [RUNG, WHOLE]})
    for name, methods in HAND.items():
        for lr in RATES:
            if f"{name}, {lr}" in found:
                continue
            constant = [*methods, f"optim.lr={lr}", "optim.schedule=constant"]
            short = [f"trainer.max_steps={RUNG}", f"optim.decay_steps={round(DECAY * RUNG)}"]
            whole = [f"trainer.max_steps={WHOLE}", f"optim.decay_steps={round(DECAY * WHOLE)}"]
            with tempfile.TemporaryDirectory(dir=place) as folder:
                paused = run(settings, [*constant, f"pause_at={RUNG}"], place, Path(folder))["paused"]
                ended = run(settings, [*constant, *whole], place, Path(folder))["accuracy"]
            decreased = run(settings, [*constant, *short], place)["accuracy"]
            values = {"constant": paused["value"], "decreased": decreased["last"], "whole": ended["last"]}
            found[f"{name}, {lr}"] = {**values, "test": ended["test"]}
            yield {"decay": found}


PARTS = {"search": search, "full": full, "hand": hand, "decay": decay}


def step_seconds(paused: dict[str, Any]) -> float:
    """Return the time of a step of a paused run in seconds."""
    return (paused["seconds"] - paused["evaluation_seconds"]) / paused["step"]


def run(settings: Sequence[str], more: Sequence[str], place: Path, kept: Path | None = None) -> dict[str, Any]:
    """Train once, and return the results. The run uses the folder `kept`, or a new one that is removed.

    Raises:
        RuntimeError: If the run fails. The message contains the reason.
    """
    place.mkdir(parents=True, exist_ok=True)
    epochs = ["trainer.epochs=1000000", "trainer.progress=false", "cost.baseline=none", "cost.steps=1"]
    with nullcontext(kept) if kept is not None else tempfile.TemporaryDirectory(dir=place) as folder:
        words = [*merged(*settings, *COMMON, CROPS, *more, *epochs), f"hydra.run.dir={folder}/run"]
        ended = processes.run([sys.executable, "-m", "efficient_ft", *words], {}, place / "runs.log")
    if ended.results is None:
        raise RuntimeError(ended.failure or "the run returned no results")
    return ended.results


def summary(trials: dict[str, Any]) -> str:
    """Return a table of the trials."""
    rows = [["trial", "recipe", "test", "full", "hand-picked", "seconds", "peak/budget", "overhead"]]
    for name, of in trials.items():
        if "search" not in of:
            continue
        found = of["search"]
        best = max((one["test"] for recipe in of.get("hand", {}).values() for key, one in recipe.items()
                    if key in RATES), default=None)  # fmt: skip
        rows.append(
            [
                name,
                f"{found['recipe']} lr={found['lr']:.2g}",
                f"{found['test']:.1%}",
                f"{of['full']['test']:.1%}" if "full" in of else "–",
                "–" if best is None else f"{best:.1%}",
                f"{found['seconds']:.0f}/{found['budget_seconds']:.0f}",
                f"{found['peak_bytes'] / found['memory_bytes']:.3f}",
                f"{1 - found['winner_seconds'] / found['seconds']:.0%}",
            ]
        )
    return table(rows, left=(0, 1))


if __name__ == "__main__":
    main()
