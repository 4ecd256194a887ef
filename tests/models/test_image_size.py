"""Tests of image sizes that a network cannot process or that its patches do not fully cover."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import save_file

from efficient_ft.core.errors import SettingError, UserError
from efficient_ft.models import factory
from tests.models.small_vit import SMALL, small


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"image_size": 100}, r"a multiple of 16 .*, got 100\. Only 96 of 100 pixels would be used\. Use 96 or 112\."),
        ({"image_size": (100, 128)}, r"a multiple of 16 .*, got \[100,128\]\. Only 96×128 of 100×128 .* \[112,128\]"),
        ({"kwargs": {**SMALL, "patch_size": 10}}, r"a multiple of 10 .*, got 224\. Only 220 of 224 .* 220 or 230"),
        ({"name": "convnext_atto", "kwargs": {}, "image_size": 50}, r"a multiple of 4 .* Use 48 or 52"),
    ],
)
def test_an_image_size_of_which_pixels_are_unused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(SettingError, match=rf"model\.image_size must be {said}"):
        factory.create_model(small(**changes), 7)


def test_image_sizes_of_which_all_pixels_are_used(tmp_path: Path) -> None:
    padded = {"name": "swin_tiny_patch4_window7_224", "kwargs": {"depths": [1, 1, 1, 1]}, "image_size": 100}
    for changes in ({"image_size": 96}, {"name": "resnet18", "kwargs": {}, "image_size": 33}, padded):
        factory.create_model(small(**changes), 7)
    trained = timm.create_model("vit_tiny_patch16_224", num_classes=7, img_size=100, **SMALL)
    save_file(trained.state_dict(), tmp_path / "model.safetensors", {"image_size": "[100, 100]"})
    factory.create_model(small(image_size=100, weights=str(tmp_path / "model.safetensors")), 7)


def test_an_own_file_of_images_that_are_not_square_is_resized_by_its_own_grid(tmp_path: Path) -> None:
    torch.manual_seed(1)
    source = timm.create_model("vit_tiny_patch16_224", num_classes=7, img_size=(96, 128), **SMALL)
    save_file(source.state_dict(), tmp_path / "model.safetensors", {"image_size": "[96, 128]"})
    file = str(tmp_path / "model.safetensors")
    own = factory.create_model(small(image_size=(96, 128), weights=file), 7)
    assert torch.equal(own.pos_embed, source.pos_embed)
    turned = factory.create_model(small(image_size=(128, 96), weights=file), 7)
    assert turned.pos_embed.shape == source.pos_embed.shape
    assert not torch.equal(turned.pos_embed, source.pos_embed), "the grid is resized, not read in another order"


@pytest.mark.parametrize(
    ("changes", "use"),
    [
        ({"name": "efficientformer_l1", "image_size": 8}, r"Use null for the default\."),
        ({"name": "convnext_atto", "image_size": 8}, r"Use model\.image_size=32, or null for the default\."),
        ({"name": "twins_svt_small", "image_size": 8}, r"Use model\.image_size=32, or"),
        ({"name": "levit_128s", "image_size": 8}, r"Use model\.image_size=32, or"),
        ({"name": "xcit_nano_12_p16_224", "image_size": 8}, r"Use model\.image_size=32, or"),
        ({"name": "vit_tiny_patch16_224", "image_size": 8, "kwargs": SMALL}, r"=32, or .* Or change model\.kwargs\."),
    ],
)
def test_a_size_that_the_network_cannot_process_names_one_that_it_can(changes: dict[str, Any], use: str) -> None:
    said = r"model\.image_size must be a size that \w+ can process, got .*" + use
    with pytest.raises(SettingError, match=said) as caught:
        factory.create_model(small(**{"kwargs": {}, **changes}), 7)
    assert not any(word in str(caught.value) for word in ("tensor", "Kernel", "divided"))


def test_arguments_that_are_the_reason_are_named_instead_of_the_size() -> None:
    with pytest.raises(UserError, match=r"cannot be built with .*depth"):
        factory.create_model(small(image_size=96, kwargs={"depth": "two"}), 7)
