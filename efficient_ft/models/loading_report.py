"""The report on loading the weights of a network from a file. The report is stored on the network."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import nn

#: Name of the model attribute that stores the report.
_REPORT = "efficient_ft_loading"
_COLUMNS = 100


@dataclass(frozen=True)
class LoadingReport:
    """The result of loading the weights of a network from a file.

    Attributes:
        path: Path of the file or folder.
        key: Key of the nested mapping that contains the weights, or "" for the top level of the file.
        prefix: Prefix that was removed from the names in this mapping.
        loaded: Number of tensors taken from the file.
        total: Number of tensors of the network.
        left_out: Mapping from the full names of unused tensors in the file to the reasons why they are not used.
        new_heads: Mapping from the names of newly initialized parts to the reasons for their initialization.
        notes: Descriptions of changes to the tensors, such as resized position embeddings or merged channels.
        suspicious: Descriptions of tensors with implausible values.
        kept: Description of the loaded classifier, or an empty string if the classifier was not loaded.
    """

    path: str
    key: str
    prefix: str
    loaded: int
    total: int
    left_out: Mapping[str, str] = field(default_factory=dict)
    new_heads: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    suspicious: tuple[str, ...] = ()
    kept: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Return the report as a dictionary for results.json."""
        return asdict(self)

    def lines(self, classes: int) -> list[str]:
        """Return the lines to log for a network with `classes` classes.

        The lines state the number of loaded tensors, the unused tensors, and the parts that are new or changed.
        """
        origin = [f"key '{self.key}'"] if self.key else []
        origin += [f"without the prefix '{self.prefix}'"] if self.prefix else []
        place = f" ({', '.join(origin)})" if origin else ""
        lines = [f"Weights: {self.loaded} of {self.total} tensors from {self.path}{place}."]
        if self.left_out:
            lines.append(self._left_out())
        if self.kept:
            lines.append(f"Kept: {self.kept}.")
        outputs = "1 output" if classes == 1 else f"{classes} classes"
        heads = [f"{head} newly initialized for {outputs} ({why})" for head, why in self.new_heads.items()]
        line = ""
        for change in [*heads, *self.notes]:
            if line and len(line) + len(change) > _COLUMNS - 15:
                lines, line = [*lines, f"Changed: {line}."], ""
            line += f"; {change}" if line else change
        lines += [f"Changed: {line}."] if line else []
        return lines

    def _left_out(self) -> str:
        """Return a line that states the number and some names of the unused tensors for each reason.

        Names are shortened to their first component.
        """
        groups: dict[str, Counter[str]] = {}
        for name, reason in self.left_out.items():
            shown = name.removeprefix(f"{self.key}.") if self.key else name
            first, dot, _ = shown.removeprefix(self.prefix).partition(".")
            groups.setdefault(reason, Counter())[f"{first}.*" if dot else first] += 1
        parts = []
        for reason, names in groups.items():
            most = [name for name, _ in names.most_common(2)]
            parts.append(f"{names.total()} {reason} ({', '.join(most)}{', …' * (len(names) > 2)})")
        return f"Not loaded: {'; '.join(parts)}."


def set_loading_report(model: nn.Module, report: LoadingReport) -> nn.Module:
    """Store the report on the network, and return the network."""
    setattr(model, _REPORT, report)
    return model


def loading_report(model: nn.Module) -> LoadingReport | None:
    """Return the report of a network that was loaded from a file, or None for other networks."""
    return getattr(model, _REPORT, None)
