"""The command ``efficient-ft``, which is equivalent to ``python -m efficient_ft`` and, in a checkout, ``train.py``.

Without a subcommand, ``efficient-ft`` is equivalent to ``efficient-ft train``. The commands ``train``, ``evaluate`` and
``cost`` accept the same settings, which Hydra parses. `efficient_ft.cli.commands` contains the other commands
(``bench``, ``report``, ...).
"""

from __future__ import annotations

import logging
import os
import shutil
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import hydra
import yaml
from hydra._internal.utils import get_args_parser
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from efficient_ft.cli import exits
from efficient_ft.cli.commands import COMMANDS, run_command
from efficient_ft.cli.hydra import jobs, slurm
from efficient_ft.cli.hydra.compose import ComposedJob, check_form, chosen_options, composed_jobs
from efficient_ft.cli.hydra.groups import CONF, help_text, register
from efficient_ft.cli.hydra.output_folder import CommandRecord, leaving_nothing, output_folder_faults
from efficient_ft.cli.hydra.settings import check_flags, hydra_faults
from efficient_ft.cli.hydra.variants import not_as_published, published_recipes
from efficient_ft.cli.hydra.verbs import as_settings
from efficient_ft.cli.started import first_process, started_processes
from efficient_ft.cli.stopping import signals_first, while_loading
from efficient_ft.cli.terminal import fitted_help
from efficient_ft.config import Config, check
from efficient_ft.config.plain import plain
from efficient_ft.core.allocator import restart_with, use_allocator
from efficient_ft.core.errors import UserError, on_command_line, replace_unprintable
from efficient_ft.core.files import refuse_link
from efficient_ft.core.terminal import ConsoleHandler, show, start_console

# Modules that import torch, Lightning or timm are imported inside functions, so that help and completion respond
# immediately.


@hydra.main(version_base="1.3", config_path=str(CONF), config_name="train")
def job(composed: DictConfig) -> float | None:
    """Execute one run in the folder that Hydra created. Return the best accuracy, which sweepers can optimize."""
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode

    try:
        with signals_first(), on_command_line():
            with while_loading():
                config = check(plain(composed))
                start_console(config.verbose, first_process())
                prepare(config)
                from efficient_ft.training.run import run
            hydra_config = HydraConfig.get()
            arguments = list(hydra_config.overrides.task)
            if _trains(config):
                config = config.with_options(chosen_options(hydra_config, arguments))
            recipes = published_recipes(config, hydra_config.runtime.choices.get("recipe", "none"))
            for sentence in [*not_as_published(config), *([] if recipes is None else [recipes])]:
                show(f"note: {sentence}")
            folder = Path(hydra_config.runtime.output_dir)
            record = CommandRecord(folder, hydra_config, composed)
            if config.cost_only and folder != Path.cwd():
                record.write()
            with leaving_nothing(folder):
                results = run(config, folder, arguments, record.write)
    except BrokenPipeError:
        exits.leave_closed_pipe()
    except (UserError, OSError) as error:
        said = exits.of_the_system(error) if isinstance(error, OSError) else error
        if said is None:
            raise
        if HydraConfig.get().mode == RunMode.MULTIRUN:
            # Hydra launchers (submitit, joblib) report the exception of a job, but not its exit.
            raise UserError(str(said)) from None
        # Exit here, because Hydra would print an additional line before the message.
        exits.fail(said)
    except KeyboardInterrupt:
        if HydraConfig.get().mode == RunMode.MULTIRUN:  # For submitted jobs, submitit would print a traceback.
            exits.fail(exits.INTERRUPTED_TEXT, exits.INTERRUPTED)
        raise
    exits.report_outcome(results=results)
    return results.get("accuracy", {}).get("best")


def prepare(config: Config) -> None:
    """Select the memory allocator before the first tensor is created. Raise an error if a method cannot be built."""
    use_allocator(config.allocator)
    from efficient_ft.methods.build import baseline_methods, build_methods

    build_methods(config)
    baseline_methods(config)


def main() -> None:
    """Run the command line of this process. The exit status is 2 after a user mistake, and 1 if a job has failed."""
    if len(sys.argv) > 1 and sys.argv[1] in COMMANDS:
        run_command(sys.argv[1], sys.argv[2:])
        return
    replace_unprintable()
    # Let Hydra raise errors. By default, Hydra prints only some errors with a traceback.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    with exits.clean_exits():
        register()
        sys.argv[1:] = slurm.with_launcher(as_settings(without_repeated(sys.argv[1:])))
        arguments, unknown = get_args_parser().parse_known_args()
        if unknown:
            dashed = next((one for one in unknown if one.startswith("-")), unknown[0])
            if not dashed.startswith("-"):  # argparse requires all settings in one place.
                raise UserError(f"{dashed}: options must precede or follow all settings. See --help.")
            raise UserError(f"{dashed} is not an option. Settings have no dashes (KEY=VALUE). See --help.")
        check_flags(arguments)
        check_form(arguments.overrides)
        with output_folder_faults(arguments.overrides):
            shows = arguments.help or arguments.hydra_help or arguments.info
            # Check settings that these flags use: --info prints the composed configuration, and Hydra configures
            # logging before it prints help.
            if arguments.info or (shows and any(one.lstrip("+~").startswith("hydra") for one in arguments.overrides)):
                check_commandline(arguments)
            if arguments.help or arguments.hydra_help:  # Remove the settings, which help does not need.
                own = [one for one in arguments.overrides if one.startswith("hydra")]
                sys.argv[1:] = [one for one in sys.argv[1:] if one in own or one not in arguments.overrides]
                if sys.argv[1:] == ["--help"]:
                    with fitted_help():
                        print(help_text())
                    raise SystemExit(0)  # Hydra also exits after it prints help.
            elif not (arguments.info or arguments.shell_completion):
                composed = check_commandline(arguments)
                if any(one.config.evaluate is not None for one in composed):
                    evaluate(arguments, composed)
                    return
                sys.argv += without_folder(arguments, composed)
                if slurm.submits(arguments.overrides) and not arguments.cfg:
                    sys.argv[1:] = slurm.submission(sys.argv[1:], [one.config for one in composed])
            fitted = fitted_help() if arguments.help or arguments.hydra_help else nullcontext()
            with hydra_faults(arguments.overrides, job.__name__), fitted:
                job()


def without_repeated(words: list[str]) -> list[str]:
    """Remove settings that Lightning sets again at the end of the command of each process that it starts."""
    added = words[-3:]
    if len(added) < 3 or not added[1].startswith("hydra.job.name=train_ddp_process_"):
        return words
    keys = tuple(f"{word.partition('=')[0]}=" for word in added)
    return [word for word in words[:-3] if not word.startswith(keys)] + added


def check_commandline(arguments: Any) -> list[ComposedJob]:
    """Compose the jobs of a command line, and report mistakes before a folder is created or a job starts."""
    name = arguments.config_name or "train"
    conf = Path(arguments.config_path or CONF)
    composed = composed_jobs(conf, name, arguments.overrides, sweep=_sweeps(arguments), search=arguments.config_dir)
    if arguments.cfg:
        if arguments.cfg == "job" and arguments.package not in (None, "_global_") and composed:
            _require_entry(composed[0].config, arguments.package)
        return composed
    if slurm.LAUNCHER in arguments.overrides and shutil.which("srun") is None:
        asked = "trainer=slurm" if "trainer=slurm" in arguments.overrides else slurm.LAUNCHER
        raise UserError(
            f"{asked} requires Slurm, but srun was not found on this machine. Use hydra/launcher=submitit_local, or"
            " remove the launcher and set jobs=N. For several processes on this machine, use trainer=ddp."
        )
    if _sweeps(arguments) and started_processes() > 1:
        raise UserError("-m starts a process for each job. Use -m without torchrun and srun, or run each job alone.")
    for name in () if _sweeps(arguments) else ("jobs", "job_timeout"):
        if any(text.startswith(f"{name}=") for text in arguments.overrides):
            show(f"note: {name} has no effect on a single run. The setting applies only to sweeps (-m).", sys.stderr)
    # The jobs of a sweep or a submission train in separate processes, which select their own allocators.
    if composed and not _sweeps(arguments) and not slurm.submits(arguments.overrides):
        restart_with(composed[0].config.allocator)
    for one in composed:
        for path in one.written if _trains(one.config) else ():
            refuse_link(path)
        prepare(one.config)
    first = composed[0].config if composed else None
    if first is not None and first.model.name == "vit_digits" and first.data.name != "digits" and _trains(first):
        show(
            f"note: model=vit_digits starts from random weights at 32×32. For data={first.data.name}, use a pretrained"
            " model, e.g. model=deit_tiny.",
            sys.stderr,
        )
    return composed


def _require_entry(config: Config, name: str) -> None:
    shown = config.model_dump(mode="json")
    try:
        found = OmegaConf.select(OmegaConf.create(shown), name)
    except OmegaConfBaseException:  # The syntax of the name is invalid.
        found = None
    if found is None:
        groups = ", ".join(key for key, value in shown.items() if isinstance(value, dict))
        raise UserError(f"--package {name}: the entry does not exist or is null. Choose one of the groups {groups}.")


def without_folder(arguments: Any, composed: Sequence[ComposedJob]) -> list[str]:
    """Return arguments that prevent Hydra from writing files, or an empty list if Hydra should write files.

    Hydra should not write files if the job does not train, or if this process is not the first process of a run.
    """
    if arguments.cfg or _sweeps(arguments) or not composed:
        return []
    if _trains(composed[0].config):
        # Only the first process writes the log and the arguments.
        return [] if first_process() else ["hydra.output_subdir=null", "hydra/job_logging=stdout"]
    if any(text.startswith("hydra.run.dir=") for text in arguments.overrides):
        return []
    return ["hydra.run.dir=.", "hydra.output_subdir=null", "hydra/job_logging=stdout"]


def evaluate(arguments: Any, composed: Sequence[ComposedJob]) -> None:
    """Evaluate one run in this process, or each run of a sweep in a separate process, without Hydra."""
    if any(one.config.evaluate is None for one in composed):
        raise UserError("evaluate must be set for all jobs of a sweep or for none of the jobs.")
    if arguments.cfg:
        for one in composed:
            print(yaml.safe_dump(one.config.model_dump(mode="json"), sort_keys=False), end="")
        return
    if _sweeps(arguments):
        sources = (arguments.config_path, arguments.config_name, arguments.config_dir)
        named = jobs.titles([one.arguments for one in composed])
        todo = [
            jobs.Job(one.arguments, title, Path(str(one.config.evaluate)), one.config)
            for one, title in zip(composed, named, strict=True)
        ]
        parallel = max((one.config.jobs for one in composed), default=1)
        jobs.run_jobs(todo, lambda one: jobs.command(*sources, one.arguments), parallel)
        return
    logging.basicConfig(level=logging.INFO, format="%(message)s", handlers=[ConsoleHandler()])
    start_console(composed[0].config.verbose)
    from efficient_ft.training.run import run

    exits.report_outcome(results=run(composed[0].config, Path()))


def _sweeps(arguments: Any) -> bool:
    return arguments.multirun or "hydra.mode=MULTIRUN" in arguments.overrides


def _trains(config: Config) -> bool:
    return config.evaluate is None and not config.cost_only
