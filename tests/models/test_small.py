"""Tests that the small models are instances of timm's classes."""

from __future__ import annotations

from functools import partial

import pytest
import timm
import torch
from safetensors.torch import load_file
from timm.layers import HybridEmbed
from timm.models import VisionTransformer
from timm.models.vision_transformer_hybrid import ConvStem

from efficient_ft.config import ModelConfig
from efficient_ft.models import factory


@pytest.mark.parametrize(
    ("name", "width", "depth", "strides"), [("vit_digits", 96, 4, (1, 2, 2, 1)), ("vit_micro", 192, 6, (1, 2, 2))]
)
def test_small_models_are_timms_own_classes(name, width, depth, strides):
    ours = timm.create_model(name)
    torch.nn.init.normal_(ours.head.weight)  # a zero-initialized head would hide differences
    channels = (width // 4, width // 2, width, width)[: len(strides)]
    stem = ConvStem(depth=len(strides), channels=channels, stride=strides, kernel_size=3, act_layer=torch.nn.GELU)
    plain = VisionTransformer(
        img_size=32, patch_size=1, embed_dim=width, depth=depth, num_heads=3, num_classes=ours.num_classes,
        embed_layer=partial(HybridEmbed, backbone=stem, proj=False),
    )  # fmt: skip
    plain.load_state_dict(ours.state_dict(), strict=True)
    assert ours.patch_embed.grid_size == (8, 8)
    assert ours.num_prefix_tokens == 1
    x = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(ours.eval()(x), plain.eval()(x))


def test_vit_micro_takes_weights_with_a_sequential_stem(shared_data):
    file = shared_data / "vit_micro_tinyimagenet100.safetensors"
    model = factory.create_model(ModelConfig(name="vit_micro", weights=str(file)), 100)
    held = load_file(file)
    assert all(p.dtype == torch.float32 for p in model.parameters())
    torch.testing.assert_close(model.head.weight.half(), held["head.weight"])
    torch.testing.assert_close(model.patch_embed.backbone[1].conv.weight.half(), held["patch_embed.net.3.weight"])
    assert model.eval()(torch.randn(1, 3, 32, 32)).softmax(-1).max() > 0.05
