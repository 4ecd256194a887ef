"""Networks by name, with pretrained weights, with the weights of a local file, or with random weights.

Each family of networks is a module with the same four functions: `input_of`, `build`, `load` and `missing`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from torch import Tensor, nn

from efficient_ft.core.input_spec import InputSpec
from efficient_ft.models import classifier, segmentation, text
from efficient_ft.models.checkpoint import read_contents
from efficient_ft.models.loading_report import loading_report
from efficient_ft.models.tasks import give_heads, zero_parameters
from efficient_ft.models.view import view

if TYPE_CHECKING:
    from efficient_ft.config.schema import ModelConfig

__all__ = ["create_model", "input_of", "loading_report", "missing_weights", "random_model", "read_state_dict"]

log = logging.getLogger(__name__)


class Family(Protocol):
    """A family of networks: a module with these functions."""

    def input_of(self, config: ModelConfig) -> InputSpec:
        """Return the input of a network."""

    def build(self, config: ModelConfig, classes: int) -> nn.Module:
        """Build a network with random weights."""

    def load(self, config: ModelConfig, classes: int, random: nn.Module) -> nn.Module:
        """Build a network with the weights that the configuration names, given the same network with random ones."""

    def missing(self, config: ModelConfig) -> str | None:
        """Return a message if weights or other files are missing."""


#: The families by `ModelConfig.family`.
FAMILIES: dict[str, Family] = {"classification": classifier, "segmentation": segmentation, "text": text}


def input_of(config: ModelConfig) -> InputSpec:
    """Return the size, normalization and interpolation of a network's images, or the length of its texts.

    Raises:
        SettingError: an unknown model, or `model.mean` or `model.std` without one value per channel.
    """
    return FAMILIES[config.family].input_of(config)


def missing_weights(config: ModelConfig) -> str | None:
    """Look for a model's weights without downloading them: the given file, the local caches, and last the network.

    Takes at most about `core.network.PROBE_SECONDS`.

    Returns:
        None if the weights are present, can be downloaded now or are not wanted. Otherwise a message: what is missing,
        where it can be put, and alternatives.

    Raises:
        SettingError: an unknown model.
    """
    return FAMILIES[config.family].missing(config)


def read_state_dict(path: Path) -> dict[str, Tensor]:
    """Read the tensors of a file by their full names; see `models.checkpoint.read_contents`."""
    return read_contents(path).tensors


def create_model(config: ModelConfig, num_classes: int | Mapping[str, int], *, report: bool = True) -> nn.Module:
    """Create the network `config.name` with its weights, in fp32 on the CPU.

    Args:
        config: the `model` section of the configuration.
        num_classes: number of outputs; or by task, for a classifier per task (`models.tasks`). The first classifier is
            created or loaded as in a network of one task, the others are newly initialized.
        report: log which weights were loaded; `loading_report` returns the report in any case.

    Raises:
        UserError: an unknown name, arguments or an image size that the model rejects, or weights that cannot be
            fetched or do not fit.
    """
    if not isinstance(num_classes, int):
        model = create_model(config, next(iter(num_classes.values())), report=report)
        give_heads(model, num_classes, zero=config.zero_head)
        return model
    random = random_model(config, num_classes)
    if config.weights is None and not config.pretrained:
        log.warning(
            "%s starts from RANDOM weights (model.pretrained=false, no model.weights): it is trained from scratch.",
            config.name,
        )
        if config.zero_head:
            _zero_head(random)
        return random
    return _loaded(config, FAMILIES[config.family].load(config, num_classes, random), num_classes, report)


def _loaded(config: ModelConfig, model: nn.Module, num_classes: int, shown: bool) -> nn.Module:
    """Log the loading report, and prepare new parts."""
    report = loading_report(model)
    assert report is not None, "every loader sets a report"
    if report.new_heads and config.zero_head:
        _zero_head(model)
    for line in report.lines(num_classes):
        log.log(logging.INFO if shown else logging.DEBUG, "%s", line)
    for words in report.suspicious if shown else ():
        log.warning("warning: the weights are suspicious: %s.", words)
    return model


def random_model(config: ModelConfig, num_classes: int | Mapping[str, int]) -> nn.Module:
    """Create the same network with random weights, even if the configuration names weights: to count its cost.

    Args:
        config: the `model` section of the configuration.
        num_classes: number of outputs, or by task.

    Raises:
        UserError: an unknown name, or arguments or an image size that the model rejects.
    """
    if isinstance(num_classes, int):
        return FAMILIES[config.family].build(config, num_classes)
    model = random_model(config, next(iter(num_classes.values())))
    give_heads(model, num_classes)
    return model


def _zero_head(model: nn.Module) -> None:
    """Set the parameters of the classifier to 0, so that all logits are 0."""
    for name in view(model).head:
        zero_parameters(model.get_submodule(name))
