"""Tests of published segmentation data sets with small files in the layouts of their publishers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from efficient_ft.config.schema import DataConfig, MaskConfig
from efficient_ft.core.errors import UserError
from efficient_ft.core.input_spec import IGNORED
from efficient_ft.data import class_count, missing_data, read_data
from efficient_ft.data.masks import MaskListing, read_mask
from tests.data.mask_pictures import write_folder


def _config(name: str, root: Path) -> DataConfig:
    return DataConfig(name=name, root=str(root), masks=MaskConfig())  # type: ignore[arg-type]


def _write(path: Path, values: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(values.astype(np.uint8)).save(path)


def _read(name: str, root: Path) -> MaskListing:
    listing = read_data(_config(name, root))
    assert isinstance(listing, MaskListing)
    return listing


def test_cityscapes(tmp_path: Path) -> None:
    for split, city in (("train", "aachen"), ("train", "bochum"), ("val", "munster")):
        stem = f"{city}_000000_000019"
        _write(tmp_path / "leftImg8bit" / split / city / f"{stem}_leftImg8bit.png", np.zeros((4, 5, 3)))
        _write(tmp_path / "gtFine" / split / city / f"{stem}_gtFine_labelIds.png", np.array([[7, 8, 0, 33, 255]] * 4))
    config = _config("cityscapes", tmp_path)
    assert missing_data(config) is None
    assert class_count(config) == 19
    listing = _read("cityscapes", tmp_path)
    assert (len(listing.train), listing.val) == (2, None)
    assert listing.test is not None
    assert read_mask(listing.test.masks[0], listing.classes)[0].tolist() == [0, 1, IGNORED, 18, IGNORED]
    next(iter((tmp_path / "gtFine" / "train" / "aachen").iterdir())).unlink()
    with pytest.raises(UserError, match=r"aachen_000000_000019_gtFine_labelIds\.png: the file does not exist"):
        _read("cityscapes", tmp_path)


def test_augmented_voc(tmp_path: Path) -> None:
    root = tmp_path / "VOCdevkit" / "VOC2012"
    for stem in ("2007_000032", "2008_000002", "2007_000033"):
        _write(root / "JPEGImages" / f"{stem}.jpg", np.zeros((4, 5, 3)))
        _write(root / "SegmentationClassAug" / f"{stem}.png", np.array([[0, 1, 20, 255, 15]] * 4))
    lists = root / "ImageSets" / "Segmentation"
    lists.mkdir(parents=True)
    (lists / "val.txt").write_text("2007_000033\n")
    config = _config("voc2012_aug", tmp_path)
    assert missing_data(config) is None
    with pytest.raises(UserError, match=r"does not contain trainaug\.txt"):
        _read("voc2012_aug", tmp_path)
    (lists / "trainaug.txt").write_text(
        "/JPEGImages/2007_000032.jpg /SegmentationClassAug/2007_000032.png\n2008_000002\n"
    )
    listing = _read("voc2012_aug", tmp_path)
    assert [Path(p).stem for p in listing.train.images] == ["2007_000032", "2008_000002"]
    assert listing.test is not None
    assert read_mask(listing.test.masks[0], listing.classes)[0].tolist() == [0, 1, 20, IGNORED, 15]
    assert class_count(config) == 21
    for damaged, said in ((b"2007_\xc1", r"val\.txt cannot be read"), (b"\n", r"val\.txt contains no names of images")):
        (lists / "val.txt").write_bytes(damaged)
        with pytest.raises(UserError, match=said):
            _read("voc2012_aug", tmp_path)


def test_links_out_of_a_published_set_of_masks_are_refused(tmp_path: Path) -> None:
    root = write_folder(tmp_path / "data" / "camvid", {"train": 2, "val": 1, "test": 1}, classes=False)
    image = next((root / "train" / "images").iterdir())
    image.rename(tmp_path / "elsewhere.png")
    image.symlink_to(tmp_path / "elsewhere.png")
    with pytest.raises(UserError, match=r"is a link to .*elsewhere\.png, which is outside of"):
        _read("camvid", tmp_path / "data")
    config = _config("camvid", tmp_path / "data").model_copy(update={"follow_links": True})
    assert len(read_data(config).train) == 2


def test_camvid_with_and_without_its_list_of_classes(tmp_path: Path) -> None:
    root = write_folder(tmp_path / "camvid", {"train": 2, "val": 1, "test": 1}, classes=False)
    assert class_count(_config("camvid", tmp_path)) == 11
    for place in (tmp_path, root):
        listing = _read("camvid", place)
        assert len(listing.classes.names) == 11
        assert listing.classes.ignored == {11, IGNORED}
    (root / "classes.txt").write_text("a\nb\nc\nd\n")
    assert _read("camvid", root).classes.names == ("a", "b", "c", "d")


@pytest.mark.parametrize("name", ["cityscapes", "voc2012_aug", "camvid"])
def test_what_is_missing_is_said_with_its_source(tmp_path: Path, name: str) -> None:
    message = missing_data(_config(name, tmp_path))
    assert message is not None
    assert message.startswith(f"data={name} (")
    assert "Download the data set from http" in message
    with pytest.raises(UserError, match=f"data={name}"):
        read_data(_config(name, tmp_path))
