"""Elements of the page of a run: tables that the script of the page can sort, definitions and scrollable regions."""

from __future__ import annotations

import base64
import io
from collections.abc import Collection, Mapping, Sequence
from html import escape

from PIL import Image

from efficient_ft.core.text import plain_line

#: A cell of a table: its text, or its text and the number by which the column is sorted (None for a missing value).
Cell = str | tuple[str, float | None]
#: Maximum width and height of a thumbnail in pixels, and its JPEG quality.
_SIDE, _QUALITY = 128, 82


def html_table(rows: Sequence[Sequence[Cell]], title: str, *, words: Collection[int] = (0,), sort: bool = False) -> str:
    """Return a table in a region that scrolls and that can be focused.

    Args:
        rows: header row, which consists of texts, and body rows. Missing cells at the end of a row are empty.
        title: name of the table for screen readers.
        words: indices of the columns that contain text.
        sort: if True, the header consists of buttons that sort the table.
    """
    header = "".join(
        f'<th scope="col"{_word(number in words)}>'
        + (f'<button type="button">{escape(str(name))}</button>' if sort else escape(str(name)))
        + "</th>"
        for number, name in enumerate(rows[0])
    )
    full = [[*row, *[""] * (len(rows[0]) - len(row))] for row in rows[1:]]
    body = "".join(
        "<tr>" + "".join(_cell(cell, number in words) for number, cell in enumerate(row)) + "</tr>" for row in full
    )
    return scrollable(
        f'<table class="{"sort" if sort else "plain"}"><thead><tr>{header}</tr></thead><tbody>{body}</tbody></table>',
        title,
    )


def scrollable(content: str, title: str) -> str:
    """Return a region that scrolls, and that the keyboard can reach."""
    return f'<div class="wide" role="region" tabindex="0" aria-label="{escape(title)}">{content}</div>'


def definitions(facts: Mapping[str, str]) -> str:
    """Return a list of titles and facts."""
    rows = (f"<dt>{escape(name)}</dt><dd>{escape(plain_line(text))}</dd>" for name, text in facts.items())
    return f"<dl>{''.join(rows)}</dl>"


def notes(texts: Sequence[str]) -> str:
    """Return one paragraph for each text."""
    return "".join(f'<p class="note">{escape(plain_line(text))}</p>' for text in texts)


def image(data: bytes, form: str, alt: str) -> str:
    """Return an image that is part of the page. `form` is png or jpeg."""
    source = f"data:image/{form};base64,{base64.b64encode(data).decode()}"
    return f'<img src="{source}" alt="{escape(alt)}">'


def thumbnail(picture: Image.Image, alt: str) -> str:
    """Return a thumbnail as a JPEG image."""
    small, stream = picture.convert("RGB"), io.BytesIO()
    small.thumbnail((_SIDE, _SIDE))
    small.save(stream, format="jpeg", quality=_QUALITY)
    return image(stream.getvalue(), "jpeg", alt)


def _word(word: bool) -> str:
    return ' class="word"' if word else ""


def _cell(cell: Cell, word: bool) -> str:
    if isinstance(cell, str):
        return f"<td{_word(word)}>{escape(plain_line(cell))}</td>"
    text, value = cell
    return f'<td{_word(word)} data-value="{"" if value is None else f"{value:.6g}"}">{escape(plain_line(text))}</td>'
