"""The data of a run: summaries, hashes, the number of steps, and the data loaders for Lightning."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning.pytorch as L
from torch.utils.data import DataLoader

from efficient_ft.config import Config
from efficient_ft.config.class_weights import weights_file
from efficient_ft.core.errors import SettingError, UserError
from efficient_ft.core.text import printable
from efficient_ft.data import read_data
from efficient_ft.data.contents import Contents, files_contents, joined, looked_at
from efficient_ft.data.inspection import Summary
from efficient_ft.models import factory
from efficient_ft.training.kinds.base import RunData
from efficient_ft.training.kinds.registry import kind_of
from efficient_ft.training.optimizer import WARMUP_AT_MOST

if TYPE_CHECKING:
    from efficient_ft.training.features.prefix import RunFeatures


def refuse_missing_files(config: Config, *messages: str | None) -> None:
    """Raise UserError if weights or data of a run are missing. `messages` describe other missing files, or are None."""
    missing = [factory.missing_weights(config.model), *kind_of(config).missing(config), *messages]
    if any(missing):
        raise UserError("\n".join(message for message in missing if message is not None))


def run_contents(config: Config, images: RunData | None = None) -> Contents:
    """Return hashes of the data and of the weights with which a run starts.

    If `images` is None, the data are listed without being opened.

    Raises:
        UserError: See `data.read_data`.
    """
    if images is None:
        data = {task: (one, read_data(one)) for task, one in (config.tasks or {"": config.data}).items()}
        found = {task: looked_at(lists, Path(one.root).expanduser()).read() for task, (one, lists) in data.items()}
    else:
        found = {task: part.contents() for task, part in images.parts.items()}
    every = {f"{task} " if task else "": one for task, one in found.items()}
    if config.model.weights is not None:
        place = Path(config.model.weights).expanduser()
        files = sorted(one for one in place.iterdir() if one.is_file()) if place.is_dir() else [place]
        every |= {"model.": files_contents("weights", files)}
    if (file := weights_file(config.optim.class_weights)) is not None:
        every["optim."] = files_contents("class_weights", [file])
    return joined(every)


def summaries(images: RunData, *, thorough: bool = False) -> dict[str, Summary]:
    """Return a mapping from tasks to the summaries of their data sets. A single data set has the key "".

    The argument `thorough` is described in `OpenedData.inspect`.
    """
    return {task: part.summary(thorough=thorough) for task, part in images.parts.items()}


def summary_text(found: Mapping[str, Summary]) -> str:
    """Return the summaries of a run's data sets as text. Each note and each warning has its own line."""
    lines = []
    for task, one in found.items():
        prefix = f"{task}: " if task else ""
        lines += [prefix + line if not line.startswith(" ") else line for line in one.lines()]
        lines += [prefix + note for note in one.notes]
        lines += [f"warning: {prefix}{warning}" for warning in one.warnings]
    return "\n".join(lines)


def refuse_unusable(config: Config, found: Mapping[str, Summary]) -> None:
    """Raise UserError if the inspection found unusable samples and ``data.on_corrupt`` does not skip them."""
    for task, one in found.items():
        data, setting = (config.tasks[task], f"tasks.{task}") if task else (config.data, "data")
        problems = one.inspection.problems
        if not problems or data.on_corrupt != "stop":
            continue
        path, why = next(iter(problems.items()))
        shown = printable(path)
        more = f" `efficient-ft check` lists all {len(problems):,} unusable files." if len(problems) > 1 else ""
        raise UserError(
            f"{why if why.startswith(shown) else f'{shown}: {why}.'} Correct such files.{more} To skip"
            f" unusable files, set {setting}.on_corrupt=skip."
        )


def run_length(config: Config, images: RunData, world: int) -> tuple[int, int]:
    """Return the number of epochs and the number of optimizer steps.

    If batches remain at the end of an epoch, they form an additional step. `world` is the number of processes.

    Raises:
        SettingError: If there are more processes than training samples, if an epoch has fewer batches than an optimizer
            step needs, or if the warm-up would take the whole run.
    """
    accumulated = config.trainer.grad_accum_steps
    batches = len(images.train_loader(0, world))
    if not batches:
        raise SettingError("trainer.devices", world, "at most the number of training samples")
    if accumulated > batches and config.data.effective_batch_size is not None:
        known = "at most the number of training samples"
        raise SettingError("data.effective_batch_size", config.data.effective_batch_size, known)
    if accumulated > batches:
        raise SettingError(
            "trainer.grad_accum_steps", accumulated, f"at most {batches}, the number of batches in an epoch"
        )
    per_epoch = -(-batches // accumulated)
    total = config.trainer.epochs * per_epoch
    if (warmup := config.optim.warmup_steps or 0) >= total:
        raise SettingError(
            "optim.warmup_steps",
            warmup,
            f"less than {total}, the number of optimizer steps for trainer.epochs={config.trainer.epochs}",
            f"The learning rate would never reach optim.lr={config.optim.lr:g}. With optim.warmup_steps=null,"
            f" the warm-up takes a quarter of the run, but at most {WARMUP_AT_MOST} steps.",
        )
    if config.trainer.max_steps > 0:
        total = min(total, config.trainer.max_steps)
    return -(-total // per_epoch), total


class RunDataModule(L.LightningDataModule):
    """Lightning data module that provides the data loaders of a run.

    When a run is resumed, the training loader continues with the next batch, even in the middle of an epoch.

    Attributes:
        features: stored features that are loaded instead of images, or None to load images.
        repeated: indices of the evaluation loaders that have no samples for this process. These loaders repeat the
            samples of the first process, and their batches are ignored.
    """

    features: RunFeatures | None = None
    repeated: frozenset[int] = frozenset()

    def __init__(self, images: RunData) -> None:
        super().__init__()
        self.images = images

    def train_dataloader(self) -> DataLoader:
        trainer: Any = self.trainer
        wrap: dict[str, Any] = {} if self.features is None else {"wrap": self.features.training}
        loader = self.images.train_loader(trainer.global_rank, trainer.world_size, **wrap)
        epochs = trainer.fit_loop.epoch_progress.current
        if epochs.started > epochs.processed:  # the run was resumed in the middle of an epoch
            batches = trainer.fit_loop.epoch_loop.batch_progress.current
            sampler: Any = loader.sampler
            sampler.start = batches.processed * int(loader.batch_size or 1)
        return loader

    def val_dataloader(self) -> Sequence[DataLoader]:
        trainer: Any = self.trainer
        own = self._eval_loaders(trainer.global_rank)
        self.repeated = frozenset(index for index, loader in enumerate(own) if not len(loader))
        # With an empty loader, Lightning would skip the evaluation, and other processes would wait for this one.
        of_first = self._eval_loaders(0) if self.repeated else own
        return [of_first[i] if i in self.repeated else loader for i, loader in enumerate(own)]

    def _eval_loaders(self, rank: int) -> Sequence[DataLoader]:
        """Return the evaluation loaders of the process `rank`, one for each data set."""
        assert self.trainer is not None
        wrap: dict[str, Any] = {} if self.features is None else {"wrap": self.features.evaluation}
        return self.images.eval_loaders(self.images.best_split, rank, self.trainer.world_size, **wrap)
