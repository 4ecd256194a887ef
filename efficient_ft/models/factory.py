"""Create networks by name with pretrained weights, with the weights of a local file, or with random weights."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from torch import Tensor, nn

from efficient_ft.config.schema import ModelConfig
from efficient_ft.core.input_spec import InputSpec
from efficient_ft.models import classifier, segmentation, text, transformers_classifier
from efficient_ft.models.checkpoint import read_contents
from efficient_ft.models.loading_report import loading_report
from efficient_ft.models.tasks import give_heads, zero_parameters
from efficient_ft.models.view import view

__all__ = ["create_model", "input_of", "loading_report", "missing_weights", "random_model", "read_state_dict"]

log = logging.getLogger(__name__)


class Family(Protocol):
    """The interface of a family of networks. Each family is a module that defines these four functions.

    `config` is the `model` section of the configuration, and `classes` is the number of classes.
    """

    def input_of(self, config: ModelConfig) -> InputSpec:
        """Return the input specification of a network."""

    def build(self, config: ModelConfig, classes: int) -> nn.Module:
        """Build a network with random weights."""

    def load(self, config: ModelConfig, classes: int, random: nn.Module) -> nn.Module:
        """Build a network with the configured weights, and store a `LoadingReport` on the network.

        The function may load the weights into `random`, which is the same network with random weights.
        """

    def missing(self, config: ModelConfig) -> str | None:
        """Return a message if weights or other files are missing, or None otherwise. See `missing_weights`."""


#: The families of networks. The keys are the values of `ModelConfig.family`.
FAMILIES: dict[str, Family] = {"classification": classifier, "segmentation": segmentation, "text": text}
#: Families of image classifiers from libraries other than timm. The keys are the values of `ModelConfig.library`.
LIBRARIES: dict[str, Family] = {"transformers": transformers_classifier}


def _family(config: ModelConfig) -> Family:
    return FAMILIES[config.family] if config.library is None else LIBRARIES[config.library]


def input_of(config: ModelConfig) -> InputSpec:
    """Return the input specification of a network.

    The specification of images contains the size, the normalization and the interpolation. The specification of texts
    contains the maximum number of tokens.

    Raises:
        SettingError: If the model is unknown, or if `model.mean` or `model.std` does not have one value per channel.
    """
    return _family(config).input_of(config)


def missing_weights(config: ModelConfig) -> str | None:
    """Check whether the weights of a model are available, without downloading them.

    The function checks `model.weights` if it is set, and the local caches of published weights otherwise. If the caches
    do not contain the weights, the function also checks whether they can be downloaded. This check takes at most about
    `core.network.PROBE_SECONDS` seconds.

    Returns:
        None if the weights are present, can be downloaded now, or are not required. Otherwise, a message that names the
        missing files and the alternatives.

    Raises:
        SettingError: If the model is unknown.
    """
    return _family(config).missing(config)


def read_state_dict(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a file by full name. See `models.checkpoint.read_contents`."""
    return read_contents(path).tensors


def create_model(config: ModelConfig, num_classes: int | Mapping[str, int], *, report: bool = True) -> nn.Module:
    """Create the network `config.name` with its weights, in fp32 on the CPU.

    Args:
        config: The `model` section of the configuration.
        num_classes: Number of outputs, or a mapping from tasks to numbers of outputs. If a mapping is given, the
            network has one classifier per task (see `models.tasks`). The weights are loaded into the first classifier,
            and the other classifiers are newly initialized.
        report: If True, log which weights were loaded. `loading_report` returns the report even if `report` is False.

    Raises:
        UserError: If the name is unknown, if the model rejects the arguments or the image size, or if the weights
            cannot be downloaded or do not fit.
    """
    if not isinstance(num_classes, int):
        model = create_model(config, next(iter(num_classes.values())), report=report)
        give_heads(model, num_classes, zero=config.zero_head)
        return model
    random = random_model(config, num_classes)
    if config.weights is None and not config.pretrained:
        log.warning(
            "%s starts from RANDOM weights and is trained from scratch (model.pretrained=false and no model.weights).",
            config.name,
        )
        if config.zero_head:
            _zero_head(random)
        return random
    model = _family(config).load(config, num_classes, random)
    loaded = loading_report(model)
    assert loaded is not None, "every loader sets a report"
    if loaded.new_heads and config.zero_head:
        _zero_head(model)
    for line in loaded.lines(num_classes):
        log.log(logging.INFO if report else logging.DEBUG, "%s", line)
    for words in loaded.suspicious if report else ():
        log.warning("warning: some weights look unusual (%s). Check the file of the weights.", words)
    return model


def random_model(config: ModelConfig, num_classes: int | Mapping[str, int]) -> nn.Module:
    """Create the network with random weights, for example to count its cost.

    The weights in the configuration are not loaded. See `create_model` for the arguments.

    Raises:
        UserError: If the name is unknown, or if the model rejects the arguments or the image size.
    """
    if isinstance(num_classes, int):
        return _family(config).build(config, num_classes)
    model = random_model(config, next(iter(num_classes.values())))
    give_heads(model, num_classes)
    return model


def _zero_head(model: nn.Module) -> None:
    """Set the parameters of the classifier to 0 so that all logits are 0."""
    for name in view(model).head:
        zero_parameters(model.get_submodule(name))
