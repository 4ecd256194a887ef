"""Count and measure the memory of one recipe's training steps. The process must run only this recipe."""

from __future__ import annotations

import gc
import statistics
import time
from contextlib import nullcontext
from dataclasses import asdict
from functools import partial
from typing import Any

import torch

from efficient_ft.bench.recipes import Configure, Network, Recipe
from efficient_ft.bench.step import build_step, unfused_attention
from efficient_ft.bench.timing import waiter
from efficient_ft.core.format import format_bytes
from efficient_ft.core.process_memory import (
    file_backed_bytes,
    release_freed_memory,
    release_library_pages,
    resident_bytes,
)
from efficient_ft.cost import StepMemory, TrainingStep, executed
from efficient_ft.models import factory
from efficient_ft.models.weight_dtype import store_weights
from efficient_ft.ops.storage.kernels import cpu
from efficient_ft.training.memory.libraries import libraries, load
from efficient_ft.training.optimizer import build_optimizer
from efficient_ft.training.trainer import use_channels_last


def measure_memory(
    recipe: Recipe,
    configure: Configure,
    network: Network,
    *,
    optim: str = "adamw",
    steps: int = 3,
    warmup: int = 2,
) -> dict[str, Any]:
    """Run training steps on random weights and images, and measure the memory of this process.

    The process must not have run other steps, because memory that the allocator keeps would hide the growth. The
    compiler of the packing kernels (numba) is loaded first, because its size does not depend on the batch. `optim` is
    the name of an optimizer in conf/optim. The `warmup` steps run after the steps that methods need for profiling.

    Returns:
        A record of the recipe, which can be passed to `memory_report`. The entry ``compiler_used`` is True if the
        process compiled a kernel that was not stored yet. The measured memory then includes the compiler.

    Raises:
        UserError: If a recipe or model cannot be used.
    """
    device = torch.device(network.device)
    config = configure(network.model, [f"optim={optim}", *network.overrides, *recipe.overrides])

    def prepare(place: torch.device | str) -> TrainingStep:
        model = store_weights(factory.random_model(config.model, network.num_classes), config.trainer.weight_dtype)
        return build_step(config, model, place, network.batch_size, use_channels_last(config, device))

    interpreter, of_files = settled_bytes(), file_backed_bytes()
    with unfused_attention() if network.unfused else nullcontext():
        step = prepare(device)
        with_model = settled_bytes()
        for library in libraries(config.optim.state_bits, step.methods):
            load(library)
        memory, wait = StepMemory(device), waiter(device)
        warmup += step.methods.warmup_steps
        seconds = []
        for _ in range(warmup + steps):
            with memory:
                start = time.perf_counter()
                step()
                wait()
                seconds.append(time.perf_counter() - start)
        process, optimizer_bytes = memory.measured(warmup), step.optimizer_bytes
        assert process is not None
        new = prepare("cpu")
        build = partial(build_optimizer, optim=config.optim, precision=config.trainer.precision)
        counted = executed(new.model, methods=new.methods, build_optimizer=build, **vars(new.spec))
    return {
        "methods": [repr(method) for method in new.methods],
        "optimizer": config.optim.name,
        "trainable_parameters": sum(p.numel() for p in new.model.parameters() if p.requires_grad),
        "executed": counted.as_dict(),
        "optimizer_bytes": optimizer_bytes,
        "counted_bytes": counted.step_peak_bytes + optimizer_bytes,
        "interpreter_bytes": interpreter,
        "interpreter_file_bytes": of_files,
        "with_model_bytes": with_model,
        "memory": {**asdict(process), "growth_bytes": process.growth_bytes},
        "compiler_used": cpu.compiler_used(),
        "step_seconds": statistics.median(seconds[warmup:]),
        "seconds": seconds,
    }


def memory_report(
    model: str, batch_size: int, precision: str, unfused: bool, recipes: dict[str, dict[str, Any]]
) -> dict[str, Any]:
    """Return a JSON-serializable report of the recipes that `measure_memory` measured.

    The record of a recipe whose process failed is ``{"failure": REASON}``. The settings of a recipe can override
    `precision`.
    """
    sources = {record["memory"]["source"] for record in recipes.values() if "memory" in record}
    of_files = [record.get("interpreter_file_bytes", 0) for record in recipes.values() if "memory" in record]
    failed = [f"{name}: {record['failure']}" for name, record in recipes.items() if "failure" in record]
    return {
        "kind": "memory",
        "model": model,
        "batch": batch_size,
        "dtype": precision,
        "attention": "unfused" if unfused else "timm's default",
        "recipes": recipes,
        "notes": [
            *(f"Measurement of the peak memory: {source}." for source in sorted(sources)),
            *([f"Interpreter: {format_bytes(max(of_files))} are pages of library files."] if any(of_files) else []),
            *failed,
        ],
    }


def settled_bytes() -> int:
    """Return the resident memory of this process after collecting garbage and releasing memory that is not used."""
    gc.collect()
    release_freed_memory()
    release_library_pages()
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    return resident_bytes()
