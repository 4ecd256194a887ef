"""Small runs: their configuration, interruptions and comparisons."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from efficient_ft.cli.hydra.rows import merged
from efficient_ft.config import check
from efficient_ft.training import finish as training_finish
from efficient_ft.training import run as training_run
from efficient_ft.training.callbacks import recorder
from efficient_ft.training.output import checkpoint, export
from tests.config.settings import with_changes
from tests.promises.children import SECONDS, Child, wait_until
from tests.promises.methods import methods_of, network_of
from tests.promises.trial import require

#: Number of optimizer steps of a run, which has two epochs.
STEPS = 6
#: A checkpoint is written after every second step and at the end of each epoch.
_EVERY = 2
SAVED_AFTER = (2, 3, 4, 6)

#: Audit events of Python for file changes, in addition to `open` with flags for writing.
_FILE_EVENTS = ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "os.link", "os.symlink")


def write_images(folder: Path) -> None:
    """Write 24 handwritten digits of each of 4 classes into FOLDER/CLASS/NUMBER.png."""
    from PIL import Image

    from efficient_ft.data.digits import load_digits

    images, labels = load_digits()
    gray = (images * (255 / 16)).round().astype("uint8")
    for label in range(4):
        into = folder / str(label)
        into.mkdir(parents=True)
        for number, pixels in enumerate(gray[labels == label][:24]):
            Image.fromarray(pixels).convert("RGB").save(into / f"{number:02}.png")


def configuration(images: Path, case: str = "full", quiet: bool = False, **changes: Any) -> dict[str, Any]:
    """Return the configuration of a run of 6 steps as plain containers.

    Args:
        images: Folder filled by `write_images`.
        case: Name of a case of `methods`.
        quiet: If True, the network has no random layers.
        changes: Values by dotted key, with ``__`` for the dot.
    """
    plain: dict[str, Any] = {
        "model": network_of(case, quiet),
        "data": {
            "name": "folder",
            "root": str(images),
            "batch_size": 24,  # a third of the training images
            "num_workers": 0,
            "val_fraction": 0.25,
            "keep_decoded": "off",
            "augment": {"scale": [0.6, 1.0], "flip": False},
        },
        "method": methods_of(case),
        "optim": {
            "name": "adamw",
            "lr": 1e-2,
            "weight_decay": 0.05,
            "warmup_steps": 2,
            "label_smoothing": 0.0,
            "grad_clip_norm": 1.0,
        },
        "trainer": {"epochs": 2, "precision": "fp32", "accelerator": "cpu", "progress": False},
        "cost": {"baseline": "none", "steps": 1},
    }
    return with_changes(plain, **changes)


def arguments(images: Path, run: Path, *more: str) -> list[str]:
    """Return the command line of the same run in the folder `run`, without random layers. `more` replaces settings."""
    own = [
        "data=folder", f"data.root={images}", "data.batch_size=24", "data.num_workers=0", "data.val_fraction=0.25",
        "data.keep_decoded=off", "+model.kwargs.depth=2", "+model.kwargs.embed_dim=16",
        "+model.kwargs.num_heads=2", "model.frozen_bn=false",
        "method=full", "trainer.epochs=2", "trainer.precision=fp32", "trainer.accelerator=cpu",
        "trainer.progress=false", "cost.baseline=none", "optim.warmup_steps=null", "cost.steps=1", "allocator=keep",
        f"hydra.run.dir={run}",
    ]  # fmt: skip
    return list(merged(*own, *more))


def reading(images: Path, run: Path, out: Path) -> dict[str, list[str]]:
    """Return the command lines that read the run folder `run`, by name. The last command line continues the run.

    Args:
        images: Folder of the images.
        run: Run folder.
        out: Folder for a report, which must not exist.
    """
    return {
        "evaluate": [f"evaluate={run}"],
        "predict": ["predict", str(run), str(next(images.rglob("*.png")))],
        "report": ["report", str(run), "--out", str(out)],
        "collect": ["collect", str(run.parent)],
        "figure": ["figure", "lbp_wht/figure_3", str(run), "--out", f"{out}_figure"],
        "continue": arguments(images, run, "trainer.max_steps=2"),
    }


# ---------------------------------------------------------------------------------------------- child processes
def program(words: Sequence[str], most_bytes: int | None = None) -> None:
    """Run the program on a command line, with the exit status of a separate process. It must run in a child process.

    Args:
        words: Command line after the name of the program.
        most_bytes: Limit of additional memory in bytes. Reserved address space, such as the arena of each thread, does
            not count.
    """
    from efficient_ft.cli.entry import main

    if most_bytes is not None:
        import resource

        pages = int(Path("/proc/self/statm").read_text().split()[5])
        limit = pages * resource.getpagesize() + most_bytes
        resource.setrlimit(resource.RLIMIT_DATA, (limit, resource.RLIM_INFINITY))
    _without_cost()
    sys.argv = ["efficient-ft", *words]
    main()


def program_with_costs(words: Sequence[str]) -> None:
    """Run the program on a command line, with its cost report. This function must run in a child process."""
    from efficient_ft.cli.entry import main

    sys.argv = ["efficient-ft", *words]
    main()


def train(plain: dict[str, Any], folder: Path, interruption: str = "", at: int = 0) -> dict[str, Any] | list[str]:
    """Run `plain` in `folder` with a checkpoint after every second step. This function must run in a child process.

    The argument `interruption` has the following values:

    * ``event``: Send SIGKILL before file event `at` (from 1).
    * ``events``: Return the names of the file events.
    * ``copies``: Return the names of the file events. Before event N, copy an existing run folder to FOLDER_copies/N.
    * ``SIGKILL``, ``SIGINT``, ``SIGTERM``: Send this signal after optimizer step `at` is recorded.
    * ``epoch``: Send SIGKILL after epoch `at` is evaluated and saved.
    * ``write``: After 4 steps, a write that makes a file longer than `at` bytes kills the process.
    * ``full``: After 4 steps, no file can become longer than `at` bytes, as on a full disk.
    * The empty string: Run to the end.

    Args:
        plain: Configuration.
        folder: Run folder.
        interruption: Kind of interruption.
        at: Position or size of the interruption.

    Returns:
        The results, or the names of the file events.
    """
    from efficient_ft.cli.exits import clean_exits

    recorder.RECORD_EVERY = _EVERY
    recorder.STEP_CHECKPOINT_SECONDS = recorder.EPOCH_CHECKPOINT_SECONDS = 0.0
    events: list[str] = []
    if interruption in ("event", "events", "copies"):
        copies = folder.with_name(f"{folder.name}_copies") if interruption == "copies" else None
        _watch_files(folder, events, at if interruption == "event" else 0, copies)
    elif interruption.startswith("SIG"):
        after_step(at, lambda: signal.raise_signal(getattr(signal, interruption)))
    elif interruption == "epoch":
        _after_epoch(at, lambda: signal.raise_signal(signal.SIGKILL))
    elif interruption in ("write", "full"):
        after_step(4, lambda: _limit_files(at, kill=interruption == "write"))
    _without_cost()
    with clean_exits():
        results = training_run.run(check(plain), folder)
    return events if interruption in ("events", "copies") else {key: results[key] for key in ("accuracy",)}


def _without_cost() -> None:
    setattr(training_finish, "cost_report", _no_cost_report)  # noqa: B010


def _no_cost_report(*_: Any) -> dict[str, Any]:
    """Replace the cost report, which would take most of the time of these runs and does not affect training."""
    executed = {"forward_flops": 1.0, "backward_flops": 2.0, "saved_bytes": 3.0, "step_peak_bytes": 4}
    return {"executed": executed, "measured": {"step_seconds": 5.0, "peak_bytes": 6.0}, "baseline": None}


def _watch_files(folder: Path, events: list[str], kill_at: int = 0, copies: Path | None = None) -> None:
    """Append each event that changes a file of `folder` to `events`.

    Args:
        folder: Run folder.
        events: Names of the events.
        kill_at: Number of the event, from 1, before which the process is killed, or 0 for no kill.
        copies: Folder for copies of the run folder before each event, or None for no copies.
    """
    within = f"{folder}{os.sep}"

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            path, _, flags = arguments
            if not isinstance(path, str) or not flags & (os.O_WRONLY | os.O_RDWR):
                return
        elif event in _FILE_EVENTS:
            path = os.fspath(arguments[0])
        else:
            return
        if path.startswith(within) or path == str(folder):
            events.append(f"{event.removeprefix('os.')} {path.removeprefix(within)}")
            if len(events) == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            if copies is not None and folder.is_dir():
                shutil.copytree(folder, copies / str(len(events)))

    sys.addaudithook(watch)


def after_step(step: int, happen: Callable[[], None]) -> None:
    """Call `happen` after optimizer step `step` is recorded and saved."""
    end = recorder.Recorder.on_train_batch_end

    def ended(self: recorder.Recorder, trainer: Any, *arguments: Any) -> None:
        end(self, trainer, *arguments)
        if trainer.global_step == step:
            happen()

    recorder.Recorder.on_train_batch_end = ended  # type: ignore[assignment, method-assign]


def _after_epoch(epoch: int, happen: Callable[[], None]) -> None:
    """Call `happen` after epoch number `epoch` (from 1) is evaluated and saved."""
    end = recorder.Recorder.on_train_epoch_end

    def ended(self: recorder.Recorder, trainer: Any, *arguments: Any) -> None:
        end(self, trainer, *arguments)
        if trainer.current_epoch + 1 == epoch:
            happen()

    recorder.Recorder.on_train_epoch_end = ended  # type: ignore[assignment, method-assign]


def _limit_files(size: int, kill: bool) -> None:
    import resource

    if kill:  # Python ignores this signal by default, so the write would fail instead
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


# ---------------------------------------------------------------------------------------------- several processes
def in_processes(count: int, function: Callable[..., Any], *arguments: Any, output: Path) -> list[Any]:
    """Call `function` in each process of a DDP group, like a launcher.

    Args:
        count: Number of processes.
        function: Function at the top level of a module.
        arguments: Arguments of the function.
        output: Path of the files with the printed text, without ``_RANK.log``.

    Returns:
        list: The returned value of each process.

    Raises:
        BrokenPromiseError: If a process fails.
    """
    group: dict[str, str] = {}
    if count > 1:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "NODE_RANK": "0", "WORLD_SIZE": str(count)}
    children = [
        Child(
            _in_group,
            function,
            arguments,
            output=output.with_name(f"{output.name}_{rank}.log"),
            environment={**group, "LOCAL_RANK": str(rank)} if group else None,
        )
        for rank in range(count)
    ]
    wait_until(lambda: not all(child.runs for child in children))
    # If a process fails, the other processes wait in a collective call.
    done = [child.ended(SECONDS if all(one.runs or one.succeeded for one in children) else 10.0) for child in children]
    for rank, one in enumerate(done):
        require(one.status == 0, f"process {rank}: status {one.status}\n{one.printed[-2000:]}")
    return [one.value for one in done]


def _in_group(function: Callable[..., Any], arguments: Sequence[Any]) -> Any:
    """Call `function` in a process of a group. This function must run in a child process."""
    from lightning.fabric.utilities.rank_zero import rank_zero_only

    rank_zero: Any = rank_zero_only
    rank_zero.rank = int(os.environ.get("LOCAL_RANK", 0))  # Lightning reads the rank when it is imported
    return function(*arguments)


# ---------------------------------------------------------------------------------------------- comparisons
def require_same_run(one: Path, other: Path, steps: bool = True) -> None:
    """Require that two finished runs are bitwise equal.

    The comparison covers the last weights, the best weights, the states of the optimizer and the methods, the metrics
    and the accuracies.

    Args:
        one: Folder of the first run.
        other: Folder of the second run.
        steps: If True, also compare the rows of metrics within epochs.

    Raises:
        BrokenPromiseError: If the runs differ. The message names the first difference.
    """
    checkpoints = [checkpoint.read(folder / checkpoint.NAME) for folder in (one, other)]
    for key in ("state_dict", "optimizer_states", "lr_schedulers", "global_step", "epoch"):
        _require_equal(key, *(held[key] for held in checkpoints))
    states = [held["callbacks"].get("MethodCallback", {}) for held in checkpoints]
    _require_equal("methods", *states)
    _require_equal(export.NAME, *(load_file(folder / export.NAME) for folder in (one, other)))
    rows = [[row for row in metrics(folder) if steps or "train_loss_epoch" in row] for folder in (one, other)]
    _require_equal("metrics.jsonl", *rows)
    results = [json.loads((folder / "results.json").read_text(encoding="utf-8")) for folder in (one, other)]
    _require_equal("accuracy", *(held["accuracy"] for held in results))


def metrics(folder: Path) -> list[dict[str, Any]]:
    """Return the rows of metrics.jsonl without times and memory."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [{key: value for key, value in row.items() if not key.endswith(("seconds", "_bytes"))} for row in rows]


def require_close(one: Path, other: Path, rtol: float, atol: float) -> float:
    """Require that the last weights of two runs are close, and return the largest absolute difference.

    Raises:
        BrokenPromiseError: If a weight differs by more than `atol` + `rtol` · its absolute value.
    """
    states = [checkpoint.read(folder / checkpoint.NAME)["state_dict"] for folder in (one, other)]
    require(states[0].keys() == states[1].keys(), "the checkpoints hold other weights")
    largest = 0.0
    for name, value in states[0].items():
        if not value.is_floating_point():
            continue
        change = (value.double() - states[1][name].double()).abs()
        excess = change - rtol * value.double().abs()
        require(bool((excess <= atol).all()), f"{name} differs by {float(change.max()):.3g}")
        largest = max(largest, float(change.max()) if change.numel() else 0.0)
    return largest


def largest_difference(one: Path, other: Path) -> float:
    """Return the largest absolute difference of the last weights of two runs."""
    states = [checkpoint.read(folder / checkpoint.NAME)["state_dict"] for folder in (one, other)]
    return max(float((value.double() - states[1][name].double()).abs().max()) for name, value in states[0].items())


def _require_equal(name: str, one: Any, other: Any) -> None:
    if isinstance(one, torch.Tensor):
        same = isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
        require(same, f"{name} differs")
    elif isinstance(one, dict):
        require(isinstance(other, dict) and one.keys() == other.keys(), f"{name} has other entries")
        for key, value in one.items():
            _require_equal(f"{name}.{key}", value, other[key])
    elif isinstance(one, list | tuple):
        require(isinstance(other, Sequence) and len(one) == len(other), f"{name} has another length")
        for number, (a, b) in enumerate(zip(one, other, strict=True)):
            _require_equal(f"{name}[{number}]", a, b)
    else:
        require(one == other, f"{name} is {one} and {other}")
