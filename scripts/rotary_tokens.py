"""Compare rotary embeddings for merged and fused tokens.

    python scripts/rotary_tokens.py --images DIR --json benchmarks/rotary_tokens.json

DIR must contain train/ and test/, each with one subfolder of 32×32 images per class. The script trains a small vision
transformer with rotary embeddings (64 tokens, 6 blocks) on the first 1,000 training images of each class. It then
measures the accuracy on the first 200 test images of each class with ToMe and EViT, without further training, for
several choices of the embedding of a merged or fused token. With --network FILE, the trained network is saved to FILE.
If FILE exists, the network is loaded instead of trained.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from timm.models.eva import Eva
from torch import Tensor, nn
from torchvision.io import ImageReadMode, decode_image

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from efficient_ft.methods import EViT, Method, ToMe
from efficient_ft.methods.tokens import tome
from efficient_ft.methods.tokens.base import TokenForward
from efficient_ft.ops.tokens import Tokens
from efficient_ft.record.environment import environment

EPOCHS, BATCH, TRAIN, TEST = 10, 128, 1000, 200


def main() -> None:
    """Train or read the network, measure all choices, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=Path, required=True, metavar="DIR")
    parser.add_argument("--network", type=Path, metavar="FILE")
    parser.add_argument("--json", type=Path, required=True, metavar="FILE")
    options = parser.parse_args()
    torch.manual_seed(0)
    model = network()
    if options.network is not None and options.network.is_file():
        model.load_state_dict(torch.load(options.network, weights_only=True))
    else:
        train(model, *images(options.images / "train", TRAIN))
        if options.network is not None:
            torch.save(model.state_dict(), options.network)
    tested = images(options.images / "test", TEST)
    rows: list[dict[str, Any]] = [{"method": "none", "embedding": "", "accuracy": accuracy(model, *tested)}]
    for make, choices in measured():
        for choice, patch in choices.items():
            method, own = make(), copy.deepcopy(model)
            method.apply(own)
            with patch:
                rows.append({"method": title(method), "embedding": choice, "accuracy": accuracy(own, *tested)})
            print(rows[-1], flush=True)
    record = {
        "command": "python scripts/rotary_tokens.py --images DIR --json benchmarks/rotary_tokens.json",
        "kind": "rotary_tokens",
        "images": len(tested[1]),
        "rows": rows,
        "environment": environment("cpu", packages=("torch", "timm")),
    }
    options.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def network() -> Eva:
    """Create the network with the rotary embeddings of DINOv3."""
    sizes = {"img_size": 32, "patch_size": 4, "embed_dim": 128, "depth": 6, "num_heads": 4, "num_classes": 10}
    rotary = {"use_abs_pos_emb": False, "use_rot_pos_emb": True, "rope_type": "dinov3", "rope_temperature": 100.0}
    return Eva(global_pool="token", rope_rotate_half=True, **sizes, **rotary)  # type: ignore[arg-type]


def images(folder: Path, count: int) -> tuple[Tensor, Tensor]:
    """Return the first `count` images of each class, (N, 3, 32, 32), with values from -1 to 1, and their labels."""
    classes = [sorted(of.iterdir())[:count] for of in sorted(folder.iterdir())]
    pixels = [decode_image(str(file), ImageReadMode.RGB) for files in classes for file in files]
    labels = [label for label, files in enumerate(classes) for _ in files]
    return torch.stack(pixels) / 127.5 - 1, torch.tensor(labels)


def train(model: nn.Module, images: Tensor, labels: Tensor) -> None:
    """Train with AdamW, random flips and shifts by up to two pixels."""
    steps = len(images) // BATCH
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, total_steps=EPOCHS * steps, pct_start=0.15)
    for epoch in range(EPOCHS):
        for index in torch.randperm(len(images))[: steps * BATCH].split(BATCH):
            x = images[index].flip(3) if torch.rand(1) < 0.5 else images[index]
            top, left = torch.randint(0, 5, (2,))
            x = F.pad(x, (2, 2, 2, 2))[:, :, top : top + 32, left : left + 32]
            with torch.autocast("cpu", torch.bfloat16):
                loss = F.cross_entropy(model(x).float(), labels[index])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        print(f"epoch {epoch + 1}: loss of the last batch {loss.item():.3f}", flush=True)


def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Return the accuracy as a fraction."""
    model.eval()
    with torch.no_grad():
        found = torch.cat([model(batch).argmax(1) for batch in images.split(250)])
    return (found == labels).double().mean().item()


def title(method: Method) -> str:
    settings = method.settings()
    return f"ToMe, r = {settings['r']}" if method.name == "tome" else f"EViT, keep rate {settings['keep_rate']:g}"


def measured() -> Sequence[tuple[Callable[[], Method], dict[str, AbstractContextManager[Any]]]]:
    """Return the methods, and the choices of the embedding of a merged or fused token for each method."""
    merged: dict[str, AbstractContextManager[Any]] = {
        "token that represents the most patches": nullcontext(),
        "token that others are merged into": mock.patch.object(tome, "representatives", _of_target),
        "mean of all tokens": mock.patch.object(TokenForward, "given", _mean),
        "none (no rotation)": mock.patch.object(TokenForward, "given", _without(merged=True)),
    }
    fused: dict[str, AbstractContextManager[Any]] = {
        "most attended token": nullcontext(),
        "none (no rotation)": mock.patch.object(TokenForward, "given", _without(merged=False)),
    }
    of_tome = [(partial(ToMe, r), merged) for r in (4, 6, 8)]
    of_evit = [(partial(EViT, [1, 2, 3], keep_rate), fused) for keep_rate in (0.7, 0.5)]
    return [*of_tome, *of_evit]


def _of_target(value_BL: Tensor, size_BN: Tensor, index_BN: Tensor, left: int, prefix: int) -> Tensor:
    """Return the values of the tokens at odd positions, into which the others are merged."""
    odd_BN = (torch.arange(index_BN.shape[1]) % 2 + 1.0).expand(index_BN.shape)
    return _REPRESENTATIVES(value_BL, odd_BN, index_BN, left, prefix)


_REPRESENTATIVES, _GIVEN = tome.representatives, TokenForward.given


def _mean(
    self: TokenForward, tokens: Tokens | None, others: Sequence[Any], keywords: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the inputs with the mean embedding of the patches that each token represents."""
    if tokens is None or tokens.merged_into_BN is None or tokens.sizes_BN is None:
        return _GIVEN(self, tokens, others, keywords)
    inputs = self.form.named(others, keywords)
    into_BL, sizes_BU = tokens.merged_into_BN[:, self.prefix :] - self.prefix, tokens.sizes_BN[:, self.prefix :]
    rope_BLE = inputs["rope"].expand(len(into_BL), -1, -1)
    index = into_BL.unsqueeze(-1).expand_as(rope_BLE)
    sums = rope_BLE.new_zeros(*sizes_BU.shape, rope_BLE.shape[-1]).scatter_add(1, index, rope_BLE)
    return {**inputs, "rope": (sums / sizes_BU.unsqueeze(-1)).unsqueeze(1)}


def _without(merged: bool) -> Callable[..., dict[str, Any]]:
    """Return a replacement for `TokenForward.given` that does not rotate merged or fused tokens."""

    def given(
        self: TokenForward, tokens: Tokens | None, others: Sequence[Any], keywords: Mapping[str, Any]
    ) -> dict[str, Any]:
        inputs = _GIVEN(self, tokens, others, keywords)
        if tokens is None:
            return inputs
        if merged:
            assert tokens.sizes_BN is not None
            new_BL = tokens.sizes_BN[:, self.prefix :] > 1
        else:
            assert tokens.grid_index_BL is not None
            new_BL = tokens.grid_index_BL >= self.positions
        sine, cosine = torch.zeros_like(inputs["rope"]).chunk(2, -1)
        zero = torch.cat([sine, cosine + 1], -1)
        return {**inputs, "rope": torch.where(new_BL[:, None, :, None], zero, inputs["rope"])}

    return given


if __name__ == "__main__":
    # This patch makes ToMe record the merged token of each patch, which the mean embedding requires. The outputs do not
    # change, because this network classifies with its class token.
    with mock.patch.object(tome, "classifies_by_class_token", return_value=False):
        main()
