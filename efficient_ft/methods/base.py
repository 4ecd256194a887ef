"""The contract every method keeps: a plain object that changes a model, and a Lightning callback.

In anyone's own loop a method is two lines::

    method = LBPWHT(bases="l1", order=4)
    print(method.apply(model))

and, for those that act per step, ``step_begin(step)`` before and ``step_end()`` after each optimizer step (before
gradients are set to zero); for those with a loss of their own, ``loss = method.total_loss(loss)``. The optimizer is
built between the two lines and the first step, over all that trains then.
With Lightning it is passed in ``Trainer(callbacks=[...])``: surgery happens in ``setup``, once, after the
weights are loaded and before the optimizer is built.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from efficient_ft.core.errors import UserError

Axis = Literal["selection", "adapters", "backprop", "memory", "tokens"]

# A selection decides what trains before adapters freeze what they adapt; low-rank backward then serves the
# adapters' base layers; packers wrap what is left to save; token methods rewrite whole blocks.
ORDER_OF_APPLICATION: tuple[Axis, ...] = ("selection", "adapters", "backprop", "memory", "tokens")

#: The attribute of a model that names the methods applied to it.
_MARKS = "efficient_ft_methods"


@dataclass(frozen=True)
class Applied:
    """What ``apply`` did: full names of the modules or parameters touched, and those left alone with the reason.

    Attributes:
        none_needed: why it is right that nothing was touched (full rank: plain layers are exact and cheaper); without
            it, touching nothing is an error.
    """

    method: str
    touched: tuple[str, ...]
    skipped: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    none_needed: str = ""

    def __str__(self) -> str:
        lines = [f"{self.method}: {len(self.touched)} touched, {len(self.skipped)} skipped"]
        lines += [f"  + {name}" for name in self.touched]
        lines += [f"  - {name}: {why}" for name, why in self.skipped.items()]
        return "\n".join([*lines, *(f"  {note}" for note in self.notes)])


class Method:
    """Base of all methods. A subclass gives ``name``, ``axis``, ``_apply`` and, where it changes modules, ``_remove``.

    The constructor's arguments are the method's settings: each is kept as an attribute of the same name.
    """

    name: ClassVar[str]
    axis: ClassVar[Axis]
    #: Optimizer steps still to come before the cost of a step no longer changes (LHE profiles first).
    warmup_steps: int = 0
    #: Steps over which the mean of its cost is taken, where steps differ.
    cost_steps: ClassVar[int] = 1
    #: Some trainable parameters get no gradient in some steps, which DistributedDataParallel must be told.
    find_unused_parameters: ClassVar[bool] = False
    #: What it does is merged into the model's own weights, or leaves no trace; if not, exported weights hold what it
    #: adds, and whoever loads them applies it first.
    merges: ClassVar[bool] = True

    _applied: Applied | None = None

    # ------------------------------------------------------------------ to be given by a method
    def _apply(self, model: nn.Module) -> Applied:
        raise NotImplementedError  # abstract

    def _remove(self, model: nn.Module) -> None:
        """Undo the surgery on `model` (or on a deep copy of the model it was applied to)."""

    def step_begin(self, step: int) -> None:
        """Per-step work before the forward pass of optimizer step `step` (the same on all micro-batches and ranks)."""

    def step_end(self) -> None:
        """Per-step work after the optimizer step, before gradients are set to zero."""

    def step_stats(self) -> dict[str, Any]:
        """What it decided for the present step, in plain containers, to be recorded (budgets, chosen layers)."""
        return {}

    def total_loss(self, loss: Tensor) -> Tensor:
        """What is minimised after a forward pass whose own loss is `loss`: a method may add a loss of its own."""
        return loss

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        pass

    # ------------------------------------------------------------------ what users call
    def apply(self, model: nn.Module) -> Applied:
        """Apply to `model` in place; a second call is a no-op that returns the same report.

        Raises:
            UserError: the model is compiled or wrapped, nothing in it can be touched, or this object has been applied
                to another model.
        """
        marks: tuple[str, ...] = getattr(model, _MARKS, ())
        if self._applied is not None:
            if self.state_key not in marks:
                raise UserError(
                    f"method {self.name}: this object has been applied to another model; make a new one for this model."
                )
            return self._applied
        refuse_wrapped(model, self.name)
        applied = self._apply(model)
        if not applied.touched and not applied.none_needed:
            reasons = sorted(set(applied.skipped.values()))
            raise UserError(
                f"method {self.name}: nothing in {type(model).__name__} can be touched"
                + (f" ({'; '.join(reasons[:3])})." if reasons else ".")
            )
        self._applied = applied
        # on the model, so that copies of both still know each other
        setattr(model, _MARKS, (*marks, self.state_key))
        return applied

    @property
    def applied(self) -> Applied | None:
        return self._applied

    @property
    def application_order(self) -> tuple[int, str]:
        """Sort key of the order in which methods are applied: by axis, then by name."""
        return ORDER_OF_APPLICATION.index(self.axis), self.name

    def remove(self, model: nn.Module) -> None:
        """Give `model` back its own modules and names; trained values stay."""
        self._remove(model)
        self._applied = None
        setattr(model, _MARKS, tuple(m for m in getattr(model, _MARKS, ()) if m != self.state_key))

    def settings(self) -> dict[str, Any]:
        """The constructor's arguments and their values."""
        names = [p for p in inspect.signature(type(self).__init__).parameters if p != "self"]
        return {n: getattr(self, n) for n in names}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{k}={v!r}' for k, v in self.settings().items())})"

    @property
    def state_key(self) -> str:
        """Name and settings: under it the state of this method is kept in a checkpoint."""
        return f"{self.name}{sorted(self.settings().items())}"


def trainable(model: nn.Module) -> dict[str, bool]:
    """`requires_grad` of every parameter, by name."""
    return {name: parameter.requires_grad for name, parameter in model.named_parameters()}


def make_trainable(model: nn.Module, wanted: Mapping[str, bool]) -> None:
    """Set `requires_grad` of the parameters named, where the model has them; a frozen one's gradient is None."""
    for name, parameter in model.named_parameters():
        if name in wanted:
            parameter.requires_grad_(wanted[name])
            if not wanted[name]:
                parameter.grad = None


def refuse_wrapped(model: nn.Module, name: str) -> None:
    """Raise UserError for a compiled model or one inside DataParallel, DDP or FSDP: surgery must come first."""
    wrapper = type(model).__name__
    if wrapper in ("OptimizedModule", "DataParallel", "DistributedDataParallel", "FullyShardedDataParallel"):
        raise UserError(
            f"method {name}: the model is already wrapped ({wrapper}); apply the method to the plain model first,"
            " then compile or wrap it."
        )
    if isinstance(model, torch.jit.ScriptModule):
        raise UserError(f"method {name}: a scripted model cannot be changed; apply the method before scripting it.")


def in_order(methods: Iterable[Method]) -> list[Method]:
    """Sorted by the order of application their axes declare; the order of a user's list never matters."""
    return sorted(methods, key=lambda m: m.application_order)


def apply_methods(model: nn.Module, methods: Iterable[Method]) -> list[Applied]:
    """Apply several methods in their declared order; returns their reports in that order."""
    return [m.apply(model) for m in in_order(methods)]


def plain_state_dict(model: nn.Module, methods: Sequence[Method]) -> dict[str, torch.Tensor]:
    """The weights under the pretrained model's own names (adapters merged), on the CPU; `model` is not changed.

    What a method adds that cannot be merged (``merges = False``) stays, under names of its own.
    """
    plain = copy.deepcopy(model)
    for method in reversed(in_order(methods)):
        if method.merges:
            method._remove(plain)
    return {k: v.detach().cpu().contiguous() for k, v in plain.state_dict().items()}
