"""Tests of the transforms and of reading image files."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torchvision.transforms import InterpolationMode, v2

from efficient_ft.core.errors import SettingError, UserError
from efficient_ft.core.input_spec import InputSpec
from efficient_ft.data import Transform, read_image
from tests.data.pictures import SPEC, picture, save, truncate


def mean_error(image: Image.Image, expected: Image.Image) -> float:
    a, b = (np.asarray(x, dtype=np.float64) for x in (image, expected))
    assert a.shape == b.shape
    return float(np.abs(a - b).mean())


@pytest.mark.parametrize("suffix", ["jpg", "png", "bmp", "ppm", "tif", "webp", "gif"])
def test_color_files_are_read_as_they_were_saved(tmp_path: Path, suffix: str) -> None:
    image = picture(1)
    image.save(tmp_path / f"x.{suffix}")
    read = read_image(tmp_path / f"x.{suffix}")
    assert read.mode == "RGB"
    lossless = suffix in ("png", "bmp", "ppm", "tif")
    assert mean_error(read, image) <= (0 if lossless else 8)


@pytest.mark.parametrize(
    ("mode", "suffix"), [("L", "png"), ("L", "jpg"), ("1", "png"), ("P", "png"), ("CMYK", "jpg"), ("CMYK", "tif")]
)
def test_other_color_modes_become_rgb(tmp_path: Path, mode: str, suffix: str) -> None:
    image = picture(2).convert(mode)
    image.save(tmp_path / f"x.{suffix}")
    read = read_image(tmp_path / f"x.{suffix}")
    assert read.mode == "RGB"
    assert mean_error(read, image.convert("RGB")) < 4


@pytest.mark.parametrize("suffix", ["png", "tif"])
def test_sixteen_bits_are_scaled_not_cut_off(tmp_path: Path, suffix: str) -> None:
    values = np.linspace(0, 65535, 20 * 24).reshape(20, 24).astype(np.uint16)
    Image.fromarray(values).save(tmp_path / f"x.{suffix}")
    read = np.asarray(read_image(tmp_path / f"x.{suffix}"), dtype=np.float64)
    assert np.abs(read - values[..., None] / 257).max() <= 0.5
    assert read.min() == 0
    assert read.max() == 255


def test_transparency_lies_over_white(tmp_path: Path) -> None:
    half = np.zeros((8, 8, 4), dtype=np.uint8)
    half[:, :4] = (200, 10, 20, 255)  # the right half is transparent black
    rgba = Image.fromarray(half)
    rgba.save(tmp_path / "rgba.png")
    rgba.convert("LA").save(tmp_path / "la.png")
    palette = rgba.convert("RGB").quantize(4)
    palette.save(tmp_path / "palette.png", transparency=palette.getpixel((7, 0)))
    rgba.convert("RGB").save(tmp_path / "key.png", transparency=(0, 0, 0))
    for name in ("rgba", "la", "palette", "key"):
        read = np.asarray(read_image(tmp_path / f"{name}.png"))
        assert (read[:, 4:] == 255).all(), name
        assert (read[:, :4] < 230).all(), name


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_turns_the_image_upright(tmp_path: Path, orientation: int) -> None:
    upright = picture(3, 16, 32)
    # A camera stores the inverse of the transformation that the tag denotes.
    inverse = {
        2: Image.Transpose.FLIP_LEFT_RIGHT,
        3: Image.Transpose.ROTATE_180,
        4: Image.Transpose.FLIP_TOP_BOTTOM,
        5: Image.Transpose.TRANSPOSE,
        6: Image.Transpose.ROTATE_90,
        7: Image.Transpose.TRANSVERSE,
        8: Image.Transpose.ROTATE_270,
    }
    stored = upright.transpose(inverse[orientation]) if orientation in inverse else upright
    exif = Image.Exif()
    exif[0x0112] = orientation
    stored.save(tmp_path / "x.png", exif=exif)
    assert mean_error(read_image(tmp_path / "x.png"), upright) == 0


def test_broken_exif_is_no_reason_to_stop(tmp_path: Path) -> None:
    picture(4).save(tmp_path / "x.jpg", exif=b"Exif\x00\x00II*\x00\xff\xff\xff\xff" + b"\x12" * 9)
    assert read_image(tmp_path / "x.jpg").size == (24, 20)


@pytest.mark.parametrize("suffix", ["jpg", "png", "bmp", "gif", "tif", "webp"])
def test_a_truncated_file_is_an_error_naming_it(tmp_path: Path, suffix: str) -> None:
    file = save(tmp_path / f"half.{suffix}", 5, height=64, width=64)
    truncate(file)
    with pytest.raises(UserError, match="half") as error:
        read_image(file)
    assert str(error.value).startswith(str(file))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("content", [b"", b"<html>404</html>", b"\xff\xd8\xff\xe0garbage", b"\x89PNG\r\n\x1a\n"])
def test_what_is_no_image_is_an_error_naming_it(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "no image \u00e9.jpg"
    file.write_bytes(content)
    with pytest.raises(UserError, match="no image \u00e9"):
        read_image(file)


def test_missing_files_are_errors(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"gone\.png"):
        read_image(tmp_path / "gone.png")


def test_large_jpegs_are_decoded_smaller_but_never_below_twice_the_input(tmp_path: Path) -> None:
    save(tmp_path / "x.jpg", 6, height=330, width=420)
    assert read_image(tmp_path / "x.jpg").size == (420, 330)
    small = read_image(tmp_path / "x.jpg", target_size=(32, 40))
    assert small.size == (105, 83)  # one quarter, because one eighth would be smaller than 80 pixels
    assert read_image(tmp_path / "x.jpg", target_size=(100, 100)).size == (420, 330)
    exact = np.asarray(Transform(InputSpec((32, 40), (0,) * 3, (1,) * 3)).resize(read_image(tmp_path / "x.jpg")))
    drafted = np.asarray(Transform(InputSpec((32, 40), (0,) * 3, (1,) * 3)).resize(small))
    assert np.abs(exact.astype(int) - drafted).mean() < 2


@settings(max_examples=15, deadline=None)
@given(
    height=st.integers(1, 40),
    width=st.integers(1, 40),
    out=st.tuples(st.integers(1, 24), st.integers(1, 24)),
    mode=st.sampled_from(["nearest", "bilinear", "bicubic", "lanczos"]),
)
def test_evaluation_is_resize_and_normalize(height: int, width: int, out: tuple[int, int], mode: str) -> None:
    image = picture(7, height, width)
    spec = InputSpec(out, SPEC.mean, SPEC.std, mode)
    reference = v2.Compose(
        [
            v2.Resize(out, interpolation=InterpolationMode(mode)),
            v2.ToImage(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(SPEC.mean, SPEC.std),
        ]
    )(image)
    result = Transform(spec)(image)
    assert result.shape == (3, *out)
    assert result.dtype == torch.float32
    torch.testing.assert_close(result, reference.as_subclass(torch.Tensor), rtol=0, atol=2e-6)


def test_training_is_resize_crop_flip_and_normalize() -> None:
    image = picture(8, 40, 30)
    reference = v2.Compose(
        [
            v2.Resize((16, 16), interpolation=InterpolationMode.BICUBIC),
            v2.RandomResizedCrop((16, 16), scale=(0.3, 0.9), interpolation=InterpolationMode.BICUBIC),
            v2.RandomHorizontalFlip(),
            v2.ToImage(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(SPEC.mean, SPEC.std),
        ]
    )
    transform = Transform(SPEC, "resize_crop", (0.3, 0.9), flip=True)
    results = []
    for seed in range(8):
        torch.manual_seed(seed)
        expected = reference(image).as_subclass(torch.Tensor)
        torch.manual_seed(seed)
        results.append(transform(image))
        torch.testing.assert_close(results[-1], expected, rtol=0, atol=2e-6)
    assert not all(torch.equal(results[0], r) for r in results)


@pytest.mark.parametrize("resize", [20, "none"])
def test_the_crop_is_of_the_whole_image_or_of_it_resized(resize: int | str, tmp_path: Path) -> None:
    file = save(tmp_path / "x.jpg", 8, height=200, width=150)
    image = read_image(file)
    steps = [] if resize == "none" else [v2.Resize((20, 20), interpolation=InterpolationMode.BICUBIC)]
    reference = v2.Compose(
        [
            *steps,
            v2.RandomResizedCrop((16, 16), scale=(0.05, 1), interpolation=InterpolationMode.BICUBIC),
            v2.ToImage(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(SPEC.mean, SPEC.std),
        ]
    )
    transform = Transform(SPEC, "resize_crop", (0.05, 1), flip=False, resize=resize)
    assert transform.resize_size == (None if resize == "none" else (20, 20))
    for seed in range(4):
        torch.manual_seed(seed)
        expected = reference(image if resize == "none" else read_image(file, target_size=(20, 20)))
        torch.manual_seed(seed)
        result = transform(file)
        torch.testing.assert_close(result, expected.as_subclass(torch.Tensor), rtol=0, atol=2e-6)


def test_without_flip_nothing_is_mirrored_and_none_is_as_evaluation() -> None:
    ramp = Image.fromarray(np.tile(np.arange(0, 240, 10, dtype=np.uint8)[None, :, None], (24, 1, 3)))
    transform = Transform(SPEC, "resize_crop", (0.2, 1.0), flip=False)
    for seed in range(20):
        torch.manual_seed(seed)
        assert (transform(ramp).diff(dim=-1).mean() > 0).item()
    torch.testing.assert_close(Transform(SPEC, "none")(ramp), Transform(SPEC)(ramp), rtol=0, atol=0)


def test_one_gray_channel_for_networks_that_take_one() -> None:
    assert Transform(InputSpec((8, 8), (0.5,), (0.5,)))(picture(9)).shape == (1, 8, 8)


def test_a_path_is_as_good_as_an_image_and_transforms_travel(tmp_path: Path) -> None:
    file = save(tmp_path / "x.png", 10)
    transform = pickle.loads(pickle.dumps(Transform(SPEC)))
    torch.testing.assert_close(transform(file), Transform(SPEC)(read_image(file)), rtol=0, atol=0)


def test_mistaken_settings_are_named() -> None:
    with pytest.raises(SettingError, match=r"data\.augment\.name must be one .*got resize_cropp\..*mean 'resize_crop'"):
        Transform(SPEC, "resize_cropp")
    with pytest.raises(SettingError, match=r"data\.augment\.scale"):
        Transform(SPEC, "resize_crop", (0.9, 0.1))
    with pytest.raises(
        SettingError, match=r"model\.mean must be three values .*kwargs\.in_chans > 3.*Save three bands"
    ):
        Transform(InputSpec((8, 8), (0.5,) * 4, (0.5,) * 4))
    with pytest.raises(SettingError, match=r"model\.std"):
        Transform(InputSpec((8, 8), (0.5, 0.5, 0.5), (0.5,)))
    with pytest.raises(SettingError, match=r"interpolation must be one of .*, got bicubik"):
        Transform(InputSpec((8, 8), (0.5,) * 3, (0.5,) * 3, "bicubik"))


def test_vertical_flips_turn_images_upside_down() -> None:
    image = picture(5, 32, 32)
    transform = Transform(SPEC, "resize_crop", (1.0, 1.0), flip=False, vertical_flip=True)
    upright, turned = (Transform(SPEC)(i) for i in (image, image.transpose(Image.Transpose.FLIP_TOP_BOTTOM)))
    seen = []
    for seed in range(20):
        torch.manual_seed(seed)
        found = transform(image)
        seen.append((found - turned).abs().mean() < (found - upright).abs().mean())
    assert 4 <= sum(seen) <= 16


@pytest.mark.parametrize("resize", ["input", "none"])
def test_pick_draws_some_of_the_augmentations_for_each_image(resize: str) -> None:
    """With `pick=1`, each image gets one of three augmentations, so about a third of the images are cropped."""
    image = picture(6, 40, 40)
    transform = Transform(SPEC, "resize_crop", (0.2, 0.3), True, resize, vertical_flip=True, pick=1)
    sides = (Image.Transpose.FLIP_LEFT_RIGHT, Image.Transpose.FLIP_TOP_BOTTOM)
    whole = [Transform(SPEC)(i) for i in (image, *(image.transpose(side) for side in sides))]
    crops = 0
    for seed in range(60):
        torch.manual_seed(seed)
        found = transform(image)
        assert found.shape == (3, *SPEC.size)
        crops += min((found - one).abs().max() for one in whole) > 0.1
    assert 8 <= crops <= 35


@pytest.mark.parametrize("pick", [0, 3])
def test_pick_is_at_most_the_augmentations_that_are_on(pick: int) -> None:
    with pytest.raises(SettingError, match=r"data.augment.pick must be null, or between 1 and 2 .* got"):
        Transform(SPEC, "resize_crop", (0.2, 0.3), flip=True, pick=pick)


def test_postscript_under_the_name_of_an_image_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pillow would run the PostScript program with Ghostscript, so the file is rejected."""
    (tmp_path / "gs").write_text(f"#!/bin/sh\ntouch {tmp_path / 'MARK'}\n")
    (tmp_path / "gs").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    script = "%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\nshowpage\n"
    (tmp_path / "x.jpg").write_text(script)
    with pytest.raises(UserError, match=r"x\.jpg: the file is not readable as an image"):
        read_image(tmp_path / "x.jpg")
    assert not (tmp_path / "MARK").exists()
