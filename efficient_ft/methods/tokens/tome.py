"""ToMe: every block merges similar tokens.

Source: Bolya, Fu, Dai, Zhang, Feichtenhofer, Hoffman, "Token Merging: Your ViT But Faster", ICLR 2023.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode
from torch.overrides import TorchFunctionMode

from efficient_ft.core.context import is_recomputing
from efficient_ft.core.errors import SettingError, UserError
from efficient_ft.methods.base import Applied, Method
from efficient_ft.methods.declarations import Adds, Axis, Needs
from efficient_ft.methods.registry import register
from efficient_ft.methods.tokens.base import (
    SOFTMAX,
    TokenForward,
    give_forwards,
    grid_positions,
    refuse_other_blocks,
    take_forwards,
)
from efficient_ft.models.view import ModelView, Reason, Skipped
from efficient_ft.ops.packed import packing_suspended
from efficient_ft.ops.tokens import Tokens, is_token_reduction_suspended, match, merge, pop_tokens, token_context

#: Functions by which attention in parts multiplies queries and, transposed, keys.
_PRODUCTS = (Tensor.matmul, Tensor.__matmul__, torch.matmul)


class _SizedAttention(TorchFunctionMode):
    """Record the keys of attention, and weight each token by the patches it stands for; fused attention or in parts.

    Args:
        sizes_BN: patches of each token; log(size) is added to the scores before softmax (the paper's Equation 1).
            None: each token counts once.
        shows: record the keys.

    Attributes:
        keys: of each attention, the mean over its heads, (B, N, D), without gradient.
    """

    def __init__(self, sizes_BN: Tensor | None, shows: bool) -> None:
        super().__init__()
        self.bias_B11N = None if sizes_BN is None else sizes_BN.log()[:, None, None]
        self.shows = shows
        self.keys: list[Tensor] = []
        self._factor: Tensor | None = None  # the second one of the last product

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return self._fused(func, *args, **kwargs)
        if func in _PRODUCTS:
            self._factor = args[1]
        elif func in SOFTMAX and args[0].dim() == 4 and self._factor is not None:
            self._see(self._factor.mT)
            if self.bias_B11N is not None:
                args = (args[0] + self.bias_B11N.to(args[0].dtype), *args[1:])
        return func(*args, **kwargs)

    def _fused(
        self, attend: Any, q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, *others: Any, **kwargs: Any
    ) -> Any:
        if attn_mask is not None:
            raise UserError("method tome: tokens cannot be merged where attention has a mask of its own.")
        self._see(k)
        return attend(q, k, v, None if self.bias_B11N is None else self.bias_B11N.to(q.dtype), *others, **kwargs)

    def _see(self, k_BHND: Tensor) -> None:
        if self.shows:
            wide = torch.promote_types(k_BHND.dtype, torch.float32)
            self.keys.append(k_BHND.detach().mean(1, dtype=wide))


class _MergingForward(TokenForward):
    """A block that merges r tokens, or as many as it can, between its attention and its feed-forward network."""

    def __init__(
        self,
        module: nn.Module,
        prefix: int,
        positions: int,
        last: bool,
        r: int,
        proportional_attention: bool,
        behind: bool = False,
    ) -> None:
        super().__init__(module, prefix, positions, last)
        self.r, self.proportional_attention, self.behind = r, proportional_attention, behind

    def __call__(self, x: Tensor, *others: Any, **keywords: Any) -> Tensor:
        if is_token_reduction_suspended():
            return super().__call__(x, *others, **keywords)
        self.plain(others, keywords)
        x, tokens = pop_tokens(x)
        if self.behind and tokens is None and is_recomputing():
            raise UserError(
                "method tome: this checkpointing runs a block again without what is known of its tokens (torch's"
                " reentrant form); use method=checkpointing, or timm.layers.set_reentrant_ckpt(False)."
            )
        r = merged_of(x.shape[1] - self.prefix, self.r)
        sizes_BN = None if tokens is None else tokens.sizes_BN
        seen = _SizedAttention(sizes_BN if self.proportional_attention else None, self._acts(r))
        with token_context(tokens):
            x = self.first_half(x, seen)
        if self._acts(r):
            with packing_suspended():
                x, tokens = self._merged(x, seen, sizes_BN, r)
        with token_context(tokens):
            return self.passed_on(self.second_half(x), tokens)

    @staticmethod
    def _acts(r: int) -> bool:
        return r > 0

    def _merged(self, x: Tensor, seen: _SizedAttention, sizes_BN: Tensor | None, r: int) -> tuple[Tensor, Tokens]:
        """The tokens that flow on, and what is known of them."""
        if not seen.keys:
            raise UserError(
                f"method tome: {type(self.module.attn).__name__} shows no keys (there is no product with queries that"
                " softmax is taken of), so that similar tokens cannot be found."
            )
        if sizes_BN is None:
            sizes_BN = x.new_ones(x.shape[:2], dtype=torch.promote_types(x.dtype, torch.float32))
        place_BN = match(torch.stack(seen.keys).mean(0), r, self.prefix)
        x, sizes_BN = merge(x, sizes_BN, place_BN, x.shape[1] - r)
        return x, Tokens(sizes_BN=sizes_BN)


@register
class ToMe(Method):
    """Merge the most similar tokens in every block, each pair into its mean.

    Between attention and feed-forward network, in training and in evaluation: tokens alternate between two sets, each
    of the first has its most similar one in the second (cosine of the keys, their mean over the heads, without
    gradient), and the r most similar pairs become one token each, the mean of the patches they stand for. Class token,
    distillation token and registers stay as they are. Attention stays fused. No class token is needed: the layers
    after the blocks (the mean over the tokens, attention pooling) count each merged token once. The trained weights
    are the model's own, but belong with the merging: exported files note it.

    Where fewer than 2 r patch tokens are left, half of them are merged, as in the paper. Refused are an r above half
    of the whole grid, which not even the first block could merge, and one that would leave a single patch token.

    Args:
        r: tokens merged in every block; a list: in each one.
        inflect: the second number of the paper's (r, inflect), from −1 to 1: r rises (falls, below 0) linearly from
            block to block, by `inflect` · r about its mean: −1 goes from 2 r to 0 (the paper's decreasing schedule), 1
            from 0 to 2 r. Rounded, the mean still is r.
        proportional_attention: attention adds log(size), so that a token counts as all the patches it stands for.

    Raises:
        SettingError: a value outside these, or (when applied) an r that the model's tokens do not allow.
        UserError: when applied: the model has no token grid, or blocks of another form.
    """

    name = "tome"
    axis = Axis.TOKENS
    adds = frozenset({Adds.TOKEN_MERGING})
    needs = frozenset({Needs.BLOCKS, Needs.TOKEN_GRID})
    conflicts: Mapping[str, str] = {
        Adds.LOW_RANK_LAYERS: "merged tokens have no grid positions along which gradients are projected"
    }
    merges = False

    def __init__(self, r: int | list[int] = 8, inflect: float = 0.0, proportional_attention: bool = True):
        super().__init__()
        each = r if isinstance(r, Sequence) and not isinstance(r, str) else [r]
        if not each or not all(type(n) is int and n >= 0 for n in each):
            raise SettingError("r", r, "an integer >= 0, or a list of them, one for each block")
        if isinstance(inflect, bool) or not isinstance(inflect, int | float) or not -1 <= inflect <= 1:
            raise SettingError("inflect", inflect, "a number from -1 to 1")
        if inflect and each is r:
            raise SettingError("inflect", inflect, "0 where r is a list, which says it for each block")
        if not isinstance(proportional_attention, bool):
            raise SettingError("proportional_attention", proportional_attention, ("true", "false"))
        self.r = list(each) if each is r else r
        self.inflect, self.proportional_attention = inflect, proportional_attention

    def _apply(self, model: nn.Module, view: ModelView) -> Applied:
        refuse_other_blocks(view, self.name, view.blocks)
        patches = grid_positions(view)
        _refuse_other_tokens(view, patches)
        r = self._of_each(view, patches)
        give_forwards(
            model,
            view,
            {
                name: (_MergingForward, (n, self.proportional_attention, any(r[:place])))
                for place, (name, n) in enumerate(zip(view.blocks, r, strict=True))
            },
        )
        why = Skipped(Reason.NO_EFFECT, "r is 0")
        none = {name: why for name, n in zip(view.blocks, r, strict=True) if not n}
        merging = tuple(name for name in view.blocks if name not in none)
        return Applied(self.name, merging, none, none_needed="" if merging else "r is 0 in every block")

    def _of_each(self, view: ModelView, patches: int) -> list[int]:
        """Return r of each block.

        Args:
            view: the view of the model.
            patches: its patch tokens.

        Raises:
            SettingError: a list of another length, or an r that would merge everything.
        """
        blocks = len(view.blocks)
        setting = f"method.{self.name}.r"
        if isinstance(self.r, list):
            if len(self.r) != blocks:
                raise SettingError(setting, self.r, f"{blocks} numbers: {view.name} has {blocks} blocks")
            if not _leaves_some(self.r, patches):
                raise SettingError(
                    setting,
                    self.r,
                    f"numbers from 0 to {patches // 2}, half of the {patches} patch tokens of {view.name}, that leave"
                    " more than one of them",
                )
            return self.r
        if not _leaves_some(scheduled(self.r, self.inflect, blocks), patches):
            largest = max(n for n in range(patches + 1) if _leaves_some(scheduled(n, self.inflect, blocks), patches))
            raise SettingError(
                setting,
                self.r,
                f"an integer from 0 to {largest}",
                f"{view.name} has {patches} patch tokens, {blocks} blocks merge at most half of those they are given,"
                " and more than one has to be left.",
            )
        return scheduled(self.r, self.inflect, blocks)

    def _remove(self, model: nn.Module) -> None:
        take_forwards(model)


def _refuse_other_tokens(view: ModelView, patches: int) -> None:
    """Raise UserError where a block does not take tokens (B, N, C), of any number, or its keys are not seen."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    for name in view.blocks:
        block = view.model.get_submodule(name)
        like = next(block.parameters())
        channels = next(layer.channels[0] for layer in view.layers if layer.name.startswith(f"{name}."))
        with FakeCopyMode(mode):
            probe = copy.deepcopy(block).eval()
        try:
            with mode, torch.no_grad():
                x = torch.empty(1, view.prefix_tokens + patches, channels, device=like.device, dtype=like.dtype)
                probe(x)
                _MergingForward(probe, view.prefix_tokens, patches, True, 1, True)(x)
                _MergingForward(probe, view.prefix_tokens, patches, True, 0, True)(x[:, 1:])
        except UserError:
            raise
        except Exception as error:
            raise UserError(
                f"method tome: the blocks of {view.name} ({type(block).__name__}) do not take tokens (B, N, C), of any"
                f" number: {str(error).splitlines()[0]}"
            ) from error


def scheduled(r: int, inflect: float, blocks: int) -> list[int]:
    """Return r of each block: rising or falling linearly about its mean r.

    Two blocks at the same distance from the middle have exactly 2 r together: halves are rounded to the even integer,
    and `inflect` is taken as the decimal number it is written as.
    """
    slope = 0 if blocks == 1 else Fraction(str(inflect)) / (blocks - 1)
    return [round(r + r * slope * (2 * block - blocks + 1)) for block in range(blocks)]


def merged_of(patches: int, r: int) -> int:
    """Return how many of its patch tokens a block merges: r, or half of them."""
    return min(r, patches // 2)


def _leaves_some(r: Sequence[int], patches: int) -> bool:
    """Return True if each r is at most half of the grid, and more than one token is left at the end."""
    if not any(r):
        return True
    left = patches
    for n in r:
        left -= merged_of(left, n)
    return max(r) <= patches // 2 and left > 1
