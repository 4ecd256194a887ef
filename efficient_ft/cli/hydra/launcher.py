"""A Hydra launcher that runs each job of a sweep in a separate process.

Hydra's own launcher runs all jobs in one process. There, a process killed for lack of memory ends the sweep, jobs share
memory and threads, and a repeated sweep starts from the beginning. This launcher runs each job with the command, and in
the folder, of a single run. Other launchers, such as submitit, can be selected with ``hydra/launcher=...``.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.core.utils import JobReturn, JobStatus
from hydra.types import HydraContext
from omegaconf import DictConfig, OmegaConf, open_dict

from efficient_ft.cli.hydra.jobs import Job, command, run_jobs, titles, write_sweep_table
from efficient_ft.config import check
from efficient_ft.config.plain import plain
from efficient_ft.core.errors import UserError

#: Settings that control a sweep and do not apply to a single run.
_STEERING = ("hydra.mode", "hydra.sweep", "hydra.launcher", "hydra/launcher", "hydra/sweeper", "hydra.run.dir")


class Sweep:
    """The jobs of a sweep. Each job is started with the command of a single run."""

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
                    f"{folders.count(folder)} jobs of this sweep would share the folder {folder}. They have the same"
                    " settings, or hydra.sweep.subdir does not depend on the job."
                )
        try:
            run_jobs(jobs, self._command, max((job.config.jobs for job in jobs), default=1))
        finally:
            write_sweep_table(Path(self.config.hydra.sweep.dir), folders)
        return [_returned(job) for job in jobs]

    def _job(self, number: int, overrides: Sequence[str], title: str) -> Job:
        composed = self.context.config_loader.load_sweep_config(self.config, list(overrides))
        with open_dict(composed):  # folder names may refer to the number
            composed.hydra.job.num, composed.hydra.job.id = number, str(number)
        folder = Path(composed.hydra.sweep.dir) / composed.hydra.sweep.subdir
        return Job(tuple(overrides), title, folder, check(plain(composed)))

    def _command(self, job: Job) -> list[str]:
        given: Any = OmegaConf.to_container(self.config.hydra.overrides.hydra)  # as typed, with references
        kept = [o for o in given if not o.lstrip("+~").startswith(_STEERING)]
        if job.trains:
            folder = job.folder.as_posix().replace("\\", "\\\\").replace("'", "\\'")
            kept.append(f"hydra.run.dir='{folder}'")
        source = {s.provider: s.path for s in self.config.hydra.runtime.config_sources}
        name = self.config.hydra.job.config_name
        return command(source["main"], name, source.get("command-line"), [*job.arguments, *kept])


def _returned(job: Job) -> JobReturn:
    value = JobReturn(overrides=list(job.arguments), cfg=OmegaConf.create(job.config.model_dump(mode="json")))
    value.status = JobStatus.COMPLETED
    value.return_value = (job.results or {}).get("accuracy", {}).get("best")
    return value
