"""Submit a run or a sweep to Slurm (``trainer=slurm``). Inside a Slurm job, the same command starts training."""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib.util import find_spec

from efficient_ft.config import Config
from efficient_ft.core.errors import SettingError, UserError
from efficient_ft.core.terminal import show

LAUNCHER = "hydra/launcher=submitit_slurm"


def submits(overrides: Sequence[str]) -> bool:
    """Return True if a command with these arguments submits jobs."""
    return "trainer=slurm" in overrides and "SLURM_JOB_ID" not in os.environ


def with_launcher(arguments: Sequence[str]) -> list[str]:
    """Return `arguments`, and add the Slurm launcher if the command submits jobs.

    The launcher defines the settings of ``hydra.launcher``.
    """
    if not submits(arguments):
        return list(arguments)
    if find_spec("hydra_plugins.hydra_submitit_launcher") is None:
        raise UserError('trainer=slurm requires the extra "slurm". Run pip install "efficient-ft[slurm]".')
    if LAUNCHER in arguments:
        return list(arguments)
    place = list(arguments).index("trainer=slurm") + 1
    return [*arguments[:place], LAUNCHER, *arguments[place:]]


def submission(arguments: Sequence[str], configs: Sequence[Config]) -> list[str]:
    """Return the command line that submits runs with the given configurations.

    Launcher settings of the user take precedence.
    """
    shapes = {(c.trainer.num_nodes, c.trainer.devices, c.trainer.accelerator) for c in configs}
    if len(shapes) > 1:
        raise SettingError(
            "trainer.num_nodes, trainer.devices and trainer.accelerator",
            " and ".join(" ".join(map(str, shape)) for shape in sorted(shapes, key=str)),
            "equal in all jobs of a sweep with trainer=slurm",
            "Start a separate sweep for each combination.",
        )
    ((nodes, devices, accelerator),) = shapes
    if devices == "auto":
        raise SettingError(
            "trainer.devices",
            "auto",
            "an integer >= 1 with trainer=slurm",
            "Slurm requires the number of processes per node.",
        )
    asked = [f"hydra.launcher.nodes={nodes}", f"hydra.launcher.tasks_per_node={devices}"]
    if accelerator != "cpu":
        asked.append(f"hydra.launcher.gpus_per_node={devices}")
    # Enable requeueing, which clusters may disable by default. Without requeueing, a preempted job is lost.
    asked.append("+hydra.launcher.additional_parameters={requeue:true}")
    # If a task fails, end the other tasks, which would otherwise wait for the failed task.
    os.environ.setdefault("SLURM_KILL_BAD_EXIT", "1")
    show("The jobs are submitted to Slurm, write to outputs/.submitit, and continue if you stop this command.")
    flags = [] if {"-m", "--multirun"} & set(arguments) else ["--multirun"]
    # argparse requires all settings in one place. The user's settings come last, so that they take precedence.
    first = next(i for i, one in enumerate(arguments) if "=" in one and not one.startswith("-"))
    return [*flags, *arguments[:first], *asked, *arguments[first:]]
