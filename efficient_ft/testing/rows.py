"""Rows of settings for testing methods, and the base class of tests that check the contracts for each row."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

import torch
from torch import Tensor, nn

from efficient_ft.methods.base import Method
from efficient_ft.methods.declarations import Axis
from efficient_ft.testing.models import USUAL, model_of

_Test = TypeVar("_Test", bound=Callable[..., None])

#: Axes whose methods set `requires_grad`.
SETS_REQUIRES_GRAD = (Axis.SELECTION, Axis.ADAPTERS)


class Instead(Enum):
    """Property that is tested if a method has no settings that equal plain training."""

    SAME_GRADIENTS = "the gradients of the trainable parameters equal those of plain training (selection methods)"
    SAME_OUTPUT = "the output does not change at initialization, but changes during training (adapters)"
    NEAR_GRADIENTS = "the gradients are close to those of plain training (rounding methods)"


def _itself(model: nn.Module) -> nn.Module:
    """Return `model` unchanged (the default of `Row.initial_model`)."""
    return model


#: A function that computes the expected logits of the method's model with dense torch operations. Autograd through this
#: function must compute the expected gradients. The call is ``reference(method, model, parameters, images)``:
#:
#: * method: The applied method, with its settings and the state of the step. The function must not change the method.
#: * model: The plain small model in the mode of the pass (training or evaluation), with the buffers of the method's
#:   model. The function may change this model.
#: * parameters: Dict from names to copies of the parameters of the method's model. The copies are leaf tensors. Pass
#:   this dict to `torch.func.functional_call`.
#: * images: Batch of images with shape (B, 3, H, W).
#:
#: The function returns the logits (B, classes), or the logits and the scalar that the method adds to the loss.
Reference = Callable[[Method, nn.Module, dict[str, Tensor], Tensor], "Tensor | tuple[Tensor, Tensor]"]


@dataclass(frozen=True)
class Row:
    """A method and the settings with which the method is tested.

    Attributes:
        method: Class of the method.
        settings: Settings that make the method differ from plain training.
        off: Changes to `settings` that make the method equal plain training. If None, `why_no_off` is required, and
            `instead` may be set.
        why_no_off: Reason why `off` is None.
        instead: Property that is tested if `off` is None.
        shortcuts: Tuples (class, attribute, replacement). When testing `off`, these attributes are replaced to disable
            shortcuts, so that the actual computation of the method runs.
        models: Small models (keys of `MODELS`) on which the method is tested.
        refused: Small models that the method must reject, each with a part of the error message.
        own_evaluation: Reason why the output in evaluation differs from the output of the pretrained model, or an empty
            string if the outputs are equal.
        initial_model: Function that converts a plain model to a model that returns the initial output of the method's
            model. By default, the function returns the plain model.
        on_reference: Reference with which the method is compared. ``"exact"`` denotes the plain network. A `Reference`
            is a dense function that computes the expected logits and, through autograd, the expected gradients. Every
            row requires a reference.
        unreferenced: Small models that are not compared with `on_reference`, each with the reason. A key excludes a
            model completely (``"mobilenet"``) or in one precision (``"swinv2, bf16"``).
        rtol: Maximum relative error (by norm) of the gradient of a parameter in float64. Values above the default are
            permitted only for methods that round values. If `random` is also set, the mean gradient over several passes
            is compared. The error along the direction of the reference must not exceed half of `rtol`.
        random: Reason why a forward pass in training draws random numbers (for example, dropout), or an empty string if
            two passes of a step are equal.
    """

    method: type[Method]
    settings: Mapping[str, Any] = field(default_factory=dict)
    off: Mapping[str, Any] | None = None
    why_no_off: str = ""
    instead: Instead | None = None
    shortcuts: tuple[tuple[type, str, Callable[..., Any]], ...] = ()
    models: tuple[str, ...] = USUAL
    refused: Mapping[str, str] = field(default_factory=dict)
    own_evaluation: str = ""
    initial_model: Callable[[nn.Module], nn.Module] = _itself
    on_reference: Literal["exact"] | Reference | None = None
    unreferenced: Mapping[str, str] = field(default_factory=dict)
    rtol: float = 1e-9
    random: str = ""

    def create(self, **changes: Any) -> Method:
        """Create the method with the row's settings, updated by `changes`."""
        return self.method(**{**self.settings, **changes})


def on_models(models_of: Callable[[Row], Iterable[str]]) -> Callable[[_Test], _Test]:
    """Decorate a contract that runs on the models that `models_of` returns for each row."""

    def mark(test: _Test) -> _Test:
        test.models_of = models_of  # type: ignore[attr-defined]
        return test

    return mark


class ContractTests:
    """Base class of the contracts. See `MethodContracts` for the attributes."""

    rows: ClassVar[Mapping[str, Row]] = {}
    conf: ClassVar[Path | None] = None

    #: Models with applied methods, and these methods, keyed by row and model name. Each contract uses copies.
    _prototypes: ClassVar[dict[Any, tuple[nn.Module, Method]]] = {}

    def pytest_generate_tests(self, metafunc: Any) -> None:
        """Parametrize each contract with its rows, models and files."""
        test, names = metafunc.function, metafunc.fixturenames
        if "name" in names:
            models_of = getattr(test, "models_of", lambda row: row.models)
            cases = [(row, name) for row, r in self.rows.items() for name in models_of(r)]
            metafunc.parametrize(("row", "name"), cases)
        elif "row" in names:
            metafunc.parametrize("row", list(self.rows))
        elif "file" in names:
            files = sorted(self.conf.glob("*.yaml")) if self.conf is not None else []
            metafunc.parametrize("file", files, ids=[file.stem for file in files])

    def applied(self, row: str, name: str) -> tuple[nn.Module, Method]:
        """Return copies of the row's method and of the small model `name` to which the method is applied."""
        key = self._key(row, name)
        if key not in self._prototypes:
            self._prototypes[key] = apply_seeded(model_of(name), self.rows[row].create())
        return copy.deepcopy(self._prototypes[key])

    def precisions(self, row: str, name: str) -> tuple[str, ...]:
        """Return the precisions in which the counted bytes are compared with the bytes in memory."""
        return ("fp32", "bf16")

    def _key(self, row: str, name: str) -> Any:
        return type(self), row, name


def apply_seeded(model: nn.Module, method: Method) -> tuple[nn.Module, Method]:
    """Apply a method after seeding torch's generator with 1, and return the model and the method."""
    torch.manual_seed(1)
    method.apply(model)
    return model, method
