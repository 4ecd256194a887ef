"""Features of a run: the outputs of its frozen prefix, stored for each image and augmented view.

``trainer.prefix`` determines the form of the prefix. With ``trainer.cache_features``, epoch e trains on view e mod V of
each image, where V is ``trainer.views``. From epoch V on, batches are read from the store, and only the layers after
the prefix run. New features are also rounded to the storage format, so that all epochs train on the same values.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
from torch import Tensor, nn

from efficient_ft.config import Config
from efficient_ft.config.augment import check_stored_features, is_random, mixes
from efficient_ft.core.errors import SettingError, UserError
from efficient_ft.core.format import format_bytes, format_percent, format_seconds
from efficient_ft.core.parsing import parse_json
from efficient_ft.cost.executed import AUTOCAST
from efficient_ft.cost.run_flops import FlopsCounter
from efficient_ft.data.opened import OpenedData
from efficient_ft.data.row_store import require_room
from efficient_ft.methods.base import Method
from efficient_ft.methods.declarations import Axis
from efficient_ft.models.prefix import (
    BATCH_STATISTICS,
    RANDOM_NUMBERS,
    FrozenPrefix,
    find_prefix,
    kept_inputs,
    run_network,
)
from efficient_ft.models.prefix_form import Form, choose_form
from efficient_ft.models.weight_dtype import stores_bf16
from efficient_ft.record.environment import device_name
from efficient_ft.record.files import write_text_atomically
from efficient_ft.record.formats import START_AGAIN
from efficient_ft.record.results import PrefixReport
from efficient_ft.task import Inputs, moved
from efficient_ft.training.bf16_units import bf16_is_emulated
from efficient_ft.training.features.row_form import RowForm
from efficient_ft.training.features.store import RunFeatures
from efficient_ft.training.features.stores import EXAMPLES, about_features, examples, folder_name, open_features
from efficient_ft.training.kinds.registry import kind_of
from efficient_ft.training.output.console import say
from efficient_ft.training.processes import from_first

Data = OpenedData[Any, Any]
#: With ``auto``, features are stored if computing them takes at least this fraction of the FLOPs of a training step.
_WORTH = 0.1
#: A run mentions stored features only if they would have saved at least this number of seconds.
_MENTIONED = 10.0
#: Maximum batch size for timing the forms of the prefix.
_TIMED = 16
#: Name of the file in the run folder that contains the chosen form of the prefix.
PREFIX = "prefix.json"


class FeatureCallback(L.Callback):
    """A callback that passes the features to the module and the data module of a run.

    Use this callback for a run that stores features or uses a form of the prefix other than ``fp32``. Place the
    callback after `MethodCallback`. The chosen form is written into `folder`, so that a resumed run uses this form.
    """

    def __init__(self, config: Config, images: Data, methods: Sequence[Method], epochs: int, folder: Path) -> None:
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
            chooses = kind_of(self._config).supports("prefix")
            self.prefix = self._choose(prefix, trainer) if chooses else _form_report(prefix)
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
        report: PrefixReport
        if self._file.is_file():
            report = _read_choice(self._file)
            prefix.form = Form(report["form"])
            return report
        device = trainer.strategy.root_device
        found = set_form(self._config, self._images, prefix, device) if trainer.is_global_zero else None
        report = from_first(found)
        prefix.form = Form(report["form"])
        if trainer.is_global_zero and self._config.trainer.frozen_prefix == "auto":
            write_text_atomically(self._file, json.dumps(report) + "\n")
        return report


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
    raise UserError(
        f"{file} is damaged. Remove this file to select the form of the prefix again, or start a new run. {START_AGAIN}"
    )


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
        prefix = find_prefix(network, examples(config, EXAMPLES), several=config.data.masks is not None)
    if not config.model.frozen_bn and prefix.reason.endswith(BATCH_STATISTICS):
        prefix.reason += ", unless its statistics are frozen (model.frozen_bn=frozen_part)"
    # Dropout before the classifier does not need to be disabled, because it follows all blocks.
    inside = prefix.reason.startswith(f"{getattr(network, 'base_model_prefix', '')}.")
    if config.data.text is not None and inside and prefix.reason.endswith(RANDOM_NUMBERS):
        prefix.reason += (
            ", unless dropout is disabled (for BERT, +model.kwargs.hidden_dropout_prob=0"
            " +model.kwargs.attention_probs_dropout_prob=0)"
        )
    return prefix


def set_form(config: Config, images: Data, prefix: FrozenPrefix, device: torch.device) -> PrefixReport:
    """Set the form of the prefix in the same way as `measure_form`.

    However, with ``auto``, a form whose features are already stored is preferred.
    """
    options = config.trainer
    if options.frozen_prefix == "auto" and options.cache_features != "off":
        about = about_features(config, images, prefix, device)
        stored = [
            form for form in _forms(config, device) if (Path(options.cache_folder) / folder_name(about, form)).is_dir()
        ]
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
    batch: Any = moved(examples(config, min(config.data.batch_size, _TIMED)), device)
    prefix.model.to(device)
    dtype = AUTOCAST[options.precision]

    def run(form: Form) -> Tensor:
        prefix.form = form
        with torch.autocast(device.type, dtype=dtype, enabled=dtype is not None):
            features = prefix.features(batch)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return features

    prefix.form = Form.FP32
    with _in_training_mode(prefix.model):
        exact = None if dtype is None or stores_bf16(prefix.model) else prefix.features(batch)
        prefix.form, seconds, deviation = choose_form(run, _forms(config, device), exact)
    shown = {Form.FP32: "unchanged"} if dtype is not None else {}
    times = ", ".join(f"{format_seconds(value)} ({shown.get(Form(form), form)})" for form, value in seconds.items())
    say(
        f"trainer.prefix=auto: the layers up to {prefix.end} use '{shown.get(prefix.form, prefix.form)}'. Their output"
        f" deviates from fp32 by {format_percent(deviation[prefix.form])}. Times for {len(batch)} samples: {times}."
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


def run_features(
    config: Config,
    images: Data,
    prefix: FrozenPrefix,
    epochs: int,
    device: torch.device,
    *,
    must_gain: bool = False,
) -> RunFeatures:
    """Open the features of a run. The form of the prefix must already be set.

    Raises:
        SettingError: If the features need more space than the settings or the disk allow, or if the run mixes images.
        UserError: If `must_gain` is True and stored features would save no time, or if the tokenizer of texts returns
            no attention mask.
    """
    check_stored_features(config)
    views = config.trainer.views
    if must_gain:
        if epochs <= views:
            raise UserError(f"with trainer.epochs={epochs} and trainer.views={views}, no features would be used twice.")
        with _in_training_mode(prefix.model):
            share = _share_of_step(prefix, moved(examples(config, EXAMPLES), prefix.device))
        if share < _WORTH:
            raise UserError(
                f"computing the features takes only {format_percent(share)} of the FLOPs of a training step"
                f" ({prefix.reason})."
            )
    return open_features(config, images, prefix, epochs, device)


def features_hint(
    config: Config,
    images: Data,
    network: nn.Module,
    methods: Sequence[Method],
    epochs: int,
    seconds: float,
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
    same = not is_random(config.data.augment)  # all views of an image are equal
    views = 1 if same else options.views
    if options.cache_features != "off" or epochs <= views or seconds < _MENTIONED or mixes(config.data.augment):
        return None
    if all(parameter.requires_grad for parameter in network.parameters()):
        return None
    try:
        prefix = run_prefix(config, network, methods)
        with _in_training_mode(network):
            share = _share_of_step(prefix, examples(config, EXAMPLES))
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


@torch.no_grad()
def _share_of_step(prefix: FrozenPrefix, images: Inputs) -> float:
    """Return the FLOPs of the prefix as a fraction of the FLOPs of a training step.

    A backward pass counts as two forward passes. Stored features slightly change the results. FLOPs are therefore
    compared instead of times, so that the decision does not depend on the machine.
    """
    with torch.random.fork_rng(devices=[]):
        with FlopsCounter() as below:
            features = prefix.features(images)
        with FlopsCounter() as above, prefix.replaced(features, kept_inputs(images)) as placeholder:
            run_network(prefix.model, placeholder)
    return below.flops / max(below.flops + 3 * above.flops, 1)
