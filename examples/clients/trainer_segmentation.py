"""Fine-tune SegFormer for semantic segmentation with Hugging Face's `Trainer`.

The lines that end with ``# efficient-ft`` are the difference from the program without this package. The network is
small and has random weights, and the images are generated, so that the example requires no download. For pretrained
weights, use `SegformerForSemanticSegmentation.from_pretrained`.

    python examples/clients/trainer_segmentation.py
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import EvalPrediction, SegformerConfig, SegformerForSemanticSegmentation, Trainer, TrainingArguments

from efficient_ft.integrations.transformers import MethodCallback  # efficient-ft
from efficient_ft.methods import LowBit  # efficient-ft

CLASSES, SIZE, TRAIN, TEST, IGNORED = 3, 64, 96, 24, 255


def drawings(count: int, seed: int) -> list[dict[str, Tensor]]:
    """Draw a rectangle (class 1) and a disk (class 2) on noise, and return images (3, 64, 64) and masks (64, 64)."""
    generator = torch.Generator().manual_seed(seed)
    rows, columns = torch.meshgrid(torch.arange(SIZE), torch.arange(SIZE), indexing="ij")
    samples = []
    for _ in range(count):
        image, mask = torch.randn(3, SIZE, SIZE, generator=generator) * 0.3, torch.zeros(SIZE, SIZE, dtype=torch.long)
        top, left, row, column = torch.randint(8, 40, (4,), generator=generator).tolist()
        shapes = (
            ((rows - top).abs() < 12) & ((columns - left).abs() < 8),
            (rows - row) ** 2 + (columns - column) ** 2 < 90,
        )
        for label, shape in enumerate(shapes, start=1):
            mask[shape] = label
            image[label][shape] += 1.5
        mask[:2] = IGNORED  # pixels without a label
        samples.append({"pixel_values": image, "labels": mask})
    return samples


def classes_of(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the predicted class of each pixel. The logits of SegFormer have a quarter of the image resolution."""
    return F.interpolate(logits, size=labels.shape[-2:], mode="bilinear").argmax(1)


def compute_metrics(prediction: EvalPrediction) -> dict[str, float]:
    """Return the mean intersection over union of the classes."""
    labelled = prediction.label_ids != IGNORED
    predictions, labels = prediction.predictions[labelled], prediction.label_ids[labelled]
    ious = [
        ((predictions == label) & (labels == label)).sum() / max(((predictions == label) | (labels == label)).sum(), 1)
        for label in range(CLASSES)
    ]
    return {"mean_iou": float(np.mean(ious))}


def main(chosen: Sequence[Any] = (), steps: int = 40) -> dict[str, Any]:
    """Train, and return the loss of each step and the mean IoU."""
    torch.manual_seed(0)
    config = SegformerConfig(
        depths=[1, 1, 1, 1], hidden_sizes=[16, 32, 48, 64], num_attention_heads=[1, 1, 2, 2], decoder_hidden_size=32,
        sr_ratios=[4, 2, 1, 1], num_labels=CLASSES, image_size=SIZE, initializer_range=0.1,
        semantic_loss_ignore_index=IGNORED,
    )  # fmt: skip
    model = SegformerForSemanticSegmentation(config)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=steps,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            learning_rate=1e-2,
            lr_scheduler_type="polynomial",
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            use_cpu=True,
            disable_tqdm=True,
        )
        trainer = Trainer(
            model,
            arguments,
            train_dataset=drawings(TRAIN, seed=0),
            eval_dataset=drawings(TEST, seed=1),
            compute_metrics=compute_metrics,
            preprocess_logits_for_metrics=classes_of,
            callbacks=[MethodCallback(chosen or LowBit(bits=4), network="", frozen_bn=False)],  # efficient-ft
        )
        trainer.train()
        score = trainer.evaluate()["eval_mean_iou"]
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    print(f"loss {losses[0]:.3f} to {losses[-1]:.3f}, mean IoU {score:.1%}")
    return {"losses": losses, "accuracy": score}


if __name__ == "__main__":
    main()
