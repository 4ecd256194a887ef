"""The base of methods that reduce tokens: blocks run in their parts, and pass on grid positions and sizes of tokens."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from efficient_ft.core.errors import UserError
from efficient_ft.methods.forwards import OwnForward, put_inside, take_away
from efficient_ft.models.marks import added_modules
from efficient_ft.models.view import ModelView
from efficient_ft.ops.packed import current_packing, packing_suspended
from efficient_ft.ops.tokens import (
    Tokens,
    attach_tokens,
    class_attention,
    drop,
    is_token_reduction_suspended,
    pop_tokens,
    token_context,
)

#: The children that a block may have if tokens are dropped or merged between its attention and its MLP.
_BLOCK = {"norm1", "attn", "ls1", "drop_path1", "norm2", "mlp", "ls2", "drop_path2"}
_ORDER = ["norm1", "attn", "norm2", "mlp"]

#: Functions by which attention in parts computes its map, (B, H, N, N).
SOFTMAX = (Tensor.softmax, torch.softmax, F.softmax)


class Attention(TorchFunctionMode):
    """Record how much the class token attends to each patch token, in fused attention or attention in parts.

    Attributes:
        scores_BL: the attention, (B, L); None: no attention has run.
    """

    scores_BL: Tensor | None = None

    def __init__(self, prefix: int) -> None:
        super().__init__()
        self.prefix = prefix

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            q, k, *others = args
            if current_packing() is not None:
                q, k = q.contiguous(), k.contiguous()  # as attention keeps them, so that k is kept once
            self.scores_BL = class_attention(q, k, self.prefix, kwargs.get("scale"))
            return func(q, k, *others, **kwargs)
        result = func(*args, **kwargs)
        if func in SOFTMAX and result.dim() == 4:
            self.scores_BL = result[:, :, 0, self.prefix :].mean(1)
        return result


class TokenForward(OwnForward):
    """A block in a model in which tokens are dropped or merged: it passes on what is known of them.

    Args:
        prefix: the model's prefix tokens.
        positions: H · W of the whole grid.
        last: no block comes after it.
    """

    def __init__(self, module: nn.Module, prefix: int, positions: int, last: bool) -> None:
        super().__init__(module)
        self.prefix, self.positions, self.last = prefix, positions, last

    def __call__(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        x, tokens = pop_tokens(x)
        with token_context(tokens):
            return self.passed_on(self.within(x, *args, **kwargs), tokens)

    def passed_on(self, x: Tensor, tokens: Tokens | None) -> Tensor:
        """Return x for the next block, with what is known of its tokens attached."""
        return x if self.last else attach_tokens(x, tokens)

    def plain(self, others: Sequence[Any], keywords: dict[str, Any]) -> None:
        """Raise UserError for a call with a mask or positions, which hold for all tokens."""
        if any(value is not None and value is not False for value in (*others, *keywords.values())):
            raise UserError(
                f"{type(self.module).__name__}: tokens cannot be dropped or merged where attention has a mask or"
                " positions."
            )

    def first_half(self, x: Tensor, seen: TorchFunctionMode | None) -> Tensor:
        """Return x + attention; `seen` records what it attends to."""
        block: Any = self.module
        with seen or nullcontext():
            attended = block.attn(block.norm1(x))
        return x + _through(block, ("ls1", "drop_path1"), attended)

    def second_half(self, x: Tensor) -> Tensor:
        """Return x + feed-forward network."""
        block: Any = self.module
        return x + _through(block, ("ls2", "drop_path2"), block.mlp(block.norm2(x)))


def _through(block: nn.Module, names: Sequence[str], x: Tensor) -> Tensor:
    for name in names:
        x = getattr(block, name)(x) if hasattr(block, name) else x
    return x


class DroppingForward(TokenForward):
    """A block that drops tokens between its attention and its feed-forward network."""

    def __init__(
        self, module: nn.Module, prefix: int, positions: int, last: bool, keep: Callable[[int], int], fuse: bool
    ) -> None:
        super().__init__(module, prefix, positions, last)
        self.keep, self.fuse = keep, fuse

    def __call__(self, x: Tensor, *others: Any, **keywords: Any) -> Tensor:
        if is_token_reduction_suspended():
            return super().__call__(x, *others, **keywords)
        self.plain(others, keywords)
        x, tokens = pop_tokens(x)
        seen = Attention(self.prefix)
        with token_context(tokens):
            x = self.first_half(x, seen)
        x, tokens = self.drop(x, seen, tokens or Tokens.full(x, self.prefix, self.positions))
        with token_context(tokens):
            return self.passed_on(self.second_half(x), tokens)

    def drop(self, x: Tensor, seen: Attention, tokens: Tokens) -> tuple[Tensor, Tokens]:
        """Return the tokens that flow on, and what is known of them."""
        assert seen.scores_BL is not None, "no attention was seen"
        count = seen.scores_BL.shape[1]
        kept = self.keep(count)
        with packing_suspended():
            x, index_BK = drop(x, seen.scores_BL, self.prefix, kept, self.fuse)
        return x, tokens.dropped(index_BK, self.positions, self.fuse and kept < count)


def refuse_other_blocks(view: ModelView, method_name: str, names: Sequence[str]) -> None:
    """Raise UserError where blocks are not of the form that `TokenForward` runs in parts."""
    added = added_modules(view.model)
    for name in names:
        block = view.model.get_submodule(name)
        parts = [child for child, _ in block.named_children()]
        if any(f"{name}.{part}" in added for part in parts):
            raise UserError(
                f"method {method_name}: {name} of {view.name} has a side module (Rep-Net); tokens can be dropped in"
                " other blocks."
            )
        takes = set(inspect.signature(type(block).forward).parameters) - {"self", "x", "attn_mask", "is_causal"}
        # timm registers them in the order they run: with norms behind what they normalize it is another block
        if takes or set(parts) - _BLOCK or [part for part in parts if part in _ORDER] != _ORDER:
            raise UserError(
                f"method {method_name}: the blocks of {view.name} ({type(block).__name__}) are not of the form norm1,"
                " attn, norm2, mlp, without more, between which tokens can be dropped or merged."
            )


def grid_positions(view: ModelView) -> int:
    """Return H · W of the grid that the tokens of the blocks are on; the model has one (`Needs.TOKEN_GRID`)."""
    assert view.block_grid is not None
    height, width = view.block_grid
    return height * width


def give_forwards(
    model: nn.Module, view: ModelView, chosen: Mapping[str, tuple[type[TokenForward], tuple[Any, ...]]]
) -> None:
    """Give every block a forward of its own.

    Args:
        chosen: kind and settings by name of the block; the other blocks get one that passes on what is known of the
            tokens.
    """
    positions = grid_positions(view)
    for name in view.blocks:
        block, (kind, settings) = model.get_submodule(name), chosen.get(name, (TokenForward, ()))
        put_inside(block, kind(block, view.prefix_tokens, positions, name == view.blocks[-1], *settings))


def take_forwards(model: nn.Module) -> None:
    """Take the forwards of the blocks away: all tokens flow on."""
    for module in model.modules():
        take_away(module, TokenForward)
