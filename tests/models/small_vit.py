"""A narrow vit_tiny from timm, and random weights that serve as pretrained weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import timm
import torch

from efficient_ft.config import ModelConfig
from efficient_ft.core.errors import SettingError
from efficient_ft.models import factory

SMALL = {"depth": 2, "embed_dim": 16, "num_heads": 2}


def small(**changes) -> ModelConfig:
    """Return the configuration of a narrow vit_tiny from timm, with changes."""
    return ModelConfig(**{"name": "vit_tiny_patch16_224", "pretrained": False, "kwargs": SMALL, **changes})


def pretend_pretrained(classes: int = 1000, **kwargs) -> torch.nn.Module:
    torch.manual_seed(7)
    model = timm.create_model("vit_tiny_patch16_224", num_classes=classes, **SMALL, **kwargs)
    torch.nn.init.normal_(model.head.weight)  # timm initializes the head to zero
    return model


def backbone(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {k: v for k, v in model.state_dict().items() if not k.startswith("head.")}


def assert_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor], **tolerance) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        torch.testing.assert_close(value, other[name], **({"rtol": 0, "atol": 0} | tolerance))


def assert_refused(said: str, file: Path) -> None:
    with pytest.raises(SettingError, match=said):
        factory.create_model(small(weights=str(file)), 7)
