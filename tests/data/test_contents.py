"""Tests of the content hashes by which a resumed run identifies its data."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from efficient_ft.data import contents
from efficient_ft.data.file_list import Paths
from efficient_ft.data.listing import Listing, Samples
from efficient_ft.data.masks import Classes, MaskListing, MaskSamples
from efficient_ft.data.texts import TextListing, Texts


def of_masks(root: Path) -> MaskListing:
    places = {kind: [str(root / kind / f"{n}.png") for n in range(3)] for kind in ("images", "masks")}
    return MaskListing(Classes(("a", "b"), (0, 1)), MaskSamples(places["images"], places["masks"]))


@pytest.fixture
def masks(tmp_path: Path) -> Path:
    for kind in ("images", "masks"):
        (tmp_path / kind).mkdir()
        for number in range(3):
            Image.fromarray(np.full((4, 4), number % 2, dtype=np.uint8)).save(tmp_path / kind / f"{number}.png")
    return tmp_path


def changes(before: object, after: object, root: Path | str = "") -> list[str]:
    noted = contents.looked_at(before, root).read().record()
    return contents.looked_at(after, root).read().changes(noted)


def test_an_edited_mask_is_named(masks: Path) -> None:
    noted = contents.looked_at(of_masks(masks), masks).read().record()
    assert contents.looked_at(of_masks(masks), masks).read().changes(noted) == []
    Image.fromarray(np.full((4, 4), 0, dtype=np.uint8)).save(masks / "masks" / "1.png")
    found = contents.looked_at(of_masks(masks), masks).read().changes(noted)
    assert found == [f"train masks: 1 of 3 entries changed (masks{os.sep}1.png)"]


def test_edited_classes_are_named(masks: Path) -> None:
    one = of_masks(masks)
    other = MaskListing(Classes(("b", "a"), (0, 1)), one.train)
    assert changes(one, other, masks) == ["classes: 2 of 2 entries changed (b, a)"]
    other = MaskListing(Classes(("a", "b"), (0, 1), colors=((0, 0, 0), (9, 9, 9))), one.train)
    assert changes(one, other, masks) == ["classes: 2 of 2 entries changed (a, b)"]


def test_an_edited_text_and_an_edited_label_are_named() -> None:
    def listing(texts: list[str], labels: list[int]) -> TextListing:
        return TextListing(["x", "y"], Texts([(text,) for text in texts], np.array(labels)))

    one = listing(["a", "b", "c"], [0, 1, 0])
    assert changes(one, listing(["a", "b", "c"], [0, 1, 0])) == []
    assert changes(one, listing(["a", "B", "c"], [0, 1, 0])) == ["train: 1 of 3 entries changed (samples 2–2)"]
    assert changes(one, listing(["a", "b", "c"], [0, 1, 1])) == ["train: 1 of 3 entries changed (samples 3–3)"]
    assert changes(one, listing(["a", "b"], [0, 1])) == ["train: the number of entries changed from 3 to 2"]


def test_pixels_in_memory_are_compared() -> None:
    pixels = np.zeros((300, 2, 2, 3), dtype=np.uint8)
    other = pixels.copy()
    other[299, 1, 1, 1] = 1
    one, two = (Listing(["x"], Samples(each, np.zeros(300, dtype=np.int64))) for each in (pixels, other))
    assert changes(one, two) == ["train: 1 of 150 entries changed (samples 299–300)"]


def test_of_many_files_some_are_read_and_the_first_of_each_class(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contents, "FILES", 4)
    names = [str(tmp_path / f"{number:03}") for number in range(100)]
    labels = np.array([0] * 50 + [1] * 49 + [2])
    looked = contents.looked_at(Listing(["x", "y", "z"], Samples(Paths(names), labels)), tmp_path)
    assert looked.parts["train"].names == ["000", "033", "050", "066", "099"]
    assert looked.parts["train"].count == 100


def test_of_a_long_file_pieces_are_read(tmp_path: Path) -> None:
    file = tmp_path / "long"
    file.write_bytes(bytes(3 << 20))
    before = contents._of_file(str(file))
    for place in (0, (3 << 20) - 1):
        data = bytearray(3 << 20)
        data[place] = 1
        file.write_bytes(data)
        assert contents._of_file(str(file)) != before
    file.write_bytes(bytes((3 << 20) - 1))
    assert contents._of_file(str(file)) != before


def test_a_file_that_is_not_long_and_weights_of_any_length_are_read_whole(tmp_path: Path) -> None:
    def noticed(size: int, whole: bool) -> bool:
        found, file = [], tmp_path / "file"
        for value in (0, 1):
            data = bytearray(size)
            data[100_000] = value  # between two hashed pieces
            file.write_bytes(data)
            hashes = contents.files_contents("x", [file]).parts["x"].hashes if whole else contents._of_file(str(file))
            found.append(hashes)
        return found[0] != found[1]

    assert noticed(1 << 20, whole=False)
    assert not noticed(3 << 20, whole=False)
    assert noticed(3 << 20, whole=True)
