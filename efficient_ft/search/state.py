"""State of a search, which is written to search.json after every slice of training.

A search that was interrupted or killed continues from this file. The file does not import torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from efficient_ft.core.errors import UserError
from efficient_ft.core.files import write_text_atomically
from efficient_ft.core.parsing import parse_json
from efficient_ft.record.files import json_text
from efficient_ft.record.formats import FORMAT, check_format

NAME = "search.json"

_DO = "Rename the folder to start a new search."


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Slice(_Strict):
    """A part of a training run, after which the run was paused.

    Attributes:
        step: number of optimizer steps after the slice.
        seconds: time of the slice in seconds, including the start of the process and the evaluation.
        trained: training time of the run so far in seconds, without the start of the processes.
        evaluated: time of the evaluation after the slice in seconds, which is a part of `seconds` and `trained`.
        value: validation metric after the slice, as a fraction.
        loss: validation loss after the slice.
        peak_bytes: peak memory of the process.
    """

    step: int
    seconds: float
    trained: float
    evaluated: float
    value: float
    loss: float
    peak_bytes: int


class Arm(_Strict):
    """A recipe with a learning rate that takes part in the search.

    Attributes:
        name: name in tables, e.g. ``full lr=0.0001``. With several networks, the name begins with the network.
        recipe: name of the studied row of the recipe.
        arguments: settings of the run, as on the command line, without the length of the run.
        folder: folder of the run, relative to the folder of the search.
        lr: learning rate.
        points_lost: loss of test accuracy relative to full fine-tuning in studies, in percentage points, or None.
        source: title of the study from which the learning rate was taken.
        baseline: True if users compare other recipes with this recipe (full fine-tuning, LoRA or the head).
        needed_bytes: memory budget that the recipe needs.
        network: option of the group ``model``, or "" if the search was started with one network.
        slices: finished slices of training.
        stopped: the reason why the search no longer trains the arm, or None.
        retried: True if the recipe is not the cause of its failure. A repeated command then tries the arm again.
    """

    name: str
    recipe: str
    arguments: list[str]
    folder: str
    lr: float
    points_lost: float | None
    source: str
    baseline: bool = False
    needed_bytes: int
    network: str = ""
    slices: list[Slice] = Field(default_factory=list)
    stopped: str | None = None
    retried: bool = False

    @property
    def step(self) -> int:
        """Number of optimizer steps so far."""
        return self.slices[-1].step if self.slices else 0

    @property
    def value(self) -> float | None:
        """Validation metric after the last slice, as a fraction, or None before the first slice."""
        return self.slices[-1].value if self.slices else None


class Running(_Strict):
    """The running process: its arm (None for the proposals), and the elapsed budget and the clock time at its start."""

    arm: str | None
    elapsed: float
    time: float


class Data(_Strict):
    """Numbers of samples, and the number of optimizer steps in an epoch."""

    train: int
    val: int
    test: int
    epoch_steps: int


class Proposed(_Strict):
    """Proposed recipes for one network, or for all networks of a search.

    Attributes:
        arms: the recipes. The list is empty if no recipe fits the memory budget.
        refused: reasons why other recipes are not used, keyed by recipe.
        data: the sizes of the data.
        seconds: time in seconds, without the start of a process.
        smallest: name of the examined recipe that needs the least memory, or None if no recipe can be used.
        smallest_bytes: memory budget that this recipe needs.
        networks: reasons why networks do not take part, keyed by network. Each reason is a sentence.
    """

    arms: list[Arm]
    refused: dict[str, str]
    data: Data
    seconds: float
    smallest: str | None = None
    smallest_bytes: int = 0
    networks: dict[str, str] = Field(default_factory=dict)


class Final(_Strict):
    """Training of the best arm to the end: planned numbers of steps and of steps with a decreasing rate, and results.

    `steps` and `decay` are 0 until the decrease of the learning rate is planned. The results are None until the run is
    finished: the validation metric (`value`), the test metric (`test`), the used budget (`seconds`), the training time
    of the run in seconds (`trained`), the peak memory of the process (`peak_bytes`), and the settings whose values the
    run selected by measuring times (`selected`).
    """

    arm: str
    steps: int = 0
    decay: int = 0
    metric: str | None = None
    value: float | None = None
    test: float | None = None
    seconds: float | None = None
    trained: float | None = None
    peak_bytes: int | None = None
    selected: list[str] = Field(default_factory=list)


class SearchState(_Strict):
    """State of a search.

    Attributes:
        settings: settings of the search, as on the command line.
        memory_bytes: memory budget of each training process.
        budget: time budget in seconds, or the budget of optimizer steps.
        unit: unit of the budget.
        elapsed: part of the budget that was used.
        data: numbers of samples, or None before the proposals.
        start: measured time in seconds in which a process starts, without loading a network and data.
        arms: recipes that take part, in the order of their expected accuracy.
        refused: reasons why other recipes do not take part, keyed by recipe. With several networks, the keys begin with
            the network.
        networks: reasons why networks do not take part, keyed by network. Each reason is a sentence.
        rungs: number of arms in each round of the race.
        shares: budget of an arm in each round that has begun.
        metric: name of the validation metric, or None before the first slice.
        running: the slice that is running, or None.
        final: the training of the best arm to the end, or None during the race.
    """

    format: int = FORMAT
    settings: list[str]
    memory_bytes: int
    budget: float
    unit: str
    elapsed: float = 0.0
    data: Data | None = None
    start: float = 0.0
    arms: list[Arm] = Field(default_factory=list)
    refused: dict[str, str] = Field(default_factory=dict)
    networks: dict[str, str] = Field(default_factory=dict)
    rungs: list[int] = Field(default_factory=list)
    shares: list[float] = Field(default_factory=list)
    metric: str | None = None
    running: Running | None = None
    final: Final | None = None

    def arm(self, name: str) -> Arm:
        """Return the arm with a name."""
        return next(arm for arm in self.arms if arm.name == name)

    @property
    def several_networks(self) -> bool:
        """True if recipes of several networks take part."""
        return len({arm.network for arm in self.arms}) > 1

    @property
    def alive(self) -> list[Arm]:
        """Arms that the search still trains."""
        return [arm for arm in self.arms if arm.stopped is None]

    @property
    def finished(self) -> bool:
        """True if the best arm was trained to the end."""
        return self.final is not None and self.final.seconds is not None


def read_state(folder: Path) -> SearchState | None:
    """Read the state in a folder, or return None if the folder has no search. Raise UserError for a damaged file."""
    file = folder / NAME
    if not file.is_file():
        return None
    try:
        plain: Any = parse_json(file.read_text(encoding="utf-8"))
        check_format(file, plain.get("format") if isinstance(plain, dict) else None, _DO)
        return SearchState.model_validate(plain)
    except (ValueError, ValidationError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"The file {file} is damaged. {_DO}") from error


def write_state(folder: Path, state: SearchState) -> None:
    """Write the state to a folder."""
    write_text_atomically(folder / NAME, json_text(state.model_dump(mode="json"), indent=1) + "\n")
