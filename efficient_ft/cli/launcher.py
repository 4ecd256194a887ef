"""Sweeps: each job in a process of its own, the finished ones skipped, the failures tabled.

Hydra's own launcher runs all jobs in one process: one kill for lack of memory ends the sweep, memory and threads
of one job reach into the next, and a repeated sweep starts anew. Here a job is the very command that would run it
alone, in the folder it would use alone. Other launchers (submitit) stay selectable: ``hydra/launcher=...``.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf

from efficient_ft.config import Config, check, fingerprint
from efficient_ft.config.plain import plain
from efficient_ft.core.errors import UserError

#: Names the file into which a job of a sweep writes its outcome (see `tell_sweep`), for the table at the end.
OUTCOME_FILE = "EFFICIENT_FT_OUTCOME_FILE"

#: Exit status of a run that was interrupted, as shells count it.
INTERRUPTED = 130


def register() -> None:
    """Make ``hydra/launcher=processes`` known to Hydra; the class it names is found by Hydra itself."""
    ConfigStore.instance().store(
        group="hydra/launcher",
        name="processes",
        node={"_target_": "hydra_plugins.efficient_ft_launcher.ProcessLauncher"},
        provider="efficient_ft",
    )


def tell_sweep(**outcome: Any) -> None:
    """Hand ``results`` or the ``reason`` of a failure to the sweep that started this run, if one did."""
    if OUTCOME_FILE in os.environ:
        Path(os.environ[OUTCOME_FILE]).write_text(json.dumps(outcome), encoding="utf-8")


@dataclass
class Job:
    """One job of a sweep: its arguments, folder and configuration; then its results or the reason of its failure."""

    overrides: tuple[str, ...]
    title: str  # the arguments in which it differs from the others
    folder: Path
    config: Config
    results: dict[str, Any] | None = None
    failure: str | None = None

    @property
    def trains(self) -> bool:
        return not self.config.cost_only and self.config.evaluate is None


def finished(folder: Path, config: Config) -> dict[str, Any] | None:
    """The results in `folder` if a run with the settings of `config` ended there, else None."""
    try:
        results = json.loads((folder / "results.json").read_text(encoding="utf-8"))
        same = fingerprint(check(results["config"])) == fingerprint(config)
    except (OSError, ValueError, KeyError, TypeError):  # none, cut short, or of another version
        return None
    return results if same else None


class ProcessLauncher(Launcher):
    """Runs jobs one after the other, each by the command that would run it alone."""

    def __init__(self) -> None:
        self.context: HydraContext | None = None
        self.config: DictConfig | None = None

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.context, self.config = hydra_context, config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Run the jobs; a failure does not stop the others.

        Raises:
            SystemExit: after the last job, when one has failed (status 1) or was interrupted (130).
        """
        jobs = [
            self._job(overrides, title) for overrides, title in zip(job_overrides, titles(job_overrides), strict=True)
        ]
        folders = [job.folder for job in jobs if job.trains]
        for folder in folders:
            if folders.count(folder) > 1:
                raise UserError(
                    f"{folders.count(folder)} jobs of this sweep would share the folder {folder}: they have the same"
                    " settings, or hydra.sweep.subdir does not tell them apart."
                )
        run_jobs(jobs, self._command)
        return [_returned(job) for job in jobs]

    def _job(self, overrides: Sequence[str], title: str) -> Job:
        assert self.context is not None
        assert self.config is not None
        composed = self.context.config_loader.load_sweep_config(self.config, list(overrides))
        folder = Path(composed.hydra.sweep.dir) / composed.hydra.sweep.subdir
        return Job(tuple(overrides), title, folder, check(plain(composed)))

    def _command(self, job: Job) -> list[str]:
        """The command line that runs `job` alone, in the folder it has in the sweep."""
        assert self.config is not None
        # What only steers the sweep has no meaning in a single run.
        steering = ("hydra.mode", "hydra.sweep", "hydra.launcher", "hydra/launcher", "hydra/sweeper", "hydra.run.dir")
        kept = [o for o in self.config.hydra.overrides.hydra if not o.lstrip("+~").startswith(steering)]
        source = next(s for s in self.config.hydra.runtime.config_sources if s.provider == "main")
        name = self.config.hydra.job.config_name
        extra = [s.path for s in self.config.hydra.runtime.config_sources if s.provider == "command-line"]
        if job.trains:
            folder = job.folder.as_posix().replace("\\", "\\\\").replace("'", "\\'")
            kept.append(f"hydra.run.dir='{folder}'")
        return command(source.path, name, extra[0] if extra else None, [*job.overrides, *kept])


def command(
    config_path: str | None, config_name: str | None, config_dir: str | None, arguments: Sequence[str]
) -> list[str]:
    """The command line of a new process that runs this program with `arguments` and Hydra's flags for its sources."""
    flags = {"--config-path": config_path, "--config-name": config_name, "--config-dir": config_dir}
    given = [part for flag, value in flags.items() if value is not None for part in (flag, value)]
    return [sys.executable, sys.argv[0], *given, *arguments]


def titles(jobs: Sequence[Sequence[str]]) -> list[str]:
    """The arguments in which each job differs from the others."""
    shared = set.intersection(*map(set, jobs)) if len(jobs) > 1 else set()
    return [" ".join(argument for argument in arguments if argument not in shared) for arguments in jobs]


def run_jobs(jobs: Sequence[Job], command: Callable[[Job], Sequence[str]]) -> None:
    """Run one `command` per job, one after the other; a failure does not stop the others. Print a table at the end.

    Raises:
        SystemExit: after the last job, when one has failed (status 1).
        KeyboardInterrupt: a job was interrupted.
    """
    for number, job in enumerate(jobs, start=1):
        title = f"[{number}/{len(jobs)}] {job.title}"
        if job.trains and job.config.resume == "auto":
            job.results = finished(job.folder, job.config)
        if job.results is not None:
            print(f"{title}: finished before, in {job.folder}", flush=True)
            continue
        print(title, flush=True)
        job.results, job.failure = _run(command(job))
        if job.failure is not None:
            print(f"{title}: FAILED: {job.failure}", file=sys.stderr, flush=True)
    print(f"\n{summary(jobs)}", flush=True)
    if any(job.failure is not None for job in jobs):
        raise SystemExit(1)


def summary(jobs: Sequence[Job]) -> str:
    """One line per job: best accuracy and executed backward FLOPs per image; then the failures with their reasons."""
    rows = [("job", "accuracy best", "backward MFLOPs", "folder")]
    for job in jobs:
        results = job.results or {}
        best = results.get("accuracy", {}).get("best")
        # Of a mere count of the cost there is nothing but the cost.
        flops = results.get("cost", results).get("executed", {}).get("backward_flops")
        rows.append(
            (
                job.title,
                "failed" if job.failure is not None else "–" if best is None else f"{100 * best:.2f} %",
                "–" if flops is None else f"{flops / 1e6:.1f}",
                str(job.folder) if job.trains else "–",
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    failures = [f"  {job.title}: {job.failure}" for job in jobs if job.failure is not None]
    if failures:
        again = "repeating the command runs only what is not finished"
        lines += ["", f"{len(failures)} of {len(jobs)} failed ({again}):", *failures]
    return "\n".join(lines)


def _returned(job: Job) -> JobReturn:
    """For sweepers that search: the value of a job is its best accuracy."""
    value = JobReturn(overrides=list(job.overrides), cfg=OmegaConf.create(job.config.model_dump(mode="json")))
    value.status = JobStatus.COMPLETED
    value.return_value = (job.results or {}).get("accuracy", {}).get("best")
    return value


def _run(command: Sequence[str]) -> tuple[dict[str, Any] | None, str | None]:
    """Run `command` on this terminal; its results, or the reason of its failure in one line.

    Raises:
        KeyboardInterrupt: it was interrupted.
    """
    with tempfile.TemporaryDirectory() as folder, _terminated_as_exit():
        file = Path(folder) / "outcome.json"
        # A Ctrl-C reaches the job as well, being in the same group: let it finish writing.
        process = subprocess.Popen(command, env={**os.environ, OUTCOME_FILE: str(file)})
        try:
            status = process.wait()
        except KeyboardInterrupt:
            process.wait()
            raise
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
        told = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    if status == INTERRUPTED:
        raise KeyboardInterrupt
    if status == 0:
        return told.get("results"), None
    if "reason" in told:
        return None, told["reason"]
    if status < 0:
        name = signal.Signals(-status).name
        return None, f"killed by {name}" + (", likely for lack of memory" if name == "SIGKILL" else "")
    return None, f"exit status {status}"


@contextmanager
def _terminated_as_exit() -> Iterator[None]:
    """Turn a request to terminate into SystemExit, so that the running job is ended as well."""

    def leave(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
