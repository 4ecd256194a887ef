"""Small vision transformers for 32×32 images, which are registered with timm as `vit_digits` and `vit_micro`.

Both models have a class token, an 8×8 token grid, and a convolutional stem. When trained from scratch, a model with a
convolutional stem learns much faster than a model with a linear patch embedding (Xiao et al., "Early convolutions help
transformers see better", 2021). Both models are timm's VisionTransformer with timm's ConvStem, so their weights load
into timm without this package.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.layers import HybridEmbed
from timm.models import VisionTransformer, build_model_with_cfg, generate_default_cfgs, register_model
from timm.models.vision_transformer import checkpoint_filter_fn
from timm.models.vision_transformer_hybrid import ConvStem
from torch import nn

_DIGITS = {
    "num_classes": 10,
    "input_size": (3, 32, 32),
    "fixed_input_size": True,
    "interpolation": "bicubic",
    "crop_pct": 1.0,
    "mean": (0.5, 0.5, 0.5),
    "std": (0.5, 0.5, 0.5),
    "first_conv": "patch_embed.backbone.0.conv",
    "classifier": "head",
    "license": "apache-2.0",
}
_MICRO = {**_DIGITS, "num_classes": 100, "mean": IMAGENET_DEFAULT_MEAN, "std": IMAGENET_DEFAULT_STD}
default_cfgs = generate_default_cfgs({"vit_digits.untrained": _DIGITS, "vit_micro.untrained": _MICRO})

#: Names of layers in ConvStem. The keys are the names in a Sequential stem (conv, BN, GELU, conv, BN, GELU, conv).
_SEQUENTIAL_STEM = {"net.0.": "backbone.0.conv.", "net.1.": "backbone.0.bn.", "net.3.": "backbone.1.conv.",
                    "net.4.": "backbone.1.bn.", "net.6.": "backbone.2.conv."}  # fmt: skip


def _filter(state_dict: dict[str, torch.Tensor], model: VisionTransformer) -> dict[str, torch.Tensor]:
    """Rename the tensors of a Sequential stem to ConvStem's names, and resize position embeddings as timm does."""
    renamed = {}
    for key, value in state_dict.items():
        for old, new in _SEQUENTIAL_STEM.items():
            key = key.replace(f"patch_embed.{old}", f"patch_embed.{new}")
        renamed[key] = value
    return checkpoint_filter_fn(renamed, model)


def _create(variant: str, pretrained: bool, strides: tuple[int, ...], **kwargs: Any) -> VisionTransformer:
    width = kwargs["embed_dim"]
    stem = ConvStem(
        in_chans=kwargs.get("in_chans", 3),
        depth=len(strides),
        channels=(width // 4, width // 2, width, width)[: len(strides)],
        kernel_size=3,
        stride=strides,
        act_layer=nn.GELU,
    )
    # Narrow models learn slowly with timm's default initialization (standard deviation 0.02), which suits wide models.
    kwargs.setdefault("weight_init", "jax")
    return build_model_with_cfg(
        VisionTransformer,
        variant,
        pretrained,
        pretrained_filter_fn=_filter,
        patch_size=1,
        embed_layer=partial(HybridEmbed, backbone=stem, proj=False),
        **kwargs,
    )


@register_model
def vit_digits(pretrained: bool = False, **kwargs: Any) -> VisionTransformer:
    """Create a ViT with 0.6 M parameters, width 96 and 4 blocks. The default job trains this model."""
    sizes = {"embed_dim": 96, "depth": 4, "num_heads": 3}
    return _create("vit_digits", pretrained, strides=(1, 2, 2, 1), **{**sizes, **kwargs})


@register_model
def vit_micro(pretrained: bool = False, **kwargs: Any) -> VisionTransformer:
    """Create a ViT for natural images of 32×32 pixels, with 2.9 M parameters, width 192 and 6 blocks."""
    sizes = {"embed_dim": 192, "depth": 6, "num_heads": 3}
    return _create("vit_micro", pretrained, strides=(1, 2, 2), **{**sizes, **kwargs})
