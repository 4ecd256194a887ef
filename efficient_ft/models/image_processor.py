"""Read and write the image processors of `transformers` (preprocessor_config.json) as input specifications.

Images are resized to the input size without cropping. The normalization equals that of the image processor. Rescaling
and normalization are combined into one mean and one standard deviation for pixel values in [0, 1].
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from efficient_ft.config.schema import LARGEST_SIDE
from efficient_ft.core.errors import UserError
from efficient_ft.core.input_spec import InputSpec
from efficient_ft.models.hub_code import read_json

#: File names of image processors. The second file also contains the processors of other inputs, such as texts.
NAMES = ("preprocessor_config.json", "processor_config.json")
#: Names of torchvision's interpolation modes, by the number that Pillow and `transformers` use.
_MODES = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic", 4: "box", 5: "hamming"}
#: Keys for the side length of a square image, in the order of preference.
_SIDES = ("shortest_edge", "longest_edge", "max_height")


@dataclass(frozen=True)
class Processor:
    """An image processor.

    Attributes:
        size: Size (H, W) of the images in pixels, or None if the processor does not change the size.
        mean: Mean of each channel for pixel values in [0, 1].
        std: Standard deviation of each channel for pixel values in [0, 1].
        interpolation: Name in torchvision's `InterpolationMode`.
        crops: True if the processor crops the center of the images.
    """

    size: tuple[int, int] | None
    mean: tuple[float, ...]
    std: tuple[float, ...]
    interpolation: str
    crops: bool = False


def read_processor(file: Path, library: Any, channels: int) -> Processor | None:
    """Read an image processor, or return None if the file contains no image processor.

    Entries that refer to code are ignored. For missing entries, the default values of the processor's class are used.

    Args:
        file: One of `NAMES` in a folder written by ``save_pretrained``.
        library: The module `transformers`.
        channels: Number of channels of the network's input.

    Raises:
        UserError: If the file is damaged, or if the processor requires a step that is not supported.
    """
    plain = read_json(file)
    if file.name == NAMES[1]:
        plain = plain.get("image_processor", {})
        if not plain:
            return None
    if not isinstance(plain, dict):
        raise _unusable(file, "image_processor must be a mapping")
    get = _Values(file, plain, _class_of(plain, library))
    if get("do_flip_channel_order", False):
        raise _unusable(file, "do_flip_channel_order=true (BGR images) is not supported")
    resample = get("resample", 2)
    if resample not in _MODES:
        raise _unusable(file, f"resample must be one of {', '.join(map(str, _MODES))}, got {resample}")
    return Processor(_size(get), *_normalization(get, channels), _MODES[resample], _crops(get))


class _Values:
    """The entries of an image processor. For missing entries, the default values of the processor's class are used."""

    def __init__(self, file: Path, plain: dict[str, Any], kind: Any) -> None:
        self.file, self._plain, self._kind = file, plain, kind

    def __call__(self, name: str, default: Any) -> Any:
        value = self._plain.get(name, getattr(self._kind, name, None))
        return default if value is None else value


def _class_of(plain: dict[str, Any], library: Any) -> Any:
    """Return the class of an image processor, or None if `transformers` has no class with this name."""
    name = plain.get("image_processor_type", plain.get("feature_extractor_type"))
    if not isinstance(name, str):
        return None
    name = name.replace("FeatureExtractor", "ImageProcessor").removesuffix("Fast").removesuffix("Pil")
    if not name.isidentifier() or not name.endswith("ImageProcessor"):
        return None
    return getattr(library, name, None)


def _size(get: _Values) -> tuple[int, int] | None:
    """Return the image size (H, W) after resizing and cropping, or None if the processor does not change the size."""
    if get("do_center_crop", False):
        return _pair(get, "crop_size")
    return _pair(get, "size") if get("do_resize", True) else None


def _crops(get: _Values) -> bool:
    """Return True if the processor removes a part of the images, because it does not resize them to the crop size."""
    size = get("size", None)
    exact = isinstance(size, dict) and "height" in size and get("do_resize", True)
    return bool(get("do_center_crop", False)) and not (exact and _pair(get, "size") == _pair(get, "crop_size"))


def _pair(get: _Values, name: str) -> tuple[int, int] | None:
    value = get(name, None)
    sides = (value, value)
    if isinstance(value, dict):
        side = next((value[key] for key in _SIDES if value.get(key) is not None), None)
        sides = (value.get("height") or side, value.get("width") or side)
    elif isinstance(value, list | tuple) and len(value) == 2:
        sides = (value[0], value[1])
    if value is None:
        return None
    if not all(type(side) is int and 1 <= side <= LARGEST_SIDE for side in sides):
        raise _unusable(get.file, f"{name} must contain integers from 1 to {LARGEST_SIDE:,}, got {value}")
    return sides


def _normalization(get: _Values, channels: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the mean and standard deviation for pixel values in [0, 1] that reproduce the output of the processor.

    With the rescale factor f, the mean m and the standard deviation s, the processor computes (255 f x - m) / s for a
    pixel value x in [0, 1].
    """
    scale = 255 * _number(get, "rescale_factor", 1 / 255) if get("do_rescale", True) else 255.0
    offset = 1.0 if get("rescale_offset", False) else 0.0
    mean, std = [0.0] * channels, [1.0] * channels
    if get("do_normalize", get("image_mean", None) is not None):
        mean, std = (_per_channel(get, name, channels) for name in ("image_mean", "image_std"))
        if get("include_top", False):  # EfficientNet divides by the standard deviation a second time
            std = [value * value for value in std]
    if scale <= 0 or min(std) <= 0:
        raise _unusable(get.file, "image_std and rescale_factor must be positive")
    return tuple((m + offset) / scale for m in mean), tuple(s / scale for s in std)


def _per_channel(get: _Values, name: str, channels: int) -> list[float]:
    value = get(name, None)
    values = value if isinstance(value, list | tuple) else [value] * channels
    if len(values) != channels or not all(isinstance(one, int | float) for one in values):
        raise _unusable(get.file, f"{name} must contain one number for each of the {channels} channels, got {value}")
    return [float(one) for one in values]


def _number(get: _Values, name: str, default: float) -> float:
    value = get(name, default)
    if not isinstance(value, int | float):
        raise _unusable(get.file, f"{name} must be a number, got {value}")
    return float(value)


def _unusable(file: Path, why: str) -> UserError:
    return UserError(f"The file {file} cannot be used: {why}. Change the file, or remove the file from the folder.")


def processor_entries(spec: InputSpec) -> dict[str, Any]:
    """Return the entries of preprocessor_config.json for an input specification of images."""
    height, width = spec.image_size
    modes = {name: number for number, name in _MODES.items()}
    return {
        "image_processor_type": "ViTImageProcessor",
        "do_resize": True,
        "size": {"height": height, "width": width},
        "resample": modes.get(spec.interpolation, 0),
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(spec.mean),
        "image_std": list(spec.std),
    }
