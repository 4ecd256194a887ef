"""Base classes of the methods on the memory axis: replacements of forward passes, and packing state."""

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
    """Replacement of the forward pass of a module whose activations are saved in another storage format."""

    @property
    def training(self) -> bool:
        """True if this may be a training step.

        `freeze_batch_norm` assigns a frozen class to BatchNorms, whose flag follows the model. Other classes of
        BatchNorm may be in evaluation mode during training.
        """
        if self.module.training:
            return True
        known = (*FROZEN, *FROZEN.values())
        return isinstance(self.module, nn.modules.batchnorm._BatchNorm) and type(self.module) not in known


def refuse_recomputation(method: str) -> None:
    """Raise UserError while the model itself recomputes a part: the method would then save nothing."""
    if is_recomputing():
        raise UserError(
            f"method {method}: the model runs its blocks again in the backward pass (gradient checkpointing), so"
            f" {method} saves no memory. Call model.set_grad_checkpointing(False) (transformers:"
            f" gradient_checkpointing_disable()), or remove {method}."
        )


class MemoryMethod(Method):
    """Base class of the methods that define how a model saves its activations.

    Attributes:
        libraries: numba, which compiles the CPU kernels, for methods that quantize or prune values.
    """

    axis = Axis.MEMORY
    changes_weights = False
    libraries: tuple[str, ...] = ("numba",)

    def __init__(self) -> None:
        self._packing: PackingState | None = None
        self._restored: dict[str, Any] | None = None

    def _begin(self) -> PackingState:
        """Create new packing state, and restore it if a checkpoint was loaded."""
        self._packing = self._new_state()
        if self._restored is not None:
            self._packing.load_state_dict(self._restored)
        return self._packing

    def _new_state(self) -> PackingState:
        """Return the state that persists from step to step: running ranges and overflow."""
        return PackingState()

    def _remove(self, model: nn.Module) -> None:
        for module in model.modules():
            take_away(module, MemoryForward)

    def remove(self, model: nn.Module) -> None:
        super().remove(model)
        self._packing = self._restored = None  # another model starts with new ranges

    def step_end(self) -> None:
        """Check the packed values of the step.

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
        self._restored = state_dict  # for a model to which the method is applied later
        if self._packing is not None:
            self._packing.load_state_dict(state_dict)
