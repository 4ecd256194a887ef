"""Tests of decoded images on disk: batches have the same bits, and no file is decoded twice."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from efficient_ft.config import DataConfig
from efficient_ft.core.errors import SettingError, UserError
from efficient_ft.core.format import format_bytes
from efficient_ft.data import ImageData, open_data, row_store, sources, transforms
from efficient_ft.data.listing import Listing
from efficient_ft.data.row_store import StoreFullError
from tests.data.pictures import SPEC, epoch_of, truncate

Make = Callable[..., Path]


@pytest.fixture
def opened(folders: Make, data_config: Callable[..., DataConfig], tmp_path: Path) -> Callable[..., ImageData]:
    """Return a function that opens 12 images with `keep_decoded` and other settings."""
    root = folders(train={"a": 5, "b": 5}, val={"a": 1, "b": 1})

    def make(keep_decoded: str = "on", epochs: int = 3, **settings: Any) -> ImageData:
        settings = {"root": str(root), "decoded_folder": str(tmp_path / "decoded"), **settings}
        data = open_data(data_config("folder", keep_decoded=keep_decoded, **settings), SPEC, 5)
        data.keep_decoded(epochs)
        return data

    return make


def no_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: str, *options: Any) -> Image.Image:
        raise UserError(f"{path} is decoded again")

    monkeypatch.setattr(transforms, "read_image", refuse)


def evaluated(data: ImageData) -> torch.Tensor:
    return torch.cat([images for images, _ in data.eval_loader("val")])


@pytest.mark.parametrize("resize", ["input", 40])
@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_files_are_decoded_once(
    opened: Callable[..., ImageData], monkeypatch: pytest.MonkeyPatch, resize: str | int, workers: int
) -> None:
    augment = {"name": "resize_crop", "resize": resize}
    plain = opened("off", augment=augment)
    kept = opened(augment=augment, num_workers=workers)
    assert torch.equal(epoch_of(kept)[0], epoch_of(plain)[0])
    assert torch.equal(evaluated(kept), evaluated(plain))
    expected = epoch_of(plain, epoch=2)[0], evaluated(plain)
    no_decoding(monkeypatch)
    for again in (kept, opened(augment=augment, num_workers=workers)):  # the same run and another run
        assert torch.equal(epoch_of(again, epoch=2)[0], expected[0])
        assert torch.equal(evaluated(again), expected[1])
    (note,) = [note for note in kept.report()["notes"] if "data.keep_decoded" in note]
    pixels = 10 * (16 if resize == "input" else 40) ** 2 + 2 * 16**2
    assert f"({format_bytes(3 * pixels)}) may be deleted" in note


def test_images_are_decoded_in_advance(opened: Callable[..., ImageData], monkeypatch: pytest.MonkeyPatch) -> None:
    expected = epoch_of(opened("off"))[0], evaluated(opened("off"))
    opened().decode(60.0)
    opened().decode(60.0)
    opened("off").decode(60.0)
    no_decoding(monkeypatch)
    assert torch.equal(epoch_of(opened())[0], expected[0])
    assert torch.equal(evaluated(opened()), expected[1])


def test_the_time_of_decoding_in_advance_is_limited(
    opened: Callable[..., ImageData], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("efficient_ft.data.image_data._TOGETHER", 1)
    opened().decode(-1.0)
    no_decoding(monkeypatch)
    with pytest.raises(UserError, match="is decoded again"):
        evaluated(opened())


def test_corrupt_files_are_skipped_when_images_are_decoded_in_advance(
    opened: Callable[..., ImageData], tmp_path: Path
) -> None:
    data = opened()
    truncate(next(tmp_path.rglob("train/b/*.jpg")))
    data.decode(60.0)
    with pytest.raises(UserError, match="not readable as an image"):
        epoch_of(data)


def test_a_changed_file_is_decoded_again(opened: Callable[..., ImageData], tmp_path: Path) -> None:
    before = epoch_of(opened())[0]
    file = next(tmp_path.rglob("train/a/*.jpg"))
    Image.new("RGB", (50, 50), (255, 0, 0)).save(file)
    after = epoch_of(opened())[0]
    assert torch.equal(after, epoch_of(opened("off"))[0])
    assert (after != before).flatten(1).any(1).sum() == 1


def test_a_damaged_image_is_decoded_again(opened: Callable[..., ImageData], tmp_path: Path) -> None:
    expected = epoch_of(opened())[0]
    for rows in tmp_path.glob("decoded/*/rows"):
        with open(rows, "r+b") as file:
            file.seek(10)
            file.write(b"\x01\x02\x03")
    assert torch.equal(epoch_of(opened())[0], expected)


@pytest.mark.parametrize("damage", [truncate, Path.unlink], ids=["truncated", "removed"])
def test_a_corrupt_file_stops_as_without_a_store(
    opened: Callable[..., ImageData], tmp_path: Path, damage: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    read = sources.read_data

    def read_then_damage(config: DataConfig) -> Listing:  # a file can be removed after the folder is listed
        listing = read(config)
        damage(next(tmp_path.rglob("train/b/*.jpg")))
        return listing

    monkeypatch.setattr(sources, "read_data", read_then_damage)
    with pytest.raises(UserError, match="not readable as an image"):
        epoch_of(opened())


def test_a_full_disk_ends_the_keeping_and_not_the_run(
    opened: Callable[..., ImageData], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: Any) -> None:
        raise StoreFullError

    monkeypatch.setattr("efficient_ft.data.loader.RowStore.write", full)
    data = opened()
    with caplog.at_level(logging.WARNING):
        assert torch.equal(epoch_of(data)[0], epoch_of(opened("off"))[0])
        epoch_of(data, epoch=2)
    assert [record.getMessage().split(" is full.")[1] for record in caplog.records] == [
        " Images that are not stored are decoded in every epoch."
    ]


@pytest.mark.parametrize(
    ("settings", "setting"),
    [
        ({"decoded_limit": "1KB"}, "data.decoded_limit"),
        ({"augment": {"name": "resize_crop", "resize": "none"}}, "data.augment.resize"),
    ],
)
def test_what_cannot_be_kept_is_refused_or_left(
    opened: Callable[..., ImageData], tmp_path: Path, settings: dict[str, Any], setting: str
) -> None:
    with pytest.raises(SettingError) as error:
        opened(**settings)
    assert error.value.setting == setting
    left = opened("auto", **settings)
    epoch_of(left)
    assert not (tmp_path / "decoded").exists()
    notes = [note for note in left.report()["notes"] if "keep_decoded" in note]
    assert len(notes) == (setting == "data.decoded_limit")


def test_a_disk_without_room_is_refused(opened: Callable[..., ImageData], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_store.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 1000})())
    with pytest.raises(SettingError, match=r"data\.decoded_folder must be on a disk with .* of free space for these"):
        opened()


def test_nothing_is_kept_where_nothing_is_gained(
    opened: Callable[..., ImageData], data_config: Callable[..., DataConfig], tmp_path: Path
) -> None:
    epoch_of(opened("auto", epochs=1))
    folder = tmp_path / "decoded"
    digits = open_data(data_config("digits", keep_decoded="on", decoded_folder=str(folder)), SPEC, 0)
    digits.keep_decoded(3)
    assert next(iter(digits.train_loader()))[0].shape == (4, 3, *SPEC.size)
    assert not os.path.exists(folder)
