"""Hooks of mkdocs: docstrings in the reference, and no links that lead out of docs/."""

from __future__ import annotations

import importlib.util
import posixpath
import re
from typing import Any

_API = re.compile(r"^<!-- api: (\S+)(.*) -->$", re.MULTILINE)
_LINK = re.compile(r"\[([^\]]+)\]\((?!https?://|#)([^)#]+)(#[^)]*)?\)")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Return a page for the site."""
    folder = posixpath.dirname(page.file.src_uri)

    def docstring(match: re.Match[str]) -> str:
        members = match[2].split()
        options = f"members: {[] if members == ['-'] else members}, filters: []" if members else "filters: ['!^_']"
        if members == ["*"]:
            options = "inherited_members: true"
        try:
            is_module = importlib.util.find_spec(match[1]) is not None
        except ModuleNotFoundError:  # a class, whose module is not a package
            is_module = False
        return f"::: {match[1]}\n    options: {{show_root_heading: {str(not is_module).lower()}, {options}}}"

    def inside(match: re.Match[str]) -> str:
        leads_out = posixpath.normpath(posixpath.join(folder, match[2])).startswith("..")
        return match[1] if leads_out else match[0]

    return _LINK.sub(inside, _API.sub(docstring, markdown))
