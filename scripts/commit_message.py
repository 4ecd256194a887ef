"""Check the subject of a commit message: ``commit_message.py FILE``, called by the commit-msg hook."""

from __future__ import annotations

import re
import sys
from pathlib import Path

#: Endings of words that are not imperatives: "Added", "Fixes", "Adding". Exceptions follow.
_NOT_IMPERATIVE = re.compile(
    r"(?i)^(?!(?:address|pass|process|embed|need|feed|speed|seed|bring|string|discuss|access)\b)\w+(?:ed|ing|[^s]s)$"
)


def mistakes(message: str) -> list[str]:
    """Return the mistakes in the subject of a commit message."""
    subject = next((line for line in message.splitlines() if line.strip() and not line.startswith("#")), "")
    if subject.startswith(("Merge ", "Revert ", "fixup! ", "squash! ")):
        return []
    found = []
    if len(subject) > 72:
        found.append(f"The subject must have at most 72 characters, got {len(subject)}.")
    first = subject.partition(" ")[0]
    if _NOT_IMPERATIVE.match(first):
        found.append(f"The subject must begin with an imperative (Add, Fix, Remove), got {first!r}.")
    return found


def main() -> int:
    """Return the exit status: 1 if there are mistakes."""
    found = mistakes(Path(sys.argv[1]).read_text(encoding="utf-8"))
    print("\n".join(found), file=sys.stderr)
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
