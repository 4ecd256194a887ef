"""ToMe: merge similar patch tokens.

Source: Bolya, Fu, Dai, Zhang, Feichtenhofer, Hoffman, "Token Merging: Your ViT But Faster", ICLR 2023.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from efficient_ft.core.context import is_recomputing
from efficient_ft.core.errors import SettingError, UserError
from efficient_ft.methods.base import Applied
from efficient_ft.methods.checks import check_bool, check_number
from efficient_ft.methods.declarations import Adds, Axis, Needs
from efficient_ft.methods.registry import register
from efficient_ft.methods.summary import ranges
from efficient_ft.methods.tokens.base import (
    PRODUCTS,
    SOFTMAX,
    Place,
    TokenForward,
    TokenMethod,
    classifies_by_class_token,
    grid_positions,
)
from efficient_ft.models.view import ModelView, Reason, Skipped
from efficient_ft.ops.saving import packing_suspended
from efficient_ft.ops.tokens import (
    Tokens,
    is_token_reduction_suspended,
    match,
    merge,
    representatives,
    token_context,
    unmerge,
)


class _SizedAttention(TorchFunctionMode):
    """Context manager that applies proportional attention and records keys, in fused and unfused attention.

    `sizes_BN` is the number of patches that each token represents. The logarithm of this number is added to the
    attention scores before the softmax (Equation 1 of the ToMe paper). If `sizes_BN` is None, all tokens have the same
    weight. `keys` contains the detached keys of each attention operation, averaged over the heads. The keys have the
    shape (B, N, D) and at least single precision.
    """

    def __init__(self, sizes_BN: Tensor | None, record_keys: bool) -> None:
        super().__init__()
        self.bias_B11N = None if sizes_BN is None else sizes_BN.log()[:, None, None]
        self.record_keys = record_keys
        self.keys: list[Tensor] = []
        self._factor: Tensor | None = None  # second factor of the last matrix product (kᵀ if a softmax follows)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return self._fused(func, *args, **kwargs)
        if func in PRODUCTS:
            self._factor = args[1]
        elif func in SOFTMAX and args[0].dim() == 4 and self._factor is not None:
            self._record(self._factor.mT)
            if self.bias_B11N is not None:
                args = (args[0] + self.bias_B11N.to(args[0].dtype), *args[1:])
        return func(*args, **kwargs)

    def _fused(
        self, attend: Any, q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, *others: Any, **kwargs: Any
    ) -> Any:
        if attn_mask is not None:
            raise UserError(
                "method tome: tokens cannot be merged in attention with a mask. Use a model without an attention mask."
            )
        self._record(k)
        return attend(q, k, v, None if self.bias_B11N is None else self.bias_B11N.to(q.dtype), *others, **kwargs)

    def _record(self, k_BHND: Tensor) -> None:
        if self.record_keys:
            wide = torch.promote_types(k_BHND.dtype, torch.float32)
            self.keys.append(k_BHND.detach().mean(1, dtype=wide))


class _MergingForward(TokenForward):
    """Forward pass of a block that merges r tokens after attention and before the feed-forward network.

    `after_merge` is True if an earlier block merges tokens. If `unmerges` is True, the last block repeats each merged
    token once for each patch that it represents. Later layers then weight each merged token by its number of patches.
    """

    def __init__(
        self,
        module: nn.Module,
        place: Place,
        r: int,
        proportional_attention: bool,
        after_merge: bool = False,
        unmerges: bool = False,
    ) -> None:
        super().__init__(module, place)
        self.r, self.proportional_attention, self.after_merge = r, proportional_attention, after_merge
        self.unmerges = unmerges

    def __call__(self, x: Tensor, *others: Any, **keywords: Any) -> Tensor:
        if is_token_reduction_suspended():
            return super().__call__(x, *others, **keywords)
        x, tokens, inputs = self.popped(x, others, keywords)
        if self.after_merge and tokens is None and is_recomputing():
            raise UserError(
                "method tome: reentrant checkpointing recomputes a block without the sizes of its merged tokens. Use"
                " the method checkpointing instead, or timm.layers.set_reentrant_ckpt(False)."
            )
        r = merged_of(x.shape[1] - self.prefix, self.r)
        sizes_BN = None if tokens is None else tokens.sizes_BN
        attention = _SizedAttention(sizes_BN if self.proportional_attention else None, self._acts(r))
        with token_context(tokens):
            x = self.first_half(x, inputs, attention)
        if self._acts(r):
            with packing_suspended():
                x, tokens = self._merged(x, attention, self.record(x, tokens, inputs), r)
        with token_context(tokens):
            x = self.second_half(x)
        if self.last and tokens is not None and tokens.merged_into_BN is not None:
            with packing_suspended():
                x = unmerge(x, tokens.merged_into_BN)
        return self.passed_on(x, tokens)

    @staticmethod
    def _acts(r: int) -> bool:
        return r > 0

    def _merged(self, x: Tensor, attention: _SizedAttention, tokens: Tokens, r: int) -> tuple[Tensor, Tokens]:
        """Merge r tokens of x, and return the remaining tokens and a record of the merges."""
        if not attention.keys:
            attention_name = type(getattr(self.module, self.form.attends)).__name__
            raise UserError(
                f"method tome: the keys of {attention_name} were not found, because this module does not compute a"
                " softmax of a product of queries and keys. Without keys, similar tokens cannot be matched. Use a model"
                " with softmax attention."
            )
        sizes_BN, into_BN = tokens.sizes_BN, tokens.merged_into_BN
        if sizes_BN is None:
            sizes_BN = x.new_ones(x.shape[:2], dtype=torch.promote_types(x.dtype, torch.float32))
        index_BN = match(torch.stack(attention.keys).mean(0), r, self.prefix)
        rotary_BL = tokens.rotary_index_BL
        if rotary_BL is not None:
            rotary_BL = representatives(rotary_BL, sizes_BN, index_BN, x.shape[1] - r, self.prefix)
        x, sizes_BN = merge(x, sizes_BN, index_BN, x.shape[1] - r)
        if self.unmerges:
            into_BN = index_BN if into_BN is None else index_BN.gather(1, into_BN)
        return x, Tokens(rotary_index_BL=rotary_BL, sizes_BN=sizes_BN, merged_into_BN=into_BN)


@register
class ToMe(TokenMethod):
    """Merge the most similar patch tokens in every block (ToMe: Bolya et al., ICLR 2023).

    After attention and before the feed-forward network, the patch tokens are alternately assigned to two sets. Each
    token of the first set is matched with the most similar token of the second set. The similarity of two tokens is the
    cosine similarity of their detached keys, averaged over the heads. The r most similar pairs are merged. A merged
    token is the mean of the two tokens, weighted by the number of patches that each token represents. Prefix tokens
    (class token, distillation token, registers) are not merged and remain at the start. Attention still runs as a fused
    operation.

    The prefix tokens, the remaining tokens of the first set, and the second set are then concatenated in this order, as
    in the paper. This order affects only how the next block assigns tokens to the two sets. In blocks with rotary
    position embeddings, a merged token keeps the embedding of the token that represents the most patches. Blocks with
    relative position biases are rejected.

    Tokens are merged in training and in evaluation. The names of the weights do not change, but the trained model must
    be used with the same merging settings. Exported files contain the settings of the merging. The model does not
    require a class token. The last block repeats each merged token once for each patch that it represents, in the order
    of the patches. Pooling after the blocks therefore weights each token by its number of patches. In attention
    pooling, the repetition is equivalent to adding the logarithm of this number to the scores. Tokens are not repeated
    in `timm` models that classify only by their class token.

    If a block receives fewer than 2·r patch tokens, it merges half of these tokens, as in the paper. A value of r is
    rejected if it exceeds half of the tokens in the grid, or if only one patch token would remain after the last block.

    Args:
        r: number of tokens merged in each block. Must be non-negative. If r is a list, it must contain one number for
            each block.
        inflect: slope of the schedule of r. Must be from −1 to 1. The number of merged tokens changes linearly from (1
            − inflect)·r in the first block to (1 + inflect)·r in the last block. With −1, the number decreases from 2·r
            to 0, as in the decreasing schedule of the paper. With 1, the number increases from 0 to 2·r. The mean over
            the blocks is r, even after rounding. Must be 0 if r is a list. In the paper, `inflect` is the second number
            of the pair (r, inflect).
        proportional_attention: if True, the logarithm of the number of patches that a token represents is added to the
            attention scores of this token (Equation 1 of the paper).

    Raises:
        SettingError: If a setting is out of range. Raised by `apply` if r is a list whose length differs from the
            number of blocks, or if r merges too many tokens.
        UserError: Raised by `apply` if the model has no token grid, if its blocks are not supported, or if its
            attention uses a mask or has no keys. Also raised if a method has been applied that drops or merges tokens
            or has a low-rank backward pass.
    """

    name = "tome"
    axis = Axis.TOKENS
    adds = frozenset({Adds.TOKEN_MERGING})
    needs = frozenset({Needs.BLOCKS, Needs.TOKEN_GRID})
    conflicts: Mapping[str, str] = {
        Adds.LOW_RANK_LAYERS: "merged tokens have no grid positions, which the projection of gradients requires"
    }
    merges = False

    def __init__(self, r: int | list[int] = 8, inflect: float = 0.0, proportional_attention: bool = True):
        super().__init__()
        each = r if isinstance(r, Sequence) and not isinstance(r, str) else [r]
        if not each or not all(type(n) is int and n >= 0 for n in each):
            raise SettingError("r", r, "an integer >= 0, or a list with one such integer for each block")
        check_number("inflect", inflect, "a number from -1 to 1", lambda slope: -1 <= slope <= 1)
        if inflect and each is r:
            raise SettingError("inflect", inflect, "0 if r is a list")
        check_bool("proportional_attention", proportional_attention)
        self.r = list(each) if each is r else r
        self.inflect, self.proportional_attention = inflect, proportional_attention

    def _apply(self, model: nn.Module, view: ModelView) -> Applied:
        self.refuse_other_blocks(view, view.blocks)
        patches = grid_positions(view)
        self.refuse_fixed_tokens(view, _run_merging)
        r = self._r_per_block(view, patches)
        unmerges = not classifies_by_class_token(model)
        forwards = {
            name: (_MergingForward, (n, self.proportional_attention, any(r[:index]), unmerges))
            for index, (name, n) in enumerate(zip(view.blocks, r, strict=True))
        }
        self.give_forwards(model, view, forwards)
        why = Skipped(Reason.NO_EFFECT, "r is 0")
        none = {name: why for name, n in zip(view.blocks, r, strict=True) if not n}
        merging = tuple(name for name in view.blocks if name not in none)
        if not merging:
            return Applied(self.name, merging, none, none_needed="r is 0 in every block")
        each = f"{min(r)}" if min(r) == max(r) else f"{min(r)} to {max(r)}"
        summary = f"{ranges(merging)} each merge {each} of {patches} patch tokens"
        return Applied(self.name, merging, none, summary=summary)

    def _r_per_block(self, view: ModelView, patches: int) -> list[int]:
        blocks = len(view.blocks)
        if isinstance(self.r, list):
            if len(self.r) != blocks:
                raise self.setting_error("r", f"a list of {blocks} integers, one for each block of {view.name}")
            if not _leaves_some(self.r, patches):
                raise self.setting_error(
                    "r",
                    f"a list of integers from 0 to {patches // 2} that leaves more than one patch token",
                    f"{view.name} has {patches} patch tokens, and each block merges at most half of its input tokens.",
                )
            return self.r
        if not _leaves_some(scheduled(self.r, self.inflect, blocks), patches):
            largest = max(n for n in range(patches + 1) if _leaves_some(scheduled(n, self.inflect, blocks), patches))
            raise self.setting_error(
                "r",
                f"an integer from 0 to {largest}",
                f"{view.name} has {patches} patch tokens and {blocks} blocks. Each block merges at most half of its"
                " input tokens, and more than one patch token must remain.",
            )
        return scheduled(self.r, self.inflect, blocks)


def _run_merging(block: nn.Module, x: Tensor, prefix: int, inputs: Callable[[int], dict[str, Any]]) -> None:
    patches = x.shape[1] - prefix
    block(x, **inputs(patches))
    place = Place(ToMe.name, prefix, patches, True)
    _MergingForward(block, place, 1, True)(x, **inputs(patches))
    _MergingForward(block, place, 0, True)(x[:, :-1], **inputs(patches - 1))


def scheduled(r: int, inflect: float, blocks: int) -> list[int]:
    """Return the number of tokens that each block merges.

    The number changes linearly from (1 − inflect)·r in the first block to (1 + inflect)·r in the last block. The mean
    over the blocks is r. Two blocks at the same distance from the middle merge exactly 2·r tokens in total. Numbers
    halfway between two integers are rounded to the even integer. `inflect` is used as an exact decimal number, without
    binary rounding errors.
    """
    slope = 0 if blocks == 1 else Fraction(str(inflect)) / (blocks - 1)
    return [round(r + r * slope * (2 * block - blocks + 1)) for block in range(blocks)]


def merged_of(patches: int, r: int) -> int:
    """Return the number of patch tokens that a block merges: the minimum of r and half of `patches`."""
    return min(r, patches // 2)


def _leaves_some(r: Sequence[int], patches: int) -> bool:
    """Return True if each r is at most half of `patches` and more than one patch token remains after the last block."""
    if not any(r):
        return True
    left = patches
    for n in r:
        left -= merged_of(left, n)
    return max(r) <= patches // 2 and left > 1
