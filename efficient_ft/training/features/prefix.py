"""Features of a run: the outputs of its frozen prefix, stored for each image and augmented view.

``trainer.prefix`` determines the form of the prefix. With ``trainer.cache_features``, epoch e trains on view e mod V of
each image, where V is ``trainer.views``. From epoch V on, batches are read from the store, and only the layers after
the prefix run. New features are also rounded to the storage format, so that all epochs train on the same values.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from efficient_ft.config import Config
from efficient_ft.core.errors import SettingError, UserError
from efficient_ft.core.format import format_bytes, format_percent, format_seconds
from efficient_ft.core.parsing import parse_json
from efficient_ft.core.terminal import shown_path
from efficient_ft.cost.executed import AUTOCAST
from efficient_ft.cost.run_flops import FlopsCounter
from efficient_ft.data import ImageData
from efficient_ft.data.loader import LoadFailure, SplitDataset
from efficient_ft.data.row_store import RowStore, StoreFullError, require_room
from efficient_ft.methods.base import Method
from efficient_ft.methods.declarations import Axis
from efficient_ft.models import factory
from efficient_ft.models.prefix import FrozenPrefix, find_prefix
from efficient_ft.models.prefix_form import Form, choose_form
from efficient_ft.models.weight_dtype import stores_bf16
from efficient_ft.record.environment import device_name
from efficient_ft.record.files import write_text_atomically
from efficient_ft.record.formats import START_AGAIN
from efficient_ft.record.results import FeaturesReport, PrefixReport
from efficient_ft.training.bf16_units import bf16_is_emulated
from efficient_ft.training.features.row_form import RowForm
from efficient_ft.training.output.console import say

#: Format version of stored features. Increase this number when the format changes.
_FORMAT = 1
#: With ``auto``, features are stored if computing them takes at least this fraction of the FLOPs of a training step.
_WORTH = 0.1
#: A run mentions stored features only if they would have saved at least this number of seconds.
_MENTIONED = 10.0
#: Batch size of the forward passes that find the prefix.
_IMAGES = 2
#: Maximum batch size for timing the forms of the prefix.
_TIMED = 16
#: Name of the file in the run folder that contains the chosen form of the prefix.
PREFIX = "prefix.json"


class FeatureDataset(Dataset[Any]):
    """A data set whose samples are stored features, or images if the features are not stored yet.

    Keys are pairs (epoch, index). Epoch e uses view e mod `views`. The first image in the first view is stored in row
    `first` of the store.
    """

    def __init__(self, images: SplitDataset, store: RowStore, first: int, views: int) -> None:
        self._images, self._store, self._first, self._views = images, store, first, views

    def __len__(self) -> int:
        return len(self._images)

    def __getitems__(self, keys: list[tuple[int, int]]) -> tuple[Tensor, Tensor, Tensor] | LoadFailure:
        """Load a batch (inputs, labels, rows). If a file cannot be read, return the failure instead.

        If all features of the batch are stored, the inputs are stored features, uint8 (B, bytes). Otherwise, the
        inputs are images, float32 (B, C, H, W). Labels and row numbers are int64 (B,).
        """
        keys = [(epoch % self._views, index) for epoch, index in keys]
        rows = [self._first + view * len(self) + index for view, index in keys]
        stored = self._store.read(rows)
        if stored is not None:
            return stored, self._images.labels[[index for _, index in keys]], torch.tensor(rows)
        loaded = self._images.__getitems__(keys)
        return loaded if isinstance(loaded, LoadFailure) else (*loaded, torch.tensor(rows))


class RunFeatures:
    """The features of one run, which are read from a store, or computed and then stored.

    The store has rows for `views` views of `train` training images, and for one view of the evaluation images.
    """

    def __init__(self, prefix: FrozenPrefix, form: RowForm, store: RowStore, views: int, train: int) -> None:
        self.prefix, self.form, self.store, self.views = prefix, form, store, views
        self._evaluated = views * train
        self._known = store.written()
        self._warned = False
        #: True if a row could not be stored because the disk was full.
        self.full = False
        self._computed = self._read = 0

    def training(self, images: SplitDataset) -> FeatureDataset:
        """Return the data set of the training images. Images whose features are not stored are loaded from `images`."""
        return FeatureDataset(images, self.store, 0, self.views)

    def evaluation(self, images: SplitDataset) -> FeatureDataset:
        """Return the data set of the split that selects the best epoch. See `training`."""
        return FeatureDataset(images, self.store, self._evaluated, 1)

    @contextmanager
    def input(self, images: Tensor, rows: Tensor) -> Iterator[Tensor]:
        """Return a context manager in which the network computes its output from the features of a batch.

        The context manager yields a placeholder to pass to the network. `images` contains images or stored features,
        and `rows` contains the row numbers, as loaded by `FeatureDataset`. The features of images are computed and
        stored.
        """
        if images.dtype == torch.uint8:
            self._read += len(rows)
            stored = images
        else:
            self._computed += len(rows)
            stored = self.form.encode(self.prefix.to_rows(self.prefix.features(images)))
            self._write(rows.cpu(), stored.cpu())
        with from_stored(self.prefix, self.form, stored) as placeholder:
            yield placeholder

    def _write(self, rows: Tensor, stored: Tensor) -> None:
        if self._known[rows.numpy()].all() and not self._warned:
            self._warned = True
            say(f"Some features in {shown_path(self.store.folder)} are damaged. These features are computed again.")
        if self.full:
            return
        try:
            self.store.write(rows.tolist(), stored)
        except StoreFullError:
            self.full = True
            say(
                f"The disk of the folder {shown_path(self.store.folder)} is full. The run continues, and features that"
                " are not stored are computed in every epoch."
            )

    def report(self) -> FeaturesReport:
        """Return the report for results.json."""
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


def from_stored(prefix: FrozenPrefix, form: RowForm, stored: Tensor) -> AbstractContextManager[Tensor]:
    """Return a context manager in which the network computes its output from stored features, uint8 (B, bytes).

    The context manager yields a placeholder to pass to the network.
    """
    return prefix.replaced(prefix.from_rows(form.decode(stored)).to(prefix.dtype))


class FeatureCallback(L.Callback):
    """A callback that passes the features to the module and the data module of a run.

    Use this callback for a run that stores features or uses a form of the prefix other than ``fp32``. Place the
    callback after `MethodCallback`. The chosen form is written into `folder`, so that a resumed run uses this form.
    """

    def __init__(self, config: Config, images: ImageData, methods: Sequence[Method], epochs: int, folder: Path) -> None:
        self._config, self._images, self._methods, self._epochs = config, images, methods, epochs
        self._file = folder / PREFIX
        self._ready = False
        #: The stored features, or None if no features are stored.
        self.features: RunFeatures | None = None
        #: The report of the frozen prefix, or None if the network has no frozen prefix.
        self.prefix: PrefixReport | None = None

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Find the prefix, choose its form and open the store. If the prefix cannot be used, print the reason.

        Raises:
            UserError: If a setting requires stored features or a form of the prefix that the run does not support.
        """
        if stage != "fit" or self._ready:
            return
        self._ready = True
        module: Any = pl_module
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        options, device = self._config.trainer, trainer.strategy.root_device
        auto, default = options.cache_features == "auto", options.prefix is None and options.cache_features == "off"
        if default and all(parameter.requires_grad for parameter in module.model.parameters()):
            return
        try:
            prefix = run_prefix(self._config, module.model, self._methods)
            self.prefix = self._choose(prefix, trainer)
            if options.cache_features != "off":
                self.features = run_features(self._config, self._images, prefix, self._epochs, device, must_gain=auto)
        except SettingError as error:
            if not auto:
                raise
            say(f"Features are not stored (trainer.cache_features=auto): {error}")
        except UserError as error:
            self._refuse_or_say(error)
        if self.features is None and self.prefix is not None and prefix.form is not Form.FP32:
            module.features = prefix
        else:
            module.features = data.features = self.features

    def _refuse_or_say(self, error: UserError) -> None:
        """Raise `error` if a setting requires the prefix or the features. Otherwise, print the error."""
        options = self._config.trainer
        without: list[tuple[str, str, str]] = []
        if options.cache_features == "on":
            without.append(("trainer.cache_features", options.cache_features, "off"))
        if options.prefix in (Form.FOLDED, Form.BF16) and self.prefix is None:
            without.append(("trainer.prefix", options.prefix, Form.FP32))
        if without:
            asked = ", ".join(f"{name}={value}" for name, value, _ in without)
            instead = " and ".join(f"{name}={value}" for name, _, value in without)
            raise UserError(
                f"{asked}: {error} Use {instead}, or a method that trains only the last part of the network, for"
                " example method=last_stage."
            ) from None
        if options.cache_features == "auto":
            say(f"Features are not stored (trainer.cache_features=auto): {error}")
        if options.prefix == "auto" and self.prefix is None:
            say(f"The network is not changed (trainer.prefix=auto): {error}")

    def _choose(self, prefix: FrozenPrefix, trainer: L.Trainer) -> PrefixReport:
        """Set the form of the prefix to the form in the run folder. Without such a file, the first process chooses."""
        if self._file.is_file():
            report = _read_choice(self._file)
            prefix.form = Form(report["form"])
            return report
        device = trainer.strategy.root_device
        found = set_form(self._config, self._images, prefix, device) if trainer.is_global_zero else None
        shared: PrefixReport | None = trainer.strategy.broadcast(found)
        assert shared is not None
        prefix.form = Form(shared["form"])
        if trainer.is_global_zero and self._config.trainer.frozen_prefix == "auto":
            write_text_atomically(self._file, json.dumps(shared) + "\n")
        return shared


def _read_choice(file: Path) -> PrefixReport:
    """Read the form of the prefix from a file in the run folder. Raise UserError if the file is damaged."""
    try:
        report: PrefixReport = parse_json(file.read_text(encoding="utf-8"))
        Form(report["form"])
        texts = isinstance(report["end"], str) and isinstance(report["reason"], str)
        numbers = [value for one in (report.get("seconds", {}), report.get("deviation", {})) for value in one.values()]
        if texts and all(isinstance(value, float | int) for value in numbers):
            return report
    except (OSError, ValueError, TypeError, LookupError, AttributeError):
        pass
    raise UserError(f"{file} is damaged. Remove this file to choose the form again, or start a new run. {START_AGAIN}")


def run_prefix(config: Config, network: nn.Module, methods: Sequence[Method]) -> FrozenPrefix:
    """Find the frozen prefix of a run's network. The network must be on the CPU, and the methods must be applied.

    Raises:
        UserError: If the network has no frozen prefix.
    """
    for method in methods:
        if type(method).step_begin is not Method.step_begin and Axis.SELECTION in (method.axis, *method.other_axes):
            raise UserError(
                f"The method {method.name} selects the trained parameters in each step, so no part of the network"
                " remains frozen."
            )
    with _in_training_mode(network):
        return find_prefix(network, _noise(config, _IMAGES))


def set_form(config: Config, images: ImageData, prefix: FrozenPrefix, device: torch.device) -> PrefixReport:
    """Set the form of the prefix in the same way as `measure_form`.

    However, with ``auto``, a form whose features are already stored is preferred.
    """
    options = config.trainer
    if options.frozen_prefix == "auto" and options.cache_features != "off":
        about = _about(config, images, prefix, device)
        stored = [form for form in _forms(config, device) if (Path(options.cache_folder) / _key(about, form)).is_dir()]
        if stored:
            prefix.form = stored[-1]
            return _form_report(prefix)
    return measure_form(config, prefix, device)


def measure_form(config: Config, prefix: FrozenPrefix, device: torch.device) -> PrefixReport:
    """Set the form of the prefix to `trainer.prefix`. With ``auto``, select the form that is fastest on `device`."""
    options = config.trainer
    if options.frozen_prefix != "auto":
        prefix.form = Form(options.frozen_prefix)
        if prefix.form is Form.BF16 and bf16_is_emulated(device):
            say(
                f"warning: trainer.prefix=bf16: {device_name(device)} has no bfloat16 instructions, so PyTorch emulates"
                " them. Use trainer.prefix=folded, which is probably faster."
            )
        return _form_report(prefix)
    batch = _noise(config, min(config.data.batch_size, _TIMED)).to(device)
    prefix.model.to(device)
    dtype = AUTOCAST[options.precision]

    def run(form: Form) -> Tensor:
        prefix.form = form
        with torch.autocast(device.type, dtype=dtype) if dtype is not None else nullcontext():
            features = prefix.features(batch)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return features

    prefix.form = Form.FP32
    with _in_training_mode(prefix.model):
        exact = None if dtype is None or stores_bf16(prefix.model) else prefix.features(batch)
        prefix.form, seconds, deviation = choose_form(run, _forms(config, device), exact)
    shown = {Form.FP32: "unchanged"} if dtype is not None else {}
    times = ", ".join(f"{format_seconds(value)} {shown.get(Form(form), form)}" for form, value in seconds.items())
    say(
        f"The frozen prefix (up to {prefix.end}) uses the form {shown.get(prefix.form, prefix.form)}"
        f" (trainer.prefix=auto). It deviates from fp32 by {format_percent(deviation[prefix.form])}."
        f" {len(batch)} images take {times}."
    )
    return {**_form_report(prefix), "seconds": seconds, "deviation": deviation}


def _forms(config: Config, device: torch.device) -> list[Form]:
    if config.trainer.precision == "fp16" or bf16_is_emulated(device):
        return [Form.FP32, Form.FOLDED]
    if config.trainer.precision == "bf16":  # in bf16, `Form.FOLDED` converts the weights in each step
        return [Form.FP32, Form.BF16]
    return [Form.FP32, Form.FOLDED, Form.BF16]


def _form_report(prefix: FrozenPrefix) -> PrefixReport:
    return {"end": prefix.end, "reason": prefix.reason, "form": str(prefix.form)}


@contextmanager
def _in_training_mode(network: nn.Module) -> Iterator[None]:
    before = network.training
    network.train()
    try:
        yield
    finally:
        network.train(before)


def _noise(config: Config, images: int) -> Tensor:
    spec = factory.input_of(config.model)
    return torch.randn(images, len(spec.mean), *spec.size, generator=torch.Generator().manual_seed(0))


def run_features(
    config: Config,
    images: ImageData,
    prefix: FrozenPrefix,
    epochs: int,
    device: torch.device,
    *,
    must_gain: bool = False,
) -> RunFeatures:
    """Open the features of a run. The form of the prefix must already be set.

    Raises:
        SettingError: If the features need more space than the settings or the disk allow.
        UserError: If `must_gain` is True and stored features would save no time.
    """
    options, views = config.trainer, config.trainer.views
    if must_gain:
        if epochs <= views:
            raise UserError(f"with trainer.epochs={epochs} and trainer.views={views}, no features would be used twice.")
        with _in_training_mode(prefix.model):
            share = _share_of_step(prefix, _noise(config, _IMAGES).to(prefix.device))
        if share < _WORTH:
            raise UserError(
                f"computing the features takes only {format_percent(share)} of the FLOPs of a training step"
                f" ({prefix.reason})."
            )
    train, evaluated = images.splits["train"], images.splits[images.best_split]
    form = RowForm(options.cache_dtype, prefix.values)
    about = {**_about(config, images, prefix, device), "form": str(prefix.form)}
    folder, rows = Path(options.cache_folder) / _key(about, prefix.form), views * train + evaluated
    how = "You can also reduce trainer.views, or set trainer.cache_dtype=int8 or trainer.cache_features=off."
    require_room("trainer.cache", options.cache_limit, {folder: rows * form.bytes}, "features", how)
    store = RowStore(folder, about, rows, form.bytes)
    missing = store.missing()
    say(
        f"Features of {prefix.end} ({' × '.join(map(str, prefix.shape))}, {form.name}):"
        f" {views} view{'s' if views > 1 else ''} of {train} training images and {evaluated} {images.best_split}"
        f" images require {format_bytes(rows * form.bytes)} in {shown_path(folder)}."
        f" {'All features are stored' if not missing else f'{missing} of {rows} features must be computed'}."
        f" {prefix.reason}."
    )
    return RunFeatures(prefix, form, store, views, train)


def features_hint(
    config: Config, images: ImageData, network: nn.Module, methods: Sequence[Method], epochs: int, seconds: float
) -> str | None:
    """Return a message if a finished run would have been faster with stored features, or None otherwise.

    Args:
        config: Configuration of the run.
        images: Data of the run.
        network: Network on the CPU, to which the methods are applied.
        methods: Methods of the run.
        epochs: Number of epochs.
        seconds: Duration of the training.
    """
    options = config.trainer
    same = config.data.augment.name == "none"  # all views of an image are equal
    views = 1 if same else options.views
    if options.cache_features != "off" or epochs <= views or seconds < _MENTIONED:
        return None
    if all(parameter.requires_grad for parameter in network.parameters()):
        return None
    try:
        prefix = run_prefix(config, network, methods)
        with _in_training_mode(network):
            share = _share_of_step(prefix, _noise(config, _IMAGES))
        rows = views * images.splits["train"] + images.splits[images.best_split]
        size = rows * RowForm(options.cache_dtype, prefix.values).bytes
        require_room("trainer.cache", options.cache_limit, {Path(options.cache_folder) / "features": size}, "", "")
    except (UserError, OSError):
        return None
    saved = share * (epochs - views) / epochs
    if share < _WORTH or saved * seconds < _MENTIONED:
        return None
    setting = "trainer.cache_features=on" + (" trainer.views=1" if same and options.views > 1 else "")
    return (
        f"With {setting}, this run would have been faster by about {format_seconds(saved * seconds)}"
        f" ({format_percent(saved)}): epochs {views + 1} to {epochs} would have read the features of {prefix.end} from"
        f" disk ({format_bytes(size)})."
    )


def _about(config: Config, images: ImageData, prefix: FrozenPrefix, device: torch.device) -> dict[str, Any]:
    """Return all properties on which stored features depend, except for the form of the prefix."""
    options = config.trainer
    return {
        "format": _FORMAT,
        "model": config.model.model_dump(mode="json", exclude={"pretrained", "weights", "select", "zero_head"}),
        "end": prefix.end,
        "shape": prefix.shape,
        "weights": prefix.digest(),
        "images": images.content_digest(),
        "augment": config.data.augment.model_dump(mode="json"),
        "seed": config.seed,
        "views": options.views,
        "precision": options.precision,
        "device": device.type,
        "dtype": options.cache_dtype,
    }


def _key(about: dict[str, Any], form: Form) -> str:
    text = json.dumps({**about, "form": str(form)}, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


@torch.no_grad()
def _share_of_step(prefix: FrozenPrefix, images: Tensor) -> float:
    """Return the FLOPs of the prefix as a fraction of the FLOPs of a training step.

    A backward pass counts as two forward passes. Stored features slightly change the results. FLOPs are therefore
    compared instead of times, so that the decision does not depend on the machine.
    """
    with torch.random.fork_rng(devices=[]):
        with FlopsCounter() as below:
            features = prefix.features(images)
        with FlopsCounter() as above, prefix.replaced(features) as placeholder:
            prefix.model(placeholder)
    return below.flops / max(below.flops + 3 * above.flops, 1)
