"""Tests of batches of images with masks: joint transforms, reproducible order, padding and errors with file names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from efficient_ft.config.schema import DataConfig, MaskConfig
from efficient_ft.core.errors import SettingError, UserError
from efficient_ft.core.input_spec import IGNORED, InputSpec
from efficient_ft.data import SegmentationData, class_count, missing_data, open_data
from tests.data.mask_pictures import write_folder

SPEC = InputSpec((32, 40), (0.5, 0.4, 0.3), (0.25, 0.25, 0.25), "bilinear")


def _config(root: Path, masks: dict[str, Any] | None = None, **changes: Any) -> DataConfig:
    plain = {"name": "mask_folder", "root": str(root), "batch_size": 3, "num_workers": 0, **changes}
    return DataConfig(masks=MaskConfig(**masks or {}), **plain)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "set", {"train": 7, "val": 3, "test": 2})


def _open(folder: Path, masks: dict[str, Any] | None = None, seed: int = 0, **changes: Any) -> SegmentationData:
    data = open_data(_config(folder, masks, **changes), SPEC, seed)
    assert isinstance(data, SegmentationData)
    return data


def test_what_a_data_set_says_of_itself(folder: Path) -> None:
    data = _open(folder)
    assert data.class_names == ["background", "square", "disk"]
    assert (data.num_classes, data.best_split) == (3, "val")
    report = data.report()
    assert report["splits"] == {"train": 7, "val": 3, "test": 2}
    assert (report["classes"], report["skipped_count"]) == (3, 0)
    assert class_count(_config(folder)) == 3
    assert missing_data(_config(folder)) is None
    assert "the folder does not exist" in (missing_data(_config(folder / "x")) or "")
    assert class_count(_config(folder / "x")) is None


def test_images_and_masks_are_transformed_together(folder: Path) -> None:
    """Bright objects match the mask after the transforms: squares are red and disks are blue."""
    seen = 0
    for images, targets in _open(folder, {"zoom": (1.0, 2.0)}).train_loader():
        assert images.shape[1:] == (3, 32, 40)
        assert images.dtype == torch.float32
        assert targets.shape[1:] == (32, 40)
        assert targets.dtype == torch.int64
        assert set(targets.unique().tolist()) <= {0, 1, 2, IGNORED}
        pixels = images * 0.25 + torch.tensor(SPEC.mean).view(3, 1, 1)
        for label, channel in ((1, 0), (2, 2)):
            inside = pixels[:, channel][targets == label]
            if len(inside) > 50:
                assert (inside > 0.3).float().mean() > 0.9  # edges are blurred
                seen += 1
        other = [pixels[:, c][targets == 0] for c in (0, 2)]
        assert all((values > 0.3).float().mean() < 0.1 for values in other)
    assert seen >= 4


def test_augmentation_depends_on_seed_epoch_and_index_only(folder: Path) -> None:
    def batches(seed: int, epoch: int, workers: int) -> list[torch.Tensor]:
        loader = _open(folder, seed=seed, num_workers=workers).train_loader()
        loader.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
        torch.manual_seed(workers)  # must not change the batches
        return [t for batch in loader for t in batch]

    first = batches(0, 1, 0)
    assert all(torch.equal(a, b) for a, b in zip(first, batches(0, 1, 2), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(first, batches(0, 2, 0), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(first, batches(1, 1, 0), strict=True))


def test_without_zoom_and_flip_a_large_crop_is_the_padded_image(folder: Path) -> None:
    data = open_data(
        _config(folder, {"zoom": (1.0, 1.0), "flip": False}), InputSpec((48, 64), SPEC.mean, SPEC.std, "bilinear"), 0
    )
    images, targets = next(iter(data.train_loader()))
    whole = {tuple(t.flatten().tolist()) for _, batch in [(0, data.train_loader())] for _, ts in batch for t in ts}
    assert images.shape[-2:] == (48, 64)
    assert all((target[0] == IGNORED).all() and (target[1:] != IGNORED).all() for target in targets)
    assert len(whole) == 6, "a last batch of one image is dropped"


def test_an_evaluation_sees_whole_images_padded_to_the_stride_of_an_encoder(folder: Path) -> None:
    data = _open(folder)
    (images, targets), *_ = data.eval_loader("val")
    assert images.shape == (3, 3, 64, 64)
    assert targets.shape == (3, 64, 64)
    assert (targets[:, 48:] == IGNORED).all()
    assert not images[:, :, 48:].any()
    assert (targets[:, 1:48] != IGNORED).all()


def test_images_of_several_sizes_share_a_batch(tmp_path: Path) -> None:
    root = write_folder(tmp_path / "set", {"train": 2, "val": 2})
    image, mask = (
        Image.open(root / "val" / f).resize((33, 20), Image.Resampling.NEAREST)
        for f in ("images/000.jpg", "masks/000.png")
    )
    image.save(root / "val/images/000.jpg")
    mask.save(root / "val/masks/000.png")
    (images, targets), *_ = _open(root).eval_loader("val")
    assert images.shape == (2, 3, 64, 64)
    assert (targets[0, 20:] == IGNORED).all()
    assert (targets[0, :, 33:] == IGNORED).all()


def test_a_size_of_evaluation_keeps_masks_as_they_are(folder: Path) -> None:
    (images, targets), *_ = _open(folder, {"resize": (30, 60)}).eval_loader("val")
    assert images.shape == (3, 3, 32, 64)
    assert targets.shape == (3, 48, 64)
    assert (targets[:, 1:] != IGNORED).all()


def test_validation_images_are_held_out_by_the_seed(tmp_path: Path) -> None:
    root = write_folder(tmp_path / "set", {"train": 10, "test": 2})
    parts = [_open(root, seed=seed, val_fraction=0.3) for seed in (0, 0, 1)]
    assert [part.splits for part in parts] == [{"train": 7, "val": 3, "test": 2}] * 3
    chosen = [next(t for _, t in part.eval_loader("val")) for part in parts]
    assert torch.equal(chosen[0], chosen[1])
    assert not torch.equal(chosen[0], chosen[2])
    with pytest.raises(SettingError, match=r"data\.val_fraction"):
        _open(root, val_fraction=0.0)
    tested = _open(root, select_best_on="test")
    assert (tested.splits, tested.best_split) == ({"train": 10, "test": 2}, "test")
    with pytest.raises(UserError, match=r"has no val split\. It has test\."):
        tested.eval_loader("val")


def _spoil(folder: Path) -> None:
    Image.fromarray(np.full((48, 64), 9, dtype=np.uint8)).save(folder / "train/masks/002.png")
    (folder / "train/images/004.jpg").write_bytes(b"")
    Image.fromarray(np.zeros((5, 5), dtype=np.uint8)).save(folder / "val/masks/001.png")


@pytest.mark.parametrize("workers", [0, 2])
def test_a_file_that_cannot_be_used_stops_with_its_name(folder: Path, workers: int) -> None:
    _spoil(folder)
    with pytest.raises(UserError, match=r"00[24]\."):
        list(_open(folder, num_workers=workers).train_loader())
    with pytest.raises(UserError, match=r"001\.png: the size of the mask is 5×5, but the size of its image is 64×48"):
        list(_open(folder, num_workers=workers).eval_loader("val"))


def test_or_it_is_left_out_and_recorded(folder: Path) -> None:
    _spoil(folder)
    data = _open(folder, on_corrupt="skip")
    assert data.splits == {"train": 5, "val": 2, "test": 2}
    report = data.report()
    assert report["skipped_count"] == 3
    assert any("ids without a class: 9 (3,072 pixels)" in why for why in report["skipped"].values())
    assert any("3 unusable images are left out" in note for note in report["notes"])
    assert len(list(data.train_loader())) == 2


def test_decoded_images_are_not_kept(folder: Path) -> None:
    _open(folder).keep_decoded(3)
    with pytest.raises(SettingError, match=r"data\.keep_decoded"):
        _open(folder, keep_decoded="on").keep_decoded(3)
