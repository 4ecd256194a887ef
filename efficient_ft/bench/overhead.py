"""Measure the overhead of each recipe per operation, on a network whose arithmetic takes almost no time."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from efficient_ft.bench.recipes import Configure, Recipe
from efficient_ft.bench.step import build_step
from efficient_ft.bench.timing import alternate, summary, waiter
from efficient_ft.cost import TrainingStep
from efficient_ft.models import factory

#: Network of the benchmark: a ViT with 12 blocks, width 48 and 5 tokens (a class token and a grid of 2×2 tokens).
NETWORK = (
    "vit_tiny_patch16_224",
    (
        *("model.image_size=16", "model.select=all"),
        *("+model.kwargs.patch_size=8", "+model.kwargs.embed_dim=48"),
        *("+model.kwargs.depth=12", "+model.kwargs.num_heads=3"),
    ),
)
TITLE = "ViT with 12 blocks, width 48, 5 tokens"
#: Recipes that are measured by default. Order 1 keeps one of four components, so that layers are projected.
RECIPES = (
    "full",
    "low_bit",
    "mesa",
    "back_razor",
    "compact",
    "checkpointing",
    "lbp_wht:order=1",
    "lbp_dct:order=1",
    "lora",
)
_CLASSES = 10


def measure_overhead(
    recipes: Sequence[Recipe],
    configure: Configure,
    *,
    batch_size: int = 1,
    precision: str = "fp32",
    device: torch.device | str = "cpu",
    rounds: int = 50,
    warmup: int = 5,
) -> dict[str, Any]:
    """Time the forward and the backward pass of `NETWORK` for each recipe. The first recipe is the baseline.

    The tensors are so small that the time consists of the overhead of operations: Python, dispatch and autograd. The
    Python function calls of one forward and backward pass are also counted. The recipes alternate in one process. The
    result is a JSON-serializable report, which `tables.report_text` formats.

    Raises:
        UserError: If a recipe cannot be used.
    """
    name, settings = NETWORK
    calls: dict[str, Callable[[], dict[str, float]]] = {}
    counts: dict[str, int] = {}
    for recipe in recipes:
        config = configure(name, [*settings, f"trainer.precision={precision}", *recipe.overrides])
        network = factory.random_model(config.model, _CLASSES)
        step = build_step(config, network, device, batch_size, channels_last=False)
        for _ in range(step.methods.warmup_steps + 2):
            step()
        counts[recipe.name] = _python_calls(step)
        calls[recipe.name] = _timed(step)
    names = [recipe.name for recipe in recipes]
    measured = summary(alternate(calls, rounds, warmup), names[0])
    return {
        "kind": "overhead",
        "model": TITLE,
        "batch": batch_size,
        "dtype": precision,
        "baseline": names[0],
        "recipes": {name: {"python_calls": counts[name], "measured": measured[name]} for name in names},
    }


def _timed(step: TrainingStep) -> Callable[[], dict[str, float]]:
    """Return a function that runs a training step and returns the times of its forward and backward pass."""
    wait = waiter(step.device)

    def call() -> dict[str, float]:
        wait()
        start = time.perf_counter()
        step.forward()
        wait()
        middle = time.perf_counter()
        step.backward()
        wait()
        end = time.perf_counter()
        step.update()
        return {"forward": middle - start, "backward": end - middle, "both": end - start}

    return call


def _python_calls(step: TrainingStep) -> int:
    """Return the number of Python functions that one forward and backward pass calls in this thread."""
    count = 0

    def see(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event == "call"

    before = sys.getprofile()
    sys.setprofile(see)
    try:
        step.forward()
        step.backward()
    finally:
        sys.setprofile(before)
    step.update()
    return count
