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
    """Forward pass of a module that saves its activations in a different storage format."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        # In recent versions of `transformers`, the forward method of such a module starts the recomputation.
        self._recomputable = [part for part in module.modules() if hasattr(part, "gradient_checkpointing")]

    def refuse_recomputation(self, method: str) -> None:
        """Raise UserError if the model itself recomputes the module, because the method would not reduce memory."""
        if is_recomputing() or any(part.gradient_checkpointing for part in self._recomputable):
            raise UserError(
                f"method {method}: the model recomputes its blocks in the backward pass (gradient checkpointing), so"
                f" that {method} does not reduce the memory. Call model.set_grad_checkpointing(False) (or"
                f" model.gradient_checkpointing_disable() for transformers models), or remove the method {method}."
            )

    @property
    def training(self) -> bool:
        """Return True if the current call may belong to a training step.

        For most modules, the result equals ``module.training``. For BatchNorm layers other than `nn.BatchNorm2d` and
        timm's `BatchNormAct2d`, the result is always True, because `freeze_batch_norm` switches these layers to
        evaluation mode during training.
        """
        if self.module.training:
            return True
        known = (*FROZEN, *FROZEN.values())
        return isinstance(self.module, nn.modules.batchnorm._BatchNorm) and type(self.module) not in known


class MemoryMethod(Method):
    """Base class of the methods that define how a model saves its activations."""

    axis = Axis.MEMORY
    changes_weights = False
    libraries: tuple[str, ...] = ("numba",)

    def __init__(self) -> None:
        self._packing: PackingState | None = None
        self._restored: dict[str, Any] | None = None

    def _begin(self) -> PackingState:
        """Return a new packing state. If a checkpoint has been loaded, restore the state from the checkpoint."""
        self._packing = self._new_state()
        if self._restored is not None:
            self._packing.load_state_dict(self._restored)
        return self._packing

    def _new_state(self) -> PackingState:
        """Return a new object for the state that persists between steps, such as running ranges."""
        return PackingState()

    def _remove(self, model: nn.Module) -> None:
        take_away(model, MemoryForward)

    def step_end(self) -> None:
        """Check that no packed value of the step has overflowed.

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
        self._restored = state_dict  # The state is used if `apply` is called later.
        if self._packing is not None:
            self._packing.load_state_dict(state_dict)
