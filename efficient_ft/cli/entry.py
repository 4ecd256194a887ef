"""The entry point of the command: it answers Ctrl-C and SIGTERM from the first moment on, while libraries load."""

from __future__ import annotations

from efficient_ft.cli.stopping import answer_signals, while_loading


def main() -> None:
    """Run the command line of this process; see `efficient_ft.cli.main.main`."""
    answer_signals()
    with while_loading():
        from efficient_ft.cli.main import main as run
    run()
