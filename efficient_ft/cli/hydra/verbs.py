"""Convert the commands ``train``, ``evaluate`` and ``cost``, which accept settings of a run, to arguments for Hydra."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path

from hydra._internal.utils import get_args_parser

from efficient_ft.cli.terminal import Help, run_folders
from efficient_ft.core.errors import UserError
from efficient_ft.core.text import hydra_quoted

TRAIN, EVALUATE, COST = "train", "evaluate", "cost"
#: Names and help texts of the commands. ``train --help`` prints the help text of the program.
VERBS = {
    TRAIN: "",
    EVALUATE: """\
Evaluate the weights of a run on its validation and test images. The command uses the settings of the run. KEY=VALUE
changes a setting, for example data.root=DIR or trainer.accelerator=cpu.

    efficient-ft evaluate outputs/digits/vit_digits/full/0123abcd
    efficient-ft evaluate -m RUN,RUN data.root=DIR      evaluate several runs
""",
    COST: """\
Count the memory and FLOPs of a training step. The command requires neither data nor weights, and measures no times. It
accepts the settings of a run (see efficient-ft --help). -m sweeps over comma-separated values.

    efficient-ft cost method=lbp_dct model=deit_small
    efficient-ft cost -m method=full,lora,bsr model=deit_small
""",
}
#: Name of the run setting that each command sets.
_SETTINGS = {EVALUATE: "evaluate", COST: "cost_only"}


def as_settings(arguments: Sequence[str]) -> list[str]:
    """Convert the arguments of a command in `VERBS` to arguments for Hydra. Other arguments are returned unchanged.

    ``cost KEY=VALUE`` becomes ``cost_only=true KEY=VALUE``, and ``evaluate RUN`` becomes ``evaluate='RUN'``.
    """
    if not arguments or arguments[0] not in VERBS:
        return list(arguments)
    verb, rest = arguments[0], list(arguments[1:])
    if verb == TRAIN:
        return rest
    parsed, _ = get_args_parser().parse_known_args(rest)
    if parsed.help:
        usage = f"efficient-ft {verb} [-m]{' RUN' * (verb == EVALUATE)} [KEY=VALUE ...]"
        parser = argparse.ArgumentParser(usage=usage, description=VERBS[verb], formatter_class=Help, add_help=False)
        parser.print_help()
        raise SystemExit(0)
    for word in rest:
        if word.lstrip("+~").partition("=")[0] in _SETTINGS.values():
            raise UserError(f"{word}: the command efficient-ft {verb} sets this setting. Remove the argument.")
    if verb == COST:
        return _with_setting(rest, "cost_only=true")
    run = next((word for word in rest if word in parsed.overrides[:1]), None)
    if run is None and not rest:
        print(run_folders(EVALUATE, "RUN [KEY=VALUE ...]"))
        raise SystemExit(0)
    if run is None or (re.match(r"[+~]*[\w.@/]+=", run) and not Path(run).exists()):
        raise UserError("The run folder must come first. Use efficient-ft evaluate RUN KEY=VALUE ...")
    rest.remove(run)
    several = run.split(",") if parsed.multirun and not Path(run).exists() else [run]
    return _with_setting(rest, f"evaluate={','.join(map(hydra_quoted, several))}")


def _with_setting(arguments: list[str], setting: str) -> list[str]:
    """Insert a setting directly before the other settings, because Hydra requires all settings in one place."""
    settings = get_args_parser().parse_known_args(arguments)[0].overrides
    place = arguments.index(settings[0]) if settings else 0
    return [*arguments[:place], setting, *arguments[place:]]
