"""Small models for tests of methods, and smooth images for these models."""

from __future__ import annotations

import copy
import functools
from dataclasses import dataclass, field
from typing import Any

import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn

#: Number of classes in each small model.
CLASSES = 5


@dataclass(frozen=True)
class SmallModel:
    """A timm model of reduced size.

    Attributes:
        architecture: Name of the timm model.
        size: Height and width of the images in pixels.
        kwargs: Additional keyword arguments of `timm.create_model`.
    """

    architecture: str
    size: int
    kwargs: dict[str, Any] = field(default_factory=dict)

    def create(self, **changes: Any) -> nn.Module:
        """Create the model with random weights. `changes` update `kwargs`."""
        return timm.create_model(self.architecture, **{"num_classes": CLASSES, **self.kwargs, **changes})


MODELS = {
    # A transformer with a class token and an 8×8 token grid.
    "vit": SmallModel(
        "vit_tiny_patch16_224", 32, {"img_size": 32, "patch_size": 4, "depth": 4, "embed_dim": 48, "num_heads": 3}
    ),
    # A transformer with rotary embeddings, a class token, four registers and LayerScale, and an 8×8 token grid.
    "rotary": SmallModel(
        "vit_small_patch16_dinov3",
        32,
        {"img_size": 32, "patch_size": 4, "depth": 4, "embed_dim": 48, "num_heads": 3, "mlp_ratio": 4.0},
    ),
    # Convolutions, followed by attention with two heads. The attention biases require a fixed image size.
    "efficientformer": SmallModel(
        "efficientformer_l1", 224, {"depths": (1, 1, 1, 2), "embed_dims": (16, 16, 32, 64), "num_vit": 1}
    ),
    # Attention windows of 4×4 tokens, patch merging, and a qkv layer whose weight is used without calling the layer.
    "swinv2": SmallModel(
        "swinv2_tiny_window8_256",
        64,
        {
            "img_size": 64,
            "window_size": 4,
            "embed_dim": 32,
            "depths": (1, 2),
            "num_heads": (1, 2),
            "drop_path_rate": 0.0,
        },
    ),
    # A convolutional network without attention.
    "resnet": SmallModel("resnet26", 64, {"layers": (1, 1, 1, 1), "channels": (16, 16, 32, 32)}),
    # A network of inverted residual blocks. Each normalization layer includes the activation function.
    "mobilenet": SmallModel("mobilenetv2_035", 64),
}

#: Default models of a `Row`.
USUAL = ("vit", "resnet", "swinv2", "efficientformer")


@functools.cache
def _prototype(name: str) -> nn.Module:
    torch.manual_seed(0)
    return lively(MODELS[name].create().double())


def model_of(name: str) -> nn.Module:
    """Return a float64 copy of the small model `name` in training mode. All copies have equal weights."""
    return copy.deepcopy(_prototype(name))


def lively(model: nn.Module) -> nn.Module:
    """Randomize biases, scales and near-zero weights, because initial values such as 0 or 1e-5 could hide mistakes.

    The model is modified in place and returned in training mode.
    """
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.uniform_(-0.2, 0.2)
            elif "logit_scale" not in name and (parameter.dim() == 1 or parameter.abs().max() < 1e-3):
                parameter.uniform_(0.5, 1.5)
    return model.train()


def batch_of(name: str, dtype: torch.dtype = torch.float64, seed: int = 0, count: int = 2) -> tuple[Tensor, Tensor]:
    """Return smooth images (count, 3, H, W) and their labels.

    The images are smooth, because methods with a low-pass filter would remove most of the content of noise.
    """
    generator = torch.Generator().manual_seed(seed)
    size = MODELS[name].size
    coarse = torch.randn(count, 3, 6, 6, generator=generator, dtype=torch.float64)
    images = F.interpolate(coarse, size=(size, size), mode="bicubic")
    return images.to(dtype), torch.randint(0, CLASSES, (count,), generator=generator)
