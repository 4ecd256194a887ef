"""Helpers that the commands share: help texts, options, notes and the progress line."""

from __future__ import annotations

import argparse
import io
import logging
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

from efficient_ft.core.sheet import FORMS
from efficient_ft.core.text import paragraph, plain_line, shortened, terminal_width, wrapped


class Help(argparse.HelpFormatter):
    """Help formatter that wraps paragraphs to the width of the terminal. Indented lines are formatted as examples."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, width=terminal_width() - 2)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        lines: list[str] = []
        sentence: list[str] = []
        for line in [*text.rstrip().splitlines(), ""]:
            if line.strip() and not line.startswith("    "):
                sentence.append(line)
                continue
            if sentence:
                lines += wrapped(" ".join(sentence), width)
                sentence = []
            lines += fitted(line, width)
        return "\n".join(indent + line for line in lines).rstrip()


def fitted(line: str, width: int) -> list[str]:
    """Break a help line into lines of at most `width` columns.

    If the line of an example is too long, the explanation starts on a new line.
    """
    lines: list[str] = []
    example = re.fullmatch(r"(\s*\S.*?)\s{3,}(\S.*)", line)
    parts = [line] if len(line) <= width or example is None else [example[1], f"        {example[2]}"]
    for part in parts:
        short = part if len(part) <= width or not part.startswith(" " * 9) else f"        {part.strip()}"
        broken = wrapped(short, width - 2, " " * 8) if len(short) > width else [short.rstrip()]
        is_command = short.strip().startswith("efficient-ft ") or short.rstrip().endswith("\\")
        lines += [f"{one} \\" for one in broken[:-1]] if is_command else broken[:-1]
        lines.append(broken[-1])
    return lines


@contextmanager
def fitted_help() -> Iterator[None]:
    """Capture the help that is printed inside the ``with`` block, and print it in lines that fit the terminal."""
    printed = io.StringIO()
    try:
        with redirect_stdout(printed):
            yield
    finally:  # Hydra raises SystemExit after it prints help.
        width = terminal_width()
        print("\n".join(part for line in printed.getvalue().splitlines() for part in fitted(line, width)))


def quiet_libraries() -> None:
    """Silence warnings of other libraries. Users of a command cannot act on such warnings."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # By default, torch's profiler logs each start and stop.
    for name in ("torch.utils._pytree", "torch", "torchao", "lightning", "timm", "transformers", "peft", "PIL",
                 "huggingface_hub", "matplotlib", "wandb"):  # fmt: skip
        logging.getLogger(name).setLevel(logging.ERROR)
    if not sys.warnoptions:
        warnings.filterwarnings("ignore")
        warnings.filterwarnings("default", module="efficient_ft")


def words(given: str) -> list[str]:
    """Parse an option value that consists of words separated by commas."""
    found = [word.strip() for word in given.split(",") if word.strip()]
    if not found:
        raise argparse.ArgumentTypeError("must not be empty. To select everything, omit the option.")
    return found


def integer(least: int, most: int | None = None) -> Callable[[str], int]:
    """Return a parser for integer options from `least` to `most`, or without an upper bound if `most` is None."""

    def parse(given: str) -> int:
        if not given.isdecimal() or int(given) < least or (most is not None and int(given) > most):
            bounds = f">= {least}" if most is None else f"from {least} to {most}"
            raise argparse.ArgumentTypeError(f"must be an integer {bounds}, got {given}.")
        return int(given)

    parse.__doc__ = integer.__doc__
    return parse


count = integer(1)
count_or_zero = integer(0)
#: Random seed, with the same bounds as the `seed` setting of a run.
seed = integer(0, 2**32 - 1)


def add_columns_option(parser: argparse.ArgumentParser) -> None:
    """Add the option ``--columns NAME,...``. The value of the option is passed to `core.sheet.render`."""
    columns = "column names or parts of column names, or all (default: the columns that fit the terminal)"
    parser.add_argument("--columns", type=words, default=[], metavar="NAME,...", help=columns)


def add_form_option(parser: argparse.ArgumentParser) -> None:
    """Add the option ``--form``, which selects the output format of a table."""
    parser.add_argument("--form", choices=FORMS, default="text", help="output format (default: text)")


def note(sentence: str, **to: Any) -> None:
    """Print a note to stderr, in lines that fit the terminal."""
    print(paragraph(f"note: {sentence}", "  "), **{"file": sys.stderr, "flush": True, **to})


def status(text: str) -> None:
    """Show a progress line if stderr is a terminal. Each call replaces the line. An empty `text` removes the line."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{shortened(text, terminal_width() - 1)}", end="", file=sys.stderr, flush=True)


def run_folders(command: str, argument: str) -> str:
    """Return the usage of a command and a list of the latest finished runs in ``outputs``."""
    from efficient_ft.record.results import NAME

    usage = f"Usage: efficient-ft {command} {argument}"
    every = sorted(Path("outputs").rglob(NAME), key=lambda file: file.stat().st_mtime, reverse=True)
    if not every:
        return f"{usage}\nThere are no finished runs in outputs. To start a run, use `efficient-ft`."
    latest = [f"  {plain_line(str(file.parent))}" for file in every[:10]]
    more = [f"  and {len(every) - 10} more"] if len(every) > 10 else []
    return "\n".join([usage, "Finished runs in outputs (latest first):", *latest, *more])
