"""Adam and AdamW whose moments take 8 or 4 bits per value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim import Optimizer

from efficient_ft.core.errors import SettingError, UserError
from efficient_ft.ops.blockwise import AdamStep, Moments, adam_step, empty_moments, is_blockwise
from efficient_ft.ops.blockwise.update import dense_step
from efficient_ft.optim.states import plain_states


class LowBitAdamW(Optimizer):
    """`torch.optim.AdamW` whose moments are stored block-wise, in 8 or 4 bits per value.

    A step computes in float32 and rounds the moments to codes afterwards, at random but equally in every run. Blocks
    have 128 values. Parameters with fewer than 4096 values, and those that are not a whole number of blocks, keep
    float32 moments.

    No step exceeds the bound of AdamW's own steps, however far the gradients of a block are spread: the state holds the
    ratio m / √v, and √v in steps of nearly equal relative size. Entries of the state of a parameter in blocks:
    ``ratio`` and ``root`` (codes, uint8), ``ratio_scale`` (float32, one per block) and ``root_range`` (int16, three).

    Source of blocks: Dettmers, Lewis, Shleifer, Zettlemoyer, "8-bit Optimizers via Block-wise Quantization", ICLR 2022.

    Args:
        params: parameters or parameter groups.
        lr: learning rate.
        betas: decay of the first and second moment.
        eps: added to the root of the second moment.
        weight_decay: decoupled (AdamW).
        bits: 8 or 4.

    Raises:
        SettingError: a value outside these ranges.
    """

    decoupled = True

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        bits: int = 8,
    ) -> None:
        if bits not in (8, 4):
            raise SettingError("bits", bits, "8 or 4")
        for name, value in (("lr", lr), ("eps", eps), ("weight_decay", weight_decay)):
            if not value >= 0:
                raise SettingError(name, value, "a number >= 0")
        if not all(0 <= beta < 1 for beta in betas):
            raise SettingError("betas", tuple(betas), "two numbers >= 0 and < 1")
        self.bits = bits
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Update the parameters that have a gradient.

        Args:
            closure: computes the loss and its gradients again; what it returns is returned.

        Raises:
            UserError: a gradient is sparse.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._update(p, group)
        return loss

    def _update(self, p: Tensor, group: dict[str, Any]) -> None:
        assert p.grad is not None
        if p.grad.is_sparse:
            raise UserError(f"{type(self).__name__} takes dense gradients, got a sparse one. Use sparse=False.")
        state = self.state[p]
        if not state:
            state.update(self._empty_state(p))
        state["step"] += 1
        if isinstance(p, FakeTensor):  # costs are counted on fake tensors, which have no values
            return
        beta1, beta2 = group["betas"]
        step = AdamStep(
            float(group["lr"]), beta1, beta2, group["eps"], group["weight_decay"], self.decoupled, int(state["step"])
        )
        # The same memory if it is float32 and contiguous, else a copy.
        values, grad = (t.detach().float().contiguous() for t in (p, p.grad))
        if "ratio" in state:
            moments = Moments(*(state[name] for name in Moments._fields))
            adam_step(values.view(-1), grad.view(-1), moments, self.bits, step)
        else:
            dense_step(values, grad, state["exp_avg"], state["exp_avg_sq"], step)
        if values.data_ptr() != p.data_ptr():
            p.copy_(values)

    def _empty_state(self, p: Tensor) -> dict[str, Tensor]:
        """Moments of zero."""
        step = torch.zeros((), dtype=torch.float32)
        if is_blockwise(p.numel()):
            return {"step": step, **empty_moments(p.numel(), self.bits, p.device)._asdict()}
        zeros = {name: torch.zeros(p.shape, dtype=torch.float32, device=p.device) for name in ("exp_avg", "exp_avg_sq")}
        return {"step": step, **zeros}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a state exactly, on the devices of the parameters.

        Raises:
            UserError: the state belongs to another optimizer, or to one with other `bits`.
        """
        states = plain_states(self, state_dict)
        for p, state in states.items():
            expected = {name: t.shape for name, t in self._empty_state(p).items()}
            if {name: t.shape for name, t in state.items()} != expected:
                raise UserError(
                    f"The optimizer's state must be that of {type(self).__name__} with bits={self.bits}, got another"
                    f" one (a parameter of shape {tuple(p.shape)}). Build the optimizer that the state was saved from."
                )
        super().load_state_dict({**state_dict, "state": {}})
        for p, state in states.items():
            # torch's own would turn codes into the parameters' type
            self.state[p] = {
                name: t.detach().clone() if name == "step" else t.detach().to(p.device, copy=True)
                for name, t in state.items()
            }


class LowBitAdam(LowBitAdamW):
    """`torch.optim.Adam` as `LowBitAdamW` is AdamW: weight decay is added to the gradient.

    Args:
        params, lr, betas, eps, weight_decay, bits: see `LowBitAdamW`; `weight_decay` is 0 by default.

    Raises:
        SettingError: a value outside the ranges of `LowBitAdamW`.
    """

    decoupled = False

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        bits: int = 8,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, bits=bits)
