"""Compile the blocks of the network during training (``trainer.compile=true``)."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as L

from efficient_ft.methods.compiled import CompiledBlocks, compile_blocks, run_eagerly
from efficient_ft.training.output.console import say


class CompileCallback(L.Callback):
    """A callback that compiles the blocks of the network, and prints which blocks are not compiled and why.

    Place this callback after `MethodCallback` and `FeatureCallback`. After the training, the network runs eagerly.

    Args:
        counts_every: n if the FLOPs of every n-th batch are counted, or None. Counted batches run eagerly.

    Attributes:
        blocks: the report, or None before the training.
    """

    def __init__(self, counts_every: int | None) -> None:
        self.blocks: CompiledBlocks | None = None
        self._counts_every = counts_every

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        module: Any = pl_module
        prefix = getattr(module.features, "prefix", module.features)
        self.blocks = compile_blocks(module.model, () if prefix is None else prefix.parts, tell=say)
        say(f"torch.compile: {self.blocks} (trainer.compile=true).{self._note() if self.blocks.compiled else ''}")

    def _note(self) -> str:
        if self._counts_every is None:
            return " The first steps take longer."
        why = "because the cost of a step changes. Batches whose FLOPs are counted are not compiled"
        if self._counts_every == 1:
            return f" However, the FLOPs of every batch are counted, {why}, so compilation has no effect."
        return f" The FLOPs of one of {self._counts_every} batches are counted, {why}. The first steps take longer."

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        module: Any = pl_module
        run_eagerly(module.model)

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self.teardown(trainer, pl_module, "fit")
