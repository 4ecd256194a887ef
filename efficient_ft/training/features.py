"""Features of a run's frozen prefix: computed once for each image and augmented view, and stored.

With ``trainer.cache_features`` epoch e trains on view e mod V of each image (V: ``trainer.views``), so from epoch V on
every batch is read from the store, and the network runs from there. Features pass through the form in which they are
stored also when they have just been computed: all epochs train on the same values.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from efficient_ft.config import Config
from efficient_ft.core.errors import SettingError, UserError
from efficient_ft.core.units import parse_bytes
from efficient_ft.cost.run_flops import FlopsCounter
from efficient_ft.data import ImageData
from efficient_ft.data.loader import LoadFailure, SplitDataset
from efficient_ft.methods.base import Method
from efficient_ft.methods.declarations import Axis
from efficient_ft.models import factory
from efficient_ft.models.prefix import FrozenPrefix, find_prefix
from efficient_ft.record.results import FeaturesReport
from efficient_ft.training.console import format_bytes, say
from efficient_ft.training.feature_store import FeatureStore, RowForm, StoreFullError

#: Changes when stores of earlier versions cannot be used any more.
_FORMAT = 1
#: ``auto`` stores features where computing them takes at least this share of a training step's FLOPs.
_WORTH = 0.1
#: Images of the batch on which the prefix is found.
_IMAGES = 2


class FeatureDataset(Dataset[Any]):
    """The images of a split by (epoch, index): their stored features, or the images while these are not there.

    Args:
        images: the split.
        store: has the features.
        first: the row of the first view's first image.
        views: the number of views; epoch e has view e mod `views`.
    """

    def __init__(self, images: SplitDataset, store: FeatureStore, first: int, views: int) -> None:
        self._images, self._store, self._first, self._views = images, store, first, views

    def __len__(self) -> int:
        return len(self._images)

    def __getitems__(self, keys: list[tuple[int, int]]) -> tuple[Tensor, Tensor, Tensor] | LoadFailure:
        """Load a batch.

        Returns:
            Rows of the store, uint8 (B, bytes), or the images, float32 (B, C, H, W), if one row is not there; the
            labels, int64 (B,); the numbers of the rows, int64 (B,). Or the failure to read a file.
        """
        keys = [(epoch % self._views, index) for epoch, index in keys]
        rows = [self._first + view * len(self) + index for view, index in keys]
        stored = self._store.read(rows)
        if stored is not None:
            return stored, self._images.labels[[index for _, index in keys]], torch.tensor(rows)
        loaded = self._images.__getitems__(keys)
        return loaded if isinstance(loaded, LoadFailure) else (*loaded, torch.tensor(rows))


class RunFeatures:
    """The features of one run: where they come from, and the network's computation from them.

    Args:
        prefix: of the run's network.
        form: in which they are stored.
        store: has them, or will have them.
        views: of each training image.
        train: the number of training images.
    """

    def __init__(self, prefix: FrozenPrefix, form: RowForm, store: FeatureStore, views: int, train: int) -> None:
        self.prefix, self.form, self.store, self.views = prefix, form, store, views
        self._evaluated = views * train
        self._known = store.written()
        self._told = False
        #: True once the disk had no room for a row.
        self.full = False
        self._computed = self._read = 0

    def training(self, images: SplitDataset) -> FeatureDataset:
        """The training images, by epoch."""
        return FeatureDataset(images, self.store, 0, self.views)

    def evaluation(self, images: SplitDataset) -> FeatureDataset:
        """The images on which the best epoch is chosen."""
        return FeatureDataset(images, self.store, self._evaluated, 1)

    @contextmanager
    def input(self, images: Tensor, rows: Tensor) -> Iterator[Tensor]:
        """Let the network compute from the features of a batch inside a ``with`` block.

        Args:
            images: images or stored rows, as `FeatureDataset` loads them.
            rows: their numbers.

        Yields:
            What to pass to the network.
        """
        if images.dtype == torch.uint8:
            self._read += len(rows)
            stored = images
        else:
            self._computed += len(rows)
            stored = self.form.encode(self.prefix.to_rows(self.prefix.features(images)))
            self._write(rows.cpu(), stored.cpu())
        features = self.prefix.from_rows(self.form.decode(stored)).to(self.prefix.dtype)
        with self.prefix.replaced(features) as placeholder:
            yield placeholder

    def _write(self, rows: Tensor, stored: Tensor) -> None:
        if self._known[rows.numpy()].all() and not self._told:
            self._told = True
            say(f"Stored features in {self.store.folder} are damaged; they are computed again.")
        if self.full:
            return
        try:
            self.store.write(rows.tolist(), stored)
        except StoreFullError:
            self.full = True
            say(
                f"The disk of {self.store.folder} is full. Features that are not stored are computed in every epoch;"
                " the run goes on."
            )

    def report(self) -> FeaturesReport:
        """Return what a run records."""
        return {
            "end": self.prefix.end,
            "reason": self.prefix.reason,
            "shape": list(self.prefix.shape),
            "dtype": self.form.name,
            "views": self.views,
            "bytes": self.store.rows * self.store.row_bytes,
            "computed": self._computed,
            "read": self._read,
        }


class FeatureCallback(L.Callback):
    """Give the run's module and data their features. Place it after `MethodCallback`, which applies the methods.

    Args:
        config: of the run; `trainer.cache_features` is ``on`` or ``auto``.
        images: of the run.
        methods: of the run.
        epochs: of the run.
    """

    def __init__(self, config: Config, images: ImageData, methods: Sequence[Method], epochs: int) -> None:
        self._config, self._images, self._methods, self._epochs = config, images, methods, epochs
        #: None: the run has none.
        self.features: RunFeatures | None = None

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Find the prefix and open the store, or say why there is none.

        Raises:
            UserError: with ``trainer.cache_features=on`` where no features can be stored.
        """
        if stage != "fit" or self.features is not None:
            return
        module: Any = pl_module
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        auto = self._config.trainer.cache_features == "auto"
        device = trainer.strategy.root_device
        try:
            self.features = run_features(
                self._config, self._images, module.model, self._methods, self._epochs, device, must_gain=auto
            )
        except UserError as error:
            if not auto:
                raise
            say(f"Features are not stored (trainer.cache_features=auto): {error}")
        module.features = data.features = self.features


def run_features(
    config: Config,
    images: ImageData,
    network: nn.Module,
    methods: Sequence[Method],
    epochs: int,
    device: torch.device,
    *,
    must_gain: bool = False,
) -> RunFeatures:
    """Open the features of a run.

    Args:
        config: of the run.
        images: of the run.
        network: on the CPU, with the methods applied.
        methods: of the run.
        epochs: of the run.
        device: where the network runs.
        must_gain: refuse also what would save no time.

    Raises:
        SettingError: they take more room than the settings or the disk have.
        UserError: no part of the network can be computed once.
    """
    options, spec = config.trainer, factory.input_of(config.model)
    for method in methods:
        if type(method).step_begin is not Method.step_begin and Axis.SELECTION in (method.axis, *method.other_axes):
            raise UserError(
                f"trainer.cache_features: method {method.name} decides in each step what trains, so no part of the"
                " network is frozen throughout. Use trainer.cache_features=off, or another selection."
            )
    if must_gain and epochs <= options.views:
        raise UserError(f"none would be used twice: trainer.epochs={epochs}, trainer.views={options.views}.")
    was_training = network.training
    network.train()
    try:
        sample = torch.randn(_IMAGES, len(spec.mean), *spec.size, generator=torch.Generator().manual_seed(0))
        prefix = find_prefix(network, sample)
        if must_gain and (share := _share_of_step(network, prefix, sample)) < _WORTH:
            raise UserError(f"they are {share:.0%} of the FLOPs of a training step ({prefix.reason}).")
    finally:
        network.train(was_training)
    views = options.views
    train, evaluated = images.splits["train"], images.splits[images.best_split]
    form = RowForm(options.cache_dtype, prefix.values)
    about = {
        "format": _FORMAT,
        "model": config.model.model_dump(mode="json", exclude={"pretrained", "weights", "select", "zero_head"}),
        "end": prefix.end,
        "shape": prefix.shape,
        "weights": prefix.digest(),
        "images": images.content_digest(),
        "augment": config.data.augment.model_dump(mode="json"),
        "seed": config.seed,
        "views": views,
        "precision": options.precision,
        "device": device.type,
        "dtype": options.cache_dtype,
    }
    key = hashlib.blake2b(json.dumps(about, sort_keys=True).encode(), digest_size=8).hexdigest()
    folder, rows = Path(options.cache_folder) / key, views * train + evaluated
    _require_room(options.cache_limit, folder, rows * form.bytes)
    store = FeatureStore(folder, about, rows, form.bytes)
    missing = store.missing()
    say(
        f"Features of {prefix.end} ({' × '.join(map(str, prefix.shape))}, {form.name}):"
        f" {views} view{'s' if views > 1 else ''} of {train} training images, and {evaluated} {images.best_split}"
        f" images, {format_bytes(rows * form.bytes)} in {folder};"
        f" {'all are there' if not missing else f'{missing} of {rows} are to be computed'}. {prefix.reason}."
    )
    return RunFeatures(prefix, form, store, views, train)


def _require_room(limit: str | int | float, folder: Path, size: int) -> None:
    """Refuse features that are larger than the limit, or than what the disk has left for them."""
    how = "Or use fewer trainer.views, trainer.cache_dtype=int8, or trainer.cache_features=off."
    if size > parse_bytes("trainer.cache_limit", limit):
        raise SettingError("trainer.cache_limit", limit, f"at least {size / 1e9:.2f}GB for these features", how)
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    taken = sum(file.stat().st_blocks * 512 for file in folder.glob("*")) if folder.exists() else 0
    free = shutil.disk_usage(there).free
    if size - taken > free:
        raise SettingError(
            "trainer.cache_folder",
            folder.parent,
            f"on a disk with {(size - taken) / 1e9:.2f} GB left for these features ({free / 1e9:.2f} GB are)",
            how,
        )


@torch.no_grad()
def _share_of_step(network: nn.Module, prefix: FrozenPrefix, images: Tensor) -> float:
    """The share of the prefix in the FLOPs of a training step, whose backward pass has twice those of the forward pass.

    Counted, and not timed: whether a run stores features changes its results a little, so it is decided in the same
    way on every machine and after every interruption.
    """
    with torch.random.fork_rng(devices=[]):
        with FlopsCounter() as below:
            features = prefix.features(images)
        with FlopsCounter() as above, prefix.replaced(features) as placeholder:
            network(placeholder)
    return below.flops / max(below.flops + 3 * above.flops, 1)
