"""Evaluation samples with predictions, for loggers."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
from PIL import Image
from torch import Tensor

from efficient_ft.core.format import format_percent
from efficient_ft.data import ImageData, RoundRobinData, SegmentationData, TextData
from efficient_ft.data.transforms import to_pictures
from efficient_ft.training.output import export
from efficient_ft.training.output.predict_masks import examples_image

#: Number of samples shown for each data set.
COUNT = 8


class Sample(NamedTuple):
    """An image as the network sees it (None for a text), a text, and a caption with the true and predicted class."""

    image: Image.Image | None
    text: str
    caption: str


def samples_of(
    run: Path, images: ImageData | SegmentationData | TextData | RoundRobinData, device: torch.device
) -> list[Sample]:
    """Return evenly spread samples of the split that selects the best epoch, with predictions of model.safetensors.

    Args:
        run: the run folder.
        images: the data of the run.
        device: the device that predicts.
    """
    if isinstance(images, RoundRobinData):
        return [
            one._replace(caption=f"{task}: {one.caption}")
            for task, part in images.parts.items()
            for one in _classified(export.load(run, task), part, device)
        ]
    trained = export.load(run)
    if isinstance(images, SegmentationData):
        model, count = trained.model.to(device), images.num_classes
        rows = [examples_image(model, [pair], trained.input, count) for pair in images.examples(COUNT // 2)]
        return [Sample(row, "", "image, mask, prediction") for row in rows]
    return _classified(trained, images, device)


def _classified(trained: export.Trained, images: ImageData | TextData, device: torch.device) -> list[Sample]:
    dataset: Any = images.eval_loader(images.best_split).dataset
    last = len(dataset) - 1
    chosen = sorted({round(k * last / max(COUNT - 1, 1)) for k in range(COUNT)})
    inputs, labels = dataset.__getitems__([(0, index) for index in chosen])
    rows = export.probabilities(trained.model.to(device), inputs)
    pictures = to_pictures(inputs, trained.input) if isinstance(inputs, Tensor) else []
    found = []
    for place, (label, row) in enumerate(zip(labels.tolist(), rows, strict=True)):
        best = int(row.argmax())
        true, predicted = trained.class_names[label], trained.class_names[best]
        caption = f"{true}, predicted {predicted} ({format_percent(float(row[best]))})"
        if pictures:
            found.append(Sample(pictures[place], "", caption))
        else:
            assert isinstance(images, TextData)
            found.append(Sample(None, images.tokenizer.decode(inputs["input_ids"])[place], caption))
    return found
