"""``efficient-ft predict RUN FILE...``: classes of images or texts, or masks of images, by a trained run."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from efficient_ft.core.errors import UserError, first_line
from efficient_ft.core.text import plain_line, plain_text

if TYPE_CHECKING:
    from efficient_ft.task import Inputs
    from efficient_ft.training.export import Trained

#: Letters up to which names of classes are aligned.
_WIDEST = 60


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the most probable classes of each image or line of text; of a segmentation, write the masks of the images.

    Args:
        arguments: the command line; default: that of this process.

    Raises:
        UserError: no such run, file or device; a file that cannot be read.
    """
    options = _parser().parse_args(arguments)

    import torch

    from efficient_ft.training import export

    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    trained = export.load(options.run, options.task)
    if trained.tasks and options.task is None:
        raise UserError(f"{options.run} was trained on several data sets: pass --task {' or '.join(trained.tasks)}.")
    try:
        trained.model.to(device)
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"--device {device} cannot be used here: {str(error).splitlines()[0]}") from error
    if trained.notes.get("task") == "segmentation":
        _write_masks(trained, list(_image_files(options.files)), options)
        return
    if options.out is not None or options.overlay:
        raise UserError(f"--out and --overlay are for runs with task=segmentation; {options.run} predicts classes.")
    is_text = trained.input.tokenizer is not None
    items: list[Any] = _lines(trained, options) if is_text else list(_image_files(options.files))
    shown = min(options.top, len(trained.class_names))
    names = [plain_line(name) for name in trained.class_names]
    width = min(_WIDEST, max(map(len, names)))
    for start in range(0, len(items), options.batch_size):
        batch = items[start : start + options.batch_size]
        for item, row in zip(batch, export.probabilities(trained.model, _inputs(trained, batch)), strict=True):
            print(plain_text(str(item)) if is_text else plain_line(str(item)))
            for probability, label in zip(*row.topk(shown), strict=True):
                print(f"  {names[int(label)]:{width}}  {float(probability):7.2%}")


def _inputs(trained: Trained, items: Sequence[Any]) -> Inputs:
    """The network's input of some image files, or lines of text."""
    import torch

    from efficient_ft.data import Transform

    if trained.input.tokenizer is not None:
        return trained.input.tokenizer.batch([line.split("\t") for line in items], trained.input.size[0])
    transform = Transform(trained.input, decoding=trained.decoding)
    return torch.stack([transform(path) for path in items])


def _lines(trained: Trained, options: argparse.Namespace) -> list[str]:
    """The lines of the files that are not empty; ``-`` is the standard input."""
    columns = int(trained.notes.get("columns", 1))
    lines: list[str] = []
    for path in options.files:
        try:
            raw = sys.stdin.buffer.read() if str(path) == "-" else path.read_bytes()
            text = raw.decode("utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{path} cannot be read as UTF-8 text ({first_line(error)}).") from error
        for number, line in enumerate(text.replace("\r\n", "\n").split("\n"), 1):
            if line.strip():
                cells = [cell.strip() for cell in line.split("\t")]
                if len(cells) != columns or not all(cells):
                    form = "FIRST<tab>SECOND" if columns == 2 else "one text, without tabs"
                    raise UserError(f"{path}, line {number}: this run takes lines of the form {form}.")
                lines.append("\t".join(cells))
    if not lines:
        raise UserError(f"{', '.join(map(str, options.files))}: no line of text.")
    return lines


def _write_masks(trained: Trained, paths: Sequence[Path], options: argparse.Namespace) -> None:
    """Write a mask for each image, with the ids of the training masks, and print the share of each class."""
    import json

    import numpy as np

    from efficient_ft.data import read_image
    from efficient_ft.training.predict_masks import mask_image, overlay, predict_mask

    out = options.out or (options.run if options.run.is_dir() else options.run.parent) / "masks"
    ids, names = json.loads(trained.notes["class_ids"]), [plain_text(name) for name in trained.class_names]
    colors = json.loads(trained.notes.get("class_colors", "null"))
    targets = {path: out / f"{path.stem}.png" for path in paths}
    stem, count = Counter(path.stem for path in paths).most_common(1)[0]
    if count > 1:
        raise UserError(f"{count} images are named {stem}: their masks would be one file. Predict them in turn.")
    inside = {path for path in paths if out.resolve() in path.resolve().parents}
    if inside:
        raise UserError(f"--out {out} holds the image {min(inside)}. Choose another folder.")
    out.mkdir(parents=True, exist_ok=True)
    for path, target in targets.items():
        image = read_image(path, decoding=trained.decoding)
        indices = predict_mask(trained.model, image, trained.input)
        mask_image(indices, ids, colors).save(target)
        if options.overlay:
            overlay(image, indices, len(names)).save(target.with_name(f"{path.stem}_overlay.png"))
        print(plain_line(f"{path} -> {target}"))
        shares = np.bincount(indices.ravel(), minlength=len(names)) / indices.size
        for number in np.argsort(-shares, kind="stable")[: options.top]:
            if shares[number] > 0:
                print(f"  {names[number]:{min(_WIDEST, max(map(len, names)))}}  {shares[number]:7.2%}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="efficient-ft predict",
        description="Print classes and probabilities of images or texts, or write masks of images, by a trained run.",
    )
    parser.add_argument("run", type=Path, help="a run folder, or its model.safetensors")
    parser.add_argument(
        "files",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="image files, or folders of them; for a run with task=text files of lines (- is the standard input)",
    )
    parser.add_argument("--task", help="for a run on several data sets: the one whose classes are predicted")
    parser.add_argument("--top", type=_count, default=5, metavar="K", help="classes shown of each (default 5)")
    parser.add_argument(
        "--batch-size", type=_count, default=32, metavar="N", help="images or texts at once (default 32)"
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder of the masks (default: RUN/masks)")
    parser.add_argument("--overlay", action="store_true", help="also write the images with the classes' colors on them")
    parser.add_argument("--device", default=None, help="cpu, cuda, mps (default: cuda if there is one)")
    return parser


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be an integer >= 1, got {text}.")
    return int(text)


def _image_files(paths: Sequence[Path]) -> Iterator[Path]:
    """Yield the files in `paths`, and all image files in and below its folders."""
    from efficient_ft.data.images import is_image

    for path in paths:
        if path.is_dir():
            found = sorted(p for p in path.rglob("*") if p.is_file() and is_image(p))
            if not found:
                raise UserError(f"{path}: no images in this folder.")
            yield from found
        elif path.is_file():
            yield path
        else:
            raise UserError(f"{path}: {'neither a file nor a folder' if path.exists() else 'no such file'}.")
