"""Forms of the command line that no longer exist: each one is refused with its replacement."""

from __future__ import annotations

from efficient_ft.core.errors import UserError

_EXPERIMENT = (
    "List the runs as rows of an experiment, DIR/experiment/NAME.yaml, and pass -m --config-dir DIR experiment=NAME"
)

#: Removed settings, and their replacements.
REMOVED = {
    "rows": f"{_EXPERIMENT}. For some rows of a published table, use efficient-ft table NAME --run --rows ROW",
    "table": "Use efficient-ft table NAME --run",
}


def refuse_removed(argument: str) -> None:
    """Refuse an argument of a form that was removed; a job of an experiment has ``rows=null``, which is accepted."""
    key, _, value = argument.partition("=")
    if value.startswith("zip("):
        raise UserError(f"{argument}: zip(...) was removed. {_EXPERIMENT}.")
    name = key.lstrip("+~")
    if name in REMOVED and argument != "rows=null":
        raise UserError(f"{argument}: the setting {name} was removed. {REMOVED[name]}.")
