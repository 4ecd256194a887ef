"""torchao's low-bit Adam, for CUDA: with learning rates as numbers, and a state dict of ordinary tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from efficient_ft.core.errors import SettingError, UserError
from efficient_ft.ops.blockwise import BLOCK
from efficient_ft.optim.states import plain_states


class _Adapter(Optimizer):
    """Adapter of torchao's optimizers to any training loop: a base class that stands before theirs."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        group["lr"] = float(group["lr"])

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        rates = [group["lr"] for group in self.param_groups]
        try:
            for group, rate in zip(self.param_groups, rates, strict=True):  # a number would be compiled in
                group["lr"] = torch.tensor(float(rate), dtype=torch.float32)
            super().step()
        finally:
            for group, rate in zip(self.param_groups, rates, strict=True):
                group["lr"] = rate
        return loss

    def state_dict(self) -> dict[str, Any]:
        plain = super().state_dict()
        plain["state"] = {index: _to_plain(state) for index, state in plain["state"].items()}
        return plain

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        states = plain_states(self, state_dict)
        super().load_state_dict({**state_dict, "state": {}})
        for p, state in states.items():
            self.state[p] = self._from_plain(p, state)

    def _from_plain(self, p: Tensor, plain: dict[str, Tensor]) -> dict[str, Tensor]:
        state = {"step": plain["step"].detach().clone()}
        for name, signed in (("exp_avg", True), ("exp_avg_sq", False)):
            buffer: Any = self._new_buffer(p, signed)  # type: ignore[attr-defined]
            held = buffer.codes if hasattr(buffer, "codes") else buffer
            if held.numel() != plain[name].numel() or hasattr(buffer, "codes") != (f"{name}_scale" in plain):
                raise UserError(
                    f"The optimizer's state must be that of {type(self).__name__}, got another one (a parameter of"
                    f" shape {tuple(p.shape)}). Build the optimizer that the state was saved from."
                )
            held.copy_(plain[name].view(held.shape))
            if hasattr(buffer, "codes"):
                buffer.scale.copy_(plain[f"{name}_scale"])
            state[name] = buffer
        return state


def _to_plain(state: dict[str, Any]) -> dict[str, Any]:
    plain = {}
    for name, value in state.items():
        if hasattr(value, "codes"):
            plain[name], plain[f"{name}_scale"] = value.codes.view(-1), value.scale
        else:
            plain[name] = value
    return plain


@functools.cache
def torchao_class(bits: int, decoupled: bool) -> Callable[..., Optimizer]:
    """Return torchao's AdamW (Adam, if not decoupled) with states of `bits`, adapted.

    Raises:
        SettingError: `bits` is neither 8 nor 4.
        UserError: torchao is not installed.
    """
    if bits not in BLOCK:
        raise SettingError("bits", bits, "8 or 4")
    try:
        from torchao import optim
    except ImportError as error:
        raise UserError(
            f"Optimizer states in {bits} bits need torchao on a CUDA device. Install it: pip install torchao"
        ) from error
    name = f"Adam{'W' if decoupled else ''}{bits}bit"
    return type(name, (_Adapter, getattr(optim, name)), {})
