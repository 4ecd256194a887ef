"""The configuration groups that the command line composes from, and what Hydra must know to compose them."""

from __future__ import annotations

from omegaconf import DictConfig, OmegaConf

from efficient_ft.cli.hydra import launcher, plugins, rows, sources
from efficient_ft.cli.hydra.conf import CONF
from efficient_ft.cli.hydra.variants import folder_of
from efficient_ft.config import check
from efficient_ft.config.plain import plain

__all__ = ["CONF", "register"]


def register() -> None:
    """Register resolvers, plugins and the methods of other packages with Hydra; call this before composing."""
    OmegaConf.register_new_resolver("run_folder", _run_folder, replace=True)
    launcher.register()
    sources.register()
    rows.register()
    plugins.register(CONF)


def _run_folder(inside: str = "", *, _root_: DictConfig) -> str:
    """Return the run folder of the whole configuration, as a path relative to `inside`."""
    folder = folder_of(check(plain(_root_))).as_posix()
    return folder.removeprefix(f"{inside}/") if inside else folder
