"""A narrow vit_tiny of timm, and weights that pass for pretrained ones."""

from __future__ import annotations

import timm
import torch

from efficient_ft.config import ModelConfig

SMALL = {"depth": 2, "embed_dim": 16, "num_heads": 2}


def small(**changes) -> ModelConfig:
    """vit_tiny of timm, narrowed; or another model."""
    return ModelConfig(**{"name": "vit_tiny_patch16_224", "pretrained": False, "kwargs": SMALL, **changes})


def pretend_pretrained(classes: int = 1000, **kwargs) -> torch.nn.Module:
    torch.manual_seed(7)
    model = timm.create_model("vit_tiny_patch16_224", num_classes=classes, **SMALL, **kwargs)
    torch.nn.init.normal_(model.head.weight)  # timm starts it at zero
    return model


def backbone(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {k: v for k, v in model.state_dict().items() if not k.startswith("head.")}


def assert_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor], **tolerance) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        torch.testing.assert_close(value, other[name], **({"rtol": 0, "atol": 0} | tolerance))
