"""The launcher of sweeps, where Hydra finds it: it makes plugins of this namespace only, and imports all of them."""

from collections.abc import Sequence

from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig


class ProcessLauncher(Launcher):
    """See `efficient_ft.cli.hydra.jobs`, which is imported only when a sweep starts."""

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        from efficient_ft.cli.hydra.jobs import Sweep

        self.sweep = Sweep(hydra_context, config)

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        return self.sweep.launch(job_overrides)
