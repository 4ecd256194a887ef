"""Tests of reading image processors of `transformers`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image

from efficient_ft.core.errors import UserError
from efficient_ft.core.input_spec import InputSpec
from efficient_ft.data.transforms import Transform
from efficient_ft.models.image_processor import NAMES, Processor, processor_entries, read_processor


def read(folder: Path, entries: dict[str, Any] | str, channels: int = 3, name: str = NAMES[0]) -> Processor:
    file = folder / name
    file.write_text(entries if isinstance(entries, str) else json.dumps(entries))
    found = read_processor(file, transformers, channels)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("entries", "size"),
    [
        ({"size": 48}, (48, 48)),
        ({"size": {"height": 48, "width": 64}}, (48, 64)),
        ({"size": [48, 64]}, (48, 64)),
        ({"size": {"shortest_edge": 48}}, (48, 48)),
        ({"size": {"shortest_edge": 64}, "do_center_crop": True, "crop_size": 48}, (48, 48)),
        ({"size": 64, "do_center_crop": True, "crop_size": {"height": 48, "width": 56}}, (48, 56)),
        ({"size": 64, "do_center_crop": False, "crop_size": 48}, (64, 64)),
        ({"size": 64, "do_resize": False}, None),
        ({"image_processor_type": "CLIPImageProcessor"}, (224, 224)),  # the defaults of the class
        ({"feature_extractor_type": "ViTFeatureExtractor", "size": 48}, (48, 48)),
    ],
)
def test_sizes(tmp_path: Path, entries: dict[str, Any], size: tuple[int, int] | None) -> None:
    assert read(tmp_path, entries).size == size


@pytest.mark.parametrize(
    ("entries", "crops"),
    [
        ({"size": {"shortest_edge": 48}, "do_center_crop": True, "crop_size": 48}, True),
        ({"size": {"height": 64, "width": 64}, "do_center_crop": True, "crop_size": 48}, True),
        ({"size": {"height": 48, "width": 48}, "do_center_crop": True, "crop_size": 48}, False),
        ({"size": {"shortest_edge": 48}, "do_center_crop": False}, False),
    ],
)
def test_cropping_is_recognized(tmp_path: Path, entries: dict[str, Any], crops: bool) -> None:
    assert read(tmp_path, entries).crops is crops


#: Image processors that rescale and normalize in different ways.
PROCESSORS = {
    "vit": transformers.ViTImageProcessor(),
    "plain": transformers.ViTImageProcessor(do_normalize=False),
    "bytes": transformers.ViTImageProcessor(do_rescale=False, image_mean=[120.0] * 3, image_std=[60.0, 50.0, 40.0]),
    "half": transformers.ViTImageProcessor(rescale_factor=1 / 127.5, image_mean=[1.0] * 3, image_std=[2.0] * 3),
    "efficientnet": transformers.EfficientNetImageProcessor(rescale_offset=True),
    "clip": transformers.CLIPImageProcessor(),
    "convnext": transformers.ConvNextImageProcessor(size={"shortest_edge": 384}),
}


@pytest.mark.parametrize("name", PROCESSORS)
def test_pixels_are_normalized_as_transformers_does(tmp_path: Path, name: str) -> None:
    """Images that already have the right size differ only by the normalization."""
    processor = PROCESSORS[name]
    processor.save_pretrained(tmp_path)
    found = read_processor(tmp_path / NAMES[0], transformers, 3)
    assert found is not None
    assert found.size is not None
    pixels = np.random.default_rng(0).integers(0, 256, (*found.size, 3), dtype=np.uint8)
    transform = Transform(InputSpec(found.size, found.mean, found.std, found.interpolation))
    own = transform(Image.fromarray(pixels)) if callable(transform) else None
    expected = processor(Image.fromarray(pixels), return_tensors="pt")["pixel_values"][0]
    torch.testing.assert_close(own, expected, rtol=1e-5, atol=1e-5)


def test_written_processors_have_the_same_effect(tmp_path: Path) -> None:
    spec = InputSpec((24, 32), (0.1, 0.2, 0.3), (0.4, 0.5, 0.6), "bilinear")
    found = read(tmp_path, processor_entries(spec))
    assert (found.size, found.interpolation) == (spec.size, spec.interpolation)
    assert found.mean == pytest.approx(spec.mean)
    assert found.std == pytest.approx(spec.std)


def test_processors_of_several_inputs(tmp_path: Path) -> None:
    plain = {"image_processor": {"size": 48, "resample": 3}, "processor_class": "CLIPProcessor"}
    found = read(tmp_path, plain, name=NAMES[1])
    assert (found.size, found.interpolation) == ((48, 48), "bicubic")
    (tmp_path / NAMES[1]).write_text("{}")
    assert read_processor(tmp_path / NAMES[1], transformers, 3) is None


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ("{", "cannot be used"),
        ("[]", r"does not contain a mapping. Set model.weights to a folder"),
        ({"size": "large"}, "size must contain integers"),
        ({"size": {"height": 0, "width": 3}}, "size must contain integers"),
        ({"size": 10**6}, "size must contain integers"),
        ({"resample": 9}, "resample must be one of"),
        ({"image_mean": [0.5], "image_std": [0.5]}, "image_mean must contain one number for each of the 3 channels"),
        ({"image_mean": [0.5] * 3, "image_std": [0.0] * 3}, "must be positive"),
        ({"do_normalize": True, "image_mean": "x", "image_std": 1}, "image_mean must contain"),
        ({"rescale_factor": "x"}, "rescale_factor must be a number"),
        ({"do_flip_channel_order": True}, "BGR images"),
    ],
)
def test_files_that_cannot_be_used(tmp_path: Path, entries: Any, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        read(tmp_path, entries)
    assert "preprocessor_config.json" in str(caught.value)
