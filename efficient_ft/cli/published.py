"""``efficient-ft published``: the papers' cost columns next to our count by the same rules."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

DESCRIPTION = """\
Print the cost columns of Back Razor (Tables 1 to 3) and BSR (Tables 2 to 8) next to our count by the papers' own
rules. Nothing is trained or run; it takes about a minute and needs neither data nor weights.
"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse `arguments` (default: the command line's) and print the tables."""
    parser = argparse.ArgumentParser(
        prog="efficient-ft published", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.parse_args(arguments)

    from efficient_ft.papers import TABLES, bsr, comparison

    for table in TABLES:
        print(comparison(table), flush=True)
        print()
    print(bsr.moe_comparison())
