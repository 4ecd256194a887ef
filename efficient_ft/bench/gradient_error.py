"""Measure the gradient errors of low-rank backward passes, on a trained network and real images.

A method is applied to all linear layers of all blocks, as in training, so that errors accumulate from the last block to
the first. The precision is fp32, the loss is cross-entropy, and BatchNorm is frozen. The gradients are compared with
those of plain back-propagation on the same batch. The cost is the number of FLOPs executed in the backward pass of full
fine-tuning, including the projections.

* *relative error* ‖g̃ − g‖ / ‖g‖ and *cosine* of the concatenated gradients of a group. The mean and the range over
  disjoint batches are reported. The groups are ``network`` (weights of all projected layers), each layer type (``qkv``,
  ``proj``, ...), ``rest`` (all other parameters except the head: norms, biases, stem, position embedding),
  ``activations`` (gradients at the inputs of the blocks) and ``first block`` (the gradient that reaches the stem).
* ``pooled``: relative error and cosine of the gradient summed over all images.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from timm.optim import create_optimizer_v2
from torch import nn
from torchvision.datasets import ImageFolder

from efficient_ft.bench.gradients import (
    Batch,
    Gradients,
    error_and_cosine,
    image_folder,
    shuffled_batches,
    step_gradients,
)
from efficient_ft.bench.projections import METHODS, Candidate, candidates, headroom
from efficient_ft.config import ModelConfig
from efficient_ft.core.errors import UserError
from efficient_ft.core.files import write_text_atomically
from efficient_ft.core.parsing import parse_json
from efficient_ft.core.sheet import Cell
from efficient_ft.cost import executed
from efficient_ft.methods import LBPWHT
from efficient_ft.models.factory import create_model
from efficient_ft.models.frozen_batch_norm import freeze_batch_norm
from efficient_ft.models.view import view
from efficient_ft.record.environment import environment

#: States of the network: the trained network, and three points during fine-tuning.
STATES = ("trained", "start", "middle", "end")


@dataclass(frozen=True)
class Study:
    """Settings of a study. The help text of the command describes the settings.

    Images are read from FOLDER/CLASS/*, and classes are sorted by name. If `finetune` is a folder, gradients are also
    measured during fine-tuning. The network is trained on FINETUNE/train, and gradients are measured on FINETUNE/test.
    """

    weights: Path
    images: Path
    model: str = "vit_micro"
    orders: Sequence[int] = (4, 6)
    batch: int = 64
    batches: int = 4
    profile_batches: int = 4
    headroom: bool = False
    finetune: Path | None = None
    finetune_steps: int = 200
    finetune_batch: int = 16
    finetune_lr: float = 3e-4
    finetune_batches: int = 2
    seed: int = 0


def groups(model: nn.Module) -> dict[str, list[str]]:
    """Return the keys of the gradients from `step_gradients` that belong to each group.

    The groups are described at the top of this module.
    """
    of_model = view(model)
    layers = [layer.name for layer in of_model.layers if layer.tokens is not None]
    weights = [f"{name}.weight" for name in layers]
    kinds: dict[str, list[str]] = {}
    for name in layers:
        kinds.setdefault(name.rpartition(".")[2], []).append(f"{name}.weight")
    others = (n for n, _ in model.named_parameters() if n not in weights)
    rest = [n for n in others if not n.startswith(tuple(f"{h}." for h in of_model.head))]
    inputs = [f"input:{name}" for name in of_model.blocks]
    return {"network": weights, **kinds, "rest": rest, "activations": inputs, "first block": inputs[:1]}


def measure(model: nn.Module, compared: Sequence[Candidate], batches: Iterable[Batch]) -> dict[str, Any]:
    """Compute the gradient errors of the candidates on each batch, and store them in the candidates' `scores`.

    Returns:
        A dict with ``top1`` (accuracy of the plain network) and ``full_rank`` (relative error of LBP-WHT if all bases
        are used). If ``full_rank`` is zero up to rounding errors, the projection is the only source of errors.
    """
    members, blocks = groups(model), view(model).blocks
    accuracies: list[float] = []
    total: Gradients = {}
    full_rank = None
    for batch in batches:
        accuracy, exact = step_gradients(model, batch, inputs=blocks)
        accuracies.append(accuracy)
        total = _sum(total, exact)
        for candidate in compared:
            approximate = step_gradients(candidate.model, batch, inputs=blocks).gradients
            for group, keys in members.items():
                candidate.scores.setdefault(group, []).append(error_and_cosine(exact, approximate, keys))
            candidate.total = _sum(candidate.total, approximate)
        if full_rank is None:
            all_bases = copy.deepcopy(model)
            LBPWHT(order=15, as_published=True).apply(all_bases)  # layers are projected even if projection costs more
            approximate = step_gradients(all_bases, batch).gradients
            full_rank = error_and_cosine(exact, approximate, members["network"])[0]
    pooled = {g: k for g, k in members.items() if not k[0].startswith("input:")}
    for candidate in compared:
        for group, keys in pooled.items():
            candidate.scores[f"pooled {group}"] = [error_and_cosine(total, candidate.total, keys)]
    return {"top1": float(np.mean(accuracies)), "full_rank": full_rank}


def _sum(total: Gradients, one: Gradients) -> Gradients:
    return {n: g + total[n] if total else g for n, g in one.items() if not n.startswith("input:")}


def records(
    model: nn.Module, compared: Sequence[Candidate], about: dict[str, Any], size: tuple[int, int], batch: int
) -> list[dict[str, Any]]:
    """Return a record for each candidate, with the executed FLOPs of its backward pass and the exact backward pass."""
    plain = executed(model, batch, size).backward_flops
    made = []
    for c in compared:
        if c.flops is None:
            c.flops = executed(c.model, batch, size, methods=[c.method]).backward_flops
        record: dict[str, Any] = {"method": c.name, "order": c.order, "rank": c.rank}
        record.update(backward_mflops=round(c.flops / 1e6, 2), exact_mflops=round(plain / 1e6, 2))
        for group, scores in c.scores.items():
            where, name = ("pooled", group.removeprefix("pooled ")) if group.startswith("pooled ") else ("batch", group)
            record.setdefault(where, {})[name] = {
                title: _summary([s[k] for s in scores]) for k, title in enumerate(("error", "cosine"))
            }
        made.append({**about, **record})
    return made


def _summary(values: Sequence[float]) -> dict[str, float]:
    return {"mean": round(float(np.mean(values)), 5), "min": round(min(values), 5), "max": round(max(values), 5)}


def train(model: nn.Module, batches: Iterable[Batch], done: int, steps: int, optimizer: torch.optim.Optimizer) -> None:
    """Fine-tune all parameters on `batches` with exact gradients.

    The learning rate increases in the first 10 % of the steps and then follows a cosine schedule. `done` is the number
    of earlier steps, and `steps` is the total number of steps.
    """
    model.train()
    freeze_batch_norm(model)
    base = optimizer.defaults["lr"]
    for step, (images, labels) in enumerate(batches, start=done):
        warm = (step + 1) / max(1, steps // 10)
        for group in optimizer.param_groups:
            group["lr"] = base * min(warm, 0.5 * (1 + math.cos(math.pi * step / steps)))
        optimizer.zero_grad(set_to_none=True)
        F.cross_entropy(model(images), labels, label_smoothing=0.1).backward()
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def run_study(study: Study, size: int, say: Callable[[str], None] = lambda text: None) -> list[dict[str, Any]]:
    """Measure the gradient errors of the trained network and of three states during fine-tuning, at one image size.

    Raises:
        UserError: If weights or images are missing, or there are too few images.
    """
    config = ModelConfig(name=study.model, weights=str(study.weights), image_size=size)
    images = image_folder(study.images, config)
    model = create_model(config, len(images.classes))
    grid = next(layer.tokens.grid for layer in view(model, (size, size)).layers if layer.tokens is not None)
    made: list[dict[str, Any]] = []

    def measure_state(
        name: str, model: nn.Module, held_out: ImageFolder, count: int, compared: list[Candidate], **more: Any
    ) -> None:
        say(f"{size} px, {name}: measuring {len(compared)} recipes on {count} batches")
        about = {"state": name, "grid": list(grid), "image_size": size, **more}
        about.update(measure(model, compared, shuffled_batches(held_out, study.batch, count, 0, study.seed)))
        if len(next(iter(compared)).scores["network"]) < count:
            raise UserError(
                f"The folder {held_out.root} has too few images for {count} batches of {study.batch} images."
            )
        made.extend(records(model, compared, about, (size, size), study.batch))

    profiling = list(shuffled_batches(images, study.batch, study.profile_batches, study.batches, study.seed))
    if len(profiling) < study.profile_batches:
        raise UserError(
            f"The folder {study.images} has {len(images)} images, but {study.batches} + {study.profile_batches} batches"
            f" of {study.batch} images are required. Pass a smaller --batches, --profile-batches or --batch."
        )
    compared = candidates(model, study.orders, profiling)
    if study.headroom:
        compared += headroom(model, study.orders, profiling)
    measure_state("trained", model, images, study.batches, compared)
    if study.finetune is None:
        return made

    training, held_out = (image_folder(study.finetune / part, config) for part in ("train", "test"))
    torch.manual_seed(study.seed)  # the seed determines the weights of the new head
    model = create_model(config, len(training.classes))
    for name in view(model).head:  # new heads often have zero weights, which block all gradients
        nn.init.trunc_normal_(model.get_parameter(f"{name}.weight"), std=0.02)
    optimizer = create_optimizer_v2(model, "adamw", lr=study.finetune_lr, weight_decay=1e-5)
    steps, half = study.finetune_steps, study.finetune_steps // 2
    profiling = list(shuffled_batches(training, study.batch, study.profile_batches, 0, study.seed))
    compared, done = [], 0
    for name, until in zip(STATES[1:], (0, half, steps), strict=True):
        if until > done:
            batches = shuffled_batches(training, study.finetune_batch, until - done, done, study.seed)
            train(model, batches, done, steps, optimizer)
        done = until
        compared = candidates(model, study.orders, profiling, compared)
        measure_state(name, model, held_out, study.finetune_batches, compared, step=done)
    return made


def read_records(file: Path) -> dict[str, Any]:
    """Return the records that `save` wrote. If the file does not exist, the result contains no records.

    Raises:
        UserError: If the file cannot be read, or was not written by `save`.
    """
    if not file.exists():
        return {"runs": {}, "results": []}
    try:
        before: dict[str, Any] = parse_json(file.read_text(encoding="utf-8"))
        sorted(before["runs"], key=int)
        sorted((STATES.index(r["state"]), r["image_size"], r["order"]) for r in before["results"])
        dict(before["runs"])
    except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else "it contains other data"
        raise UserError(
            f"The file {file} cannot be extended: {reason}. Rename the file, or pass another file."
        ) from error
    return before


def save(file: Path, study: Study, results: list[dict[str, Any]]) -> None:
    """Write the records of the measured image sizes, one per line. Records of other image sizes are kept."""
    sizes = {r["image_size"] for r in results}
    settings = {k: v.name if isinstance(v, Path) else v for k, v in asdict(study).items()}
    here = {**environment(packages=("torch", "timm", "numpy")), "precision": "fp32"}
    runs = {str(size): {"settings": settings, "environment": here} for size in sizes}
    before = read_records(file)
    runs = {**before["runs"], **runs}
    results = [r for r in before["results"] if r["image_size"] not in sizes] + results
    results = sorted(results, key=lambda r: (STATES.index(r["state"]), r["image_size"], r["order"]))
    lines = ",\n".join(json.dumps(r, ensure_ascii=False) for r in results)
    about = json.dumps({k: runs[k] for k in sorted(runs, key=int)}, indent=1, ensure_ascii=False)
    write_text_atomically(file, f'{{"runs": {about},\n"results": [\n{lines}\n]}}\n')


def network_rows(results: Sequence[dict[str, Any]], state: str = "trained") -> tuple[list[str], list[list[Cell]]]:
    """Return a table with the relative error (and cosine) of the whole network's gradient in one state.

    The table has a row for each grid and order, and a column for each method. A star marks the smallest error in a row.
    """
    chosen = [r for r in results if r["state"] == state]
    names = list(dict.fromkeys(r["method"] for r in chosen))
    rows: list[list[Cell]] = []
    for grid, order in dict.fromkeys((tuple(r["grid"]), r["order"]) for r in chosen):
        line = {r["method"]: r for r in chosen if tuple(r["grid"]) == grid and r["order"] == order}
        best = min(r["batch"]["network"]["error"]["mean"] for r in line.values() if r["method"] in METHODS)
        cells: list[Cell] = ["–"] * len(names)
        for name, record in line.items():
            error, cosine = (record["batch"]["network"][kind]["mean"] for kind in ("error", "cosine"))
            cells[names.index(name)] = f"{error:.3f} ({cosine:.3f}){'*' if error == best else ''}"
        costs = sorted({round(r["backward_mflops"]) for r in line.values()})
        cost = f"{costs[0]}–{costs[-1]}" if costs[1:] else f"{costs[0]}"
        exact = round(next(iter(line.values()))["exact_mflops"])
        rows.append([f"{grid[0]}×{grid[1]}, LP-{order}", *cells, f"{cost} ({exact})"])
    return ["grid, cost of", *names, "backward MFLOPs (exact)"], rows


def group_rows(results: Sequence[dict[str, Any]], state: str = "trained") -> tuple[list[str], list[list[Cell]]]:
    """Return a table with the relative errors in one state. The table has a column for each group of gradients."""
    chosen = [r for r in results if r["state"] == state]
    names = list(chosen[0]["batch"])
    rows: list[list[Cell]] = []
    for r in chosen:
        errors = [f"{r['batch'][n]['error']['mean']:.3f}" for n in names]
        rows.append([f"{r['grid'][0]}×{r['grid'][1]}, LP-{r['order']}", r["method"], *errors])
    return ["grid, cost of", "method", *names], rows
