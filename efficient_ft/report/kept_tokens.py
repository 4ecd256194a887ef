"""Figure of the patches that a trained network keeps, for images of the evaluation split of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from efficient_ft.config import Config
from efficient_ft.core.errors import UserError
from efficient_ft.core.text import shortened
from efficient_ft.data import missing_data, open_data
from efficient_ft.data.inspection import spread
from efficient_ft.methods.build import build_methods
from efficient_ft.methods.tokens.tome import ToMe
from efficient_ft.models.view import view
from efficient_ft.report.figures import Drawing
from efficient_ft.report.record import block_labels
from efficient_ft.training.callbacks.block_stats import BlockIO, observe_blocks
from efficient_ft.training.output import checkpoint, export

#: Maximum number of blocks in the figure. If more blocks drop tokens, a subset of evenly spaced blocks is shown.
MAX_DROPS = 5
#: Brightness and tint of dropped patches. The dark blue tint distinguishes dropped patches from black patches.
DIMMED, TINT = 0.2, (0.08, 0.11, 0.30)


@dataclass(frozen=True)
class Kept:
    """Images, and the patches that each block keeps, for all blocks that drop tokens.

    Attributes:
        pixels: images without normalization, with shape (N, height, width, 3) and values from 0 to 1.
        classes: class name of each image.
        blocks: labels of the blocks that drop tokens.
        masks: for each block in `blocks`, an array of shape (N, H, W) that is True for kept patches.
        fused: for each block in `blocks`, the maximum number of fused tokens per image.
        shown: description of the forward pass for the caption.
    """

    pixels: np.ndarray
    classes: list[str]
    blocks: list[str]
    masks: list[np.ndarray]
    fused: list[int]
    shown: str


def kept_tokens(run: Path, config: Config, count: int) -> Kept:
    """Run the trained network on the first `count` images of the evaluation split, and return the kept patches.

    With several tasks, the images of the first task are used. If tokens are dropped only in training (ALaST), the
    blocks drop tokens with the budgets in the checkpoint of the run, while dropout and drop path are disabled.

    Raises:
        UserError: If weights or data are missing, if no tokens are dropped, or if the token positions are unknown.
    """
    if merging := next((method.name for method in build_methods(config) if isinstance(method, ToMe)), None):
        raise UserError(f"{merging} merges tokens, so a token has no single position in the image.")
    trained = export.load(run)
    missing = missing_data(config.data)
    if missing is not None:
        raise UserError(missing)
    data = config.data.model_copy(update={"num_workers": 0, "eval_batch_size": count})
    images = open_data(data, trained.input, config.seed)
    batch, labels = next(iter(images.eval_loader(images.best_split)))
    model, of_model = trained.model, view(trained.model)
    of_task = f" of {next(iter(config.tasks))}" if config.tasks else ""
    passes = (
        f"The network processed the first {len(batch)} images of the {images.best_split} split{of_task} with the"
        " weights of model.safetensors"
    )
    shown = f"{passes}, as in evaluation."
    drops = _drops(model, of_model.blocks, batch)
    if not drops:
        methods = [method for method in build_methods(config) if "budgets" in method.step_stats()]
        held = checkpoint.read(run / checkpoint.NAME) if methods else {}
        for method in methods:
            method.load_state_dict(held["callbacks"]["MethodCallback"][method.state_key])
            method.apply(model)
            for name in of_model.blocks:  # only this module is changed, so dropout remains disabled
                model.get_submodule(name).training = True
            shown = (
                f"{passes}. Tokens are dropped as in training, with the budgets after step {held['global_step']}, but"
                " dropout is disabled. Evaluation keeps all tokens."
            )
        drops = _drops(model, of_model.blocks, batch)
    if not drops:
        raise UserError("The methods of this run drop no tokens.")
    (grid,) = {
        layer.tokens.grid
        for layer in of_model.layers
        if layer.tokens is not None and layer.tokens.form == "tokens" and layer.name.startswith(tuple(of_model.blocks))
    }
    names = block_labels(of_model.blocks)
    mean, std = (torch.tensor(v).view(1, -1, 1, 1) for v in (trained.input.mean, trained.input.std))
    pixels = (batch * std + mean).clamp(0, 1).permute(0, 2, 3, 1).expand(-1, -1, -1, 3).numpy()
    positions = grid[0] * grid[1]
    masks = []
    for places in drops.values():
        mask = np.zeros((len(places), positions + 1), dtype=bool)  # the last position is for all fused tokens
        np.put_along_axis(mask, np.minimum(places, positions), True, axis=1)
        masks.append(mask[:, :positions].reshape(-1, *grid))
    return Kept(
        pixels,
        [text for _, text in images.labeled(batch, labels, trained.input)],
        [names[index] for index in drops],
        masks,
        [int((places >= positions).sum(1).max()) for places in drops.values()],
        shown,
    )


def _drops(model: Any, blocks: Sequence[str], batch: Any) -> dict[int, np.ndarray]:
    """Return a dict from the index of each block that drops tokens to the grid positions (N, K) of the kept tokens."""
    drops: dict[int, np.ndarray] = {}

    def see(index: int, passed: BlockIO) -> None:
        if passed.after is None or passed.y.shape[1] == passed.x.shape[1]:
            return
        if passed.after.grid_index_BL is None:
            raise UserError("The grid positions of tokens are unknown, because tokens were merged or randomly dropped.")
        drops[index] = passed.after.grid_index_BL.numpy()

    with torch.no_grad(), observe_blocks(model, blocks, see):
        model(batch)
    return drops


def draw_kept(kept: Kept) -> Drawing:
    """Draw one row for each image, with the image and a copy for each drop in which dropped patches are darkened."""
    count = len(kept.blocks)
    chosen = spread(count, MAX_DROPS)
    images, (height, width) = len(kept.pixels), kept.pixels.shape[1:3]
    columns, side = 1 + len(chosen), 1.95
    from matplotlib.figure import Figure

    figure = Figure(figsize=(columns * side, 0.45 + images * side * height / width), layout="constrained")
    axes = figure.subplots(images, columns, squeeze=False)
    patches = kept.masks[0][0].size
    for row in range(images):
        pictures = [kept.pixels[row], *(_dimmed(kept.pixels[row], kept.masks[i][row]) for i in chosen)]
        for place, picture in zip(axes[row], pictures, strict=True):
            place.imshow(picture, interpolation="nearest")
            place.set(xticks=[], yticks=[])
            place.grid(visible=False)
            place.spines[:].set_visible(False)
        axes[row, 0].set_ylabel(shortened(kept.classes[row], 20), fontsize=10)
    titles = ["image", *(f"after block {kept.blocks[i]}:\n{_counted(kept.masks[i])} of {patches}" for i in chosen)]
    for place, title in zip(axes[0], titles, strict=True):
        place.set_title(title, fontsize=10)
    left_out = f" Only {len(chosen)} of the {count} blocks that drop tokens are shown." if count > len(chosen) else ""
    fused = f" Up to {max(kept.fused)} tokens fused from dropped patches are also kept." if max(kept.fused) else ""
    steps = ", ".join(f"block {kept.blocks[i]}: {_counted(kept.masks[i])} of {patches}" for i in chosen)
    return Drawing(
        "kept_tokens.png",
        "Kept tokens",
        f"{images} images ({', '.join(kept.classes)}), each next to copies in which dropped patches are darkened."
        f" Kept patches after {steps}.",
        f"Dark blue patches are dropped. {kept.shown}{fused}{left_out}",
        figure,
    )


def _dimmed(pixels: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Return a copy of the pixels (height, width, 3) in which patches outside the mask (H, W) are darkened."""
    height, width = pixels.shape[:2]
    rows, columns = np.arange(height) * mask.shape[0] // height, np.arange(width) * mask.shape[1] // width
    return np.where(mask[rows][:, columns, None], pixels, DIMMED * pixels + (1 - DIMMED) * np.array(TINT))


def _counted(masks: np.ndarray) -> str:
    counts = masks.sum((1, 2))
    return str(counts[0]) if (counts == counts[0]).all() else f"{counts.min()}–{counts.max()}"
