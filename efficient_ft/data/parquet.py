"""Read the rows of Parquet files with pyarrow."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from efficient_ft.core.errors import UserError, first_line
from efficient_ft.core.text import printable

#: Names of the columns in which pandas stores an index without a name.
_INDEX = re.compile(r"__index_level_\d+__")


def read_parquet(path: Path) -> tuple[list[dict[str, Any]], list[str], list[str]]:
    """Return the rows, the names of the columns, and notes on columns that are not read, one sentence each.

    The cells are Python objects. Missing values are None, and dates are texts. Columns with binary data, durations or
    objects are not read.

    Raises:
        UserError: If pyarrow is not installed, or if the file is damaged.
    """
    name = printable(path)
    try:
        import pyarrow  # type: ignore[import-not-found,import-untyped,unused-ignore]
        from pyarrow import parquet, types
    except ImportError as error:
        raise UserError(
            f"The file {name} is a Parquet file, which requires pyarrow ({first_line(error)}). Run pip install"
            " 'efficient-ft[parquet]', or save the table as .csv or .jsonl."
        ) from error

    def readable(kind: Any) -> bool:
        if types.is_dictionary(kind) or types.is_list(kind) or types.is_large_list(kind):
            return readable(kind.value_type)
        text = types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)
        number = types.is_primitive(kind) or types.is_decimal(kind) or types.is_null(kind)
        return text or (number and not types.is_duration(kind))

    try:
        fields = [field for field in parquet.read_schema(path) if not _INDEX.fullmatch(field.name)]
        used = [field for field in fields if readable(field.type)]
        table = parquet.read_table(path, columns=[field.name for field in used], use_pandas_metadata=False)
        for index, field in enumerate(used):
            if types.is_temporal(field.type):
                table = table.set_column(index, field.name, table.column(index).cast(pyarrow.string()))
        rows = table.to_pylist()
    except (OSError, pyarrow.ArrowException) as error:
        raise UserError(f"The file {name} cannot be read as Parquet ({first_line(error)}). Copy it again.") from error
    unread = [f"{field.name!r} ({field.type})" for field in fields if field not in used]
    note = "Columns must contain texts, numbers or lists, and images must be separate files."
    return rows, [field.name for field in used], [f"The column {one} is not read. {note}" for one in unread]
