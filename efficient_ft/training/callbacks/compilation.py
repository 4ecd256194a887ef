"""Compile the blocks of the network during training (``trainer.compile=true``)."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as L

from efficient_ft.methods.compiled import CompiledBlocks, compile_blocks, run_eagerly
from efficient_ft.training.output.console import say


class CompileCallback(L.Callback):
    """A callback that compiles the blocks of the network, and prints which blocks are not compiled and why.

    Place this callback after `MethodCallback` and `FeatureCallback`. After the training, the network runs eagerly.

    Attributes:
        blocks: the report, or None before the training.
    """

    def __init__(self) -> None:
        self.blocks: CompiledBlocks | None = None

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        module: Any = pl_module
        prefix = getattr(module.features, "prefix", module.features)
        self.blocks = compile_blocks(module.model, () if prefix is None else prefix.parts, tell=say)
        first = " The first steps take longer." if self.blocks.compiled else ""
        say(f"torch.compile: {self.blocks} (trainer.compile=true).{first}")

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        module: Any = pl_module
        run_eagerly(module.model)

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self.teardown(trainer, pl_module, "fit")
