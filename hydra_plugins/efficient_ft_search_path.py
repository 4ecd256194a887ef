"""Adds the configuration groups of other packages' methods to Hydra's search path."""

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin

from efficient_ft.cli.hydra import plugins


class MethodPackages(SearchPathPlugin):
    """Append the folders that `efficient_ft.cli.hydra.plugins` found; does nothing in other Hydra applications."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        for package, folders in plugins.folders().items():
            for folder in folders:
                search_path.append(package, f"file://{folder}")
