"""The name under which Hydra finds our launcher: it makes plugins of this namespace only, found by itself."""

from efficient_ft.cli import launcher


class ProcessLauncher(launcher.ProcessLauncher):
    """See `efficient_ft.cli.launcher`."""
