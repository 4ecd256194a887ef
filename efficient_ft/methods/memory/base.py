"""The common part of the memory methods: how they replace a forward pass, and their state."""

from __future__ import annotations

from typing import Any

from torch import nn

from efficient_ft.methods.base import Method
from efficient_ft.methods.declarations import Axis
from efficient_ft.methods.forwards import OwnForward, take_away
from efficient_ft.ops.packed import PackingState


class MemoryForward(OwnForward):
    """Replacement of the forward pass of a module whose activations are kept in another form."""

    @property
    def training(self) -> bool:
        """True in training; always True for a BatchNorm, since one with frozen statistics is in evaluation mode."""
        return self.module.training or isinstance(self.module, nn.modules.batchnorm._BatchNorm)


class MemoryMethod(Method):
    """Base of the methods that decide how a model keeps its activations."""

    axis = Axis.MEMORY

    def __init__(self) -> None:
        self._session: PackingState | None = None
        self._restored: dict[str, Any] | None = None

    def _begin(self) -> PackingState:
        """Create the state kept from step to step, restored from the checkpoint if there is one."""
        self._session = self._new_session()
        if self._restored is not None:
            self._session.load_state_dict(self._restored)
        return self._session

    def _new_session(self) -> PackingState:
        return PackingState()

    def _remove(self, model: nn.Module) -> None:
        for module in model.modules():
            take_away(module, MemoryForward)

    def step_end(self) -> None:
        """Check the step's packed values.

        Raises:
            UserError: a packed value was too large for fp16.
        """
        if self._session is not None:
            self._session.last.held = None
            self._session.overflow.check()

    def state_dict(self) -> dict[str, Any]:
        return {} if self._session is None else self._session.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._restored = state_dict  # applied later, if the model is not there yet
        if self._session is not None:
            self._session.load_state_dict(state_dict)
