"""What a run writes while it trains: metrics, the best weights, checkpoints, and a progress bar."""

from __future__ import annotations

import csv
import io
import json
import logging
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as L
from lightning.pytorch.utilities import rank_zero_only
from tqdm import tqdm

from efficient_ft.training import checkpoint
from efficient_ft.training.module import FineTuner

log = logging.getLogger(__name__)

#: Optimizer steps between two rows of training loss.
RECORD_EVERY = 50
#: A checkpoint at the end of an epoch, unless the last one is younger than this …
EPOCH_CHECKPOINT_SECONDS = 10.0
#: … and one in the middle of an epoch that takes longer than this.
STEP_CHECKPOINT_SECONDS = 600.0


class Rows:
    """A file of one JSON object per line, each with its optimizer step, appended to while training.

    When a run continues, rows after its checkpoint are dropped: they come again.
    """

    def __init__(self, path: Path):
        self.path = path

    def read(self) -> list[dict[str, Any]]:
        """All rows; none where there is no file."""
        rows = []
        if self.path.is_file():
            for line in self.path.read_text(encoding="utf-8").splitlines():
                try:
                    rows.append(json.loads(line))
                except json.JSONDecodeError:
                    break  # a kill in the middle of a line
        return rows

    def rewind(self, step: int) -> None:
        """Keep the rows up to optimizer step `step` only."""
        kept = [r for r in self.read() if r["step"] <= step]
        checkpoint.write_text_atomically(self.path, "".join(json.dumps(r) + "\n" for r in kept))

    def append(self, row: dict[str, Any]) -> None:
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


class MetricsFile(Rows):
    """`metrics.jsonl`, the source of truth; `metrics.csv`, the same as a table."""

    def __init__(self, folder: Path):
        super().__init__(folder / "metrics.jsonl")

    def write_csv(self) -> None:
        rows = self.read()
        names = list(dict.fromkeys(name for row in rows for name in row))
        text = io.StringIO()
        writer = csv.DictWriter(text, names, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        checkpoint.write_text_atomically(self.path.with_suffix(".csv"), text.getvalue())


class Recorder(L.Callback):
    """Writes the metrics, keeps the best epoch's weights, and writes checkpoints.

    Args:
        folder: of the run.
        split: the split that evaluation during training uses.
        keep_best: writes the network's present weights, called with the evaluation's accuracy.
        extra: what else a checkpoint carries, in plain containers.
    """

    def __init__(
        self,
        folder: Path,
        split: str,
        keep_best: Callable[[L.LightningModule, int, float], None],
        extra: dict[str, Any],
    ):
        self.folder, self.split, self.keep_best, self.extra = folder, split, keep_best, extra
        self.metrics = MetricsFile(folder)
        self.best: float | None = None
        self.best_epoch = 0
        self.last: float | None = None
        #: With several tasks: the accuracy of each in the best and in the last epoch; `best` and `last` are means.
        self.best_tasks: dict[str, float] = {}
        self.last_tasks: dict[str, float] = {}
        self._started = 0.0
        self._seconds_before = 0.0  # of training, before a resume
        self._saved = 0.0
        #: Set from outside (Ctrl-C): save at the next whole step, and stop.
        self.stop_asked = False

    # ------------------------------------------------------------------ steps
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._started = self._saved = time.monotonic()
        if trainer.is_global_zero:
            self.metrics.rewind(trainer.global_step)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        assert isinstance(pl_module, FineTuner)
        step = trainer.global_step
        if step % RECORD_EVERY == 0 and (batch_idx + 1) % trainer.accumulate_grad_batches == 0:
            self._record_step(trainer, pl_module, batch_idx)
            # The last batch's checkpoint is the epoch's, after evaluation.
            last = batch_idx + 1 >= trainer.num_training_batches
            if not last and self._due(trainer, STEP_CHECKPOINT_SECONDS):
                self._save(trainer, pl_module, batch_idx)
        if self.stop_asked or trainer.received_sigterm:
            self._leave(trainer, pl_module, batch_idx)
        if step >= pl_module.total_steps:
            trainer.should_stop = True

    def _leave(self, trainer: L.Trainer, module: FineTuner, batch_idx: int) -> None:
        """A checkpoint before going; the epoch's last batch, and a half accumulated step, are seen through first."""
        whole = (batch_idx + 1) % trainer.accumulate_grad_batches == 0
        if whole and batch_idx + 1 < trainer.num_training_batches:
            self._save(trainer, module, batch_idx)
            if self.stop_asked:  # a terminated run Lightning ends itself
                raise KeyboardInterrupt

    def _record_step(self, trainer: L.Trainer, module: FineTuner, batch_idx: int) -> None:
        module.read_losses(batch_idx)
        self._log(
            trainer,
            {
                "step": trainer.global_step,
                "epoch": trainer.current_epoch + 1,
                "train_loss": module.mean_loss("window"),
                "lr": max(g["lr"] for g in trainer.optimizers[0].param_groups),
            },
        )

    def _due(self, trainer: L.Trainer, seconds: float) -> bool:
        # All ranks take part in a checkpoint, so one clock decides.
        due = time.monotonic() - self._saved >= seconds
        return bool(trainer.strategy.broadcast(due)) if trainer.world_size > 1 else due

    def _save(self, trainer: L.Trainer, module: FineTuner, batch_idx: int) -> None:
        module.read_losses(batch_idx)  # weights that have met a NaN never replace good ones
        trainer.save_checkpoint(self.folder / checkpoint.NAME)
        self._saved = time.monotonic()

    # ------------------------------------------------------------------ epochs
    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        # Evaluation has run just before, as the last act of the epoch's loop.
        assert isinstance(pl_module, FineTuner)
        pl_module.read_losses(trainer.fit_loop.batch_idx)
        evaluated = pl_module.evaluated
        assert evaluated is not None
        epoch = trainer.current_epoch + 1
        row = {
            "step": trainer.global_step,
            "epoch": epoch,
            "train_loss_epoch": pl_module.mean_loss("epoch"),
            f"{self.split}_accuracy": evaluated.accuracy,
            f"{self.split}_loss": evaluated.loss,
            **{f"{self.split}_accuracy_{task}": of.accuracy for task, of in pl_module.evaluated_tasks.items()},
            **{f"{self.split}_loss_{task}": of.loss for task, of in pl_module.evaluated_tasks.items()},
            "seconds": round(self.seconds, 3),
        }
        self._log(trainer, row)
        self.last = evaluated.accuracy
        self.last_tasks = {task: of.accuracy for task, of in pl_module.evaluated_tasks.items()}
        if self.best is None or evaluated.accuracy > self.best:
            self.best, self.best_epoch, self.best_tasks = evaluated.accuracy, epoch, self.last_tasks
            self.keep_best(pl_module, epoch, evaluated.accuracy)
        if trainer.is_global_zero:
            self.metrics.write_csv()
        final = trainer.should_stop or epoch == trainer.max_epochs
        leaving = self.stop_asked or trainer.received_sigterm
        if final or leaving or self._due(trainer, EPOCH_CHECKPOINT_SECONDS):
            self._save(trainer, pl_module, trainer.fit_loop.batch_idx)
        if self.stop_asked and not final:
            raise KeyboardInterrupt

    @property
    def seconds(self) -> float:
        """Of training so far, evaluation included, interruptions left out."""
        return self._seconds_before + (time.monotonic() - self._started if self._started else 0.0)

    def _log(self, trainer: L.Trainer, row: dict[str, Any]) -> None:
        if not trainer.is_global_zero:
            return
        self.metrics.append(row)
        for logger in trainer.loggers:
            values = {k: v for k, v in row.items() if v is not None and k != "step"}
            logger.log_metrics(values, step=row["step"])

    # ------------------------------------------------------------------ state
    def state_dict(self) -> dict[str, Any]:
        return {
            "best": self.best,
            "best_epoch": self.best_epoch,
            "last": self.last,
            "seconds": self.seconds,
            **({"best_tasks": self.best_tasks, "last_tasks": self.last_tasks} if self.last_tasks else {}),
            **self.extra,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.best = state_dict["best"]
        self.best_epoch = state_dict["best_epoch"]
        self.last = state_dict["last"]
        self._seconds_before = state_dict["seconds"]
        self.best_tasks, self.last_tasks = (state_dict.get(key, {}) for key in ("best_tasks", "last_tasks"))


class Bar(L.Callback):
    """One bar over all steps; written to twice a second at most, once a minute where nobody watches."""

    def __init__(self, total_steps: int, epochs: int):
        self.total_steps, self.epochs = total_steps, epochs
        self._bar: Any = None
        self._text = ""

    @rank_zero_only
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        watched = sys.stderr.isatty()
        self._bar = tqdm(
            total=self.total_steps,
            initial=trainer.global_step,
            unit="step",
            mininterval=0.5 if watched else 60,
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
            self._text = f" · accuracy {pl_module.evaluated.accuracy:.1%}"

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
