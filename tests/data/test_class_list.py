"""Tests of class lists: encodings, ids, colors, comments and ambiguous lists."""

from __future__ import annotations

import codecs
from pathlib import Path

import pytest

from efficient_ft.core.errors import UserError
from efficient_ft.data.class_list import Color, parse_class_list, read_class_list

BOTH = [("sky", 0, None), ("road", 1, None)]


def _read(folder: Path, content: str | bytes, name: str = "classes.txt") -> list[tuple[str, int, Color | None]]:
    (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)
    return [(entry.name, entry.id, entry.color) for entry in parse_class_list(folder / name).entries]


@pytest.mark.parametrize(
    "content",
    [
        "sky\nroad\n",
        "\ufeffsky\nroad",
        "sky\r\nroad\r\n\r\n",
        "sky\rroad\r",
        "sky\nroad\n".encode("utf-16"),
        codecs.BOM_UTF16_BE + "sky\nroad\n".encode("utf-16-be"),
        "sky\nroad\n".encode("utf-16-le"),
        "sky\nroad\n".encode("utf-16-be"),
        "sky\nroad\n".encode("utf-32"),
        "# my classes\nsky\n#second\nroad # gray\n",
        "0 sky\n1 road",
        "0: sky\n1: road",
        "0,sky\n1,road",
        "0\tsky\n1\troad",
        "0. sky\n1. road",
        "1 road\n\n0 sky\n",
        "sky,0\nroad,1",
        "sky: 0\nroad: 1",
        "sky 0\nroad 1",
        "id,name\n0,sky\n1,road",
        "- sky\n- road",
        '"sky"\n"road"',
    ],
)
def test_names_and_ids_in_every_form_and_encoding(tmp_path: Path, content: str | bytes) -> None:
    assert _read(tmp_path, content) == BOTH


@pytest.mark.parametrize(
    "content",
    [
        "sky 128 128 128\nroad 1 2 3",
        "128 128 128 sky\n1 2 3 road",
        "128 128 128\tsky\n1 2 3\t\troad",
        "sky,#808080\nroad,#010203",
        "#808080 sky\n#010203 road",
        "name,r,g,b\nsky,128,128,128\nroad,1,2,3",
        "0 sky 128 128 128\n1 road 1 2 3",
        "# label:color_rgb:parts:actions\nsky:128,128,128::\nroad:1,2,3::",
    ],
)
def test_colors_in_every_form(tmp_path: Path, content: str) -> None:
    assert _read(tmp_path, content) == [("sky", 0, (128, 128, 128)), ("road", 1, (1, 2, 3))]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("class 1\nclass 2", [("class 1", 0), ("class 2", 1)]),
        ("car\n4 wheeler", [("car", 0), ("4 wheeler", 1)]),
        ("route 66\nother", [("route 66", 0), ("other", 1)]),
        ("background 0\ncell 255", [("background", 0), ("cell", 255)]),
        ("1 wall\n2 building", [("wall", 1), ("building", 2)]),
        ("7 road\n8 sidewalk\n11 building", [("road", 7), ("sidewalk", 8), ("building", 11)]),
        ("1 class 1\n2 class 2", [("class 1", 1), ("class 2", 2)]),
        ("0\n1\n2", [("0", 0), ("1", 1), ("2", 2)]),
        ("Straße\nciel bleu\n道路", [("Straße", 0), ("ciel bleu", 1), ("道路", 2)]),
    ],
)
def test_numbers_in_names_and_ids(tmp_path: Path, content: str, expected: list[tuple[str, int]]) -> None:
    assert [(name, number) for name, number, _ in _read(tmp_path, content)] == expected


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("a\n\nb\n", "line 2 is empty"),
        ("\na\nb\n", "line 1 is empty"),
        ("a\nb\na\n", "the class a occurs twice"),
        ("Cell\nbg\ncell\n", "the class cell differs from Cell only in case"),
        ("é\nb".encode("latin-1"), "is not UTF-8"),
        (b"\x89PNG\r\n\x1a\n\x00\x00\x00", "is not"),
        ("", "contains no class"),
        ("# nothing\n", "contains no class"),
        ("1\n2\n3", "numbers without names"),
        ("0 a\nb", "line 1 contains an id and a name, but line 2 contains a name"),
        ("a 1 2 3\nb", "line 1 contains a name and a color, but line 2 contains a name"),
        ("0 a\n0 b", "assigns the id 0 to both a and b"),
        ("0 a\n70000 b", "ids must be less than 65536, got 70000"),
        ("a 1 1 1\nb 1 1 1", "assigns the color 1 1 1 to both a and b"),
        ("a 300 1 1\nb 1 1 1", "colors must be integers from 0 to 255"),
        ("a 0.5 0.1 0.1\nb 0.1 0.1 0.1", "colors must be integers from 0 to 255"),
        ("1 2 3 4 5 a\n1 2 3 4 6 b", "is not a valid class"),
    ],
)
def test_lists_with_several_readings_are_rejected(tmp_path: Path, content: str | bytes, expected: str) -> None:
    with pytest.raises(UserError, match=expected):
        _read(tmp_path, content)


def test_the_file_is_chosen_and_colors_come_from_another_one(tmp_path: Path) -> None:
    assert read_class_list(tmp_path) is None
    (tmp_path / "label_colors.txt").write_text("1 2 3\tRoad\n0 0 0\t\tVoid\n4 5 6 sky\n")
    alone = read_class_list(tmp_path)
    assert alone is not None
    assert [(entry.name, entry.is_class) for entry in alone.entries] == [("Road", True), ("Void", False), ("sky", True)]
    (tmp_path / "classes.txt").write_text("sky\nroad\n")
    both = read_class_list(tmp_path)
    assert both is not None
    assert [(entry.name, entry.id, entry.color) for entry in both.entries] == [
        ("sky", 0, (4, 5, 6)),
        ("road", 1, (1, 2, 3)),
    ]
    (tmp_path / "classes.txt").write_text("sky\nsea\n")
    other = read_class_list(tmp_path)
    assert other is not None
    assert other.entries[0].color is None
    assert other.notes == (
        "The classes are read from classes.txt. The following files are not used: label_colors.txt.",
    )
