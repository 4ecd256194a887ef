"""Shared fixtures: one thread per test process, no network, and the optional folder of real images."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("WANDB_MODE", "offline")

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # GPU kernels run as Python; to be set before Triton is imported

REPOSITORY = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The optional folder of real images beside the checkout; tests that want it are skipped without it."""
    folder = Path(os.environ.get("EFFICIENT_FT_SHARED", REPOSITORY.parent / "shared")) / "data"
    if not folder.is_dir():
        pytest.skip(f"needs the optional folder of real images ({folder})")
    return folder
