"""Rep-Net: add trainable side modules in parallel with some blocks of a frozen network.

Source: Yang, Rakin, Fan, "Rep-Net: Efficient On-Device Learning via Feature Reprogramming", CVPR 2022. The
implementation follows the baseline in "Block Selective Reprogramming" (BSR, CVPR Workshops 2024; Figure 3 and
Equation 7): a_{i+1} = f_M(a_i) + f_S(a_i). Here, f_M is a frozen block of the network, and f_S is a trainable side
module. The BSR paper also applies Rep-Net to transformers. The positions and sizes of the modules are derived from the
costs in Table 5 of the BSR paper (see docs/methods/repnet.md).
"""

from __future__ import annotations

import copy
import math
from typing import Any

from timm.models._efficientnet_blocks import InvertedResidual
from timm.models.resnet import BasicBlock, Bottleneck
from timm.models.vision_transformer import Block
from torch import Tensor, nn

from efficient_ft.core.errors import UserError
from efficient_ft.methods.adapters.lite import LiteResidual, check_lite, refuse_indivisible, stride_of
from efficient_ft.methods.base import Applied, Method
from efficient_ft.methods.checks import blocks_at, check_indices, classes_in_words
from efficient_ft.methods.declarations import Adds, Axis, Needs
from efficient_ft.methods.forwards import OwnForward, forwards_of, put_around, take_away
from efficient_ft.methods.registry import register
from efficient_ft.methods.summary import left, ranges, trained
from efficient_ft.models.trained import make_trainable, trainable
from efficient_ft.models.view import ModelView, Reason, Skipped
from efficient_ft.models.weight_dtype import dtype_of_added
from efficient_ft.ops.tokens import attach_tokens, pop_tokens, token_context

#: Names of the first and the last convolution in each supported type of CNN block.
_CONVOLUTIONS = {
    BasicBlock: ("conv1", "conv2"),
    Bottleneck: ("conv1", "conv3"),
    InvertedResidual: ("conv_pw", "conv_pwl"),
}


class _SideForward(OwnForward):
    """Forward pass that adds the output of a parallel `side_module` to the output of a block."""

    def __call__(self, x: Tensor, *others: Any, **keywords: Any) -> Tensor:
        side: Any = self.module.side_module
        y, tokens = pop_tokens(self.within(x, *others, **keywords))
        if isinstance(side, LiteResidual):
            return y + side(x, y.shape[-2:])
        # Subtract x, because the residual connection of the block has already added x to y.
        x, input_tokens = pop_tokens(x)
        with token_context(input_tokens):
            return attach_tokens(y + (side(x, *others, **keywords) - x), tokens)


@register
class RepNet(Method):
    """Add trainable side modules in parallel with blocks of a frozen network (Rep-Net: Yang et al., CVPR 2022).

    Only the side modules and the head are trained. The blocks of ResNets, MobileNets and plain vision transformers
    (ViT, DeiT) are supported. Frozen blocks receive no side module. The initial output of the side modules is 0. Side
    modules cannot be merged. Exported weights therefore contain the side modules (``….side_module.…``).

    Args:
        blocks: indices of the blocks that receive a side module, counted from 0 across all stages. Negative indices
            count from the end. If None, six blocks of a CNN or three blocks of a transformer receive a side module.
            These blocks are evenly spaced over the trainable blocks.
        kernel_size: kernel size of the first convolution of the side modules in a CNN. Must be odd.
        groups: number of groups of the first convolution of the side modules in a CNN. Must be 1, 2, 4 or 8.

    Raises:
        SettingError: If a setting is out of range. Raised by `apply` if a block index is out of range or repeated, or
            if a block does not support side modules.
        UserError: Raised by `apply` if no supported block is trainable, or if the number of channels of a block in a
            CNN is not a multiple of 8. Also raised if an applied method adds modules or drops tokens in these blocks.
    """

    name = "repnet"
    axis = Axis.ADAPTERS
    adds = frozenset({Adds.MODULES})
    needs = frozenset({Needs.BLOCKS})
    merges = False

    def __init__(self, blocks: list[int] | None = None, kernel_size: int = 5, groups: int = 4) -> None:
        if blocks is not None:
            check_indices("blocks", blocks, do="Use null for evenly spaced blocks.")
        check_lite(kernel_size, groups)
        self.blocks, self.kernel_size, self.groups = None if blocks is None else list(blocks), kernel_size, groups
        self._before: dict[str, bool] = {}

    def _apply(self, model: nn.Module, view: ModelView) -> Applied:
        chosen, skipped = self._chosen(view)
        sides = {name: self._side(view, name) for name in chosen}
        self._before = trainable(model)
        head = view.new_parameters()
        make_trainable(model, {name: name in head and before for name, before in self._before.items()})
        for name, side in sides.items():
            block = model.get_submodule(name)
            block.side_module = side.requires_grad_(True)
            put_around(block, _SideForward(block))
        added = tuple(f"{name}.side_module" for name in chosen)
        others = {name: why for name, why in skipped.items() if why.reason != Reason.NOT_CHOSEN}
        summary = f"the head and the side modules in {ranges(chosen)} are trained: {trained(model)}"
        summary += left(others, "without a side module", "block")
        return Applied(self.name, added, skipped, modules=added, summary=summary)

    def _chosen(self, view: ModelView) -> tuple[list[str], dict[str, Skipped]]:
        """Return the names of the blocks that receive a side module, in model order, and the skipped blocks."""
        blocks = {name: view.model.get_submodule(name) for name in view.blocks}
        able = [name for name, block in blocks.items() if _is_token_block(block) or _is_map_block(block)]
        if not able:
            raise UserError(
                f"method {self.name}: side modules support only the blocks of ResNet, MobileNet, ViT and DeiT. The"
                f" blocks of {view.name} are {classes_in_words(view)}. Use lora or bitfit instead."
            )
        skipped = dict.fromkeys(blocks, Skipped(Reason.NOT_CHOSEN, "no side module: the block is not listed in blocks"))
        skipped |= {
            name: Skipped(Reason.OTHER_FORM, "unsupported type of block") for name in blocks if name not in able
        }
        train = [name for name in able if any(p.requires_grad for p in blocks[name].parameters())]
        skipped |= {name: Skipped(Reason.FROZEN) for name in able if name not in train}
        if not train:
            raise UserError(f"method {self.name}: all blocks of {view.name} are {Reason.FROZEN.value}. Select full.")
        if self.blocks is None:
            n = len(train)
            if _is_token_block(blocks[train[0]]):
                wanted = [train[math.ceil((i + 1) * n / 3) - 1] for i in range(3)]
            else:
                wanted = [train[(2 * i + 1) * n // 12] for i in range(6)]
        else:
            wanted = list(blocks_at(view, self.full_name("blocks"), self.blocks))
            if unable := [name for name in wanted if name not in able]:
                why = f"the block {unable[0]} of {view.name} does not support side modules"
                raise self.setting_error("blocks", f"a list of indices of the blocks {', '.join(able)} ({why})")
        chosen = [name for name in train if name in wanted]
        if not chosen:
            raise UserError(
                f"method {self.name}: all blocks of {view.name} in the list {self.blocks} are {Reason.FROZEN.value}."
                " Select full."
            )
        return chosen, {name: why for name, why in skipped.items() if name not in chosen}

    def _side(self, view: ModelView, name: str) -> nn.Module:
        block: Any = view.model.get_submodule(name)
        if any(not forward.same_values for module in block.modules() for forward in forwards_of(module)):
            raise UserError(
                f"method {self.name}: another method has changed the forward pass of {name} in {view.name}. Methods"
                " that drop or merge tokens cannot be used in a block with a side module. Apply other methods after"
                f" {self.name}, in the same way as apply_methods."
            )
        if _is_token_block(block):
            side = copy.deepcopy(block)
            for last in (side.attn.proj, side.mlp.fc2):
                for parameter in last.parameters():
                    nn.init.zeros_(parameter)
            return side
        first, last = (getattr(block, conv) for conv in _CONVOLUTIONS[type(block)])
        for channels in (first.in_channels, last.out_channels):
            refuse_indivisible(view, self.name, name, channels)
        side = LiteResidual(first.in_channels, last.out_channels, self.kernel_size, self.groups, stride_of(block))
        return side.to(first.weight.device, dtype_of_added(block)).train(block.training)

    def _remove(self, model: nn.Module) -> None:
        take_away(model, _SideForward)
        for module in model.modules():
            if hasattr(module, "side_module"):
                del module.side_module
        make_trainable(model, self._before)


def _is_token_block(block: nn.Module) -> bool:
    """Return True if `block` is a ViT block in which both branches end with a projection."""
    return type(block) is Block and hasattr(block.attn, "proj") and hasattr(block.mlp, "fc2")


def _is_map_block(block: nn.Module) -> bool:
    """Return True if `block` is a supported CNN block without a space-to-depth convolution."""
    return type(block) in _CONVOLUTIONS and getattr(block, "conv_s2d", None) is None
