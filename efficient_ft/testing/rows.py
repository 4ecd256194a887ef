"""A row of the table of settings: a method, the settings it is tested with, and the exceptions its contracts allow."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal

from torch import Tensor, nn

from efficient_ft.methods.base import Method
from efficient_ft.testing.models import USUAL


class Instead(Enum):
    """The property that is tested instead of "off equals plain training", for a method without an off value.

    Attributes:
        SAME_GRADIENTS: gradients of what trains equal the plain ones (selections).
        SAME_OUTPUT: the output is unchanged at initialization, and changed after training (adapters).
        NEAR_GRADIENTS: gradients are near the plain ones (rounding).
    """

    SAME_GRADIENTS = "gradients of what trains equal the plain ones"
    SAME_OUTPUT = "the output is unchanged at initialization"
    NEAR_GRADIENTS = "gradients are near the plain ones"


def _itself(model: nn.Module) -> nn.Module:
    """Return `model`: the method leaves the output of the plain model unchanged at initialization."""
    return model


#: A dense computation of the logits that the method's model should return, in plain torch operations: its gradients are
#: those that the method should compute. Called as ``reference(method, model, parameters, images)``:
#:
#: * method: the method, applied, with its settings and the state of the step. It must not be changed.
#: * model: the plain small model, in the mode (training or evaluation) of the pass, with the buffers of the method's
#:   model. It may be changed in any way.
#: * parameters: copies of the parameters of the method's model, by name, as leaves of the graph. Pass them to
#:   `torch.func.functional_call`.
#: * images: (B, 3, H, W).
#:
#: It returns the logits (B, classes), or a pair of them and of the scalar that the method adds to the loss.
Reference = Callable[[Method, nn.Module, dict[str, Tensor], Tensor], "Tensor | tuple[Tensor, Tensor]"]


@dataclass(frozen=True)
class Row:
    """A method and the settings it is tested with.

    Attributes:
        method: the class of the method.
        settings: settings for which the method differs from plain training.
        off: changes of `settings` with which it equals plain training, or None with `why_no_off` and `instead`.
        why_no_off: reason why there is no such value.
        instead: the property that is tested in its place.
        shortcuts: (class, attribute, replacement): shortcuts of the off case that are disabled in its test, so that
            the method's own computation runs.
        models: the small models (keys of `MODELS`) the method is tested on.
        refused: small models that it must refuse, each with a part of the message.
        own_evaluation: reason why evaluation is not the pretrained model's own; empty: it is.
        initial_model: maps a plain model to the one whose output the method's model has at initialization; by default
            the plain model itself.
        on_reference: what the method should compute with these settings: ``"exact"`` (the logits and gradients of the
            plain network), or a `Reference`, a dense function that computes the logits, and by autograd the gradients.
            Every row needs one.
        unreferenced: small models that are excluded from the comparison with `on_reference`, either completely
            (``"mobilenet"``) or in one precision (``"swinv2, bf16"``), each with the reason.
        rtol: largest relative error of a parameter's gradient (by norm) in float64. Larger than the default only for
            methods that round values: the mean over several passes is then compared, and the error is also bounded in
            the direction of the reference.
        random: reason why a forward pass in training draws random numbers (as dropout does); empty: it draws none, and
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
        """Make the method, with changes of the row's settings."""
        return self.method(**{**self.settings, **changes})
