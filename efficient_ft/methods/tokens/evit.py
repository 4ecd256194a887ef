"""EViT: tokens that the class token attends to little are dropped, and fused into one.

Source: Liang, Ge, Tong, Song, Wang, Xie, "Not All Patches Are What You Need: Expediting Vision Transformers via Token
Reorganizations", ICLR 2022.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from efficient_ft.errors import SettingError, UserError
from efficient_ft.methods.base import Applied, Method
from efficient_ft.methods.forwards import OwnForward, forwards_of, put_inside, take_away
from efficient_ft.models.view import view
from efficient_ft.ops.packed import running
from efficient_ft.ops.tokens import class_attention, drop, share_kept

#: What a block may have in which tokens can be dropped between attention and feed-forward network.
_BLOCK = {"norm1", "attn", "ls1", "drop_path1", "norm2", "mlp", "ls2", "drop_path2"}


class _ClassAttention(TorchFunctionMode):
    """Sees what an attention module attends to, fused or in parts.

    Attributes:
        scores_BL: how much its class token attends to each patch token; None: no attention was seen.
    """

    scores_BL: Tensor | None = None

    def __init__(self, prefix: int) -> None:
        super().__init__()
        self.prefix = prefix

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            with _aside():
                self.scores_BL = class_attention(args[0], args[1], self.prefix, kwargs.get("scale"))
        result = func(*args, **kwargs)
        if func in (Tensor.softmax, torch.softmax, F.softmax) and result.dim() == 4:
            self.scores_BL = result[:, :, 0, self.prefix :].mean(1)
        return result


def _aside() -> Any:
    """Plain operations, whatever packs what those of the block save."""
    mode = running()
    return nullcontext() if mode is None else mode.suspended()


class _DroppingForward(OwnForward):
    """A block that drops tokens between its attention and its feed-forward network."""

    def __init__(self, module: nn.Module, prefix: int, keep: float, fuse: bool) -> None:
        super().__init__(module)
        self.prefix, self.keep, self.fuse = prefix, keep, fuse

    def __call__(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False, **others: Any) -> Tensor:
        block: Any = self.module
        if attn_mask is not None or is_causal or any(value is not None for value in others.values()):
            raise UserError(
                f"{type(block).__name__}: tokens cannot be dropped where attention has a mask or positions."
            )
        with _ClassAttention(self.prefix) as seen:
            attended = block.attn(block.norm1(x))
        assert seen.scores_BL is not None, "no attention was seen"
        x = x + _through(block, ("ls1", "drop_path1"), attended)
        with _aside():
            kept = share_kept(seen.scores_BL.shape[1], self.keep)
            x, _ = drop(x, seen.scores_BL, self.prefix, kept, self.fuse)
        return x + _through(block, ("ls2", "drop_path2"), block.mlp(block.norm2(x)))


def _through(block: nn.Module, names: Sequence[str], x: Tensor) -> Tensor:
    for name in names:
        x = getattr(block, name)(x) if hasattr(block, name) else x
    return x


class EViT(Method):
    """Keep in some blocks only the patch tokens that the class token attends to most.

    Between attention and feed-forward network, in training and in evaluation, ``keep`` of the tokens stay, in the
    order of the attention, mean over the heads; the others become one, weighted by it. Attention stays fused: the
    class token's row is computed beside it. The trained weights are the model's own, but belong with the dropping:
    what is exported notes it.

    Args:
        drop_at: blocks in which tokens are dropped, counted from 0, negative ones from the end; not the last.
        keep: share of the patch tokens kept, above 0 and at most 1.
        fuse: what is dropped becomes one more token.
    """

    name = "evit"
    axis = "tokens"
    merges = False

    def __init__(self, drop_at: list[int] = [3, 6, 9], keep: float = 0.5, fuse: bool = True):  # noqa: B006
        super().__init__()
        check_dropping(drop_at, keep, fuse)
        self.drop_at, self.keep, self.fuse = list(drop_at), keep, fuse

    def _apply(self, model: nn.Module) -> Applied:
        chosen = drop_tokens(model, self.name, self.drop_at, self.keep, self.fuse)
        return Applied(
            self.name, chosen, {name: "all tokens flow on" for name in view(model).blocks if name not in chosen}
        )

    def _remove(self, model: nn.Module) -> None:
        drop_none(model)


def drop_tokens(model: nn.Module, who: str, drop_at: Sequence[int], keep: float, fuse: bool) -> tuple[str, ...]:
    """Make the blocks at `drop_at` drop tokens, for the method `who`; returns their names.

    Raises:
        SettingError: an index outside the model, of its last block, or twice.
        UserError: the model has no class token or blocks of another form, or something in it needs all tokens.
    """
    seen = view(model)
    if getattr(model, "cls_token", None) is None:
        raise UserError(f"method {who}: {seen.name} has no class token, whose attention says which tokens matter.")
    count = len(seen.blocks)
    places = [b % count if -count <= b < count else b for b in drop_at]
    if not all(0 <= b < count - 1 for b in places):
        raise SettingError(
            f"method.{who}.drop_at",
            list(drop_at),
            f"indices from 0 to {count - 2}: {seen.name} has {count} blocks, and a drop in the last does nothing",
        )
    if len(set(places)) < len(places):
        raise SettingError(f"method.{who}.drop_at", list(drop_at), "each block once")
    chosen = tuple(seen.blocks[b] for b in sorted(places))
    for name in chosen:
        block = model.get_submodule(name)
        takes = set(inspect.signature(type(block).forward).parameters) - {"self", "x", "attn_mask", "is_causal"}
        if takes or {child for child, _ in block.named_children()} - _BLOCK or not hasattr(block, "norm2"):
            raise UserError(
                f"method {who}: the blocks of {seen.name} ({type(block).__name__}) are not of the form norm1, attn,"
                " norm2, mlp, without more, between which tokens can be dropped."
            )
    if any(hasattr(module, "low_rank") for module in model.modules()):
        raise UserError(f"method {who} cannot be stacked with low-rank backward, which needs the whole grid.")
    if any(isinstance(f, _DroppingForward) for m in model.modules() for f in forwards_of(m)):
        raise UserError(f"method {who}: tokens are dropped in this model already.")
    for name in chosen:
        block = model.get_submodule(name)
        put_inside(block, _DroppingForward(block, seen.prefix_tokens, keep, fuse))
    return chosen


def drop_none(model: nn.Module) -> None:
    """Let all tokens flow on."""
    for module in model.modules():
        take_away(module, _DroppingForward)


def check_dropping(drop_at: Any, keep: Any, fuse: Any) -> None:
    """Raise SettingError for settings that no model can be given."""
    if not isinstance(drop_at, Sequence) or isinstance(drop_at, str) or not all(type(b) is int for b in drop_at):
        raise SettingError("drop_at", drop_at, "a list of whole numbers, e.g. [3,6,9]")
    if not drop_at:
        raise SettingError("drop_at", "[]", "at least one block")
    if isinstance(keep, bool) or not isinstance(keep, int | float) or not 0 < keep <= 1:
        raise SettingError("keep", keep, "a number above 0 and at most 1")
    if not isinstance(fuse, bool):
        raise SettingError("fuse", fuse, ("true", "false"))
