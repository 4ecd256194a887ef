"""Optimizer steps for weights that are stored in bfloat16."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from efficient_ft.ops.rounding import round_to_bf16

#: Name of the entry of a parameter group that counts the optimizer steps. The entry is part of the state dict.
_STEPS = "rounding_steps"


class StochasticRounding(Optimizer):
    """Optimizer that updates bfloat16 parameters in float32 and rounds the new values stochastically.

    >>> optimizer = StochasticRounding(torch.optim.AdamW(model.parameters(), lr=1e-4))

    A step converts one bfloat16 parameter and its gradient at a time to float32, so that only two temporary tensors of
    the size of the largest parameter exist at the same time. The state of the optimizer is the state that the optimizer
    creates for float32 parameters. Parameters of other data types are updated as usual.

    The random numbers depend on the position of the parameter in the parameter groups, the position of the value, and
    the number of the step. A resumed run therefore rounds in the same way as an uninterrupted run, and all processes of
    a run round in the same way. The global random generators are not used.

    Source: Gupta, Agrawal, Gopalakrishnan, Narayanan, "Deep Learning with Limited Numerical Precision", ICML 2015.

    Args:
        optimizer: Optimizer that updates each parameter only from the gradient and state of that parameter.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        #: Position of each parameter in the parameter groups.
        self._position: dict[Tensor, int] = {}
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self._share()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.optimizer,)

    def _share(self) -> None:
        self.param_groups, self.state = self.optimizer.param_groups, self.optimizer.state

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group."""
        if not any(group is param_group for group in self.optimizer.param_groups):
            self.optimizer.add_param_group(param_group)
        param_group.setdefault(_STEPS, 0)
        for p in param_group["params"]:
            self._position[p] = len(self._position)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Update the parameters that have a gradient.

        Args:
            closure: Function that reevaluates the loss and its gradients. The result of the function is returned.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        groups = self.param_groups
        wide = [{**group, "params": [p for p in group["params"] if p.dtype != torch.bfloat16]} for group in groups]
        self._step([group for group in wide if group["params"]])
        for group in groups:
            for p in group["params"]:
                if p.dtype == torch.bfloat16 and p.grad is not None:
                    self._update(p, group)
            group[_STEPS] += 1
        return loss

    def _step(self, groups: list[dict[str, Any]]) -> None:
        """Run a step of the inner optimizer for some of the parameters."""
        inner = self.optimizer
        whole, inner.param_groups = inner.param_groups, groups
        try:
            inner.step()
        finally:
            inner.param_groups = whole

    def _update(self, p: Tensor, group: dict[str, Any]) -> None:
        assert p.grad is not None
        wide = nn.Parameter(p.detach().float())
        wide.grad = p.grad.float()
        if p in self.state:
            self.state[wide] = self.state.pop(p)
        try:
            self._step([{**group, "params": [wide]}])
        finally:
            if wide in self.state:
                self.state[p] = self.state.pop(wide)
        # Odd multipliers spread the seeds of consecutive steps and parameters.
        seed = (group[_STEPS] * 0x9E3779B9 + self._position[p] * 0x85EBCA77) % 2**32
        round_to_bf16(wide.detach(), p, seed)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Set all gradients to None or to zero."""
        self.optimizer.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the inner optimizer."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state of the inner optimizer, without converting the values of the state."""
        self.optimizer.load_state_dict(state_dict)
        self._share()
        for group in self.param_groups:  # the state may have been saved without this wrapper
            group.setdefault(_STEPS, 0)
        # torch has converted the state to the data type of the parameters.
        saved = [state_dict["state"].get(i, {}) for group in state_dict["param_groups"] for i in group["params"]]
        parameters = [p for group in self.param_groups for p in group["params"]]
        for p, state in zip(parameters, saved, strict=True):
            for name, value in state.items():
                loaded = self.state[p][name]
                if isinstance(value, Tensor) and value.dtype != loaded.dtype:
                    self.state[p][name] = value.detach().to(loaded.device, copy=True)
