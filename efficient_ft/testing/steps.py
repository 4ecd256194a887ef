"""Steps of training and evaluation on the small models."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from efficient_ft.methods.base import Method
from efficient_ft.testing.models import batch_of

#: The gradient of every parameter, by name; None: it has none.
Gradients = dict[str, Tensor | None]


def gradients(model: nn.Module, name: str, seed: int = 0) -> Gradients:
    """Return the gradients after the forward and backward pass of one training step.

    Args:
        model: the small model `name`, or a copy of it that methods have changed.
        seed: of the images, and of what is random in the step.
    """
    torch.manual_seed(seed)
    model.train()
    for parameter in model.parameters():
        parameter.grad = None
    images, labels = batch_of(name, next(model.parameters()).dtype, seed)
    F.cross_entropy(model(images), labels).backward()
    return {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}


def largest_difference(a: Gradients, b: Gradients) -> float:
    """Return the largest relative error (by norm) of a gradient; infinite where one has a gradient and the other none.

    Gradients that are zero in theory (a bias before a normalization) are rounding noise, and so measured by the
    largest gradient.
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
    """Take the steps of `method`'s profile, if it has one, and begin the next step; no parameter moves."""
    steps = method.warmup_steps
    for step in range(steps):
        method.step_begin(step)
        gradients(model, name, seed=step)
        method.step_end()
    method.step_begin(steps)


def train_a_little(model: nn.Module, method: Method, name: str, steps: int = 2, lr: float = 0.05) -> None:
    """Take a few steps in a plain training loop."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=lr)
    for step in range(steps):
        method.step_begin(step)
        gradients(model, name, seed=step)
        optimizer.step()
        method.step_end()


@torch.no_grad()
def evaluate(model: nn.Module, name: str) -> Tensor:
    """Return logits in evaluation mode; `model` stays in training mode."""
    model.eval()
    logits = model(batch_of(name, next(model.parameters()).dtype, seed=99)[0])
    model.train()
    return logits


def stir(model: nn.Module) -> None:
    """Give adapters, gates and side modules, which start at zero, a value that shows."""
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad and not parameter.any():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
