"""Tests of the interpretation of masks: value maps, colors, palettes, EXIF orientations and ambiguous masks."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from efficient_ft.config.schema import DataConfig, MaskConfig
from efficient_ft.core.errors import SettingError, UserError
from efficient_ft.core.input_spec import IGNORED, InputSpec
from efficient_ft.data import SegmentationData, open_data
from efficient_ft.data.masks import read_mask

SPEC = InputSpec((32, 32), (0.5, 0.5, 0.5), (0.25, 0.25, 0.25), "bilinear")
SIZE = (8, 10)


def ids(number: int, values: tuple[int, ...] = (0, 1)) -> np.ndarray:
    """Return a mask (H, W) that contains all the values and differs for each number."""
    return np.asarray(values)[np.add.outer(np.arange(8), np.arange(10) + number) // 3 % len(values)].astype(np.uint8)


def write(
    root: Path,
    make: Callable[[int], Image.Image],
    classes: str | None = "background\ncell\n",
    counts: tuple[int, int] = (6, 3),
) -> Path:
    number = 0
    for split, count in zip(("train", "val"), counts, strict=True):
        for kind in ("images", "masks"):
            (root / split / kind).mkdir(parents=True)
        for k in range(count):
            mask = make(number)
            Image.fromarray(np.zeros((mask.height, mask.width, 3), np.uint8)).save(root / split / "images" / f"{k}.jpg")
            mask.save(root / split / "masks" / f"{k}.png")
            number += 1
    if classes is not None:
        (root / "classes.txt").write_text(classes)
    return root


def gray(*values: int) -> Callable[[int], Image.Image]:
    return lambda number: Image.fromarray(ids(number, values))


def opened(root: Path, masks: dict[str, Any] | None = None, **changes: Any) -> SegmentationData:
    plain = {"name": "mask_folder", "root": str(root), "batch_size": 2, "num_workers": 0, **changes}
    data = open_data(DataConfig(masks=MaskConfig(**masks or {}), **plain), SPEC, 0)
    assert isinstance(data, SegmentationData)
    return data


def message(root: Path, **changes: Any) -> str:
    with pytest.raises(UserError) as caught:
        opened(root, **changes)
    return str(caught.value)


def first(data: SegmentationData) -> np.ndarray:
    return data._dataset("train", training=False).read(0)[1]


def test_masks_of_0_and_255_are_ambiguous(tmp_path: Path) -> None:
    root = write(tmp_path, gray(0, 255))
    text = message(root)
    assert re.search(r"only the values 0 \(\d\d\.\d\d % of the pixels\), 255 \(\d\d\.\d\d % of the pixels\)", text)
    assert "all 6 masks were decoded" in text
    assert "cell has no pixel" in text
    assert "'data.masks.values={0: background, 255: cell}'" in text
    assert "data.masks.values=ids" in text
    data = opened(root, {"values": {0: "background", 255: "cell"}})
    assert (first(data) == ids(0)).all()
    assert data.classes.ids == (0, 255)
    assert (first(opened(root, {"values": {255: 0, 0: 1}})) == 1 - ids(0)).all()
    assert set(np.unique(first(opened(root, {"values": "ids"})))) == {0, IGNORED}
    assert set(np.unique(first(opened(root, {"ignored": [255]})))) == {0, IGNORED}


@pytest.mark.parametrize(
    ("values", "classes", "expected"),
    [
        ((0, 255), "a\nb\nc\n", "b, c have no pixel"),
        ((1, 255), "a\nb\n", "a has no pixel"),
        ((0, 1, 255), "a\nb\nc\n", "'data.masks.values={0: a, 1: b, 255: c}'"),
        ((0, 1), "a\nb\nc\n", r"the data set has 3 classes, and c has no pixel"),
        ((0,), "a\nb\n", "Every pixel belongs to the class a, and b has no pixel"),
        ((0, 128, 255), "a\nb\n", "have values that belong to no class: 0 "),
        ((0, 128, 255), "a\nb\nc\n", "'data.masks.values={0: a, 128: b, 255: c}'"),
        ((1, 2), "a\nb\n", "'data.masks.values={1: a, 2: b}'"),
        ((0, 255), "a\nb\nc\n", "{0: a, 255: b}' and 'data.masks.classes=[a, b]'"),
        ((255,), "a\nb\n", "No pixel of the train masks has a label"),
    ],
)
def test_values_that_suggest_another_reading(
    tmp_path: Path, values: tuple[int, ...], classes: str, expected: str
) -> None:
    assert re.search(
        re.escape(expected) if "'" in expected else expected, message(write(tmp_path, gray(*values), classes))
    )


@pytest.mark.parametrize(
    ("values", "classes"),
    [
        ((0, 1), "a\nb\n"),
        ((0, 1, 255), "a\nb\n"),
        ((0, 1, 2, 255), "a\nb\nc\nd\n"),
        ((0, 255), "a\n" * 0 + "0 a\n255 b\n"),
    ],
)
def test_values_with_one_reading(tmp_path: Path, values: tuple[int, ...], classes: str) -> None:
    assert opened(write(tmp_path, gray(*values), classes)).num_classes in (2, 4)


def test_a_second_class_is_looked_for_in_many_masks(tmp_path: Path) -> None:
    """The second class is found even if only one of 100 masks contains it, after the masks that are decoded first."""
    root = write(tmp_path, lambda n: Image.fromarray(ids(n, (0, 1, 255) if n == 1 else (0, 255))), counts=(100, 1))
    Image.fromarray(ids(0)).save(root / "val/masks/0.png")
    assert opened(root).num_classes == 2


def test_the_validation_masks_may_have_other_values(tmp_path: Path) -> None:
    root = write(tmp_path, lambda n: Image.fromarray(ids(n, (0, 1) if n < 6 else (0, 255))))
    assert "The val masks contain only the values 0" in message(root)
    several = opened(root, {"values": {0: "background", 1: "cell", 255: "cell"}})
    assert several.classes.ids == (0, 1)
    assert set(np.unique(several._dataset("val", training=False).read(0)[1])) == {0, 1}


def test_an_evaluation_mask_without_labels_counts_for_nothing(tmp_path: Path) -> None:
    root = write(tmp_path, lambda n: Image.fromarray(ids(n) if n != 7 else np.full(SIZE, 255, np.uint8)))
    data = opened(root)
    assert (data._dataset("val", training=False).read(1)[1] == IGNORED).all()
    assert sum(len(targets) for _, targets in data.eval_loader("val")) == 3
    Image.fromarray(np.full(SIZE, 255, np.uint8)).save(root / "train/masks/2.png")
    with pytest.raises(UserError, match=r"2\.png: no pixel has a label"):
        list(opened(root).train_loader())


def test_classes_may_come_from_the_map_of_values(tmp_path: Path) -> None:
    root = write(tmp_path, gray(0, 100, 200), None)
    assert "has no classes.txt" in message(root)
    data = opened(root, {"values": {0: "rest", 100: "void", 200: "cell"}})
    assert data.class_names == ["rest", "cell"]
    found = first(data)
    assert (found == np.asarray([0, IGNORED, 1])[ids(0, (0, 1, 2))]).all()


@pytest.mark.parametrize(
    ("masks", "expected"),
    [
        (
            {"values": {0: "background", 255: "sell"}},
            r"data\.masks\.values\.255 must be .*got sell\. Did you mean 'cell'",
        ),
        ({"values": {0: "background", 255: 7}}, r"data\.masks\.values\.255 must be"),
        ({"values": {0: "background"}}, r"a mapping with a value for each class, .*Add cell"),
        ({"values": {0: "background", 255: "cell"}, "ignored": [255]}, r"data\.masks\.ignored must be a value that"),
        ({"colors": {"background": [0, 0, 0]}}, r"a color for each class, .*Add a color for the class cell"),
        ({"colors": {"background": [0, 0, 0], "cell": [0, 0, 0]}}, r"background and cell have the same color"),
        (
            {"colors": {"background": [0, 0, 0], "cell": [1, 0, 0], "sea": [2, 0, 0]}},
            r"must be one of background, cell",
        ),
        ({"palette": "color"}, r"data\.masks\.palette must be index or auto, because the classes have no colors"),
        (
            {"palette": "color", "values": {0: "background", 255: "cell"}},
            r"must be index or auto, because data\.masks\.values is set",
        ),
        ({"classes": ["a", "b", "a"]}, r"data\.masks\.classes: the class a occurs twice"),
    ],
)
def test_settings_that_do_not_fit(tmp_path: Path, masks: dict[str, Any], expected: str) -> None:
    with pytest.raises(UserError, match=expected):
        opened(write(tmp_path, gray(0, 255)), masks)


def test_negative_values_are_not_mapped(tmp_path: Path) -> None:
    root = write(tmp_path, gray(0, 1))
    for path in (root / "train/masks").iterdir():
        Image.fromarray(ids(0).astype(np.int32) - 1).save(path.with_suffix(".tif"))
        path.unlink()
    assert "train masks have values outside of the range 0 to 65535: -1 (" in message(root)


def test_masks_of_one_bit(tmp_path: Path) -> None:
    def bits(number: int) -> Image.Image:
        return Image.fromarray(ids(number).astype(bool))

    root = write(tmp_path, bits)
    assert (first(opened(root)) == ids(0)).all()
    assert (first(opened(root, {"values": {0: "background", 255: "cell"}})) == ids(0)).all()
    assert (first(opened(root, {"values": {1: "background", 0: "cell"}})) == 1 - ids(0)).all()
    (root / "classes.txt").write_text("background 0 0 0\ncell 255 255 255\n")
    assert (first(opened(root)) == ids(0)).all()


COLORS = np.array([[128, 128, 128], [128, 0, 0], [0, 0, 0]], dtype=np.uint8)
LIST = "sky 128 128 128\nbuilding 128 0 0\nvoid 0 0 0\n"


def rgb(number: int) -> Image.Image:
    return Image.fromarray(COLORS[ids(number, (0, 1, 2))])


def rgba(number: int) -> Image.Image:
    image = rgb(number)
    image.putalpha(255)
    return image


def indexed(number: int) -> Image.Image:
    """Return a palette image whose palette has a different order for each number."""
    order = np.roll(np.arange(3), number)
    image = Image.fromarray(np.argsort(order)[ids(number, (0, 1, 2))].astype(np.uint8), mode="P")
    image.putpalette(COLORS[order].flatten().tolist())
    return image


EXPECTED = np.array([0, 1, IGNORED], dtype=np.uint8)


@pytest.mark.parametrize("make", [rgb, rgba, indexed])
def test_masks_are_mapped_by_color(tmp_path: Path, make: Callable[[int], Image.Image]) -> None:
    root = write(tmp_path, make, LIST)
    data = opened(root)
    assert data.class_names == ["sky", "building"]
    dataset = data._dataset("train", training=False)
    for number in range(6):
        assert (dataset.read(number)[1] == EXPECTED[ids(number, (0, 1, 2))]).all()
    (root / "classes.txt").write_text("sky\nbuilding\n")
    colors = {"sky": [128, 128, 128], "building": "#800000", "void": [0, 0, 0]}
    assert (first(opened(root, {"colors": colors})) == EXPECTED[ids(0, (0, 1, 2))]).all()
    (root / "classes.txt").unlink()
    assert opened(root, {"colors": colors}).class_names == ["building", "sky"]


def test_colors_of_no_class_are_counted(tmp_path: Path) -> None:
    root = write(tmp_path, rgb, "sky 128 128 128\nbuilding 128 0 0\n")
    with pytest.raises(UserError, match=r"colors without a class: 0 0 0 \(\d+ pixels\)\. Add these colors"):
        list(opened(root).train_loader())
    (root / "classes.txt").write_text("sky\nbuilding\n")
    with pytest.raises(UserError, match=r"the mask contains colors \(mode RGB\).*data\.masks\.colors"):
        list(opened(root).train_loader())


def test_palettes_that_differ_are_rejected(tmp_path: Path) -> None:
    root = write(tmp_path, indexed, "sky\nbuilding\nroad\n")
    text = message(root)
    assert "The palettes of the masks differ (" in text
    assert "Index 0 is the color 128 128 128 in" in text
    assert "data.masks.palette=index" in text
    assert "data.masks.colors=" in text
    assert opened(root, {"palette": "index"}).num_classes == 3
    same = write(tmp_path / "same", lambda n: indexed(0), "sky\nbuilding\nroad\n")
    assert opened(same).num_classes == 3


def test_gray_palettes_in_another_order_are_ambiguous(tmp_path: Path) -> None:
    def make(number: int) -> Image.Image:
        """Return a mask as some programs write it: gray values 0, 3 and 2 stored as indices of a palette."""
        image = Image.fromarray(ids(number, (0, 1, 2)), mode="P")
        image.putpalette([0, 0, 0, 3, 3, 3, 2, 2, 2])
        return image

    root = write(tmp_path, make, "a\nb\nc\nd\n")
    assert "Index 1 has the gray value 3, and both numbers are class ids. Set data.masks.palette=index" in message(root)
    assert (first(opened(root, {"palette": "index"})) == ids(0, (0, 1, 2))).all()


def test_ids_of_masks_with_a_palette_although_the_list_has_colors(tmp_path: Path) -> None:
    def make(number: int) -> Image.Image:
        image = Image.fromarray(ids(number, (0, 1, 2)), mode="P")
        image.putpalette([60, 0, 80, 30, 140, 140, 250, 230, 30])
        return image

    root = write(tmp_path, make, LIST)
    with pytest.raises(UserError, match=r"indices instead, set data\.masks\.palette=index"):
        list(opened(root).train_loader())
    assert (first(opened(root, {"palette": "index"})) == EXPECTED[ids(0, (0, 1, 2))]).all()
    plain = write(tmp_path / "plain", gray(0, 1, 2), LIST)
    assert (first(opened(plain)) == EXPECTED[ids(0, (0, 1, 2))]).all()


@pytest.mark.parametrize("orientation", range(2, 9))
@pytest.mark.parametrize("square", [False, True])
def test_masks_of_images_with_an_orientation(tmp_path: Path, orientation: int, square: bool) -> None:
    root = write(tmp_path, gray(0, 1))
    stored = np.zeros((10 if square else 8, 10), dtype=np.uint8)
    stored[:3, :4] = 1
    exif = Image.Exif()
    exif[274] = orientation
    image, mask = root / "train/images/0.png", root / "train/masks/0.png"
    (root / "train/images/0.jpg").unlink()
    Image.fromarray(stored * 255).save(image, exif=exif)
    Image.fromarray(stored).save(mask)

    def agrees(exif: str) -> bool:
        picture, found = opened(root, {"exif": exif})._dataset("train", training=False).read(0)
        return bool((np.asarray(picture)[..., 0] // 255 == found).all())

    assert agrees("raw")
    if orientation < 5 or square:
        text = message(root)
        assert f"1 of 9 images has an EXIF orientation ({orientation})" in text
        assert "data.masks.exif=upright" in text
        assert "data.masks.exif=raw" in text
        assert not agrees("upright")
    else:
        assert agrees("auto")
        with pytest.raises(UserError, match="the size of the mask is 10×8, but the size of its image is 8×10"):
            agrees("upright")
    upright = opened(root, {"exif": "raw"})._dataset("train", training=False).read(0)[1]
    Image.fromarray(upright).save(mask)
    assert agrees("upright")
    if orientation >= 5 and not square:
        assert agrees("auto")


def test_three_equal_channels_are_ids(tmp_path: Path) -> None:
    root = write(tmp_path, lambda n: Image.fromarray(ids(n)).convert("RGB"))
    assert (first(opened(root)) == ids(0)).all()


def test_smoothed_masks_are_named(tmp_path: Path) -> None:
    smooth = np.arange(80, dtype=np.uint8).reshape(SIZE)
    Image.fromarray(smooth).save(tmp_path / "m.png")
    classes = opened(write(tmp_path / "set", gray(0, 1))).classes
    with pytest.raises(UserError, match="smoothed or converted"):
        read_mask(str(tmp_path / "m.png"), classes)


def test_a_resized_mask_is_named(tmp_path: Path) -> None:
    root = write(tmp_path, gray(0, 1))
    Image.fromarray(ids(0)).resize((20, 16), Image.Resampling.NEAREST).save(root / "train/masks/0.png")
    with pytest.raises(UserError, match=r"mask is 20×16, but the size of its image is 10×8.*If the mask was resized"):
        first(opened(root))


def test_published_sets_have_no_such_settings() -> None:
    from efficient_ft.config.kinds import _check_masks

    for settings in ({"values": "ids"}, {"colors": {"a": [0, 0, 0]}}, {"palette": "index"}, {"folder": "masks"}):
        with pytest.raises(SettingError, match=r"data\.masks\.\w+ must be left out, got .* defines this setting"):
            _check_masks("camvid", MaskConfig(**settings))  # type: ignore[arg-type]
    _check_masks("camvid", MaskConfig(exif="raw"))
    for bad in ({"values": "ids", "colors": {"a": [0, 0, 0]}}, {"palette": "index", "colors": {"a": [0, 0, 0]}}):
        with pytest.raises(SettingError, match=r"data\.masks"):
            _check_masks("mask_folder", MaskConfig(**bad))  # type: ignore[arg-type]
    with pytest.raises(SettingError, match=r"data\.masks\.colors\.a must be"):
        _check_masks("mask_folder", MaskConfig(colors={"a": "red"}))


def test_masks_that_mostly_cannot_be_used_stop_before_the_training(tmp_path: Path) -> None:
    root = write(tmp_path, rgb, "sky\nbuilding\n")
    assert message(root).startswith("6 of 6 train masks that were examined cannot be used. ")
    assert "the mask contains colors (mode RGB)" in message(root, on_corrupt="skip")
    for path in (root / "train/masks").iterdir():
        Image.fromarray(ids(0)).save(path)
    Image.fromarray(COLORS[ids(0, (0, 1))]).save(root / "train/masks/0.png")
    for path in (root / "val/masks").iterdir():
        Image.fromarray(ids(0)).save(path)
    assert opened(root, on_corrupt="skip").splits == {"train": 5, "val": 3}


def test_masks_of_0_and_1_among_masks_of_0_and_255_are_ambiguous(tmp_path: Path) -> None:
    root = write(tmp_path, lambda number: Image.fromarray(ids(number) * (255 if number % 2 else 1)))
    text = message(root)
    assert "Of 6 examined train masks, 3 contain the value 1, and 3 contain only the values 0 and 255." in text
    assert "'data.masks.values={0: background, 1: cell, 255: cell}'" in text
    data = opened(root, {"values": {0: "background", 1: "cell", 255: "cell"}})
    assert set(np.unique(np.stack([data._dataset("train", training=False).read(k)[1] for k in (0, 1)]))) == {0, 1}
    assert opened(root, {"values": "ids"}).num_classes == 2


def test_masks_with_borders_of_255_have_one_reading(tmp_path: Path) -> None:
    opened(write(tmp_path, lambda number: Image.fromarray(ids(number, (0, 1, 255) if number % 2 else (0, 255)))))
