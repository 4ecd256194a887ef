"""Register resolvers, plugins and the methods of other packages with Hydra."""

from __future__ import annotations

from string import Template

from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf

from efficient_ft.cli.hydra import plugins, sources
from efficient_ft.cli.hydra.conf import CONF
from efficient_ft.cli.hydra.variants import folder_of
from efficient_ft.config import check
from efficient_ft.config.plain import plain
from efficient_ft.core.parsing import parse_yaml

__all__ = ["CONF", "help_text", "register"]

_SWEEPER = {"_target_": "hydra_plugins.efficient_ft_plugins.RowsSweeper", "max_batch_size": None, "params": None}
#: Names and configurations of the launcher and the sweeper of this package, keyed by Hydra group.
_PLUGINS = {
    "hydra/launcher": ("processes", {"_target_": "hydra_plugins.efficient_ft_plugins.ProcessLauncher"}),
    "hydra/sweeper": ("rows", _SWEEPER),
}


def register() -> None:
    """Register resolvers, plugins and the methods of other packages with Hydra.

    Call this function before a configuration is composed.
    """
    OmegaConf.register_new_resolver("run_folder", _run_folder, replace=True)
    for group, (name, node) in _PLUGINS.items():
        ConfigStore.instance().store(group=group, name=name, node=node, provider="efficient_ft")
    sources.register()
    plugins.register(CONF)


def help_text() -> str:
    """Return the text of ``--help``, which lists all groups and options.

    This function is used because Hydra takes three times as long to generate the same text.
    """
    options: dict[str, set[str]] = {}
    for folder in (CONF, *(one for found in plugins.folders().values() for one in found)):
        for file in folder.rglob("*.yaml"):
            group = file.parent.relative_to(folder).as_posix()
            if group != "." and group.partition("/")[0] != "hydra":
                options.setdefault(group, set()).add(file.stem)
    groups = "\n".join(f"{group}: {', '.join(sorted(names))}" for group, names in sorted(options.items()))
    template = parse_yaml((CONF / "train.yaml").read_text(encoding="utf-8"))["hydra"]["help"]["template"]
    return Template(template).substitute(APP_CONFIG_GROUPS=f"{groups}\n")


def _run_folder(inside: str = "", *, _root_: DictConfig) -> str:
    folder = folder_of(check(plain(_root_))).as_posix()
    return folder.removeprefix(f"{inside}/") if inside else folder
