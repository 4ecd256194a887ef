"""Predict masks with a segmentation network, and convert them to images."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from PIL import Image
from torch import nn
from torch.nn import functional as F

from efficient_ft.core.input_spec import IGNORED, InputSpec
from efficient_ft.data import Transform
from efficient_ft.data.masks import class_colors
from efficient_ft.data.segmentation_data import STRIDE
from efficient_ft.task import Segmentation
from efficient_ft.task.base import at_size
from efficient_ft.training.output import export

#: Opacity of the class colors in an overlay.
_OPACITY = 0.5


@torch.inference_mode()
def predict_mask(model: nn.Module, image: Image.Image, input: InputSpec) -> np.ndarray:
    """Return the predicted class indices of an RGB image, uint8 of shape (H, W). The image may have any size."""
    device = next(model.parameters()).device
    pixels = Transform(InputSpec(input.size, input.mean, input.std)).normalize([image]).to(device)
    height, width = pixels.shape[-2:]
    pixels = F.pad(pixels, (0, -width % STRIDE, 0, -height % STRIDE))
    logits = at_size(Segmentation().logits(model, pixels), pixels[:, 0])
    export.require_finite(logits)
    found: np.ndarray = logits[0, :, :height, :width].argmax(0).to(torch.uint8).cpu().numpy()
    return found


def mask_image(indices: np.ndarray, ids: Sequence[int], colors: Sequence[Sequence[int]] | None = None) -> Image.Image:
    """Return a mask image that can be saved as PNG. The image has the same pixel values as the training masks.

    Args:
        indices: class indices (H, W).
        ids: pixel value of each class. An 8-bit image also has a color palette.
        colors: color of each class if the training masks store classes as colors, or None otherwise. If colors are
            given, the result is an RGB image.
    """
    if colors:
        return Image.fromarray(np.asarray(colors, dtype=np.uint8)[indices])
    values = np.asarray(ids)[indices]
    if max(ids) > 255:
        return Image.fromarray(values.astype(np.uint16))
    image = Image.fromarray(values.astype(np.uint8), mode="P")
    palette = np.zeros((256, 3), dtype=np.uint8)
    palette[list(ids)] = class_colors(len(ids))
    image.putpalette(palette.flatten().tolist())
    return image


def overlay(image: Image.Image, indices: np.ndarray, count: int) -> Image.Image:
    """Return the image blended with the colors of the predicted classes. `indices` contains class indices (H, W)."""
    colors = Image.fromarray(class_colors(count)[indices])
    return Image.blend(image, colors, _OPACITY)


#: Name of the file in a run folder that shows example predictions.
EXAMPLES = "predictions.png"
#: Width in pixels of each image in the examples.
_WIDTH = 320


def examples_image(
    model: nn.Module, pairs: Sequence[tuple[Image.Image, np.ndarray]], input: InputSpec, count: int
) -> Image.Image:
    """Return a picture with one row for each image. A row shows the image, its mask, and the predicted mask.

    Each pair consists of an image and a mask of class indices. Unlabeled pixels have the index 255.
    """
    rows = []
    for image, mask in pairs:
        true = overlay(image, np.where(mask == IGNORED, 0, mask), count)
        true.paste(image, mask=Image.fromarray(np.where(mask == IGNORED, 255, 0).astype(np.uint8)))
        tiles = [image, true, overlay(image, predict_mask(model, image, input), count)]
        height = max(round(image.height * _WIDTH / image.width), 1)
        rows.append(np.hstack([np.asarray(tile.resize((_WIDTH, height))) for tile in tiles]))
    return Image.fromarray(np.vstack(rows))
