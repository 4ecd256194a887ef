"""The frozen prefix of a text network for texts of any length."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

from torch.utils._pytree import tree_map

from efficient_ft.core.inputs import Inputs
from efficient_ft.models.prefix import FrozenPrefix, _Call, _Like, _Output


class PrefixLengths:
    """A frozen prefix for texts of any length.

    The shapes of two lengths show which dimensions depend on the length, so no further forward pass is needed. The
    network must be on the CPU when an object is created.

    Args:
        prefix: The frozen prefix for texts of one length. Its features must be a single tensor.
        shorter: The inputs of at least two texts of a different length, (B, L) each.

    Attributes:
        dimension: The dimension of the features (B, ...) that contains the tokens, or None if the features do not
            depend on the length, for example if they are the output of the pooler.
    """

    def __init__(self, prefix: FrozenPrefix, shorter: Inputs) -> None:
        assert len(prefix.shapes) == 1
        self._long, self._short = prefix, prefix.resized(shorter)
        self._lengths = _length(prefix._inputs), _length(shorter)
        shapes = (one._stored[0].like.shape for one in (self._long, self._short))
        changed = [at for at, (a, b) in enumerate(zip(*shapes, strict=True)) if at and a != b]
        assert len(changed) <= 1, "a feature has at most one dimension of tokens"
        self.dimension = changed[0] if changed else None
        #: The function that returns the prefix for texts with a given number of tokens.
        self.at = cache(self._at)

    def _at(self, length: int) -> FrozenPrefix:
        def sized(a: Any, b: Any) -> Any:
            return self._sized(a, b, length) if isinstance(a, _Like) else a

        long, short = self._long, self._short
        stored = [
            _Output(a.module, a.index, sized(a.like, b.like), a.order)
            for a, b in zip(long._stored, short._stored, strict=True)
        ]
        skipped = [
            _Call(name, 0, output=tree_map(sized, output, short._skipped[name]))
            for name, output in long._skipped.items()
        ]
        inputs = tree_map(sized, long._inputs, short._inputs)
        found = FrozenPrefix(long.model, long.end, stored, skipped, inputs, long.reason)
        found.form = long.form
        return found

    def _sized(self, a: _Like, b: _Like, length: int) -> _Like:
        pairs = list(zip(a.shape[1:], b.shape[1:], strict=True))
        changes = {(x, y) for x, y in pairs if x != y}
        assert changes <= {self._lengths}, f"the shape {a.shape} depends on the length of the text in another way"
        return replace(a, shape=(a.shape[0], *(length if x != y else x for x, y in pairs)))


def _length(inputs: Any) -> int:
    length: int = next(iter(inputs.values())).shape[1]
    return length
