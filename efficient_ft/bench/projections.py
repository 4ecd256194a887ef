"""Low-rank backward passes whose gradient errors are measured.

These passes use this package's methods, or bases that are computed for each layer.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from efficient_ft.bench.gradients import Batch, Gradients, step_gradients
from efficient_ft.core.errors import UserError
from efficient_ft.methods import LBPDCT, LBPWHT
from efficient_ft.methods.backprop.low_rank import LowRankBackward, LowRankConv2d, LowRankLinear
from efficient_ft.models.view import view
from efficient_ft.ops.projection import Grid, Projection, Tile, dct_rows

#: Functions that construct the compared methods from the order and the number of batches that LHE profiles.
METHODS: dict[str, Callable[[int, int], LowRankBackward]] = {
    "WHT reflect": lambda order, _: LBPWHT(order=order, padding="reflect"),
    "WHT zero": lambda order, _: LBPWHT(order=order, padding="zero"),
    "WHT ortho": lambda order, _: LBPWHT(order=order),
    "LHE": lambda order, batches: LBPWHT(bases="lhe", order=order, profile_steps=batches),
    "DCT": lambda order, _: LBPDCT(order=order),
}

#: Bases that are computed from the gradients of each layer. These bases are the best case for calibrated methods.
HEADROOM = ("DCT by energy", "PCA of g_y", "PCA of x and g_y")


@dataclass
class Candidate:
    """Network to which a method is applied, and the measurements of the network.

    Attributes:
        name: name of the method.
        order: order of LP_L1, which determines the cost.
        model: network.
        method: method that is applied to the network.
        flops: number of FLOPs executed in the backward pass per image, or None if the FLOPs are not counted yet.
        scores: a dict from groups of gradients to the (relative error, cosine) of each batch.
        total: sum of the gradients of all batches.
    """

    name: str
    order: int
    model: nn.Module
    method: LowRankBackward
    flops: float | None = None
    scores: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    total: Gradients = field(default_factory=dict)

    @property
    def rank(self) -> int:
        """Number of coefficients per channel, including prefix tokens."""
        return max(_rank(layer) for layer in _low_rank_layers(self.model).values())


def _low_rank_layers(model: nn.Module) -> dict[str, LowRankLinear | LowRankConv2d]:
    return {n: m for n, m in model.named_modules() if isinstance(m, LowRankLinear | LowRankConv2d)}


def _rank(layer: LowRankLinear | LowRankConv2d) -> int:
    how, (c_out, c_in) = layer.low_rank, layer.weight.shape[:2]
    assert how.projector is not None  # the projector is set after the profiling steps
    return how.projector.projection(how.tokens.grid, how.tokens.prefix, (c_in, c_out)).rank


def candidates(
    model: nn.Module, orders: Sequence[int], profiling: Sequence[Batch], earlier: Sequence[Candidate] = ()
) -> list[Candidate]:
    """Copy `model` for each method in `METHODS` and each order of LP_L1, and apply the method to the copy.

    LHE chooses its bases on the `profiling` batches. If `earlier` contains candidates for an earlier state of the
    network, the bases of these candidates are reused.
    """
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
                    step_gradients(changed, batch, methods=[method], step=step)
            made.append(Candidate(name, order, changed, method, flops))
    return made


@dataclass(frozen=True, eq=False)
class OwnBasis:
    """Projector with given orthonormal rows (R, L) over the grid."""

    rows: np.ndarray

    def projection(self, grid: Grid, prefix: int, channels: tuple[int, int]) -> Projection:
        """Return the projection onto the rows. `channels` is not used."""
        return Projection.from_tiles([Tile(np.arange(grid[0] * grid[1]), self.rows, self.rows)], grid, prefix)


def headroom(model: nn.Module, orders: Sequence[int], profiling: Sequence[Batch]) -> list[Candidate]:
    """Copy `model` for each kind of bases in `HEADROOM`, and use these bases in the copy.

    The bases are computed from the inputs and gradients of each layer. The rank of the bases is the rank of the DCT
    with the same order.

    Raises:
        UserError: If a projected layer is not a linear layer over (B, tokens, C).
    """
    moments = _moments(model, profiling)
    made = []
    for order in orders:
        for kind in HEADROOM:
            method, changed = LBPDCT(order=order), copy.deepcopy(model)
            method.apply(changed)
            for name, layer in _low_rank_layers(changed).items():
                if not np.trace(moments[name][1]):
                    continue  # if the output is the class token, no gradient reaches the grid in the last block
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


def _moments(model: nn.Module, profiling: Sequence[Batch]) -> dict[str, list[np.ndarray]]:
    """Return, for each linear layer, the second moments (L, L) of the input and the output gradient over the grid."""
    moments = {name: [0.0 * np.eye(1)] * 2 for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    layouts = {layer.name: layer.tokens for layer in view(model).layers if layer.tokens is not None}

    def add(name: str, which: int, values: Tensor) -> None:
        on_grid = values.detach()[:, layouts[name].prefix :]  # B, L, C
        moments[name][which] = moments[name][which] + torch.einsum("blc,bmc->lm", on_grid, on_grid).double().numpy()

    def after(name: str, module: nn.Module, args: tuple[Tensor, ...], y: Tensor) -> None:
        add(name, 0, args[0])
        y.register_hook(lambda g: add(name, 1, g))

    with ExitStack() as hooks:
        for name, tokens in layouts.items():
            if tokens.form != "tokens" or name not in moments:
                raise UserError(f"--headroom requires linear layers over (B, tokens, C), got the layer {name}.")
            hooks.enter_context(model.get_submodule(name).register_forward_hook(partial(after, name)))
        for batch in profiling:
            step_gradients(model, batch)
    return moments
