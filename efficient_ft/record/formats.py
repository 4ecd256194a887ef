"""The version of the format of a run folder, and the error for a folder of another version."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from efficient_ft.core.errors import UserError

#: Version of what results.json and checkpoint.ckpt hold; raised when a key or a setting changes its name or meaning.
FORMAT = 2

#: What to do about a run folder that cannot be continued.
START_AGAIN = "Choose another hydra.run.dir, or resume=never, which keeps the old folder under another name."

#: What to do about a path that is no run folder.
PASS_A_RUN = "Pass the run folder printed when training ended."

#: What to do about a run of another version that is only read.
USE_ITS_VERSION = "Repeat the run with this version, or use the version that wrote it."


class OtherVersionError(UserError):
    """A file of a run that another version of this package wrote, and that this version cannot read.

    Args:
        file: the file, or the run folder.
        reason: what shows it, e.g. "it has no format number".
        do: a sentence that says what to do.
        version: the one that wrote it; "another" if nothing tells whether it is an earlier or a later one.
    """

    def __init__(
        self, file: Path, reason: str, do: str, version: Literal["an earlier", "a later", "another"] = "an earlier"
    ) -> None:
        super().__init__(f"{file} was written by {version} version of efficient-ft ({reason}). {do}")


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
    version: Literal["an earlier", "a later"] = "a later" if isinstance(found, int) and found > FORMAT else "an earlier"
    raise OtherVersionError(file, f"it has format {found}; this version reads format {FORMAT}", do, version)
