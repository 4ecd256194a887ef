"""Tests of numbers with nouns and verbs."""

from __future__ import annotations

import pytest

from efficient_ft.data.counts import counted, verb


@pytest.mark.parametrize(
    ("count", "noun", "text"),
    [(1, "image", "1 image"), (0, "image", "0 images"), (2000, "text", "2,000 texts"), (3, "class", "3 classes"),
     (1, "class", "1 class"), (2, "more box", "2 more boxes")],
)  # fmt: skip
def test_nouns_agree_with_numbers(count: int, noun: str, text: str) -> None:
    assert counted(count, noun) == text


def test_verbs_agree_with_numbers() -> None:
    assert [verb(count) for count in (0, 1, 2)] == ["have", "has", "have"]
    assert [verb(count, "is", "are") for count in (1, 2)] == ["is", "are"]
