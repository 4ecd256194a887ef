"""Tests of image files: value ranges, formats, size limit, bands, frames, orientation and invalid contents."""

from __future__ import annotations

import struct
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageCms, features

from efficient_ft.core.errors import SettingError, UserError
from efficient_ft.data import Decoding, Transform, images, open_data, read_image
from efficient_ft.data.images import EXTENSIONS, file_kind, is_image, reading_hint
from tests.data.pictures import SPEC, picture, save

RAMP = np.linspace(0, 4095, 20 * 24).reshape(20, 24).round().astype(np.uint16)
BRIGHT = (RAMP / (4095 / 255)).round().astype(np.uint8)


def gray(image: Image.Image) -> np.ndarray:
    values = np.asarray(image)
    assert (values == values[..., :1]).all()
    return values[..., 0]


def tiff(path: Path, pixels: np.ndarray, *, photometric: int = 1, extra: tuple[int, ...] = ()) -> Path:
    """Return an uncompressed little-endian TIFF file of shape (H, W) or (H, W, bands)."""
    height, width = pixels.shape[:2]
    bands, bits = (pixels.shape[2] if pixels.ndim == 3 else 1), pixels.dtype.itemsize * 8
    kind = {"u": 1, "i": 2, "f": 3}[pixels.dtype.kind]
    data = pixels.tobytes()
    tables = struct.pack(f"<{bands}H", *[bits] * bands) + struct.pack(f"<{bands}H", *[kind] * bands)
    tables += struct.pack(f"<{len(extra)}H", *extra)
    at = 8 + len(data)

    def shorts(tag: int, values: list[int], place: int) -> bytes:
        if len(values) <= 2:
            return struct.pack("<HHI", tag, 3, len(values)) + struct.pack(f"<{len(values)}H", *values).ljust(4, b"\0")
        return struct.pack("<HHII", tag, 3, len(values), place)

    entries = [
        struct.pack("<HHII", 256, 4, 1, width), struct.pack("<HHII", 257, 4, 1, height),
        shorts(258, [bits] * bands, at), shorts(259, [1], 0), shorts(262, [photometric], 0),
        struct.pack("<HHII", 273, 4, 1, 8), shorts(277, [bands], 0), struct.pack("<HHII", 278, 4, 1, height),
        struct.pack("<HHII", 279, 4, 1, len(data)),
    ]  # fmt: skip
    if extra:
        entries.append(shorts(338, list(extra), at + 4 * bands))
    entries.append(shorts(339, [kind] * bands, at + 2 * bands))
    directory = struct.pack("<H", len(entries)) + b"".join(entries) + bytes(4)
    path.write_bytes(b"II*\0" + struct.pack("<I", at + len(tables)) + data + tables + directory)
    return path


# ------------------------------------------------------------------------------------------ values of more than 8 bits
@pytest.mark.parametrize("kind", ["png", "tif", "big-endian", "pgm", "pgm-65535", "plain"])
def test_twelve_bits_in_sixteen_are_scaled_by_the_setting(tmp_path: Path, kind: str) -> None:
    file = tmp_path / f"x.{'pgm' if 'p' in kind and kind != 'png' else 'tif' if kind != 'png' else 'png'}"
    if kind.startswith("pgm"):
        most = kind.removeprefix("pgm-") if "-" in kind else "4095"
        file.write_bytes(f"P5 24 20 {most}\n".encode() + RAMP.astype(">u2").tobytes())
    elif kind == "plain":
        file.write_text("P2 24 20 4095\n" + " ".join(map(str, RAMP.ravel())))
    elif kind == "big-endian":
        Image.frombytes("I;16B", (24, 20), RAMP.astype(">u2").tobytes()).save(file)
    else:
        Image.fromarray(RAMP).save(file)
    read = gray(read_image(file, decoding=Decoding((0, 4095))))
    assert np.abs(read.astype(int) - BRIGHT).max() <= 1
    plain = gray(read_image(file))
    if kind in ("pgm", "plain"):  # these formats store the largest value
        assert np.abs(plain.astype(int) - BRIGHT).max() <= 1
    else:
        assert plain.max() == 16


def test_values_outside_of_the_range_are_clipped(tmp_path: Path) -> None:
    Image.fromarray(RAMP).save(tmp_path / "x.png")
    read = gray(read_image(tmp_path / "x.png", decoding=Decoding((1000, 2000))))
    assert (read[RAMP <= 1000] == 0).all()
    assert (read[RAMP >= 2000] == 255).all()
    assert 120 <= read[RAMP > 1495][0] <= 135


def test_the_range_changes_no_image_of_8_bits(tmp_path: Path) -> None:
    save(tmp_path / "x.png", 1)
    assert np.array_equal(read_image(tmp_path / "x.png", decoding=Decoding((0, 4095))), read_image(tmp_path / "x.png"))


@pytest.mark.parametrize(
    ("dtype", "most"), [(np.float32, 1.0), (np.float32, 7.5), (np.int32, 1 << 20), (np.int16, 900)]
)
def test_floats_and_32_bits_need_the_range(tmp_path: Path, dtype: type, most: float) -> None:
    values = (RAMP / 4095 * most - (100 if dtype == np.int16 else 0)).astype(dtype)
    file = tiff(tmp_path / "x.tif", values)
    with pytest.raises(UserError, match=r"x\.tif: .*have no fixed range .* Set data\.value_range=\[LOW, HIGH\]"):
        read_image(file)
    low = float(values.min())
    read = gray(read_image(file, decoding=Decoding((low, float(values.max())))))
    assert np.abs(read.astype(int) - BRIGHT).max() <= 1


def test_pixels_that_are_no_numbers_are_refused(tmp_path: Path) -> None:
    values = np.ones((4, 4), dtype=np.float32)
    values[1, 1] = np.nan
    with pytest.raises(UserError, match="some pixels of the image are not finite"):
        read_image(tiff(tmp_path / "x.tif", values), decoding=Decoding((0, 1)))


def test_zero_is_white_with_sixteen_bits_too(tmp_path: Path) -> None:
    wide = (BRIGHT.astype(np.uint16)) * 257
    for name, pixels in ("8", BRIGHT), ("16", wide):
        assert np.array_equal(gray(read_image(tiff(tmp_path / f"{name}.tif", pixels, photometric=0))), 255 - BRIGHT)


def test_colors_of_16_bits_and_the_range_are_refused(tmp_path: Path) -> None:
    file = tiff(tmp_path / "x.tif", np.repeat(RAMP[..., None], 3, axis=-1), photometric=2)
    assert np.asarray(read_image(file)).max() == 15
    with pytest.raises(UserError, match=r"16-bit colors, but data\.value_range maps only gray images"):
        read_image(file, decoding=Decoding((0, 4095)))


def test_the_range_is_part_of_what_is_kept(
    folders: Callable[..., Path], data_config: Callable[..., Any], tmp_path: Path
) -> None:
    root = folders(train={"a": 5, "b": 5}, test={"a": 1, "b": 1})
    for i in range(4):
        Image.fromarray(RAMP + np.uint16(i)).save(root / f"train/a/deep{i}.png")
    settings = {"root": str(root), "decoded_folder": str(tmp_path / "decoded"), "keep_decoded": "on"}
    dark = open_data(data_config("folder", **settings), SPEC, 0)
    bright = open_data(data_config("folder", **settings, value_range=(0, 4095)), SPEC, 0)
    assert dark.content_digest() != bright.content_digest()
    for data in (dark, bright):
        data.keep_decoded(3)
        list(data.train_loader())
    assert len(list((tmp_path / "decoded").iterdir())) == 2, "each range has its own"
    file = root / "train/a/deep0.png"
    assert float(bright.transform_eval(file).max()) > 2 > 0 > float(dark.transform_eval(file).max())


# ------------------------------------------------------------------------------------------ formats
@pytest.mark.skipif(not features.check("avif"), reason="this Pillow has no AVIF")
def test_avif_is_read(tmp_path: Path) -> None:
    picture(3, 64, 48).save(tmp_path / "x.avif", quality=95)
    (tmp_path / "named.jpg").write_bytes((tmp_path / "x.avif").read_bytes())
    for name in ("x.avif", "named.jpg"):
        error = np.abs(np.asarray(read_image(tmp_path / name), dtype=int) - np.asarray(picture(3, 64, 48)))
        assert error.mean() < 6
    assert is_image("photo.AVIF")


@pytest.mark.skipif(not features.check("jpg_2000"), reason="this Pillow has no OpenJPEG")
@pytest.mark.parametrize("name", ["x.jp2", "x.j2k", "x.jpg"])
def test_jpeg_2000_is_read_under_any_name(tmp_path: Path, name: str) -> None:
    picture(3, 64, 48).save(tmp_path / name, format="JPEG2000")
    assert np.array_equal(np.asarray(read_image(tmp_path / name)), np.asarray(picture(3, 64, 48)))


def test_heic_is_read_with_the_extra(tmp_path: Path) -> None:
    heif = pytest.importorskip("pillow_heif")
    heif.from_pillow(picture(3, 64, 48)).save(tmp_path / "x.heic", quality=95)
    (tmp_path / "named.jpg").write_bytes((tmp_path / "x.heic").read_bytes())
    for name in ("x.heic", "named.jpg"):
        error = np.abs(np.asarray(read_image(tmp_path / name), dtype=int) - np.asarray(picture(3, 64, 48)))
        assert error.mean() < 6
    assert is_image("x.HEIC")


@pytest.mark.parametrize(
    ("start", "kind", "how"),
    [
        (b"\0\0\0\x18ftypheic\0\0\0\0mif1heic", "HEIC", r"pip install 'efficient-ft\[heic\]'"),
        (b"\0\0\0\x18ftypmif1\0\0\0\0mif1heic", "HEIC", "heic"),
        (b"\xff\x0a\xfa\x7f", "JPEG XL", "pip install pillow-jxl-plugin"),
        (b"\0\0\0\x0cJXL \r\n\x87\n", "JPEG XL", "or convert the file"),
        (b"\0\0\0\x1cftypavif\0\0\0\0mif1avif", "AVIF", "pillow>=11.3"),
    ],
)
def test_a_format_that_cannot_be_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: bytes, kind: str, how: str
) -> None:
    monkeypatch.setattr(images, "_is_available", lambda kind: False)
    (tmp_path / "photo.jpg").write_bytes(start + bytes(64))
    assert file_kind(start + bytes(64)) == kind
    expected = rf"photo\.jpg: the file is not readable as an image \(the file contains {kind}\. .*{how}"
    with pytest.raises(UserError, match=expected):
        read_image(tmp_path / "photo.jpg")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "the file is empty"),
        (b"<!DOCTYPE html><html>404</html>", "the file contains HTML or XML"),
        (b"\n  <html>", "HTML or XML"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "git lfs pull"),
        (b"%PDF-1.7", "the file contains PDF"),
        (b"8BPS\0\1", "Photoshop"),
        (b"\x93NUMPY\1\0", "NumPy"),
        (b"PK\3\4", "ZIP"),
        (bytes(4096), "zero bytes"),
        (b"\0\0\0\x18ftypmp42", "video"),
        (bytes(128) + b"DICM", "DICOM"),
        (b"no image at all", "the format of the file is unknown"),
    ],
)
def test_contents_that_are_no_image_are_named(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "x.jpg").write_bytes(content)
    with pytest.raises(UserError, match=rf"x\.jpg: the file is not readable as an image \(.*{message}"):
        read_image(tmp_path / "x.jpg")


def test_extensions_and_hints() -> None:
    assert {".jpg", ".png", ".webp"} <= set(EXTENSIONS)
    assert reading_hint(".heic") == "pip install 'efficient-ft[heic]'"
    assert reading_hint(".nef") == "convert the files to PNG or TIFF"
    assert reading_hint(".txt") is None


# ------------------------------------------------------------------------------------------ size limit
def test_images_above_the_limit_name_the_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = save(tmp_path / "large.png", 5, height=60, width=50)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)  # Pillow raises an error above twice this limit
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserError, match=r"large\.png: the image has 50×60 = 3,000 pixels, .*data\.max_pixels=3000"):
            read_image(file, decoding=Decoding(max_pixels=2999))
        image = read_image(file, decoding=Decoding(max_pixels=3000))
        assert image.size == (50, 60)
        image.crop((0, 0, 50, 60))


def test_the_limit_is_a_setting_of_the_data(folders: Callable[..., Path], data_config: Callable[..., Any]) -> None:
    root = folders(train={"a": 5, "b": 5}, test={"a": 1, "b": 1})
    save(root / "train/a/large.png", 5, height=100, width=100)
    data = open_data(data_config("folder", root=str(root), max_pixels=9999), SPEC, 0)
    problems = data.inspect().problems
    assert list(problems) == [str(root / "train/a/large.png")]
    assert "data.max_pixels=10000" in problems[str(root / "train/a/large.png")]
    skipping = open_data(data_config("folder", root=str(root), max_pixels=9999, on_corrupt="skip"), SPEC, 0)
    assert skipping.report()["skipped_count"] == 1


# ------------------------------------------------------------------------------------------ bands
@pytest.mark.parametrize(
    ("bands", "extra", "dtype"),
    [(4, (0,), np.uint8), (4, (0,), np.uint16), (5, (0, 0), np.uint8), (8, (0,) * 5, np.uint16), (2, (0,), np.uint8)],
)
def test_more_bands_than_colors_are_refused(tmp_path: Path, bands: int, extra: tuple[int, ...], dtype: type) -> None:
    pixels = np.full((6, 5, bands), 77, dtype=dtype)
    file = tiff(tmp_path / "x.tif", pixels, photometric=2 if bands > 2 else 1, extra=extra)
    with pytest.raises(UserError, match=rf"has {bands} bands, .*three of the bands as RGB\. model\.kwargs\.in_chans"):
        read_image(file)


def test_alpha_cmyk_and_lab_are_colors(tmp_path: Path) -> None:
    rgb = picture(5)
    for mode in ("RGBA", "CMYK"):
        rgb.convert(mode).save(tmp_path / f"{mode}.tif")
        assert np.abs(np.asarray(read_image(tmp_path / f"{mode}.tif"), dtype=int) - np.asarray(rgb)).mean() < 4
    lab = ImageCms.profileToProfile(
        rgb, ImageCms.createProfile("sRGB"), ImageCms.createProfile("LAB"), outputMode="LAB"
    )
    assert lab is not None
    lab.save(tmp_path / "lab.tif")
    assert np.abs(np.asarray(read_image(tmp_path / "lab.tif"), dtype=int) - np.asarray(rgb)).mean() < 4


def test_mean_of_four_channels_names_the_options() -> None:
    from efficient_ft.core.input_spec import InputSpec

    with pytest.raises(SettingError, match=r"model\.mean must be three values.*in_chans > 3.*Save three bands"):
        Transform(InputSpec((8, 8), (0.5,) * 4, (0.5,) * 4))


# ------------------------------------------------------------------------------------------ frames, orientation, shapes
@pytest.mark.parametrize("suffix", ["gif", "webp", "png", "tif"])
def test_the_first_frame_is_read(tmp_path: Path, suffix: str) -> None:
    frames = [picture(k) for k in (1, 2, 3)]
    options = {"lossless": True} if suffix == "webp" else {}
    frames[0].save(tmp_path / f"x.{suffix}", save_all=True, append_images=frames[1:], **options)
    error = np.abs(np.asarray(read_image(tmp_path / f"x.{suffix}"), dtype=int) - np.asarray(frames[0])).mean()
    assert error < (8 if suffix == "gif" else 0.1)


@pytest.mark.parametrize("suffix", ["png", "webp", "tif", "avif", "jpg"])
def test_exif_orientation_in_every_format(tmp_path: Path, suffix: str) -> None:
    if f".{suffix}" not in EXTENSIONS:
        pytest.skip("this Pillow has no AVIF")
    upright = picture(3, 64, 32)
    exif = Image.Exif()
    exif[0x0112] = 6
    options: dict[str, Any] = {"quality": 95} if suffix not in ("png", "tif") else {}
    upright.transpose(Image.Transpose.ROTATE_90).save(tmp_path / f"x.{suffix}", exif=exif, **options)
    read = read_image(tmp_path / f"x.{suffix}")
    assert read.size == (32, 64)
    assert np.abs(np.asarray(read, dtype=int) - np.asarray(upright)).mean() < 8


@pytest.mark.parametrize(("height", "width"), [(1, 40), (40, 1), (1, 1), (1, 5000)])
@pytest.mark.parametrize("suffix", ["png", "jpg"])
def test_thin_images(tmp_path: Path, height: int, width: int, suffix: str) -> None:
    Image.new("RGB", (width, height), (200, 100, 50)).save(tmp_path / f"x.{suffix}")
    for transform in (Transform(SPEC), Transform(SPEC, "resize_crop")):
        assert transform(tmp_path / f"x.{suffix}").shape == (3, 16, 16)


def test_adobe_cmyk_jpegs_are_not_inverted(tmp_path: Path) -> None:
    Image.new("RGB", (16, 16), (250, 240, 230)).convert("CMYK").save(tmp_path / "x.jpg", quality=95)
    assert np.asarray(read_image(tmp_path / "x.jpg")).min() > 200


@pytest.mark.parametrize("mode", ["LA", "1", "PA", "P"])
def test_transparency_and_palettes(tmp_path: Path, mode: str) -> None:
    white = Image.new("RGBA", (8, 8), (255, 255, 255, 0))
    white.paste((10, 10, 10, 255), (0, 0, 4, 8))
    suffix = "tif" if mode == "PA" else "png"
    (white.convert("P").convert("PA") if mode == "PA" else white.convert(mode)).save(tmp_path / f"x.{suffix}")
    read = np.asarray(read_image(tmp_path / f"x.{suffix}"))
    assert read[:, :4].max() < 40
    if mode != "PA":
        assert read[:, 4:].min() == 255
