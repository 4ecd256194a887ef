"""The code in the documentation runs."""

from __future__ import annotations

import re

import pytest

from tests.conftest import REPOSITORY

PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_python_blocks_run_in_the_order_of_the_page(page, capsys):
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    assert blocks, f"{page.name} shows no code"
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, page.name, "exec"), names)


def test_nothing_is_left_to_fill_in():
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        assert not re.findall(r"\b[A-Z]+_[A-Z_]+\b(?=\n)|placeholder", text), page
