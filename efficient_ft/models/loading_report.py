"""The report of which weights a network took from a file, kept on the network."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import nn

#: The attribute of a model that holds its report.
_REPORT = "efficient_ft_loading"
_COLUMNS = 100


@dataclass(frozen=True)
class LoadingReport:
    """How a network was loaded from a file.

    Attributes:
        path: of the file or folder.
        key: the nested mapping of the file that the weights are from; "" for the top.
        prefix: of the names in that mapping, which was removed.
        loaded: number of tensors taken from the file.
        total: number of tensors of the network.
        left_out: by full name in the file, why a tensor was not used.
        new_heads: by name, why a part is newly initialized.
        notes: changes to the tensors: positions resized, channels merged, another candidate not used.
        suspicious: tensors whose values are beyond any sense, in words.
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

    def as_dict(self) -> dict[str, Any]:
        """Plain containers, for results.json."""
        return asdict(self)

    def lines(self, classes: int) -> list[str]:
        """Three lines, more only with several changes: what was loaded, what was left out, and what is new or changed.

        Args:
            classes: number of classes of the network.
        """
        origin = [f"key '{self.key}'"] if self.key else []
        origin += [f"without the prefix '{self.prefix}'"] if self.prefix else []
        place = f" ({', '.join(origin)})" if origin else ""
        lines = [f"Weights: {self.loaded} of {self.total} tensors from {self.path}{place}."]
        if self.left_out:
            lines.append(self._left_out())
        heads = [f"{head} newly initialized for {classes} classes ({why})" for head, why in self.new_heads.items()]
        line = ""
        for change in [*heads, *self.notes]:
            if line and len(line) + len(change) > _COLUMNS - 15:
                lines, line = [*lines, f"Changed: {line}."], ""
            line += f"; {change}" if line else change
        lines += [f"Changed: {line}."] if line else []
        return lines

    def _left_out(self) -> str:
        """One line: by reason, the number of tensors left out, and the first parts of their names."""
        groups: dict[str, Counter[str]] = {}
        for name, reason in self.left_out.items():
            shown = name.removeprefix(f"{self.key}.") if self.key else name
            first, dot, _ = shown.removeprefix(self.prefix).partition(".")
            groups.setdefault(reason, Counter())[f"{first}.*" if dot else first] += 1
        parts = []
        for reason, names in groups.items():
            most = [name for name, _ in names.most_common(2)]
            parts.append(f"{names.total()} {reason} ({', '.join(most)}{', …' * (len(names) > 2)})")
        return f"Left out: {'; '.join(parts)}."


def set_loading_report(model: nn.Module, report: LoadingReport) -> nn.Module:
    """Keep the report on the network, and return the network."""
    setattr(model, _REPORT, report)
    return model


def loading_report(model: nn.Module) -> LoadingReport | None:
    """The report of a network that was loaded from a file; None for any other."""
    return getattr(model, _REPORT, None)
