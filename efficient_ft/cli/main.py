"""The command that runs a training, an evaluation or a sweep: ``efficient-ft --help``, ``python train.py --help``."""

from __future__ import annotations

import logging
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import hydra
import yaml
from hydra._internal.utils import get_args_parser
from omegaconf import DictConfig, OmegaConf

from efficient_ft.cli import launcher
from efficient_ft.cli.compose import ComposedJob, composed_jobs
from efficient_ft.cli.launcher import INTERRUPTED, tell_sweep
from efficient_ft.config import Config, check, run_folder
from efficient_ft.config.plain import plain
from efficient_ft.core.errors import UserError, replace_unprintable

# Nothing here may import torch, Lightning or timm before `job`: help and completion answer at once.

INTERRUPTED_TEXT = "Interrupted. The same command continues from the last checkpoint."


def configuration_groups() -> Path:
    """The folder of the configuration groups: within the installed package, or at the top of a checkout."""
    package = Path(__file__).resolve().parents[1]
    return package / "conf" if (package / "conf").is_dir() else package.parent / "conf"


CONF = configuration_groups()


def register() -> None:
    """Make known to Hydra what conf/train.yaml refers to; to be called before anything is composed."""
    OmegaConf.register_new_resolver("run_folder", _run_folder, replace=True)
    launcher.register()


def _run_folder(inside: str = "", *, _root_: DictConfig) -> str:
    """The run folder of the whole configuration, as a path below `inside`."""
    folder = run_folder(check(plain(_root_)))
    return folder.removeprefix(f"{inside}/") if inside else folder


@hydra.main(version_base="1.3", config_path=str(CONF), config_name="train")
def job(composed: DictConfig) -> float | None:
    """One run in the folder that Hydra made for it; returns the best accuracy, for sweepers that search."""
    from hydra.core.hydra_config import HydraConfig

    try:
        config = check(plain(composed))
        prepare(config)
        from efficient_ft.training.run import run

        results = run(config, Path(HydraConfig.get().runtime.output_dir))
    except UserError as error:
        # Left to Hydra, the message would get a line of Hydra's before it.
        fail(str(error))
    tell_sweep(results=results)
    return results.get("accuracy", {}).get("best")


def prepare(config: Config) -> None:
    """What has to come before the first tensor, and what can be refused before a folder is made."""
    if config.keep_freed_memory:
        from efficient_ft.core.allocator import keep_freed_memory

        keep_freed_memory()
    from efficient_ft.methods.build import build_methods

    build_methods(config)


def main() -> None:
    replace_unprintable()
    register()
    # Hydra shortens tracebacks, which hides where an error of ours arose.
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")
    try:
        arguments = get_args_parser().parse_args()
        if not (arguments.help or arguments.hydra_help or arguments.shell_completion or arguments.info):
            jobs = check_commandline(arguments)
            if any(one.config.evaluate is not None for one in jobs):
                return evaluate(arguments, jobs)
            sys.argv += without_folder(arguments, jobs)
        job()
    except UserError as error:
        fail(str(error))
    except KeyboardInterrupt:
        fail(INTERRUPTED_TEXT, INTERRUPTED)
    except SystemExit as leaving:
        # Lightning ends an interrupted fit in its own way.
        if isinstance(leaving.__context__, KeyboardInterrupt):
            fail(INTERRUPTED_TEXT, INTERRUPTED)
        raise
    except BrokenPipeError:  # e.g. `--help | head`: the reader has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(141) from None
    except Exception as error:
        tell_sweep(reason="".join(traceback.format_exception_only(error)).strip().splitlines()[-1])
        raise


def check_commandline(arguments: Any) -> list[ComposedJob]:
    """Refuse a mistaken command, or any job of a sweep, before a folder is made or a job is started."""
    name = arguments.config_name or "train"
    conf = Path(arguments.config_path or CONF)
    jobs = composed_jobs(conf, name, arguments.overrides, sweep=_sweeps(arguments), search=arguments.config_dir)
    if arguments.cfg:
        return jobs
    for one in jobs:
        prepare(one.config)
    first = jobs[0].config if jobs else None
    if first is not None and first.model.name == "vit_digits" and first.data.name != "digits" and _trains(first):
        print(
            f"note: model=vit_digits starts from random weights at 32×32; for data={first.data.name} choose a"
            " pretrained model, e.g. model=deit_tiny.",
            file=sys.stderr,
        )
    return jobs


def _sweeps(arguments: Any) -> bool:
    return arguments.multirun or "hydra.mode=MULTIRUN" in arguments.overrides


def _trains(config: Config) -> bool:
    return config.evaluate is None and not config.cost_only


def without_folder(arguments: Any, jobs: Sequence[ComposedJob]) -> list[str]:
    """Arguments that keep Hydra from making a folder for a job that trains nothing."""
    if arguments.cfg or _sweeps(arguments) or not jobs or _trains(jobs[0].config):
        return []
    if any(text.startswith("hydra.run.dir=") for text in arguments.overrides):
        return []
    return ["hydra.run.dir=.", "hydra.output_subdir=null", "hydra/job_logging=stdout"]


def evaluate(arguments: Any, jobs: Sequence[ComposedJob]) -> None:
    """Evaluate one run, or each of a sweep in a process of its own, without Hydra: what a run folder holds is data."""
    if any(one.config.evaluate is None for one in jobs):
        raise UserError("evaluate: the jobs of one sweep must all evaluate a run, or none of them.")
    if arguments.cfg:
        for one in jobs:
            print(yaml.safe_dump(one.config.model_dump(mode="json"), sort_keys=False), end="")
        return
    if _sweeps(arguments):
        named = launcher.titles([one.arguments for one in jobs])
        launcher.run_jobs(
            [
                launcher.Job(one.arguments, title, Path(str(one.config.evaluate)), one.config)
                for one, title in zip(jobs, named, strict=True)
            ],
            lambda one: launcher.command(
                arguments.config_path, arguments.config_name, arguments.config_dir, one.overrides
            ),
        )
        return
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    from efficient_ft.training.run import run

    tell_sweep(results=run(jobs[0].config, Path()))


def fail(text: str, status: int = 2) -> NoReturn:
    """Say why, and only that."""
    print(text, file=sys.stderr)
    tell_sweep(reason=text.splitlines()[0])
    raise SystemExit(status)
