"""Show the progress of a run: a bar in a terminal, or lines of text otherwise, and a summary line for each epoch."""

from __future__ import annotations

import sys
import time
from typing import Any

import lightning.pytorch as L
from lightning.pytorch.utilities import rank_zero_only
from tqdm import tqdm

from efficient_ft.core.format import format_metric, format_number, format_seconds
from efficient_ft.core.terminal import show
from efficient_ft.core.text import spelled, terminal_width
from efficient_ft.training.callbacks.recorder import Recorder
from efficient_ft.training.module import FineTuner

#: Minimum time in seconds between two updates of the bar, and between two lines if the output is not a terminal.
BAR_SECONDS, LINE_SECONDS = 0.5, 60.0


class ProgressBar(L.Callback):
    """A callback that shows the epoch, the step, the loss, the learning rate, the speed and the remaining time.

    The loss is the mean of the losses that have been read from the accelerator in the current epoch. Place this
    callback after `recorder`, which provides the metrics of each epoch.
    """

    def __init__(self, total_steps: int, epochs: int, recorder: Recorder) -> None:
        self.total_steps, self.epochs, self.recorder = total_steps, epochs, recorder
        self._bar: Any = None
        self._first = self._seen = 0
        self._start = self._last = 0.0
        #: Evaluation time in seconds, which is excluded from the speed, and the start time of the current evaluation.
        self._paused, self._pause = 0.0, 0.0

    @rank_zero_only
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._first, self._seen, self._paused = trainer.global_step, 0, 0.0
        self._start = self._last = time.monotonic()
        if sys.stderr.isatty():
            self._bar = tqdm(
                total=self.total_steps,
                initial=trainer.global_step,
                mininterval=BAR_SECONDS,
                dynamic_ncols=True,
                bar_format="{desc} {bar} {n_fmt}/{total_fmt}{postfix}",
            )

    @rank_zero_only
    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        assert isinstance(pl_module, FineTuner)
        self._seen += len(batch[1]) * trainer.world_size
        now = time.monotonic()
        if now - self._last < (LINE_SECONDS if self._bar is None else BAR_SECONDS):
            return
        self._last = now
        epoch, steps = f"epoch {trainer.current_epoch + 1}/{self.epochs}", f"{trainer.global_step}/{self.total_steps}"
        parts = self._parts(trainer, pl_module)
        if self._bar is None:
            show(", ".join([epoch, f"step {steps}", *parts]))
            return
        _shorten(parts, terminal_width(sys.stderr, least=1) - len(f"{epoch}, {steps}, ") - 4, least=1)
        self._bar.n = trainer.global_step
        self._bar.set_description_str(epoch, refresh=False)
        self._bar.set_postfix_str(", ".join(parts), refresh=False)
        self._bar.refresh()

    def _parts(self, trainer: L.Trainer, module: FineTuner) -> list[str]:
        loss, lr = module.loss_so_far(), max(g["lr"] for g in trainer.optimizers[0].param_groups)
        elapsed = time.monotonic() - self._start
        done = trainer.global_step - self._first
        speed = self._seen / max(elapsed - self._paused, 1e-9)
        found = [] if loss is None else [f"loss {loss:.3f}"]
        found += [f"lr {lr:.1e}", f"{format_number(speed)} {module.task.sample}s/s"]
        remaining = self.total_steps - trainer.global_step
        if done and remaining:
            seconds = max(1, round(elapsed / done * remaining))
            found.append(f"{format_seconds(seconds if seconds < 600 else 60 * round(seconds / 60))} left")
        return found

    @rank_zero_only
    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._pause = time.monotonic()

    @rank_zero_only
    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._paused += time.monotonic() - self._pause

    @rank_zero_only
    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert isinstance(pl_module, FineTuner)
        row, split, metric = self.recorder.row, self.recorder.split, pl_module.task.metric
        now = [part for part in self._parts(trainer, pl_module) if not part.startswith("loss")]
        more = now[1:2] if self._bar is not None else now  # the bar shows the other parts
        loss = row["train_loss_epoch"]
        parts = [] if loss is None else [f"loss {loss:.3f}"]
        parts += [f"{split} loss {row[f'{split}_loss']:.3f}"]
        parts += [f"{split} {spelled(metric)} {format_metric(row[f'{split}_{metric}'], metric)}"]
        line = f"epoch {row['epoch']}/{self.epochs}: {', '.join(parts)}"
        _shorten(more, terminal_width(least=1) - len(f"{line}, "))
        show(", ".join([line, *more]))

    @rank_zero_only
    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._bar is not None:
            self._bar.leave = False  # remove the bar from the terminal
            self._bar.close()
            self._bar = None

    @rank_zero_only
    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self.on_train_end(trainer, pl_module)


def _shorten(parts: list[str], width: int, least: int = 0) -> None:
    """Remove parts, the middle ones first, until the line fits into `width` characters or `least` parts remain."""
    while len(parts) > least and len(", ".join(parts)) > width:
        del parts[-2 if len(parts) > 1 else -1]
