"""A typical Kaggle training loop: k-fold split, AMP, gradient accumulation, OneCycle, best checkpoint, flipped images.

The lines that end with ``# efficient-ft`` are the difference from the loop without this package. A new network
without methods computes the predictions.

    python examples/clients/kaggle_loop.py
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import timm
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Subset, TensorDataset

from efficient_ft import MethodSession, methods  # efficient-ft
from efficient_ft.data.digits import load_digits

FOLDS, FOLD, BATCH, ACCUMULATE, TEST = 5, 0, 16, 2, 256


def create_model() -> nn.Module:
    """Create a small ResNet. For pretrained weights, use ``pretrained=True`` instead of `sizes`."""
    sizes = {"layers": (1, 1, 1, 1), "channels": (32, 48, 64, 96), "output_stride": 8}
    return timm.create_model("resnet26", **sizes, num_classes=10)


@torch.no_grad()
def predict(model: nn.Module, images: Tensor, flips: bool = False) -> Tensor:
    """Return class probabilities (N, 10). If `flips` is True, average over each image and its mirror image."""
    model.eval()
    views = (images, images.flip(-1)) if flips else (images,)
    return torch.stack([torch.cat([model(x).softmax(1) for x in view.split(128)]) for view in views]).mean(0)


def main(chosen: Sequence[Any] = (), epochs: int = 5, steps_per_epoch: int = 12, amp: bool = True) -> dict[str, Any]:
    """Train one fold, and return the loss of each micro-batch, the best accuracy, and the predictions for the test set.

    The key "new" contains the accuracy of a newly created network with the best weights.
    """
    torch.manual_seed(0)
    digits, labels = load_digits()
    images = F.interpolate(torch.tensor(digits, dtype=torch.float32)[:, None] / 8 - 1, scale_factor=4)
    images, targets = images.expand(-1, 3, -1, -1), torch.tensor(labels)
    order = torch.randperm(len(images) - TEST)  # the last images are the test set
    held_out = order[FOLD::FOLDS]
    training = Subset(TensorDataset(images, targets), [i for n, i in enumerate(order.tolist()) if n % FOLDS != FOLD])
    loader = DataLoader(training, BATCH, shuffle=True, drop_last=True)
    model = create_model()
    session = MethodSession(model, chosen or methods.LowBit(bits=4), frozen_bn=False).apply()  # efficient-ft
    decayed = [p for p in model.parameters() if p.requires_grad and p.dim() > 1]
    others = [p for p in model.parameters() if p.requires_grad and p.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": 0.05}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=epochs * steps_per_epoch)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    losses: list[float] = []
    best, step = 0.0, 0
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(epochs):
            model.train()
            for batch, (x, y) in zip(range(steps_per_epoch * ACCUMULATE), loader, strict=False):
                with session.step(step):  # efficient-ft
                    with torch.autocast("cpu", torch.bfloat16, enabled=amp):
                        loss = F.cross_entropy(model(x), y, label_smoothing=0.1)
                    scaler.scale(session.loss(loss) / ACCUMULATE).backward()  # efficient-ft
                    if (batch + 1) % ACCUMULATE == 0:
                        scaler.unscale_(optimizer)
                        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                        scaler.step(optimizer)
                        scaler.update()
                        optimizer.zero_grad()
                        scheduler.step()
                        step += 1
                losses.append(loss.item())
            accuracy = (predict(model, images[held_out]).argmax(1) == targets[held_out]).float().mean().item()
            if accuracy >= best:
                weights = methods.plain_state_dict(model, session.methods)  # efficient-ft
                best = accuracy
                torch.save(weights, Path(folder, "best.pt"))
        fresh = create_model()
        fresh.load_state_dict(torch.load(Path(folder, "best.pt"), weights_only=True))
    new = (predict(fresh, images[held_out]).argmax(1) == targets[held_out]).float().mean().item()
    predictions = predict(fresh, images[-TEST:], flips=True)
    print(f"fold {FOLD}: loss {losses[-1]:.3f}, best accuracy {best:.1%}, accuracy of the new network {new:.1%}")
    return {"losses": losses, "accuracy": best, "new": new, "predictions": predictions.tolist()}


if __name__ == "__main__":
    main()
