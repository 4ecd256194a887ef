"""The configuration groups that the command line composes from, and what Hydra must know to compose them."""

from __future__ import annotations

from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from efficient_ft.cli import launcher, plugins, rows
from efficient_ft.config import check, run_folder
from efficient_ft.config.plain import plain


def configuration_groups() -> Path:
    """Return the folder of the configuration groups: inside the installed package, or at the top of a checkout."""
    package = Path(__file__).resolve().parents[1]
    return package / "conf" if (package / "conf").is_dir() else package.parent / "conf"


CONF = configuration_groups()


def register() -> None:
    """Make known to Hydra what conf/train.yaml refers to, and the methods of other packages; call before composing.

    Raises:
        UserError: another package's method cannot be used.
    """
    OmegaConf.register_new_resolver("run_folder", _run_folder, replace=True)
    launcher.register()
    rows.register()
    plugins.register(CONF)


def _run_folder(inside: str = "", *, _root_: DictConfig) -> str:
    """The run folder of the whole configuration, as a path below `inside`."""
    folder = run_folder(check(plain(_root_)))
    return folder.removeprefix(f"{inside}/") if inside else folder
