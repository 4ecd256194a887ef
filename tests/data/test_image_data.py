"""Tests of a data set that is opened for training: splits, batches and corrupt files."""

from __future__ import annotations

import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from efficient_ft.config import DataConfig, check
from efficient_ft.core.errors import SettingError, UserError
from efficient_ft.core.input_spec import InputSpec
from efficient_ft.data import open_data
from tests.data.pictures import SPEC, epoch_of, truncate
from tests.training.runs import plain_config

Make = Callable[..., Path]
Config = Callable[..., DataConfig]


def test_choosing_on_test_leaves_all_of_train_for_training(folders: Make, data_config: Config) -> None:
    root = folders(train={"a": 10, "b": 10}, test={"a": 1, "b": 1})
    assert open_data(data_config("folder", root=str(root), select_best_on="test"), SPEC, 0).splits == {
        "train": 20,
        "test": 2,
    }


def test_validation_that_cannot_be_taken(folders: Make, data_config: Config) -> None:
    root = folders(train={"a": 2, "b": 2}, test={"a": 1})
    with pytest.raises(
        SettingError, match=r"data\.val_fraction must be > 0 and < 1.*, got 0\.0\..*select_best_on=test"
    ):
        open_data(data_config("folder", root=str(root), val_fraction=0.0), SPEC, 0)
    patient = check(plain_config(trainer__patience=1, data__root=str(root), data__name="folder", data__val_fraction=0))
    config = patient.data  # trainer.patience rejects select_best_on=test
    with pytest.raises(SettingError, match=r"if the data set has no validation images, got 0\.0\.$"):
        open_data(config, SPEC, 0)
    assert open_data(data_config("folder", root=str(root), select_best_on="test"), SPEC, 0).splits == {
        "train": 4,
        "test": 1,
    }
    for name in "ab":
        (root / f"train/{name}/0.jpg").write_bytes(b"")
    with pytest.raises(UserError, match=r"None of the 2 training images.*select_best_on=test"):
        open_data(data_config("folder", root=str(root), on_corrupt="skip"), SPEC, 0)


def test_samples_are_what_the_transform_makes_of_the_file(folders: Make, data_config: Config) -> None:
    root = folders(train={"a": 5, "b": 5}, test={"a": 2, "b": 3})
    data = open_data(data_config("folder", root=str(root), batch_size=2), SPEC, 0)
    files = sorted((root / "test").rglob("*.jpg"))
    loader = data.eval_loader("test")
    order = [index for _, index in loader.sampler]
    assert sorted(order) == list(range(5))
    assert order == [index for _, index in data.eval_loader("test").sampler], "the same each time"
    images, labels = zip(*loader, strict=True)
    assert [len(x) for x in images] == [2, 2, 1]
    assert torch.cat(labels).tolist() == [[0, 0, 1, 1, 1][index] for index in order]
    assert torch.cat(labels).dtype == torch.int64
    for image, index in zip(torch.cat(images), order, strict=True):
        assert image.shape == (3, 16, 16)
        assert torch.equal(image, data.transform_eval(files[index]))


@pytest.mark.parametrize(
    ("count", "batch", "sizes"), [(9, 4, [4, 4]), (10, 4, [4, 4, 2]), (4, 8, [4]), (4, 1, [1, 1, 1, 1])]
)
def test_the_last_batch_is_kept_unless_it_is_a_single_image(
    folders: Make, data_config: Config, count: int, batch: int, sizes: list[int]
) -> None:
    root = folders(train={"a": count - 2, "b": 2}, test={"a": 1})
    config = data_config("folder", root=str(root), batch_size=batch, select_best_on="test")
    data = open_data(config, SPEC, 0)
    loader = data.train_loader()
    assert [len(y) for _, y in loader] == sizes
    assert len(loader) == len(sizes)
    assert any("data.batch_size=8" in note for note in data.report()["notes"]) == (count < batch)


def test_the_batch_size_of_evaluation(data_config: Config) -> None:
    data = open_data(data_config("digits", batch_size=64, eval_batch_size=200), SPEC, 0)
    assert [len(y) for _, y in data.eval_loader("test")] == [200, data.splits["test"] - 200]


def test_skip_leaves_corrupt_images_out_of_everything_and_reports_them(folders: Make, data_config: Config) -> None:
    root = folders(train={"a": 20, "b": 20}, test={"a": 3, "b": 3})
    truncate(root / "train/b/7.jpg")
    (root / "test/a/2.jpg").write_bytes(b"")
    config = data_config("folder", root=str(root), on_corrupt="skip")
    data = open_data(config, SPEC, 0)
    assert data.splits == {"train": 35, "val": 4, "test": 5}
    report = data.report()
    assert report["skipped_count"] == 2
    assert set(report["skipped"]) == {str(root / "train/b/7.jpg"), str(root / "test/a/2.jpg")}
    assert any("2 unreadable images" in note for note in report["notes"])
    first = epoch_of(data)
    # The result is the same as without these files.
    (root / "train/b/7.jpg").unlink()
    (root / "test/a/2.jpg").unlink()
    second = epoch_of(open_data(data_config("folder", root=str(root)), SPEC, 0))
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])


def test_skip_does_not_lose_a_class_or_a_split_silently(folders: Make, data_config: Config) -> None:
    root = folders(train={"a": 4, "b": 2}, test={"a": 1})
    (root / "test/a/0.jpg").write_bytes(b"")
    with pytest.raises(UserError, match="test split has no readable image"):
        open_data(data_config("folder", root=str(root), on_corrupt="skip"), SPEC, 0)
    for name in ("0.jpg", "1.jpg"):
        (root / "train/b" / name).write_bytes(b"")
    with pytest.raises(UserError, match="class 'b' has no readable training image"):
        open_data(data_config("folder", root=str(root), on_corrupt="skip"), SPEC, 0)


def test_real_images(shared_data: Path, tmp_path: Path, data_config: Config) -> None:

    classes = ("airplane", "frog", "truck")
    with tarfile.open(shared_data / "cifar10.tar.gz") as archive:
        taken: dict[str, int] = {}
        for member in archive:  # extracts only the first images of each class
            parts = member.name.split("/")
            if len(parts) == 4 and parts[1] == "test" and parts[2] in classes and taken.get(parts[2], 0) < 40:
                taken[parts[2]] = taken.get(parts[2], 0) + 1
                archive.extract(member, tmp_path, filter="data")
            if len(taken) == 3 and min(taken.values()) == 40:
                break
    root = tmp_path / "cifar10/test"
    spec = InputSpec((64, 48), (0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    data = open_data(data_config("folder", root=str(root), batch_size=16), spec, 0)
    assert data.class_names == list(classes)
    assert data.splits == {"train": 87, "val": 9, "test": 24}
    images, labels = epoch_of(data, 0)
    assert images.shape == (87, 3, 64, 48)
    assert images.isfinite().all()
    assert 0.5 < images.std() < 2
    assert sorted(set(labels.tolist())) == [0, 1, 2]
