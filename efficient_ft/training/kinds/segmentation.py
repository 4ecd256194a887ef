"""Semantic segmentation."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from efficient_ft.config import Config
from efficient_ft.config.kinds import RULES
from efficient_ft.core.errors import UserError
from efficient_ft.core.files import refuse_link, write_atomically
from efficient_ft.core.format import format_percent
from efficient_ft.core.input_spec import InputSpec
from efficient_ft.core.text import plain_line
from efficient_ft.data import open_data, read_image
from efficient_ft.data.reading import Reading
from efficient_ft.data.segmentation_data import STRIDE
from efficient_ft.models.factory import input_of
from efficient_ft.task import TASKS, Segmentation, Task
from efficient_ft.training.kinds.base import (
    Kind,
    Prediction,
    Predictions,
    PredictOptions,
    RunData,
    Sample,
    Trained,
    only,
)
from efficient_ft.training.kinds.classes import SAMPLES
from efficient_ft.training.kinds.files import image_files, short_path
from efficient_ft.training.kinds.registry import register
from efficient_ft.training.output import export
from efficient_ft.training.output.predict_masks import EXAMPLES, examples_image, mask_image, overlay, predict_mask

#: Number of images in the figure of a run, and number of bytes per pixel that are needed to read an image and its mask.
_EXAMPLES, _EXAMPLE_BYTES = 4, 6


class SegmentationKind(Kind):
    """Semantic segmentation: one class per pixel."""

    rules, task = RULES["segmentation"], TASKS["segmentation"]

    def task_of(self, config: Config) -> Task:
        masks = config.data.masks
        if masks is not None and masks.evaluation == "windows":
            return Segmentation(input_of(config.model).image_size)
        return self.task

    def open(self, config: Config, spec: InputSpec) -> RunData:
        return open_data(config.data, spec, config.seed)

    def notes(self, config: Config, data: RunData) -> dict[str, Any]:
        classes = only(data).classes
        colors = {"class_colors": classes.colors} if classes.colors else {}
        about = {"task": self.rules.name, "metric": self.task.metric, "class_ids": list(classes.ids)}
        return {**about, **colors, **super().notes(config, data)}

    def check_notes(self, notes: Mapping[str, Any], classes: int) -> None:
        if len(notes["class_ids"] or ()) != classes:
            raise ValueError("class_ids must contain one number for each class")

    def further_scores(self, scores: Mapping[str, float], class_names: Sequence[str]) -> dict[str, Any]:
        """Return all metrics. The entry ``iou`` maps class names to IoU values, or to None for absent classes."""
        each = {name: scores.get(f"iou_{k}") for k, name in enumerate(class_names)}
        return {**{k: v for k, v in scores.items() if not k.startswith("iou_")}, "iou": each}

    def write_figures(self, folder: Path, data: RunData, device: torch.device) -> None:
        """Write some images, their masks, and the masks that model.safetensors predicts into one picture."""
        trained, images = export.load(folder), only(data)
        found = examples_image(trained.model.to(device), images.examples(_EXAMPLES), trained.input, images.num_classes)
        _write_png(found, folder / EXAMPLES)

    def samples(self, trained: Trained, data: Any, device: torch.device) -> list[Sample]:
        model, pairs = trained.model.to(device), data.examples(SAMPLES // 2)
        rows = [examples_image(model, [pair], trained.input, data.num_classes) for pair in pairs]
        return [Sample(row, "image, mask, prediction") for row in rows]

    def predictions(self, trained: Trained, options: PredictOptions) -> Predictions:
        return MaskPredictions(trained, options)

    def evaluation_size(self, config: Config) -> str:
        return "the size of the evaluated images"

    def figure_input(self, evaluation: Reading) -> tuple[tuple[int, int], int] | None:
        if evaluation.file_size is None:
            return None
        width, height = evaluation.file_size  # the figure shows whole images, even if evaluation resizes them
        size = (-(-height // STRIDE) * STRIDE, -(-width // STRIDE) * STRIDE)
        return size, _EXAMPLES * _EXAMPLE_BYTES * width * height + evaluation.decode_bytes


class MaskPredictions(Predictions):
    """The predicted mask of each image, and the fraction of the image that each class covers.

    The saved masks use the same pixel values as the training masks.
    """

    def __init__(self, trained: Trained, options: PredictOptions) -> None:
        self._trained, self._options = trained, options
        self._names = [plain_line(name) for name in trained.class_names]
        self._targets = mask_files([Path(item.value) for item in image_files(options.files, ())], options)
        self.total = len(self._targets)
        self.header = ["path", "mask", *(f"share of {name}" for name in self._names)]

    def __iter__(self) -> Iterator[Prediction]:
        trained, names = self._trained, self._names
        ids, colors = (json.loads(trained.notes.get(key, "null")) for key in ("class_ids", "class_colors"))
        for path, target in self._targets.items():
            image = read_image(str(path), decoding=trained.decoding)
            indices = predict_mask(trained.model, image, trained.input)
            _write_png(mask_image(indices, ids, colors), target)
            if self._options.overlay:
                _write_png(overlay(image, indices, len(names)), target.with_name(f"{path.stem}_overlay.png"))
            shares = np.bincount(indices.ravel(), minlength=len(names)) / indices.size
            largest = np.argsort(-shares, kind="stable")[: self._options.top]
            yield Prediction(
                plain_line(f"{short_path(path)} -> {short_path(target)}"),
                [(names[at], format_percent(shares[at])) for at in largest if shares[at] > 0],
                {"path": str(path), "mask": str(target), "shares": dict(zip(names, shares.tolist(), strict=True))},
                [str(path), str(target), *shares.tolist()],
            )


def _write_png(image: Image.Image, file: Path) -> None:
    write_atomically(file, lambda temporary: image.save(temporary, format="png"))


def mask_files(paths: Sequence[Path], options: PredictOptions) -> dict[Path, Path]:
    """Create the output folder, and return a mapping from each image to its mask file.

    Raises:
        UserError: If two masks would be written to the same file, or if the folder contains one of the images.
    """
    out = options.out
    if out is None:
        out = (options.run if options.run.is_dir() else options.run.parent) / "masks"
        refuse_link(out)  # in a run folder from another user, `out` could be a link to any folder
    stem, number = Counter(path.stem for path in paths).most_common(1)[0]
    if number > 1:
        raise UserError(
            f"{number} images are named {stem}, so their masks would have the same name. Predict the images separately."
        )
    inside = {path for path in paths if out.resolve() in path.resolve().parents}
    if inside:
        raise UserError(f"--out {out} contains the image {min(inside)}. Choose a different folder.")
    out.mkdir(parents=True, exist_ok=True)
    return {path: out / f"{path.stem}.png" for path in paths}


register(SegmentationKind())
