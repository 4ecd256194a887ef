"""Training steps and evaluation on the small models."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from efficient_ft.methods.base import Method
from efficient_ft.testing.models import batch_of

#: Dict from parameter names to gradients. A value is None if the parameter has no gradient.
Gradients = dict[str, Tensor | None]


def gradients(model: nn.Module, name: str, seed: int = 0) -> Gradients:
    """Return the gradients after the forward and backward pass of one training step.

    `model` is a copy of the small model `name`, with or without methods. `seed` seeds the images and torch's generator.
    """
    torch.manual_seed(seed)
    run_pass(model, name, seed)
    return gradients_of(model)


def run_pass(model: nn.Module, name: str, seed: int, method: Method | None = None) -> None:
    """Run the forward and backward pass of one training step. This function does not seed a generator.

    The loss includes the loss that `method` adds.
    """
    model.train()
    model.zero_grad()
    images, labels = batch_of(name, next(model.parameters()).dtype, seed)
    loss = F.cross_entropy(model(images), labels)
    (loss if method is None else method.total_loss(loss)).backward()


def gradients_of(model: nn.Module) -> Gradients:
    """Return copies of the gradients of all parameters."""
    return {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}


def largest_difference(a: Gradients, b: Gradients) -> float:
    """Return the largest relative error (by norm) of all gradients.

    If a gradient is None only in `a` or only in `b`, return infinity. Gradients that are zero in exact arithmetic
    consist of rounding errors. The error of these gradients is given relative to the largest gradient.
    """
    assert a.keys() == b.keys()
    worst = 0.0
    scale = max((g.norm().item() for g in a.values() if g is not None), default=0.0)
    for name, g in a.items():
        other = b[name]
        if (g is None) != (other is None):
            return float("inf")
        if g is not None and other is not None:
            worst = max(worst, (g - other).norm().item() / max(g.norm().item(), 1e-6 * scale))
    return worst


def warm_up(model: nn.Module, method: Method, name: str) -> None:
    """Run the warmup steps of `method` (if any) without parameter updates, and begin the next step."""
    steps = method.warmup_steps
    for step in range(steps):
        method.step_begin(step)
        gradients(model, name, seed=step)
        method.step_end()
    method.step_begin(steps)


def train_a_little(model: nn.Module, method: Method, name: str, steps: int = 2, lr: float = 0.05) -> None:
    """Run `steps` steps of a plain training loop with SGD."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=lr)
    for step in range(steps):
        method.step_begin(step)
        gradients(model, name, seed=step)
        optimizer.step()
        method.step_end()


@torch.no_grad()
def evaluate(model: nn.Module, name: str) -> Tensor:
    """Return the logits in evaluation mode, and set `model` to training mode afterwards."""
    model.eval()
    logits = model(batch_of(name, next(model.parameters()).dtype, seed=99)[0])
    model.train()
    return logits


def stir(model: nn.Module) -> None:
    """Set trainable parameters that are zero to random values, for example in new adapters and gates."""
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad and not parameter.any():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
