"""The command that runs a training, an evaluation or a sweep: ``efficient-ft --help``, ``python train.py --help``."""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path
from typing import Any, NoReturn

import hydra
from hydra._internal.utils import get_args_parser
from omegaconf import DictConfig, OmegaConf

from efficient_ft.cli import launcher
from efficient_ft.cli.compose import configurations
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
            sys.argv[1:1] = recorded = of_evaluated_run(arguments.overrides)
            sys.argv += check_commandline(arguments, [*recorded, *arguments.overrides])
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


def check_commandline(arguments: Any, overrides: list[str]) -> list[str]:
    """Refuse a mistaken command, or any job of a sweep, before a folder is made or a job is started.

    Returns:
        Arguments to add: what trains nothing needs no folder.
    """
    sweep = arguments.multirun or "hydra.mode=MULTIRUN" in overrides
    name = arguments.config_name or "train"
    conf = Path(arguments.config_path or CONF)
    configs = configurations(conf, name, overrides, sweep=sweep, search=arguments.config_dir)
    if arguments.cfg or not configs:
        return []
    for config in configs:
        prepare(config)
    first = configs[0]
    if first.evaluate is not None or first.cost_only:
        own_folder = any(text.startswith("hydra.run.dir=") for text in overrides)
        return (
            [] if own_folder or sweep else ["hydra.run.dir=.", "hydra.output_subdir=null", "hydra/job_logging=stdout"]
        )
    if first.model.name == "vit_digits" and first.data.name != "digits":
        print(
            f"note: model=vit_digits starts from random weights at 32×32; for data={first.data.name} choose a"
            " pretrained model, e.g. model=deit_tiny.",
            file=sys.stderr,
        )
    return []


def of_evaluated_run(overrides: list[str]) -> list[str]:
    """With ``evaluate=RUN``: the arguments that RUN was started with; those given now come after them and win."""
    runs = [text.partition("=")[2].strip("'\"") for text in overrides if text.lstrip("+").startswith("evaluate=")]
    if not runs or runs[-1] in ("", "null"):
        return []
    run = Path(runs[-1])
    if not (run / "model.safetensors").is_file():
        what = "it holds no model.safetensors: no epoch has been finished there" if run.is_dir() else "no such folder"
        raise UserError(f"evaluate={runs[-1]}: {what}. Give the folder that a run named at its end.")
    recorded = run / ".hydra" / "overrides.yaml"
    return list(OmegaConf.load(recorded)) if recorded.is_file() else []  # type: ignore[arg-type]


def fail(text: str, status: int = 2) -> NoReturn:
    """Say why, and only that."""
    print(text, file=sys.stderr)
    tell_sweep(reason=text.splitlines()[0])
    raise SystemExit(status)
