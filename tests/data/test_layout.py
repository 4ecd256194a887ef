"""Tests of layouts of image folders: names of splits, nesting, wrapper folders and ambiguous layouts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from efficient_ft.core.errors import SettingError, UserError
from efficient_ft.data import images
from efficient_ft.data.folder import folder_classes, missing_folder, read_folder
from efficient_ft.data.listing import Listing
from tests.data.pictures import save

Make = Callable[[Mapping[str, int | str]], Path]


@pytest.fixture
def tree(tmp_path: Path) -> Make:
    """Write folders with numbers of images, and files with a text: ``tree({"train/cat": 5, "labels.csv": "a,b"})``."""

    def make(content: Mapping[str, int | str]) -> Path:
        root = tmp_path / "images"
        seed = 0
        for name, count in content.items():
            if isinstance(count, str):
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                (root / name).write_text(count)
                continue
            (root / name).mkdir(parents=True, exist_ok=True)
            for i in range(count):
                seed += 1
                save(root / name / f"{i}.jpg", seed)
        return root

    return make


def sizes(listing: Listing) -> tuple[int, int, int]:
    return tuple(0 if part is None else len(part) for part in (listing.train, listing.val, listing.test))  # type: ignore[return-value]


def both(*tops: str, cat: int = 6, dog: int = 4) -> dict[str, int]:
    return {f"{top}/{name}": count for top in tops for name, count in (("cat", cat), ("dog", dog))}


ACCEPTED: dict[str, tuple[dict[str, int | str], tuple[int, int, int], dict[str, str]]] = {
    "case": (both("Training", "Testing"), (10, 0, 10), {"train": "Training/", "test": "Testing/"}),
    "spellings": (both("TRAIN", "Validation", "test_set"), (10, 10, 10), {"val": "Validation/", "test": "test_set/"}),
    "dev": (both("train", "dev"), (10, 10, 0), {"val": "dev/"}),
    "eval": (both("train", "eval", "Test"), (10, 10, 10), {"val": "eval/", "test": "Test/"}),
    "affixes": ({**both("seg_train/seg_train", "seg_test/seg_test"), "seg_pred": 7}, (10, 0, 10),
                {"train": "seg_train/seg_train/", "test": "seg_test/seg_test/"}),
    "twice": (both("train/train/train", "val"), (10, 10, 0), {"train": "train/train/train/"}),
    "together": (both("birds_train", "birds_test"), (10, 0, 10), {"train": "birds_train/"}),
    "unlabeled": ({**both("train", "test"), "unlabeled": 5}, (10, 0, 10), {"train": "train/"}),
    "held out": (both("Train"), (8, 0, 2), {"train": "Train/", "test": "a fifth of each class, held out of Train/"}),
    "classes": (both("."), (8, 0, 2), {"train": "images/", "test": "a fifth of each class, held out of images/"}),
    "train is a class": ({"car": 5, "train": 5, "bus": 5}, (12, 0, 3), {}),
    "nested": ({"dogs/poodle": 5, "dogs/pug": 5, "cats/siamese": 5}, (12, 0, 3), {}),
    "system folders": (
        {"cat": 5, "dog": 5, "cat/@eaDir/0.jpg": 5, "$RECYCLE.BIN/S-1": 2, "lost+found": 1, "__MACOSX/cat": 3},
        (8, 0, 2),
        {},
    ),
    "one name below": ({"dogs/images": 5, "cats/images": 5}, (8, 0, 2), {}),
}  # fmt: skip


@pytest.mark.parametrize("name", ACCEPTED)
def test_a_layout_with_one_reading_is_read(tree: Make, name: str) -> None:
    content, expected, origins = ACCEPTED[name]
    root = tree(content)
    listing = read_folder(root)
    assert sizes(listing) == expected
    assert listing.origins.items() >= origins.items()
    assert listing.origins.keys() == {s for s, n in zip(("train", "val", "test"), sizes(listing), strict=True) if n}
    assert folder_classes(root) == len(listing.class_names)


def test_classes_named_like_parts_of_a_data_set_are_noted(tree: Make) -> None:
    listing = read_folder(tree({"trainA": 4, "testB": 4, "cow": 4}))
    assert listing.class_names == ["cow", "testB", "trainA"]
    expected = "testB, trainA are treated as classes instead of splits, because no subfolders were found."
    assert listing.notes == [expected]


def test_notes_of_accepted_layouts(tree: Make, tmp_path: Path) -> None:
    notes = read_folder(tree({"dogs/poodle": 5, "dogs/pug": 5, "cats/siamese": 5})).notes
    assert len(notes) == 1
    assert "(cats, dogs). The images in 3 subfolders of the class folders belong to these classes" in notes[0]
    root = tree({})
    for name in ("dogs", "cats"):
        (root / name).rename(tmp_path / name)
    listing = read_folder(tree({**both("train/train", "test"), "seg_pred/x": 3, ".": 2}))
    assert listing.notes == ["The folder train/train/ is used, because train/ contains nothing else."]
    assert listing.left_out == {"images outside of class folders": 2, "images in seg_pred/": 3}


REJECTED: dict[str, tuple[dict[str, int | str], list[str]]] = {
    "two folders for a split": (both("train", "val", "valid"), ["val, valid all denote", "{train: train, val: val}",
                                "{train: train, val: [val, valid]}"]),
    "dev and eval": (both("train", "dev", "eval"), ["{train: train, val: dev, test: eval}"]),
    "extra": (both("train", "extra"), ["extra/ (10 images)", "cat, dog", "{train: train, test: extra}",
              "{train: train}", "{train: [train, extra]}"]),
    "another language": (both("train", "Prüfung"), ['{train: train, test: "Prüfung"}']),
    "two unknown": (both("Lernen", cat=9) | both("P"), ["Lernen/ (13 images), P/ (10 images)", "cat, dog",
                    "{train: Lernen, test: P}", "{train: [Lernen, P]}", "{train: .}"]),
    "one unknown": (both("Lernen", "Test"), ["{train: Lernen, test: Test}"]),
    "folds": (both("fold1", "fold2", "fold3"), ["fold2/ (10 images)", "{train: [fold1, fold2], test: fold3}",
              "{train: [fold1, fold2, fold3]}", "{train: .}"]),
    "years": (both("2019", "2020", "2021"), ['{train: ["2019", "2020"], test: "2021"}']),
    "folds in train": (both("train/f1", "train/f2", "test"), ["{train: [train/f1, train/f2], test: test}"]),
    "sites": (both("a/train", "b/train", "a/test"), ["{train: [a/train, b/train], test: a/test}"]),
    "class first": ({"cat/train": 4, "cat/test": 1, "dog/train": 4, "dog/test": 1}, ["move the images to train/CLASS"]),
    "two depths": ({"cat": 5, "cat/more": 3, "dog": 5}, ["10 images (for example in cat/)",
                   "3 images (for example in cat/more/)", "{train: .}"]),
    "two depths across": ({"cat": 5, "animals/dog": 3, "animals/cow": 2}, ["5 images (for example in cat/)",
                          "5 images (for example in animals/"]),
    "two depths in train": ({"train/a": 5, "train/b": 5, "train/b/x": 1, "val/a": 1}, ["{train: train, val: val}"]),
    "class named train, nested": ({"car": 5, "train/a": 4, "train/b": 4, "bus": 3}, ["{train: train}", "{train: .}"]),
    "wrapper": (both("x"), ["Set data.root=", "images/x."]),
    "wrapper of splits": (both("x/y/train", "x/y/test"), ["images/x/y."]),
    "splits in one of two": (both("images/train", "images/test") | {"annotations/a": 3}, ["images/images."]),
    "wrapper in train": (both("train/data", "test/data"), ["{train: train/data, test: test}"]),
    "no class folders": ({".": 4, "labels.csv": "a,b"}, ["No class folders", "images (4 images)", "labels.csv"]),
    "flat splits": ({"train": 4, "test": 3, "train.csv": "a"}, ["train/ (4 images), test/ (3 images)", "train.csv"]),
    "a single folder": ({"photos": 4, "labels.xlsx": "a"}, ["only one class, 'photos', with 4 images", "labels.xlsx"]),
    "images and masks": ({"images": 4, "masks": 4}, ["data=mask_folder", "{train: .}"]),
    "flat test": ({**both("train"), "test": 3}, ["3 images without a class", "{train: train}"]),
    "no training images": (both("test", "val"), ["no folder train/"]),
    "case in test": ({"train/Cat": 4, "train/dog": 4, "test/cat": 4},
                     ["'cat' (4 images)", "differs from 'Cat' only in case or spaces", "{train: train}"]),
    "a class of one image": ({"cat": 5, "dog": 1}, ["the 2 classes in", "'dog' has a single training image (6 im"]),
    "one image, test": ({**both("train", "test"), "train/cow": 1, "test/cow": 3}, ["the 3 classes", "'cow' has"]),
    "parts with letters": ({"trainA": 4, "testB": 4}, ["in testB/ (4 images), trainA/ (4 images) (in", "{train: .}"]),
    "flat folds": ({"fold_a": 4, "fold_b": 4}, ["found in fold_a/ (4 images), fold_b/ (4 images) (in", "{train: .}"]),
    "flat parts": ({"train1": 4, "train2": 4}, ["found in train1/ (4 images), train2/ (4 images) (in", "{train: .}"]),
    "HEIC only": ({"cat/1.heic": "x", "dog/2.HEIC": "x"}, [".heic ×2", "pip install 'efficient-ft[heic]'"]),
    "arrays only": ({"cat/1.npy": "x", "dog/2.npy": "x"}, [".npy ×2", "convert the files to PNG or TIFF"]),
}  # fmt: skip


@pytest.mark.parametrize("name", REJECTED)
def test_a_layout_with_several_readings_is_rejected_with_settings_that_work(
    tree: Make, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(images, "EXTENSIONS", tuple(one for one in images.EXTENSIONS if one != ".heic"))  # no HEIC
    content, parts = REJECTED[name]
    root = tree(content)
    with pytest.raises(UserError) as error:
        read_folder(root)
    for part in parts:
        assert part in str(error.value), str(error.value)
    assert "\n" not in str(error.value)
    settings = [text.split("'")[0] for text in str(error.value).split("'data.splits=")[1:]]
    for setting in settings:
        if "FOLDER" in setting:
            continue
        (override,) = OverridesParser.create().parse_overrides([f"data.splits={setting}"])
        chosen = override.value()
        assert all(isinstance(n, str) for v in chosen.values() for n in ([v] if isinstance(v, str) else v)), chosen
        if name != "wrapper in train":  # the other splits need the same setting
            assert len(read_folder(root, splits=chosen).class_names) >= 2, setting


def test_explicit_splits_join_folders_and_leave_nothing_ambiguous(tree: Make) -> None:
    root = tree({**both("2019", "2020"), "late/cat": 2, "late/deep/er/x": 0, "late/dog/more": 1, "notes": 0, "late": 1})
    listing = read_folder(root, splits={"train": ["2019", "2020"], "test": "late"})
    assert listing.class_names == ["cat", "dog"]
    assert sizes(listing) == (20, 0, 3)
    assert listing.origins == {"train": "2019/, 2020/", "test": "late/"}
    assert listing.left_out == {"images outside of class folders": 1}
    assert [note for note in listing.notes if note.endswith(" are not used: notes.")]
    assert folder_classes(root, {"train": ["2019", "2020"]}) == 2
    (root / "notes").rmdir()
    assert read_folder(root, splits={"train": "."}).class_names == ["2019", "2020", "late"]


@pytest.mark.parametrize(
    ("splits", "message"),
    [
        (
            {"train": "train", "test": "tset"},
            r"data.splits.test must be a folder.*got tset.*It has table.csv, test, train",
        ),
        ({"train": "train", "test": "table.csv"}, r"data.splits.test must be a folder of class folders, got table.csv"),
        ({"train": "train/cat"}, "No class folders were found in train/cat/ .6 images. "),
        ({"test": "test"}, "with the training data"),
        ({}, "with the training data"),
    ],
)
def test_mistakes_in_explicit_splits(tree: Make, splits: dict[str, str], message: str) -> None:
    root = tree({**both("train", "test"), "table.csv": "x"})
    with pytest.raises((SettingError, UserError), match=message):
        read_folder(root, splits=splits)  # type: ignore[arg-type]


def test_classes_that_differ_by_case_or_spaces_are_noted(tree: Make) -> None:
    listing = read_folder(tree({"Cat": 5, "cat ": 4, "dog": 5}))
    assert listing.class_names == ["Cat", "cat ", "dog"]
    assert any("'Cat' (5), 'cat ' (4)" in note for note in listing.notes)


def test_skipped_files_are_counted_by_reason(tree: Make) -> None:
    root = tree({**both("train", "test"), "train/cat/a.txt": "x", "test/dog/b.txt": "x", "train/dog/c.npy": "x"})
    assert read_folder(root).left_out == {"not images: .txt ×2": 2, ".npy files: convert the files to PNG or TIFF": 1}


def test_exports_for_detection_and_archives_are_named(tree: Make, tmp_path: Path) -> None:
    files = {"train/images": 5, "train/labels/0.txt": "0 .5 .5 .1 .1", "valid/images": 2, "valid/labels/0.txt": ""}
    with pytest.raises(UserError, match="images/ and labels/ contain data for object detection"):
        read_folder(tree(files))
    (tmp_path / "images.zip").touch()
    assert "Unpack the archive" in str(missing_folder(tmp_path / "images.zip"))
