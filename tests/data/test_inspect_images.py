"""Tests of the inspection of images: facts, warnings and problems in some or all images."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from efficient_ft.core.input_spec import InputSpec
from efficient_ft.data import ImageData, inspect_images, open_data
from efficient_ft.data.inspection import DECODED, HEADERS, Inspection
from tests.data.pictures import SPEC, picture, save, truncate

Open = Callable[..., ImageData]


@pytest.fixture
def opened(folders: Callable[..., Path], data_config: Callable[..., Any]) -> tuple[Path, Open]:
    """Return a folder of 30 images in two classes, and a function that opens the folder with settings."""
    root = folders(train={"a": 10, "b": 10}, val={"a": 2, "b": 2}, test={"a": 3, "b": 3})
    return root, lambda **settings: open_data(data_config("folder", root=str(root), **settings), SPEC, 0)


def warned(found: Inspection, *words: str) -> list[str]:
    return [text for text in found.warnings if all(word in text for word in words)]


def deep(root: Path, most: int, count: int = 10) -> None:
    """Replace images of class a by 16-bit images with values up to `most`."""
    ramp = np.linspace(0, most, 480).reshape(20, 24).round().astype(np.uint16)
    for i in range(count):
        (root / f"train/a/{i}.jpg").unlink()
        Image.fromarray(np.roll(ramp, i, axis=1)).save(root / f"train/a/{i}.png")


def scene(seed: int) -> Image.Image:
    """Return an image of 120×90 pixels with large areas of different colors."""
    coarse = np.random.default_rng(seed).integers(0, 255, (5, 6, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((120, 90), Image.Resampling.BICUBIC)


def test_facts_and_lines_of_usual_images(opened: tuple[Path, Open]) -> None:
    root, make = opened
    save(root / "train/a/large.jpg", 99, height=90, width=120)
    found = make().inspect()
    assert found.facts["sizes"] == {"min": [24, 20], "median": [24, 20], "max": [120, 90]}
    assert found.facts["modes"] == {"RGB": 31}
    assert found.facts["formats"] == {"JPEG": 31}
    assert found.facts["decoded"] == found.facts["samples"] == 31
    assert found.lines[0].startswith("images: 24×20 to 120×90 (median 24×20), RGB; values ")
    assert len(found.lines) == 1
    assert found.warnings == []
    assert found.problems == {}


def test_a_large_set_is_sampled_and_the_sampling_is_reported(data_config: Callable[..., Any], tmp_path: Path) -> None:
    one = save(tmp_path / "one.jpg", 1)
    for name in ("a", "b"):
        (tmp_path / "images" / name).mkdir(parents=True)
        for i in range(700):
            (tmp_path / "images" / name / f"{i}.jpg").hardlink_to(one)
    found = open_data(data_config("folder", root=str(tmp_path / "images")), SPEC, 0).inspect()
    sample = f"sample: {DECODED} of 1,400 images were decoded; the sizes are those of {HEADERS:,} images"
    assert found.lines[1] == sample
    assert found.facts["examined"] == HEADERS


def test_small_values_of_16_bits_name_the_range(opened: tuple[Path, Open]) -> None:
    root, make = opened
    deep(root, 4000)
    (text,) = warned(make().inspect(), "'data.value_range=[0,4095]'", "10 of 10 decoded", "at most 4000")
    assert "dark" in text
    corrected = make(value_range=(0, 4095)).inspect()
    assert not warned(corrected, "value_range")
    assert corrected.facts["stored_values"] == [0, 4000]


@pytest.mark.parametrize(("most", "range_"), [(255, 255), (1000, 1023), (16000, 16383), (20000, None), (65535, None)])
def test_the_range_that_is_suggested(opened: tuple[Path, Open], most: int, range_: int | None) -> None:
    root, make = opened
    deep(root, most)
    assert bool(warned(make().inspect(), f"data.value_range=[0,{range_}]")) == (range_ is not None)


def test_images_that_become_one_color(opened: tuple[Path, Open]) -> None:
    root, make = opened
    deep(root, 100)
    (text,) = warned(make().inspect(), "a single color remains")
    assert "in 10 of " in text
    assert "data.value_range=[0,255]" in text
    assert not warned(make(value_range=(0, 100)).inspect(), "single color")
    Image.new("RGB", (9, 9), "gray").save(root / "train/b/blank.png")
    assert warned(make(value_range=(0, 100)).inspect(), "1 of ", "has a single color", "blank.png")


def test_a_range_without_effect_and_one_that_clips(opened: tuple[Path, Open]) -> None:
    root, make = opened
    assert warned(make(value_range=(0, 4095)).inspect(), "data.value_range has no effect")
    deep(root, 4000)
    assert warned(make(value_range=(0, 1000)).inspect(), "of the gray values, which range from 0 to 4000, are")


def test_no_bright_pixel(opened: tuple[Path, Open]) -> None:
    root, make = opened
    for file in root.rglob("*.jpg"):
        Image.fromarray(np.asarray(Image.open(file)) // 20).save(file.with_suffix(".png"))
        file.unlink()
    assert warned(make().inspect(), "The images are dark", "(of 255)")


def test_gray_and_color_extensions_frames(opened: tuple[Path, Open]) -> None:
    root, make = opened
    for i in range(3):
        picture(i).convert("L").save(root / f"train/a/{i}.jpg")
    picture(50).save(root / "train/b/0.jpg", format="PNG")
    picture(51).save(root / "train/b/x.gif", save_all=True, append_images=[picture(52)])
    picture(53).save(root / "train/b/y.tif", save_all=True, append_images=[picture(54)])
    picture(55).save(root / "train/b/one.gif")
    found = make().inspect()
    assert warned(found, "3 of 33 images are gray")
    assert any(line.startswith("1 file has the extension of a different format: ") for line in found.lines)
    assert warned(found, "2 files have several frames or pages, of which only the first is used", "x.gif")
    assert found.facts["several_frames"] == 2


def test_small_images_and_classes(data_config: Callable[..., Any], folders: Callable[..., Path]) -> None:
    root = folders(train={"a": 9, "b": 9, "c": 2}, val={"a": 1, "b": 1}, test={"a": 1, "c": 1})
    wide = InputSpec((224, 224), SPEC.mean, SPEC.std)
    found = open_data(data_config("folder", root=str(root)), wide, 0).inspect()
    assert warned(found, "enlarged by a factor of 9.33, from a median size of 24×20", "224×224", "model.image_size")
    assert warned(found, "1 class has no val image: 'c'")
    assert warned(found, "1 class has no test image: 'b'")
    assert found.facts["imbalance"] == 4.5


def test_pixels_in_memory(data_config: Callable[..., Any]) -> None:
    found = open_data(data_config("digits"), SPEC, 0).inspect()
    assert found.lines[0] == "images: 8×8, L; values 0–255"
    assert found.facts["samples"] == 1797
    thorough = open_data(data_config("digits"), SPEC, 0).inspect(thorough=True)
    assert thorough.facts["decoded"] == 1797


def test_all_files_are_decoded_thoroughly(opened: tuple[Path, Open]) -> None:
    root, make = opened
    truncate(root / "train/b/7.jpg")
    (root / "test/a/2.jpg").write_bytes(b"")
    quick = make().inspect()
    assert warned(quick, "2 of 30 inspected files cannot be read", "Set data.on_corrupt=skip to skip such files")
    assert len(quick.lines) == 1
    found = make().inspect(thorough=True)
    assert found.warnings == []
    assert set(found.problems) == {str(root / "train/b/7.jpg"), str(root / "test/a/2.jpg")}
    assert "the file is empty" in found.problems[str(root / "test/a/2.jpg")]
    assert found.facts["decoded"] == 28


def test_duplicates(opened: tuple[Path, Open]) -> None:
    root, make = opened
    assert make().inspect(thorough=True).facts["duplicates"]["groups"] == 0
    shutil.copy(root / "train/a/0.jpg", root / "train/a/again.jpg")
    shutil.copy(root / "train/a/1.jpg", root / "test/a/leak.jpg")
    Image.open(root / "train/a/2.jpg").save(root / "train/b/other.png")  # the same pixels in another format
    found = make().inspect(thorough=True)
    assert found.facts["duplicates"] | {"examples": 0} == {
        "groups": 3,
        "across_splits": 1,
        "across_classes": 1,
        "examples": 0,
    }
    assert warned(found, "1 image occurs in several splits", "train/a/1.jpg (train, a)", "test/a/leak.jpg (test, a)")
    assert warned(found, "1 image occurs with several labels", "train/a/2.jpg", "train/b/other.png (train, b)")
    assert any("3 of 33 images, compared by pixels" in line for line in found.lines)


def test_near_duplicates(opened: tuple[Path, Open], monkeypatch: pytest.MonkeyPatch) -> None:
    root, make = opened
    for name in "ab":
        for i in range(10):
            scene(10 * "ab".index(name) + i).save(root / f"train/{name}/{i}.jpg", quality=95)
    assert make().inspect(thorough=True).facts["near_duplicates"]["images"] == 0
    original = Image.open(root / "train/a/0.jpg")
    original.save(root / "test/a/encoded.jpg", quality=70)
    original.resize((60, 45)).save(root / "train/b/small.png")
    shutil.copy(root / "train/a/1.jpg", root / "test/a/equal.jpg")  # an exact duplicate
    original.crop((0, 0, 60, 90)).resize((120, 90)).save(root / "test/a/part.jpg")
    found = make().inspect(thorough=True)
    assert found.facts["near_duplicates"] | {"examples": 0} == {
        "images": 3,
        "across_splits": 3,
        "across_classes": 3,
        "compared": 34,
        "examples": 0,
    }
    assert warned(found, "3 images in different splits may be near-duplicates", " ≈ ", "test/a/encoded.jpg (test, a)")
    assert warned(found, "3 images with different labels may be near-duplicates", " ≈ ", "train/b/small.png (train, b)")
    assert found.facts["duplicates"]["groups"] == 1
    assert "near_duplicates" not in make().inspect().facts
    assert not any(line.startswith("near-duplicates") for line in found.lines)
    monkeypatch.setattr(inspect_images, "_COMPARED", 10)
    assert "near-duplicates: 10 of 34 images were compared" in make().inspect(thorough=True).lines


def test_a_set_without_a_readable_image_has_no_near_duplicates(opened: tuple[Path, Open]) -> None:
    found = opened[1](max_pixels=10).inspect(thorough=True)
    assert len(found.problems) == 30
    assert found.facts["near_duplicates"]["images"] == 0


def test_images_with_little_contrast_are_no_near_duplicates(opened: tuple[Path, Open]) -> None:
    root, make = opened
    for i in range(10):
        Image.fromarray(np.random.default_rng(i).integers(118, 128, (60, 80, 3), dtype=np.uint8)).save(
            root / f"train/a/{i}.jpg"
        )
    assert make().inspect(thorough=True).facts["near_duplicates"]["images"] == 0


def test_masks_beside_their_images_are_warned_of(opened: tuple[Path, Open]) -> None:
    root, open_it = opened
    for i in range(3):
        Image.fromarray(np.full((20, 24), 255, np.uint8)).save(root / f"train/a/{i}_mask.png")
    save(root / "train/b/no_mask.jpg", 7)
    (warning,) = warned(open_it().inspect(), "like the mask of another image")
    assert warning.startswith("3 of 34 images are named")
    assert "_mask.png" in warning


def test_most_images_that_are_dark_are_reported_beside_a_bright_one(opened: tuple[Path, Open]) -> None:
    root, open_it = opened
    deep(root, 4000)
    Image.fromarray(np.full((20, 24), 65535, np.uint16)).save(root / "train/b/bright.png")
    (warning,) = warned(open_it().inspect(), "so these images are dark")
    assert "10 of 11 decoded gray images with more than 8 bits have values of at most 4000" in warning
    assert "'data.value_range=[0,4095]'" in warning
