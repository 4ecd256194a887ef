"""Methods in a training loop of one's own: two lines per method, three per step.

ALaST decides in each step which blocks train and how many tokens are passed on; LBP-WHT computes the gradients of the
layers that train in a low-rank space. A small vision transformer learns handwritten digits from scratch.

    python examples/own_loop.py
"""

from __future__ import annotations

import timm
import torch
from torch import Tensor
from torch.nn import functional as F

import efficient_ft.models.small  # noqa: F401  registers vit_digits, a small vision transformer, with timm
from efficient_ft.data.digits import load_digits
from efficient_ft.methods import LBPWHT, ALaST, apply_methods, plain_state_dict


def digits() -> tuple[Tensor, Tensor]:
    """Return the images of the digits, (1797, 3, 32, 32) in -1 to 1, and their labels, in random order."""
    images, labels = load_digits()
    images = torch.tensor(images, dtype=torch.float32)[:, None] / 8 - 1
    order = torch.randperm(len(images))
    return F.interpolate(images, scale_factor=4).expand(-1, 3, -1, -1)[order], torch.tensor(labels)[order]


def main(steps: int = 60, batch_size: int = 32) -> float:
    """Train for `steps` steps; print what the methods did; return the accuracy on images not trained on."""
    torch.manual_seed(0)
    images, labels = digits()
    model = timm.create_model("vit_digits", num_classes=10)

    methods = [ALaST(num_layers=3, budget_init=0.9), LBPWHT(bases="l1", order=6)]
    for report in apply_methods(model, methods):
        print(report)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-3)

    model.train()
    for step in range(steps):
        batch = torch.randint(len(images) - 256, (batch_size,))  # the last 256 images test
        for method in methods:
            method.step_begin(step)
        loss = F.cross_entropy(model(images[batch]), labels[batch])
        for method in methods:
            loss = method.total_loss(loss)
        loss.backward()
        optimizer.step()
        for method in methods:
            method.step_end()  # before gradients are set to zero
        optimizer.zero_grad()
        if step % 20 == 0:
            print(f"step {step}: loss {loss.item():.3f}, trained {methods[0].step_stats()['trained']}")

    model.eval()
    with torch.no_grad():
        accuracy = (model(images[-256:]).argmax(1) == labels[-256:]).float().mean().item()
    print(f"accuracy: {accuracy:.0%}")
    weights = plain_state_dict(model, methods)  # under timm's own names
    print(f"{len(weights)} tensors to save, the first: {next(iter(weights))}")
    return accuracy


if __name__ == "__main__":
    main()
