"""The record of a batch's tokens: the grid positions of the remaining tokens, and the patches that each represents.

The record is passed from block to block as an attribute of the tensor of tokens (`attach_tokens`, `pop_tokens`). It
belongs to one forward pass, and recomputation reproduces it. Layers inside a block access the record by
`current_tokens`.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import register_pytree_node

from efficient_ft.core.context import context, set_context
from efficient_ft.ops.tokens.dropping import over_channels


@dataclass(frozen=True, eq=False)
class Tokens:
    """The record of a batch's tokens after some tokens were dropped or merged.

    Attributes:
        grid_index_BL: Index on the grid, row by row, of each token except prefix tokens. The j-th fused token of a
            forward pass has the index H·W + j. None if unknown (merged tokens, or a different image size).
        fused: Number of fused tokens so far.
        sizes_BN: Number of patches that each token represents, including prefix tokens. None if each token represents
            one.
        merged_into_BN: For each token before any merge, the index of the token that represents it. None if not
            recorded.
        cache: Results that layers on these tokens share.
    """

    grid_index_BL: Tensor | None = None
    fused: int = 0
    sizes_BN: Tensor | None = None
    merged_into_BN: Tensor | None = None
    cache: dict[Any, Any] = field(default_factory=dict, repr=False)

    @classmethod
    def full(cls, x_BNC: Tensor, prefix: int, positions: int) -> Tokens:
        """Create the record of tokens before any drop, from the numbers of prefix tokens and of grid positions.

        Indices are set only if the numbers of patch tokens and of grid positions are equal.
        """
        if x_BNC.shape[1] - prefix != positions:  # images of a different size, or randomly dropped patches
            return cls()
        index = torch.arange(x_BNC.shape[1] - prefix, device=x_BNC.device)
        return cls(index.expand(len(x_BNC), -1))

    def columns_BN(self, prefix: int) -> Tensor:
        """Return the column of each token in a matrix over prefix, grid and fused tokens, in this order."""
        assert self.grid_index_BL is not None
        before = torch.arange(prefix, device=self.grid_index_BL.device).expand(len(self.grid_index_BL), -1)
        return torch.cat([before, self.grid_index_BL + prefix], 1)

    def on_grid(self, x_BNC: Tensor, prefix: int, positions: int) -> Tensor:
        """Scatter the tokens to the grid, (B, H·W, C), with zeros for dropped tokens."""
        assert self.grid_index_BL is not None
        grid = x_BNC.new_zeros(len(x_BNC), positions + self.fused, x_BNC.shape[2])
        index = over_channels(self.grid_index_BL, x_BNC.shape[2])
        return grid.scatter_(1, index, x_BNC[:, prefix:])[:, :positions]

    def dropped(self, index_BK: Tensor, positions: int, fuse: bool) -> Tokens:
        """Return the record after `drop` kept the tokens at `index_BK`, and with `fuse` appended one fused token."""
        if self.grid_index_BL is None:
            return replace(self, cache={})
        index = self.grid_index_BL.gather(1, index_BK)
        if not fuse:
            return replace(self, grid_index_BL=index, cache={})
        new = index.new_full((len(index), 1), positions + self.fused)
        return replace(self, grid_index_BL=torch.cat([index, new], 1), fused=self.fused + 1, cache={})


def _rebuild(leaves: Iterable[Any], fused: Any) -> Tokens:
    grid_index_BL, sizes_BN, merged_into_BN = leaves
    return Tokens(grid_index_BL, fused, sizes_BN, merged_into_BN)


# Recomputation saves the tensors of a record.
register_pytree_node(Tokens, lambda t: ([t.grid_index_BL, t.sizes_BN, t.merged_into_BN], t.fused), _rebuild)

#: Name of the attribute of a tensor of tokens that stores their record.
_ATTRIBUTE = "efficient_ft_tokens"


def attach_tokens(x_BNC: Tensor, tokens: Tokens | None) -> Tensor:
    """Attach a record to x for the next block, and return x. None (no token was removed) attaches nothing."""
    if tokens is not None:
        setattr(x_BNC, _ATTRIBUTE, tokens)
    return x_BNC


def pop_tokens(x_BNC: Tensor) -> tuple[Tensor, Tokens | None]:
    """Return x without its record, and the record, which is None if no token was removed.

    The returned tensor has no record. Otherwise, a tensor saved for the backward pass would also save its record, which
    is not measured.
    """
    tokens: Tokens | None = getattr(x_BNC, _ATTRIBUTE, None)
    return (x_BNC if tokens is None else _Identity.apply(x_BNC)), tokens


class _Identity(torch.autograd.Function):
    """Return a tensor with the same values, without the attributes of x. The result is not a view of x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g


def token_context(tokens: Tokens | None) -> AbstractContextManager[None]:
    """Set the record that `current_tokens` returns inside a ``with`` block."""
    return set_context("tokens", tokens)


def current_tokens() -> Tokens | None:
    """Return the record of the tokens that the current layer receives, or None if no token was removed."""
    tokens: Tokens | None = context.tokens
    return tokens


def token_reduction_suspended() -> AbstractContextManager[None]:
    """Make blocks keep all tokens inside a ``with`` block, for example to probe a model."""
    return set_context("token_reduction_suspended", True)


def is_token_reduction_suspended() -> bool:
    """Return True if blocks must keep all tokens."""
    return context.token_reduction_suspended
