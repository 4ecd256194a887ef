"""``trainer=slurm``: submit a run, or the runs of a sweep, to Slurm. Within a Slurm job, the same command trains."""

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
    """Return the command line of a submission with its launcher, so that settings of ``hydra.launcher`` are known."""
    if not submits(arguments):
        return list(arguments)
    if find_spec("hydra_plugins.hydra_submitit_launcher") is None:
        raise UserError('trainer=slurm needs a package that is not installed: pip install "efficient-ft[slurm]"')
    if LAUNCHER in arguments:
        return list(arguments)
    place = list(arguments).index("trainer=slurm") + 1
    return [*arguments[:place], LAUNCHER, *arguments[place:]]


def submission(arguments: Sequence[str], configs: Sequence[Config]) -> list[str]:
    """Return the command line that submits the runs `configs`; settings of ``hydra.launcher`` in `arguments` win."""
    shapes = {(c.trainer.num_nodes, c.trainer.devices, c.trainer.accelerator) for c in configs}
    if len(shapes) > 1:
        raise SettingError(
            "trainer.num_nodes, trainer.devices and trainer.accelerator",
            " and ".join(" ".join(map(str, shape)) for shape in sorted(shapes, key=str)),
            "the same in all jobs of a sweep with trainer=slurm",
        )
    ((nodes, devices, accelerator),) = shapes
    if devices == "auto":
        raise SettingError("trainer.devices", "auto", "an integer >= 1 with trainer=slurm", "Slurm reserves as many.")
    asked = [f"hydra.launcher.nodes={nodes}", f"hydra.launcher.tasks_per_node={devices}"]
    if accelerator != "cpu":
        asked.append(f"hydra.launcher.gpus_per_node={devices}")
    # A cluster may have it off; without requeueing a job that is preempted is lost.
    asked.append("+hydra.launcher.additional_parameters={requeue:true}")
    # A task that fails ends the others, which would wait for it.
    os.environ.setdefault("SLURM_KILL_BAD_EXIT", "1")
    show("Submitting to Slurm. The jobs print into outputs/.submitit. They continue if this command is stopped.")
    flags = [] if {"-m", "--multirun"} & set(arguments) else ["--multirun"]
    # All settings must be given together, between flags; those of the user come after these.
    first = next(i for i, one in enumerate(arguments) if "=" in one and not one.startswith("-"))
    return [*flags, *arguments[:first], *asked, *arguments[first:]]
