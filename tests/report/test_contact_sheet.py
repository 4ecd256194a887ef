"""Tests of the contact sheet, which shows samples after preprocessing: pixels, labels, masks and texts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from PIL import Image

from efficient_ft.core.input_spec import IGNORED, InputSpec
from efficient_ft.data.segmentation_data import overlaid
from efficient_ft.data.transforms import to_pictures
from efficient_ft.report.contact_sheet import Cell, ContactSheet


def test_normalized_pixels_become_the_picture_again() -> None:
    input = InputSpec((5, 7), (0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    original = torch.randint(0, 256, (2, 3, 5, 7), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (input.mean, input.std))
    pictures = to_pictures((original / 255 - mean) / std, input)
    for picture, pixels in zip(pictures, original, strict=True):
        assert np.array_equal(np.asarray(picture), pixels.permute(1, 2, 0).numpy())
    gray = to_pictures(torch.zeros(1, 1, 5, 7), InputSpec((5, 7), (0.5,), (0.5,)))[0]
    assert np.asarray(gray).tolist() == np.full((5, 7, 3), 128).tolist()


def test_pixels_without_a_label_keep_their_color() -> None:
    picture = Image.new("RGB", (2, 1), (100, 100, 100))
    mixed = np.asarray(
        overlaid(picture, np.array([[1, IGNORED]], dtype=np.uint8), np.array([[0, 0, 0], [200, 0, 0]], dtype=np.uint8))
    )
    assert mixed[0, 0].tolist() == [150, 50, 50]
    assert mixed[0, 1].tolist() == [100, 100, 100]


def test_a_sheet_is_written_as_image_and_as_a_page_that_runs_nothing(tmp_path: Path) -> None:
    cells = [Cell(Image.new("RGB", (64, 32 + i), (255, 0, 0)), f"<script>{i}") for i in range(7)]
    cells.append(Cell("a text\x1b[31m " * 60, "Größe 東京"))
    sheet = ContactSheet("8 samples", cells, [("road", (1, 2, 3))])
    sheet.write_image(tmp_path / "sheet.png")
    with Image.open(tmp_path / "sheet.png") as image:
        red = (np.asarray(image.convert("RGB")) == (255, 0, 0)).all(-1)
        assert image.width > 6 * 176
    assert red.mean() > 0.1
    sheet.write_html(tmp_path / "sheet.html", ["data: <b>"])
    page = (tmp_path / "sheet.html").read_text(encoding="utf-8")
    assert "<script" not in page
    assert "&lt;script&gt;0" in page
    assert "data: &lt;b&gt;" in page
    assert page.count("<figure>") == 8
    assert "http" not in page
