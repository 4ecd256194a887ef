"""Generate every table, number and figure of the documentation: ``python scripts/docs.py [--check]``

Pages hold what is generated between markers; the text around them is written by hand:

    <!-- generated: NAME ARGUMENT... -->        a block, on lines of its own
    ...
    <!-- end -->

    <!-- = NAME ARGUMENT... -->1.09<!-- / -->   a number within a sentence

Numbers come from benchmarks/*.json, settings from conf/ and the constructors' docstrings, the list of methods from the
cards in docs/methods. ``--check`` changes nothing, prints what is stale and exits with 1. ``--record`` counts what no
benchmark has measured (minutes; the same on every machine).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))


def main() -> int:
    """The exit status: 1 if `--check` finds something stale."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; exit with 1 and a diff if stale")
    parser.add_argument(
        "--record",
        choices=("counts", "adapters", "published", "costs", "lost"),
        help="write benchmarks/*.json of counted numbers, or what studies lost",
    )
    options = parser.parse_args()
    if options.record:
        from docsgen import recording

        print(getattr(recording, f"record_{options.record}")())
        return 0
    from docsgen.pages import stale, write

    if not options.check:
        for file in write():
            print(f"written: {file}")
        return 0
    differences = stale()
    print("\n".join(differences))
    if differences:
        print("The documentation is stale; run: python scripts/docs.py", file=sys.stderr)
    return 1 if differences else 0


if __name__ == "__main__":
    sys.exit(main())
