"""Tests of a user's image folders: all layouts and all errors."""

from __future__ import annotations

import contextlib
import os
import unicodedata
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from efficient_ft.config import DataConfig
from efficient_ft.core.errors import SettingError, UserError
from efficient_ft.data import ImageData, missing_data, open_data
from efficient_ft.data.folder import read_folder
from tests.data.pictures import SPEC, save

Make = Callable[..., Path]
Config = Callable[..., DataConfig]


def opened(config: DataConfig, seed: int = 0) -> ImageData:
    return open_data(config, SPEC, seed)


def test_train_and_test_folders_with_validation_from_train(folders: Make, data_config: Config) -> None:
    root = folders(train={"cat": 10, "dog": 20}, test={"cat": 3, "dog": 2})
    data = opened(data_config("folder", root=str(root)))
    assert data.class_names == ["cat", "dog"]
    assert data.num_classes == 2
    assert data.splits == {"train": 27, "val": 3, "test": 5}
    assert data.best_split == "val"
    labels = [int(y) for _, batch in data.eval_loader("val") for y in batch]
    assert sorted(labels) == [0, 1, 1]
    assert data.report()["notes"] == []


@pytest.mark.parametrize("name", ["val", "valid", "validation"])
def test_a_validation_folder_validates_and_nothing_is_taken_from_train(
    folders: Make, data_config: Config, name: str
) -> None:
    root = folders(train={"a": 5, "b": 5}, **{name: {"a": 2, "b": 1}})
    data = opened(data_config("folder", root=str(root)))
    assert data.splits == {"train": 10, "val": 3}
    assert any(
        f"no test split. The images in {name}/ are used to select the best epoch and to report the accuracy." in n
        for n in data.report()["notes"]
    )
    with pytest.raises(UserError, match=r"no test split\. It has val\."):
        data.eval_loader("test")
    with pytest.raises(SettingError, match=r"data\.select_best_on must be val, got test.*no test images"):
        opened(data_config("folder", root=str(root), select_best_on="test"))


def test_three_folders(folders: Make, data_config: Config) -> None:
    root = folders(train={"a": 5, "b": 5}, val={"a": 2, "b": 1}, test={"a": 1, "b": 3})
    assert opened(data_config("folder", root=str(root))).splits == {"train": 10, "val": 3, "test": 4}
    best_on_test = opened(data_config("folder", root=str(root), select_best_on="test"))
    assert best_on_test.splits == {"train": 10, "val": 3, "test": 4}  # val/ of the user is not used for training
    assert best_on_test.best_split == "test"
    assert any("selected on the test images" in note for note in best_on_test.report()["notes"])


def test_class_folders_alone_are_split_the_same_for_every_seed(folders: Make, data_config: Config) -> None:
    root = folders(a=10, b=20, c=5)
    tests, vals = [], []
    for seed in (0, 1):
        data = opened(data_config("folder", root=str(root)), seed)
        assert data.splits == {"train": 35 - 7 - 4, "val": 4, "test": 7}
        paths = {name: set(part.images) for name, part in data._parts.items()}
        assert not paths["train"] & paths["test"]
        assert not paths["train"] & paths["val"]
        assert not paths["val"] & paths["test"]
        tests.append(paths["test"])
        vals.append(paths["val"])
        assert Counter(data._parts["test"].labels.tolist()) == {0: 2, 1: 4, 2: 1}
    assert tests[0] == tests[1]
    assert vals[0] != vals[1]


def test_train_alone_is_split_too(folders: Make) -> None:
    listing = read_folder(folders(train={"a": 10, "b": 5}))
    assert listing.test is not None
    assert len(listing.train) == 12
    assert len(listing.test) == 3
    assert listing.origins == {"train": "train/", "test": "a fifth of each class, held out of train/"}


def test_a_class_named_train_is_a_class(folders: Make) -> None:
    listing = read_folder(folders(bus=5, train=5))
    assert listing.class_names == ["bus", "train"]


def test_nested_images_links_hidden_files_and_other_files(folders: Make, data_config: Config) -> None:
    root = folders(train={"a": 4, "b": 4}, test={"a": 1, "b": 1})
    save(root / "test/a/deep/er/x.JPEG", 90)
    save(root / "train/a/y.PNG", 91)
    (root / "train/a/._0.jpg").write_bytes(b"resource fork")
    (root / "train/a/.DS_Store").write_bytes(b"x")
    (root / "train/.cache").mkdir()
    (root / "train/__MACOSX").mkdir()
    (root / "train/a/notes.txt").write_text("x")
    (root / "train/loose.jpg").write_bytes(b"")
    (root / "masks").mkdir()
    if hasattr(os, "symlink"):
        with contextlib.suppress(OSError):  # Windows may not permit links
            os.symlink(root / "train/a", root / "train/a/loop", target_is_directory=True)
    data = opened(data_config("folder", root=str(root), val_fraction=0.1))
    assert data.splits["train"] + data.splits["val"] == 9
    assert data.splits["test"] == 3
    listing = read_folder(root)
    assert listing.left_out == {"not images: .txt ×1": 1, "images outside of class folders": 1, "links to folders": 1}
    assert any(note.endswith(" are not used: masks.") for note in listing.notes)


def test_a_pipe_is_no_image_and_a_link_is_no_way_back(folders: Make) -> None:
    """A pipe and a link to a parent folder are ignored. Reading a pipe would block the run."""
    root = folders(train={"a": 4, "b": 4}, test={"a": 1, "b": 1})
    os.mkfifo(root / "train/a/9.jpg")
    (root / "train/b/up").symlink_to("..", target_is_directory=True)
    (root / "train/b/gone.jpg").symlink_to("nowhere")
    (root / "train/b/itself.jpg").symlink_to("itself.jpg")
    (root / "train/nothing").symlink_to("../../nowhere")
    listing = read_folder(root)
    assert [Path(str(path)).name for path in listing.train.images] == [f"{k}.jpg" for k in (0, 1, 2, 3)] * 2
    assert listing.train.labels.tolist() == [0] * 4 + [1] * 4
    notes = " ".join(listing.notes)
    assert f"not followed: {root / 'train/b/up'}." in notes
    assert f"ignored: {root / 'train/a/9.jpg'} and 2 more" in notes
    assert f"Broken links are ignored: {root / 'train/nothing'}." in notes


def test_a_link_to_an_image_counts_if_the_image_is_not_in_the_data_set_itself(folders: Make, tmp_path: Path) -> None:
    """A link to an image of the same data set is ignored: the image would have two classes or be in two splits."""
    root = folders(train={"a": 4, "b": 4}, test={"a": 1, "b": 1})
    save(tmp_path / "elsewhere/x.jpg", 91)
    save(root / "pool/y.jpg", 92)
    (root / "train/b/of_a.jpg").symlink_to(root / "train/a/0.jpg")
    (root / "train/b/of_test.jpg").symlink_to("../../test/b/0.jpg")
    (root / "train/b/twice.jpg").symlink_to("0.jpg")
    (root / "train/b/x.jpg").symlink_to(tmp_path / "elsewhere/x.jpg")
    (root / "train/b/y.jpg").symlink_to("../../pool/y.jpg")
    listing = read_folder(root, follow_links=True)
    assert [Path(str(path)).name for path in listing.train.images][8:] == ["x.jpg", "y.jpg"]
    notes = " ".join(listing.notes)
    assert "already part of the data set are not counted: " in notes
    assert " and 2 more" in notes
    assert f"Links to files outside of {root} are followed: {root / 'train/b/x.jpg'}." in notes


@pytest.mark.parametrize("target", ["..", ".", "a", "../test/a", "../.."])
def test_a_class_that_is_a_link_to_its_own_data_set_is_refused(folders: Make, target: str) -> None:
    root = folders(train={"a": 4, "b": 4}, test={"a": 1, "b": 1})
    (root / "train/c").symlink_to(target, target_is_directory=True)
    with pytest.raises(UserError, match=r"train/c is a link to .*Remove the link"):
        read_folder(root)


def test_class_names_in_any_language_and_spelling_of_accents(folders: Make) -> None:
    composed, decomposed = unicodedata.normalize("NFC", "é"), unicodedata.normalize("NFD", "é")
    root = folders(train={composed: 2, "猫 кот": 2}, test={"猫 кот": 1})
    save(root / "test" / decomposed / "0.jpg", 99)
    listing = read_folder(root)
    assert listing.class_names == sorted([composed, "猫 кот"])
    assert listing.test is not None
    assert sorted(listing.test.labels.tolist()) == [0, 1]


def test_names_that_are_not_text(folders: Make, data_config: Config) -> None:
    root = folders(train={"a": 2, "b": 2}, test={"a": 1, "b": 1})
    bad = os.fsencode(root / "train/a") + b"/\xff.jpg"
    try:
        with open(bad, "wb") as file:
            file.write(b"no image")
    except OSError:
        pytest.skip("this file system accepts text as names only")
    data = opened(data_config("folder", root=str(root), val_fraction=0.5, batch_size=8))
    with pytest.raises(UserError) as error:
        [*data.train_loader(), *data.eval_loader("val")]
    assert str(error.value).startswith(f"{root / 'train/a'}/\N{REPLACEMENT CHARACTER}.jpg: the file is not readable")
    skipping = open_data(data_config("folder", root=str(root), val_fraction=0.5, on_corrupt="skip"), SPEC, 0)
    assert list(skipping.report()["skipped"]) == [f"{root / 'train/a'}/\N{REPLACEMENT CHARACTER}.jpg"]


def test_a_class_missing_in_test_is_noted(folders: Make, data_config: Config) -> None:
    root = folders(train={"a": 3, "b": 3, "c": 3}, test={"a": 2, "c": 1})
    listing = read_folder(root)
    assert listing.test is not None
    assert listing.test.labels.tolist() == [0, 0, 2]
    assert "1 class has no test image: 'b'." in opened(data_config("folder", root=str(root))).inspect().warnings


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (
            {"train": {"cats": 2, "dogs": 2}, "test": {"cat": 2}},
            "classes that are not in the training split: 'cat'.*mean 'cats'",
        ),
        ({"train": {"a": 2, "b": 0}, "test": {"a": 2}}, "contain no images: 'b'"),
        ({"train": {"a": 2}, "test": {"a": 2}}, "only one class, 'a'"),
        ({"a": 2}, "only one class, 'a'"),
        ({"train": {"a": 2, "b": 2}, "test": {"a": 0}}, "No images were found in the class folders"),
        ({"train": {"a": 2, "b": 2}, "val": {"a": 1}, "valid": {"a": 1}}, "val, valid all denote the val split"),
        ({"test": {"a": 2, "b": 2}}, "no folder train/"),
        ({"train": {"": 3}, "test": {"a": 1}}, r"No class folders were found in train/ \(3 images\)"),
        ({"a": 0, "b": 0}, "no class folders with images"),
        ({"a": 1, "b": 1}, r"the 2 classes in .*images, 'a', 'b' have a single training image \(2 images in total\)"),
        ({"train": {"a": 3, "b": 1}, "test": {"a": 2, "b": 2}}, r"/train, 'b' has a single training image"),
    ],
)
def test_mistaken_layouts_are_explained(folders: Make, layout: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_folder(folders(**layout))


def test_loose_images_and_unreadable_kinds_are_named(tmp_path: Path) -> None:
    save(tmp_path / "0.jpg", 0)
    with pytest.raises(UserError, match=r"No class folders were found in .* \(1 image\)"):
        read_folder(tmp_path)
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "photo.nef").write_bytes(b"x")
    with pytest.raises(UserError, match=r"\.nef ×2\. For \.nef files: convert the files"):
        read_folder(tmp_path)


def test_no_folder_at_all(tmp_path: Path, data_config: Config) -> None:
    config = data_config("folder", root=str(tmp_path / "nothing"))
    message = missing_data(config)
    assert message is not None
    assert str(tmp_path / "nothing") in message
    assert "data=digits" in message
    with pytest.raises(UserError, match="does not exist"):
        opened(config)
    (tmp_path / "file").write_text("x")
    assert "is a file" in str(missing_data(data_config("folder", root=str(tmp_path / "file"))))
    assert missing_data(data_config("folder", root=str(tmp_path))) is None
