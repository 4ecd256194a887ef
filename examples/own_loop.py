"""Apply methods in a plain PyTorch training loop with `MethodSession`.

In each step, ALaST selects the trained blocks and the number of tokens that each block passes to the next block.
LBP-WHT computes the gradients of the trained layers in a low-rank space. A small vision transformer learns handwritten
digits from scratch.

    python examples/own_loop.py
"""

from __future__ import annotations

import timm
import torch
from torch import Tensor
from torch.nn import functional as F

import efficient_ft.models.small  # noqa: F401  registers vit_digits, a small vision transformer, with timm
from efficient_ft import MethodSession
from efficient_ft.data.digits import load_digits
from efficient_ft.methods import LBPWHT, ALaST


def digits() -> tuple[Tensor, Tensor]:
    """Return digit images of shape (1797, 3, 32, 32) with values in [-1, 1], and their labels, in random order."""
    images, labels = load_digits()
    images = torch.tensor(images, dtype=torch.float32)[:, None] / 8 - 1
    order = torch.randperm(len(images))
    return F.interpolate(images, scale_factor=4).expand(-1, 3, -1, -1)[order], torch.tensor(labels)[order]


def main(steps: int = 60, batch_size: int = 32, file: str | None = None) -> float:
    """Train for `steps` steps, print the reports of the methods, and return the accuracy on the test images."""
    torch.manual_seed(0)
    images, labels = digits()
    model = timm.create_model("vit_digits", num_classes=10)

    alast = ALaST(num_layers=3, budget_init=0.9)
    model.train()
    # The network is not pretrained, so its BatchNorm layers do not have statistics to freeze.
    with MethodSession(model, [alast, LBPWHT(bases="l1", order=6)], frozen_bn=False) as session:
        for report in session.reports:
            print(report)
        optimizer = torch.optim.AdamW(session.parameters(), lr=2e-3)
        for step in range(steps):
            batch = torch.randint(len(images) - 256, (batch_size,))  # the last 256 images are used for testing
            with session.step(step):
                loss = session.loss(F.cross_entropy(model(images[batch]), labels[batch]))
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            if step % 20 == 0:
                print(f"step {step}: loss {loss.item():.3f}, trained {alast.step_stats()['trained']}")

    model.eval()
    with torch.no_grad():
        accuracy = (model(images[-256:]).argmax(1) == labels[-256:]).float().mean().item()
    print(f"accuracy: {accuracy:.0%}")
    if file is not None:
        session.save(file, whole=True)  # with the parameter names of timm
    return accuracy


if __name__ == "__main__":
    main(file="digits.safetensors")
