"""Format version of records and checkpoints, and the error raised for files that another version wrote."""

from __future__ import annotations

from pathlib import Path

from efficient_ft.core.errors import UserError

#: Format number of results.json, records.json and checkpoint.ckpt. Increase this number if the meaning of a key or
#: setting changes.
FORMAT = 1

#: Advice for a run folder that cannot be continued.
START_AGAIN = "Choose another hydra.run.dir, or set resume=never, which keeps the old folder under another name."

#: Advice for a path that is not a run folder.
PASS_A_RUN = "Pass the run folder printed when training ended."

#: Advice for reading a run that another version wrote.
USE_ITS_VERSION = "Repeat the run with this version, or use the version that wrote the run."


class OtherVersionError(UserError):
    """Error for a file of a run that another version of this package wrote and that this version cannot read.

    The message names `file`, states the `reason` why the file cannot be read, and ends with the advice `do`.
    """

    def __init__(self, file: Path, reason: str, do: str) -> None:
        super().__init__(f"The file {file} was written by another version of efficient-ft ({reason}). {do}")


def check_format(file: Path, found: object, do: str) -> None:
    """Raise an `OtherVersionError` with the advice `do` if the format number `found` in `file` is not `FORMAT`."""
    if found == FORMAT and not isinstance(found, bool):
        return
    has = "no format number" if found is None else f"format {found}"
    raise OtherVersionError(file, f"it has {has}, but this version reads format {FORMAT}", do)
