"""PatchDropout: train on a random subset of the patch tokens.

Source: Liu, Matsoukas, Strand, Azizpour, Smith, "PatchDropout: Economizing Vision Transformers Using Patch Dropout",
WACV 2023.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from timm.layers import PatchDropout as TimmPatchDropout
from timm.layers import PatchDropoutWithIndices
from torch import Tensor, nn

from efficient_ft.core.errors import UserError
from efficient_ft.methods.base import Applied
from efficient_ft.methods.checks import check_keep_rate
from efficient_ft.methods.declarations import Adds, Axis, Needs
from efficient_ft.methods.forwards import OwnForward, put_around, take_away
from efficient_ft.methods.registry import register
from efficient_ft.methods.tokens.base import TokenMethod, grid_positions
from efficient_ft.methods.tokens.block_forms import form_of, positions_in
from efficient_ft.models.view import ModelView
from efficient_ft.ops.saving import packing_suspended
from efficient_ft.ops.tokens import (
    Tokens,
    attach_tokens,
    is_token_reduction_suspended,
    num_kept,
    take,
    token_reduction_suspended,
)


class _PatchDropForward(OwnForward):
    """Forward pass that, in training, runs the first block on a random subset of its patch tokens."""

    def __init__(self, module: nn.Module, prefix: int, positions: int, keep_rate: float) -> None:
        super().__init__(module)
        self.prefix, self.positions, self.keep_rate = prefix, positions, keep_rate
        self.form = form_of(type(module))

    def __call__(self, x: Tensor, *others: Any, **keywords: Any) -> Any:
        if not self.module.training or is_token_reduction_suspended():
            return self.within(x, *others, **keywords)
        rotary = None if self.form is None else positions_in(self.form, self.form.named(others, keywords))
        tokens = Tokens.full(x, self.prefix, self.positions, rotary)
        with packing_suspended():
            x, index_BK = self._kept(x)
        return self.within(attach_tokens(x, tokens.dropped(index_BK, self.positions, False)), *others, **keywords)

    def _kept(self, x_BNC: Tensor) -> tuple[Tensor, Tensor]:
        patches_BLC = x_BNC[:, self.prefix :]
        batch, count = patches_BLC.shape[:2]
        order_BL = torch.rand(batch, count, device=x_BNC.device).argsort(1)
        # The indices are sorted in grid order, so that keep_rate=1 does not change the tokens.
        index_BK = order_BL[:, : num_kept(count, self.keep_rate)].sort(1).values
        return torch.cat([x_BNC[:, : self.prefix], take(patches_BLC, index_BK)], 1), index_BK


@register
class PatchDropout(TokenMethod):
    """Train on a random subset of the patch tokens of each image (PatchDropout: Liu et al., WACV 2023).

    In each training step, the first block receives the fraction ``keep_rate`` of the patch tokens of each image.
    Absolute position embeddings are added before tokens are dropped. Rotary position embeddings are selected for the
    remaining tokens. The subset is sampled uniformly for each image. Prefix tokens (class token, distillation token,
    registers) are always kept. In evaluation, all patches are used.

    Like dropout masks, the subset is sampled with torch's default generator. A run seeds this generator with (seed,
    rank, batch), so that a resumed run samples the same patches. The kept tokens still have grid positions. Therefore,
    the method can be combined with methods that have a low-rank backward pass, and with methods that drop or merge
    tokens.

    Args:
        keep_rate: fraction of the patch tokens that the blocks receive in training. Must be in (0, 1]. The number of
            kept tokens is rounded up.

    Raises:
        SettingError: If `keep_rate` is out of range. Raised by `apply` if the images have so few patches that no patch
            would be dropped.
        UserError: Raised by `apply` if the model has no blocks or no token grid, if its blocks are not supported
            (relative position biases, side modules), or if the model already drops patches (``patch_drop_rate`` in
            `timm`).
    """

    name = "patch_dropout"
    axis = Axis.PATCHES
    changes_weights = False
    adds = frozenset({Adds.TOKEN_DROPPING})
    needs = frozenset({Needs.BLOCKS, Needs.TOKEN_GRID})
    hints: ClassVar[Mapping[Needs, str]] = {
        Needs.TOKEN_GRID: "Patches can be dropped only if all blocks process tokens of one grid (as in ViT and DeiT)."
    }

    def __init__(self, keep_rate: float = 0.5) -> None:
        super().__init__()
        check_keep_rate(keep_rate)
        self.keep_rate = keep_rate

    def _apply(self, model: nn.Module, view: ModelView) -> Applied:
        self.refuse_other_blocks(view, view.blocks, whole=True)
        if any(isinstance(module, TimmPatchDropout | PatchDropoutWithIndices) for module in model.modules()):
            raise UserError(
                f"method {self.name}: the model {view.name} already drops patches. Create the model with"
                " patch_drop_rate=0."
            )
        count = grid_positions(view)
        kept = num_kept(count, self.keep_rate)
        if self.keep_rate < 1 and kept == count:
            height, width = view.image_size
            raise self.setting_error(
                "keep_rate",
                f"low enough to drop at least one patch ({view.name} has {count} patches)",
                f"Use images larger than {height}×{width}.",
            )
        self.refuse_fixed_tokens(view, _run_on_fewer)
        self.give_forwards(model, view, {})
        first = view.blocks[0]
        block = model.get_submodule(first)
        put_around(block, _PatchDropForward(block, view.prefix_tokens, count, self.keep_rate))
        summary = f"{kept} of {count} patch tokens enter the blocks in training"
        return Applied(self.name, (first,), summary=summary)

    def _remove(self, model: nn.Module) -> None:
        take_away(model, _PatchDropForward)
        super()._remove(model)


def _run_on_fewer(block: nn.Module, x: Tensor, prefix: int, inputs: Callable[[int], dict[str, Any]]) -> None:
    """Run a block on N and on N − 1 tokens. Raise ValueError if the block changes the number of tokens."""
    with token_reduction_suspended():
        for given in (x, x[:, :-1]):
            left = block(given, **inputs(given.shape[1] - prefix)).shape[1]
            if left != given.shape[1]:
                raise ValueError(f"a block returns {left} tokens for {given.shape[1]} input tokens")
