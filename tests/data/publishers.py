"""Small data sets in the formats of their publishers."""

from __future__ import annotations

import hashlib
import json
import pickle
import tarfile
from pathlib import Path

import numpy as np
import pytest
import scipy.io
from torchvision import datasets

from tests.data.pictures import save


def md5(path: Path) -> str:
    return hashlib.md5(path.read_bytes()).hexdigest()


def pack(archive: Path, *members: Path) -> None:
    archive.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(archive, "w:gz") as tar:
        for member in members:
            tar.add(member, arcname=member.name)


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
