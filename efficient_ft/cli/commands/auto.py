"""``efficient-ft auto KEY=VALUE... memory=SIZE time=TIME``: find and train the best model within a budget."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import sys
import time as clock
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from efficient_ft.cli.commands.auto_networks import Networks, available_networks, several_networks
from efficient_ft.cli.exits import report_outcome
from efficient_ft.cli.hydra import processes
from efficient_ft.cli.hydra.compose import configured
from efficient_ft.cli.hydra.output_folder import leaving_nothing
from efficient_ft.cli.hydra.rows import check_settings, key_of, merged
from efficient_ft.cli.terminal import Help
from efficient_ft.config import Config, image_folders
from efficient_ft.core.errors import SettingError, TerminatedRun, UserError
from efficient_ft.core.terminal import show, shown_path, start_console
from efficient_ft.core.units import parse_bytes, parse_seconds

if TYPE_CHECKING:
    from efficient_ft.search.search import Ended
    from efficient_ft.search.state import Proposed, SearchState

DESCRIPTION = """\
Find and train the best model within a memory budget and a time budget.

    efficient-ft auto data=folder data.root=DIR model=deit_tiny memory=2GB time=30m
    efficient-ft auto data=folder data.root=DIR model=deit_tiny memory=2GB steps=2000
    efficient-ft auto data=folder data.root=DIR model=deit_tiny,resnet50 memory=2GB time=1h
    efficient-ft auto data=folder data.root=DIR model=auto memory=2GB time=1h

The command takes recipes and learning rates from finished studies, and excludes recipes whose predicted memory exceeds
memory. In each round, it trains the remaining recipes for some time, and keeps the third that is best on the validation
images. At the end, it trains the best recipe until the time is over, and evaluates the test images once.

model=A,B compares the recipes of several networks. model=auto selects networks whose pretrained weights are in the
local cache or can be downloaded.

memory is the budget of each training process. time is the budget of the whole command. With steps=N instead, all
recipes together train for N steps, and the result does not depend on the speed of the machine. All other settings are
settings of the runs. The same command continues an interrupted search. The last line of the output names the folder
with the model.
"""

#: Settings that only this command accepts.
OF_A_SEARCH = ("memory", "time", "steps")
#: Settings of all runs of a search, which the user can change. They are the settings of the studies from which the
#: recipes and learning rates are taken.
COMMON = ("recipe=none", "optim=adam", "optim.head_lr_mult=10", "optim.warmup_steps=20", "data.batch_size=32",
          "data.val_fraction=0.2", "trainer.cache_features=auto")  # fmt: skip
#: Augmentation in the studies of images, which is used if no setting of data.augment is given.
CROPS = "data.augment.scale=[0.25,1.0]"
#: Settings that the search determines. No search reaches the number of epochs.
OWN = ("optim.schedule=constant", "trainer.epochs=1000000", "trainer.progress=false", "cost.baseline=none",
       "cost.steps=1", "resume=auto")  # fmt: skip
#: Settings that the user cannot set, because the search determines them.
_TAKEN = ("method", "optim.lr", "optim.schedule", "optim.decay_steps", "trainer.epochs", "trainer.max_steps",
          "trainer.patience", "trainer.progress", "cost", "pause_at", "resume", "evaluate", "cost_only", "jobs",
          "job_timeout", "rows", "experiment", "hydra", *OF_A_SEARCH)  # fmt: skip

#: The command of this program. Other programs that call `auto` start their processes with this command too.
_PROGRAM = (sys.executable, "-m", "efficient_ft")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a search, and print its result."""
    parser = argparse.ArgumentParser(prog="efficient-ft auto", description=DESCRIPTION, formatter_class=Help)
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE", help="memory=SIZE, time=TIME, settings of the runs")
    parser.add_argument("--propose", nargs=4, type=float, help=argparse.SUPPRESS)
    parser.add_argument("--networks", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_intermixed_args(arguments)
    if options.networks is not None:
        names, limit = options.networks
        chosen, missing = available_networks(options.settings, names.split(","), int(limit) or None)
        report_outcome(results={"chosen": chosen, "missing": missing})
        return
    if options.propose is not None:
        _propose_here(options.settings, *options.propose)
        return
    check_settings(options.settings)
    own = dict(word.split("=", 1) for word in options.settings if word.partition("=")[0] in OF_A_SEARCH)
    settings = [word for word in options.settings if word.partition("=")[0] not in OF_A_SEARCH]
    auto(*settings, memory=own.get("memory"), time=own.get("time"), steps=own.get("steps"), say=show)


def auto(
    *settings: str,
    memory: str | None,
    time: str | None = None,
    steps: int | str | None = None,
    folder: Path | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> SearchState:
    """Find and train the best model within a budget. This function is also available as ``efficient_ft.auto``.

    Args:
        settings: settings of the runs as on the command line (``"model=deit_tiny", "data=folder", "data.root=DIR"``).
            With ``"model=deit_tiny,resnet50"`` or ``"model=auto"``, the recipes of several networks are compared.
        memory: memory budget of each training process with a unit, e.g. ``"2GB"``.
        time: time budget of the search with a unit, e.g. ``"30m"``.
        steps: number of optimizer steps of all recipes together, instead of `time`.
        folder: folder of the search. If None, the folder depends on the arguments, so that the same call continues an
            interrupted search.
        say: function that is called with each line of the progress and of the result.

    Returns:
        The state of the search (`efficient_ft.search.SearchState`). The model is in the run folder of its best arm.

    Raises:
        UserError: If a setting cannot be used, or if no recipe can be trained within the budget.
        KeyboardInterrupt: After Ctrl-C. The training process writes a checkpoint before it ends, and the same call
            continues the search.
    """
    from efficient_ft.search.earlier import PROPOSALS
    from efficient_ft.search.search import open_search
    from efficient_ft.search.text import result_text

    if memory is None:
        raise UserError("The memory budget is missing. Pass memory=SIZE, for example memory=2GB.")
    if (time is None) == (steps is None):
        raise UserError("Pass either time=TIME, for example time=30m, or steps=N.")
    memory_bytes = parse_bytes("memory", memory)
    budget = _steps(steps) if time is None else parse_seconds("time", time)
    for word in settings:
        key, value = key_of(word), word.partition("=")[2]
        if any(key == one or key.startswith((f"{one}.", f"{one}/")) for one in _TAKEN):
            raise SettingError(key, value, "left out", "The search determines this setting.")
        if value.startswith("{") and key in ("trainer", "optim", "data"):
            raise SettingError(key, value, "an option of the group", f"Pass each setting as {key}.NAME=VALUE.")
    networks = several_networks(settings)
    model = [] if networks is None else [f"model={networks.names[0]}"]
    own = [word for word in settings if networks is None or key_of(word) != "model"]
    augmented = any(key_of(word).startswith("data.augment") for word in settings)
    texts = configured(merged(*COMMON, *own, *model)).data.text is not None
    runs = merged(*COMMON, *([] if augmented or texts else [CROPS]), *own, *OWN, f"memory={memory}")
    config = configured([*runs, *model])
    _check(config)
    for name in () if networks is None or networks.automatic else networks.names[1:]:
        configured([*runs, f"model={name}"])
    asked = [*settings, f"memory={memory}", f"time={time}" if time is not None else f"steps={steps}"]
    if folder is None:
        data = re.sub(
            r"[^\w.+-]+", "_", Path(image_folders(config)[0]).name if image_folders(config) else config.data.name
        )
        code = hashlib.sha256(json.dumps(sorted(asked)).encode()).hexdigest()[:8]
        named = config.model.name if networks is None else networks.folder
        folder = Path("outputs", "auto", data, re.sub(r"[^\w.+-]+", "_", named), code)

    def propose(count: int, seconds: float) -> Proposed:
        return _propose(runs, networks, (memory_bytes, count, seconds), say, folder / PROPOSALS)

    unit = "steps" if time is None else "seconds"
    folder.mkdir(parents=True, exist_ok=True)
    with _stating_what_is_kept(folder, say), leaving_nothing(folder):
        search = open_search(folder, asked, memory_bytes, budget, unit, propose, _run_slice, say)
        say(f"Search in {shown_path(folder)}. The same command continues an interrupted search.")
        say(f"Settings of all runs: {' '.join(_shared(runs))}")
        state = search.run()
    with _stating_what_is_kept(folder, say):
        page = processes.run([*_PROGRAM, "report", str(folder)], {}, folder / "report.log")
    say("\n" + result_text(state, folder))
    if page.failure is None:
        say(f"Report: {shown_path(folder / 'report' / 'report.html')}")
    else:
        say(f"The report was not written: {page.failure}")
    return state


@contextmanager
def _stating_what_is_kept(folder: Path, say: Callable[[str], None]) -> Iterator[None]:
    """State which results are kept in `folder` if the search inside the ``with`` block is interrupted."""
    from efficient_ft.search.state import read_state
    from efficient_ft.search.text import interrupted_text

    try:
        yield
    except (KeyboardInterrupt, TerminatedRun):
        if (state := read_state(folder)) is not None:
            say(interrupted_text(state, folder))
        raise


def _shared(runs: Sequence[str]) -> list[str]:
    """Return the settings of all runs of a search, without settings that have no effect on the results."""
    return [word for word in runs if not word.startswith(("cost.", "trainer.progress=", "resume="))]


def _check(config: Config) -> None:
    """Raise a SettingError for settings of the runs that a search does not support."""
    if config.optim.name == "sgd":
        do = "The learning rates come from studies with Adam."
        raise SettingError("optim", "sgd", "adam or adamw in a search", do)
    if config.optim.warmup_steps is None:
        do = "The length of a run is not known in advance. For example, use optim.warmup_steps=20."
        raise SettingError("optim.warmup_steps", "null", "an integer in a search", do)
    if config.tasks:
        raise SettingError(
            "tasks", ", ".join(config.tasks), "left out in a search", "A search trains one data set: data=OPTION."
        )
    if config.data.select_best_on != "val":
        raise SettingError(
            "data.select_best_on", "test", "val in a search", "Recipes are compared on validation images."
        )
    if config.data.val_fraction == 0:
        known = "a fraction > 0 in a search"
        raise SettingError("data.val_fraction", 0, known, "Recipes are compared on validation images.")


def _steps(value: int | str | None) -> float:
    if not re.fullmatch(r"[1-9]\d*", str(value)):
        raise SettingError("steps", value, "an integer >= 1")
    return float(str(value))


def _propose(
    runs: Sequence[str],
    networks: Networks | None,
    limits: tuple[int, int, float],
    say: Callable[[str], None],
    log: Path,
) -> Proposed:
    """Propose arms for one network or several networks, in a separate process for each network.

    This process therefore remains small, and the networks do not share memory. The output of the processes is written
    to `log`, and is printed by `say`. `limits` contains the memory in bytes, the number of arms, and the time in
    seconds.
    """
    from efficient_ft.search.networks import most_networks, propose_each
    from efficient_ft.search.state import Proposed

    memory_bytes, count, seconds = limits
    began = clock.monotonic()
    printed: set[str] = set()

    def propose_one(network: str, recipes: int, seconds: float) -> Proposed:
        of_network = [*runs, f"model={network}"] if network else runs
        words = ["auto", *of_network, "--propose", str(memory_bytes), str(count), str(seconds), str(recipes)]
        log.unlink(missing_ok=True)
        ended = _run([*_PROGRAM, *words], log)
        if ended.results is None:
            raise UserError(ended.failure or "The process that proposes recipes returned no result.")
        shown = log.read_text(encoding="utf-8", errors="replace").rstrip().splitlines()
        lines = [line for line in shown if line not in printed]
        printed.update(lines)  # the data are the same for all networks
        say("\n".join(lines))
        return Proposed.model_validate(ended.results)

    if networks is None:
        return propose_each([""], None, count, seconds, memory_bytes, propose_one)
    limit = most_networks(count) if networks.automatic else None
    names = _available(runs, networks, limit, say, log)
    choosing = clock.monotonic() - began
    found = propose_each(names, limit, count, seconds, memory_bytes, propose_one)
    for network, reason in found.networks.items():
        say(f"{network} is excluded. {reason}")
    say(f"Networks: {', '.join(dict.fromkeys(arm.network for arm in found.arms))}.")
    return found.model_copy(update={"seconds": found.seconds + choosing})


def _available(
    runs: Sequence[str], networks: Networks, limit: int | None, say: Callable[[str], None], log: Path
) -> list[str]:
    """Return the networks whose weights are available, in the order of preference."""
    words = ["auto", *runs, "--networks", ",".join(networks.names), str(limit or 0)]
    log.unlink(missing_ok=True)
    ended = _run([*_PROGRAM, *words], log)
    if ended.results is None:
        raise UserError(ended.failure or "The process that selects networks returned no result.")
    if ended.results["missing"]:
        say(f"Networks without weights: {', '.join(ended.results['missing'])}.")
    return list(ended.results["chosen"])


def _propose_here(runs: Sequence[str], memory_bytes: float, count: float, seconds: float, recipes: float) -> None:
    """Propose arms in this process, and pass them to the parent process."""
    from efficient_ft.core.allocator import restart_with, use_allocator

    allocator = next((word.partition("=")[2] for word in runs if word.startswith("allocator=")), "auto")
    restart_with(allocator)
    use_allocator(allocator)
    from efficient_ft.search.arms import propose

    start_console(False)

    def configure(words: Sequence[str]) -> Config:
        config = configured(words)
        config.data._stops_early = True  # like early stopping, a search needs validation images
        return config

    found = propose(
        runs, configure, int(memory_bytes), int(count), seconds, _still_running, show, most_recipes=int(recipes)
    )
    report_outcome(results=found.model_dump(mode="json"))


def _still_running(text: str) -> None:
    """Update the time of the log, from which a repeated search takes the time of a killed process."""
    with suppress(OSError, NotImplementedError, TypeError):  # Windows cannot set the time of an open file
        os.utime(sys.stdout.fileno())


def _run_slice(arguments: Sequence[str], log: Path) -> Ended:
    from efficient_ft.search.search import Ended

    ended = _run([*_PROGRAM, *arguments], log)
    own = ended.diverged or ended.exceeded
    return Ended(ended.results, ended.failure or "", own, ended.killed, ended.exceeded)


def _run(command: Sequence[str], log: Path) -> processes.Ended:
    """Run a process of a search. Its id is recorded, so that a repeated search can stop the process."""
    from efficient_ft.search.earlier import record_process

    return processes.run(command, {}, log, started=partial(record_process, log))
