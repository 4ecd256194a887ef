"""Generate every table, number and figure of the documentation: ``python scripts/docs.py [--check]``

Generated text is between markers. The text around them is written by hand:

    <!-- generated: NAME ARGUMENT... -->        a block, on separate lines
    ...
    <!-- end -->

    <!-- = NAME ARGUMENT... -->1.09<!-- / -->   a number within a sentence, at most two in a paragraph

Numbers come from benchmarks/ and results/, settings from conf/ and docstrings, and docs/index.md from README.md.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


def main() -> int:
    """Return the exit status: 1 if `--check` finds a stale file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; print a diff and exit with 1 if stale")
    records = ("counts", "adapters", "published", "costs", "prior")
    parser.add_argument("--record", choices=records, help="count what no benchmark measures (minutes), and write it")
    options = parser.parse_args()
    if options.record:
        import recording

        print(getattr(recording, f"record_{options.record}")())
        return 0
    from docsgen.pages import stale, write

    if not options.check:
        print("\n".join(f"written: {file}" for file in write()))
        return 0
    differences = stale()
    print("\n".join(differences))
    if differences:
        print("The documentation is stale; run: python scripts/docs.py", file=sys.stderr)
    return bool(differences)


if __name__ == "__main__":
    sys.exit(main())
