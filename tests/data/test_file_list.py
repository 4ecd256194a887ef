"""Tests of links out of a data set, which are rejected by default and allowed by `data.follow_links`."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from efficient_ft.config.schema import DataConfig, MaskConfig, TextConfig
from efficient_ft.core.errors import UserError
from efficient_ft.data import read_data
from tests.data.mask_pictures import write_folder
from tests.data.pictures import save
from tests.models.text_models import write_texts


def _images(root: Path) -> DataConfig:
    for k, name in enumerate(("train/a/0", "train/a/1", "train/b/0", "train/b/1", "test/a/0", "test/b/0")):
        save(root / f"{name}.jpg", k)
    return DataConfig(name="folder", root=str(root))


def _classes(root: Path) -> DataConfig:
    for k, name in enumerate(("a/0", "a/1", "b/0", "b/1")):
        save(root / f"{name}.jpg", k)
    return DataConfig(name="folder", root=str(root))


def _masks(root: Path) -> DataConfig:
    return DataConfig(name="mask_folder", root=str(write_folder(root, {"train": 3, "val": 2})), masks=MaskConfig())


def _rows(root: Path) -> DataConfig:
    root.mkdir(parents=True)
    write_texts(root / "train.csv", 8)
    write_texts(root / "test.csv", 4)
    return DataConfig(name="text_folder", root=str(root), text=TextConfig())


def _texts(root: Path) -> DataConfig:
    for k, name in enumerate(("train/a/0", "train/a/1", "train/b/2", "train/b/3", "test/a/4", "test/b/5")):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / f"{name}.txt").write_text(f"text {k}")
    return DataConfig(name="text_folder", root=str(root), text=TextConfig())


def _sizes(config: DataConfig) -> list[int]:
    listing = read_data(config)
    return [len(part) for part in (listing.train, listing.val, listing.test) if part is not None]


@pytest.mark.parametrize(
    ("make", "moved"),
    [
        (_images, "train/b/1.jpg"),
        (_images, "test/a"),
        (_images, "train"),
        (_classes, "b/0.jpg"),
        (_classes, "b"),
        (_masks, "classes.txt"),
        (_masks, "train/images/001.jpg"),
        (_masks, "train/masks/001.png"),
        (_masks, "train/masks"),
        (_masks, "val"),
        (_rows, "test.csv"),
        (_texts, "train/b/2.txt"),
        (_texts, "train/b"),
        (_texts, "test"),
    ],
)
@pytest.mark.parametrize("by", ["path", "relative path", "a link inside"])
def test_a_link_out_of_the_data_set_is_refused_or_followed_and_said(
    make: Callable[[Path], DataConfig], moved: str, by: str, tmp_path: Path
) -> None:
    config = make(tmp_path / "data")
    expected = _sizes(config)
    link, target = tmp_path / "data" / moved, tmp_path / "elsewhere"
    shutil.move(link, target)
    if by == "a link inside":
        (tmp_path / "data" / ".hop").symlink_to(target)
        link.symlink_to(tmp_path / "data" / ".hop")
    else:
        link.symlink_to(target if by == "path" else os.path.relpath(target, link.parent))
    with pytest.raises(UserError) as caught:
        read_data(config)
    assert str(caught.value) == (
        f"The path {link} is a link to {target}, which is outside of {tmp_path / 'data'}. Set data.follow_links=true to"
        " follow such links, or remove the link."
    )
    follows = config.model_copy(update={"follow_links": True})
    assert _sizes(follows) == expected
    assert str(link) in " ".join(read_data(follows).notes)


def test_the_folder_itself_may_be_a_link_and_links_inside_of_it_are_used(tmp_path: Path) -> None:
    _images(tmp_path / "data")
    save(tmp_path / "data/pool/0.jpg", 9)
    (tmp_path / "data/train/a/9.jpg").symlink_to("../../pool/0.jpg")
    (tmp_path / "link").symlink_to("data")
    assert _sizes(DataConfig(name="folder", root=str(tmp_path / "link"))) == [5, 2]


def test_classes_named_like_splits_change_nothing(tmp_path: Path) -> None:
    """A class may be named like a split and contain folders. A link to an image of another class is not counted."""
    config = _classes(tmp_path).model_copy(update={"splits": {"train": "."}})
    for k, name in enumerate(("train/0", "train/1", "test/inside/0", "test/inside/1")):
        save(tmp_path / f"{name}.jpg", 5 + k)
    (tmp_path / "b/of_a.jpg").symlink_to("../a/0.jpg")
    listing = read_data(config)
    assert (len(listing.class_names), sum(_sizes(config))) == (4, 8)
    assert "already part of the data set are not counted: " in " ".join(listing.notes)


def test_links_that_are_not_used_are_not_refused(tmp_path: Path) -> None:
    config = _images(tmp_path / "data")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "data/annotations").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "data/latest").symlink_to("train")
    assert _sizes(config) == [4, 2]
    assert read_data(config).notes[0].endswith(" are not used: annotations, latest.")


def test_links_between_the_parts_of_a_segmentation_data_set_are_refused(tmp_path: Path) -> None:
    """A link from one split to another would put an image into both the training split and an evaluation split."""
    config = _masks(tmp_path)
    (tmp_path / "val/images/000.jpg").unlink()
    (tmp_path / "val/images/000.jpg").symlink_to("../../train/images/000.jpg")
    with pytest.raises(UserError, match=r"already part of the data set are not counted: .*val/images/000\.jpg"):
        read_data(config)
    (tmp_path / "test").symlink_to("train")
    with pytest.raises(UserError, match=r"test is a link to .*, which is inside or above the data set"):
        read_data(config)
