"""Tests of published data sets with small files in the formats of their publishers."""

from __future__ import annotations

import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from torchvision import datasets

from efficient_ft.config import DataConfig
from efficient_ft.core.errors import UserError
from efficient_ft.data import class_count, missing_data, open_data, read_data
from efficient_ft.data.published import PUBLISHED
from tests.data.pictures import SPEC, save
from tests.data.publishers import (
    pack,
    write_aircraft,
    write_cars,
    write_cifar,
    write_cub,
    write_flowers,
    write_food,
    write_pets,
)

Config = Callable[..., DataConfig]


@pytest.mark.parametrize(("name", "kind"), [("cifar10", datasets.CIFAR10), ("cifar100", datasets.CIFAR100)])
def test_cifar(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data_config: Config, name: str, kind: type[datasets.CIFAR10]
) -> None:
    first = write_cifar(tmp_path, kind, monkeypatch)
    config = data_config(name, root=str(tmp_path), batch_size=50, select_best_on="test")
    assert missing_data(config) is None
    data = open_data(config, SPEC, 0)
    classes = 100 if name == "cifar100" else 10
    assert data.class_names == [f"class {i}" for i in range(classes)]
    assert class_count(config) == classes
    files = len(kind.train_list)
    assert data.splits == {"train": files * 2 * classes, "test": 2 * classes}
    assert read_data(config).origins == {"train": "official", "test": "official"}
    pixels = first[3].reshape(3, 32, 32).transpose(1, 2, 0)  # 1024 red values, then green, then blue
    assert np.array_equal(data._parts["train"].images[3], pixels)
    loader = data.eval_loader("test")
    images, labels = next(iter(loader))
    assert images.shape[1:] == (3, 16, 16)
    assert labels.tolist() == [index % classes for _, index in list(loader.sampler)[: len(labels)]]


def test_damaged_cifar_is_recognized(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data_config: Config) -> None:
    write_cifar(tmp_path, datasets.CIFAR10, monkeypatch)
    file = tmp_path / "cifar-10-batches-py/data_batch_3"
    file.write_bytes(file.read_bytes()[:-10])
    message = missing_data(data_config("cifar10", root=str(tmp_path)))
    assert message is not None
    assert "checksums differ" in message
    assert str(tmp_path / "cifar-10-batches-py") in message
    with pytest.raises(UserError, match="checksums differ"):
        open_data(data_config("cifar10", root=str(tmp_path)), SPEC, 0)


def test_flowers_trains_on_validation_too_as_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data_config: Config, change_archives: Callable[..., None]
) -> None:
    write_flowers(tmp_path, monkeypatch)
    change_archives("flowers102", md5=None)
    data = open_data(data_config("flowers102", root=str(tmp_path), select_best_on="test"), SPEC, 0)
    assert data.splits == {"train": 6, "test": 6}
    assert data.num_classes == 102 == PUBLISHED["flowers102"].classes
    assert data._parts["test"].labels.tolist() == [0, 1, 101] * 2
    assert data._parts["train"].images[3].endswith("image_00004.jpg")
    alone = data_config("flowers102", root=str(tmp_path), select_best_on="test", train_on_val=False)
    assert open_data(alone, SPEC, 0).splits["train"] < data.splits["train"]
    assert set(open_data(alone, SPEC, 0).splits) == {"train", "val", "test"}
    chosen_on_val = open_data(data_config("flowers102", root=str(tmp_path)), SPEC, 0)
    assert chosen_on_val.splits == {"train": 3, "val": 3, "test": 6}


def test_food(tmp_path: Path, data_config: Config) -> None:
    write_food(tmp_path)
    data = open_data(data_config("food101", root=str(tmp_path)), SPEC, 0)
    assert data.class_names == ["apple_pie", "waffles"]
    assert data.splits == {"train": 6, "val": 2, "test": 4}
    for path, label in zip(data._parts["train"].images, data._parts["train"].labels, strict=True):
        assert Path(path).parent.name == data.class_names[label]


def test_pets(tmp_path: Path, data_config: Config) -> None:
    write_pets(tmp_path)
    data = open_data(data_config("pets", root=str(tmp_path)), SPEC, 0)
    assert data.class_names == ["Abyssinian", "American Bulldog"]
    assert data.splits == {"train": 6, "val": 2, "test": 4}
    assert sum(len(y) for _, y in data.eval_loader("test")) == 4


def test_aircraft(tmp_path: Path, data_config: Config) -> None:
    write_aircraft(tmp_path)
    data = open_data(data_config("aircraft", root=str(tmp_path)), SPEC, 0)
    assert data.class_names == ["707-320", "A340-300", "DR-400"]
    assert data.splits == {"train": 9, "val": 6, "test": 3}
    assert data._parts["test"].labels.tolist() == [2, 0, 1]
    published = open_data(data_config("aircraft", root=str(tmp_path), select_best_on="test"), SPEC, 0)
    assert published.splits == {"train": 15, "test": 3}


def test_cars_from_local_files(tmp_path: Path, data_config: Config) -> None:
    config = data_config("cars", root=str(tmp_path), download=True)
    message = missing_data(config)
    assert message is not None
    assert "withdrawn the download" in message
    for part in (
        "cars_train",
        "cars_test",
        "devkit",
        "cars_train_annos.mat",
        "cars_meta.mat",
        "cars_test_annos_withlabels.mat",
    ):
        assert part in message
    assert str(tmp_path / "stanford_cars") in message
    write_cars(tmp_path)
    data = open_data(config, SPEC, 0)
    assert data.num_classes == 3
    assert data.class_names[0] == "AM General Hummer SUV 2000"
    assert data.splits == {"train": 6, "val": 3, "test": 6}
    assert data._parts["test"].labels.tolist() == [0, 1, 2] * 2
    assert next(iter(data.train_loader()))[0].shape == (4, 3, 16, 16)
    # data.root may also be the folder of the data set.
    assert open_data(data_config("cars", root=str(tmp_path / "stanford_cars")), SPEC, 0).splits == data.splits
    (tmp_path / "stanford_cars/devkit/cars_meta.mat").unlink()
    assert "does not contain cars_meta.mat" in str(missing_data(config))


@pytest.mark.parametrize("packed", [False, True])
def test_cub_from_a_folder_or_its_archive(tmp_path: Path, data_config: Config, packed: bool) -> None:
    config = data_config("cub200", root=str(tmp_path / "data"), download=True)
    message = str(missing_data(config))
    assert str(tmp_path / "data" / "CUB_200_2011.tgz") in message
    assert "train_test_split.txt" in message
    folder = write_cub(tmp_path / ("elsewhere" if packed else "data"))
    if packed:
        pack(tmp_path / "data/CUB_200_2011.tgz", folder)
    assert missing_data(config) is None
    data = open_data(config, SPEC, 0)
    assert data.class_names == ["Black footed Albatross", "Laysan Albatross"]
    assert data.splits == {"train": 6, "val": 2, "test": 4}
    assert data._parts["test"].labels.tolist() == [0, 0, 1, 1]
    assert not list((tmp_path / "data").glob(".unpacking*"))


def test_listed_images_that_are_not_there_and_damaged_lists(tmp_path: Path, data_config: Config) -> None:
    write_food(tmp_path)
    config = data_config("food101", root=str(tmp_path))
    (tmp_path / "food-101/images/waffles/test1.jpg").unlink()
    with pytest.raises(UserError, match=r"1 listed image does not exist.*waffles.test1\.jpg"):
        open_data(config, SPEC, 0)
    (tmp_path / "food-101/meta/test.json").write_text('{"waffles": [')
    with pytest.raises(UserError, match=r"the lists in .*food-101 cannot be read"):
        open_data(config, SPEC, 0)
    (tmp_path / "food-101/meta/test.json").unlink()
    assert "is incomplete. The folder does not contain meta/test.json" in str(missing_data(config))
    folder = write_cub(tmp_path)
    (folder / "image_class_labels.txt").write_text("1 1\n")
    with pytest.raises(UserError, match="list different images"):
        open_data(data_config("cub200", root=str(tmp_path)), SPEC, 0)


@pytest.mark.parametrize(
    "line", ["../../../secret.jpg", "a/../../../../secret.jpg", "ABSOLUTE", "..\\..\\secret.jpg", "a\0b"]
)
def test_lists_that_name_files_outside_of_the_data_set_are_refused(
    line: str, tmp_path: Path, data_config: Config
) -> None:
    folder = write_cub(tmp_path / "data" / "inside")
    save(tmp_path / "data" / "secret.jpg", 1)
    (folder / "images" / "a").mkdir()
    lines = (folder / "images.txt").read_text().splitlines()
    lines[3] = f"4 {line.replace('ABSOLUTE', str(tmp_path / 'data' / 'secret.jpg'))}"
    (folder / "images.txt").write_text("\n".join(lines) + "\n")
    config = data_config("cub200", root=str(tmp_path / "data" / "inside"), follow_links=True)
    with pytest.raises(UserError, match=r"which is outside of this folder|does not exist"):
        open_data(config, SPEC, 0)


@pytest.mark.parametrize("of", ["file", "folder"])
def test_links_out_of_a_published_data_set_are_refused_unless_they_are_to_be_followed(
    of: str, tmp_path: Path, data_config: Config
) -> None:
    write_food(tmp_path / "data")
    place = tmp_path / "data/food-101/images/waffles"
    place = place / "train1.jpg" if of == "file" else place
    place.rename(tmp_path / "elsewhere")
    place.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match=r"waffles.* is a link to .*, which is outside of .*data\.follow_links=true"):
        open_data(data_config("food101", root=str(tmp_path / "data")), SPEC, 0)
    assert open_data(data_config("food101", root=str(tmp_path / "data"), follow_links=True), SPEC, 0).splits
    (tmp_path / "linked").symlink_to(tmp_path / "data")  # data.root may be a link
    assert open_data(data_config("food101", root=str(tmp_path / "linked"), follow_links=True), SPEC, 0).splits


def test_an_archive_does_not_unpack_outside_of_its_folder(tmp_path: Path, data_config: Config) -> None:
    folder = write_cub(tmp_path / "elsewhere")
    (tmp_path / "victim").write_text("kept")
    for name, target in (("../../../victim", None), ("CUB_200_2011/link", "../../../victim")):
        archive = tmp_path / "data" / "CUB_200_2011.tgz"
        archive.parent.mkdir(exist_ok=True)
        with tarfile.open(archive, "w:gz") as tar:
            tar.add(folder, arcname=folder.name)
            member = tarfile.TarInfo(name)
            if target is not None:
                member.type, member.linkname = tarfile.SYMTYPE, target
            tar.addfile(member)
        with pytest.raises(UserError, match=r"CUB_200_2011\.tgz cannot be unpacked"):
            open_data(data_config("cub200", root=str(tmp_path / "data")), SPEC, 0)
        assert (tmp_path / "victim").read_text() == "kept"
        assert [file.name for file in archive.parent.iterdir()] == [archive.name]


def test_the_message_without_a_network(data_config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_network(*_: object, **__: object) -> None:
        raise OSError(-2, "Name or service not known")

    monkeypatch.setattr("socket.getaddrinfo", no_network)
    for name in ("https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    for name in ("cifar10", "cifar100", "flowers102", "food101", "pets", "aircraft"):
        config = data_config(name, root=str(tmp_path), download=True)
        message = missing_data(config)
        assert message is not None
        for archive in PUBLISHED[name].archives:
            assert str(tmp_path / archive.path) in message
            assert str(archive.url) in message
        assert "Name or service not known" in message
        assert "data=folder data.root=DIR" in message
        assert "data=digits" in message
        with pytest.raises(UserError) as error:
            open_data(config, SPEC, 0)
        assert str(error.value) == message
    assert missing_data(data_config("digits")) is None


def test_addresses_and_checksums_are_torchvisions() -> None:
    def table(name: str) -> dict[str, tuple[str | None, str | None]]:
        return {str(a.url): (a.path.rsplit("/", 1)[-1], a.md5) for a in PUBLISHED[name].archives}

    for name, kind in (("cifar10", datasets.CIFAR10), ("cifar100", datasets.CIFAR100)):
        assert table(name) == {kind.url: (kind.filename, kind.tgz_md5)}
    prefix = datasets.Flowers102._download_url_prefix
    assert table("flowers102") == {
        prefix + file: (file, sum_) for file, sum_ in datasets.Flowers102._file_dict.values()
    }
    assert table("food101") == {datasets.Food101._URL: ("food-101.tar.gz", datasets.Food101._MD5)}
    assert table("pets") == {u: (u.rsplit("/", 1)[-1], m) for u, m in datasets.OxfordIIITPet._RESOURCES}
    assert set(table("aircraft")) == {datasets.FGVCAircraft._URL}
