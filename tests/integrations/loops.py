"""A plain training loop, which is the reference of both callbacks, and the methods of the tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from efficient_ft.methods import BSR, LBPWHT, ALaST, BackRazor, Full, LoRA, MoE, TopLayers, apply_methods
from efficient_ft.methods.base import Method
from efficient_ft.testing import batch_of, model_of

LR, MOMENTUM = 0.05, 0.9

#: Functions that create new methods, by name. Together, the methods use every hook.
METHODS: dict[str, Callable[[], list[Method]]] = {
    "full": lambda: [Full()],
    "alast": lambda: [ALaST(num_layers=2, budget_init=0.7, seed=3)],
    "moe": lambda: [MoE(num_experts=4, top_k=2, blocks=[-1], norm_topk_prob=True, aux_loss_coef=0.1)],
    "bsr": lambda: [BSR(blocks=[1, -1], drop_at=[1, 2], keep_rate=0.5)],
    "lbp_wht_lhe": lambda: [LBPWHT(bases="lhe", order=2, profile_steps=2)],
    "back_razor": lambda: [BackRazor(sparsity=0.7)],
    "top_layers": lambda: [TopLayers(num_layers=2, profile_steps=2)],
    "lora": lambda: [LoRA(rank=2)],
    "lora+lbp_wht": lambda: [LoRA(rank=2), LBPWHT(order=3)],
}


def batches_of(name: str, count: int, dtype: torch.dtype = torch.float64) -> list[tuple[Tensor, Tensor]]:
    """Return batches of two images and labels for the small model `name`."""
    return [batch_of(name, dtype, seed=seed) for seed in range(count)]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Create an SGD optimizer for the trainable parameters."""
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=LR, momentum=MOMENTUM)


def train_by_hand(
    network: nn.Module,
    methods: Sequence[Method],
    batches: Sequence[tuple[Tensor, Tensor]],
    epochs: int = 1,
    accumulate: int = 1,
    optimizer_of: Callable[[nn.Module], torch.optim.Optimizer] = sgd,
) -> None:
    """Train as the contract of `Method` requires. The last step of an epoch may have fewer micro-batches."""
    apply_methods(network, methods)
    optimizer, step = optimizer_of(network), 0
    for _ in range(epochs):
        for start in range(0, len(batches), accumulate):
            group = batches[start : start + accumulate]
            for method in methods:
                method.step_begin(step)
            for images, labels in group:
                loss = F.cross_entropy(network(images), labels)
                for method in methods:
                    loss = method.total_loss(loss)
                (loss / accumulate).backward()
            optimizer.step()
            for method in methods:
                method.step_end()
            optimizer.zero_grad()
            step += 1


def trained_by_hand(methods: Sequence[Method], epochs: int, accumulate: int, count: int = 4) -> nn.Module:
    """Train the small ViT for `epochs` epochs of `count` batches."""
    torch.manual_seed(0)
    network = model_of("vit")
    train_by_hand(network, methods, batches_of("vit", count), epochs, accumulate)
    return network


def assert_same_weights(expected: nn.Module, found: nn.Module) -> None:
    """Assert equal names and bitwise equal values."""
    left, right = expected.state_dict(), found.state_dict()
    assert list(left) == list(right)
    different = [name for name in left if not torch.equal(left[name], right[name])]
    assert not different, different


def states_of(methods: Sequence[Method]) -> dict[str, Any]:
    """Return the states of methods by name."""
    return {method.name: method.state_dict() for method in methods}


class Probe(Full):
    """A method that trains all parameters and records the calls of the training loop."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def _apply(self, model: nn.Module, *view: Any) -> Any:
        self.calls.append("apply")
        self._parameter = next(iter(model.parameters()))
        self._values = self._parameter.detach().clone()
        return super()._apply(model, *view)

    def step_begin(self, step: int) -> None:
        """Record the step number."""
        self.calls.append(f"begin {step}")
        self._values = self._parameter.detach().clone()

    def step_end(self) -> None:
        """Record if the weights have changed and if gradients exist."""
        moved = not torch.equal(self._values, self._parameter)
        self.calls.append(f"end moved={moved} grad={self._parameter.grad is not None}")
