"""The version of the format of a run folder, and the error for a folder of another version."""

from __future__ import annotations

from pathlib import Path

from efficient_ft.core.errors import UserError

#: Version of what results.json and checkpoint.ckpt hold; raised when a key or a setting changes its name or meaning.
FORMAT = 1

#: What to do about a run folder that cannot be continued.
START_AGAIN = "Choose another hydra.run.dir, or resume=never, which keeps the old folder under another name."


class OtherVersionError(UserError):
    """A file of a run that another version of this package wrote, and that this version cannot read.

    Args:
        file: the file, or the run folder.
        reason: what shows it, e.g. "it has no format number".
        do: a sentence that says what to do.
        later: written by a later version, not by an earlier one.
    """

    def __init__(self, file: Path, reason: str, do: str, *, later: bool = False) -> None:
        which = "a later" if later else "an earlier"
        super().__init__(f"{file} was written by {which} version of efficient-ft ({reason}). {do}")


def check_format(file: Path, found: object, do: str) -> None:
    """Refuse a file whose format number is not `FORMAT`.

    Args:
        file: the file, for the message.
        found: its format number; None: it has none.
        do: a sentence that says what to do.

    Raises:
        OtherVersionError: the numbers differ.
    """
    if found == FORMAT and not isinstance(found, bool):
        return
    if found is None:
        raise OtherVersionError(file, f"it has no format number; this version reads format {FORMAT}", do)
    later = isinstance(found, int) and found > FORMAT
    raise OtherVersionError(file, f"it has format {found}; this version reads format {FORMAT}", do, later=later)
