"""The entry point of the command: it answers Ctrl-C and SIGTERM from the first moment on, while libraries load."""

from __future__ import annotations

import signal
import sys

from efficient_ft.cli.started import first_process


def _leave(number: int, frame: object) -> None:
    word, ended = ("Interrupted", 130) if number == signal.SIGINT else ("Terminated", 143)
    if first_process():
        print(f"{word}. The same command starts again, or continues from the last checkpoint.", file=sys.stderr)
    raise SystemExit(ended)


def main() -> None:
    """Run the command line of this process; see `efficient_ft.cli.main.main`."""
    signal.signal(signal.SIGINT, _leave)
    signal.signal(signal.SIGTERM, _leave)
    from efficient_ft.cli.main import main as run

    signal.signal(signal.SIGINT, signal.default_int_handler)  # KeyboardInterrupt, for what cleans up after itself
    run()
