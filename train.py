"""Fine-tune a model: ``python train.py --help``."""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path
from typing import Any

import hydra
from hydra._internal.utils import get_args_parser
from omegaconf import DictConfig, OmegaConf

from efficient_ft.commandline import configurations, plain, register
from efficient_ft.config import Config, build_methods, check
from efficient_ft.errors import UserError
from efficient_ft.launcher import INTERRUPTED, REASON_FILE

# Nothing here may import torch, Lightning or timm before `job`: help and completion answer at once.

CONF = Path(__file__).resolve().parent / "conf"


@hydra.main(version_base="1.3", config_path=str(CONF), config_name="train")
def job(composed: DictConfig) -> float | None:
    """One run in the folder that Hydra made for it; returns the best accuracy, for sweepers that search."""
    from hydra.core.hydra_config import HydraConfig

    config = check(plain(composed))
    try:
        prepare(config)
        from efficient_ft.training.run import run

        results = run(config, Path(HydraConfig.get().runtime.output_dir))
    except UserError as error:
        # Hydra would add a line of its own to an exception.
        fail(str(error))
    return results.get("accuracy", {}).get("best")


def prepare(config: Config) -> None:
    """What has to come before the first tensor, and what can be refused before a folder is made."""
    if config.keep_allocator:
        from efficient_ft.allocator import keep_freed_memory

        keep_freed_memory()
    build_methods(config)


def main() -> None:
    register()
    # Hydra shortens tracebacks, which hides where an error of ours arose.
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")
    try:
        arguments = get_args_parser().parse_args()
        if not (arguments.help or arguments.hydra_help or arguments.shell_completion or arguments.info):
            sys.argv[1:1] = recorded = of_evaluated_run(arguments.overrides)
            check_commandline(arguments, [*recorded, *arguments.overrides])
        job()
    except UserError as error:
        fail(str(error))
    except KeyboardInterrupt:
        fail("Interrupted. The same command continues from the last checkpoint.", INTERRUPTED)
    except Exception as error:
        tell_sweep("".join(traceback.format_exception_only(error)).strip().splitlines()[-1])
        raise


def check_commandline(arguments: Any, overrides: list[str]) -> None:
    """Refuse a mistaken command, or any job of a sweep, before a folder is made or a job is started."""
    sweep = arguments.multirun or "hydra.mode=MULTIRUN" in overrides
    name = arguments.config_name or "train"
    conf = Path(arguments.config_path or CONF)
    configs = configurations(conf, name, overrides, sweep=sweep, search=arguments.config_dir)
    if arguments.cfg:
        return
    for config in configs:
        prepare(config)
    if configs and configs[0].model.name == "vit_digits" and configs[0].data.name != "digits":
        print(
            f"note: model=vit_digits starts from random weights at 32×32; for data={configs[0].data.name} choose a"
            " pretrained model, e.g. model=deit_tiny.",
            file=sys.stderr,
        )


def of_evaluated_run(overrides: list[str]) -> list[str]:
    """With ``evaluate=RUN``: the arguments that RUN was started with; those given now come after them and win."""
    runs = [text.partition("=")[2].strip("'\"") for text in overrides if text.lstrip("+").startswith("evaluate=")]
    if not runs or runs[-1] in ("", "null"):
        return []
    run = Path(runs[-1])
    if not (run / "results.json").is_file():
        what = "no such folder" if not run.is_dir() else "it holds no results.json: no run has finished there"
        raise UserError(f"evaluate={runs[-1]}: {what}. Give the folder that a run named at its end.")
    recorded = run / ".hydra" / "overrides.yaml"
    return list(OmegaConf.load(recorded)) if recorded.is_file() else []  # type: ignore[arg-type]


def fail(text: str, status: int = 2) -> Any:
    """Say why, and only that."""
    print(text, file=sys.stderr)
    tell_sweep(text.splitlines()[0])
    raise SystemExit(status)


def tell_sweep(reason: str) -> None:
    """Hand the reason to the sweep that started this run, if one did."""
    if REASON_FILE in os.environ:
        Path(os.environ[REASON_FILE]).write_text(reason, encoding="utf-8")


if __name__ == "__main__":
    main()
