"""Adam and AdamW with moments of 8 or 4 bits per value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim import Optimizer

from efficient_ft.core.errors import SettingError, UserError
from efficient_ft.ops.blockwise import AdamStep, Moments, adam_step, dense_step, empty_moments, is_blockwise


class LowBitAdamW(Optimizer):
    """`torch.optim.AdamW` with block-wise quantized moments of 8 or 4 bits per value.

    A step is computed in float32. The moments are then rounded stochastically to codes, with the same random numbers in
    every run. A block contains 128 values. The moments of a parameter stay in float32 if the parameter has fewer than
    4096 values, or if its size is not a multiple of 128.

    The size of a step has the same bound as in AdamW, regardless of the range of the gradients in a block, because the
    state stores m / √v instead of m. The codes of √v are nearly logarithmic. The state contains the tensors ``ratio``
    and ``root`` (codes, uint8), ``ratio_scale`` (float32, one per block) and ``root_range`` (int16, three per block).

    Source (blocks): Dettmers, Lewis, Shleifer, Zettlemoyer, "8-bit Optimizers via Block-wise Quantization", ICLR 2022.

    Args:
        params: Parameters or parameter groups.
        lr: Learning rate.
        betas: Decay rates of the first and the second moment.
        eps: Constant added to the square root of the second moment for numerical stability.
        weight_decay: Coefficient of the decoupled weight decay (AdamW).
        bits: Number of bits per value, 8 or 4.

    Raises:
        SettingError: If a value is out of range.
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

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "bits": self.bits}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Update the parameters that have a gradient.

        Args:
            closure: Function that reevaluates the loss and its gradients. The result of the function is returned.

        Raises:
            UserError: If a gradient is sparse.
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
            raise UserError(
                f"{type(self).__name__} does not support sparse gradients. Use embeddings with sparse=False."
            )
        state = self.state[p]
        if not state:
            state.update(self._empty_state(p))
        state["step"] += 1
        if isinstance(p, FakeTensor):  # fake tensors, which are used to count costs, have no values
            return
        beta1, beta2 = group["betas"]
        step = AdamStep(
            float(group["lr"]), beta1, beta2, group["eps"], group["weight_decay"], self.decoupled, int(state["step"])
        )
        # These tensors share memory with p and its gradient if both are float32 and contiguous.
        values, grad = (t.detach().float().contiguous() for t in (p, p.grad))
        if "ratio" in state:
            moments = Moments(*(state[name] for name in Moments._fields))
            adam_step(values.view(-1), grad.view(-1), moments, self.bits, step)
        else:
            dense_step(values, grad, state["exp_avg"], state["exp_avg_sq"], step)
        if values.data_ptr() != p.data_ptr():
            p.copy_(values)

    def _empty_state(self, p: Tensor) -> dict[str, Tensor]:
        step = torch.zeros((), dtype=torch.float32)
        if is_blockwise(p.numel()):
            return {"step": step, **empty_moments(p.numel(), self.bits, p.device)._asdict()}
        zeros = {name: torch.zeros(p.shape, dtype=torch.float32, device=p.device) for name in ("exp_avg", "exp_avg_sq")}
        return {"step": step, **zeros}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load an optimizer state to the devices of the parameters, without converting the values of the state.

        Raises:
            UserError: If the state belongs to a different optimizer or to a different number of bits.
        """
        indices = [index for group in state_dict["param_groups"] for index in group["params"]]
        parameters = [p for group in self.param_groups for p in group["params"]]
        saved = state_dict["state"]
        states = {p: saved[index] for index, p in zip(indices, parameters, strict=False) if index in saved}
        for p, state in states.items():
            expected = {name: t.shape for name, t in self._empty_state(p).items()}
            if {name: getattr(t, "shape", None) for name, t in state.items()} != expected:
                raise UserError(
                    f"The optimizer state must belong to {type(self).__name__} with bits={self.bits}, but a parameter"
                    f" of shape {tuple(p.shape)} has a different state. Create the optimizer that saved the state, or"
                    " start again: set resume=never for a run, or do not call load_state_dict in a training loop."
                )
        super().load_state_dict({**state_dict, "state": {}})
        for p, state in states.items():
            # Optimizer.load_state_dict would convert codes to the dtype of the parameters.
            self.state[p] = {
                name: t.detach().clone() if name == "step" else t.detach().to(p.device, copy=True)
                for name, t in state.items()
            }


class LowBitAdam(LowBitAdamW):
    """`torch.optim.Adam` with quantized moments. Weight decay is added to the gradient, and is 0 by default.

    See `LowBitAdamW` for the arguments and errors.
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


def state_tensors(optimizer: Optimizer) -> list[Tensor]:
    """Return the tensors of an optimizer's state. A tensor subclass is replaced by its inner tensors."""
    tensors: list[Tensor] = []
    for state in optimizer.state.values():
        for value in state.values():
            if hasattr(value, "__tensor_flatten__"):
                tensors += [getattr(value, name) for name in value.__tensor_flatten__()[0]]
            elif isinstance(value, Tensor):
                tensors.append(value)
    return tensors
