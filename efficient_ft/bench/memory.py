"""Measure the memory of one recipe's training steps, counted and in this process, which runs only this recipe."""

from __future__ import annotations

import gc
import statistics
import time
from contextlib import nullcontext
from dataclasses import asdict
from typing import Any

import torch
from torch import nn

from efficient_ft.bench.recipes import Configure, Recipe
from efficient_ft.bench.step import unfused_attention
from efficient_ft.bench.timing import waiter
from efficient_ft.core.process_memory import release_freed_memory, resident_bytes
from efficient_ft.cost import StepMemory, StepSpec, TrainingStep, executed
from efficient_ft.methods.base import Method, apply_methods
from efficient_ft.methods.build import build_methods
from efficient_ft.models import factory
from efficient_ft.task import TASKS
from efficient_ft.training.memory.libraries import libraries, load
from efficient_ft.training.optimizer import build_optimizer


def measure_memory(
    recipe: Recipe,
    configure: Configure,
    *,
    model: str,
    batch_size: int,
    image_size: int | None = None,
    num_classes: int = 100,
    precision: str = "fp32",
    device: torch.device | str = "cpu",
    unfused: bool = False,
    optim: str = "adamw",
    channels_last: bool = True,
    steps: int = 3,
    warmup: int = 2,
) -> dict[str, Any]:
    """Take training steps on random weights and images, and measure the memory of this process.

    Nothing else may have been measured in the process: memory that an allocator kept would hide the growth. The
    compiler of the packing kernels (numba) is loaded before: it is there once, however large the batch.

    Args:
        recipe: the recipe.
        configure: makes configurations.
        model: a model of conf/model or of timm.
        batch_size: images in the batch.
        image_size: pixels of a side; None: the model's own.
        num_classes: of the model.
        precision: ``fp32``, ``bf16`` or ``fp16``, where the recipe sets no other.
        device: where the steps run.
        unfused: attention in parts, without timm's fused kernel.
        optim: an optimizer of conf/optim.
        channels_last: on a CPU, hold convolutional maps in channels-last memory, as runs do.
        steps: measured.
        warmup: steps before these, and after those that the methods profile.

    Returns:
        The record of the recipe, for `memory_report`.

    Raises:
        UserError: a recipe or model that cannot be used.
    """
    size = [] if image_size is None else [f"model.image_size={image_size}"]
    device = torch.device(device)
    config = configure(model, [*size, f"optim={optim}", f"trainer.precision={precision}", *recipe.overrides])
    spec = StepSpec(
        batch_size,
        factory.input_of(config.model).size,
        config.trainer.precision,
        label_smoothing=config.optim.label_smoothing,
        frozen_bn=config.model.frozen_bn,
        grad_clip_norm=config.optim.grad_clip_norm,
        task=TASKS[config.task],
    )

    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        return build_optimizer(model, config.optim, config.trainer.precision)

    def prepare() -> tuple[nn.Module, list[Method]]:
        network, methods = factory.random_model(config.model, num_classes), build_methods(config)
        apply_methods(network, methods)
        if channels_last and device.type == "cpu":
            network.to(memory_format=torch.channels_last)
        return network, methods

    interpreter = settled_bytes()
    with unfused_attention() if unfused else nullcontext():
        step = TrainingStep(*prepare(), spec, device=device, build_optimizer=optimizer)
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
        network, methods = prepare()
        counted = executed(
            network,
            batch_size,
            spec.input_size,
            methods=methods,
            build_optimizer=optimizer,
            precision=spec.precision,
            label_smoothing=spec.label_smoothing,
            frozen_bn=spec.frozen_bn,
            task=spec.task,
        )
    return {
        "methods": [repr(method) for method in methods],
        "optimizer": config.optim.name,
        "trainable_parameters": sum(p.numel() for p in network.parameters() if p.requires_grad),
        "executed": counted.as_dict(),
        "optimizer_bytes": optimizer_bytes,
        "counted_bytes": counted.step_peak_bytes + optimizer_bytes,
        "interpreter_bytes": interpreter,
        "with_model_bytes": with_model,
        "memory": {**asdict(process), "growth_bytes": process.growth_bytes},
        "step_seconds": statistics.median(seconds[warmup:]),
        "seconds": seconds,
    }


def memory_report(
    model: str, batch_size: int, precision: str, unfused: bool, recipes: dict[str, dict[str, Any]]
) -> dict[str, Any]:
    """The report of recipes measured by `measure_memory`, each in its process, for JSON and `tables.report_text`.

    Args:
        model: as the recipes were measured; so are the following.
        batch_size: images in the batch.
        precision: where a recipe sets no other.
        unfused: attention in parts.
        recipes: their records by name; a recipe whose process failed has ``{"failure": REASON}``.
    """
    sources = {record["memory"]["source"] for record in recipes.values() if "memory" in record}
    failed = [f"{name}: {record['failure']}" for name, record in recipes.items() if "failure" in record]
    return {
        "kind": "memory",
        "model": model,
        "batch": batch_size,
        "dtype": precision,
        "attention": "unfused" if unfused else "timm's default",
        "recipes": recipes,
        "notes": [*(f"Peaks of the processes: {source}." for source in sorted(sources)), *failed],
    }


def settled_bytes() -> int:
    """The resident memory of this process, without garbage and without what the allocators keep of freed memory."""
    gc.collect()
    release_freed_memory()
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    return resident_bytes()
