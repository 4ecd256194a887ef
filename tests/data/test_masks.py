"""Tests of lists of images with masks, and of valid and invalid masks of every kind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from efficient_ft.config.schema import MaskConfig
from efficient_ft.core.errors import UserError
from efficient_ft.core.input_spec import IGNORED
from efficient_ft.data.mask_folder import read_mask_folder as _read_mask_folder
from efficient_ft.data.masks import Classes, MaskListing, class_colors, read_mask
from tests.data.mask_pictures import DISK, VOID, picture, write_folder

CLASSES = Classes(("background", "square", "disk"), (0, 1, 3), frozenset({2, IGNORED}))


def read_mask_folder(root: Path, **settings: Any) -> MaskListing:
    return _read_mask_folder(root, MaskConfig(**settings), None)


def test_splits_classes_and_ids_without_a_label(tmp_path: Path) -> None:
    listing = read_mask_folder(write_folder(tmp_path, {"train": 4, "val": 2, "test": 3}))
    assert listing.classes == CLASSES
    assert [len(part) for part in (listing.train, listing.val, listing.test) if part is not None] == [4, 2, 3]
    for image, mask in zip(listing.train.images, listing.train.masks, strict=True):
        assert Path(image).stem == Path(mask).stem
    named = read_mask_folder(tmp_path, classes=["a", "b", "c", "d"], ignored=[2])
    assert named.classes == Classes(("a", "b", "d"), (0, 1, 3), frozenset({2, IGNORED}))


def test_one_folder_of_images_and_masks_holds_a_fifth_out_the_same_for_all(tmp_path: Path) -> None:
    first, second = (read_mask_folder(write_folder(tmp_path / name, {"": 10})) for name in ("a", "b"))
    assert first.test is not None
    assert second.test is not None
    assert (len(first.train), len(first.test)) == (8, 2)
    assert [Path(p).name for p in first.test.images] == [Path(p).name for p in second.test.images]
    assert first.digest() == second.digest()
    assert "2 of 10 images are held out for testing" in first.notes[0]


def test_folders_may_be_nested(tmp_path: Path) -> None:
    write_folder(tmp_path, {"train": 3, "val": 1})
    for inside, kind in (("images", "jpg"), ("masks", "png")):
        (tmp_path / "train" / inside / "city").mkdir()
        (tmp_path / "train" / inside / f"001.{kind}").rename(tmp_path / "train" / inside / "city" / f"000.{kind}")
    assert len(read_mask_folder(tmp_path).train) == 3


@pytest.mark.parametrize(
    ("spoil", "expected"),
    [
        (lambda root: (root / "classes.txt").unlink(), "has no classes.txt. This file must list the class names"),
        (
            lambda root: (root / "classes.txt").write_text("void\nsky\n"),
            r"has 1 class \(classes.txt\). Segmentation requires at least two",
        ),
        (lambda root: (root / "train/masks/001.png").unlink(), r"001.jpg has no mask\. .*masks/001.png does not exist"),
        (lambda root: [p.unlink() for p in (root / "train/images").iterdir()], "train/images has no images"),
        (lambda root: (root / "train").rename(root / "spare"), "Images with masks are in several folders"),
        (lambda root: Image.new("L", (4, 4)).save(root / "train/masks/000.bmp"), "contains two files for 000"),
    ],
)
def test_a_folder_that_cannot_be_used_is_explained(tmp_path: Path, spoil: object, expected: str) -> None:
    root = write_folder(tmp_path / "set", {"train": 3, "val": 1})
    spoil(root)  # type: ignore[operator]
    with pytest.raises(UserError, match=expected):
        read_mask_folder(root)


def test_no_folder_and_a_single_image(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="the folder does not exist"):
        read_mask_folder(tmp_path / "nowhere")
    with pytest.raises(UserError, match="only one image"):
        read_mask_folder(write_folder(tmp_path / "set", {"": 1}))


def _palette(mask: np.ndarray) -> Image.Image:
    image = Image.fromarray(mask, mode="P")
    image.putpalette(list(range(255, -1, -1)) * 3)
    return image


@pytest.mark.parametrize(
    ("kind", "save"),
    [
        ("gray", Image.fromarray),
        ("palette", _palette),
        ("16 bits", lambda mask: Image.fromarray(mask.astype(np.uint16))),
    ],
)
def test_ids_are_read_from_every_kind_of_mask(tmp_path: Path, kind: str, save: object) -> None:
    _, mask = picture(0)
    save(mask).save(tmp_path / "mask.png")  # type: ignore[operator]
    found = read_mask(str(tmp_path / "mask.png"), CLASSES, (64, 48))
    expected = mask.copy()
    expected[mask == VOID], expected[mask == DISK] = IGNORED, 2
    assert found.dtype == np.uint8
    assert (found == expected).all()


def test_ids_above_255_are_read(tmp_path: Path) -> None:
    classes = Classes(("a", "b"), (0, 1000))
    Image.fromarray(np.array([[0, 1000, 255]], dtype=np.uint16)).save(tmp_path / "mask.png")
    assert read_mask(str(tmp_path / "mask.png"), classes).tolist() == [[0, 1, IGNORED]]


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        (
            np.array([[0, 7, 7], [9, 0, 1]]),
            r"ids without a class: 7 \(2 pixels\), 9 \(1 pixel\). The classes have the ids 0, 1, 3",
        ),
        (np.full((2, 3), VOID), "no pixel has a label"),
        (np.zeros((3, 3)), "the size of the mask is 3×3, but the size of its image is 3×2"),
        (
            np.eye(3)[[[0, 1, 2], [0, 0, 0]]],
            r"the mask contains colors \(mode RGB\) instead of class ids: 1 0 0 \(4 pixels\)",
        ),
    ],
)
def test_a_mask_that_cannot_be_used_is_named(tmp_path: Path, mask: np.ndarray, expected: str) -> None:
    Image.fromarray(mask.astype(np.uint8)).save(tmp_path / "mask.png")
    with pytest.raises(UserError, match=rf"mask\.png: .*{expected}"):
        read_mask(str(tmp_path / "mask.png"), CLASSES, (3, 2))


def test_a_damaged_mask_is_named(tmp_path: Path) -> None:
    (tmp_path / "mask.png").write_bytes(b"no picture")
    with pytest.raises(UserError, match=r"mask\.png: the file cannot be read as a mask"):
        read_mask(str(tmp_path / "mask.png"), CLASSES)


def test_colors_are_those_of_pascal_voc_and_differ() -> None:
    colors = class_colors(254)
    assert colors[:3].tolist() == [[128, 0, 0], [0, 128, 0], [128, 128, 0]]
    assert len({tuple(color) for color in colors.tolist()}) == 254
