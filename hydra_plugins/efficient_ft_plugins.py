"""Hydra plugins of this package: the launcher, the sweeper and the search path.

Hydra imports all modules of the namespace ``hydra_plugins``.
"""

from collections.abc import Sequence

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.override_parser.types import Override
from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.plugins.search_path_plugin import SearchPathPlugin
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

from efficient_ft.cli.hydra import plugins


class ProcessLauncher(Launcher):
    """Launcher that runs each job of a sweep in a separate process.

    `efficient_ft.cli.hydra.jobs` is imported only when a sweep starts.
    """

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        from efficient_ft.cli.hydra.jobs import Sweep

        self.sweep = Sweep(hydra_context, config)

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        return self.sweep.launch(job_overrides)


class RowsSweeper(BasicSweeper):
    """Hydra's basic sweeper, extended to run every job for each row of an experiment that defines rows."""

    def split_arguments(  # type: ignore[override]
        self, overrides: list[Override], max_batch_size: int | None
    ) -> list[list[list[str]]]:
        """Return the arguments of every job in batches of at most `max_batch_size`."""
        from efficient_ft.cli.hydra.rows import jobs_of_rows

        assert self.config is not None
        (products,) = BasicSweeper.split_arguments(overrides, None)
        jobs = jobs_of_rows(products, self.config.get("rows"))
        return list(BasicSweeper.split_overrides_to_chunks(jobs, max_batch_size))


class MethodPackages(SearchPathPlugin):
    """Plugin that appends the configuration folders of methods from other packages to Hydra's search path.

    In other Hydra applications, the plugin appends nothing, because `efficient_ft.cli.hydra.plugins.register` is not
    called.
    """

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        for package, folders in plugins.folders().items():
            for folder in folders:
                search_path.append(package, f"file://{folder}")
