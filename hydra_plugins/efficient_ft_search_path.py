"""Adds the configuration groups of other packages' methods to Hydra's search path."""

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin

from efficient_ft.cli import plugins


class MethodPackages(SearchPathPlugin):
    """Search the folders that `efficient_ft.cli.plugins` found, after our own; none in other Hydra applications."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        for package, folders in plugins.folders().items():
            for folder in folders:
                search_path.append(package, f"file://{folder}")
