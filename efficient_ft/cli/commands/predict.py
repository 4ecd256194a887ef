"""``efficient-ft predict RUN FILE...``: classes of images or texts, or masks of images, by a trained run."""

from __future__ import annotations

import argparse
import os
import sys
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from efficient_ft.cli.terminal import Help, count, run_folders, status
from efficient_ft.core.errors import UserError, first_line
from efficient_ft.core.files import refuse_link, write_atomically
from efficient_ft.core.format import format_percent
from efficient_ft.core.sheet import render
from efficient_ft.core.text import display_width, json_plain, padded, plain_line, plain_text, shortened, terminal_width
from efficient_ft.record.files import json_text

if TYPE_CHECKING:
    from PIL.Image import Image

    from efficient_ft.task import Inputs
    from efficient_ft.training.output.export import Trained

#: Terminal columns up to which names of classes are aligned.
_WIDEST = 60
#: Number of confusions in the output.
_CONFUSIONS = 5

DESCRIPTION = """\
Predict the classes of images or texts with a trained run, or write masks of images.

    efficient-ft predict RUN photo.jpg folder/of/photos
    efficient-ft predict RUN test --top 1 --csv > classes.csv
    efficient-ft predict RUN lines.txt --json

If the images are in folders named after classes, the command also prints the accuracy and the most frequent
confusions. --csv and --json write every prediction to standard output, and the accuracy to standard error.
"""


@dataclass(frozen=True)
class Item:
    """An image file or a line of text.

    Attributes:
        value: the path, or the text.
        shown: the text for the terminal.
        label: the class that a folder above it is named after; None if there is no such folder.
    """

    value: Path | str
    shown: str
    label: str | None = None


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the most probable classes of each image or line of text; of a segmentation, write the masks of the images.

    Args:
        arguments: the command line; default: that of this process.

    Raises:
        UserError: no such run, file or device; a file that cannot be read.
    """
    options = _parser().parse_args(arguments)
    if options.run is None:
        print(run_folders("predict", "RUN FILE..."))
        return
    if not options.files:
        raise UserError("Pass image files or folders of images, or text files for a run with task=text.")

    import torch

    from efficient_ft.training.output import export

    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    trained = export.load(options.run, options.task)
    if trained.tasks and options.task is None:
        raise UserError(f"{options.run} was trained on several data sets: pass --task {' or '.join(trained.tasks)}.")
    try:
        trained.model.to(device)
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"--device {device} cannot be used here: {str(error).splitlines()[0]}") from error
    names = [plain_line(name) for name in trained.class_names]
    if trained.notes.get("task") == "segmentation":
        _write_masks(trained, [item.value for item in _image_files(options.files, ())], names, options)
        return
    if options.out is not None or options.overlay:
        raise UserError(f"--out and --overlay are for runs with task=segmentation; {options.run} predicts classes.")
    is_text = trained.input.tokenizer is not None
    items = _lines(trained, options) if is_text else list(_image_files(options.files, names))
    _print_classes(_classes(trained, items, names, options), len(items), names, options, "text" if is_text else "path")


def _classes(
    trained: Trained, items: Sequence[Item], names: Sequence[str], options: argparse.Namespace
) -> Iterator[tuple[Item, list[tuple[str, float]]]]:
    """Yield each item with its most probable classes and their probabilities, in descending order."""
    from efficient_ft.training.output import export

    top = min(options.top, len(names))
    for start in range(0, len(items), options.batch_size):
        batch = items[start : start + options.batch_size]
        rows = export.probabilities(trained.model, _inputs(trained, [item.value for item in batch]))
        for item, row in zip(batch, rows, strict=True):
            values, labels = row.topk(top)
            yield item, [(names[int(label)], float(value)) for value, label in zip(values, labels, strict=True)]


def _print_classes(
    found: Iterable[tuple[Item, list[tuple[str, float]]]],
    total: int,
    names: Sequence[str],
    options: argparse.Namespace,
    kind: str,
) -> None:
    """Print the classes of all items in the chosen format, then the accuracy if there are labels."""
    table, scores = _Predictions(kind, min(options.top, len(names))), Scores(total)
    width = min(_WIDEST, terminal_width() - 11, max(map(display_width, names)))
    for number, (item, top) in enumerate(found, start=1):
        scores.add(item.label, top[0][0])
        if options.form is not None:
            status(f"predicted {number} of {total}")
            table.add(str(item.value), item.label, top)
            continue
        print(shortened(item.shown, terminal_width()) if kind == "text" else item.shown)
        for name, probability in top:
            print(f"  {padded(shortened(name, width), width)}  {format_percent(probability):>7}")
    status("")
    if options.form is not None:
        print(table.text(options.form))
    for line in scores.lines():
        print(line, file=sys.stdout if options.form is None else sys.stderr)


@dataclass
class _Predictions:
    """The predictions of all items for programs, as JSON objects or CSV rows with the same keys for all items.

    Args:
        kind: the first key: path or text.
        top: number of classes for each item.
    """

    kind: str
    top: int
    items: list[tuple[str, str | None, list[tuple[str, float]]]] = field(default_factory=list)

    def add(self, value: str, label: str | None, top: list[tuple[str, float]]) -> None:
        """Add an item."""
        self.items.append((value, label, top))

    def text(self, form: str) -> str:
        """Return all items as CSV or JSON."""
        if form == "json":
            objects = [
                {
                    self.kind: value,
                    "class": top[0][0],
                    "probability": top[0][1],
                    "label": label,
                    "top": [{"class": name, "probability": probability} for name, probability in top],
                }
                for value, label, top in self.items
            ]
            return json_plain(json_text(objects, indent=1))
        header = [self.kind, "class", "probability", "label"]
        header += [f"{key}_{k}" for k in range(2, self.top + 1) for key in ("class", "probability")]
        rows = [
            [value, *top[0], label, *(part for pair in top[1:] for part in pair)] for value, label, top in self.items
        ]
        return render(header, rows, "csv")


class Scores:
    """Accuracy and confusions over the items that have a label.

    Args:
        total: number of all items.
    """

    def __init__(self, total: int) -> None:
        self._total = total
        self._pairs: Counter[tuple[str, str]] = Counter()

    def add(self, label: str | None, predicted: str) -> None:
        """Count an item."""
        if label is not None:
            self._pairs[label, predicted] += 1

    def lines(self) -> list[str]:
        """Return the accuracy and the most frequent confusions; empty if no item has a label."""
        labelled = sum(self._pairs.values())
        if not labelled:
            return []
        right = sum(number for (label, predicted), number in self._pairs.items() if label == predicted)
        of = "" if labelled == self._total else f" (of {self._total})"
        images = "image" if labelled == 1 else "images"
        lines = ["", f"accuracy over {labelled} {images}{of} in class folders: {format_percent(right / labelled)}"]
        wrong = Counter({pair: number for pair, number in self._pairs.items() if pair[0] != pair[1]})
        sizes: Counter[str] = Counter()
        for (label, _), number in self._pairs.items():
            sizes[label] += number
        room = (terminal_width() - 30) // 2
        for (label, predicted), number in wrong.most_common(_CONFUSIONS):
            pair = f"{shortened(label, room)} → {shortened(predicted, room)}"
            lines.append(f"  {pair}: {number} of {sizes[label]}")
        return lines


def _inputs(trained: Trained, items: Sequence[Any]) -> Inputs:
    """The network's input of some image files, or lines of text."""
    import torch

    from efficient_ft.data import Transform

    if trained.input.tokenizer is not None:
        return trained.input.tokenizer.batch([line.split("\t") for line in items], trained.input.size[0])
    transform = Transform(trained.input, decoding=trained.decoding)
    return torch.stack([transform(path) for path in items])


def _lines(trained: Trained, options: argparse.Namespace) -> list[Item]:
    """The lines of the files that are not empty; ``-`` is the standard input."""
    columns = int(trained.notes.get("columns", 1))
    lines: list[str] = []
    for path in options.files:
        try:
            raw = sys.stdin.buffer.read() if str(path) == "-" else path.read_bytes()
            if b"\0" in raw:
                raise UserError(f"{path} cannot be read as UTF-8 text: it holds NUL characters. Save it as UTF-8.")
            text = raw.decode("utf-8-sig")
        except OSError as error:
            raise UserError(f"{path}: {error.strerror}. A run with task=text reads files of lines.") from error
        except UnicodeDecodeError as error:
            raise UserError(f"{path} cannot be read as UTF-8 text ({first_line(error)}).") from error
        except MemoryError as error:
            raise UserError(f"{path} does not fit into memory. Split it into several files.") from error
        for number, line in enumerate(text.replace("\r\n", "\n").split("\n"), 1):
            if line.strip():
                cells = [cell.strip() for cell in line.split("\t")]
                if len(cells) != columns or not all(cells):
                    form = "FIRST<tab>SECOND" if columns == 2 else "one text, without tabs"
                    raise UserError(f"{path}, line {number}: this run takes lines of the form {form}.")
                lines.append("\t".join(cells))
    if not lines:
        raise UserError(f"{', '.join(map(str, options.files))}: no line of text.")
    return [Item(line, plain_text(line)) for line in lines]


def _write_masks(trained: Trained, paths: Sequence[Any], names: Sequence[str], options: argparse.Namespace) -> None:
    """Write a mask for each image, with the ids of the training masks, and print the share of each class."""
    import json

    import numpy as np

    from efficient_ft.data import read_image
    from efficient_ft.training.output.predict_masks import mask_image, overlay, predict_mask

    ids = json.loads(trained.notes["class_ids"])
    colors = json.loads(trained.notes.get("class_colors", "null"))
    targets = _mask_files(paths, options)
    width = min(_WIDEST, terminal_width() - 11, max(map(display_width, names)))
    found: list[tuple[Path, Path, list[float]]] = []
    for number, (path, target) in enumerate(targets.items(), start=1):
        image = read_image(path, decoding=trained.decoding)
        indices = predict_mask(trained.model, image, trained.input)
        _write_png(mask_image(indices, ids, colors), target)
        if options.overlay:
            _write_png(overlay(image, indices, len(names)), target.with_name(f"{path.stem}_overlay.png"))
        shares = np.bincount(indices.ravel(), minlength=len(names)) / indices.size
        if options.form is not None:
            status(f"predicted {number} of {len(targets)}")
            found.append((path, target, shares.tolist()))
            continue
        print(plain_line(f"{_short(path)} -> {_short(target)}"))
        for at in np.argsort(-shares, kind="stable")[: options.top]:
            if shares[at] > 0:
                print(f"  {padded(shortened(names[at], width), width)}  {format_percent(shares[at]):>7}")
    status("")
    if options.form == "json":
        objects = [
            {"path": str(path), "mask": str(target), "shares": dict(zip(names, shares, strict=True))}
            for path, target, shares in found
        ]
        print(json_plain(json_text(objects, indent=1)))
    elif options.form == "csv":
        header = ["path", "mask", *(f"share of {name}" for name in names)]
        print(render(header, [[str(path), str(target), *shares] for path, target, shares in found], "csv"))


def _write_png(image: Image, file: Path) -> None:
    write_atomically(file, lambda temporary: image.save(temporary, format="png"))


def _mask_files(paths: Sequence[Path], options: argparse.Namespace) -> dict[Path, Path]:
    """Return the file of each image's mask, in a folder that this function creates.

    Raises:
        UserError: two masks would have the same file, or the folder contains an image.
    """
    out = options.out
    if out is None:
        out = (options.run if options.run.is_dir() else options.run.parent) / "masks"
        refuse_link(out)  # a run folder may come from somebody else
    stem, number = Counter(path.stem for path in paths).most_common(1)[0]
    if number > 1:
        raise UserError(f"{number} images are named {stem}, so their masks would be one file. Predict them in turn.")
    inside = {path for path in paths if out.resolve() in path.resolve().parents}
    if inside:
        raise UserError(f"--out {out} holds the image {min(inside)}. Choose another folder.")
    out.mkdir(parents=True, exist_ok=True)
    return {path: out / f"{path.stem}.png" for path in paths}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="efficient-ft predict", description=DESCRIPTION, formatter_class=Help)
    parser.add_argument("run", type=Path, nargs="?", help="a run folder, or its model.safetensors")
    parser.add_argument(
        "files",
        type=Path,
        nargs="*",
        metavar="FILE",
        help="image files, or folders of them; for a run with task=text files of lines (- is the standard input)",
    )
    parser.add_argument("--task", help="for a run on several data sets: the one whose classes are predicted")
    parser.add_argument("--top", type=count, default=5, metavar="K", help="classes printed for each item (default 5)")
    form = parser.add_mutually_exclusive_group()
    form.add_argument(
        "--csv", dest="form", action="store_const", const="csv", help="print CSV with a row for each item"
    )
    form.add_argument("--json", dest="form", action="store_const", const="json", help="print a JSON list of objects")
    parser.add_argument(
        "--batch-size", type=count, default=32, metavar="N", help="images or texts in a batch (default 32)"
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder of the masks (default: RUN/masks)")
    parser.add_argument("--overlay", action="store_true", help="also write the images with the classes' colors on them")
    parser.add_argument("--device", default=None, help="cpu, cuda or mps (default: cuda if available)")
    return parser


def _image_files(paths: Sequence[Path], names: Sequence[str]) -> Iterator[Item]:
    """Yield the files in `paths`, and all image files in and below its folders, with their labels.

    Args:
        paths: files and folders.
        names: names of the classes, which folders may be named after.
    """
    from efficient_ft.data.images import is_image

    for path in paths:
        if path.is_dir():
            found = sorted(p for p in path.rglob("*") if p.is_file() and is_image(p))
            if not found:
                raise UserError(f"{path}: no images in this folder.")
            for file in found:
                below = file.relative_to(path)
                shown = _short(path) / below if not _short(path).is_absolute() else Path(path.name) / below
                yield Item(file, plain_line(str(shown)), _label((*below.parent.parts[::-1], path.name), tuple(names)))
        elif path.is_file():
            yield Item(path, plain_line(str(_short(path))), _label((path.parent.name,), tuple(names)))
        else:
            raise UserError(f"{path}: {'neither a file nor a folder' if path.exists() else 'no such file'}.")


@cache
def _label(folders: tuple[str, ...], names: tuple[str, ...]) -> str | None:
    """Return the class that the nearest of `folders` is named after, ignoring case if the match is unique."""
    for folder in map(_key, folders):
        same = [name for name in names if _key(name) == folder]
        alike = [name for name in names if _key(name).casefold() == folder.casefold()]
        if same or len(alike) == 1:
            return (same or alike)[0]
    return None


@cache
def _key(name: str) -> str:
    """Normalize a name for comparison: some file systems store accents apart from their letters."""
    return unicodedata.normalize("NFC", name)


def _short(path: Path) -> Path:
    """Return a path relative to the current folder, if it is inside of it."""
    here = Path(os.getcwd())
    return path.relative_to(here) if path.is_absolute() and path.is_relative_to(here) else path
