"""Tests of pixels of mask files in every format, and of files with unreliable values."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from efficient_ft.core.errors import UserError
from efficient_ft.data.masks import raw_size, read_header, read_pixels

IDS = np.array([[0, 1, 2], [3, 1, 0]], dtype=np.uint8)


def _png(path: Path, bits: int, rows: list[bytes], width: int, color_type: int = 0) -> None:
    """Return a PNG file with values of any number of bits."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, len(rows), bits, color_type, 0, 0, 0)
    data = zlib.compress(b"".join(b"\0" + row for row in rows))
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", data) + chunk(b"IEND", b""))


@pytest.mark.parametrize(
    ("name", "image", "options"),
    [
        ("m.png", IDS, {}),
        ("m.bmp", IDS, {}),
        ("m.tif", IDS, {}),
        ("m.tif", IDS.astype(np.uint16), {}),
        ("m.tif", IDS.astype(np.uint16), {"compression": "tiff_adobe_deflate"}),
        ("m.tif", IDS.astype(np.uint16), {"compression": "tiff_lzw"}),
        ("m.tif", IDS.astype(np.int32), {}),
        ("m.png", IDS.astype(np.uint16), {}),
        ("m.png", np.stack([IDS] * 3, -1), {}),
        ("m.png", np.stack([*[IDS] * 3, np.full_like(IDS, 255)], -1), {}),
    ],
)
def test_ids_are_kept_by_every_format(tmp_path: Path, name: str, image: np.ndarray, options: dict[str, Any]) -> None:
    Image.fromarray(image).save(tmp_path / name, **options)
    assert (read_pixels(str(tmp_path / name)).ids == IDS).all()
    assert read_header(str(tmp_path / name)).size == (3, 2)


def test_big_endian_16_bits(tmp_path: Path) -> None:
    values = np.array([[0, 1, 300]], dtype=">u2")
    Image.frombytes("I;16B", (3, 1), values.tobytes()).save(tmp_path / "m.tif")
    assert read_pixels(str(tmp_path / "m.tif")).ids.tolist() == [[0, 1, 300]]


@pytest.mark.parametrize(
    ("bits", "row", "expected"),
    [(2, 0b00011011, [0, 1, 2, 3]), (4, 0x2F, [2, 15]), (1, 0b10100000, [1, 0, 1, 0, 0, 0, 0, 0])],
)
def test_gray_values_of_few_bits_are_not_scaled(tmp_path: Path, bits: int, row: int, expected: list[int]) -> None:
    _png(tmp_path / "m.png", bits, [bytes([row])], 8 // bits)
    assert read_pixels(str(tmp_path / "m.png")).ids[0].tolist() == expected


def test_palettes_have_indices_and_colors(tmp_path: Path) -> None:
    image = Image.fromarray(IDS, mode="P")
    image.putpalette([9, 8, 7, 1, 1, 1, 2, 3, 4, 5, 5, 5])
    for name in ("m.png", "m.bmp", "m.tif", "m.gif"):
        image.save(tmp_path / name)
        pixels = read_pixels(str(tmp_path / name))
        assert (pixels.ids == IDS).all()
        assert pixels.colors is not None
        assert pixels.colors[0].tolist() == [0x090807, 0x010101, 0x020304]
        palette = read_header(str(tmp_path / name)).palette
        assert palette is not None
        assert palette[:3].tolist() == [[9, 8, 7], [1, 1, 1], [2, 3, 4]]


def _alpha() -> Image.Image:
    return Image.fromarray(np.stack([IDS] * 4, -1))


@pytest.mark.parametrize(
    ("write", "expected"),
    [
        (lambda p: Image.fromarray(IDS).save(p, format="jpeg"), "got JPEG. This format does not store exact values"),
        (lambda p: Image.fromarray(IDS).convert("RGB").save(p, format="webp", lossless=True), "got WEBP"),
        (lambda p: Image.fromarray(IDS).save(p, format="tiff", compression="jpeg"), "got TIFF with jpeg compression"),
        (
            lambda p: Image.fromarray(IDS).save(
                p, format="tiff", save_all=True, append_images=[Image.fromarray(IDS)] * 2
            ),
            "must have one page, got 3",
        ),
        (lambda p: Image.fromarray(IDS.astype(np.float32)).save(p, format="tiff"), "got floating-point values"),
        (lambda p: Image.fromarray(IDS).convert("CMYK").save(p, format="tiff"), "got the mode CMYK"),
        (lambda p: _alpha().save(p), "the transparency of the mask varies"),
        (lambda p: _png(p, 16, [bytes([0, 1] * 3)], 1, 2), "3 channels of 16 bits"),
        (
            lambda p: Image.fromarray(IDS).convert("1").save(p, format="tiff", tiffinfo={262: 0}),
            "the value 0 is white in this file",
        ),
        (lambda p: p.write_bytes(b"nothing"), "cannot be read as a mask"),
        (lambda p: p.write_bytes(b""), "cannot be read as a mask"),
    ],
)
def test_files_without_exact_ids_are_rejected(tmp_path: Path, write: Any, expected: str) -> None:
    write(tmp_path / "m.png")
    with pytest.raises(UserError, match=rf"m\.png: .*{expected}"):
        read_pixels(str(tmp_path / "m.png"))


@pytest.mark.parametrize("name", ["i.jpg", "i.png", "i.tif", "late.png"])
def test_orientations_of_images_are_found(tmp_path: Path, name: str) -> None:
    exif = Image.Exif()
    exif[274] = 6
    path = tmp_path / name
    Image.fromarray(np.zeros((30, 50, 3), dtype=np.uint8)).save(path, exif=exif)
    if name == "late.png":  # some programs write the EXIF block after the pixels
        raw = path.read_bytes()
        start = raw.index(b"eXIf") - 4
        length = int.from_bytes(raw[start : start + 4], "big") + 12
        end = raw.index(b"IEND") - 4
        path.write_bytes(raw[:start] + raw[start + length : end] + raw[start : start + length] + raw[end:])
    assert raw_size(str(path)) == ((50, 30), 6)
    if name != "i.jpg":
        with pytest.raises(UserError, match="an EXIF orientation tag"):
            read_pixels(str(path))


def test_images_without_an_orientation(tmp_path: Path) -> None:
    Image.fromarray(IDS).save(tmp_path / "i.png")
    assert raw_size(str(tmp_path / "i.png")) == ((3, 2), 1)
    (tmp_path / "x.png").write_bytes(b"nothing")
    assert raw_size(str(tmp_path / "x.png")) is None


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_mask_of_stored_pixels_is_turned_as_its_image(tmp_path: Path, orientation: int) -> None:
    from efficient_ft.data import read_image

    exif = Image.Exif()
    exif[274] = orientation
    values = np.arange(12, dtype=np.uint8).reshape(3, 4) * 20
    Image.fromarray(values).save(tmp_path / "i.png", exif=exif)
    Image.fromarray(values).save(tmp_path / "m.png")
    upright = np.asarray(read_image(tmp_path / "i.png"))[..., 0]
    assert (read_pixels(str(tmp_path / "m.png"), orientation).ids == upright).all()
