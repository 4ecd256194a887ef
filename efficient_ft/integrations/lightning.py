"""The Lightning callback that carries methods through a training."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from efficient_ft.methods.base import Method, apply_methods, in_order


class MethodCallback(Callback):
    """Apply methods in `setup` and do their work per step.

    Surgery happens once, after the weights are loaded and before the optimizer is built.

    Args:
        methods: one method or several; their order does not matter.
        network: the attribute of the LightningModule that holds the network.
    """

    def __init__(self, methods: Method | Iterable[Method], network: str = "model") -> None:
        self.methods = in_order([methods] if isinstance(methods, Method) else methods)
        self.network = network
        self._step: int | None = None

    @property
    def state_key(self) -> str:
        return "MethodCallback"

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        apply_methods(getattr(pl_module, self.network), self.methods)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        # With accumulation several micro-batches share one optimizer step, and so one choice.
        if self._step != trainer.global_step:
            self._step = trainer.global_step
            for method in self.methods:
                method.step_begin(trainer.global_step)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._step != trainer.global_step:
            for method in self.methods:
                method.step_end()
            self._step = None  # the next step begins anew, in this training or another

    def state_dict(self) -> dict[str, Any]:
        return {method.state_key: state for method in self.methods if (state := method.state_dict())}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for method in self.methods:
            if method.state_key in state_dict:
                method.load_state_dict(state_dict[method.state_key])
