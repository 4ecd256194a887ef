"""Small images, files of images, and the batches of a loader."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from PIL import Image

from efficient_ft.core.input_spec import InputSpec
from efficient_ft.data import ImageData

SPEC = InputSpec((16, 16), (0.5, 0.4, 0.3), (0.2, 0.25, 0.3))


def picture(seed: int, height: int = 20, width: int = 24) -> Image.Image:
    """Return a smooth random color image, which JPEG preserves and which differs for each seed."""
    coarse = np.random.default_rng(seed).integers(0, 256, (3, 3, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)


def save(path: Path, seed: int, **size: int) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    picture(seed, **size).save(path)
    return path


def truncate(path: Path, keep: float = 0.5) -> None:
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * keep)])


def epoch_of(data: ImageData, epoch: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Return all images and labels of one training epoch."""
    loader = data.train_loader()
    loader.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
    images, labels = zip(*loader, strict=True)
    return torch.cat(images), torch.cat(labels)
