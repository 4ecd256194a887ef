"""A training loop of Hugging Face's `accelerate` on two processes.

The lines that end with ``# efficient-ft`` are the difference from the loop without this package. The methods are
applied before `prepare` wraps the model.

    torchrun --nproc-per-node 2 examples/clients/accelerate_loop.py
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import timm
import torch
from accelerate import Accelerator, DistributedDataParallelKwargs
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import efficient_ft.models.small  # noqa: F401  registers vit_digits, a small vision transformer, with timm
from efficient_ft import MethodSession, methods  # efficient-ft
from efficient_ft.data.digits import load_digits


def main(chosen: Sequence[Any] = (), batch_size: int = 32, steps: int = 20) -> list[float]:
    """Train for some steps, and return the loss of each step, averaged over the processes."""
    torch.manual_seed(0)
    images, labels = load_digits()
    pixels = F.interpolate(torch.tensor(images, dtype=torch.float32)[:, None] / 8 - 1, scale_factor=4)
    dataset = TensorDataset(pixels.expand(-1, 3, -1, -1), torch.tensor(labels))
    model = timm.create_model("vit_digits", num_classes=10)
    session = MethodSession(model, chosen or methods.Compact(), frozen_bn=False).apply()  # efficient-ft
    accelerator = Accelerator(cpu=True, kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    loader = DataLoader(dataset, batch_size // accelerator.num_processes, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    model.train()
    losses: list[float] = []
    for step, (x, y) in zip(range(steps), loader, strict=False):
        with session.step(step):  # efficient-ft
            loss = F.cross_entropy(model(x), y)
            accelerator.backward(session.loss(loss))  # efficient-ft
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
    accelerator.print(f"{accelerator.num_processes} process(es), losses {losses[0]:.4f} to {losses[-1]:.4f}")
    return losses


if __name__ == "__main__":
    main()
