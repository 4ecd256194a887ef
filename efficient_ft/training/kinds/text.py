"""Text classification."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from efficient_ft.config import Config, ModelConfig
from efficient_ft.config.kinds import RULES
from efficient_ft.core.errors import UserError, first_line
from efficient_ft.core.input_spec import InputSpec
from efficient_ft.core.text import plain_text, shortened, terminal_width
from efficient_ft.data import open_texts
from efficient_ft.models import factory
from efficient_ft.models.text import portable, require_fitting, tokenizer_of
from efficient_ft.task import TASKS, Inputs
from efficient_ft.training.kinds.base import PredictOptions, RunData, Trained, only
from efficient_ft.training.kinds.classes import ClassKind
from efficient_ft.training.kinds.files import Item
from efficient_ft.training.kinds.registry import register


class TextKind(ClassKind):
    """Text classification, with one class per text or pair of texts."""

    rules, task = RULES["text"], TASKS["text"]
    decodes_files, item_key = False, "text"

    def open(self, config: Config, spec: InputSpec) -> RunData:
        tokenizer = spec.tokenizer or tokenizer_of(config.model)
        return open_texts(config.data, tokenizer, spec.size[0], config.seed)

    def check_settings(self, config: Config) -> Config:
        """Return a configuration that skips unusable texts, because opening the data would stop at the first one."""
        return config.model_copy(update={"data": config.data.model_copy(update={"on_corrupt": "skip"})})

    def check_network(self, network: nn.Module, data: RunData) -> None:
        require_fitting(only(data).tokenizer, network)

    def network_input(self, spec: InputSpec, data: RunData) -> InputSpec:
        return replace(spec, tokenizer=only(data).tokenizer)

    def portable(self, config: Config, network: nn.Module) -> ModelConfig:
        return portable(config.model, network)

    def notes(self, config: Config, data: RunData) -> dict[str, Any]:
        return {"task": self.rules.name, "columns": only(data).columns}

    def items(self, trained: Trained, options: PredictOptions) -> list[Item]:
        return read_lines(options.files, int(trained.notes.get("columns", 1)))

    def inputs(self, trained: Trained, values: Sequence[Any]) -> Inputs:
        assert trained.input.tokenizer is not None
        return trained.input.tokenizer.batch([line.split("\t") for line in values], trained.input.size[0])

    def heading(self, item: Item) -> str:
        return shortened(item.shown, terminal_width())

    def size_setting(self, config: Config) -> str:
        return f"model.max_length={factory.input_of(config.model).size[0]}"

    def smaller_inputs(self, config: Config) -> list[Config]:
        return []  # inputs are not shortened, because truncating a text changes its meaning


def read_lines(files: Sequence[Path], columns: int) -> list[Item]:
    """Return the non-empty lines of text files. Each line must contain `columns` texts that are separated by tabs.

    The file name ``-`` means standard input.

    Raises:
        UserError: If a file cannot be read, if a line contains a different number of texts, or if there are no texts.
    """
    lines: list[str] = []
    for path in files:
        try:
            raw = sys.stdin.buffer.read() if str(path) == "-" else path.read_bytes()
            if b"\0" in raw:
                raise UserError(f"{path} contains NUL characters, so it is not UTF-8 text. Save the file as UTF-8.")
            text = raw.decode("utf-8-sig")
        except OSError as error:
            raise UserError(
                f"{path}: {error.strerror}. A run with task=text reads text files with one sample per line."
            ) from error
        except UnicodeDecodeError as error:
            raise UserError(f"The file {path} cannot be read as UTF-8 text ({first_line(error)}).") from error
        except MemoryError as error:
            raise UserError(f"The file {path} does not fit into memory. Split the file into several files.") from error
        for number, line in enumerate(text.replace("\r\n", "\n").split("\n"), 1):
            if line.strip():
                cells = [cell.strip() for cell in line.split("\t")]
                if len(cells) != columns or not all(cells):
                    form = "FIRST<tab>SECOND" if columns == 2 else "one text without tabs"
                    raise UserError(f"{path}, line {number}: each line must have the form {form}.")
                lines.append("\t".join(cells))
    if not lines:
        raise UserError(f"{', '.join(map(str, files))}: these files contain no text.")
    return [Item(line, plain_text(line)) for line in lines]


register(TextKind())
