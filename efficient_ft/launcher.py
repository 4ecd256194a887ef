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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf

from efficient_ft.config import Config, check, fingerprint
from efficient_ft.errors import UserError

#: Names the file into which a job writes the reason of its failure, for the table of the sweep.
REASON_FILE = "EFFICIENT_FT_REASON_FILE"

#: Exit status of a run that was interrupted, as shells count it.
INTERRUPTED = 130


def register() -> None:
    """Make ``hydra/launcher=processes`` known to Hydra."""
    Plugins.instance().register(ProcessLauncher)
    ConfigStore.instance().store(
        group="hydra/launcher",
        name="processes",
        node={"_target_": f"{ProcessLauncher.__module__}.{ProcessLauncher.__name__}"},
        provider="efficient_ft",
    )


@dataclass(frozen=True)
class Job:
    """One job of a sweep: its arguments, its folder, and what its run must have had for it to be finished."""

    overrides: tuple[str, ...]
    folder: Path
    config: Config

    def results(self) -> dict[str, Any] | None:
        """What a finished run of this very configuration left; None when it is still to be run."""
        return finished(self.folder, self.config)


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
        jobs = [self._job(overrides) for overrides in job_overrides]
        folders = [job.folder for job in jobs]
        for job in jobs:
            if folders.count(job.folder) > 1:
                raise UserError(
                    f"hydra.sweep.dir, hydra.sweep.subdir: {folders.count(job.folder)} jobs would share the folder"
                    f" {job.folder}. Two jobs with the same settings, or a subdir without ${{run_folder:outputs}}?"
                )
        failures: dict[int, str] = {}
        for number, job in enumerate(jobs, start=1):
            title = f"[{number}/{len(jobs)}] {_title(job)}"
            if job.config.resume == "auto" and not job.config.cost_only and job.results() is not None:
                print(f"{title}: finished before, in {job.folder}", flush=True)
                continue
            print(f"{title}: {job.folder}", flush=True)
            reason = _run(self._command(job))
            if reason is not None:
                failures[number] = reason
                print(f"{title}: FAILED: {reason}", file=sys.stderr, flush=True)
        print("\n" + summary(jobs, failures), flush=True)
        if failures:
            raise SystemExit(1)
        return [self._returned(job) for job in jobs]

    def _job(self, overrides: Sequence[str]) -> Job:
        from efficient_ft.commandline import plain

        assert self.context is not None
        assert self.config is not None
        composed = self.context.config_loader.load_sweep_config(self.config, list(overrides))
        folder = Path(composed.hydra.sweep.dir) / composed.hydra.sweep.subdir
        return Job(tuple(overrides), folder, check(plain(composed)))

    def _command(self, job: Job) -> list[str]:
        """The command line that runs `job` alone, in the folder it has in the sweep."""
        assert self.config is not None
        # What only steers the sweep has no meaning in a single run.
        steering = ("hydra.mode", "hydra.sweep", "hydra.launcher", "hydra/launcher", "hydra/sweeper", "hydra.run.dir")
        kept = [o for o in self.config.hydra.overrides.hydra if not o.lstrip("+~").startswith(steering)]
        source = next(s for s in self.config.hydra.runtime.config_sources if s.provider == "main")
        name = self.config.hydra.job.config_name
        flags = ["--config-path", source.path, "--config-name", name]
        extra = [s.path for s in self.config.hydra.runtime.config_sources if s.provider == "command-line"]
        flags += ["--config-dir", extra[0]] if extra else []
        folder = job.folder.as_posix().replace("\\", "\\\\").replace("'", "\\'")
        return [sys.executable, sys.argv[0], *flags, *job.overrides, *kept, f"hydra.run.dir='{folder}'"]

    def _returned(self, job: Job) -> JobReturn:
        """For sweepers that search: the value of a job is its best accuracy."""
        results = job.results() or {}
        best = results.get("accuracy", {}).get("best")
        job_return = JobReturn(overrides=list(job.overrides), cfg=OmegaConf.create(job.config.model_dump(mode="json")))
        job_return.status = JobStatus.COMPLETED
        job_return.return_value = best
        return job_return


# Hydra makes plugins of this namespace only; a registered class needs the name, not a package of that name.
ProcessLauncher.__module__ = "hydra_plugins.efficient_ft"


def summary(jobs: Sequence[Job], failures: dict[int, str]) -> str:
    """One line per job: best accuracy and backward FLOPs per image from its results.json, or why there are none."""
    rows = [("job", "accuracy best", "backward MFLOPs", "folder")]
    for number, job in enumerate(jobs, start=1):
        results = job.results() or {}
        best = results.get("accuracy", {}).get("best")
        flops = results.get("cost", {}).get("executed", {}).get("backward_flops")
        rows.append(
            (
                _title(job),
                "failed" if number in failures else "–" if best is None else f"{100 * best:.2f} %",
                "–" if flops is None or number in failures else f"{flops / 1e6:.1f}",
                str(job.folder),
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    if failures:
        lines += ["", f"{len(failures)} of {len(jobs)} failed; repeating the command runs only what is not finished:"]
        lines += [f"  {_title(jobs[number - 1])}: {reason}" for number, reason in failures.items()]
    return "\n".join(lines)


def _title(job: Job) -> str:
    return " ".join(job.overrides) or "(no arguments)"


def _run(command: Sequence[str]) -> str | None:
    """Run `command` on this terminal; None when it succeeds, else the reason of its failure in one line.

    Raises:
        KeyboardInterrupt: it was interrupted.
    """
    with tempfile.TemporaryDirectory() as folder, _terminated_as_exit():
        file = Path(folder) / "reason"
        # A Ctrl-C reaches the job as well, being in the same group: let it finish writing.
        process = subprocess.Popen(command, env={**os.environ, REASON_FILE: str(file)})
        try:
            status = process.wait()
        except KeyboardInterrupt:
            process.wait()
            raise
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
        if status == INTERRUPTED:
            raise KeyboardInterrupt
        if status == 0:
            return None
        if file.exists():
            return file.read_text(encoding="utf-8").strip()
    if status < 0:
        name = signal.Signals(-status).name
        return f"killed by {name}" + (", likely for lack of memory" if name == "SIGKILL" else "")
    return f"exit status {status}"


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
