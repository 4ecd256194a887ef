"""Tests of the inspection of images with masks: recorded facts, warnings, and pairs that training would reject."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from efficient_ft.config.schema import MaskConfig
from efficient_ft.data.inspect_masks import inspect_masks
from efficient_ft.data.inspection import Inspection
from efficient_ft.data.mask_folder import read_mask_folder
from tests.data.mask_pictures import write_folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "set", {"train": 8, "val": 3, "test": 2})


def _inspect(root: Path, thorough: bool = False, **settings: Any) -> Inspection:
    listing = read_mask_folder(root, MaskConfig(**settings))
    parts = {"train": listing.train, "val": listing.val, "test": listing.test}
    there = {name: part for name, part in parts.items() if part is not None}
    return inspect_masks(there, listing.classes, MaskConfig(**settings), thorough=thorough)


def _masks(root: Path, split: str) -> list[np.ndarray]:
    return [np.asarray(Image.open(path)) for path in sorted((root / split / "masks").iterdir())]


@pytest.mark.parametrize("thorough", [False, True])
def test_sizes_modes_and_shares_are_those_of_the_files(folder: Path, thorough: bool) -> None:
    found = _inspect(folder, thorough)
    train = np.stack(_masks(folder, "train"))
    every = np.concatenate([train, *(np.stack(_masks(folder, split)) for split in ("val", "test"))])
    assert found.facts["mask_sizes"] == {"64×48": 13}
    assert found.facts["mask_modes"] == {"L": 13}
    assert found.facts["masks_decoded"] == found.facts["headers_read"] == found.facts["masks"] == 13
    assert found.facts["unlabeled_share"] == pytest.approx((every == 2).mean(), abs=1e-6)
    labeled = (train != 2).sum()
    for name, number in (("background", 0), ("square", 1), ("disk", 3)):
        assert found.facts["train_pixels"][name] == pytest.approx((train == number).sum() / labeled, abs=1e-6)
    assert found.lines[0] == "masks: 64×48, 8-bit ids; 2.08 % of the pixels have no label (all 13 masks were decoded)"
    assert found.lines[1].startswith("training pixels: background 8")
    assert not found.warnings
    assert not found.problems


def test_of_many_masks_some_are_decoded(tmp_path: Path) -> None:
    found = _inspect(write_folder(tmp_path / "set", {"train": 60, "val": 20}, height=24, width=48))
    assert found.facts["masks_decoded"] == 60
    assert found.facts["headers_read"] == 80
    assert "(60 of 80 masks were decoded)" in found.lines[0]


def test_a_class_without_a_training_pixel_is_always_reported(folder: Path) -> None:
    for path in (folder / "train/masks").iterdir():
        mask = np.asarray(Image.open(path)).copy()
        mask[mask == 3] = 0
        Image.fromarray(mask).save(path)
    found = _inspect(folder)
    assert found.facts["train_pixels"]["disk"] == 0
    assert found.lines[2] == "classes without training pixels: disk"
    assert any(warning.startswith("No training pixels were found for disk (in 8 masks).") for warning in found.warnings)


def test_warnings_of_labels_and_sizes(folder: Path) -> None:
    for path in (folder / "train/masks").iterdir():
        mask = np.asarray(Image.open(path)).copy()
        mask[2:] = np.where(mask[2:] == 0, 255, mask[2:])
        Image.fromarray(mask).save(path)
    Image.fromarray(np.full((48, 64), 2, np.uint8)).save(folder / "val/masks/001.png")
    Image.fromarray(np.zeros((24, 32), np.uint8)).save(folder / "test/masks/000.png")
    found = _inspect(folder)
    assert any("of the pixels in the train masks have no label (2, 255)" in warning for warning in found.warnings) == (
        np.mean([(mask == 2) | (mask == 255) for mask in _masks(folder, "train")]) > 0.9
    )
    assert "1 val mask has no labeled pixels. Such masks do not affect the scores." in found.warnings
    assert any("1 of 13 masks differs in size from its image, for example" in warning for warning in found.warnings)
    assert list(found.problems) == [str(folder / "test/masks/000.png")]


def test_a_thorough_inspection_finds_every_unusable_pair_and_duplicates(folder: Path) -> None:
    Image.fromarray(np.full((48, 64), 9, np.uint8)).save(folder / "train/masks/002.png")
    (folder / "train/images/004.jpg").write_bytes(b"")
    Image.fromarray(np.zeros((5, 5), np.uint8)).save(folder / "val/masks/001.png")
    (folder / "test/images/001.jpg").write_bytes((folder / "train/images/000.jpg").read_bytes())
    found = _inspect(folder, thorough=True)
    assert {Path(path).relative_to(folder).as_posix() for path in found.problems} == {
        "train/masks/002.png",
        "train/images/004.jpg",
        "val/masks/001.png",
    }
    assert all(reason.startswith(path) for path, reason in found.problems.items())
    assert found.facts["images_in_several_splits"] == 1
    assert any("1 image is in several splits" in warning for warning in found.warnings)
    quick = _inspect(folder)
    assert str(folder / "train/masks/002.png") in quick.problems


def test_orientations_and_kinds_are_named(folder: Path) -> None:
    exif = Image.Exif()
    exif[274] = 6
    image = folder / "train/images/000.jpg"
    with Image.open(image) as opened:
        opened.save(image, exif=exif)
    mask = Image.open(folder / "val/masks/000.png").convert("P")
    mask.save(folder / "val/masks/000.png")
    found = _inspect(folder)
    assert found.facts["exif_orientations"] == {"raw": 1}
    assert (
        found.lines[-1]
        == "images with an EXIF orientation: 1 with masks that match the stored pixels and are rotated with the image"
    )
    assert "8-bit ids and indices of a palette" in found.lines[0]


def _rewrite(root: Path, mask: Callable[[int], np.ndarray]) -> Path:
    for k, path in enumerate(sorted(root.rglob("masks/*.png"))):
        Image.fromarray(mask(k).astype(np.uint8)).save(path)
    (root / "classes.txt").write_text("background\ncell\n")
    return root


def _disc(radius: float) -> np.ndarray:
    y, x = np.mgrid[:48, :64]
    return (y - 24) ** 2 + (x - 32) ** 2 < radius**2


def test_equal_masks_and_masks_of_one_class_are_warned_of(folder: Path) -> None:
    equal = _inspect(_rewrite(folder, lambda k: _disc(9)))
    assert any(w.startswith("The 13 decoded masks are equal, for example ") for w in equal.warnings)
    constant = _inspect(_rewrite(folder, lambda k: np.full((48, 64), k % 2)))
    assert any(w.startswith("Each of the 13 decoded masks contains a single class.") for w in constant.warnings)
    # Masks with equal pixel counts per class are not necessarily equal.
    usual = _inspect(_rewrite(folder, lambda k: np.roll(_disc(9), k, axis=1)))
    assert not any("decoded masks" in w for w in usual.warnings)


@pytest.mark.parametrize("inverted", [2, 6, 11])
def test_masks_inverted_relative_to_the_others_are_warned_of(folder: Path, inverted: int) -> None:
    found = _inspect(_rewrite(folder, lambda k: _disc(8 + k % 4) ^ (k < inverted)))
    fewer = min(inverted, 13 - inverted)
    (warning,) = [w for w in found.warnings if "may be inverted" in w]
    assert warning.startswith(f"{fewer} of 13 masks with both classes may be inverted: cell covers ")


@pytest.mark.parametrize(
    "mask",
    [
        lambda k: _disc(4 + 2.5 * k),  # objects of increasing size
        lambda k: _disc(3) ^ (k < 4) if k < 4 else _disc(17),  # two groups that are not inversions of each other
        lambda k: _disc(8) if k else ~_disc(8),  # only one inverted mask
        lambda k: _disc(8) if k < 9 else np.full((48, 64), k % 2),  # some masks contain a single class
    ],
)
def test_masks_of_other_sizes_are_not_inverted(folder: Path, mask: Callable[[int], np.ndarray]) -> None:
    assert not [w for w in _inspect(_rewrite(folder, mask)).warnings if "inverted" in w]
