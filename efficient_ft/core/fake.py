"""A fake tensor mode that does not store fake tensors in caches of other libraries."""

from __future__ import annotations

import sys
from typing import Any

from torch._subclasses.fake_tensor import FakeTensorMode

#: Name of the function in ``transformers.pytorch_utils`` that disables the caches if it returns True.
_NAME = "is_torchdynamo_compiling"


class FakeTensors(FakeTensorMode):
    """Fake tensor mode in which functions of `transformers` neither read nor fill their caches.

    `transformers` caches the position embeddings of some networks (such as DINOv3) for the whole process. Without this
    class, a later forward pass would read fake tensors from the cache. The functions bypass their caches if
    ``is_torchdynamo_compiling`` returns True. This class therefore replaces that function while the mode is active.
    """

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self._replaced: list[tuple[Any, Any]] = []

    def __enter__(self) -> FakeTensors:
        module: Any = sys.modules.get("transformers.pytorch_utils")
        self._replaced.append((module, getattr(module, _NAME, None)))
        if hasattr(module, _NAME):
            setattr(module, _NAME, lambda: True)
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        try:
            super().__exit__(*exception)
        finally:
            module, before = self._replaced.pop()
            if before is not None:
                setattr(module, _NAME, before)
