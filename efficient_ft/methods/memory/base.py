"""Base classes of the methods on the memory axis."""

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
    """Replacement for the forward pass of a module whose activations are saved in a different storage format."""

    @property
    def training(self) -> bool:
        """True if the current call may belong to a training step.

        `freeze_batch_norm` assigns a frozen class to BatchNorm layers, and their flag follows the model. Other
        BatchNorm classes may be in evaluation mode during training.
        """
        if self.module.training:
            return True
        known = (*FROZEN, *FROZEN.values())
        return isinstance(self.module, nn.modules.batchnorm._BatchNorm) and type(self.module) not in known


def refuse_recomputation(method: str) -> None:
    """Raise UserError while the model itself recomputes a part, because the method would then save no memory."""
    if is_recomputing():
        raise UserError(
            f"method {method}: the model runs its blocks again in the backward pass (gradient checkpointing), so"
            f" {method} saves no memory. Call model.set_grad_checkpointing(False) (transformers:"
            f" gradient_checkpointing_disable()), or remove {method}."
        )


class MemoryMethod(Method):
    """Base class of the methods that determine how a model saves its activations."""

    axis = Axis.MEMORY
    changes_weights = False
    libraries: tuple[str, ...] = ("numba",)

    def __init__(self) -> None:
        self._packing: PackingState | None = None
        self._restored: dict[str, Any] | None = None

    def _begin(self) -> PackingState:
        """Create a new packing state, and load the state of a checkpoint if there is one."""
        self._packing = self._new_state()
        if self._restored is not None:
            self._packing.load_state_dict(self._restored)
        return self._packing

    def _new_state(self) -> PackingState:
        """Return a new object for the state that persists between steps (running ranges and overflow)."""
        return PackingState()

    def _remove(self, model: nn.Module) -> None:
        take_away(model, MemoryForward)

    def step_end(self) -> None:
        """Check the packed values of the step.

        Raises:
            UserError: If a packed value exceeds the range of fp16.
        """
        super().step_end()
        if self._packing is not None:
            self._packing.end_step()
            self._packing.overflow.check()

    def state_dict(self) -> dict[str, Any]:
        return {} if self._packing is None else self._packing.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._restored = state_dict  # used if the method is applied later
        if self._packing is not None:
            self._packing.load_state_dict(state_dict)
