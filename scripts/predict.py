"""Classes and probabilities of images, by a trained run: ``python scripts/predict.py RUN IMAGE...``"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

from efficient_ft.core.errors import UserError, replace_unprintable


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Classes and probabilities of images, by a trained run.")
    parser.add_argument("run", type=Path, help="a run folder, or its model.safetensors")
    parser.add_argument("images", type=Path, nargs="+", metavar="IMAGE", help="image files, or folders of them")
    parser.add_argument("--task", help="of a run on several data sets: the one whose classes are meant")
    parser.add_argument("--top", type=int, default=5, metavar="K", help="classes shown per image (default 5)")
    parser.add_argument("--batch-size", type=int, default=32, metavar="N", help="images at once (default 32)")
    parser.add_argument("--device", default=None, help="cpu, cuda, mps (default: cuda where there is one)")
    options = parser.parse_args()
    for name in ("top", "batch_size"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')}: allowed is a whole number of at least 1")
    return options


def files(given: list[Path]) -> Iterator[Path]:
    """The files meant, folders searched with all below them."""
    from efficient_ft.data.images import is_image

    for path in given:
        if path.is_dir():
            found = sorted(p for p in path.rglob("*") if p.is_file() and is_image(p))
            if not found:
                raise UserError(f"{path}: no images in this folder.")
            yield from found
        elif path.is_file():
            yield path
        else:
            raise UserError(f"{path}: no such file.")


def main() -> None:
    replace_unprintable()
    options = arguments()
    paths = list(files(options.images))

    import torch

    from efficient_ft.data import Transform
    from efficient_ft.training import export

    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    trained = export.load(options.run, options.task)
    if trained.tasks and options.task is None:
        raise UserError(f"{options.run} was trained on several data sets: give --task {' or '.join(trained.tasks)}.")
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


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        print(error, file=sys.stderr)
        raise SystemExit(2) from None
    except BrokenPipeError:
        raise SystemExit(1) from None
