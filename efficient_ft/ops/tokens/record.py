"""The record of a batch's tokens: where on the grid the remaining ones are, and how many patches each represents.

From block to block the record travels as an attribute of the tensor of tokens (`attach_tokens`, `pop_tokens`), so that
it is state of one forward pass and recomputation replays it. Inside a block the layers find it by `current_tokens`.
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
    """The record of a batch's tokens after some were dropped or merged.

    Attributes:
        grid_index_BL: index on the grid, row by row, of each token that is not a prefix token; the j-th fused token of
            a forward pass has the index H·W + j. None: unknown (merged tokens, or another image size).
        fused: number of fused tokens made so far.
        sizes_BN: number of patches that each token represents, prefix tokens included; None: one each.
        merged_into_BN: for each token before any merge, the index of the token that represents it; None: not recorded.
        cache: results that layers on these tokens share.
    """

    grid_index_BL: Tensor | None = None
    fused: int = 0
    sizes_BN: Tensor | None = None
    merged_into_BN: Tensor | None = None
    cache: dict[Any, Any] = field(default_factory=dict, repr=False)

    @classmethod
    def full(cls, x_BNC: Tensor, prefix: int, positions: int) -> Tokens:
        """Create the record of tokens before any drop. Indices are set only if their number equals the grid's.

        Args:
            x_BNC: the tokens, prefix tokens first.
            prefix: number of prefix tokens.
            positions: H·W of the grid.
        """
        if x_BNC.shape[1] - prefix != positions:  # images of another size, patches left out at random
            return cls()
        index = torch.arange(x_BNC.shape[1] - prefix, device=x_BNC.device)
        return cls(index.expand(len(x_BNC), -1))

    def columns_BN(self, prefix: int) -> Tensor:
        """Return the column of each token in a matrix over prefix, grid and fused tokens, in this order."""
        assert self.grid_index_BL is not None
        before = torch.arange(prefix, device=self.grid_index_BL.device).expand(len(self.grid_index_BL), -1)
        return torch.cat([before, self.grid_index_BL + prefix], 1)

    def on_grid(self, x_BNC: Tensor, prefix: int, positions: int) -> Tensor:
        """Scatter the tokens to the grid, (B, H·W, C): zeros where a token was dropped."""
        assert self.grid_index_BL is not None
        grid = x_BNC.new_zeros(len(x_BNC), positions + self.fused, x_BNC.shape[2])
        index = over_channels(self.grid_index_BL, x_BNC.shape[2])
        return grid.scatter_(1, index, x_BNC[:, prefix:])[:, :positions]

    def dropped(self, index_BK: Tensor, positions: int, fuse: bool) -> Tokens:
        """Return the record after `drop` kept the tokens at `index_BK`; `fuse`: one fused token was appended."""
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


# Recomputation keeps a record as its tensors.
register_pytree_node(Tokens, lambda t: ([t.grid_index_BL, t.sizes_BN, t.merged_into_BN], t.fused), _rebuild)

#: The attribute of a tensor of tokens that holds their record.
_ATTRIBUTE = "efficient_ft_tokens"


def attach_tokens(x_BNC: Tensor, tokens: Tokens | None) -> Tensor:
    """Attach a record to x for the next block, and return x. None: all tokens are there, nothing is attached."""
    if tokens is not None:
        setattr(x_BNC, _ATTRIBUTE, tokens)
    return x_BNC


def pop_tokens(x_BNC: Tensor) -> tuple[Tensor, Tokens | None]:
    """Return x without its record, and the record; None: all tokens are there.

    The returned tensor has no record, since a tensor kept for the backward pass would keep its record, too, hidden from
    the meter.
    """
    tokens: Tokens | None = getattr(x_BNC, _ATTRIBUTE, None)
    return (x_BNC if tokens is None else _Identity.apply(x_BNC)), tokens


class _Identity(torch.autograd.Function):
    """A tensor of the same values without the attributes of the first, and not a view of it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g


def token_context(tokens: Tokens | None) -> AbstractContextManager[None]:
    """Let layers inside a ``with`` block know the record of the tokens that they take."""
    return set_context("tokens", tokens)


def current_tokens() -> Tokens | None:
    """Return the record of the tokens that the current layer takes; None: all tokens are there."""
    tokens: Tokens | None = context.tokens
    return tokens


def token_reduction_suspended() -> AbstractContextManager[None]:
    """Let blocks keep all tokens inside a ``with`` block, in which a model is probed."""
    return set_context("token_reduction_suspended", True)


def is_token_reduction_suspended() -> bool:
    """Return whether blocks have to keep all tokens now."""
    return context.token_reduction_suspended
