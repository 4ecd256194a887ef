"""Apply methods to a timm model in the Hugging Face `Trainer` with a callback.

BSR trains two blocks of a ResNet, and Back Razor prunes the saved activations of these blocks. The model has random
weights, so the example requires no internet access.
`TimmWrapperForImageClassification.from_pretrained("timm/resnet50.a1_in1k", num_labels=10)` loads a model with
pretrained weights.

    pip install 'efficient-ft[transformers]'
    python examples/huggingface_trainer.py
"""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from transformers import TimmWrapperConfig, TimmWrapperForImageClassification, Trainer, TrainingArguments

from efficient_ft.integrations.transformers import MethodCallback
from efficient_ft.methods import BSR, BackRazor, plain_state_dict


def random_images(count: int) -> list[dict[str, Any]]:
    """Return random images and labels in the format that the collator of `Trainer` expects."""
    return [{"pixel_values": torch.randn(3, 64, 64), "labels": index % 10} for index in range(count)]


def main(steps: int = 6) -> dict[str, torch.Tensor]:
    """Train for `steps` steps, resume for two more steps, and return weights that timm can load."""
    torch.manual_seed(0)
    config = TimmWrapperConfig(architecture="resnet10t", num_labels=10, model_args={"channels": (16, 32, 64, 128)})
    images = random_images(64)
    with tempfile.TemporaryDirectory() as folder:
        for last in (steps, steps + 2):
            model = TimmWrapperForImageClassification(config)
            statistics = {name: b.clone() for name, b in model.timm_model.named_buffers()}
            # The order of the methods in the list has no effect. BSR selects the trained parameters and is applied
            # first.
            callback = MethodCallback([BackRazor(sparsity=0.9), BSR(blocks=[2, 3], drop_at=[])])
            arguments = TrainingArguments(
                output_dir=folder,
                max_steps=last,
                save_steps=steps,
                per_device_train_batch_size=8,
                gradient_accumulation_steps=2,
                learning_rate=1e-3,
                use_cpu=True,
                report_to="none",
                disable_tqdm=True,
            )
            trainer = Trainer(model, arguments, train_dataset=images, callbacks=[callback])
            trainer.train(resume_from_checkpoint=last > steps)
    for report in callback.reports:
        print(report)
    assert [report.method for report in callback.reports] == ["bsr", "back_razor"]
    weights = plain_state_dict(model.timm_model, callback.methods)
    # By default (frozen_bn=True), the callback freezes BatchNorm statistics even in training mode.
    assert all(torch.equal(weights[name], before) for name, before in statistics.items())
    print("BatchNorm statistics are unchanged")
    print(f"{trainer.state.global_step} steps. The first of {len(weights)} saved tensors is {next(iter(weights))}.")
    return weights


if __name__ == "__main__":
    main()
