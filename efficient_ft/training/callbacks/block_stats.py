"""Observe the inputs and outputs of a model's blocks in a forward pass, and compute relative magnitudes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from efficient_ft.core.context import is_recomputing
from efficient_ft.ops.tokens import Tokens, pop_tokens


class BlockIO(NamedTuple):
    """Detached input and output of a block in one forward pass. Do not modify these tensors.

    Attributes:
        x: the input.
        before: grid positions of the input tokens, or None if all tokens are present or if the positions are unknown.
        y: the output.
        after: grid positions of the output tokens, or None if all tokens are present or if the positions are unknown.
    """

    x: Tensor
    before: Tokens | None
    y: Tensor
    after: Tokens | None


@contextmanager
def observe_blocks(model: nn.Module, blocks: Sequence[str], callback: Callable[[int, BlockIO], None]) -> Iterator[None]:
    """Return a context manager that calls `callback` with the index and `BlockIO` of each block in `blocks` that runs.

    `callback` runs without gradient tracking, so no tensors are saved for the backward pass. Forward passes that
    recompute activations during the backward pass are skipped. Blocks whose first input or whose output is not a tensor
    are also skipped.
    """

    def hook(index: int) -> Callable[..., None]:
        def observe(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            x = next((value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), None)
            if x is None or not isinstance(output, Tensor) or is_recomputing():
                return
            with torch.no_grad():
                (x, before), (y, after) = pop_tokens(x), pop_tokens(output)
                callback(index, BlockIO(x.detach(), before, y.detach(), after))

        return observe

    with ExitStack() as stack:
        for index, name in enumerate(blocks):
            handle = model.get_submodule(name).register_forward_hook(hook(index), with_kwargs=True)
            stack.callback(handle.remove)
        yield


def channel_axis(block: nn.Module, dims: int) -> int:
    """Return the channel axis of a block's output.

    The channel axis is axis 1 for 4-dimensional outputs of convolutional blocks, and the last axis otherwise.
    """
    first = next((m for m in block.modules() if isinstance(m, nn.Linear | nn.Conv2d)), None)
    return 1 if dims == 4 and isinstance(first, nn.Conv2d) else dims - 1


def relative_magnitude(
    io: BlockIO, prefix: int, axis: int, present: Tensor | None = None
) -> tuple[Tensor, Tensor] | None:
    """Return the relative magnitude ‖f(x)‖ / ‖f(x) + x‖ of a block, and the number of compared tokens.

    The output of the block is f(x) + x. Norms are computed over the channels in single precision or higher. Tokens with
    a zero output are excluded.

    Args:
        io: input and output of the block.
        prefix: number of prefix tokens of the model.
        axis: the channel axis.
        present: mask (B, N) that is 0 for padding, or None if there is no padding. Padding is excluded.

    Returns:
        The relative magnitude averaged over images and tokens, and the number of compared tokens per image, as scalar
        tensors on the device of the block. The result is None if output tokens cannot be matched with input tokens.
    """
    pair = _same_tokens(io, prefix)
    if pair is None:
        return None
    x, y, valid = pair
    wide = torch.promote_types(y.dtype, torch.float32)
    added = torch.linalg.vector_norm(y.to(wide) - x.to(wide), dim=axis)
    whole = torch.linalg.vector_norm(y, dim=axis, dtype=wide)
    valid = (whole > 0) & valid
    if present is not None and present.shape == valid.shape:
        valid = valid & (present != 0)
    count = valid.sum()
    return torch.where(valid, added / whole, 0).sum() / count, count.to(wide) / len(y)


def _same_tokens(io: BlockIO, prefix: int) -> tuple[Tensor, Tensor, Tensor | bool] | None:
    """Return (x, y, mask of the valid pairs) with matched input and output tokens, or None if there is no match."""
    x, before, y, after = io
    if after is None or after is before:  # no token was dropped or merged, or the positions are unknown
        if x.shape == y.shape:
            return x, y, True
    elif after.grid_index_BL is not None and (before is None or before.grid_index_BL is not None):
        old_BL = torch.arange(x.shape[1] - prefix, device=x.device).expand(len(x), -1)
        if before is not None and before.grid_index_BL is not None:
            old_BL = before.grid_index_BL
        sorted_BL, order_BL = old_BL.sort(1)
        found_BK = torch.searchsorted(sorted_BL, after.grid_index_BL.contiguous()).clamp_max(old_BL.shape[1] - 1)
        kept_BK = sorted_BL.gather(1, found_BK) == after.grid_index_BL
        index_BK = order_BL.gather(1, found_BK) + prefix
        head_BP = torch.arange(prefix, device=x.device).expand(len(x), -1)
        index_BN = torch.cat([head_BP, index_BK], 1)
        valid_BN = torch.cat([torch.ones_like(head_BP, dtype=torch.bool), kept_BK], 1)
        return x.gather(1, index_BN.unsqueeze(-1).expand(-1, -1, x.shape[2])), y, valid_BN
    if prefix and x.dim() == y.dim() == 3 and x.shape[::2] == y.shape[::2]:
        return x[:, :prefix], y[:, :prefix], True
    return None
