"""The base of methods on the memory axis: how they change a forward pass, and their state."""

from __future__ import annotations

from typing import Any

from torch import nn

from efficient_ft.core.context import is_recomputing
from efficient_ft.core.errors import UserError
from efficient_ft.methods.base import Method
from efficient_ft.methods.declarations import Axis
from efficient_ft.methods.forwards import OwnForward, take_away
from efficient_ft.models.frozen_batch_norm import FROZEN
from efficient_ft.ops.saving import PackingState


class MemoryForward(OwnForward):
    """Replacement of the forward pass of a module whose activations are kept in another form."""

    @property
    def training(self) -> bool:
        """True if this may be a training step.

        `freeze_batch_norm` gives BatchNorms a frozen class, whose flag is the model's; those of other classes are in
        evaluation mode in every forward pass.
        """
        if self.module.training:
            return True
        known = (*FROZEN, *FROZEN.values())
        return isinstance(self.module, nn.modules.batchnorm._BatchNorm) and type(self.module) not in known


def refuse_recomputation(method: str) -> None:
    """Raise UserError while the model recomputes a part itself: what the part keeps is not kept until then."""
    if is_recomputing():
        raise UserError(
            f"method {method}: the model runs its blocks again in the backward pass (gradient checkpointing), so that"
            f" {method} saves nothing. Call model.set_grad_checkpointing(False) (transformers:"
            f" gradient_checkpointing_disable()), or leave out {method}."
        )


class MemoryMethod(Method):
    """Base of the methods that decide how a model keeps its activations.

    Attributes:
        libraries: numba, the compiler of the CPU kernels, where values are changed into fewer bits.
    """

    axis = Axis.MEMORY
    changes_weights = False
    libraries: tuple[str, ...] = ("numba",)

    def __init__(self) -> None:
        self._packing: PackingState | None = None
        self._restored: dict[str, Any] | None = None

    def _begin(self) -> PackingState:
        """Return new packing state, restored from the checkpoint where there is one."""
        self._packing = self._new_state()
        if self._restored is not None:
            self._packing.load_state_dict(self._restored)
        return self._packing

    def _new_state(self) -> PackingState:
        """Return the state that lasts from step to step: running ranges, overflow."""
        return PackingState()

    def _remove(self, model: nn.Module) -> None:
        for module in model.modules():
            take_away(module, MemoryForward)

    def remove(self, model: nn.Module) -> None:
        super().remove(model)
        self._packing = self._restored = None  # a new model gets new ranges

    def step_end(self) -> None:
        """Check the step's packed values.

        Raises:
            UserError: a packed value was too large for fp16.
        """
        super().step_end()
        if self._packing is not None:
            self._packing.end_step()
            self._packing.overflow.check()

    def state_dict(self) -> dict[str, Any]:
        return {} if self._packing is None else self._packing.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._restored = state_dict  # for a model that it is applied to later
        if self._packing is not None:
            self._packing.load_state_dict(state_dict)
