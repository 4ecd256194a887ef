"""How close low-rank backward passes come to the exact gradient, on a trained network and real images.

    python scripts/gradient_error.py --weights vit_micro.safetensors --images tinyimagenet100/val \
        --finetune cifar10 --headroom --json benchmarks/gradient_error.json

Every method is applied as in training: all linear layers of all blocks at once, so that errors accumulate from the
last block to the first; fp32, cross-entropy, BatchNorm frozen. Its gradients are held against those of plain
back-propagation on the same batch, and its cost is the executed FLOPs of the whole backward pass of full fine-tuning,
projections included.

* *relative error* ‖g̃ − g‖ / ‖g‖ and *cosine*, of all weights of a group concatenated: the mean over disjoint batches,
  and the range. Groups: ``network`` (the weights of all projected layers), each layer type (``qkv``, ``proj``, ...),
  ``rest`` (all other parameters but the head's: norms, biases, stem, position embedding), and ``activations`` (the
  gradients that reach the inputs of the blocks, concatenated) with ``first block`` (what reaches the stem).
* ``pooled``: the same for the gradient of all images at once.

Takes about 15 minutes of two quiet cores for 28, 32 and 56 pixels with ``--finetune`` and ``--headroom``. With
``--json`` the rows of other image sizes that the file has already are kept: sizes can be measured one by one.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import platform
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
import torch.nn.functional as F
from timm.optim import create_optimizer_v2
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset
from torchvision.datasets import ImageFolder

from efficient_ft.config import ModelConfig
from efficient_ft.core.errors import UserError
from efficient_ft.cost import executed
from efficient_ft.data import Transform, read_image
from efficient_ft.data.images import is_image
from efficient_ft.methods import LBPDCT, LBPWHT
from efficient_ft.methods.backprop.low_rank import LowRankBackward, LowRankConv2d, LowRankLinear
from efficient_ft.models.factory import create_model, input_of
from efficient_ft.models.frozen_batch_norm import freeze_batch_norm
from efficient_ft.models.view import view
from efficient_ft.ops.projection import Grid, Projection, Tile, dct_rows

Batch = tuple[Tensor, Tensor]
Gradients = dict[str, Tensor]

#: The methods compared, as users make them; arguments: order, batches that LHE profiles.
METHODS: dict[str, Callable[[int, int], LowRankBackward]] = {
    "WHT reflect": lambda order, _: LBPWHT(order=order, padding="reflect"),
    "WHT zero": lambda order, _: LBPWHT(order=order, padding="zero"),
    "WHT ortho": lambda order, _: LBPWHT(order=order),
    "LHE": lambda order, batches: LBPWHT(bases="lhe", order=order, profile_steps=batches),
    "DCT": lambda order, _: LBPDCT(order=order),
}

#: What a basis made for each layer from its own gradients would reach, no method of the package.
HEADROOM = ("DCT by energy", "PCA of g_y", "PCA of x and g_y")

STATES = ("trained", "start", "middle", "end")


# ---------------------------------------------------------------------------------------------- gradients
def gradients(model: nn.Module, batch: Batch, blocks: Sequence[str] = ()) -> tuple[float, Gradients]:
    """Accuracy on the batch, and the gradient of every parameter and (as ``input:NAME``) at the input of `blocks`."""
    found: Gradients = {}

    def watch(name: str) -> Any:
        def before(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            if args[0].requires_grad:
                args[0].register_hook(lambda g: found.__setitem__(f"input:{name}", g.detach()))

        return model.get_submodule(name).register_forward_pre_hook(before)

    watches = [watch(name) for name in blocks]
    model.train()
    freeze_batch_norm(model)
    model.zero_grad(set_to_none=True)
    try:
        logits = model(batch[0])
        F.cross_entropy(logits, batch[1]).backward()
    finally:
        for handle in watches:
            handle.remove()
    found.update({n: p.grad.detach() for n, p in model.named_parameters() if p.grad is not None})
    model.zero_grad(set_to_none=True)
    return (logits.argmax(1) == batch[1]).float().mean().item(), found


def groups(model: nn.Module) -> dict[str, list[str]]:
    """Keys of `gradients` by group; see the module's docstring."""
    seen = view(model)
    layers = [layer.name for layer in seen.layers if layer.tokens is not None]
    weights = [f"{name}.weight" for name in layers]
    kinds: dict[str, list[str]] = {}
    for name in layers:
        kinds.setdefault(name.rpartition(".")[2], []).append(f"{name}.weight")
    others = (n for n, _ in model.named_parameters() if n not in weights)
    rest = [n for n in others if not n.startswith(tuple(f"{h}." for h in seen.head))]
    inputs = [f"input:{name}" for name in seen.blocks]
    return {"network": weights, **kinds, "rest": rest, "activations": inputs, "first block": inputs[:1]}


def compare(exact: Gradients, approximate: Gradients, keys: Iterable[str]) -> tuple[float, float]:
    """(relative error, cosine) of the concatenation of `keys`."""
    dot = square = own = error = 0.0
    for key in keys:
        if key not in exact:  # no gradient reaches it
            continue
        g, a = exact[key].double(), approximate[key].double()
        dot += (g * a).sum().item()
        square += g.square().sum().item()
        own += a.square().sum().item()
        error += (a - g).square().sum().item()
    if not square:
        raise UserError("The exact gradient is zero: is the network's loss zero on these images?")
    return math.sqrt(error / square), dot / math.sqrt(square * own) if own else 0.0


# ---------------------------------------------------------------------------------------------- candidates
@dataclass
class Candidate:
    """A network with a method applied, and what was measured of it."""

    name: str
    order: int
    model: nn.Module
    method: LowRankBackward
    flops: float | None = None  # of the whole backward pass, executed, per image
    scores: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    total: Gradients = field(default_factory=dict)

    @property
    def rank(self) -> int:
        """Coefficients kept per channel, prefix tokens included."""
        return max(_rank(layer) for layer in _changed(self.model).values())


def _changed(model: nn.Module) -> dict[str, LowRankLinear | LowRankConv2d]:
    return {n: m for n, m in model.named_modules() if isinstance(m, LowRankLinear | LowRankConv2d)}


def _rank(layer: LowRankLinear | LowRankConv2d) -> int:
    how, (c_out, c_in) = layer.low_rank, layer.weight.shape[:2]
    assert how.projector is not None  # nothing profiles any more
    return how.projector.projection(how.tokens.grid, how.tokens.prefix, (c_in, c_out)).rank


def candidates(
    model: nn.Module, orders: Sequence[int], profiling: Sequence[Batch], earlier: Sequence[Candidate] = ()
) -> list[Candidate]:
    """Copies of `model` with each method at each order; LHE profiles, or keeps the choice it made in `earlier`."""
    made = []
    for order in orders:
        for name, create in METHODS.items():
            method, changed, flops = create(order, len(profiling)), copy.deepcopy(model), None
            method.apply(changed)
            before = next((c for c in earlier if (c.name, c.order) == (name, order)), None)
            if before is not None:
                method.load_state_dict(before.method.state_dict())
                flops = before.flops
            elif method.warmup_steps:
                for step, batch in enumerate(profiling):
                    method.step_begin(step)
                    gradients(changed, batch)
                    method.step_end()
            made.append(Candidate(name, order, changed, method, flops))
    return made


@dataclass(frozen=True, eq=False)
class OwnBasis:
    """A projector with given orthonormal rows (R, L) over the grid."""

    rows: np.ndarray

    def projection(self, grid: Grid, prefix: int, channels: tuple[int, int]) -> Projection:
        return Projection.from_tiles([Tile(np.arange(grid[0] * grid[1]), self.rows, self.rows)], grid, prefix)


def headroom(model: nn.Module, orders: Sequence[int], profiling: Sequence[Batch]) -> list[Candidate]:
    """Copies of `model` whose layers have bases of their own, made from their inputs and gradients, at DCT's rank."""
    moments = {name: [0.0 * np.eye(1)] * 2 for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    layouts = {layer.name: layer.tokens for layer in view(model).layers if layer.tokens is not None}
    watches = []

    def add(name: str, which: int, values: Tensor) -> None:
        on_grid = values.detach()[:, layouts[name].prefix :]  # B, L, C
        moments[name][which] = moments[name][which] + torch.einsum("blc,bmc->lm", on_grid, on_grid).double().numpy()

    def watch(name: str) -> Any:
        def after(module: nn.Module, args: tuple[Tensor, ...], y: Tensor) -> None:
            add(name, 0, args[0])
            y.register_hook(lambda g: add(name, 1, g))

        return model.get_submodule(name).register_forward_hook(after)

    for name, tokens in layouts.items():
        if tokens.form != "tokens" or name not in moments:
            raise UserError(f"--headroom works on linear layers over (B, tokens, C), not on {name}.")
        watches.append(watch(name))
    try:
        for batch in profiling:
            gradients(model, batch)
    finally:
        for handle in watches:
            handle.remove()

    made = []
    for order in orders:
        for kind in HEADROOM:
            method, changed = LBPDCT(order=order), copy.deepcopy(model)
            method.apply(changed)
            for name, layer in _changed(changed).items():
                if not np.trace(moments[name][1]):
                    continue  # no gradient comes over the grid: the last block, where the class token is the output
                grid, rank = layer.low_rank.tokens.grid, _rank(layer) - layer.low_rank.tokens.prefix
                of_x, of_g = (m / np.trace(m) for m in moments[name])
                if kind == "DCT by energy":
                    rows = dct_rows(grid, grid[0] * grid[1])
                    rows = rows[np.sort(np.argsort(-np.einsum("rl,lm,rm->r", rows, of_g, rows), kind="stable")[:rank])]
                else:
                    rows = np.linalg.eigh(of_g if kind == "PCA of g_y" else of_x + of_g)[1][:, ::-1].T[:rank]
                layer.low_rank.projector = OwnBasis(rows)
            made.append(Candidate(kind, order, changed, method))
    return made


# ---------------------------------------------------------------------------------------------- measuring
def measure(model: nn.Module, compared: Sequence[Candidate], batches: Iterable[Batch]) -> dict[str, Any]:
    """Fill in the candidates' scores, batch by batch; returns the plain network's accuracy and full-rank error.

    ``full_rank`` is the relative error with all bases (ortho), which must vanish but for rounding: it tells that
    what is measured is the projection and nothing else.
    """
    members, blocks = groups(model), view(model).blocks
    accuracies: list[float] = []
    total: Gradients = {}
    full_rank = None
    for batch in batches:
        accuracy, exact = gradients(model, batch, blocks)
        accuracies.append(accuracy)
        total = _sum(total, exact)
        for candidate in compared:
            # the weights of a state are the plain network's: copies are made once, when the state is reached
            _, approximate = gradients(candidate.model, batch, blocks)
            for group, keys in members.items():
                candidate.scores.setdefault(group, []).append(compare(exact, approximate, keys))
            candidate.total = _sum(candidate.total, approximate)
        if full_rank is None:
            all_bases = copy.deepcopy(model)
            LBPWHT(order=15, as_published=True).apply(all_bases)  # projected although exact is cheaper
            full_rank = compare(exact, gradients(all_bases, batch)[1], members["network"])[0]
    pooled = {g: k for g, k in members.items() if not k[0].startswith("input:")}
    for candidate in compared:
        candidate.scores.update({f"pooled {g}": [compare(total, candidate.total, k)] for g, k in pooled.items()})
    return {"top1": float(np.mean(accuracies)), "full_rank": full_rank}


def _sum(total: Gradients, one: Gradients) -> Gradients:
    return {n: g + total[n] if total else g for n, g in one.items() if not n.startswith("input:")}


def rows(
    model: nn.Module, compared: Sequence[Candidate], about: dict[str, Any], size: tuple[int, int], batch: int
) -> list[dict[str, Any]]:
    """One record for each candidate, with the executed backward FLOPs beside the exact pass's."""
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


# ---------------------------------------------------------------------------------------------- images
def image_folder(folder: Path, config: ModelConfig) -> ImageFolder:
    """Class folders (sorted) of images, as the network takes them."""
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder.")
    try:
        return ImageFolder(str(folder), Transform(input_of(config)), loader=read_image, is_valid_file=is_image)
    except FileNotFoundError as error:
        raise UserError(f"{folder}: expected is FOLDER/CLASS/*.jpg ({error}).") from error


def drawn(images: ImageFolder, batch: int, count: int, skip: int, seed: int) -> Iterator[Batch]:
    """`count` disjoint batches in the order of a seeded shuffle, after `skip` of them; fewer if the images run out."""
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed)).tolist()
    chosen = order[skip * batch : (skip + count) * batch]
    return iter(DataLoader(Subset(images, chosen), batch, drop_last=True))


def train(model: nn.Module, batches: Iterable[Batch], done: int, steps: int, optimizer: torch.optim.Optimizer) -> None:
    """Exact full fine-tuning on `batches`, from step `done` of `steps` in all; cosine after a tenth of warm-up."""
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


# ---------------------------------------------------------------------------------------------- the study
def study(args: argparse.Namespace, size: int) -> list[dict[str, Any]]:
    """All records of one image size: the trained network, and the start, middle and end of fine-tuning it."""
    config = ModelConfig(name=args.model, weights=str(args.weights), image_size=size)
    images = image_folder(args.images, config)
    model = create_model(config, len(images.classes))
    grid = next(layer.tokens.grid for layer in view(model, (size, size)).layers if layer.tokens is not None)
    made: list[dict[str, Any]] = []

    def state(
        name: str, model: nn.Module, held_out: ImageFolder, count: int, compared: list[Candidate], **more: Any
    ) -> None:
        _say(f"{size} px, {name}: {len(compared)} recipes on {count} batches")
        about = {"state": name, "grid": list(grid), "image_size": size, **more}
        about.update(measure(model, compared, drawn(held_out, args.batch, count, 0, args.seed)))
        if len(next(iter(compared)).scores["network"]) < count:
            raise UserError(f"{held_out.root} has too few images for {count} batches of {args.batch}.")
        made.extend(rows(model, compared, about, (size, size), args.batch))

    profiling = list(drawn(images, args.batch, args.profile_batches, args.batches, args.seed))
    if len(profiling) < args.profile_batches:
        raise UserError(
            f"{args.images} has {len(images)} images; {args.batches} + {args.profile_batches} batches of {args.batch}"
            " are wanted: give fewer (--batches, --profile-batches, --batch)."
        )
    compared = candidates(model, args.orders, profiling)
    if args.headroom:
        compared += headroom(model, args.orders, profiling)
    state("trained", model, images, args.batches, compared)
    if args.finetune is None:
        return made

    training, held_out = (image_folder(args.finetune / part, config) for part in ("train", "test"))
    torch.manual_seed(args.seed)  # the new head
    model = create_model(config, len(training.classes))
    for name in view(model).head:  # often zero in a new network: no gradient would pass it at the start
        nn.init.trunc_normal_(model.get_parameter(f"{name}.weight"), std=0.02)
    optimizer = create_optimizer_v2(model, "adamw", lr=args.finetune_lr, weight_decay=1e-5)
    steps, half = args.finetune_steps, args.finetune_steps // 2
    profiling = list(drawn(training, args.batch, args.profile_batches, 0, args.seed))
    compared, done = [], 0
    for name, until in zip(STATES[1:], (0, half, steps), strict=True):
        train(
            model,
            drawn(training, args.finetune_batch, until - done, done, args.seed) if until > done else (),
            done,
            steps,
            optimizer,
        )
        done = until
        compared = candidates(model, args.orders, profiling, compared)
        state(name, model, held_out, args.finetune_batches, compared, step=done)
    return made


def markdown(results: Sequence[dict[str, Any]], state: str = "trained") -> str:
    """The whole network's relative error (cosine) in a state: a line for each grid and order, a column per method."""
    chosen = [r for r in results if r["state"] == state]
    names = list(dict.fromkeys(r["method"] for r in chosen))
    lines = [f"| grid, cost of | backward MFLOPs (exact) | {' | '.join(names)} |", "|---" * (len(names) + 2) + "|"]
    for grid, order in dict.fromkeys((tuple(r["grid"]), r["order"]) for r in chosen):
        line = {r["method"]: r for r in chosen if tuple(r["grid"]) == grid and r["order"] == order}
        best = min(r["batch"]["network"]["error"]["mean"] for r in line.values() if r["method"] in METHODS)
        cells = []
        for name in names:
            if name not in line:
                cells.append("–")
                continue
            network = line[name]["batch"]["network"]
            text = f"{network['error']['mean']:.3f} ({network['cosine']['mean']:.3f})"
            cells.append(f"**{text}**" if network["error"]["mean"] == best else text)
        costs = sorted({round(r["backward_mflops"]) for r in line.values()})
        cost = f"{costs[0]}–{costs[-1]}" if costs[1:] else f"{costs[0]}"
        exact = round(next(iter(line.values()))["exact_mflops"])
        lines.append(f"| {grid[0]}×{grid[1]}, LP-{order} | {cost} ({exact}) | {' | '.join(cells)} |")
    return "\n".join(lines)


def by_group(results: Sequence[dict[str, Any]], state: str = "trained") -> str:
    """Relative error by group of gradients: a line for each grid, order and method."""
    chosen = [r for r in results if r["state"] == state]
    names = list(chosen[0]["batch"])
    lines = [f"| grid, cost of | method | {' | '.join(names)} |", "|---" * (len(names) + 2) + "|"]
    for r in chosen:
        cells = " | ".join(f"{r['batch'][n]['error']['mean']:.3f}" for n in names)
        lines.append(f"| {r['grid'][0]}×{r['grid'][1]}, LP-{r['order']} | {r['method']} | {cells} |")
    return "\n".join(lines)


def environment() -> dict[str, Any]:
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "timm": timm.__version__,
        "numpy": np.__version__,
        "platform": platform.platform(),
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
        "precision": "fp32",
    }


def save(file: Path, args: argparse.Namespace, results: list[dict[str, Any]]) -> None:
    """Write the records of the sizes measured, a line for each, and keep those of other sizes."""
    sizes = {r["image_size"] for r in results}
    settings = {k: v for k, v in vars(args).items() if k not in ("json", "sizes")}
    settings = {k: v.name if isinstance(v, Path) else v for k, v in settings.items()}
    runs = {str(size): {"settings": settings, "environment": environment()} for size in sizes}
    if file.exists():
        before = json.loads(file.read_text(encoding="utf-8"))
        runs = {**before["runs"], **runs}
        results = [r for r in before["results"] if r["image_size"] not in sizes] + results
    results = sorted(results, key=lambda r: (STATES.index(r["state"]), r["image_size"], r["order"]))
    lines = ",\n".join(json.dumps(r, ensure_ascii=False) for r in results)
    about = json.dumps({k: runs[k] for k in sorted(runs, key=int)}, indent=1, ensure_ascii=False)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f'{{"runs": {about},\n"results": [\n{lines}\n]}}\n', encoding="utf-8")


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--weights", type=Path, required=True, help="trained weights in timm's names")
    parser.add_argument("--images", type=Path, required=True, help="held-out images, FOLDER/CLASS/*; classes sorted")
    parser.add_argument("--model", default="vit_micro", help="timm name of the network (vit_micro)")
    parser.add_argument("--sizes", type=int, nargs="+", default=[28, 32, 56], help="image sizes in pixels")
    parser.add_argument("--orders", type=int, nargs="+", default=[4, 6], help="orders of LP_L1 that set the cost")
    parser.add_argument("--batch", type=int, default=64, help="images in a batch")
    parser.add_argument("--batches", type=int, default=4, help="disjoint batches measured")
    parser.add_argument("--profile-batches", type=int, default=4, help="other batches, from which LHE chooses")
    parser.add_argument("--headroom", action="store_true", help="also bases calibrated on each layer's own gradients")
    parser.add_argument("--finetune", type=Path, help="also while fine-tuning on FOLDER/train, FOLDER/test")
    parser.add_argument("--finetune-steps", type=int, default=200)
    parser.add_argument("--finetune-batch", type=int, default=16)
    parser.add_argument("--finetune-lr", type=float, default=3e-4)
    parser.add_argument("--finetune-batches", type=int, default=2, help="disjoint batches measured in each state")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write all numbers to FILE")
    return parser.parse_args(argv)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments(argv)
    results: list[dict[str, Any]] = []
    try:
        for size in args.sizes:
            results += study(args, size)
            if args.json is not None:
                save(args.json, args, results)
    except UserError as error:
        _say(f"error: {error}")
        return 1
    for state in dict.fromkeys(r["state"] for r in results):
        print(f"\nWhole network, {state}: relative error (cosine)\n\n{markdown(results, state)}")
        print(f"\nRelative error by group, {state}\n\n{by_group(results, state)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
