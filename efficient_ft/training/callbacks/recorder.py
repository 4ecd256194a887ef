"""Record a run: write its metrics, the weights of the best epoch, and checkpoints."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch

from efficient_ft.core import stopping
from efficient_ft.core.distributed import all_reduce_sum
from efficient_ft.core.errors import SettingError
from efficient_ft.core.process_memory import resident_bytes
from efficient_ft.core.text import spelled
from efficient_ft.record.rows import MetricsFile
from efficient_ft.training.callbacks.totals import Totals
from efficient_ft.training.module import FineTuner
from efficient_ft.training.output import checkpoint
from efficient_ft.training.output.console import rank, say
from efficient_ft.training.output.faults import refuse_lost_process, require_folder
from efficient_ft.training.processes import from_first, requeue

#: Maximum number of optimizer steps between two recorded training losses. In short runs, this number is smaller, so
#: that at least `LEAST_ROWS` losses are recorded if the run has at least this number of steps. Within an epoch,
#: periodic checkpoints are written only after multiples of `RECORD_EVERY` steps.
RECORD_EVERY = 50
LEAST_ROWS = 20
#: Maximum number of classes for which the metric of each class is logged.
LARGEST_CHART = 100
#: At the end of an epoch, a checkpoint is written if the last checkpoint is at least this number of seconds old.
EPOCH_CHECKPOINT_SECONDS = 10.0
#: Within an epoch, a checkpoint is written if the last checkpoint is at least this number of seconds old.
STEP_CHECKPOINT_SECONDS = 600.0
#: Signals with which Slurm and submitit announce the end of a job. Windows does not have these signals.
REQUEUE = tuple(number for name in ("SIGUSR1", "SIGUSR2") if (number := getattr(signal, name, None)) is not None)
#: Signals after which a run saves a checkpoint and stops.
_STOP = tuple(dict.fromkeys([*REQUEUE, *reversed(stopping.STOPPING)]))


def rows_every(given: int | None, total_steps: int) -> int:
    """Return the number of steps between two recorded losses: `given`, or at most `RECORD_EVERY` by default."""
    return given or max(1, min(RECORD_EVERY, total_steps // LEAST_ROWS))


def memory_bytes(device: torch.device) -> int:
    """Return the memory that PyTorch has reserved on a CUDA device, or the resident memory of this process."""
    return torch.cuda.memory_reserved(device) if device.type == "cuda" else resident_bytes()


class Paused(Exception):
    """Exception that ends the training loop after `pause_at` steps, when the checkpoint has been written."""


class Recorder(L.Callback):
    """A callback that writes the metrics, saves the weights of the best epoch, and writes checkpoints.

    Args:
        folder: the run folder.
        split: the split on which the run evaluates during training.
        keep_best: function that writes the network's weights and the given metadata in the first process.
        extra: further entries of every checkpoint, which must consist of plain containers and values.
        totals: the callback that sums the cost of the training, which must precede this callback.
        every: number of optimizer steps between two recorded losses. See `rows_every`.
        class_names: names of the classes, under which the metrics of the classes are logged.
        patience: number of epochs without improvement after which training stops, or None to train for all epochs.
    """

    def __init__(
        self,
        folder: Path,
        split: str,
        keep_best: Callable[[dict[str, Any]], None],
        extra: dict[str, Any],
        totals: Totals,
        every: int,
        class_names: Sequence[str] = (),
        patience: int | None = None,
    ):
        self.folder, self.split, self.keep_best, self.extra = folder, split, keep_best, extra
        self.totals, self.every, self.class_names, self.patience = totals, every, class_names, patience
        #: The number of optimizer steps after which the network is evaluated, a checkpoint is written and `Paused` is
        #: raised, or None to train to the end.
        self.pause_at: int | None = None
        #: The training time of this process in seconds after which the run is paused, or None.
        self.pause_seconds: float | None = None
        self._started = self._evaluation_started = 0.0
        #: Time of the last evaluation in seconds.
        self.evaluation_seconds = 0.0
        #: The epoch after which training stopped early, or None.
        self.stopped: int | None = None
        #: The recorded metrics of the last epoch.
        self.row: dict[str, Any] = {}
        self.metrics = MetricsFile(folder)
        self.best: float | None = None
        self.best_epoch = 0
        self.last: float | None = None
        #: Accuracy of each task in the best and in the last epoch. `best` and `last` are the means over the tasks.
        self.best_tasks: dict[str, float] = {}
        self.last_tasks: dict[str, float] = {}
        self._saved = 0.0
        #: The signal after which the run saves a checkpoint and stops, or None if no such signal was received.
        self.stop_requested: int | None = None
        #: The handler for signals that request a stop, or None if no training is running.
        self.handler: Callable[[int, Any], None] | None = None

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._saved = self._started = time.monotonic()
        if self.stopped is not None:  # the process ended before the results were written
            trainer.should_stop = True
        if self.handler is not None:
            # Replace Lightning's handler, which broadcasts in the middle of a step, when other processes expect a
            # different operation, and which ends a run with one process without writing a checkpoint.
            signal.signal(signal.SIGTERM, self.handler)
        if trainer.is_global_zero:
            self.metrics.rewind(trainer.global_step)
        if self.pause_at is not None and trainer.global_step >= self.pause_at:
            if self.row.get("step") == trainer.global_step:  # the run was already paused after this step
                raise Paused
            known = f"greater than {trainer.global_step}, the number of steps so far"
            raise SettingError("pause_at", self.pause_at, known)

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._evaluation_started = time.monotonic()

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.evaluation_seconds = time.monotonic() - self._evaluation_started

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        assert isinstance(pl_module, FineTuner)
        step = trainer.global_step
        whole = (batch_idx + 1) % trainer.accumulate_grad_batches == 0
        if whole and step % self.every == 0:
            pl_module.read_losses(batch_idx)
            row = {
                "step": step,
                "epoch": trainer.current_epoch + 1,
                "train_loss": pl_module.mean_loss("window"),
                "lr": max(g["lr"] for g in trainer.optimizers[0].param_groups),
                "memory_bytes": memory_bytes(trainer.strategy.root_device),
                **self._so_far(),
            }
            self._log(trainer, row)
        # After the last batch, `on_train_epoch_end` writes the checkpoint and decides whether to stop.
        within = whole and batch_idx + 1 < trainer.num_training_batches
        if within:
            if step < pl_module.total_steps and self._pauses(trainer):
                self._pause(trainer, pl_module, batch_idx)
            if step % RECORD_EVERY == 0 and self._due(STEP_CHECKPOINT_SECONDS):
                self._save(trainer, pl_module, batch_idx)
            if (stop := self._stop(trainer)) is not None:
                self._save(trainer, pl_module, batch_idx)
                self._leave(stop)
        if step >= pl_module.total_steps:
            trainer.should_stop = True

    def _pauses(self, trainer: L.Trainer) -> bool:
        """Return True if the run is paused after this optimizer step. All processes must call this function."""
        if self.pause_seconds is None:
            return bool(trainer.global_step == self.pause_at)
        return bool(from_first(time.monotonic() - self._started >= self.pause_seconds))

    def _pause(self, trainer: L.Trainer, module: FineTuner, batch_idx: int) -> None:
        """Evaluate the network in the middle of an epoch, write a checkpoint, and raise `Paused`.

        The evaluation does not change the rest of the run, because random numbers are seeded in each step. It is not
        compared with the evaluations at the ends of epochs. Its weights are exported only if no epoch was finished.
        """
        module.read_losses(batch_idx)
        trainer.validating = True
        trainer.fit_loop.epoch_loop.val_loop.run()
        trainer.training = True
        assert module.evaluated is not None
        module.require_finite_evaluation(self.split)
        self.row = self._evaluation_row(trainer, module)
        if self.best is None and trainer.is_global_zero:
            about = {"epoch": trainer.current_epoch + 1, "accuracy": module.evaluated.accuracy, "split": self.split}
            self.keep_best(about | module.evaluated_notes)
        self._save(trainer, module, batch_idx)
        self._log(trainer, self.row)
        raise Paused

    def _stop(self, trainer: L.Trainer) -> int | None:
        """Return the signal that one of the processes received, or None if no signal was received.

        All processes must call this function, and all of them return the same signal.
        """
        if trainer.world_size == 1:
            return self.stop_requested
        # Processes receive a signal in different steps, but all of them must write the checkpoint in the same step.
        asked = all_reduce_sum(torch.tensor([float(self.stop_requested == number) for number in _STOP])).tolist()
        return next((number for number, count in zip(_STOP, asked, strict=True) if count), None)

    def _leave(self, stop: int) -> None:
        """End the run after its checkpoint was written. If Slurm sent the signal `stop`, requeue the job."""
        self.stop_requested = stop  # this process may not have received the signal
        if stop in REQUEUE and "SLURM_JOB_ID" in os.environ:
            if rank() == 0:
                requeue()
            from_first()  # no process may end before the first one has requeued the job
        raise KeyboardInterrupt

    def _due(self, seconds: float) -> bool:
        # All processes write a checkpoint together, so only the clock of the first process is used.
        return bool(from_first(time.monotonic() - self._saved >= seconds))

    def _save(self, trainer: L.Trainer, module: FineTuner, batch_idx: int) -> None:
        module.read_losses(batch_idx)  # diverged weights are never saved, because this call raises DivergedError
        module.require_finite()
        require_folder(self.folder)
        self.totals.gather()
        trainer.save_checkpoint(self.folder / checkpoint.NAME)
        self._saved = time.monotonic()

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        # Lightning has already evaluated the network in this epoch.
        assert isinstance(pl_module, FineTuner)
        pl_module.read_losses(trainer.fit_loop.batch_idx)
        evaluated = pl_module.evaluated
        assert evaluated is not None
        pl_module.require_finite()
        pl_module.require_finite_evaluation(self.split)
        epoch = trainer.current_epoch + 1
        loss = pl_module.mean_loss("epoch")
        pl_module.warn_if_diverged(loss)
        self.row = self._evaluation_row(trainer, pl_module, {"train_loss_epoch": loss})
        self._log(trainer, self.row, self._each_class(pl_module))
        self.last = evaluated.accuracy
        self.last_tasks = {task: of.accuracy for task, of in pl_module.evaluated_tasks.items()}
        if self.best is None or evaluated.accuracy > self.best:
            self.best, self.best_epoch, self.best_tasks = evaluated.accuracy, epoch, self.last_tasks
            if trainer.is_global_zero:
                tasks = {"task_accuracy": self.best_tasks} if self.best_tasks else {}
                about = {"epoch": epoch, "accuracy": self.best, "split": self.split, **tasks}
                self.keep_best(about | pl_module.evaluated_notes)
        if trainer.is_global_zero:
            self.metrics.write_csv()
        self._stop_early(trainer, epoch, pl_module.task.metric)
        final = trainer.should_stop or epoch == trainer.max_epochs
        stop = self._stop(trainer)
        paused = not final and self._pauses(trainer)
        if final or stop is not None or paused or self._due(EPOCH_CHECKPOINT_SECONDS):
            self._save(trainer, pl_module, trainer.fit_loop.batch_idx)
        if paused:
            raise Paused
        if not final and stop is not None:
            self._leave(stop)

    def _evaluation_row(
        self, trainer: L.Trainer, module: FineTuner, losses: Mapping[str, float | None] = {}
    ) -> dict[str, Any]:
        """Return the row of metrics.jsonl for the last evaluation. `losses` are entries for the training loss."""
        evaluated, split = module.evaluated, self.split
        assert evaluated is not None
        return {
            "step": trainer.global_step,
            "epoch": trainer.current_epoch + 1,
            **losses,
            f"{split}_{module.task.metric}": evaluated.accuracy,
            f"{split}_loss": evaluated.loss,
            **{f"{split}_{name}": value for name, value in evaluated.more.items()},
            **{f"{split}_accuracy_{task}": of.accuracy for task, of in module.evaluated_tasks.items()},
            **{f"{split}_loss_{task}": of.loss for task, of in module.evaluated_tasks.items()},
            "memory_bytes": memory_bytes(trainer.strategy.root_device),
            **self._so_far(),
        }

    def _stop_early(self, trainer: L.Trainer, epoch: int, metric: str) -> None:
        """Stop training if the metric has not improved for `patience` epochs. All processes decide in the same way."""
        last = trainer.should_stop or epoch == trainer.max_epochs
        if self.patience is None or last or epoch - self.best_epoch < self.patience:
            return
        trainer.should_stop, self.stopped = True, epoch
        say(
            f"Training stopped after epoch {epoch} of {trainer.max_epochs}, because the {self.split} {spelled(metric)}"
            f" has not improved since epoch {self.best_epoch} (trainer.patience={self.patience})."
        )

    def _so_far(self) -> dict[str, float]:
        """Return the numbers of images, FLOPs, seconds and joules (if measured) since the start of training.

        All processes must call this function.
        """
        self.totals.gather()
        values: Any = self.totals.values()
        return {key: values[key] for key in ("images", "flops", "seconds", "joules") if values[key] is not None}

    def _each_class(self, module: FineTuner) -> dict[str, float]:
        """Return the metric of each class for loggers, or an empty dict for more than `LARGEST_CHART` classes."""
        named = len(self.class_names) <= LARGEST_CHART
        return {
            f"{self.split}_{module.task.class_metric}/{self.class_names[number]}": value
            for number, value in (module.evaluated_classes if named else {}).items()
        }

    def _log(self, trainer: L.Trainer, row: dict[str, Any], more: Mapping[str, float] = {}) -> None:
        if not trainer.is_global_zero:
            return
        require_folder(self.folder)
        self.metrics.append(row)
        for logger in trainer.loggers:
            values = {k: v for k, v in row.items() if v is not None and k != "step" and "_iou_" not in k}
            logger.log_metrics({**values, **more}, step=row["step"])

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        # Raise the error now, because Lightning kills this process a few seconds after another process has ended.
        refuse_lost_process(exception)

    def state_dict(self) -> dict[str, Any]:
        return {
            "best": self.best,
            "best_epoch": self.best_epoch,
            "last": self.last,
            "row": self.row,
            **({} if self.stopped is None else {"stopped": self.stopped}),
            **({"best_tasks": self.best_tasks, "last_tasks": self.last_tasks} if self.last_tasks else {}),
            **self.extra,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.best = state_dict["best"]
        self.best_epoch = state_dict["best_epoch"]
        self.last, self.row = state_dict["last"], state_dict.get("row", {})
        self.stopped = state_dict.get("stopped")
        self.best_tasks, self.last_tasks = (state_dict.get(key, {}) for key in ("best_tasks", "last_tasks"))


@contextmanager
def stop_on_interrupt(recorder: Recorder) -> Iterator[None]:
    """Return a context manager that handles signals that request the end of the run.

    After the first Ctrl-C, the run finishes the current step, writes a checkpoint and stops. A second Ctrl-C stops the
    run immediately. Other signals that request an end (`core.stopping`) have the same effect as the first Ctrl-C. In a
    Slurm job, SIGUSR1 and SIGUSR2 (``--signal``) also have this effect, and Slurm then requeues the job.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    process, asked_before = os.getpid(), len(stopping.asked)

    def request(number: int, frame: Any) -> None:
        if os.getpid() != process:  # workers that load data ignore signals, because their parent process ends them
            return
        stopping.asked.append(number)
        if recorder.stop_requested is not None:
            if number == signal.SIGINT:
                raise KeyboardInterrupt
            return
        recorder.stop_requested = number
        again = " (press Ctrl-C again to stop immediately)" if number == signal.SIGINT else ""
        with suppress(OSError):  # the terminal may be closed
            say(f"\nStopping after this step and writing a checkpoint{again} …")

    recorder.handler = request
    before = stopping.answer(request)
    if "SLURM_JOB_ID" in os.environ:
        before |= {number: signal.signal(number, request) for number in REQUEUE if number not in before}
    try:
        yield
    finally:
        recorder.handler = None
        del stopping.asked[asked_before:]
        for number, handler in before.items():
            signal.signal(number, handler)
