"""Evaluation samples with predictions, for loggers."""

from __future__ import annotations

from pathlib import Path

import torch

from efficient_ft.training.kinds.base import Kind, RunData, Sample
from efficient_ft.training.output import export


def samples_of(kind: Kind, run: Path, data: RunData, device: torch.device) -> list[Sample]:
    """Return evenly spread samples of the split that selects the best epoch, with predictions of model.safetensors."""
    found = []
    for name, part in data.parts.items():
        samples = kind.samples(export.load(run, name or None), part, device)
        found += [one._replace(caption=f"{name}: {one.caption}") for one in samples] if name else samples
    return found
