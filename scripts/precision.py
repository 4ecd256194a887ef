"""Compare the accuracy of methods in bf16 with their accuracy in fp32 on a small network, over several seeds.

    python scripts/precision.py --json benchmarks/precision_vit_digits_cpu.json

A `vit_digits` is first trained in fp32 on inverted and transposed digits. Each run then trains this network with one
method on 360 digits, and measures the accuracy on 719 other digits. The seed determines the new classifier and the
order of the images, so that runs in both precisions differ only in rounding. As in `efficient-ft`, weights are in fp32,
bf16 uses autocast, and evaluation computes the last layer in fp32. Runs that are already in the file are not repeated.
"""

from __future__ import annotations

import argparse
import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from efficient_ft import methods as m
from efficient_ft.config import ModelConfig
from efficient_ft.core.files import write_text_atomically
from efficient_ft.data.digits import read_digits
from efficient_ft.integrations.session import MethodSession
from efficient_ft.models.factory import create_model
from efficient_ft.record.environment import environment
from efficient_ft.training.last_layer import last_layer_in_fp32

#: For each row, a function that returns its methods, and the learning rate.
ROWS: dict[str, tuple[Callable[[], list[m.Method]], float]] = {
    "full": (lambda: [m.Full()], 1e-3),
    "full+mesa": (lambda: [m.Full(), m.Mesa()], 1e-3),
    "full+back_razor": (lambda: [m.Full(), m.BackRazor()], 1e-3),
    "full+low_bit": (lambda: [m.Full(), m.LowBit()], 1e-3),
    "full+lora": (lambda: [m.Full(), m.LoRA()], 5e-3),
    "repnet": (lambda: [m.RepNet()], 5e-3),
    "full+moe": (lambda: [m.Full(), m.MoE(4, 2, [1, 3], norm_topk_prob=True)], 1e-3),
}
EPOCHS, BATCH = 4, 32


def pixels(images: Any) -> Tensor:
    """Return images (N, 8, 8, 3) with values from 0 to 255 as a tensor (N, 3, 32, 32) with values from -1 to 1."""
    x = torch.from_numpy(images).permute(0, 3, 1, 2).float() / 127.5 - 1
    return F.interpolate(x, (32, 32), mode="bilinear")


def autocast(precision: str) -> torch.autocast:
    """Return the autocast context of a precision."""
    return torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16")


def train(
    network: nn.Module, methods: list[m.Method], data: tuple[Tensor, Tensor], lr: float, epochs: int, seed: int,
    precision: str,
) -> None:  # fmt: skip
    """Train `network` with Adam, a warm-up and a linear schedule. `seed` determines the order of the images."""
    x, y = data
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    batches = len(x) // BATCH
    steps = epochs * batches
    order = torch.cat([torch.randperm(len(x), generator=generator)[: batches * BATCH] for _ in range(epochs)])
    with MethodSession(network.train(), methods, frozen_bn=False) as session:
        optimizer = torch.optim.Adam(session.parameters(), lr)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min((step + 1) / 8, 1 - step / steps))
        for step, batch in enumerate(order.split(BATCH)):
            with session.step(step):
                with autocast(precision):
                    loss = session.loss(F.cross_entropy(network(x[batch]), y[batch]))
                loss.backward()
                nn.utils.clip_grad_norm_([p for p in session.parameters() if p.grad is not None], 1.0)
                optimizer.step()
                optimizer.zero_grad()
            schedule.step()


@torch.no_grad()
def accuracy(network: nn.Module, data: tuple[Tensor, Tensor], precision: str) -> float:
    """Return the percentage of correct predictions."""
    x, y = data
    network.eval()
    with autocast(precision), last_layer_in_fp32(network):
        predicted = torch.cat([network(images).argmax(1) for images in x.split(128)])
    return 100 * float((predicted == y).float().mean())


def main() -> None:
    """Train the runs that are not in the file, and add them to the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds (default: 3)")
    parser.add_argument("--rows", nargs="*", choices=ROWS, default=list(ROWS), help="rows (default: all)")
    parser.add_argument("--json", type=Path, required=True, metavar="FILE")
    options = parser.parse_args()
    report: dict[str, Any] = {"kind": "precision", "network": "vit_digits", "environment": {}, "runs": []}
    if options.json.is_file():
        report = json.loads(options.json.read_text(encoding="utf-8"))
    report["environment"] = environment(torch.device("cpu"))
    digits = read_digits()
    assert digits.test is not None
    small = pixels(digits.test.images), torch.from_numpy(digits.test.labels)
    large = pixels(digits.train.images), torch.from_numpy(digits.train.labels)
    torch.manual_seed(0)
    base: Any = create_model(ModelConfig(name="vit_digits", pretrained=False), 10)
    full = m.Full()
    train(base, [full], (-large[0].transpose(2, 3), large[1]), 2e-3, 3, 0, "fp32")
    full.remove(base)
    test = large[0][::2], large[1][::2]
    done = {(run["row"], run["precision"], run["seed"]) for run in report["runs"]}
    for seed in range(options.seeds):
        for row in options.rows:
            for precision in ("fp32", "bf16"):
                if (row, precision, seed) in done:
                    continue
                network = copy.deepcopy(base)
                torch.manual_seed(seed)
                network.reset_classifier(10)
                methods, lr = ROWS[row]
                train(network, methods(), small, lr, EPOCHS, seed, precision)
                found = accuracy(network, test, precision)
                print(f"{row}, {precision}, seed {seed}: {found:.2f} %", flush=True)
                report["runs"].append({"row": row, "precision": precision, "seed": seed, "accuracy": found})
                write_text_atomically(options.json, json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
