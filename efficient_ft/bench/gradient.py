"""Compare the gradients of recipes with the exact gradients of the same network and batch, and count saved bytes.

The comparison covers the trained parameters of the blocks, together and by layer name (``qkv``, ``fc1``).
"""

from __future__ import annotations

import copy
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from efficient_ft.bench.gradients import (
    Batch,
    Gradients,
    error_and_cosine,
    image_folder,
    shuffled_batches,
    step_gradients,
)
from efficient_ft.bench.recipes import Configure, Network, Recipe
from efficient_ft.config import Config, ModelConfig
from efficient_ft.core.errors import UserError
from efficient_ft.cost import executed
from efficient_ft.cost.step import StepMethods
from efficient_ft.methods.base import apply_methods
from efficient_ft.methods.build import build_methods
from efficient_ft.models import factory
from efficient_ft.models.view import view
from efficient_ft.task import moved


@dataclass
class _Candidate:
    """Network to which the methods of a recipe are applied."""

    model: nn.Module
    methods: list[Any]
    precision: str
    steps: int = 0  # number of steps taken so far

    def step_gradients(self, batch: Batch, seed: int) -> Gradients:
        step, self.steps = self.steps, self.steps + 1
        return step_gradients(
            self.model, batch, methods=self.methods, step=step, precision=self.precision, seed=seed + step
        ).gradients


def measure_gradients(
    recipes: Sequence[Recipe],
    configure: Configure,
    network: Network,
    *,
    weights: str | None = None,
    images: Path | None = None,
    batches: int = 8,
    seed: int = 0,
) -> dict[str, Any]:
    """Compare the gradients of recipes with the exact gradients.

    The weights of the network are read from the file `weights`, which uses the parameter names of timm. If `weights` is
    None, the weights are random. The batches contain images from the class folders in `images`, or noise if `images` is
    None.

    Returns:
        A JSON-serializable report, which `tables.report_text` formats.

    Raises:
        UserError: If there are too few images, or a recipe trains no parameter of the blocks.
    """
    overrides = network.overrides + ([] if weights is None else [f"model.weights='{weights}'"])
    configs = {recipe.name: configure(network.model, [*overrides, *recipe.overrides]) for recipe in recipes}
    config = next(iter(configs.values())).model
    size = factory.input_of(config).image_size
    measured, classes = _batches(network, images, config, batches, seed)
    plain = _plain_network(config, classes, weights is None, seed, network.device)
    of_plain = view(plain)
    between = (name for extras in of_plain.stage_extras for name in extras)
    inside = tuple(f"{name}." for name in (*of_plain.blocks, *between))  # prefixes of the names of compared parameters
    candidates: dict[str, _Candidate] = {}
    result: dict[str, dict[str, Any]] = {}
    for name, of_recipe in configs.items():
        candidate = _Candidate(copy.deepcopy(plain), build_methods(of_recipe), str(of_recipe.trainer.precision))
        apply_methods(candidate.model, candidate.methods)
        result[name] = _record(candidate, of_recipe, network.batch_size, size, weights)
        for step in range(StepMethods(candidate.methods).warmup_steps):
            candidate.step_gradients(measured[step % batches], seed)
        candidates[name] = candidate

    scores: dict[str, dict[str, list[tuple[float, float]]]] = {name: {} for name in candidates}
    for step, batch in enumerate(measured):
        exact = step_gradients(plain, batch, seed=seed + step).gradients
        for name, candidate in candidates.items():
            found = candidate.step_gradients(batch, seed)
            keys = [key for key in found if key.startswith(inside) and key in exact]
            kinds: dict[str, list[str]] = {"blocks": keys}
            for key in keys:
                kinds.setdefault(key.split(".")[-2], []).append(key)
            for kind, members in kinds.items():
                if any(exact[key].any() for key in members):
                    scores[name].setdefault(kind, []).append(error_and_cosine(exact, found, members))
    for name, by_kind in scores.items():
        if "blocks" not in by_kind:
            raise UserError(f"Recipe {name} cannot be compared, because no parameter of the blocks has a gradient.")
        result[name].update(_statistics(by_kind))
    return {
        "kind": "gradient",
        "model": network.model,
        "weights": "random" if weights is None else Path(weights).name,
        "images": "noise" if images is None else "/".join(images.resolve().parts[-2:]),
        "size": list(size),
        "batch": network.batch_size,
        "batches": batches,
        "seed": seed,
        "recipes": result,
    }


def _batches(
    network: Network, images: Path | None, config: ModelConfig, count: int, seed: int
) -> tuple[list[Batch], int]:
    classes = network.num_classes
    if images is not None:
        folder = image_folder(images, config)
        batches = list(shuffled_batches(folder, network.batch_size, count, 0, seed))
        if len(batches) < count:
            raise UserError(
                f"--images: the folder {images} has {len(folder)} images, but {count} batches of {network.batch_size}"
                " images are required. Pass a smaller --batches or --batch."
            )
        classes = len(folder.classes)
    else:
        generator = torch.Generator().manual_seed(seed)
        size = factory.input_of(config).image_size
        batches = []
        for _ in range(count):
            noise = torch.randn(network.batch_size, 3, *size, generator=generator)
            batches.append((noise, torch.randint(classes, (network.batch_size,), generator=generator)))
    return [(moved(x, network.device), y.to(network.device)) for x, y in batches], classes


def _plain_network(
    config: ModelConfig, classes: int, random_weights: bool, seed: int, device: torch.device | str
) -> nn.Module:
    """Return the network. A random network gets nonzero head weights, so that the head does not block gradients."""
    torch.manual_seed(seed)
    plain = (factory.random_model if random_weights else factory.create_model)(config, classes)
    plain.to(device)
    for name in view(plain).head if random_weights else ():
        weight = getattr(plain.get_submodule(name), "weight", None)
        if weight is not None:
            nn.init.trunc_normal_(weight, std=0.02)
    return plain


def _record(
    candidate: _Candidate, config: Config, batch_size: int, size: tuple[int, int], weights: str | None
) -> dict[str, Any]:
    settings = config.model_dump(mode="json", include={"model", "method", "trainer"})
    if weights is not None:
        settings["model"]["weights"] = Path(weights).name
    counted = executed(candidate.model, batch_size, size, methods=candidate.methods, precision=candidate.precision)
    return {
        "configuration": settings,
        "methods": [repr(m) for m in candidate.methods],
        "trainable_parameters": sum(p.numel() for p in candidate.model.parameters() if p.requires_grad),
        "executed": counted.as_dict(),
    }


def _statistics(by_kind: Mapping[str, Sequence[tuple[float, float]]]) -> dict[str, Any]:
    """Return the mean and range of the error and the cosine over the batches, for each kind of layer.

    The entry "blocks" also contains the value of each batch.
    """
    found: dict[str, Any] = {}
    for column, title in enumerate(("error", "cosine")):
        values = {kind: [round(pair[column], 6) for pair in pairs] for kind, pairs in by_kind.items()}
        found[title] = {
            kind: {"mean": round(statistics.fmean(v), 6), "min": min(v), "max": max(v)}
            | ({"batches": v} if kind == "blocks" else {})
            for kind, v in values.items()
        }
    return found
