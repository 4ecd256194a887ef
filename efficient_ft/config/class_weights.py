"""The setting ``optim.class_weights``: the weight of each class in the training loss.

The loss of a batch is the weighted mean of `torch.nn.functional.cross_entropy`. Sample i with class y_i has the weight
w[y_i], and the sum of the weighted losses is divided by the sum of the weights in the batch. A common factor of all
weights therefore has no effect. With ``auto``, the weight of class c is w_c = C · (1 / n_c) / Σ_k (1 / n_k), where n_c
is the number of training samples of class c, and C is the number of classes. The mean of these weights is 1.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from efficient_ft.core.errors import SettingError, UserError, did_you_mean
from efficient_ft.core.parsing import parse_yaml

SETTING = "optim.class_weights"
_POSITIVE = "a finite number > 0"
_FORMS = (
    "The file must be a .csv or .tsv file with the columns class and weight, or a .json or .yaml file with a list or a"
    " mapping from class names to weights."
)


def weights_file(value: Any) -> Path | None:
    """Return the file that the setting names, or None if the value is not a file."""
    return Path(value).expanduser() if isinstance(value, str) and value != "auto" else None


def missing_weights_file(value: Any) -> str | None:
    """Return an error message if the setting names a file that does not exist, or None otherwise."""
    file = weights_file(value)
    if file is None or file.exists():
        return None
    return str(_no_file(file))


def _no_file(file: Path) -> SettingError:
    return SettingError(SETTING, str(file), "auto, null, weights, or a file", f"There is no such file. {_FORMS}")


def check_values(weights: Sequence[Any] | Mapping[str, Any], source: str = SETTING) -> None:
    """Raise a SettingError if a weight is not a finite number > 0. `source` is the setting or file in the message."""
    if not weights:
        raise SettingError(source, "no weights", "a weight for each class")
    pairs = weights.items() if isinstance(weights, Mapping) else enumerate(weights)
    for key, weight in pairs:
        number = isinstance(weight, int | float) and not isinstance(weight, bool)
        if not number or not math.isfinite(weight) or weight <= 0:
            of = f"{source}.{key}" if isinstance(weights, Mapping) else f"{source}[{key}]"
            do = "To leave out a class, remove its samples from the data."
            raise SettingError(of, weight, _POSITIVE, do)


def class_weights(value: Any, class_names: Sequence[str], sizes: Sequence[int] | None) -> list[float]:
    """Return the weight of each class.

    Args:
        value: value of the setting, which is not null.
        class_names: names of the C classes.
        sizes: number of training samples of each class, or None if a sample has several classes.

    Raises:
        SettingError: If the number of weights, the name of a class, or a weight is invalid, or if ``auto`` is not
            defined for the data.
        UserError: If the file cannot be read.
    """
    if value == "auto":
        return _inverse_frequencies(class_names, sizes)
    file = weights_file(value)
    given, source = (value, SETTING) if file is None else (_read(file), f"{SETTING} ({file})")
    check_values(given, source)
    if not isinstance(given, Mapping):
        if len(given) != len(class_names):
            known = f"a list of {len(class_names)} weights, one for each class"
            raise SettingError(source, f"{len(given)} weights", known)
        return list(map(float, given))
    for name in given:
        if name not in class_names:
            known = f"a mapping whose keys are classes of the data{'' if len(class_names) > 20 else _list(class_names)}"
            raise SettingError(source, f"the class {name!r}", known, did_you_mean(name, class_names).strip() or None)
    return [float(given.get(name, 1)) for name in class_names]


def _list(names: Sequence[str]) -> str:
    return f" ({', '.join(names)})"


def _inverse_frequencies(class_names: Sequence[str], sizes: Sequence[int] | None) -> list[float]:
    if sizes is None:
        known = "a list, a mapping or a file for this kind of task"
        raise SettingError(SETTING, "auto", known, "Counting the pixels of each class would require reading all masks.")
    if missing := [name for name, size in zip(class_names, sizes, strict=True) if not size]:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise SettingError(
            SETTING,
            "auto",
            "a list, a mapping or a file if a class has no training samples",
            f"These classes have none: {', '.join(missing[:3])}{more}. Add samples, or specify the weights.",
        )
    inverse = [1 / size for size in sizes]
    mean = math.fsum(inverse) / len(inverse)
    return [one / mean for one in inverse]


def _read(file: Path) -> Any:
    """Return the weights in a file as a list or as a mapping from class names to weights."""
    if not file.exists():
        raise _no_file(file)
    try:
        text = file.read_text(encoding="utf-8-sig")
        if file.suffix.lower() in (".csv", ".tsv"):
            return _rows(text, "\t" if file.suffix.lower() == ".tsv" else ",")
        found = parse_yaml(text)  # JSON is a subset of YAML
    except OSError as error:
        raise UserError(f"{SETTING}: the file {file} cannot be read: {error.strerror}. {_FORMS}") from error
    except ValueError as error:
        raise UserError(f"{SETTING}: the file {file} cannot be read: {error}. {_FORMS}") from error
    if isinstance(found, list):
        return found
    if isinstance(found, dict):
        return {str(name): weight for name, weight in found.items()}
    raise UserError(f"{SETTING}: the file {file} contains neither a list nor a mapping. {_FORMS}")


def _rows(text: str, delimiter: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    rows = csv.reader(io.StringIO(text), delimiter=delimiter)
    if [cell.strip().lower() for cell in next(rows, [])] != ["class", "weight"]:
        raise ValueError("the first line must contain the column names class and weight")
    for row in rows:
        if not row:
            continue
        if len(row) != 2 or row[0] in found:
            why = f"the class {row[0]} occurs twice" if len(row) == 2 else f"it has {len(row)} cells instead of 2"
            raise ValueError(f"line {rows.line_num}: {why}")
        try:
            found[row[0]] = float(row[1])
        except ValueError:
            found[row[0]] = row[1] or "an empty cell"
    return found
