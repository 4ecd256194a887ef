"""The Lightning module of a fine-tuning run, and the order in which it sees the images.

Kept lean on purpose: nothing is logged per step through Lightning, no metric runs in training, and the learning
rate is a function of the step, so that the framework stays within a few percent of a bare loop.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import lightning.pytorch as L
import torch
from timm.optim import param_groups_layer_decay, param_groups_weight_decay
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy

from efficient_ft.core.errors import UserError
from efficient_ft.core.seeding import seed_of, seed_step
from efficient_ft.models.tasks import tasks_of
from efficient_ft.models.view import view

if TYPE_CHECKING:
    from efficient_ft.config import Config, OptimConfig
    from efficient_ft.data import ImageData, RoundRobinData

#: On an accelerator the losses are read (a synchronisation) once in so many batches; on the CPU at each.
READ_EVERY = 50


class Evaluation(NamedTuple):
    accuracy: float  # fraction 0–1
    loss: float


def lr_factor(step: int, total_steps: int, optim: OptimConfig) -> float:
    """The learning rate of optimizer step `step` as a fraction of `optim.lr`.

    Linear warm-up from `warmup_start_factor` over `warmup_steps`, then a cosine down to `min_lr_ratio` (or constant).
    """
    warmup = min(optim.warmup_steps, total_steps)
    if step < warmup:
        return optim.warmup_start_factor + (1 - optim.warmup_start_factor) * step / warmup
    if optim.schedule == "constant":
        return 1.0
    progress = min(1.0, (step - warmup) / max(1, total_steps - warmup))
    return optim.min_lr_ratio + (1 - optim.min_lr_ratio) * 0.5 * (1 + math.cos(math.pi * progress))


class SGD(torch.optim.SGD):
    """torch's, for parameters that do not all get their first gradient in the same step.

    Its fused kernel fails where some have a momentum and others have none yet; from a momentum of 0 the first step is
    the same to the last bit.
    """

    def _init_group(self, group: Any, *lists: Any) -> Any:
        for parameter in group["params"] if group["momentum"] and group["fused"] else ():
            if parameter.grad is not None and self.state[parameter].get("momentum_buffer") is None:
                self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        return super()._init_group(group, *lists)


def build_optimizer(network: nn.Module, optim: OptimConfig, precision: str = "fp32") -> torch.optim.Optimizer:
    """The optimizer over the parameters that may train; weight decay spares norms and biases, as timm does.

    Layer decay gives deeper layers a larger rate (timm's grouping of the model), and `head_lr_mult` the classifier its own.

    Raises:
        UserError: nothing trains.
    """
    if not any(p.requires_grad for p in network.parameters()):
        raise UserError(
            "Nothing trains: every parameter is frozen. Choose a method that selects some, e.g. method=head."
        )
    spared: set[str] = getattr(network, "no_weight_decay", set)()
    if optim.layer_decay is None:
        groups = param_groups_weight_decay(network, optim.weight_decay, no_weight_decay_list=spared)
    else:
        groups = param_groups_layer_decay(
            network, optim.weight_decay, no_weight_decay_list=spared, layer_decay=optim.layer_decay
        )
    if optim.head_lr_mult != 1:
        head = {id(p) for name in view(network).head for p in network.get_submodule(name).parameters()}
        scaled = [
            {
                **g,
                "params": [p for p in g["params"] if id(p) in head],
                "lr_scale": g.get("lr_scale", 1.0) * optim.head_lr_mult,
            }
            for g in groups
        ]
        groups = [{**g, "params": [p for p in g["params"] if id(p) not in head]} for g in groups] + scaled
    groups = [g for g in groups if g["params"]]
    for group in groups:
        group["lr"] = group["initial_lr"] = optim.lr * group.get("lr_scale", 1.0)
    # Lightning refuses to clip for fused kernels under autocast, since they unscale fp16 gradients themselves.
    device = next(network.parameters()).device.type
    fused = device in ("cpu", "cuda") and precision == "fp32"
    if optim.name == "sgd":
        return SGD(groups, lr=optim.lr, momentum=optim.momentum, fused=fused)
    adam = torch.optim.AdamW if optim.name == "adamw" else torch.optim.Adam
    return adam(groups, lr=optim.lr, betas=optim.betas, fused=fused)


class FineTuner(L.LightningModule):
    """Fine-tunes `model` (the network) by cross-entropy; `MethodCallback` carries the methods.

    A batch is (images, labels), or (images, labels, task), whose classifier its loss is that of.

    Args:
        network: a classifier of images (B, 3, H, W) → logits (B, classes).
        config: the run's configuration.
        num_classes: of the data; by task where the network has several (`models.tasks`).
        total_steps: optimizer steps of the whole run, for the schedule.
    """

    def __init__(
        self,
        network: nn.Module,
        config: Config,
        num_classes: int | Mapping[str, int],
        total_steps: int,
    ):
        super().__init__()
        self.model = network
        self.config = config
        self.total_steps = total_steps
        self.tasks = tasks_of(network)
        counts = [num_classes] if isinstance(num_classes, int) else list(num_classes.values())
        # One per task; modules, which Lightning moves to the device.
        self.accuracy: Any = nn.ModuleList(MulticlassAccuracy(n, average="micro", validate_args=False) for n in counts)
        self.eval_loss: Any = nn.ModuleList(MeanMetric() for _ in counts)
        #: Of the last evaluation; with several tasks their mean, and each by its name.
        self.evaluated: Evaluation | None = None
        self.evaluated_tasks: dict[str, Evaluation] = {}
        self._fresh: list[Tensor] = []  # losses not read yet
        self._sums = {"epoch": [0.0, 0], "window": [0.0, 0]}  # sum and count of the losses read

    # ------------------------------------------------------------------ training
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return build_optimizer(self.model, self.config.optim, self.config.trainer.precision)

    def on_fit_start(self) -> None:
        self.train()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        # Dropout, drop path and stochastic rounding: by counters, so that a resumed run draws the same.
        batches = self.trainer.num_training_batches
        counter = self.trainer.current_epoch * int(batches) + batch_idx
        seed_step(seed_of(self.config.seed, self.global_rank, counter), self.device)
        factor = lr_factor(self.global_step, self.total_steps, self.config.optim)
        for group in self.trainer.optimizers[0].param_groups:
            group["lr"] = group["initial_lr"] * factor

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        images, labels, *task = batch
        if self.tasks is not None:
            (self.tasks.active,) = task
        return F.cross_entropy(self.model(images), labels, label_smoothing=self.config.optim.label_smoothing)

    def on_total_loss(self, loss: Tensor) -> None:
        """Keep the loss of a micro-batch, those of methods included: called by `MethodCallback`."""
        self._fresh.append(loss.detach())
        if loss.device.type == "cpu" or len(self._fresh) >= READ_EVERY:
            self.read_losses(self.trainer.fit_loop.batch_idx)

    def read_losses(self, batch_idx: int) -> None:
        """Add the losses since the last call to the sums; `batch_idx` is the batch of the last of them.

        Raises:
            UserError: one of them is not finite.
        """
        if not self._fresh:
            return
        values = torch.stack(self._fresh).tolist() if len(self._fresh) > 1 else [self._fresh[0].item()]
        self._fresh.clear()
        for back, value in enumerate(reversed(values)):
            if not math.isfinite(value):
                self._refuse(value, batch_idx - back)
        for sums in self._sums.values():
            sums[0] += sum(values)
            sums[1] += len(values)

    def _refuse(self, loss: float, batch_idx: int) -> None:
        optim, trainer = self.config.optim, self.config.trainer
        step = self.global_step + 1 - (self.trainer.fit_loop.batch_idx - batch_idx) // trainer.grad_accum_steps
        tries = [f"a smaller optim.lr (now {optim.lr:g})"]
        if optim.grad_clip_norm is None:
            tries.append("optim.grad_clip_norm=1")
        tries.append(f"more optim.warmup_steps (now {optim.warmup_steps})")
        if trainer.precision != "fp32":
            other = "bf16 or fp32" if trainer.precision == "fp16" else "fp32"
            tries.append(f"trainer.precision={other} (now {trainer.precision})")
        raise UserError(
            f"The loss is {loss} at step {step} (epoch {self.current_epoch + 1}, batch {batch_idx + 1}):"
            f" training stopped. Try {', '.join(tries)}. The checkpoint before it is kept; changed settings start a"
            " run of their own."
        )

    def mean_loss(self, over: str) -> float | None:
        """Mean training loss over the `epoch` or the `window` since the last call with that word."""
        total, count = self._sums[over]
        self._sums[over] = [0.0, 0]
        return total / count if count else None

    # ------------------------------------------------------------------ evaluation
    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
        images, labels = batch
        if self.tasks is not None:
            self.tasks.active = self.tasks.names[dataloader_idx]
        logits = self.model(images).float()
        self.accuracy[dataloader_idx].update(logits, labels)
        self.eval_loss[dataloader_idx].update(F.cross_entropy(logits, labels), weight=len(labels))

    def on_validation_epoch_end(self) -> None:
        accuracies, losses = ([float(m.compute()) for m in of] for of in (self.accuracy, self.eval_loss))
        self.evaluated = Evaluation(sum(accuracies) / len(accuracies), sum(losses) / len(losses))
        if self.tasks is not None:
            each = map(Evaluation, accuracies, losses)
            self.evaluated_tasks = dict(zip(self.tasks.names, each, strict=True))
        for metric in (*self.accuracy, *self.eval_loss):
            metric.reset()

    # ------------------------------------------------------------------ state
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["losses"] = {over: list(sums) for over, sums in self._sums.items()}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self._sums = {over: list(sums) for over, sums in checkpoint["losses"].items()}


class Images(L.LightningDataModule):
    """Gives Lightning the loaders, at the place where the run is: also in the middle of an epoch."""

    def __init__(self, images: ImageData | RoundRobinData):
        super().__init__()
        self.images = images

    def train_dataloader(self) -> DataLoader:
        trainer = self.trainer
        assert trainer is not None
        loader = self.images.train_loader(trainer.global_rank, trainer.world_size)
        epochs: Any = trainer.fit_loop.epoch_progress.current
        if epochs.started > epochs.processed:  # resumed in the middle of an epoch
            batches: Any = trainer.fit_loop.epoch_loop.batch_progress.current
            sampler: Any = loader.sampler
            sampler.start = batches.processed * int(loader.batch_size or 1)
        return loader

    def val_dataloader(self) -> DataLoader | Sequence[DataLoader]:
        trainer = self.trainer
        assert trainer is not None
        return self.images.eval_loader(self.images.best_split, trainer.global_rank, trainer.world_size)
