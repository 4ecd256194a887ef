"""Looking into a run: what its methods decided in a step, and what the blocks made of their tokens.

`Insight` writes `step_stats.jsonl` in the run's folder, an object per recorded optimizer step; its lists follow `blocks`:

- ``step``: counted from 1, as in metrics.jsonl.
- ``blocks``: the model's blocks, by their full names.
- ``task``: which one this step belonged to, where there are several.
- ``trained``: those of which something trained in this step.
- ``budgets``, and whatever else the methods tell (`Method.step_stats`), as they held in this step.
- ``tokens``: of each image, behind each block (prefix and fused tokens included; positions, where a block gives a map).
- ``magnitudes``: how much each block adds to what flows through it, the mean over images and tokens of
  ‖f(x)‖ / ‖f(x) + x‖, with f(x) + x the block's output and f(x) the difference to its input (Samragh et al., "Weight
  subcloning", 2023; Figure 2 of the ALaST paper). Null where no token can be compared (downsampling).
- ``compared``: over how many tokens of an image that mean goes.

Compared are the tokens that went in and come out again: of a block that drops tokens those that stay, told by their
places; a token newly made by fusing has no counterpart. Where tokens were merged, or dropped in the last block, which
says nothing of places, these are the prefix tokens alone. The numbers are of the step's first micro-batch and, with
several processes, of the first one's share of it.

What a recorded step costs: two norms and a difference over each block's output, and one reading of the results, at the
end of the batch (DeiT-S, 224 px, batch 16, on a CPU: below 1 % of a step of BSR or ALaST). What trains, and to what
weights, does not depend on it, and nothing is kept for the backward pass; a step that is not recorded costs nothing.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as L
import torch
from torch import Tensor, nn

from efficient_ft.core.context import is_recomputing
from efficient_ft.methods.base import Method
from efficient_ft.models.tasks import tasks_of
from efficient_ft.models.view import view
from efficient_ft.ops.tokens import Tokens, pop_tokens
from efficient_ft.training.callbacks import Rows

log = logging.getLogger(__name__)

NAME = "step_stats.jsonl"


# ---------------------------------------------------------------------------------------------- what blocks do
class Passed(NamedTuple):
    """Through a block: what went in and came out, and what is known of the tokens (None: all there, or nothing said).

    The tensors are those of the forward pass, without its graph: to be looked at, not kept or changed.
    """

    x: Tensor
    before: Tokens | None
    y: Tensor
    after: Tokens | None


@contextmanager
def watched(model: nn.Module, blocks: Sequence[str], see: Callable[[int, Passed], None]) -> Iterator[None]:
    """Meanwhile `see` is told what passes through each block, by its index; not of what is recomputed for gradients.

    Blocks that take or give something else than a tensor are left out.
    """

    def hook(index: int) -> Callable[..., None]:
        def look(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            x = next((value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), None)
            if x is None or not isinstance(output, Tensor) or is_recomputing():
                return
            with torch.no_grad():
                (x, before), (y, after) = pop_tokens(x), pop_tokens(output)
                see(index, Passed(x.detach(), before, y.detach(), after))

        return look

    with ExitStack() as stack:
        for index, name in enumerate(blocks):
            handle = model.get_submodule(name).register_forward_hook(hook(index), with_kwargs=True)
            stack.callback(handle.remove)
        yield


def channel_axis(block: nn.Module, dims: int) -> int:
    """Where the channels of a block's output of so many dimensions lie: tokens and maps after a linear layer have them
    last; maps of a block that begins with a convolution come after the batch."""
    first = next((m for m in block.modules() if isinstance(m, nn.Linear | nn.Conv2d)), None)
    return 1 if dims == 4 and isinstance(first, nn.Conv2d) else dims - 1


def relative_magnitude(passed: Passed, prefix: int, axis: int) -> tuple[Tensor, Tensor] | None:
    """‖f(x)‖ / ‖f(x) + x‖, the mean over images and tokens, and over how many tokens of an image it goes.

    Norms are taken in single precision at least; a token that comes out as zero is left out.

    Args:
        passed: through the block.
        prefix: the model's prefix tokens.
        axis: of the channels.

    Returns:
        Two tensors of one value, on the block's device; None where no token went in that came out.
    """
    pair = _same_tokens(passed, prefix)
    if pair is None:
        return None
    x, y, there = pair
    wide = torch.promote_types(y.dtype, torch.float32)
    added = torch.linalg.vector_norm(y.to(wide) - x.to(wide), dim=axis)
    whole = torch.linalg.vector_norm(y, dim=axis, dtype=wide)
    there = (whole > 0) & there
    count = there.sum()
    return torch.where(there, added / whole, 0).sum() / count, count.to(wide) / len(y)


def _same_tokens(passed: Passed, prefix: int) -> tuple[Tensor, Tensor, Tensor | bool] | None:
    """The tokens of the output that were in the input, beside these: x, y, and which of them are meant."""
    x, before, y, after = passed
    if after is None or after is before:  # no token was dropped or merged, or nobody tells which
        if x.shape == y.shape:
            return x, y, True
    elif after.grid_index_BL is not None and (before is None or before.grid_index_BL is not None):
        old_BL = torch.arange(x.shape[1] - prefix, device=x.device).expand(len(x), -1)
        if before is not None and before.grid_index_BL is not None:
            old_BL = before.grid_index_BL
        sorted_BL, order_BL = old_BL.sort(1)
        found_BK = torch.searchsorted(sorted_BL, after.grid_index_BL.contiguous()).clamp_max(old_BL.shape[1] - 1)
        kept_BK = sorted_BL.gather(1, found_BK) == after.grid_index_BL
        index_BK = order_BL.gather(1, found_BK) + prefix
        head_BP = torch.arange(prefix, device=x.device).expand(len(x), -1)
        index_BN = torch.cat([head_BP, index_BK], 1)
        there_BN = torch.cat([torch.ones_like(head_BP, dtype=torch.bool), kept_BK], 1)
        return x.gather(1, index_BN.unsqueeze(-1).expand(-1, -1, x.shape[2])), y, there_BN
    if prefix and x.dim() == y.dim() == 3 and x.shape[::2] == y.shape[::2]:
        return x[:, :prefix], y[:, :prefix], True
    return None


# ---------------------------------------------------------------------------------------------- writing it down
class StepStats(L.Callback):
    """Writes a row in the first optimizer step and every so many-th after it, and tells the loggers.

    Loggers get ``budgets/BLOCK``, ``tokens/BLOCK`` and ``magnitudes/BLOCK``. A model in which no blocks are recognised
    has nothing to be recorded, which is said.

    Args:
        folder: of the run.
        methods: of the run; their own work of a step must come before this.
        every: from 1.
    """

    def __init__(self, folder: Path, methods: Sequence[Method], every: int):
        assert every >= 1, every
        self.rows, self.methods, self.every = Rows(folder / NAME), methods, every
        self._blocks: tuple[str, ...] = ()
        self._prefix = 0
        self._step: int | None = None
        self._row: dict[str, Any] | None = None  # of the step that is being recorded
        self._seen: dict[int, tuple[int, tuple[Tensor, Tensor] | None]] = {}
        self._watching = ExitStack()

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        seen = view(_network(pl_module))
        self._blocks, self._prefix = seen.blocks, seen.prefix_tokens
        if not self._blocks and trainer.is_global_zero:
            log.warning(
                "step_stats.interval=%d: no blocks were recognised in %s; nothing is recorded.", self.every, seen.name
            )

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.is_global_zero and self._blocks:
            self.rows.rewind(trainer.global_step)

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        step = trainer.global_step
        if step == self._step or step % self.every or not self._blocks or not trainer.is_global_zero:
            return
        self._step = step
        network = _network(pl_module)
        self._row = {
            "step": step + 1,
            "blocks": list(self._blocks),
            "trained": [
                name for name in self._blocks if any(p.requires_grad for p in network.get_submodule(name).parameters())
            ],
        }
        for method in self.methods:
            self._row.update(method.step_stats())
        self._watching.enter_context(watched(network, self._blocks, lambda *seen: self._see(network, *seen)))

    def _see(self, network: nn.Module, index: int, passed: Passed) -> None:
        y = passed.y
        axis = channel_axis(network.get_submodule(self._blocks[index]), y.dim())
        positions = y.numel() // (y.shape[0] * y.shape[axis])
        self._seen[index] = positions, relative_magnitude(passed, self._prefix, axis)

    def on_before_backward(self, trainer: L.Trainer, pl_module: L.LightningModule, loss: Tensor) -> None:
        self._watching.close()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._row is None:
            return
        row, self._row, seen, self._seen = self._row, None, self._seen, {}
        tasks = tasks_of(_network(pl_module))
        if tasks is not None:
            row["task"] = tasks.now
        found = {index: values for index, (_, values) in seen.items() if values is not None}
        # read at once: an accelerator is waited for a single time
        read = torch.stack([torch.stack(values) for values in found.values()]).tolist() if found else []
        values = dict(zip(found, read, strict=True))
        every = range(len(self._blocks))
        row["tokens"] = [seen[index][0] if index in seen else None for index in every]
        for place, name in enumerate(("magnitudes", "compared")):
            row[name] = [_plain(values[index][place]) if index in values else None for index in every]
        self.rows.append(row)
        scalars = {
            f"{name}/{block}": value
            for name in ("budgets", "tokens", "magnitudes")
            for block, value in zip(self._blocks, row.get(name, ()), strict=False)
            if value is not None
        }
        for logger in trainer.loggers:
            logger.log_metrics(scalars, step=row["step"])

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self._watching.close()
        self._row, self._seen = None, {}


def _network(module: L.LightningModule) -> nn.Module:
    network: nn.Module = getattr(module, "model", module)
    return network


def _plain(value: float) -> float | None:
    """Six digits; None for what JSON cannot hold."""
    return float(f"{value:.6g}") if math.isfinite(value) else None
