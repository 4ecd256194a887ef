"""Measure the records of a GPU: recipes next to torch's own ways to save memory, in fp32 and bf16, and predictions.

    python scripts/gpu_records.py --budget-seconds 800
    python scripts/gpu_records.py --device cpu --small --folder /tmp/records

Each record is a file NAME_DEVICE.json in `--folder` (default: benchmarks), for example memory_vit_base_bf16_h200.json.
Records that exist are not measured again, so that the command can be repeated until all records exist. A record is
started only if time remains, and a process that exceeds the budget is ended.

- memory_vit_base: training steps with methods that save memory (`efficient-ft bench step`).
- step_efficientformer_l1: low-rank backward passes of the last stage (`efficient-ft bench step`).
- alternatives_vit_base: the same steps as memory_vit_base with checkpointing, activation offloading
  (`torch.autograd.graph.save_on_cpu`) and the partitioner of `torch.compile` with several memory budgets.
- share_deit_small: for each recipe, the largest batch that fits into a small share of the GPU, and its speed.
- plans: memory of random recipes (`efficient-ft bench memory`), and the memory that plans predict for them.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

PRECISIONS = ("fp32", "bf16")
#: Recipes of the record memory_vit_base. `weights` stores weights in bf16.
MEMORY = [
    "full", "back_razor", "fused=back_razor:attention=fused", "mesa", "checkpointing", "compact", "low_bit",
    "low_bit_3=low_bit:bits=3", "low_bit_2=low_bit:bits=2",
]  # fmt: skip
WEIGHTS = "weights=full:trainer.weight_dtype=bf16"
LAST_STAGE = [
    "last_stage", "LP-2=lbp_wht:order=2,select=last_stage", "LP-4=lbp_wht:select=last_stage",
    "LP-8=lbp_wht:order=8,select=last_stage", "DCT-4=lbp_dct:select=last_stage",
    "prefix=lbp_wht:select=last_stage,trainer.prefix=auto",
    "read=lbp_wht:select=last_stage,trainer.cache_features=on",
]  # fmt: skip
#: Share of a GPU in bytes, and the recipes and batches that are tried there.
SHARE = 2 * 2**30
SHARED = ["full", "low_bit", "back_razor", "mesa", "compact", "checkpointing", "bsr+low_bit"]
BATCHES = (8, 16, 32, 64, 96, 128, 192, 256, 384, 512)
#: Memory budgets of torch's partitioner: 1 keeps the tensors of the plain step, 0 recomputes everything.
PARTITIONER = (0.7, 0.5, 0.3)
#: Networks, image sizes, batches and recipes of predictions.
PLANNED = {
    "deit_tiny": (112, 224), "deit_small": (112, 224), "vit_base": (96, 224), "efficientformer_l1": (224,),
    "resnet50": (96, 224), "swinv2_tiny_window8_256": (256,), "convnext_tiny": (96, 224), "mobilenetv2_100": (224,),
}  # fmt: skip
PLANNED_BATCHES = (8, 32, 128)
PLANNED_RECIPES = ("full", "last_stage", "checkpointing", "low_bit", "compact", "bitfit", "lora:targets=all")


def main() -> None:
    """Measure the missing records until the time is over."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget-seconds", type=float, default=800)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="a very small network and few rounds, to test the command")
    parser.add_argument("--folder", type=Path, default=ROOT / "benchmarks", metavar="DIR")
    parser.add_argument("--plans", type=int, default=20, help="number of predictions (default 20)")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="records to measure (default: all)")
    parser.add_argument("--alone", help=argparse.SUPPRESS)  # measures one record in this process
    parser.add_argument("--dtype", default="fp32", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.alone:
        report = {"alternatives_vit_base": alternatives, "share_deit_small": share}[options.alone](options)
        _write(options.folder, report)
        return
    end = time.monotonic() + options.budget_seconds
    options.folder.mkdir(parents=True, exist_ok=True)
    failed = [record.stem for record, run in _records(options) if not _measure(record, run, end, options)]
    print("\nEvery record exists." if not failed else f"\nMissing records: {', '.join(failed)}. Repeat the command.")


def _records(options: argparse.Namespace) -> Iterator[tuple[Path, Callable[[Path, float], bool]]]:
    """Yield the file of each record, and a function that measures it until a time and returns True if it exists."""
    device = _slug(options.device)
    small = ["--model", "vit_digits", "--classes", "10", "--batch", "2", "--rounds", "1", "--warmup", "1"]
    for dtype in reversed(PRECISIONS):
        end = "" if dtype == "fp32" else f"_{dtype}"
        of = ["--device", options.device, "--dtype", dtype, "--memory-steps", "0"]
        vit = small if options.small else ["--model", "vit_base", "--batch", "128", "--rounds", "8"]
        former = small if options.small else ["--model", "efficientformer_l1", "--batch", "128", "--rounds", "10"]
        weights = [WEIGHTS] if dtype == "bf16" else []
        file = options.folder / f"memory_vit_base{end}_{device}.json"
        yield file, partial(_bench, ["step", *of, *vit, *MEMORY, *weights])
        file = options.folder / f"step_efficientformer_l1{end}_{device}.json"
        yield file, partial(_bench, ["step", *of, *former, *LAST_STAGE])
        for name in ("alternatives_vit_base", "share_deit_small"):
            own = ["--alone", name, "--dtype", dtype, "--device", options.device, *(["--small"] * options.small)]
            yield options.folder / f"{name}{end}_{device}.json", partial(_own, own)
    yield options.folder / f"plans_{device}.json", partial(plans, options)


def _slug(device: str) -> str:
    """Return the short name of a device in file names: cpu, or the last word of a GPU's name, e.g. h200."""
    import torch

    name = torch.cuda.get_device_name(device) if torch.device(device).type == "cuda" else "cpu"
    model = next((word for word in name.lower().split() if re.search(r"\d", word)), name.lower())
    return re.sub(r"\W+", "_", model)


def _measure(file: Path, run: Callable[[Path, float], bool], end: float, options: argparse.Namespace) -> bool:
    if options.only and not any(file.stem.startswith(name) for name in options.only):
        return True
    cases = json.loads(file.read_text(encoding="utf-8")).get("cases") if file.is_file() else None
    if file.is_file() and (cases is None or len(cases) >= options.plans):  # only the record of predictions has cases
        print(f"{file.name}: exists", flush=True)
        return True
    if time.monotonic() > end:
        return False
    start = time.monotonic()
    done = run(file, end)
    print(f"{file.name}: {'measured' if done else 'failed'} in {time.monotonic() - start:.0f} s", flush=True)
    return done


def _bench(words: list[str], file: Path, end: float) -> bool:
    return _process(["-m", "efficient_ft", "bench", *words, "--json", str(file)], end) and file.is_file()


def _own(words: list[str], file: Path, end: float) -> bool:
    return _process([__file__, *words, "--folder", str(file)], end) and file.is_file()


def _process(words: list[str], end: float) -> bool:
    """Run a Python process until the time `end`. Print the end of its output if it fails."""
    left = max(1.0, end - time.monotonic())
    try:
        done = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False, timeout=left)
    except subprocess.TimeoutExpired:
        return False
    if done.returncode:
        print((done.stdout + done.stderr)[-2000:], flush=True)
    return done.returncode == 0


def _write(file: Path, report: dict[str, Any]) -> None:
    from efficient_ft.record.files import json_text, write_text_atomically

    write_text_atomically(file, json_text(report, indent=1) + "\n")


# ------------------------------------------------------------------------------------------- torch's own ways
def alternatives(options: argparse.Namespace) -> dict[str, Any]:
    """Time steps of full fine-tuning with torch's ways to save memory, and with checkpointing and 4 bits."""
    from efficient_ft.bench.recipes import Network, parse_recipes
    from efficient_ft.bench.step import measure_steps
    from efficient_ft.cli.commands.bench import configure
    from efficient_ft.cli.hydra.conf import CONF

    recipes = [*parse_recipes(["full", "checkpointing", "low_bit", "compact"], CONF), *_torch_recipes(options.small)]
    model, batch, rounds = ("vit_digits", 2, 1) if options.small else ("vit_base", 128, 8)
    network = Network(model, batch, precision=options.dtype, device=options.device)
    report = measure_steps(recipes, configure, network, rounds=rounds)
    report["notes"].append("Bytes of the compiled and offloaded steps are those that autograd keeps on the device.")
    return {"command": "python scripts/gpu_records.py", "environment": _environment(options.device), **report}


def _torch_recipes(small: bool) -> list[Any]:
    from efficient_ft.bench.recipes import Recipe

    full = ("method=[full]",)
    budgets = [Recipe(f"budget {one:g}", full, partial(_compiled, budget=one, small=small)) for one in PARTITIONER]
    return [Recipe("offloaded", full, _offloaded), Recipe("compiled", full, partial(_compiled, small=small)), *budgets]


def _offloaded(step: Any) -> int:
    """Keep the tensors for the backward pass in pinned memory of the host. Return the bytes kept on the device."""
    import torch

    @contextmanager
    def offload(inputs: Any) -> Iterator[Any]:
        with torch.autograd.graph.save_on_cpu(pin_memory=step.device.type == "cuda"):
            yield inputs

    step._replace = offload
    return 0


def _compiled(step: Any, small: bool, budget: float = 1.0) -> int:
    """Compile the model with a memory budget of the partitioner. Return the bytes that autograd keeps."""
    import torch
    import torch._functorch.config
    from torch._dynamo import lookup_backend

    from efficient_ft.cost.meter import SavedTensors, storages

    # The small version uses the partitioner without the compiler.
    compile_graph = lookup_backend("aot_eager_decomp_partition" if small else "inductor")

    # Dynamo shares compiled code between networks of one class if the backend is the same object, even if the budgets
    # differ. Each recipe therefore has a separate backend.
    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        with torch._functorch.config.patch(activation_memory_budget=budget):
            return compile_graph(graph, inputs)

    step.model = torch.compile(step.model, backend=backend)
    saved = SavedTensors()
    with saved:
        step.forward()
    own = storages([*step.model.parameters(), *step.model.buffers()])
    kept = sum(size for storage, size in saved.alive().items() if storage not in own)
    step.backward()
    step.update()
    return kept


# ------------------------------------------------------------------------------------------- a share of the GPU
def share(options: argparse.Namespace) -> dict[str, Any]:
    """For each recipe, find the largest batch that fits into `SHARE` bytes, and time its steps.

    On a CPU, a batch fits if the counted peak and the optimizer's state fit.
    """
    import torch

    from efficient_ft.bench.recipes import Network, parse_recipes
    from efficient_ft.cli.hydra.conf import CONF

    device = torch.device(options.device)
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(SHARE / total, device)
    model, batches = ("vit_digits", (2, 4)) if options.small else ("deit_small", BATCHES)
    recipes = [*parse_recipes(SHARED, CONF), *_torch_recipes(options.small)]
    found: dict[str, Any] = {}
    for recipe in recipes if not options.small else [recipes[0], recipes[-1]]:
        found[recipe.name] = {"batch": 0}
        for batch in batches:
            network = Network(model, batch, precision=options.dtype, device=device)
            seconds = _fits(recipe, network)
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
            torch.compiler.reset()
            if seconds is None:
                break
            speed = batch / seconds
            found[recipe.name] = {"batch": batch, "images_per_second": speed, "step_seconds": seconds}
        print(recipe.name, found[recipe.name], flush=True)
    about = {"kind": "share", "model": model, "dtype": options.dtype, "share_bytes": SHARE, "batches": list(batches)}
    environment = _environment(options.device)
    return {"command": "python scripts/gpu_records.py", "environment": environment, **about, "recipes": found}


def _fits(recipe: Any, network: Any) -> float | None:
    """Return the median time of a step in seconds, or None if the batch does not fit."""
    import statistics

    import torch

    from efficient_ft.bench.step import build_step
    from efficient_ft.bench.timing import waiter
    from efficient_ft.cli.commands.bench import configure
    from efficient_ft.cost import executed
    from efficient_ft.models import factory
    from efficient_ft.training.trainer import use_channels_last

    config = configure(network.model, [*network.overrides, *recipe.overrides])
    model = factory.random_model(config.model, network.num_classes)
    wait, seconds = waiter(network.device), []
    try:
        last = use_channels_last(config, network.device)
        step = build_step(config, model, network.device, network.batch_size, last)
        if network.device.type == "cpu":
            counted = executed(
                step.model, methods=step.methods, build_optimizer=step._build_optimizer, **vars(step.spec)
            )
            if counted.peak_bytes + (counted.optimizer_bytes or 0) > SHARE:
                return None
        if recipe.wrap is not None:
            recipe.wrap(step)
        for _ in range(2 + 5):
            start = time.perf_counter()
            step()
            wait()
            seconds.append(time.perf_counter() - start)
    except torch.OutOfMemoryError:
        return None
    return statistics.median(seconds[2:])


# ------------------------------------------------------------------------------------------- predictions
def plans(options: argparse.Namespace, file: Path, end: float) -> bool:
    """Measure the memory of random recipes, next to the memory that plans predict from their counts.

    The record is written after each case, and the next call continues with the next case.
    """
    draw, cases = random.Random(0), []
    if file.is_file():
        cases = json.loads(file.read_text(encoding="utf-8"))["cases"]
    for number in range(options.plans):
        model = draw.choice(sorted(PLANNED))
        size, batch = draw.choice(PLANNED[model]), draw.choice(PLANNED_BATCHES)
        recipe, dtype = draw.choice(PLANNED_RECIPES), draw.choice(PRECISIONS)
        if number < len(cases):
            continue
        if time.monotonic() > end:
            return False
        network = ["--model", model, "--size", str(size), "--batch", str(batch)]
        if options.small:
            network = ["--model", "vit_digits", "--batch", "2", "--classes", "10"]
        words = ["bench", "memory", f"x={recipe}", *network, "--device", options.device, "--dtype", dtype]
        part = file.with_name(f"{file.stem}_case.json")
        case = {"model": model, "size": size, "batch": batch, "recipe": recipe, "dtype": dtype}
        _process(["-m", "efficient_ft", *words, "--json", str(part)], end)
        if time.monotonic() > end and not part.is_file():
            return False
        if part.is_file() and "memory" in (found := json.loads(part.read_text(encoding="utf-8"))["recipes"]["x"]):
            case |= _predicted(found)
        else:
            case["failure"] = "not measured"
        part.unlink(missing_ok=True)
        cases.append(case)
        _write(file, {"kind": "plans", "environment": _environment(options.device), "cases": cases})
    return True


def _predicted(found: dict[str, Any]) -> dict[str, Any]:
    """Return the predicted and the measured memory of a record of `efficient-ft bench memory`, and its step time.

    On a GPU, the numbers are the memory reserved on the device. On a CPU, they are the growth of the process.
    """
    from efficient_ft.core.allocator import allocator_in_use
    from efficient_ft.cost import Demand, predict
    from efficient_ft.cost.predict import predicted_growth

    counted, memory, optimizer = found["executed"], found["memory"], found["optimizer_bytes"]
    model, batch, largest = counted["model_bytes"], counted["batch_bytes"], counted["largest_bytes"]
    step = counted["peak_bytes"] - model - batch + optimizer
    if memory["device"]:
        measured = memory["device"]["reserved_bytes"]
        predicted = predict(Demand(model, model, batch, step, largest, optimizer), 0, "system", "cuda").peak_bytes
    else:
        measured, predicted = memory["growth_bytes"], predicted_growth(step, largest, allocator_in_use())
    return {"predicted_bytes": predicted, "measured_bytes": measured, "step_seconds": found["step_seconds"]}


def _environment(device: str) -> dict[str, Any]:
    from efficient_ft.record.environment import environment

    return environment(device, packages=("torch", "timm"))


if __name__ == "__main__":
    main()
