"""The published data sets, from small files in their publishers' own formats, and what is said without them."""

from __future__ import annotations

import contextlib
import hashlib
import http.server
import io
import json
import pickle
import tarfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import scipy.io
import yaml
from pictures import SPEC, save
from torchvision import datasets

from efficient_ft.config import DataConfig
from efficient_ft.core.errors import UserError
from efficient_ft.data import class_count, fetch, missing_data, open_data
from efficient_ft.data.fetch import Archive
from efficient_ft.data.sources import LISTED

Config = Callable[..., DataConfig]
CONF = Path(__file__).resolve().parents[2] / "conf" / "data"


def md5(path: Path) -> str:
    return hashlib.md5(path.read_bytes()).hexdigest()


def pack(archive: Path, *members: Path) -> None:
    archive.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(archive, "w:gz") as tar:
        for member in members:
            tar.add(member, arcname=member.name)


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """known("food101", **fields): change every archive of a set, e.g. to the checksums of small files."""

    def change(name: str, **fields: object) -> None:
        archives = tuple(replace(a, **fields) for a in LISTED[name].archives)  # type: ignore[arg-type]
        monkeypatch.setitem(LISTED, name, replace(LISTED[name], archives=archives))

    return change


# ---------------------------------------------------------------- writers of the publishers' formats


def write_cifar(root: Path, kind: type[datasets.CIFAR10], monkeypatch: pytest.MonkeyPatch) -> np.ndarray:
    folder = root / kind.base_folder
    folder.mkdir(parents=True)
    fine = kind is datasets.CIFAR100
    classes = 100 if fine else 10
    pixels = np.random.default_rng(0)
    first = None
    lists: dict[str, list[list[str]]] = {}
    for attribute in ("train_list", "test_list"):
        lists[attribute] = []
        for name, _ in getattr(kind, attribute):
            count = 2 * classes
            data = pixels.integers(0, 256, (count, 3072), dtype=np.uint8)
            first = data if first is None else first
            labels = [i % classes for i in range(count)]
            entry = {"data": data, "fine_labels" if fine else "labels": labels, "filenames": ["x.png"] * count}
            (folder / name).write_bytes(pickle.dumps(entry, protocol=2))
            lists[attribute].append([name, md5(folder / name)])
    names = [f"class {i}" for i in range(classes)]
    (folder / kind.meta["filename"]).write_bytes(pickle.dumps({kind.meta["key"]: names}, protocol=2))
    meta = {**kind.meta, "md5": md5(folder / kind.meta["filename"])}
    for attribute, value in [*lists.items(), ("meta", meta)]:
        monkeypatch.setattr(kind, attribute, value)
    assert first is not None
    return first


def write_flowers(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = root / "flowers-102"
    for i in range(1, 13):
        save(folder / f"jpg/image_{i:05d}.jpg", i)
    labels = np.asarray([[1, 2, 102] * 4])
    scipy.io.savemat(folder / "imagelabels.mat", {"labels": labels})
    scipy.io.savemat(folder / "setid.mat", {"trnid": [[1, 2, 3]], "valid": [[4, 5, 6]], "tstid": [list(range(7, 13))]})
    files = dict(datasets.Flowers102._file_dict)
    for key, name in (("label", "imagelabels.mat"), ("setid", "setid.mat")):
        files[key] = (name, md5(folder / name))
    monkeypatch.setattr(datasets.Flowers102, "_file_dict", files)


def write_food(root: Path) -> None:
    folder = root / "food-101"
    lists: dict[str, dict[str, list[str]]] = {"train": {}, "test": {}}
    for k, name in enumerate(("waffles", "apple_pie")):
        for part, count in (("train", 4), ("test", 2)):
            lists[part][name] = [f"{name}/{part}{i}" for i in range(count)]
            for i in range(count):
                save(folder / f"images/{name}/{part}{i}.jpg", 10 * k + i)
    (folder / "meta").mkdir()
    for part, content in lists.items():
        (folder / f"meta/{part}.json").write_text(json.dumps(content))


def write_pets(root: Path) -> None:
    folder = root / "oxford-iiit-pet"
    (folder / "annotations").mkdir(parents=True)
    for part, count in (("trainval", 4), ("test", 2)):
        lines = []
        for label, name in ((1, "Abyssinian"), (2, "american_bulldog")):
            for i in range(count):
                lines.append(f"{name}_{part}{i} {label} {label} 1")
                save(folder / f"images/{name}_{part}{i}.jpg", i + label)
        (folder / f"annotations/{part}.txt").write_text("\n".join(lines) + "\n")


def write_aircraft(root: Path) -> None:
    folder = root / "fgvc-aircraft-2013b" / "data"
    folder.mkdir(parents=True)
    (folder / "variants.txt").write_text("707-320\nA340-300\nDR-400\n")
    number = 0
    for part, count in (("train", 3), ("val", 2), ("test", 1)):
        lines = []
        for name in ("DR-400", "707-320", "A340-300"):
            for _ in range(count):
                number += 1
                lines.append(f"{number:07d} {name}")
                save(folder / f"images/{number:07d}.jpg", number)
        (folder / f"images_variant_{part}.txt").write_text("\n".join(lines) + "\n")


def write_cars(root: Path) -> None:
    folder = root / "stanford_cars"
    (folder / "devkit").mkdir(parents=True)
    fields = [(name, "O") for name in ("bbox_x1", "class", "fname")]
    names = np.empty((1, 3), dtype=object)
    names[0] = ["AM General Hummer SUV 2000", "Acura RL Sedan 2012", "smart fortwo Convertible 2012"]
    scipy.io.savemat(folder / "devkit/cars_meta.mat", {"class_names": names})
    for part, file, count in (
        ("train", "devkit/cars_train_annos.mat", 9),
        ("test", "cars_test_annos_withlabels.mat", 6),
    ):
        records = np.empty((1, count), dtype=fields)
        for i in range(count):
            records[0, i] = (np.uint16(1), np.uint8(i % 3 + 1), f"{i + 1:05d}.jpg")
            save(folder / f"cars_{part}/{i + 1:05d}.jpg", i)
        scipy.io.savemat(folder / file, {"annotations": records})


def write_cub(root: Path) -> Path:
    folder = root / "CUB_200_2011"
    names = ["001.Black_footed_Albatross", "002.Laysan_Albatross"]
    lists: dict[str, list[str]] = {"images": [], "image_class_labels": [], "train_test_split": []}
    for i in range(12):
        name = names[i // 6]
        file = f"{name}/{name[4:]}_{i:04d}_796111.jpg"
        save(folder / "images" / file, i)
        lists["images"].append(f"{i + 1} {file}")
        lists["image_class_labels"].append(f"{i + 1} {i // 6 + 1}")
        lists["train_test_split"].append(f"{i + 1} {int(i % 3 > 0)}")
    lists["classes"] = [f"{i + 1} {name}" for i, name in enumerate(names)]
    for name, lines in lists.items():
        (folder / f"{name}.txt").write_text("\n".join(lines) + "\n")
    return folder


# ---------------------------------------------------------------- reading them


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
    pixels = first[3].reshape(3, 32, 32).transpose(1, 2, 0)  # rows of 1024 reds, 1024 greens, 1024 blues
    assert np.array_equal(data._parts["train"].images[3], pixels)
    loader = data.eval_loader("test")
    images, labels = next(iter(loader))
    assert images.shape[1:] == (3, 16, 16)
    assert labels.tolist() == [index % classes for _, index in list(loader.sampler)[: len(labels)]]


def test_damaged_cifar_is_recognised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data_config: Config) -> None:
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
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data_config: Config, known: Callable[..., None]
) -> None:
    write_flowers(tmp_path, monkeypatch)
    known("flowers102", md5=None)
    data = open_data(data_config("flowers102", root=str(tmp_path), select_best_on="test"), SPEC, 0)
    assert data.splits == {"train": 6, "test": 6}
    assert data.num_classes == 102 == LISTED["flowers102"].classes
    assert data._parts["test"].labels.tolist() == [0, 1, 101] * 2
    assert data._parts["train"].images[3].endswith("image_00004.jpg")
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
    assert "taken the download away" in message
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
    # data.root may also be the folder itself
    assert open_data(data_config("cars", root=str(tmp_path / "stanford_cars")), SPEC, 0).splits == data.splits
    (tmp_path / "stanford_cars/devkit/cars_meta.mat").unlink()
    assert "lacks cars_meta.mat" in str(missing_data(config))


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


def test_truncated_and_mistaken_archives_put_there_by_hand(tmp_path: Path, data_config: Config) -> None:
    folder = write_cub(tmp_path / "elsewhere")
    archive = tmp_path / "data/CUB_200_2011.tgz"
    config = data_config("cub200", root=str(tmp_path / "data"))
    pack(archive, folder)
    archive.write_bytes(archive.read_bytes()[:-2000])
    with pytest.raises(UserError, match=r"CUB_200_2011\.tgz cannot be unpacked"):
        open_data(config, SPEC, 0)
    assert not (tmp_path / "data/CUB_200_2011").exists()  # never half a data set
    archive.write_bytes(b"not an archive")
    with pytest.raises(UserError, match="cannot be unpacked"):
        open_data(config, SPEC, 0)
    pack(archive, folder / "images.txt")
    with pytest.raises(UserError, match=r"does not hold the folder CUB_200_2011/ \(it holds images\.txt\)"):
        open_data(config, SPEC, 0)
    archive.write_bytes(b"")
    assert "incomplete or damaged" in str(missing_data(config))


def test_listed_images_that_are_not_there_and_damaged_lists(tmp_path: Path, data_config: Config) -> None:
    write_food(tmp_path)
    config = data_config("food101", root=str(tmp_path))
    (tmp_path / "food-101/images/waffles/test1.jpg").unlink()
    with pytest.raises(UserError, match=r"1 images that its lists name are not there.*waffles.test1\.jpg"):
        open_data(config, SPEC, 0)
    (tmp_path / "food-101/meta/test.json").write_text('{"waffles": [')
    with pytest.raises(UserError, match=r"the lists in .*food-101 cannot be read"):
        open_data(config, SPEC, 0)
    (tmp_path / "food-101/meta/test.json").unlink()
    assert "it lacks meta/test.json" in str(missing_data(config))
    folder = write_cub(tmp_path)
    (folder / "image_class_labels.txt").write_text("1 1\n")
    with pytest.raises(UserError, match="name different images"):
        open_data(data_config("cub200", root=str(tmp_path)), SPEC, 0)


# ---------------------------------------------------------------- fetching


class Handler(http.server.BaseHTTPRequestHandler):
    files: dict[str, bytes]
    mode = "whole"
    asked: list[str]

    def do_GET(self) -> None:
        self.asked.append(self.path)
        body = self.files.get(self.path.rsplit("/", 1)[-1])
        if body is None or self.mode == "gone":
            self.send_error(404)
            return
        if self.mode == "silent":
            time.sleep(3)
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        with contextlib.suppress(OSError):  # the reachability check closes after the headers
            self.wfile.write(body[: len(body) // 2] if self.mode == "breaks" else body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[type[Handler], str]]:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("no_proxy", "")
    handler = type("OneServer", (Handler,), {"files": {}, "asked": []})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as listening:
        thread = threading.Thread(target=listening.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield handler, f"http://127.0.0.1:{listening.server_port}"
        listening.shutdown()
        thread.join()


@pytest.fixture
def food_online(
    tmp_path: Path, server: tuple[type[Handler], str], known: Callable[..., None]
) -> tuple[type[Handler], Path]:
    """A small Food-101 on a local server, and the folder into which it is to be fetched."""
    handler, address = server
    write_food(tmp_path / "made")
    pack(tmp_path / "made/food-101.tar.gz", tmp_path / "made/food-101")
    body = (tmp_path / "made/food-101.tar.gz").read_bytes()
    handler.files["food-101.tar.gz"] = body
    known("food101", url=f"{address}/food-101.tar.gz", size=len(body), md5=hashlib.md5(body).hexdigest())
    return handler, tmp_path / "data"


def test_what_can_be_fetched_is_fetched_once(food_online: tuple[type[Handler], Path], data_config: Config) -> None:
    handler, root = food_online
    config = data_config("food101", root=str(root), download=True)
    assert missing_data(config) is None
    assert not root.exists()  # asking fetches nothing
    assert open_data(config, SPEC, 0).splits == {"train": 6, "val": 2, "test": 4}
    asked = len(handler.asked)
    assert open_data(config, SPEC, 0).splits == {"train": 6, "val": 2, "test": 4}
    assert len(handler.asked) == asked
    assert sorted(p.name for p in root.iterdir()) == ["food-101", "food-101.tar.gz"]


def test_download_false_fetches_nothing(food_online: tuple[type[Handler], Path], data_config: Config) -> None:
    handler, root = food_online
    message = str(missing_data(data_config("food101", root=str(root), download=False)))
    assert "data.download=false" in message
    assert handler.asked == []


def test_a_partial_archive_is_recognised_and_replaced(
    food_online: tuple[type[Handler], Path], data_config: Config
) -> None:
    handler, root = food_online
    root.mkdir()
    (root / "food-101.tar.gz").write_bytes(handler.files["food-101.tar.gz"][:500])
    message = str(missing_data(data_config("food101", root=str(root), download=False)))
    assert "there are 500 bytes of it: incomplete" in message
    assert len(open_data(data_config("food101", root=str(root), download=True), SPEC, 0).class_names) == 2


def test_an_archive_of_the_right_length_with_other_content_is_refused(
    food_online: tuple[type[Handler], Path], data_config: Config
) -> None:
    handler, root = food_online
    root.mkdir()
    body = bytearray(handler.files["food-101.tar.gz"])
    body[len(body) // 2] ^= 1
    (root / "food-101.tar.gz").write_bytes(body)
    with pytest.raises(UserError, match="md5 differs"):
        open_data(data_config("food101", root=str(root), download=True), SPEC, 0)


def test_downloads_that_fail_leave_nothing_behind(
    food_online: tuple[type[Handler], Path], data_config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    handler, root = food_online
    config = data_config("food101", root=str(root), download=True)
    handler.mode = "breaks"
    with pytest.raises(UserError, match="broke off after"):
        open_data(config, SPEC, 0)
    handler.mode = "whole"
    good = handler.files["food-101.tar.gz"]
    handler.files["food-101.tar.gz"] = b"x" * len(good)
    with pytest.raises(UserError, match="not the expected checksum"):
        open_data(config, SPEC, 0)
    handler.files["food-101.tar.gz"] = good + b"more"
    assert "has" in str(missing_data(config))  # the host answers with another length
    handler.files["food-101.tar.gz"] = good
    usage = type("Usage", (), {"free": 10})
    monkeypatch.setattr(fetch.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(UserError, match="10 bytes free"):
        open_data(config, SPEC, 0)
    assert list(root.iterdir()) == []


def test_a_host_that_refuses_or_is_silent_is_reported_in_time(
    food_online: tuple[type[Handler], Path], data_config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    handler, root = food_online
    config = data_config("food101", root=str(root), download=True)
    handler.mode = "gone"
    assert "answers 404" in str(missing_data(config))
    handler.mode = "silent"
    monkeypatch.setattr(fetch, "PROBE_SECONDS", 0.3)
    assert "cannot be fetched" in str(missing_data(config))
    monkeypatch.setattr(fetch, "_ask", lambda *_: time.sleep(2))  # a name that is looked up for ever
    assert "no answer within" in str(missing_data(config))


def test_the_proxy_of_the_environment_is_used_and_its_password_not_shown(
    server: tuple[type[Handler], str], data_config: Config, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    handler, address = server
    handler.files["food-101.tar.gz"] = b"x"
    proxy = address.replace("http://", "http://user:secret@")
    monkeypatch.setenv("http_proxy", proxy)
    config = data_config("food101", root=str(tmp_path), download=True)
    message = str(missing_data(config))
    assert handler.asked == ["http://data.vision.ee.ethz.ch/cvl/food-101.tar.gz"]
    assert "through the proxy 127.0.0.1" in message
    assert "answers with 1 bytes" in message
    assert "secret" not in message


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
        for archive in LISTED[name].archives:
            assert str(tmp_path / archive.path) in message
            assert str(archive.url) in message
        assert "Name or service not known" in message
        assert "data=folder data.root=DIR" in message
        assert "data=digits" in message
        with pytest.raises(UserError) as error:
            open_data(config, SPEC, 0)
        assert str(error.value) == message
    assert missing_data(data_config("digits")) is None


def test_a_place_that_cannot_be_written(food_online: tuple[type[Handler], Path], data_config: Config) -> None:
    _, root = food_online
    root.write_text("a file where the folder should be")
    with pytest.raises(UserError, match=r"food-101\.tar\.gz"):
        open_data(data_config("food101", root=str(root), download=True), SPEC, 0)


# ---------------------------------------------------------------- the table and the configuration


def test_addresses_and_checksums_are_torchvisions() -> None:
    def table(name: str) -> dict[str, tuple[str | None, str | None]]:
        return {str(a.url): (a.path.rsplit("/", 1)[-1], a.md5) for a in LISTED[name].archives}

    for name, kind in (("cifar10", datasets.CIFAR10), ("cifar100", datasets.CIFAR100)):
        assert table(name) == {kind.url: (kind.filename, kind.tgz_md5)}
    prefix = datasets.Flowers102._download_url_prefix
    assert table("flowers102") == {
        prefix + file: (file, sum_) for file, sum_ in datasets.Flowers102._file_dict.values()
    }
    assert table("food101") == {datasets.Food101._URL: ("food-101.tar.gz", datasets.Food101._MD5)}
    assert table("pets") == {u: (u.rsplit("/", 1)[-1], m) for u, m in datasets.OxfordIIITPet._RESOURCES}
    assert set(table("aircraft")) == {datasets.FGVCAircraft._URL}


def test_every_data_set_has_a_configuration_that_holds_all_settings() -> None:
    files = {path.stem: yaml.safe_load(path.read_text()) for path in CONF.glob("*.yaml")}
    assert set(files) == {"folder", "digits", *LISTED}
    for name, settings in files.items():
        assert settings["name"] == name
        assert set(settings) == set(DataConfig.model_fields)
        config = DataConfig(**settings)
        assert config.select_best_on == "val", "choosing on the test split is a recipe's business"
        assert set(settings["augment"]) == set(type(config.augment).model_fields)


def test_archive_states(tmp_path: Path) -> None:
    archive = Archive("a.tgz", "a", size=4, holds=("list.txt",))
    assert archive.state(tmp_path) == "absent"
    (tmp_path / "a.tgz").write_bytes(b"abc")
    assert archive.state(tmp_path) == "partial"
    (tmp_path / "a.tgz").write_bytes(b"abcd")
    assert archive.state(tmp_path) == "packed"
    (tmp_path / "a").mkdir()
    assert archive.state(tmp_path) == "packed"  # an empty folder is nothing
    (tmp_path / "a/x").write_text("")
    assert archive.state(tmp_path) == "broken"
    (tmp_path / "a/list.txt").write_text("")
    assert archive.state(tmp_path) == "ready"


def test_archives_cannot_write_elsewhere(tmp_path: Path) -> None:
    archive = tmp_path / "data/CUB_200_2011.tgz"
    archive.parent.mkdir()
    with tarfile.open(archive, "w:gz") as tar:
        member = tarfile.TarInfo("../../outside.txt")
        member.size = 1
        tar.addfile(member, io.BytesIO(b"x"))
    with pytest.raises(UserError, match="cannot be unpacked"):
        fetch.fetch(LISTED["cub200"].archives, tmp_path / "data")
    assert not (tmp_path / "outside.txt").exists()
