"""Fine-tune a vision transformer of `transformers` for image classification with Hugging Face's `Trainer`.

The lines that end with ``# efficient-ft`` are the difference from the program without this package. The network is
small and has random weights, so that the example requires no download. For pretrained weights, use
`ViTForImageClassification.from_pretrained`.

    python examples/clients/trainer_classification.py
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional as F
from transformers import EvalPrediction, Trainer, TrainingArguments, ViTConfig, ViTForImageClassification

from efficient_ft.data.digits import load_digits
from efficient_ft.integrations.transformers import MethodCallback  # efficient-ft
from efficient_ft.methods import LowBit  # efficient-ft

TEST = 128


def digits() -> list[dict[str, Any]]:
    """Return digit images of shape (3, 32, 32) and their labels in random order."""
    images, labels = load_digits()
    pixels = F.interpolate(torch.tensor(images, dtype=torch.float32)[:, None] / 8 - 1, scale_factor=4)
    order = torch.randperm(len(pixels), generator=torch.Generator().manual_seed(0)).tolist()
    return [{"pixel_values": pixels[i].expand(3, -1, -1), "labels": int(labels[i])} for i in order]


def compute_metrics(prediction: EvalPrediction) -> dict[str, float]:
    """Return the accuracy."""
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


def main(chosen: Sequence[Any] = (), steps: int = 150) -> dict[str, Any]:
    """Train, and return the loss of each step and the accuracies of the trained and of the saved network."""
    torch.manual_seed(0)
    images = digits()
    config = ViTConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4, image_size=32, patch_size=8,
        num_labels=10, initializer_range=0.05,
    )  # fmt: skip
    model = ViTForImageClassification(config)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=steps,
            per_device_train_batch_size=32,
            learning_rate=2e-3,
            warmup_steps=10,
            weight_decay=0.05,
            lr_scheduler_type="cosine",
            eval_strategy="steps",
            eval_steps=steps // 2,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            use_cpu=True,
            disable_tqdm=True,
        )
        callback = MethodCallback(chosen or LowBit(bits=4), network="")  # efficient-ft
        trainer = Trainer(
            model,
            arguments,
            train_dataset=images[TEST:],
            eval_dataset=images[:TEST],
            compute_metrics=compute_metrics,
            callbacks=[callback],  # efficient-ft
        )
        trainer.train()
        accuracy = trainer.evaluate()["eval_accuracy"]
        trainer.save_model(f"{folder}/saved")
        callback.save_pretrained(model, f"{folder}/saved")  # efficient-ft
        saved = ViTForImageClassification.from_pretrained(f"{folder}/saved")
        evaluation = Trainer(saved, arguments, eval_dataset=images[:TEST], compute_metrics=compute_metrics)
        saved_accuracy = evaluation.evaluate()["eval_accuracy"]
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    print(
        f"loss {losses[0]:.3f} to {losses[-1]:.3f}, accuracy {accuracy:.1%}, of the saved network {saved_accuracy:.1%}"
    )
    return {"losses": losses, "accuracy": accuracy, "new": saved_accuracy}


if __name__ == "__main__":
    main()
