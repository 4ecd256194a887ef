"""Size of the images that a network currently processes, and its restoration when a block is recomputed.

The storage of a block's input has a reference to the size. `torch.utils.checkpoint` passes the same tensor, or a tensor
with the same storage, to the block again, and the block restores the size of its forward pass.
`methods.memory.checkpointing`, which may pack the input, passes the reference on.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from efficient_ft.core.context import is_recomputing

Size = tuple[int, ...]
#: Name of the attribute of a storage that refers to the size.
_ATTRIBUTE = "efficient_ft_image_size"
_NO_BACKWARD = -1


@dataclass
class ImageSize:
    """Current size (H, W) of the images of a network in pixels. All layers of the network share this object."""

    size: Size = ()
    _backward: int = _NO_BACKWARD

    def set(self, size: Size) -> None:
        """Set the size of the images of a forward pass that begins, or of a part of the network that is recomputed."""
        if self.size != size:
            self.size = size
        if not torch.compiler.is_compiling():  # Compiled code recomputes operations instead of modules.
            self._backward = torch._C._current_graph_task_id()

    @property
    def is_unknown(self) -> bool:
        """True if a layer is recomputed in a backward pass that has not restored the size."""
        if torch.compiler.is_compiling() or not is_recomputing():
            return False
        return self._backward != torch._C._current_graph_task_id()


def attach_image_size(x: Tensor, current: ImageSize) -> None:
    """Record in the storage of x, the input of a block, that the block processes images of the current size."""
    setattr(x.untyped_storage(), _ATTRIBUTE, (current, current.size))


def image_size_of(x: Tensor) -> tuple[ImageSize, Size] | None:
    """Return the record of `attach_image_size`, or None if there is no record."""
    found: tuple[ImageSize, Size] | None = getattr(x.untyped_storage(), _ATTRIBUTE, None)
    return found


def restore_image_size(record: tuple[ImageSize, Size] | None) -> None:
    """Set the size of the images to the recorded size. The next forward pass of the network sets its own size."""
    if record is not None:
        current, size = record
        current.set(size)
