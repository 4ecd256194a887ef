"""A table in one of several forms: for a terminal, as Markdown, CSV, JSON or LaTeX."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Sequence
from typing import Any

from efficient_ft.core import text

Cell = str | int | float | None


def render(header: Sequence[str], rows: Sequence[Sequence[Cell]], form: str, left: int = 1) -> str:
    """The table as a text.

    Args:
        header: names of the columns.
        rows: of cells; None: empty. Numbers stay numbers in CSV and JSON.
        form: one of `FORMS`.
        left: the number of first columns that hold words.
    """
    return FORMS[form](header, rows, left)


def _terminal(header: Sequence[str], rows: Sequence[Sequence[Cell]], left: int) -> str:
    return text.table([header, *([_shown(cell) for cell in row] for row in rows)], left=range(left))


def _markdown(header: Sequence[str], rows: Sequence[Sequence[Cell]], left: int) -> str:
    rule = ["---" if column < left else "--:" for column in range(len(header))]
    lines = [header, rule, *([_shown(cell).replace("|", "\\|") for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _csv(header: Sequence[str], rows: Sequence[Sequence[Cell]], left: int) -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(["" if cell is None else cell for cell in row] for row in rows)
    return out.getvalue().rstrip("\n")


def _json(header: Sequence[str], rows: Sequence[Sequence[Cell]], left: int) -> str:
    assert len(set(header)) == len(header), header
    objects: list[dict[str, Any]] = [dict(zip(header, row, strict=True)) for row in rows]
    return "[\n" + ",\n".join(f"  {json.dumps(one, ensure_ascii=False)}" for one in objects) + "\n]"


def _latex(header: Sequence[str], rows: Sequence[Sequence[Cell]], left: int) -> str:
    columns = "".join("l" if column < left else "r" for column in range(len(header)))
    lines = [" & ".join(_escaped(_shown(cell)) for cell in row) + r" \\" for row in [header, *rows]]
    body = [rf"\begin{{tabular}}{{{columns}}}", r"\toprule", lines[0], r"\midrule", *lines[1:], r"\bottomrule"]
    return "\n".join([*body, r"\end{tabular}"])


#: Signs of LaTeX, and others that its default fonts lack.
_LATEX = {
    "\\": r"\textbackslash{}",
    "–": "--",
    "…": r"\ldots{}",
    "×": r"$\times$",
    "µ": r"$\mu$",
    "±": r"$\pm$",
    **{sign: f"\\{sign}" for sign in "&%$#_{}"},
}


def _escaped(cell: str) -> str:
    return "".join(_LATEX.get(sign, sign) for sign in cell)


def _shown(cell: Cell) -> str:
    return "" if cell is None else f"{cell:.6g}" if isinstance(cell, float) else str(cell)


#: By name, in the order in which they are listed.
FORMS: dict[str, Callable[[Sequence[str], Sequence[Sequence[Cell]], int], str]] = {
    "text": _terminal,
    "markdown": _markdown,
    "csv": _csv,
    "json": _json,
    "latex": _latex,
}
