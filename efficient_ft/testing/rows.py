"""Rows of settings that methods are tested with, and the base class that runs contracts on the rows."""

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
    """The property that is tested instead of "off equals plain training" if a method has no off value."""

    SAME_GRADIENTS = "gradients of the trainable parameters equal those of plain training (selections)"
    SAME_OUTPUT = "the output is unchanged at initialization, and changed after training (adapters)"
    NEAR_GRADIENTS = "gradients are close to those of plain training (rounding)"


def _itself(model: nn.Module) -> nn.Module:
    """Return `model`, because the method does not change the output of the plain model at initialization."""
    return model


#: A function that computes the logits that the method's model should return, in dense torch operations. Autograd
#: through this function must return the gradients that the method should compute. The function is called as
#: ``reference(method, model, parameters, images)``:
#:
#: * method: The applied method, with its settings and the state of the step. It must not be changed.
#: * model: The plain small model in the mode of the pass (training or evaluation). It has the buffers of the method's
#:   model, and may be changed in any way.
#: * parameters: Copies of the parameters of the method's model by name, as leaves of the graph. Pass them to
#:   `torch.func.functional_call`.
#: * images: Images, (B, 3, H, W).
#:
#: The function returns the logits (B, classes), or the logits and the scalar that the method adds to the loss.
Reference = Callable[[Method, nn.Module, dict[str, Tensor], Tensor], "Tensor | tuple[Tensor, Tensor]"]


@dataclass(frozen=True)
class Row:
    """A method and the settings that it is tested with.

    Attributes:
        method: Class of the method.
        settings: Settings that make the method differ from plain training.
        off: Changes to `settings` that make the method equal plain training. If None, `why_no_off` is required, and
            `instead` may be set.
        why_no_off: Reason why no off value exists.
        instead: Property that is tested instead of the off value.
        shortcuts: Tuples (class, attribute, replacement). The test of the off value replaces these attributes to
            disable shortcuts, so that the method's own computation runs.
        models: Small models (keys of `MODELS`) that the method is tested on.
        refused: Small models that the method must reject, each with a part of the error message.
        own_evaluation: Reason why the output in evaluation differs from the output of the pretrained model. Empty if
            the outputs are equal.
        initial_model: Function that converts a plain model to a model that returns the initial output of the method's
            model. Default: the plain model is returned.
        on_reference: Reference that the method is compared with. ``"exact"`` denotes the plain network. A `Reference`
            is a dense function that computes the expected logits and, through autograd, the expected gradients. Every
            row requires a reference.
        unreferenced: Small models that are excluded from the comparison with `on_reference`, either completely
            (``"mobilenet"``) or in one precision (``"swinv2, bf16"``), each with the reason.
        rtol: Largest relative error of a parameter's gradient (by norm) in float64. It may exceed the default only for
            methods that round values. If such a method sets `random`, the mean gradient over several passes is
            compared. The error along the direction of the reference must not exceed half of `rtol`.
        random: Reason why a forward pass in training draws random numbers, as dropout does. Empty if the pass draws no
            random numbers, so that two passes of a step are equal.
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
    """Base class of the contracts. `MethodContracts` describes the attributes."""

    rows: ClassVar[Mapping[str, Row]] = {}
    conf: ClassVar[Path | None] = None

    #: Models with applied methods, and the methods, by row and model name. Each contract uses copies.
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
