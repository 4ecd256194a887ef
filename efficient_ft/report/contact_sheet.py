"""Contact sheet of training samples, written as a PNG image or an HTML page."""

from __future__ import annotations

import base64
import contextlib
import importlib.util
import io
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw, ImageFont

from efficient_ft.core.input_spec import InputSpec
from efficient_ft.core.text import plain_line
from efficient_ft.data.opened import OpenedData
from efficient_ft.record.files import write_atomically, write_text_atomically

#: Sizes in pixels: width and maximum height of an image, gap between cells, and height of a line of text.
_WIDTH, _HEIGHT, _GAP, _LINE = 176, 264, 8, 15
#: Maximum numbers of characters per line, lines per caption, and lines per text.
_LETTERS, _CAPTION_LINES, _TEXT_LINES = 27, 2, 14

_Font = ImageFont.FreeTypeFont | ImageFont.ImageFont

_STYLE = """body{font:14px system-ui,sans-serif;margin:1.5em;color:#222;background:#fff}
.sheet{display:grid;grid-template-columns:repeat(auto-fill,minmax(190px,1fr));gap:12px}
figure{margin:0;border:1px solid #ddd;padding:6px;overflow-wrap:anywhere}img{max-width:100%;image-rendering:auto}
figcaption{font-size:12px;margin-top:4px}p.text{white-space:pre-wrap;font-size:12px;margin:0;max-height:18em;overflow:auto}
.swatch{display:inline-block;width:.9em;height:.9em;margin:0 .3em 0 .9em;vertical-align:-.1em}
pre{white-space:pre-wrap}@media(prefers-color-scheme:dark){body{background:#111;color:#ddd}figure{border-color:#444}}"""


@dataclass(frozen=True)
class Cell:
    """A sample (an image or a text) with a caption."""

    content: Image.Image | str
    caption: str


@dataclass(frozen=True)
class ContactSheet:
    """Preprocessed and augmented training samples. `legend` contains the names and RGB colors of mask classes."""

    title: str
    cells: Sequence[Cell]
    legend: Sequence[tuple[str, tuple[int, int, int]]] = ()

    def write_image(self, file: Path) -> None:
        """Write the sheet as a PNG image with at most six cells per row."""
        columns = max(min(6, len(self.cells)), 1)
        font = _font()
        wide = columns * (_WIDTH + _GAP) + _GAP
        rows = [self.cells[start : start + columns] for start in range(0, len(self.cells), columns)]
        heights = [max(_height(cell) for cell in row) + (_CAPTION_LINES * _LINE) + _GAP for row in rows]
        per_line = max(wide // 150, 1)
        legend_lines = -(-len(self.legend) // per_line)
        head = _GAP + _LINE * 2
        whole = Image.new("RGB", (wide, head + sum(heights) + legend_lines * _LINE + _GAP), "white")
        draw = ImageDraw.Draw(whole)
        draw.text((_GAP, _GAP), plain_line(self.title)[: wide // 7], fill="black", font=font)
        top = head
        for row, height in zip(rows, heights, strict=True):
            for column, cell in enumerate(row):
                _draw(whole, draw, cell, (_GAP + column * (_WIDTH + _GAP), top), font)
            top += height
        for number, (name, color) in enumerate(self.legend):
            left, line = _GAP + number % per_line * 150, top + number // per_line * _LINE
            draw.rectangle((left, line + 2, left + 10, line + 12), fill=color)
            draw.text((left + 15, line), plain_line(name)[:20], fill="black", font=font)
        write_atomically(file, lambda path: whole.save(path, format="png"))

    def write_html(self, file: Path, lines: Sequence[str]) -> None:
        """Write the sheet as a self-contained HTML page that shows the report `lines` above the samples."""
        figures = []
        for cell in self.cells:
            if isinstance(cell.content, str):
                content = f'<p class="text">{escape(cell.content)}</p>'
            else:
                buffer = io.BytesIO()
                cell.content.save(buffer, format="png")
                coded = base64.b64encode(buffer.getvalue()).decode()
                content = f'<img src="data:image/png;base64,{coded}" alt="{escape(cell.caption)}">'
            figures.append(f"<figure>{content}<figcaption>{escape(cell.caption)}</figcaption></figure>")
        legend = "".join(
            f'<span class="swatch" style="background:rgb{color}"></span>{escape(name)}' for name, color in self.legend
        )
        report = escape("\n".join(lines))
        page = (
            f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(self.title)}</title>'
            f"<style>{_STYLE}</style><h1>{escape(self.title)}</h1><pre>{report}</pre>"
            f'<div class="sheet">{"".join(figures)}</div><p>{legend}</p></html>\n'
        )
        write_text_atomically(file, page)


def contact_sheet(data: OpenedData[Any, Any], input: InputSpec, count: int) -> ContactSheet:
    """Return a sheet of at most `count` training samples: augmented images, images with masks, or tokenized texts.

    Raises:
        UserError: If a sample cannot be read.
    """
    (inputs, targets), indices = data.training_batch(count)
    title = f"{len(indices)} training {data.noun}s of {data.name} as the network receives them in training ({input})"
    cells = [Cell(content, label) for content, label in data.labeled(inputs, targets, input)]
    return ContactSheet(title, cells, data.legend())


def _font() -> _Font:
    """Return the font DejaVu Sans, which also covers Greek, Cyrillic, Arabic and Hebrew.

    If DejaVu Sans is not installed, return the default font of Pillow, which covers Latin.
    """
    places = ["DejaVuSans.ttf"]
    spec = importlib.util.find_spec("matplotlib")
    if spec is not None and spec.origin is not None:
        places.append(str(Path(spec.origin).parent / "mpl-data" / "fonts" / "ttf" / "DejaVuSans.ttf"))
    for place in places:
        with contextlib.suppress(OSError):
            return ImageFont.truetype(place, 12)
    return ImageFont.load_default(size=12)


def _height(cell: Cell) -> int:
    if isinstance(cell.content, str):
        return len(_wrapped(cell.content, _TEXT_LINES)) * _LINE
    return _fitted(cell.content)[1]


def _fitted(picture: Image.Image) -> tuple[int, int]:
    factor = min(_WIDTH / picture.width, _HEIGHT / picture.height)
    return max(round(picture.width * factor), 1), max(round(picture.height * factor), 1)


def _wrapped(text: str, lines: int) -> list[str]:
    found = textwrap.wrap(plain_line(text), _LETTERS, max_lines=lines, placeholder=" …")
    return found or [""]


def _draw(whole: Image.Image, draw: ImageDraw.ImageDraw, cell: Cell, corner: tuple[int, int], font: _Font) -> None:
    left, top = corner
    if isinstance(cell.content, str):
        lines = _wrapped(cell.content, _TEXT_LINES)
        draw.multiline_text((left, top), "\n".join(lines), fill="black", font=font, spacing=_LINE - 12)
    else:
        size = _fitted(cell.content)
        enlarged = size[0] > cell.content.width
        resample = Image.Resampling.NEAREST if enlarged else Image.Resampling.BICUBIC
        whole.paste(cell.content.resize(size, resample), (left, top))
    for number, line in enumerate(_wrapped(cell.caption, _CAPTION_LINES)):
        draw.text((left, top + _height(cell) + 2 + number * _LINE), line, fill="#444", font=font)
