"""Rep-Net: a few small side modules in parallel with a frozen network, which take its features and add theirs.

Source: Yang, Rakin, Fan, "Rep-Net: Efficient On-Device Learning via Feature Reprogramming", CVPR 2022, in the form in
which "Block Selective Reprogramming" (BSR, CVPR Workshops 2024; its Figure 3 and equation 7) compares itself with it:
a_{i+1} = f_M(a_i) + f_S(a_i), f_M a frozen block of the network, f_S a side module that trains. Also for transformers.

From the papers: six modules in a CNN, working on a downsampled map, their output added to the main stream; three blocks
in a transformer; the head trains with them. No paper says where they are and how large they are. We chose both so that
they fit the costs of BSR's Table 5 (per image: 6.2 GMACs and 9.91 MB for ResNet-50, 5.7 and 40.1 for DeiT-S):

* DeiT-S: side blocks of the network's own form. Three of them make 5.73 GMACs. 40.1 MiB is what three blocks that train
  and the eight frozen ones above the first of them keep by BSR's rule: so the first side block belongs to block 3 (of
  0-11), where BSR's first block is. That the others belong to 7 and 11, as BSR's do, is our choice.
* ResNet-50: TinyTL's module, as wide as its input, with kernels of 5 in four groups, in parallel with the middle block
  of each of six equal runs (1, 4, 6, 9, 12, 14 of 0-15): 6.22 GMACs and 10.0 MiB by TinyTL's rule (`cost.published`).
  They have 50 M parameters. That follows from the table: of modules of this form, kernels up to 7, spread evenly over
  all four stages, none that fit both its columns have fewer than 49 M.

The initialization is also our choice: the sum equals the network's own output. The last normalization of a CNN's module
starts at 0; a transformer's side block is a copy of the block it belongs to, its two last projections start at 0, and
it adds what its branches add.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

from timm.models._efficientnet_blocks import InvertedResidual
from timm.models.resnet import BasicBlock, Bottleneck
from timm.models.vision_transformer import Block
from torch import Tensor, nn

from efficient_ft.core.errors import SettingError, UserError
from efficient_ft.methods.adapters.lite import LiteResidual, refuse_indivisible, stride_of
from efficient_ft.methods.base import Applied, Method, make_trainable, trainable
from efficient_ft.methods.blocks import blocks_at, check_indices
from efficient_ft.methods.declarations import Adds, Axis, Needs
from efficient_ft.methods.forwards import OwnForward, forwards_of, put_around, take_away
from efficient_ft.methods.registry import register
from efficient_ft.models.view import ModelView, Reason, Skipped, parameters_under
from efficient_ft.ops.tokens import attach_tokens, pop_tokens, token_context

#: First and last convolution of the blocks on maps that a side module fits.
_CONVOLUTIONS = {
    BasicBlock: ("conv1", "conv2"),
    Bottleneck: ("conv1", "conv3"),
    InvertedResidual: ("conv_pw", "conv_pwl"),
}


class _SideForward(OwnForward):
    """A block with a parallel `side_module`."""

    def __call__(self, x: Tensor, *others: Any, **keywords: Any) -> Tensor:
        side: Any = self.module.side_module
        y, tokens = pop_tokens(self.within(x, *others, **keywords))
        if isinstance(side, LiteResidual):
            return y + side(x, y.shape[-2:])
        # Only what it adds to the stream: the stream itself is in y.
        x, before = pop_tokens(x)
        with token_context(before):
            return attach_tokens(y + (side(x, *others, **keywords) - x), tokens)


@register
class RepNet(Method):
    """Add side modules in parallel with some blocks of a frozen network; only they and the head train.

    It works in the part of the model that the selection applied before leaves trainable, on blocks of ResNets,
    MobileNets and plain transformers (ViT, DeiT). Modules start at an output of 0 and cannot be merged: exported
    weights hold them under their own names (``….side_module.…``).

    Args:
        blocks: those that get a module, counted from 0 through all stages, negative ones from the end; None: six,
            spread evenly, in a CNN, and three in a transformer.
        kernel_size: side of a CNN's modules' convolutions, odd.
        groups: of these convolutions.

    Raises:
        SettingError: a value outside these, or (when applied) a block outside the model or of another form.
        UserError: when applied: no block of these forms is in the part that trains, channels that do not divide into
            groups, or something else that adapts the model or drops tokens in it.
    """

    name = "repnet"
    axis = Axis.ADAPTERS
    adds = frozenset({Adds.MODULES})
    needs = frozenset({Needs.BLOCKS})
    merges = False

    def __init__(self, blocks: list[int] | None = None, kernel_size: int = 5, groups: int = 4) -> None:
        if blocks is not None:
            check_indices("blocks", blocks, do="null spreads the modules evenly.")
        if type(kernel_size) is not int or kernel_size < 1 or kernel_size % 2 == 0:
            raise SettingError("kernel_size", kernel_size, "an odd integer >= 1")
        if type(groups) is not int or groups not in (1, 2, 4, 8):
            raise SettingError("groups", groups, ["1", "2", "4", "8"])
        self.blocks, self.kernel_size, self.groups = None if blocks is None else list(blocks), kernel_size, groups
        self._before: dict[str, bool] = {}

    def _apply(self, model: nn.Module, view: ModelView) -> Applied:
        chosen, skipped = self._chosen(view)
        sides = {name: self._side(view, name) for name in chosen}
        self._before = trainable(model)
        head = parameters_under(model, view.head)
        make_trainable(model, {name: name in head and before for name, before in self._before.items()})
        for name, side in sides.items():
            block = model.get_submodule(name)
            block.side_module = side.requires_grad_(True)
            put_around(block, _SideForward(block))
        added = tuple(f"{name}.side_module" for name in chosen)
        return Applied(self.name, added, skipped, modules=added)

    def _chosen(self, view: ModelView) -> tuple[list[str], dict[str, Skipped]]:
        """Return the blocks that get a module, in order, and the others with the reason."""
        blocks = {name: view.model.get_submodule(name) for name in view.blocks}
        able = [name for name, block in blocks.items() if _is_token_block(block) or _is_map_block(block)]
        if not able:
            raise UserError(
                f"method {self.name}: {view.name} has no blocks of a form that a side module fits"
                " (those of ResNet, MobileNet, ViT and DeiT have it); use lora or bitfit."
            )
        skipped = dict.fromkeys(blocks, Skipped(Reason.NOT_CHOSEN, "gets no side module"))
        skipped |= {name: Skipped(Reason.OTHER_FORM, "a block of another form") for name in blocks if name not in able}
        train = [name for name in able if any(p.requires_grad for p in blocks[name].parameters())]
        skipped |= {name: Skipped(Reason.FROZEN) for name in able if name not in train}
        if not train:
            raise UserError(
                f"method {self.name}: the blocks of {view.name} are all {Reason.FROZEN.value}; choose full."
            )
        if self.blocks is None:
            n = len(train)
            if _is_token_block(blocks[train[0]]):
                wanted = [train[math.ceil((i + 1) * n / 3) - 1] for i in range(3)]
            else:
                wanted = [train[(2 * i + 1) * n // 12] for i in range(6)]
        else:
            wanted = self._listed(view, able)
        chosen = [name for name in train if name in wanted]
        if not chosen:
            raise UserError(
                f"method {self.name}: blocks={self.blocks} of {view.name} are all {Reason.FROZEN.value}; choose full."
            )
        return chosen, {name: why for name, why in skipped.items() if name not in chosen}

    def _listed(self, view: ModelView, able: Sequence[str]) -> list[str]:
        """Return the names of the blocks listed in the settings."""
        assert self.blocks is not None
        setting = f"method.{self.name}.blocks"
        names = blocks_at(view, setting, self.blocks)
        unable = next((name for name in names if name not in able), None)
        if unable is not None:
            allowed = f"blocks of {view.name} that a side module fits ({', '.join(able)}), not {unable}"
            raise SettingError(setting, self.blocks, allowed)
        return list(names)

    def _side(self, view: ModelView, name: str) -> nn.Module:
        """Return the side module of the block `name`."""
        block: Any = view.model.get_submodule(name)
        if any(forwards_of(module) for module in block.modules()):
            raise UserError(
                f"method {self.name}: another method has changed the forward pass of {name} of {view.name}. Methods"
                " that drop tokens in a block with a side module cannot be stacked with it; others come after it"
                " (apply_methods does so)."
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
        return side.to(first.weight.device, first.weight.dtype).train(block.training)

    def _remove(self, model: nn.Module) -> None:
        """Restore the model's own blocks and names; the head keeps its values, the modules are lost."""
        for module in model.modules():
            if hasattr(module, "side_module"):
                take_away(module, _SideForward)
                del module.side_module
        make_trainable(model, self._before)

    def remove(self, model: nn.Module) -> None:
        super().remove(model)
        self._before = {}


def _is_token_block(block: nn.Module) -> bool:
    """Return True for a block of a plain transformer, with a last projection in both branches."""
    return type(block) is Block and hasattr(block.attn, "proj") and hasattr(block.mlp, "fc2")


def _is_map_block(block: nn.Module) -> bool:
    return type(block) in _CONVOLUTIONS and getattr(block, "conv_s2d", None) is None
