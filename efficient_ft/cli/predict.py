"""``efficient-ft predict RUN IMAGE...``: classes and probabilities of images, by a trained run."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

from efficient_ft.core.errors import UserError


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the most probable classes of each image.

    Args:
        arguments: the command line; default: that of this process.

    Raises:
        UserError: no such run, image or device; an image that cannot be read.
    """
    options = _parser().parse_args(arguments)
    paths = list(_image_files(options.images))

    import torch

    from efficient_ft.data import Transform
    from efficient_ft.training import export

    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    trained = export.load(options.run, options.task)
    if trained.tasks and options.task is None:
        raise UserError(f"{options.run} was trained on several data sets: pass --task {' or '.join(trained.tasks)}.")
    try:
        trained.model.to(device)
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"--device {device} cannot be used here: {str(error).splitlines()[0]}") from error
    transform = Transform(trained.input)
    shown = min(options.top, len(trained.class_names))
    width = max(len(name) for name in trained.class_names)
    for start in range(0, len(paths), options.batch_size):
        batch = paths[start : start + options.batch_size]
        found = export.probabilities(trained.model, torch.stack([transform(path) for path in batch]))
        for path, row in zip(batch, found, strict=True):
            print(path)
            for probability, label in zip(*row.topk(shown), strict=True):
                print(f"  {trained.class_names[int(label)]:{width}}  {float(probability):7.2%}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="efficient-ft predict", description="Print classes and probabilities of images, by a trained run."
    )
    parser.add_argument("run", type=Path, help="a run folder, or its model.safetensors")
    parser.add_argument("images", type=Path, nargs="+", metavar="IMAGE", help="image files, or folders of them")
    parser.add_argument("--task", help="for a run on several data sets: the one whose classes are predicted")
    parser.add_argument("--top", type=_count, default=5, metavar="K", help="classes shown per image (default 5)")
    parser.add_argument("--batch-size", type=_count, default=32, metavar="N", help="images at once (default 32)")
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
            raise UserError(f"{path}: no such file.")
