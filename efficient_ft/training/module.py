"""The Lightning module of a run.

The module adds only a few percent to the step time of a plain training loop, because no values are logged through
Lightning in each step, no metric is computed on training batches, and the learning rate is a function of the step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import lightning.pytorch as L
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from efficient_ft.core.errors import DivergedError
from efficient_ft.core.input_spec import IGNORED
from efficient_ft.core.process_memory import release_freed_memory
from efficient_ft.core.seeding import seed_of, seed_step
from efficient_ft.models.tasks import tasks_of
from efficient_ft.task import total_weight
from efficient_ft.task.metrics import MeanLoss
from efficient_ft.training.kinds.registry import kind_of
from efficient_ft.training.last_layer import last_layer_in_fp32
from efficient_ft.training.optimizer import build_optimizer, lr_factor, warmup_steps
from efficient_ft.training.output.console import say
from efficient_ft.training.trainer import ends_step

if TYPE_CHECKING:
    from efficient_ft.config import Config
    from efficient_ft.models.prefix import FrozenPrefix
    from efficient_ft.task import Task
    from efficient_ft.training.features.prefix import RunFeatures

__all__ = ["Evaluation", "FineTuner", "build_optimizer", "lr_factor"]

#: Training has diverged if the mean loss of an epoch exceeds this multiple of both the first loss and the chance loss.
DIVERGED = 10.0

#: Losses are read from an accelerator once per this number of batches, because each read synchronizes the device.
READ_EVERY = 50
#: A value that is larger than any class index.
NO_CLASS = 2**31
#: Before this number of optimizer steps, predicting the same class for all samples is normal and causes no warning.
MEANINGFUL_STEPS = 50


class Evaluation(NamedTuple):
    """Result of one evaluation.

    Attributes:
        accuracy: the metric of the task, as a fraction.
        loss: the mean loss.
        more: further metrics of the task.
    """

    accuracy: float
    loss: float
    more: Mapping[str, float] = {}


class FineTuner(L.LightningModule):
    """A Lightning module that fine-tunes `network` with the loss of its task. The network maps inputs to logits.

    A batch is a tuple (inputs, labels), e.g. with images (B, 3, H, W) as inputs. With several tasks, a batch is
    (images, labels, task), and the loss uses the classifier of this task. With stored features, a batch is (images or
    stored features, labels, row numbers). `MethodCallback` applies the methods before the optimizer is built.

    Args:
        network: the network with its weights.
        config: the configuration of the run.
        num_classes: number of classes, or a mapping from tasks to numbers of classes (`models.tasks`).
        total_steps: number of optimizer steps in the whole run. The learning rate schedule depends on this number.
        class_weights: mapping from data sets to the class weights of the training loss, float32 (C,). The key of a
            single data set is "". See `training.balance`.
        task: the task with values that depend on the data, or None for the task of the configuration.

    Attributes:
        features: the object that computes or reads the output of the frozen prefix, or None if the whole network
            runs.
    """

    features: RunFeatures | FrozenPrefix | None = None

    def __init__(
        self,
        network: nn.Module,
        config: Config,
        num_classes: int | Mapping[str, int],
        total_steps: int,
        class_weights: Mapping[str, Tensor] = {},
        task: Task | None = None,
    ) -> None:
        super().__init__()
        self.model, self.config, self.total_steps, self.tasks = network, config, total_steps, tasks_of(network)
        counts = [num_classes] if isinstance(num_classes, int) else list(num_classes.values())
        self.task = task or kind_of(config).task_of(config)
        self._class_weights = dict(class_weights)
        self._least_weights = {task: float(weights.min()) for task, weights in class_weights.items()}
        #: True until the first optimizer step of this process.
        self._first = True
        # The metrics are registered as submodules, so that Lightning moves them to the device.
        self.scores: Any = nn.ModuleList(self.task.scores(n) for n in counts)
        self.eval_loss: Any = nn.ModuleList(MeanLoss() for _ in counts)
        #: Result of the last evaluation. With several tasks, this result contains the means over `evaluated_tasks`.
        self.evaluated: Evaluation | None = None
        self.evaluated_tasks: dict[str, Evaluation] = {}
        #: Mapping from class indices to class metrics of the last evaluation. The mapping is empty with several tasks.
        self.evaluated_classes: dict[int, float] = {}
        #: Metadata of model.safetensors that depend on the last evaluation. See `Scores.notes`.
        self.evaluated_notes: dict[str, Any] = {}
        #: Mapping from task indices to the ranges of predictions and labels in this evaluation. See `_keep_range`.
        self._classes: dict[int, Tensor] = {}
        self._chance = max(map(self.task.chance_loss, counts))
        self._first_loss: float | None = None
        #: Warnings that were printed during training and that are written to results.json.
        self.warnings: list[str] = []
        self._constant = False  # True if all predictions of the last evaluation were equal
        #: Number of items in the batches of all processes, and the contribution of the other processes to the loss.
        self._weight = torch.ones(())
        self._elsewhere: Tensor | None = None
        self._unread: list[tuple[Tensor, Tensor]] = []  # pairs (loss, number of items) on the device
        self._sums = {"epoch": [0.0, 0], "window": [0.0, 0]}  # [sum of the losses, number of items]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Build the optimizer with `build_optimizer`. `on_train_batch_start` sets the learning rate in each step."""
        return build_optimizer(self.model, self.config.optim, self.config.trainer.precision)

    def on_fit_start(self) -> None:
        self.train()
        self._class_weights = {task: weights.to(self.device) for task, weights in self._class_weights.items()}

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        # The random state is seeded with the batch number, so that a resumed run draws the same random numbers.
        batches = self.trainer.num_training_batches
        counter = self.trainer.current_epoch * int(batches) + batch_idx
        seed_step(seed_of(self.config.seed, self.global_rank, counter), self.device)
        factor = lr_factor(self.global_step, self.total_steps, self.config.optim)
        for group in self.trainer.optimizers[0].param_groups:
            group["lr"] = group["initial_lr"] * factor

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the loss of a batch. `MethodCallback` adds the losses that the methods define."""
        images, labels, *more = batch
        if self.tasks is not None:
            (self.tasks.active,) = more
        with self._input(images, labels, more) as x:
            logits = self.task.logits(self.model, x)
        active = "" if self.tasks is None else self.tasks.active
        weights = self._class_weights.get(active)
        weighted = {} if weights is None else {"class_weights": weights}
        loss = self.task.loss(logits, labels, self.config.optim.label_smoothing, **weighted)
        items = self._items(labels) if weights is None else total_weight(labels, weights)
        least = self._least_weights.get(active, 1)
        self._weight, self._elsewhere = items.clamp(min=least), None
        return loss if self.trainer.world_size == 1 else self._share(loss, items, least)

    def _share(self, loss: Tensor, items: Tensor, least: float) -> Tensor:
        """Scale the mean loss of this process, so that averaging over the processes gives the mean over all items."""
        sums = torch.stack([items.double(), loss.detach().double() * items])
        torch.distributed.all_reduce(sums)
        total, added = sums
        self._weight = total.clamp(min=least)
        share = loss * (items * self.trainer.world_size / self._weight).to(loss.dtype)
        self._elsewhere = added / self._weight - share.detach()
        return share

    def _items(self, labels: Tensor) -> Tensor:
        """Return the number of items over which the loss is averaged, as a tensor on the device of `labels`."""
        items = self.task.labeled(labels)
        return torch.full((), len(labels), device=labels.device) if items is None else items

    def _input(self, images: Tensor, labels: Tensor, more: Sequence[Any]) -> AbstractContextManager[Tensor]:
        """Return a context manager that provides the network's input for a batch."""
        return nullcontext(images) if self.features is None else self.features.input(images, labels, *more)

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Compute gradients.

        If the number of batches is not divisible by `trainer.grad_accum_steps`, the last optimizer step of an epoch
        averages the gradients of the remaining batches.
        """
        accumulated, batches = self.trainer.accumulate_grad_batches, int(self.trainer.num_training_batches)
        left = batches % accumulated
        if left and self.trainer.fit_loop.batch_idx >= batches - left:  # `loss` was already divided by `accumulated`
            loss = loss * (accumulated / left)
        super().backward(loss, *args, **kwargs)

    def on_total_loss(self, loss: Tensor) -> None:
        """Record the loss of a micro-batch, including the losses of methods. `MethodCallback` calls this function.

        The recorded loss is the mean over the items of all processes, plus the losses that methods add in this process.
        """
        own = loss.detach()
        self._unread.append((own if self._elsewhere is None else own + self._elsewhere, self._weight))
        if loss.device.type == "cpu" or len(self._unread) >= READ_EVERY:
            self.read_losses(self.trainer.fit_loop.batch_idx)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        if self._first:  # see `TrainingStep.update`
            release_freed_memory()
            self._first = False

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        # All callbacks have already used the gradients. Lightning would free the gradients only after the next forward
        # pass, which would increase the peak memory.
        if ends_step(self.trainer, batch_idx):
            for optimizer in self.trainer.optimizers:
                optimizer.zero_grad(set_to_none=True)

    def read_losses(self, batch_idx: int) -> None:
        """Read the losses that were recorded since the last call, and add these losses to the running sums.

        `batch_idx` is the index of the last recorded batch.

        Raises:
            DivergedError: If a loss is not finite.
        """
        if not self._unread:
            return
        values, weights = (torch.stack(of).tolist() for of in zip(*self._unread, strict=True))
        self._unread.clear()
        for back, value in enumerate(reversed(values)):
            if not math.isfinite(value):
                bad = batch_idx - back
                later = (self.trainer.fit_loop.batch_idx - bad) // self.config.trainer.grad_accum_steps
                where = f"step {self.global_step + 1 - later} (epoch {self.current_epoch + 1}, batch {bad + 1})"
                raise self._diverged(f"The loss is {value} at {where}")
        if self._first_loss is None:
            self._first_loss = values[0]
        for sums in self._sums.values():
            sums[0] += sum(value * weight for value, weight in zip(values, weights, strict=True))
            sums[1] += sum(weights)

    def require_finite(self) -> None:
        """Raise DivergedError if a trained parameter is not finite. Call this function before saving parameters."""
        trained = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        finite = [p.detach().isfinite().all() for p in trained.values()]
        if finite and not bool(torch.stack(finite).all()):
            bad = [name for name, ok in zip(trained, finite, strict=True) if not ok]
            raise self._diverged(
                f"{len(bad)} of {len(trained)} trained parameters are not finite after step {self.global_step}"
                f" ({bad[0]}{', …' if len(bad) > 1 else ''})"
            )

    def require_finite_evaluation(self, split: str) -> None:
        """Raise DivergedError if the mean loss on `split` is not finite."""
        losses = [of.loss for of in (self.evaluated, *self.evaluated_tasks.values()) if of is not None]
        if bad := [loss for loss in losses if not math.isfinite(loss)]:
            raise self._diverged(f"The {split} loss is {bad[0]} after epoch {self.current_epoch + 1}")

    def warn_if_diverged(self, mean: float | None) -> None:
        """Warn once if the training loss has diverged but is still finite.

        The mean loss of the epoch must exceed two thresholds: `DIVERGED` times the loss of the first batch, which was
        computed before the first update, and `DIVERGED` times the chance loss, e.g. log(classes). The mean is used
        because single hard batches have little effect on it. If the first loss is very small, the second threshold
        prevents a warning after a small increase.
        """
        warned = any("has diverged" in text for text in self.warnings)
        if mean is None or self._first_loss is None or warned:
            return
        if mean > DIVERGED * max(self._first_loss, self._chance):
            self._warn(
                f"The training loss has diverged: its mean in epoch {self.current_epoch + 1} is {mean:.3g}, but"
                f" the first batch had a loss of {self._first_loss:.3g}. Try {', '.join(self._tries())}."
            )

    def _warn(self, text: str) -> None:
        say(f"warning: {text[0].lower()}{text[1:]}")
        self.warnings.append(text)

    def _diverged(self, what: str) -> DivergedError:
        """Return the error that stops a diverged run. The error message suggests settings to change."""
        return DivergedError(
            f"{what}, so training was stopped. Try {', '.join(self._tries())}. A run with changed settings starts from"
            " the beginning. This step was not saved."
        )

    def _tries(self) -> list[str]:
        optim, trainer = self.config.optim, self.config.trainer
        tries = [f"a smaller optim.lr (now {optim.lr:g})"]
        if optim.grad_clip_norm is None:
            tries.append("optim.grad_clip_norm=1")
        tries.append(f"a larger optim.warmup_steps (now {warmup_steps(optim, self.total_steps)})")
        if trainer.precision != "fp32":
            other = "bf16 or fp32" if trainer.precision == "fp16" else "fp32"
            tries.append(f"trainer.precision={other} (now {trainer.precision})")
        return tries

    def loss_so_far(self) -> float | None:
        """Return the mean of the losses read so far in the current epoch, or None if no loss was read."""
        total, count = self._sums["epoch"]
        return total / count if count else None

    def mean_loss(self, over: str) -> float | None:
        """Return the mean training loss since the last call with the same `over` ("epoch" or "window").

        The sum of the losses is then reset. The result is None if no loss was read.
        """
        total, count = self._sums[over]
        self._sums[over] = [0.0, 0]
        return total / count if count else None

    #: Indices of the evaluation loaders whose batches are ignored in this process. See `RunDataModule.repeated`.
    _repeated: frozenset[int] = frozenset()

    def on_validation_start(self) -> None:
        self._repeated = getattr(self.trainer.datamodule, "repeated", frozenset())  # type: ignore[attr-defined]

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Update the metrics of the task to which the loader belongs."""
        if dataloader_idx in self._repeated:
            return
        images, labels, *more = batch
        if self.tasks is not None:
            self.tasks.active = self.tasks.names[dataloader_idx]
        with self._input(images, labels, more) as x, last_layer_in_fp32(self.model):
            logits = self.task.evaluation_logits(self.model, x).float()
        self.scores[dataloader_idx].update(logits, labels)
        self._keep_range(dataloader_idx, self.task.predicted(logits), labels)
        self.eval_loss[dataloader_idx].update(self.task.loss(logits, labels), self._items(labels))

    def on_validation_epoch_end(self) -> None:
        scores, losses = [one.compute() for one in self.scores], [float(one.compute()) for one in self.eval_loss]
        accuracies = [one.pop(self.task.metric) for one in scores]
        if self.tasks is None:
            self.evaluated = Evaluation(accuracies[0], losses[0], scores[0])
            self.evaluated_classes, self.evaluated_notes = self.scores[0].each_class(), self.scores[0].notes()
        else:
            self.evaluated = Evaluation(sum(accuracies) / len(accuracies), sum(losses) / len(losses))
            each = map(Evaluation, accuracies, losses)
            self.evaluated_tasks = dict(zip(self.tasks.names, each, strict=True))
        for metric in (*self.scores, *self.eval_loss):
            metric.reset()
        self._warn_if_constant()

    def _keep_range(self, task: int, predicted: Tensor | None, labels: Tensor) -> None:
        """Update the ranges of the predicted classes and of the labels of a task.

        A range is stored as its minimum and its negated maximum, so that ranges of batches and processes can be
        combined with a minimum reduction.
        """
        if predicted is None:
            return
        labeled = labels != IGNORED
        first, last = labels.where(labeled, NO_CLASS).min(), -labels.where(labeled, -NO_CLASS).max()
        found = torch.stack([predicted.min(), -predicted.max(), first, last])
        self._classes[task] = torch.minimum(self._classes.get(task, found), found)

    def _warn_if_constant(self) -> None:
        """Warn if an evaluation predicts the same class for all samples, and name likely causes.

        No warning is given during the warm-up or before `MEANINGFUL_STEPS` optimizer steps, because a new classifier
        has not learned anything yet.
        """
        none = torch.full((4,), NO_CLASS, device=self.device)  # used if a process has no images of a task
        ranges = torch.stack([self._classes.get(task, none) for task in range(len(self.scores))])
        if self.trainer.world_size > 1:
            torch.distributed.all_reduce(ranges, op=torch.distributed.ReduceOp.MIN)
        self._classes = {}
        least = max(MEANINGFUL_STEPS, warmup_steps(self.config.optim, self.total_steps))
        constant = [low for low, high, first, last in ranges.tolist() if low == -high and first < -last]
        if self.trainer.global_step < least:
            constant = []
        if constant and not self._constant:
            self._warn(
                f"Epoch {self.current_epoch + 1}: every {self.task.item} of the evaluation is predicted as"
                f" class {constant[0]}, so the network does not distinguish classes. {' '.join(likely_causes(self))}"
            )
        self._constant = bool(constant)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["losses"] = {over: list(sums) for over, sums in self._sums.items()}
        checkpoint["first_loss"], checkpoint["warnings"] = self._first_loss, list(self.warnings)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self._sums = {over: list(sums) for over, sums in checkpoint["losses"].items()}
        self._first_loss, self.warnings = checkpoint.get("first_loss"), list(checkpoint.get("warnings", ()))


def likely_causes(module: FineTuner) -> list[str]:
    """Return sentences that name likely causes of identical predictions, the most likely cause first."""
    config = module.config
    warmup = f"optim.warmup_steps (now {warmup_steps(config.optim, module.total_steps)})"
    found = []
    frozen = [m for m in module.model.modules() if isinstance(m, _BatchNorm)] if config.model.frozen_bn is True else []
    if any(parameter.requires_grad for norm in frozen for parameter in norm.parameters()):
        # A run that freezes parameters may already train only the last stage.
        fewer = "last_stage" if all(parameter.requires_grad for parameter in module.model.parameters()) else "head"
        found.append(
            "BatchNorm keeps the statistics of pretraining (model.frozen_bn=true), but its parameters are trained. Use"
            f" model.frozen_bn=false, a smaller optim.lr, or a method that trains fewer layers (method={fewer})."
        )
    if not config.model.pretrained and config.model.weights is None:
        found.append("The network starts from random weights and may need more epochs.")
    found.append(
        f"It is also possible that optim.lr={config.optim.lr:g} is too high. Try optim.lr={config.optim.lr / 10:g},"
        f" or a larger {warmup}."
        if found
        else f"The learning rate optim.lr={config.optim.lr:g} is probably too high, or possibly too low. Try"
        f" optim.lr={config.optim.lr / 10:g} first, or a larger {warmup}."
    )
    return found
