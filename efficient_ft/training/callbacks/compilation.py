"""Compile the blocks of the network during training (``trainer.compile=true``)."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as L
from torch import nn

from efficient_ft.methods.compiled import (
    CompiledBlocks,
    compile_blocks,
    largest_batches,
    restore_largest_batches,
    run_eagerly,
)
from efficient_ft.models.view import view
from efficient_ft.training.output.console import say


class CompileCallback(L.Callback):
    """A callback that compiles the blocks of the network, and prints which blocks are not compiled and why.

    Place this callback after `MethodCallback` and `FeatureCallback`. After the training, the network runs eagerly.

    Args:
        counts_every: n if the FLOPs of every n-th batch are counted, or None. Counted batches run eagerly. If the FLOPs
            of every batch are counted, no block is compiled.

    Attributes:
        blocks: the report, or None before the training.
    """

    def __init__(self, counts_every: int | None) -> None:
        self.blocks: CompiledBlocks | None = None
        self._counts_every = counts_every
        self._model: nn.Module | None = None
        self._largest: dict[str, int] = {}

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        module: Any = pl_module
        if self._counts_every == 1:
            names = list(view(module.model).blocks)
            self.blocks = CompiledBlocks(eager={"the FLOPs of every batch are counted": names})
        else:
            prefix = getattr(module.features, "prefix", module.features)
            self.blocks = compile_blocks(module.model, () if prefix is None else prefix.parts, tell=say)
            self._model = module.model
        say(f"torch.compile (trainer.compile=true): {self.blocks}{self._note() if self.blocks.compiled else ''}")

    def _note(self) -> str:
        if self._counts_every is None:
            return " The first steps take longer."
        return (
            f" The FLOPs of one in {self._counts_every} batches are counted, because the cost differs between steps."
            " These batches run uncompiled. The first steps take longer."
        )

    def state_dict(self) -> dict[str, Any]:
        # Batches that are smaller than an earlier batch run uncompiled, which can change the results by rounding.
        return {"largest_batches": self._largest if self._model is None else largest_batches(self._model)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self._model is not None:
            restore_largest_batches(self._model, state_dict["largest_batches"])

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if self._model is not None:
            self._largest = largest_batches(self._model)
            run_eagerly(self._model)
            self._model = None

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self.teardown(trainer, pl_module, "fit")
