"""Storage formats of features, with 32, 16 or 8 bits for each value."""

from __future__ import annotations

import torch
from torch import Tensor

from efficient_ft.core.errors import UserError
from efficient_ft.ops.storage.groups import group_pack, group_unpack

#: Names of the storage formats.
FORMS = ("fp32", "fp16", "int8")

#: Number of 8-bit values in a group. Each group has a minimum and a step size.
_GROUP = 64


class RowForm:
    """A storage format that converts rows of `values` floating-point numbers to bytes and back.

    ``int8`` stores the numbers in groups of 64. A group stores 8 bits for each number, and a minimum and a step size in
    fp16.
    """

    def __init__(self, name: str, values: int) -> None:
        assert name in FORMS
        self.name, self.values = name, values
        self._groups = -(-values // _GROUP)
        #: Number of bytes in a row.
        self.bytes = {"fp32": 4 * values, "fp16": 2 * values, "int8": self._groups * (_GROUP + 4)}[name]

    def encode(self, values: Tensor) -> Tensor:
        """Convert values (B, n) of any floating-point type to bytes (B, `bytes`).

        Raises:
            UserError: If a value is too large for the storage format.
        """
        values = values.float()
        if self.name == "fp32":
            return values.contiguous().view(torch.uint8)
        if self.name == "fp16":
            halves = values.half()
            self._require(halves.isfinite() | ~values.isfinite())
            return halves.contiguous().view(torch.uint8)
        last = values[:, -1:].expand(-1, self._groups * _GROUP - self.values)
        codes, ranges = group_pack(torch.cat([values, last], 1), 8, _GROUP)
        self._require(ranges.isfinite().all() | ~values.isfinite().all())
        of_rows = ranges.view(2, len(values), -1).transpose(0, 1).flatten(1).contiguous()
        return torch.cat([codes.view(len(values), -1), of_rows.view(torch.uint8)], 1)

    def decode(self, rows: Tensor) -> Tensor:
        """Convert bytes (B, `bytes`) to values (B, n) in fp32."""
        if self.name == "fp32":
            return rows.view(torch.float32)
        if self.name == "fp16":
            return rows.view(torch.float16).float()
        codes, of_rows = rows.split([self._groups * _GROUP, 4 * self._groups], 1)
        ranges = of_rows.contiguous().view(torch.float16).view(len(rows), 2, -1).transpose(0, 1)
        flat = group_unpack(
            codes.reshape(-1, _GROUP), ranges.reshape(2, -1).contiguous(), codes.numel(), 8, torch.float32
        )
        return flat.view(len(rows), -1)[:, : self.values]

    def _require(self, fits: Tensor) -> None:
        if not fits.all():
            raise UserError(
                f"Some values of the features are too large to be stored as {self.name}. Store the features as fp32."
            )
