"""Tests of layouts of folders of images with masks: splits, names of folders and files, and ambiguous layouts."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from efficient_ft.config.schema import MaskConfig
from efficient_ft.core.errors import SettingError, UserError
from efficient_ft.data.mask_folder import read_mask_folder
from efficient_ft.data.masks import MaskListing


def write(root: Path, folders: Mapping[str, int | list[str]]) -> Path:
    """Write image files into folders, given a number of files or a list of names for each folder."""
    for folder, files in folders.items():
        (root / folder).mkdir(parents=True, exist_ok=True)
        names = [f"{k:03}.png" for k in range(files)] if isinstance(files, int) else files
        for k, name in enumerate(names):
            values = np.full((4, 6), k % 2, dtype=np.uint8)
            Image.fromarray(values).save(root / folder / name)
    (root / "classes.txt").write_text("background\ncell\n")
    return root


def read(root: Path, splits: Any = None, **settings: Any) -> MaskListing:
    return read_mask_folder(root, MaskConfig(**settings), splits)


def sizes(listing: MaskListing) -> list[int | None]:
    return [None if part is None else len(part) for part in (listing.train, listing.val, listing.test)]


def paired(listing: MaskListing, root: Path) -> list[tuple[str, str]]:
    parts = [part for part in (listing.train, listing.val, listing.test) if part is not None]
    pairs = [pair for part in parts for pair in zip(part.images, part.masks, strict=True)]
    return [(Path(a).relative_to(root).as_posix(), Path(b).relative_to(root).as_posix()) for a, b in pairs]


@pytest.mark.parametrize(
    ("folders", "expected"),
    [
        ({"Train/images": 4, "Train/masks": 4, "Test/images": 2, "Test/masks": 2}, [4, None, 2]),
        ({"TRAINING/Imgs": 4, "TRAINING/Labels": 4, "VALID/Imgs": 2, "VALID/Labels": 2}, [4, 2, None]),
        ({"train_set/image": 3, "train_set/gt": 3, "eval_set/image": 1, "eval_set/gt": 1}, [3, 1, None]),
        ({"train/images": 3, "train/masks": 3, "dev/images": 1, "dev/masks": 1}, [3, 1, None]),
        ({"images/training": 4, "annotations/training": 4, "images/validation": 2, "annotations/validation": 2},
         [4, 2, None]),
        ({"images/train": 4, "annotations_png/train": 4, "images/test": 2, "annotations_png/test": 2}, [4, None, 2]),
        ({"train": 4, "train_labels": 4, "val": 2, "val_labels": 2, "test": 3, "test_labels": 3}, [4, 2, 3]),
        ({"train": 4, "trainannot": 4, "val": 2, "valannot": 2}, [4, 2, None]),
        ({"train_images": 4, "train_masks": 4, "validation_images": 2, "validation_masks": 2}, [4, 2, None]),
        ({"images_train": 4, "labels_train": 4, "images_val": 2, "labels_val": 2}, [4, 2, None]),
        ({"JPEGImages": 10, "SegmentationClass": 10}, [8, None, 2]),
        ({"img": 10, "ground_truth": 10}, [8, None, 2]),
        ({"leftImg8bit/train/aachen": 2, "leftImg8bit/train/ulm": 2, "gtFine/train/aachen": 2, "gtFine/train/ulm": 2,
          "leftImg8bit/val/bonn": 1, "gtFine/val/bonn": 1}, [4, 1, None]),
        ({"images/train": ["a.png", "b.png"], "images/val": ["c.png"], "masks": ["a.png", "b.png", "c.png"]},
         [2, 1, None]),
        ({"data_train/images": 3, "data_train/masks": 3, "data_test/images": 1, "data_test/masks": 1}, [3, None, 1]),
        ({".": 10, "masks": 10}, [8, None, 2]),
        ({"train": 4, "train/masks": 4, "val": 2, "val/masks": 2}, [4, 2, None]),
    ],
)  # fmt: skip
def test_layouts_are_recognized_by_names(
    tmp_path: Path, folders: dict[str, int | list[str]], expected: list[int | None]
) -> None:
    root = write(tmp_path, folders)
    listing = read(root)
    assert sizes(listing) == expected
    pairs = paired(listing, root)
    assert all(Path(image).stem == Path(mask).stem for image, mask in pairs)
    assert not {image for image, _ in pairs} & {mask for _, mask in pairs}
    assert len(set(pairs)) == sum(filter(None, expected))
    assert set(listing.origins) == {
        split for split, n in zip(("train", "val", "test"), expected, strict=True) if n is not None
    }


def test_origins_name_the_folders(tmp_path: Path) -> None:
    listing = read(write(tmp_path, {"Training/images": 5, "Training/masks": 5}))
    assert listing.origins == {"train": "Training/images/", "test": "held out of Training/images/"}


def _message(root: Path, splits: Any = None, **settings: Any) -> str:
    with pytest.raises(UserError) as caught:
        read(root, splits, **settings)
    return str(caught.value)


def test_a_data_set_deeper_than_the_root_is_named(tmp_path: Path) -> None:
    for folders in ({"x/images": 3, "x/masks": 3}, {"x/y/train/images": 3, "x/y/train/masks": 3}):
        root = write(tmp_path / str(len(next(iter(folders)))), folders)
        (root / "classes.txt").unlink()
        inner = next(iter(folders)).split("/train")[0].removesuffix("/images")
        assert _message(root).endswith(f"Set data.root={root / inner}.")


def test_several_data_sets_in_one_folder_are_ambiguous(tmp_path: Path) -> None:
    root = write(tmp_path, {"2019/images": 3, "2019/masks": 3, "2020/images": 2, "2020/masks": 2})
    message = _message(root)
    assert "2019 (6 files), 2020 (4 files)" in message
    assert '\'data.splits={train: ["2019", "2020"]}\'' in message
    assert '\'data.splits={train: "2019", test: "2020"}\'' in message
    assert sizes(read(root, {"train": ["2019"], "test": "2020"})) == [3, None, 2]
    both = read(root, {"train": ["2019", "2020"]})
    assert sizes(both) == [4, None, 1]
    assert both.origins["train"] == "2019/images/, 2020/images/"


def test_two_folders_of_one_split_are_ambiguous(tmp_path: Path) -> None:
    folders = {f"{split}/{kind}": 2 for split in ("train", "training", "val") for kind in ("images", "masks")}
    root = write(tmp_path, folders)
    message = _message(root)
    assert "train/images/ (2 files), training/images/ (2 files) all denote the train split" in message
    chosen = re.findall(r"'data\.splits=(.*?)'", message)
    assert chosen == ["{train: train, val: val}", "{train: [train, training], val: val}"]
    assert sizes(read(root, {"train": ["train", "training"], "val": "val"})) == [4, 2, None]
    assert sizes(read(root, {"train": "train", "val": "val"})) == [2, 2, None]


def test_two_folders_of_masks_are_ambiguous(tmp_path: Path) -> None:
    root = write(
        tmp_path, {"train/images": 3, "train/masks": 3, "train/labels_color": 3, "val/images": 1, "val/masks": 1}
    )
    message = _message(root)
    assert "several folders of masks: train/labels_color/ (3 files), train/masks/ (3 files)" in message
    assert "data.masks.folder=labels_color or data.masks.folder=masks" in message
    listing = read(root, folder="masks")
    assert sizes(listing) == [3, 1, None]
    assert any("Not used" in note and "labels_color" in note for note in listing.notes)


def test_unknown_names_of_folders_are_settings(tmp_path: Path) -> None:
    root = write(tmp_path, {"train/scans": 3, "train/drawn": 3, "val/scans": 1, "val/drawn": 1})
    message = _message(root)
    assert "data.masks.folder=NAME" in message
    assert "train/drawn/ (3 files)" in message
    assert sizes(read(root, folder="drawn", image_folder="scans")) == [3, 1, None]
    with pytest.raises(SettingError, match=r"data\.masks\.folder must be the name of a folder"):
        read(root, folder="paintings", image_folder="scans")


def test_images_at_two_depths_are_ambiguous(tmp_path: Path) -> None:
    root = write(
        tmp_path, {"images": 5, "masks": 5, "train/images": 3, "train/masks": 3, "val/images": 1, "val/masks": 1}
    )
    message = _message(root)
    assert "images/ (5 files)" in message
    assert "'data.splits={train: train/images, val: val/images}'" in message
    assert sizes(read(root, {"train": "train/images", "val": "val/images"})) == [3, 1, None]


def test_a_split_that_a_setting_names(tmp_path: Path) -> None:
    root = write(tmp_path, {"images/a": 3, "masks/a": 3, "images/b": 2, "masks/b": 2})
    assert sizes(read(root, {"train": "images/a", "val": "images/b"})) == [3, 2, None]
    with pytest.raises(SettingError, match=r"data\.splits\.val must be a folder or file in .*, got images/c"):
        read(root, {"train": "images/a", "val": "images/c"})
    with pytest.raises(SettingError, match=r"data\.splits\.train must be a folder"):
        read(root, {"train": "classes.txt"})
    write(root, {"images/lonely": 2})
    assert "there is no matching folder of masks" in _message(root, {"train": "images/lonely"})


def test_images_without_any_masks(tmp_path: Path) -> None:
    root = write(tmp_path, {"train": 4, "train_masks": 4, "val": 2, "val_masks": 2, "test": 7})
    listing = read(root)
    assert sizes(listing) == [4, 2, None]
    assert listing.left_out == {"images without masks (test/)": 7}
    assert any("test/ contains 7 images without masks" in note for note in listing.notes)
    only = write(tmp_path / "only", {"train": 4, "test": 2})
    assert "no folder of masks" in _message(only)
    together = write(tmp_path / "together", {"train": ["a_sat.png", "a_mask.png"]})
    assert "Images and masks must be in separate folders" in _message(together)
    untrained = write(tmp_path / "untrained", {"val/images": 2, "val/masks": 2, "test/images": 2, "test/masks": 2})
    assert "no folder of training images" in _message(untrained)


@pytest.mark.parametrize(
    ("images", "masks", "rule"),
    [
        (["1.jpg", "10.jpg", "2.jpg"], ["1_mask.png", "10_mask.png", "2_mask.png"], "named NAME_mask"),
        (["0001.jpg", "0002.jpg"], ["0001_L.png", "0002_L.png"], "named NAME_L"),
        (["0001.jpg", "0002.jpg"], ["mask_0001.png", "mask_0002.png"], "named mask_NAME"),
        (["0001.jpg", "0002.jpg"], ["0001.jpg.png", "0002.jpg.png"], "named NAME.jpg"),
        (["image_1.jpg", "image_2.jpg"], ["mask_1.png", "mask_2.png"], "matched to images ignoring words"),
        (["a_sat.jpg", "b_sat.jpg"], ["a_mask.png", "b_mask.png"], "matched to images ignoring words"),
        (["IMG1.JPG", "IMG2.JPG"], ["img1.png", "img2.png"], "matched to images ignoring case"),
    ],
)
def test_masks_with_constant_affixes_are_matched(
    tmp_path: Path, images: list[str], masks: list[str], rule: str
) -> None:
    root = write(tmp_path, {"train/images": images, "train/masks": masks, "val/images": images, "val/masks": masks})
    listing = read(root)
    assert [Path(p).name for p in listing.train.images] == sorted(images)
    pairs = zip(listing.train.images, listing.train.masks, strict=True)
    assert {Path(image).name: Path(mask).name for image, mask in pairs} == dict(zip(images, masks, strict=True))
    assert any(rule in note for note in listing.notes)


def test_images_and_masks_that_lack_the_other_one(tmp_path: Path) -> None:
    root = write(tmp_path, {"train/images": 4, "train/masks": 6, "val/images": 1, "val/masks": 1})
    listing = read(root)
    assert listing.left_out == {"masks without an image": 2}
    assert any("2 masks in train/masks/ have no image and are not used: 004.png, 005.png" in n for n in listing.notes)
    affix = write(
        tmp_path / "affix", {"images": ["1.jpg", "2.jpg", "3.jpg"], "masks": ["1_mask.png", "2_mask.png", "x.png"]}
    )
    assert "3.jpg has no mask" in _message(affix)
    assert "3_mask.png" in _message(affix)
    instances = write(
        tmp_path / "instances", {"images": ["1.jpg", "2.jpg"], "masks": ["1_0.png", "1_1.png", "2_0.png"]}
    )
    message = _message(instances)
    assert "several masks for one image: 1_0.png and 1_1.png. There are 3 masks for 2 images." in message


def test_masks_that_are_no_masks(tmp_path: Path) -> None:
    root = write(tmp_path, {"images": 3, "masks": ["000.jpg", "001.jpg", "002.jpg"]})
    assert "masks contains 3 .jpg files. JPEG and WebP change pixel values" in _message(root)
    arrays = write(tmp_path / "arrays", {"images": 2, "masks": []})
    for k in range(2):
        np.save(arrays / "masks" / f"{k:03}.npy", np.zeros(3))
    assert ".npy" in _message(arrays)


def test_files_at_two_depths_of_a_split(tmp_path: Path) -> None:
    root = write(tmp_path, {"train/images": 3, "train/masks": 3, "train": 2, "val/images": 1, "val/masks": 1})
    assert "several folders of images: train/ (2 files), train/images/ (3 files)" in _message(root)
    listing = read(root, image_folder="images")
    assert sizes(listing) == [3, 1, None]
    assert listing.left_out == {"files in other folders": 2}


def test_digits_around_a_name_are_those_of_another_image(tmp_path: Path) -> None:
    root = write(tmp_path / "a", {"images": [f"{k}.png" for k in range(10)], "masks": [f"1{k}.png" for k in range(10)]})
    with pytest.raises(UserError, match=r"images/0\.png has no mask\. .*masks/0\.png"):
        read(root)
    root = write(tmp_path / "b", {"images": [f"{k}.png" for k in range(9)], "masks": [f"{k}0.png" for k in range(9)]})
    with pytest.raises(UserError, match="has no mask"):
        read(root)
    names = [f"{k}.png" for k in range(10)]
    assert sizes(read(write(tmp_path / "c", {"images": names, "masks": [f"00{name}" for name in names]})))[0]
    assert sizes(read(write(tmp_path / "d", {"images": names, "masks": [f"1_{name}" for name in names]})))[0]


CITY = ("color", "instanceIds", "labelIds", "labelTrainIds")


def _city(root: Path) -> Path:
    """Write images and masks with the file names of Cityscapes."""
    names = [f"{city}_{k:06}_000019" for city in ("aachen", "ulm") for k in range(3)]
    return write(
        root,
        {
            "leftImg8bit/train": [f"{name}_leftImg8bit.png" for name in names],
            "gtFine/train": [f"{name}_gtFine_{kind}.png" for name in names for kind in CITY],
            "leftImg8bit/val": [f"{name}_leftImg8bit.png" for name in names[:1]],
            "gtFine/val": [f"{name}_gtFine_{kind}.png" for name in names[:1] for kind in CITY],
        },
    )


def test_one_of_several_kinds_of_masks_is_chosen_by_the_end_of_their_names(tmp_path: Path) -> None:
    root = _city(tmp_path)
    message = _message(root)
    assert "gtFine/train contains several masks for one image: aachen_000000_000019_gtFine_color.png and" in message
    assert "There are 24 masks for 6 images." in message
    assert "data.masks.suffix=_gtFine_labelIds (other suffixes: _gtFine_labelTrainIds, _gtFine_color," in message
    assert "data=cityscapes" in message
    listing = read(root, suffix="_gtFine_labelIds")
    assert sizes(listing) == [6, 1, None]
    assert all(
        mask.split("/")[-1] == image.split("/")[-1].replace("leftImg8bit", "gtFine_labelIds")
        for image, mask in paired(listing, root)
    )
    assert listing.left_out == {"masks with another suffix": 21}
    assert any("named NAME_gtFine_labelIds (images: NAME_leftImg8bit)" in note for note in listing.notes)
    with pytest.raises(SettingError, match=r"data\.masks\.suffix must be .*, got _ids\. Found: aachen"):
        read(root, suffix="_ids")


def test_two_kinds_of_masks_of_images_with_plain_names(tmp_path: Path) -> None:
    names = [f"{k}_{kind}.png" for k in range(4) for kind in ("depth", "label")]
    root = write(tmp_path, {"images": [f"{k}.png" for k in range(4)], "masks": names})
    assert "data.masks.suffix=_label (other suffixes: _depth)" in _message(root)
    assert {mask for _, mask in paired(read(root, suffix="_label"), root)} == {f"masks/{k}_label.png" for k in range(4)}


@pytest.mark.parametrize(
    ("image", "mask", "rule"),
    [
        ("sat_{}", "map_{}", "map_NAME (images: sat_NAME)"),
        ("{}_ir", "{}_ids", "NAME_ids (images: NAME_ir)"),
        ("a-{}-x", "b-{}-y", "b-NAME-y (images: a-NAME-x)"),
    ],
)
def test_a_part_of_all_names_may_differ(tmp_path: Path, image: str, mask: str, rule: str) -> None:
    numbers = [7, 8, 10, 11]
    root = write(
        tmp_path,
        {"images": [f"{image.format(k)}.png" for k in numbers], "masks": [f"{mask.format(k)}.png" for k in numbers]},
    )
    listing = read(root)
    assert set(paired(listing, root)) == {
        (f"images/{image.format(k)}.png", f"masks/{mask.format(k)}.png") for k in numbers
    }
    assert any(rule in note for note in listing.notes)


def test_names_that_do_not_match_are_listed(tmp_path: Path) -> None:
    shifted = write(
        tmp_path / "shifted", {"images": [f"{k}.png" for k in range(5)], "masks": [f"{k}.png" for k in range(1, 6)]}
    )
    assert "images/0.png has no mask" in _message(shifted)
    assert "1 mask has no image: 5." in _message(shifted)
    others = write(
        tmp_path / "others", {"images": [f"p{k}q.png" for k in range(5)], "masks": [f"x{k:03}.png" for k in range(4)]}
    )
    expected = "Names of 5 images: p0q, p1q, p2q and 2 more. Names of 4 masks: x000, x001, x002 and 1 more."
    assert expected in _message(others)


def test_the_values_of_the_masks_are_shown_if_there_is_no_class_list(tmp_path: Path) -> None:
    root = write(tmp_path, {"images": 6, "masks": 6})
    (root / "classes.txt").unlink()
    for path in sorted((root / "masks").iterdir())[:2]:
        Image.fromarray(np.full((4, 6), 255, dtype=np.uint8)).save(path)
    message = _message(root)
    assert "has no classes.txt" in message
    assert "The following values were found in 6 of 6 training masks: 0 (in 2), 1 (in 2), 255 (in 2)." in message
    assert "data.masks.values={VALUE: NAME, …}" in message
    for path in (root / "masks").iterdir():
        Image.fromarray(np.full((4, 6, 3), (9, 8, 7), dtype=np.uint8)).save(path)
    assert "The masks contain colors" in _message(root)
