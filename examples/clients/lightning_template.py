"""A typical Lightning project: averaged weights, best checkpoint, gradient clipping, learning rate schedule, resuming.

The lines that end with ``# efficient-ft`` are the difference from the program without this package. In the list of
callbacks, `MethodCallback` must precede callbacks that copy the network, such as `EMAWeightAveraging`.

    python examples/clients/lightning_template.py
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import timm
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import efficient_ft.models.small  # noqa: F401  registers vit_digits, a small vision transformer, with timm
from efficient_ft.data.digits import load_digits
from efficient_ft.integrations.lightning import MethodCallback  # efficient-ft
from efficient_ft.methods import LowBit  # efficient-ft

TRAIN, TEST = 320, 128


class Digits(L.LightningDataModule):
    """Digit images of shape (3, 32, 32) with values in [-1, 1]."""

    def setup(self, stage: str) -> None:
        """Read the images, and split them."""
        images, labels = load_digits()
        pixels = F.interpolate(torch.tensor(images, dtype=torch.float32)[:, None] / 8 - 1, scale_factor=4)
        pixels, targets = pixels.expand(-1, 3, -1, -1), torch.tensor(labels)
        self.train = TensorDataset(pixels[:TRAIN], targets[:TRAIN])
        self.val = TensorDataset(pixels[-TEST:], targets[-TEST:])

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """Return batches of 32 images. Shuffling is not required, because the digits are in random order."""
        return DataLoader(self.train, 32)

    def val_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """Return batches of 128 images."""
        return DataLoader(self.val, 128)


class Classifier(L.LightningModule):
    """Image classifier with AdamW and a cosine schedule."""

    def __init__(self, name: str = "vit_digits", lr: float = 2e-3, steps: int = 40) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.model = timm.create_model(name, num_classes=10)
        self.losses: list[float] = []

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Return the cross-entropy loss of a batch."""
        images, labels = batch
        loss = F.cross_entropy(self.model(images), labels)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Log the accuracy."""
        images, labels = batch
        self.log("accuracy", (self.model(images).argmax(1) == labels).float().mean())

    def configure_optimizers(self) -> Any:
        """Return AdamW without weight decay for biases, norms and tokens, and a cosine schedule."""
        trained = [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]
        plain = [p for name, p in trained if name.endswith("bias") or "norm" in name or "token" in name]
        decayed = [p for name, p in trained if not (name.endswith("bias") or "norm" in name or "token" in name)]
        groups = [{"params": decayed, "weight_decay": 0.05}, {"params": plain, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW([group for group in groups if group["params"]], self.hparams["lr"])
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.hparams["steps"])
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def main(
    chosen: Sequence[Any] = (), epochs: int = 4, folder: Path | None = None, resume: bool = False
) -> dict[str, Any]:
    """Train for some epochs, and return the loss of each step and the best accuracy of the averaged weights.

    The best and the last checkpoint are written to `folder`. If `resume` is True, training continues after the last
    checkpoint.
    """
    L.seed_everything(0, verbose=False)
    folder = Path(tempfile.mkdtemp()) if folder is None else folder
    best = ModelCheckpoint(folder, monitor="accuracy", mode="max", save_last=True)
    module = Classifier()
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=epochs,
        gradient_clip_val=1.0,
        num_sanity_val_steps=0,
        callbacks=[
            MethodCallback(chosen or LowBit(bits=4), frozen_bn=False),  # efficient-ft
            EMAWeightAveraging(decay=0.9),
            best,
        ],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, datamodule=Digits(), ckpt_path=folder / "last.ckpt" if resume else None)
    accuracy = float(best.best_model_score or 0)
    print(f"loss {module.losses[0]:.3f} to {module.losses[-1]:.3f}, best accuracy of averaged weights {accuracy:.1%}")
    return {"losses": module.losses, "accuracy": accuracy}


if __name__ == "__main__":
    main()
