"""Tables of the claims of the papers, from ``claims.yaml``."""

from __future__ import annotations

import re
import shlex
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from docsgen import values
from docsgen.markdown import block, table
from efficient_ft.papers.published import PAPERS

#: Verdicts that a claim can have.
VERDICTS = ("holds", "holds in part", "does not hold here", "not tested")

#: Reference to a value of a record: ``{NAME ARGUMENT...}``.
_REFERENCE = re.compile(r"\{([^{}]+)\}")


@cache
def all_claims() -> list[dict[str, Any]]:
    """Return the claims of ``claims.yaml``."""
    return yaml.safe_load(Path(__file__).with_name("claims.yaml").read_text(encoding="utf-8"))


def commands(claim: dict[str, Any]) -> list[str]:
    """Return the commands that test a claim."""
    listed = claim.get("command", [])
    return [listed] if isinstance(listed, str) else listed


def resolved(text: str) -> str:
    """Replace each reference in `text` with its value.

    Raises:
        ValueError: If a reference has an unknown name.
    """

    def value(match: re.Match[str]) -> str:
        name, *arguments = shlex.split(match[1])
        if name not in values.VALUES:
            raise ValueError(f"claims.yaml: {name} is not a value. The values are {', '.join(values.VALUES)}.")
        return values.VALUES[name](*arguments)

    return _REFERENCE.sub(value, text)


@block
def claims(paper: str) -> str:
    """Show the claims of a paper with the command that tests each claim, our result and the verdict."""
    rows = []
    for one in (claim for claim in all_claims() if claim["paper"] == paper):
        tested = "<br>".join(f"`{command}`" for command in commands(one)) or "not tested"
        verdict = f"**{one['verdict']}**. {resolved(one.get('because', ''))}".rstrip()
        rows.append([f"{one['claim']} ({one['where']})", tested, resolved(one.get("result", "–")), verdict])
    return table(["claim", "tested by", "result here", "verdict"], rows, left=4)


@block
def claim_verdicts() -> str:
    """Show how many claims of each paper have each verdict."""
    rows = []
    for paper, title in PAPERS.items():
        given = [claim["verdict"] for claim in all_claims() if claim["paper"] == paper]
        rows.append([title, str(len(given)), *(str(given.count(verdict)) for verdict in VERDICTS)])
    every = [claim["verdict"] for claim in all_claims()]
    rows.append(["all papers", str(len(every)), *(str(every.count(verdict)) for verdict in VERDICTS)])
    return table(["paper", "claims", *VERDICTS], rows)
