"""A training loop with the parts that timm's training script has: EMA, layer decay, mixup, AMP, schedule and resume.

The lines that end with ``# efficient-ft`` are the difference from the loop without this package.

    python examples/clients/timm_loop.py
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import timm
import torch
from timm.data import Mixup
from timm.loss import SoftTargetCrossEntropy
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from timm.utils import ModelEmaV3, dispatch_clip_grad, random_seed
from torch import Tensor
from torch.nn import functional as F

import efficient_ft.models.small  # noqa: F401  registers vit_digits, a small vision transformer, with timm
from efficient_ft import MethodSession, methods  # efficient-ft
from efficient_ft.data.digits import load_digits

STEPS_PER_EPOCH, BATCH, TEST = 10, 32, 256


def digits() -> tuple[Tensor, Tensor]:
    """Return digit images of shape (1797, 3, 32, 32) with values in [-1, 1], and their labels."""
    images, labels = load_digits()
    images = torch.tensor(images, dtype=torch.float32)[:, None] / 8 - 1
    return F.interpolate(images, scale_factor=4).expand(-1, 3, -1, -1), torch.tensor(labels)


def main(chosen: Sequence[Any] = (), epochs: int = 4, checkpoint: Path | None = None) -> dict[str, Any]:
    """Train for some epochs, and return the loss of each step and the accuracy of the averaged weights.

    If the file `checkpoint` exists, training continues after its last epoch. A checkpoint is written after each epoch.
    """
    torch.manual_seed(0)
    images, labels = digits()
    model = timm.create_model("vit_digits", num_classes=10, drop_path_rate=0.1).to(memory_format=torch.channels_last)
    session = MethodSession(model, chosen or methods.LowBit(bits=4), frozen_bn=False).apply()  # efficient-ft
    ema = ModelEmaV3(model, decay=0.9)
    optimizer = create_optimizer_v2(model, opt="adamw", lr=2e-3, weight_decay=0.05, layer_decay=0.8)
    scheduler, _ = create_scheduler_v2(
        optimizer, "cosine", num_epochs=epochs, warmup_epochs=1, updates_per_epoch=STEPS_PER_EPOCH, step_on_epochs=False
    )
    mixup, loss_of = Mixup(mixup_alpha=0.2, cutmix_alpha=1.0, num_classes=10), SoftTargetCrossEntropy()
    first, losses = 0, []
    if checkpoint is not None and checkpoint.is_file():
        saved = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(saved["model"])
        ema.load_state_dict(saved["ema"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["epoch"] + 1
    for epoch in range(first, epochs):
        random_seed(epoch)  # mixup uses the generator of NumPy
        model.train()
        for batch in range(STEPS_PER_EPOCH):
            step = epoch * STEPS_PER_EPOCH + batch
            chosen = torch.randint(len(images) - TEST, (BATCH,))
            x, y = mixup(images[chosen].clone(), labels[chosen])
            session.begin_step(step)  # efficient-ft
            with torch.autocast("cpu", torch.bfloat16):
                loss = loss_of(model(x.contiguous(memory_format=torch.channels_last)), y)
            loss = session.loss(loss)  # efficient-ft
            loss.backward()
            dispatch_clip_grad(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            session.end_step()  # efficient-ft
            ema.update(model)
            scheduler.step_update(step + 1)
            losses.append(loss.item())
        if checkpoint is not None:
            state = {"model": model.state_dict(), "ema": ema.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({**state, "epoch": epoch}, checkpoint)
    ema.eval()
    with torch.no_grad():
        accuracy = (ema(images[-TEST:]).argmax(1) == labels[-TEST:]).float().mean().item()
    print(f"loss {losses[-1]:.3f}, accuracy of the averaged weights {accuracy:.0%}")
    return {"losses": losses, "accuracy": accuracy}


if __name__ == "__main__":
    main()
