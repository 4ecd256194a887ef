"""Apply methods to a LightningModule with a callback. The LightningModule is not changed.

LISA trains two blocks in each step, and a mixture of experts replaces the MLP of the last block. The callback adds the
balance loss of the experts to the result of `training_step` and freezes BatchNorm statistics. The callback rejects
strategies that are not compatible with the methods, and stores the state of the methods in the checkpoint.

    python examples/lightning_module.py
    python examples/lightning_module.py --devices 2    # two processes on the CPU
"""

from __future__ import annotations

import argparse

import lightning.pytorch as L
import timm
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from efficient_ft.integrations.lightning import MethodCallback
from efficient_ft.methods import LISA, MoE


class Classifier(L.LightningModule):
    """Image classifier whose network is stored in the attribute `net`."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net
        self.losses: list[float] = []

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Return the cross-entropy loss of a batch."""
        images, labels = batch
        return F.cross_entropy(self.net(images), labels)

    def on_total_loss(self, loss: Tensor) -> None:
        """Record the total loss, which includes the balance loss. The callback calls this optional hook."""
        self.losses.append(float(loss.detach()))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Build AdamW for the trainable parameters. The callback has already applied the methods."""
        return torch.optim.AdamW([p for p in self.net.parameters() if p.requires_grad], lr=1e-3)


def main(epochs: int = 2, devices: int = 1) -> list[float]:
    """Train on random images, print the reports of the methods, and return the losses of this process."""
    L.seed_everything(0, verbose=False)
    net = timm.create_model(
        "vit_tiny_patch16_224", img_size=32, patch_size=4, depth=4, embed_dim=48, num_heads=3, num_classes=10
    )
    images = TensorDataset(torch.randn(64, 3, 32, 32), torch.randint(10, (64,)))
    module = Classifier(net)
    callback = MethodCallback(
        [
            MoE(num_experts=4, top_k=2, blocks=[-1], norm_topk_prob=True, aux_loss_coef=0.01),
            LISA(num_layers=2, interval=1, seed=0),
        ],
        network="net",
    )
    trainer = L.Trainer(
        accelerator="cpu",
        devices=devices,
        # The blocks that LISA freezes in a step receive no gradients. Therefore, DDP must search for unused parameters.
        strategy="ddp_find_unused_parameters_true" if devices > 1 else "auto",
        max_epochs=epochs,
        accumulate_grad_batches=2,
        callbacks=[callback],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(images, batch_size=16))
    if not trainer.is_global_zero:
        return module.losses
    for report in callback.reports:
        print(report)
    print(f"{trainer.world_size} process(es), {trainer.global_step} steps")
    print(f"loss: {module.losses[0]:.3f} in the first step, {module.losses[-1]:.3f} in the last step")
    return module.losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train a small mixture of experts on random images.")
    parser.add_argument("--devices", type=int, default=1, help="number of processes")
    main(devices=parser.parse_args().devices)
