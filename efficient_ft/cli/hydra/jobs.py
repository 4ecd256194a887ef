"""Run several jobs in separate processes and print one table.

Finished jobs are skipped, and failures do not stop other jobs.
"""

from __future__ import annotations

import hashlib
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.utils import JobReturn, JobStatus
from hydra.types import HydraContext
from omegaconf import DictConfig, OmegaConf, open_dict

from efficient_ft.cli.hydra import processes
from efficient_ft.config import Config, check, fingerprint, image_folders
from efficient_ft.config.plain import plain
from efficient_ft.core import text
from efficient_ft.core.errors import UserError
from efficient_ft.core.format import format_metric, format_number
from efficient_ft.core.terminal import show, shown_path, wrapped
from efficient_ft.core.units import parse_seconds
from efficient_ft.record.collection import collect_runs, write_tables
from efficient_ft.record.formats import USE_ITS_VERSION
from efficient_ft.record.results import NAME, read_results

#: Settings that control a sweep and do not apply to single runs.
_STEERING = ("hydra.mode", "hydra.sweep", "hydra.launcher", "hydra/launcher", "hydra/sweeper", "hydra.run.dir")


@dataclass
class Job:
    """One job of a sweep.

    `title` contains the arguments that differ between the jobs. `results` is None until the job has finished
    successfully. If the job fails, `failure` is the reason in one line. `diverged` is True if the loss was not finite.
    """

    arguments: tuple[str, ...]
    title: str
    folder: Path
    config: Config
    results: dict[str, Any] | None = None
    failure: str | None = None
    diverged: bool = False

    @property
    def trains(self) -> bool:
        """Return True if the job trains. Evaluations and cost reports do not train and have no run folder."""
        return not self.config.cost_only and self.config.evaluate is None


def titles(jobs: Sequence[Sequence[str]]) -> list[str]:
    """For each command line in `jobs`, return the arguments that are not shared by all command lines."""
    shared = set.intersection(*map(set, jobs)) if len(jobs) > 1 else set()
    return [" ".join(argument for argument in arguments if argument not in shared) for arguments in jobs]


def finished(folder: Path, config: Config) -> dict[str, Any] | None:
    """Return the results in `folder` if a run with the settings of `config` has finished there, or None otherwise."""
    try:
        results = read_results(folder)
        same = fingerprint(check(results["config"])) == fingerprint(config)
    except UserError:  # The job itself reports a missing, damaged or incompatible file.
        return None
    return dict(results) if same else None


def not_read(folder: Path) -> str | None:
    """Return the reason why results.json in `folder` cannot be read, or None if the file can be read or is missing."""
    try:
        if (folder / NAME).is_file():
            read_results(folder, USE_ITS_VERSION)
    except UserError as error:
        return str(error)
    return None


def this_program() -> list[str]:
    """Return the command that restarts this program: a script, ``python -m efficient_ft``, or ``efficient-ft``."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if spec is not None and spec.name == "efficient_ft.__main__":
        return [sys.executable, "-m", "efficient_ft"]
    # On Windows, the installed command is an .exe file, which Python cannot run.
    return [sys.executable, sys.argv[0]] if Path(sys.argv[0]).is_file() else [sys.executable, "-m", "efficient_ft"]


def command(
    config_path: str | None, config_name: str | None, config_dir: str | None, arguments: Sequence[str]
) -> list[str]:
    """Return the command line that runs one job alone, without settings that apply only to sweeps."""
    flags = {"--config-path": config_path, "--config-name": config_name, "--config-dir": config_dir}
    given = [part for flag, value in flags.items() if value is not None for part in (flag, value)]
    return [*this_program(), *given, *(one for one in arguments if not one.startswith(("jobs=", "job_timeout=")))]


def run_jobs(
    jobs: Sequence[Job],
    command: Callable[[Job], Sequence[str]],
    parallel: int = 1,
    ended: Callable[[Job], None] = lambda job: None,
) -> None:
    """Run the `command` of each job, store the outcome in the `Job` object, and print a table at the end.

    Finished jobs are skipped. After a failure or a ``job_timeout``, the next job starts. If a job has failed, the
    function raises SystemExit with status 1 at the end. If `parallel` is greater than 1, the threads and GPUs are
    divided between the jobs, and each job writes its output to a file next to its run folder. `ended` is called with
    each job as soon as the outcome of the job is known.
    """
    todo: list[tuple[str, Job]] = []
    for number, job in enumerate(jobs, start=1):
        title = f"[{number}/{len(jobs)}] {job.title}"
        if job.trains and job.config.resume == "auto":
            job.results = finished(job.folder, job.config)
            if job.results and image_folders(check(job.results["config"])) != image_folders(job.config):
                job.results = None  # The job itself checks whether the images are the same.
        if job.results is not None:
            show(f"{title}: already finished; the results are in {shown_path(job.folder)}")
            ended(job)
        else:
            todo.append((title, job))
    if parallel == 1:
        for title, job in todo:
            show(title)
            _fill_in(title, job, processes.run(command(job), timeout=_timeout(job)))
            ended(job)
    else:
        _run_in_parallel(todo, command, parallel, ended)
    print(f"\n{summary(jobs)}", flush=True)
    if any(job.failure is not None for job in jobs):
        raise SystemExit(1)


def _run_in_parallel(
    todo: Sequence[tuple[str, Job]],
    command: Callable[[Job], Sequence[str]],
    parallel: int,
    ended: Callable[[Job], None],
) -> None:
    slots = processes.Slots(parallel)
    printing = threading.Lock()  # `print` writes the text and the line break separately.

    def start(title: str, job: Job) -> processes.Ended:
        with slots.taken() as environment:
            output = job.folder.with_name(f"{job.folder.name}.log") if job.trains else None
            with printing:
                show(f"{title}: started" + (f"; the output is in {shown_path(output)}" if output else ""))
            process = processes.run(command(job), environment, output, _timeout(job))
            if output is None:
                with printing:
                    print(process.printed, flush=True)
            return process

    with ThreadPoolExecutor(parallel) as pool:
        try:
            waiting = {pool.submit(start, title, job): (title, job) for title, job in todo}
            for done in as_completed(waiting):
                title, job = waiting[done]
                with printing:
                    _fill_in(title, job, done.result())
                    ended(job)
                    if job.failure is None:
                        show(f"{title}: finished" + (f", in {shown_path(job.folder)}" if job.trains else ""))
        except BaseException as error:
            pool.shutdown(wait=False, cancel_futures=True)
            slots.stop(processes.ASKED if isinstance(error, KeyboardInterrupt) else 0.0)
            raise


def _timeout(job: Job) -> float | None:
    value = job.config.job_timeout
    return None if value is None else parse_seconds("job_timeout", value, plain=True)


def _fill_in(title: str, job: Job, process: processes.Ended) -> None:
    job.results, job.failure, job.diverged = process.results, process.failure, process.diverged
    if job.failure is not None:
        show(f"{title}: FAILED: {job.failure}", sys.stderr)


def write_sweep_table(outputs: Path, folders: Sequence[Path]) -> None:
    """Write a table of the finished runs in `folders` to the folder ``sweeps`` in `outputs`.

    The file name is a hash of the folder names. Folders outside of `outputs` are ignored. If there are fewer than two
    runs, no table is written.
    """
    inside = sorted(folder for folder in folders if folder.is_relative_to(outputs))
    found = collect_runs(outputs, inside)
    if len(found.runs) < 2:
        return
    name = hashlib.sha256("\n".join(map(str, inside)).encode()).hexdigest()[:8]
    files = write_tables(found, outputs / "sweeps" / name)
    show(f"\nTable of the sweep: {', '.join(map(shown_path, files))}")


def summary(jobs: Sequence[Job]) -> str:
    """Return a table with the best metric and the executed backward FLOPs of each job, followed by the failures."""
    # The results of a paused run contain only the last evaluation, and those of a cost report only the cost.
    found = [(job.results or {}).get("accuracy", (job.results or {}).get("paused", {})) for job in jobs]
    metrics = dict.fromkeys(one.get("metric", "accuracy") for one in found if one)
    best_of = "best " + (" or ".join(map(text.spelled, metrics)) or "accuracy")
    rows = [("job", best_of, "backward FLOPs", "folder")]
    for job, one in zip(jobs, found, strict=True):
        results, best = job.results or {}, one.get("best", one.get("value"))
        flops = results.get("cost", results).get("executed", {}).get("backward_flops")
        accuracy = "–" if best is None else format_metric(best, one.get("metric", "accuracy"))
        accuracy = "failed" if job.failure is not None else accuracy
        counted = "–" if flops is None else format_number(flops)
        rows.append((job.title, accuracy, counted, str(job.folder) if job.trains else "–"))
    lines = [text.table(rows, left=(0, 3), whole=(3,), rule="")]
    failures = [f"  {job.title}: {job.failure}" for job in jobs if job.failure is not None]
    if failures:
        again = "repeat the command to run the unfinished jobs"
        lines += ["", f"{len(failures)} of {len(jobs)} jobs failed ({again}):", *failures]
        lines[1:] = [wrapped(line, text.terminal_width()) for line in lines[1:]]
    return "\n".join(lines)


class Sweep:
    """A sweep that runs each job in a separate process. A job uses the same command and folder as a single run.

    Hydra's basic launcher runs all jobs in one process. As a result, all jobs share memory and threads. The sweep ends
    if this process is killed for lack of memory, and a repeated sweep starts from the beginning. Other launchers, such
    as submitit, can be selected with ``hydra/launcher=...``.
    """

    def __init__(self, context: HydraContext, config: DictConfig) -> None:
        self.context, self.config = context, config

    def launch(self, job_overrides: Sequence[Sequence[str]]) -> Sequence[JobReturn]:
        """Run all jobs, even after a failure. Exit with status 1 if a job has failed."""
        named = zip(job_overrides, titles(job_overrides), strict=True)
        jobs = [self._job(number, *one) for number, one in enumerate(named)]
        folders = [job.folder for job in jobs if job.trains]
        for folder in folders:
            if folders.count(folder) > 1:
                raise UserError(
                    f"{folders.count(folder)} jobs of this sweep would share the folder {folder}. The jobs have the"
                    " same settings, or hydra.sweep.subdir does not depend on the job."
                )
        try:
            run_jobs(jobs, self._command, max((job.config.jobs for job in jobs), default=1))
        finally:
            write_sweep_table(Path(self.config.hydra.sweep.dir), folders)
        return [_returned(job) for job in jobs]

    def _job(self, number: int, overrides: Sequence[str], title: str) -> Job:
        composed = self.context.config_loader.load_sweep_config(self.config, list(overrides))
        with open_dict(composed):  # The folder name may contain the number of the job.
            composed.hydra.job.num, composed.hydra.job.id = number, str(number)
        folder = Path(composed.hydra.sweep.dir) / composed.hydra.sweep.subdir
        return Job(tuple(overrides), title, folder, check(plain(composed)))

    def _command(self, job: Job) -> list[str]:
        given: Any = OmegaConf.to_container(self.config.hydra.overrides.hydra)  # References are not resolved.
        kept = [o for o in given if not o.lstrip("+~").startswith(_STEERING)]
        if job.trains:
            kept.append(f"hydra.run.dir={text.hydra_quoted(job.folder.as_posix())}")
        source = {s.provider: s.path for s in self.config.hydra.runtime.config_sources}
        name = self.config.hydra.job.config_name
        return command(source["main"], name, source.get("command-line"), [*job.arguments, *kept])


def _returned(job: Job) -> JobReturn:
    value = JobReturn(overrides=list(job.arguments), cfg=OmegaConf.create(job.config.model_dump(mode="json")))
    value.status = JobStatus.COMPLETED
    value.return_value = (job.results or {}).get("accuracy", {}).get("best")
    return value
