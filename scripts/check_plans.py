"""Check plans against measurements: random networks, image sizes, batches and budgets.

    python scripts/check_plans.py --count 100 --json benchmarks/plans_cpu.json

Each case runs `efficient-ft plan` in a separate process on a few random images in folders. The recommended recipe is
then trained for some steps with the command that the plan prints, within its budget. The record has the predictions
and the measurements: the peak of the process (`process`; `memory`: above interpreter and libraries; `predicted`: from
the count alone, without the plan's trial), the counted peak, and the step time. With `--again`, `efficient-ft bench
memory` times the step again (`step again`), which shows the variation of this machine. Cases in which no recipe fits
are recorded too. All cases of a file have the same precision (`--precision`). With `--no-times`, times are left out,
because other programs may be running.

With `--repeat`, cases of the file whose step time was off by more than 15 % are checked again, because other programs
may slow a machine down for minutes. The first measurement stays in the case as `first`.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
from PIL import Image

from efficient_ft.record.environment import environment

#: Classifiers of timm, and the image sizes that they take.
MODELS = {
    "vit_tiny_patch16_224": (96, 160, 224),
    "vit_small_patch16_224": (96, 160, 224),
    "vit_base_patch32_224": (224,),
    "vit_base_patch16_224": (96, 160),
    "deit_tiny_patch16_224": (112, 224),
    "deit_small_patch16_224": (112, 224),
    "beit_base_patch16_224": (224,),
    "cait_xxs24_224": (224,),
    "mixer_s32_224": (224,),
    "swinv2_tiny_window8_256": (256,),
    "swin_tiny_patch4_window7_224": (224,),
    "convnext_atto": (96, 160),
    "convnext_tiny": (96, 160),
    "efficientformer_l1": (224,),
    "efficientformerv2_s0": (224,),
    "mobilevit_s": (128, 256),
    "resnet18": (64, 128, 224),
    "resnet50": (96, 160),
    "mobilenetv2_100": (96, 160),
    "mobilenetv3_small_100": (128, 224),
    "efficientnet_lite0": (96, 160),
    "regnety_004": (128, 224),
}
BATCHES = (4, 8, 16, 32)


def main() -> None:
    """Check the requested number of cases."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32", help="default fp32")
    parser.add_argument("--json", type=Path, required=True, metavar="FILE", help="cases in it are not repeated")
    parser.add_argument("--again", action="store_true", help="time each step again")
    parser.add_argument("--no-times", action="store_true", help="record no step times, if other programs are running")
    parser.add_argument("--repeat", action="store_true", help="check cases again whose step time was off")
    options = parser.parse_args()
    cases: list[dict[str, Any]] = []
    if options.json.is_file():
        cases = json.loads(options.json.read_text(encoding="utf-8"))["cases"]
        if any(case.get("precision", "fp32") != options.precision for case in cases):
            parser.error(f"--precision {options.precision}: {options.json} has cases in another precision")
    draw = random.Random(options.seed)
    for number in range(options.count):
        model = draw.choice(sorted(MODELS))
        size, batch, room = draw.choice(MODELS[model]), draw.choice(BATCHES), draw.choice((0.2, 0.35, 0.6, 1.0, 2.0))
        first = cases[number] if number < len(cases) else None
        if first is not None and not (options.repeat and _is_off(first)):
            continue
        case = {"model": model, "size": size, "batch": batch, "room": room, "precision": options.precision}
        case |= check(model, size, batch, room, options.precision, options.again)
        if options.no_times:
            case = {key: value for key, value in case.items() if key not in ("step", "step again", "planning_seconds")}
        if first is None:
            cases.append(case)
        else:
            cases[number] = {**case, "first": first}
        command = f"python scripts/check_plans.py --count {options.count} --seed {options.seed}"
        command += f" --precision {options.precision}{' --no-times' * options.no_times}"
        command += f" --json benchmarks/{options.json.name}"
        here = environment("cpu", packages=("torch", "timm"))
        report = {"command": command, "environment": here, "cases": cases}
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        print(number, cases[number], flush=True)
    print(summary(cases))


def _is_off(case: dict[str, Any]) -> bool:
    """Return True if the step time of a case was off by more than 15 % and was measured once."""
    return "step" in case and "first" not in case and abs(case["step"][0] / case["step"][1] - 1) > 0.15


def check(model: str, size: int, batch: int, room: float, precision: str, again: bool) -> dict[str, Any]:
    """Plan one case with `room` GB above the interpreter and its libraries, and train the recommended recipe."""
    with tempfile.TemporaryDirectory() as folder:
        _write_images(Path(folder) / "images", 4 * batch)
        base = _base_bytes()
        settings = ["model=timm", f"model.name={model}", f"model.image_size={size}", "model.pretrained=false"]
        settings += ["data=folder", "data.root=images", f"data.batch_size={batch}", "data.num_workers=0"]
        settings += [f"trainer.precision={precision}"]
        memory = round(base + room * 1e9)
        file = Path(folder) / "plan.json"
        ended = _run(["plan", *settings, f"memory={memory}B", "--json", str(file)], folder)
        if not file.is_file():
            return {"memory_bytes": memory, "outcome": _last_line(ended)}
        plan = json.loads(file.read_text(encoding="utf-8"))
        case = {"memory_bytes": memory, "planning_seconds": round(plan["seconds"], 1)}
        best = plan["recommended"]
        if best is None:
            return {**case, "outcome": "nothing is recommended", "smallest_bytes": plan["smallest_bytes"]}
        case = {**case, "recipe": best["name"], "tried": best["measured_bytes"] is not None}
        steps = min(max(round(5 / best["step_seconds"]), 5), 30)
        short = [f"trainer.max_steps={steps}", "trainer.epochs=100", "trainer.limit_eval_batches=1"]
        short += ["cost.baseline=none", "trainer.progress=false"]
        ended = _run([*best["arguments"], f"memory={memory}B", *short], folder)
        found = list((Path(folder) / "outputs").rglob("results.json"))
        if not found:
            return {**case, "outcome": f"not trained: {_last_line(ended)}"}
        run = json.loads(found[0].read_text(encoding="utf-8"))
        base, peak = plan["base_bytes"], run["memory"]["peak_bytes"]
        said = best["measured_bytes"] if case["tried"] else best["process_bytes"]
        step = run["totals"]["step_seconds"]
        case = {
            **case,
            "outcome": "measured",
            "process": [said, peak],
            "memory": [said - base, peak - base],
            "predicted": [best["process_bytes"] - base, peak - base],
            "counted": [best["counted"]["step_bytes"], run["memory"]["counted_bytes"]],
            "step": [best["step_seconds"], step],
        }
        if again:
            of_model = ["--model", model, "--size", str(size), "--batch", str(batch), "--dtype", precision]
            case["step again"] = [_step_seconds(best, settings, of_model, folder), step]
        return case


def _write_images(root: Path, count: int) -> None:
    """Write training and validation images of four classes, 64 pixels square."""
    draw = np.random.default_rng(0)
    for split, images in (("train", count), ("val", 8)):
        for number in range(images):
            file = root / split / f"class{number % 4}" / f"{number}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(draw.integers(0, 256, (64, 64, 3), dtype=np.uint8)).save(file)


def _step_seconds(best: dict[str, Any], settings: list[str], options: list[str], folder: str) -> float:
    """Time the step of the recipe with `efficient-ft bench memory`."""
    own = [a for a in best["arguments"] if a not in settings]
    (method,) = [a.partition("=")[2].strip("[]").replace(",", "+") for a in own if a.startswith("method=")]
    others = [a for a in own if not a.startswith("method=")]
    first, *rest = method.split("+")
    recipe = "x=" + first + (":" + ",".join(others) if others else "") + "".join(f"+{one}" for one in rest)
    steps = min(max(round(3 / best["step_seconds"]), 3), 20)
    file = Path(folder) / "memory.json"
    ended = _run(["bench", "memory", recipe, *options, "--steps", str(steps), "--json", str(file)], folder)
    assert file.is_file(), ended.stderr
    seconds: float = json.loads(file.read_text(encoding="utf-8"))["recipes"]["x"]["step_seconds"]
    return seconds


def summary(cases: list[dict[str, Any]]) -> str:
    """Return the errors of the predictions as text."""
    measured = [case for case in cases if case["outcome"] == "measured"]
    over = [case for case in measured if case["process"][1] > case["memory_bytes"]]
    over += [case for case in cases if case["outcome"].startswith("not trained")]
    lines = [f"{len(cases)} cases, {len(measured)} measured, {len(over)} above their budget."]
    for key in ("process", "memory", "predicted", "counted", "step", "step again"):
        off = sorted(abs(case[key][0] / case[key][1] - 1) for case in measured if key in case)
        if off:
            within = off[int(0.9 * (len(off) - 1))]
            lines.append(f"{key}: median {statistics.median(off):.1%}, 90 % within {within:.1%}, largest {off[-1]:.1%}")
    if again := sum("first" in case for case in cases):
        lines.append(f"{again} cases were checked twice, since their step time was off by more than 15 %.")
    times = [case["planning_seconds"] for case in cases if "planning_seconds" in case]
    if times:
        lines.append(f"planning: median {statistics.median(times):.0f} s, largest {max(times):.0f} s")
    return "\n".join(lines)


def _base_bytes() -> int:
    """Return the resident memory of a planning process before it builds a model."""
    code = (
        "import efficient_ft.planning, efficient_ft.training.run;"
        "from efficient_ft.core.process_memory import resident_bytes; print(resident_bytes())"
    )
    return int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)


def _run(words: list[str], folder: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "efficient_ft", *words], cwd=folder, capture_output=True, text=True, check=False
    )


def _last_line(ended: subprocess.CompletedProcess[str]) -> str:
    lines = [line for line in (ended.stdout + ended.stderr).splitlines() if line.strip()]
    return lines[-1][:300] if lines else f"exit status {ended.returncode}"


if __name__ == "__main__":
    main()
