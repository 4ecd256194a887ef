"""The progress bar of a run."""

from __future__ import annotations

import sys
from typing import Any

import lightning.pytorch as L
from lightning.pytorch.utilities import rank_zero_only
from tqdm import tqdm

from efficient_ft.core.text import spelled
from efficient_ft.training.module import FineTuner


class ProgressBar(L.Callback):
    """One bar over all optimizer steps; updated twice a second at most, once a minute if no terminal shows it.

    Args:
        total_steps: optimizer steps of the run.
        epochs: epochs of the run.
    """

    def __init__(self, total_steps: int, epochs: int) -> None:
        self.total_steps, self.epochs = total_steps, epochs
        self._bar: Any = None
        self._text = ""

    @rank_zero_only
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._bar = tqdm(
            total=self.total_steps,
            initial=trainer.global_step,
            unit="step",
            mininterval=0.5 if sys.stderr.isatty() else 60,
            dynamic_ncols=True,
        )

    @rank_zero_only
    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        bar = self._bar
        done = trainer.global_step - bar.n
        if done and bar.update(done):
            bar.set_description_str(f"epoch {trainer.current_epoch + 1}/{self.epochs}{self._text}", refresh=False)

    @rank_zero_only
    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert isinstance(pl_module, FineTuner)
        if pl_module.evaluated is not None:
            self._text = f" · {spelled(pl_module.task.metric)} {pl_module.evaluated.accuracy:.1%}"

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    @rank_zero_only
    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._close()

    @rank_zero_only
    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self._close()
