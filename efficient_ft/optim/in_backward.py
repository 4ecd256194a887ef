"""Optimizer steps inside the backward pass, so that not all gradients exist at the same time.

Source: Lv, Yang, Liu, Gao, Guo, Qiu, "Full Parameter Fine-tuning for Large Language Models with Limited Resources"
(LOMO), ACL 2024, for SGD. This module supports every optimizer that updates each parameter independently.
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
    """Make ``loss.backward()`` update each parameter as soon as its gradient is complete, and free the gradient.

    >>> optimizer = step_in_backward(torch.optim.AdamW(model.parameters(), lr=1e-4))
    >>> loss.backward()  # updates the parameters
    >>> optimizer.step()  # ends the step, as in any training loop

    The weights after a step are bit-identical to the weights after an ordinary step. Operations that require all
    gradients at once are not supported: clipping by the global norm, gradient accumulation, the loss scaling of fp16,
    and averaging gradients over processes. Do not call ``clip_grad_norm_``, which finds no gradients and has no effect.

    Args:
        optimizer: Optimizer over the trainable parameters. The optimizer must update each parameter only from the
            gradient and state of that parameter.

    Returns:
        An optimizer with the same parameter groups and state, which must be used instead of `optimizer`.

    Raises:
        SettingError: If training uses more than one process.
        UserError: If a step has a second backward pass, or if ``GradScaler.step`` is called.
    """
    return SteppedInBackward(optimizer)


class SteppedInBackward(Optimizer):
    """Optimizer that steps inside the backward pass, created by `step_in_backward`."""

    def __init__(self, optimizer: Optimizer) -> None:
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            refuse_in_backward("step_in_backward", processes=Wrong("world_size", dist.get_world_size(), "1"))
        self.optimizer = optimizer
        self._handles: list[Any] = []
        #: Ids of the parameters that were updated in this step.
        self._updated: set[int] = set()
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self._share()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.optimizer,)

    def _share(self) -> None:
        self.param_groups, self.state = self.optimizer.param_groups, self.optimizer.state

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group. The parameters of the group are also updated inside the backward pass."""
        groups = self.optimizer.param_groups
        if not any(group is param_group for group in groups):
            self.optimizer.add_param_group(param_group)
        index = next(i for i, group in enumerate(groups) if group is param_group)
        for p in param_group["params"]:
            self._handles.append(p.register_post_accumulate_grad_hook(lambda p: self._update(p, index)))

    def _update(self, p: Tensor, index: int) -> None:
        """Update one parameter of the group at `index`, and free its gradient."""
        if id(p) in self._updated:
            raise UserError(
                "A parameter received a second gradient in one step. An optimizer that steps inside the backward pass"
                " supports only one backward pass per step. Call optimizer.step() after each backward pass, and do not"
                " accumulate gradients."
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
        """End a step, and apply gradients that were set manually.

        Args:
            closure: Function that runs the forward pass and the backward pass. The backward pass updates the
                parameters. The result of the function is returned.
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
        """Raise a UserError in ``torch.amp.GradScaler.step``, which is the only code that reads this attribute."""
        raise UserError(
            "An optimizer that steps inside the backward pass cannot be used with a GradScaler: the optimizer has"
            " already updated the parameters with scaled gradients. Reload the weights. Then train in bf16 or fp32"
            " without a GradScaler, or train without step_in_backward."
        )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Set all gradients to None or to zero, and end the step."""
        self.optimizer.zero_grad(set_to_none)
        self._updated.clear()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the inner optimizer, which equals its state without steps inside the backward pass."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state of the inner optimizer."""
        self.optimizer.load_state_dict(state_dict)
        self._share()

    def remove(self) -> None:
        """Remove the hooks, which reference the parameters and the state.

        Afterwards, backward passes keep the gradients and do not update the parameters.
        """
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def steps_in_backward(optimizers: Iterable[Any]) -> bool:
    """Return True if one of the optimizers (possibly wrapped by accelerate) steps inside the backward pass."""
    return any(isinstance(o, SteppedInBackward) or isinstance(getattr(o, "optimizer", None), SteppedInBackward)
               for o in optimizers)  # fmt: skip
