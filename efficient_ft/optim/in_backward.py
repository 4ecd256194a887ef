"""Stepping the optimizer inside the backward pass, so that the gradients never exist together.

Source: Lv, Yang, Liu, Gao, Guo, Qiu, "Full Parameter Fine-tuning for Large Language Models with Limited Resources"
(LOMO), ACL 2024, which does so for SGD; here for any optimizer that treats each parameter alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from efficient_ft.core.errors import UserError
from efficient_ft.core.in_backward import Wrong, refuse_in_backward


def step_in_backward(optimizer: Optimizer) -> SteppedInBackward:
    """Make ``loss.backward()`` step each parameter as soon as its gradient is complete, and free the gradient.

    >>> optimizer = step_in_backward(torch.optim.AdamW(model.parameters(), lr=1e-4))
    >>> loss.backward()  # updates the parameters
    >>> optimizer.step()  # ends the step, as in any loop

    Weights after a step equal those of an ordinary one, bit for bit. What needs all gradients at once is impossible:
    clipping by the norm of the whole gradient, several backward passes per step (gradient accumulation), the loss
    scaling of fp16, and averaging over processes. ``clip_grad_norm_`` finds no gradient and does nothing: leave it out.

    Args:
        optimizer: over the parameters that train; it updates each of them from its own gradient and state alone.

    Returns:
        An optimizer with the same groups and state. Use it in place of `optimizer`.

    Raises:
        SettingError: several processes train.
        UserError: in the backward pass: a second one in the same step; in ``GradScaler.step``.
    """
    return SteppedInBackward(optimizer)


class SteppedInBackward(Optimizer):
    """An optimizer that steps inside the backward pass; made by `step_in_backward`.

    Args:
        optimizer: computes the updates.

    Raises:
        SettingError: several processes train.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            refuse_in_backward("step_in_backward", processes=Wrong("world_size", dist.get_world_size(), "1"))
        self.optimizer = optimizer
        self._handles: list[Any] = []
        #: Parameters that this step has updated.
        self._updated: set[int] = set()
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self._share()

    def _share(self) -> None:
        """Make the groups and the state of the inner optimizer this one's."""
        self.param_groups, self.state = self.optimizer.param_groups, self.optimizer.state

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; its parameters are updated inside the backward pass too."""
        groups = self.optimizer.param_groups
        if not any(group is param_group for group in groups):
            self.optimizer.add_param_group(param_group)
        index = next(i for i, group in enumerate(groups) if group is param_group)
        for p in param_group["params"]:
            self._handles.append(p.register_post_accumulate_grad_hook(lambda p: self._update(p, index)))

    def _update(self, p: Tensor, index: int) -> None:
        """Step one parameter of the group `index`, and free its gradient."""
        if id(p) in self._updated:
            raise UserError(
                "A parameter got a second gradient in one step. An optimizer that steps inside the backward pass takes"
                " one backward pass per step: call optimizer.step() after each, without gradient accumulation."
            )
        inner = self.optimizer
        inner.param_groups = [{**self.param_groups[index], "params": [p]}]
        try:
            inner.step()
        finally:
            inner.param_groups = self.param_groups
        p.grad = None
        self._updated.add(id(p))

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """End a step; gradients that were set by hand are applied.

        Args:
            closure: runs the forward and the backward pass, which updates; what it returns is returned.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.optimizer.step()
        self._updated.clear()
        return loss

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Refuse to be stepped by ``torch.amp.GradScaler``, which alone reads this.

        Raises:
            UserError: always.
        """
        raise UserError(
            "An optimizer that steps inside the backward pass cannot be used with a GradScaler: it has already updated"
            " the parameters from the scaled gradients. Load the weights again, and train with bf16 or fp32 and without"
            " a GradScaler, or without step_in_backward."
        )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Set all gradients to None, or to zero, and end a step."""
        self.optimizer.zero_grad(set_to_none)
        self._updated.clear()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the inner optimizer: that of an ordinary training."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state of the inner optimizer."""
        self.optimizer.load_state_dict(state_dict)
        self._share()

    def remove(self) -> None:
        """Remove the hooks, which hold the parameters and the state: a backward pass leaves gradients again."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def steps_in_backward(optimizers: Iterable[Any]) -> bool:
    """Return whether one of them, or the one that it wraps (accelerate), steps inside the backward pass."""
    return any(isinstance(o, SteppedInBackward) or isinstance(getattr(o, "optimizer", None), SteppedInBackward)
               for o in optimizers)  # fmt: skip
