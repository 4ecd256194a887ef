"""Block checkpointing: save only the inputs of blocks, and recompute the blocks in the backward pass.

Source: Chen, Xu, Zhang, Guestrin, "Training Deep Nets with Sublinear Memory Cost", 2016. The quantization of the inputs
is not part of the paper.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from efficient_ft.methods.base import Applied
from efficient_ft.methods.checks import blocks_at, check_choice, check_indices
from efficient_ft.methods.declarations import Needs
from efficient_ft.methods.forwards import put_around
from efficient_ft.methods.memory.base import MemoryForward, MemoryMethod
from efficient_ft.methods.registry import register
from efficient_ft.methods.summary import are, ranges
from efficient_ft.models.view import ModelView, Reason, Skipped
from efficient_ft.ops.image_size import ImageSize, Size, image_size_of, restore_image_size
from efficient_ft.ops.recompute import recompute
from efficient_ft.ops.saving import PackingState
from efficient_ft.ops.storage import Dense, EightBits, GroupBits, Half, PackContext, Packer
from efficient_ft.ops.tokens import Tokens, attach_tokens, pop_tokens

#: Mapping from values of `Checkpointing.input_dtype` to the storage formats of the inputs of blocks.
INPUT_DTYPES: dict[str, Packer] = {
    "same": Dense(),
    "bf16": Half(torch.bfloat16),
    "int8": EightBits(),
    "int4": GroupBits(4),
}


class _RecomputedForward(MemoryForward):
    """Forward pass that saves only the input of the module in training."""

    recomputes = True

    def __init__(self, module: nn.Module, name: str, packer: Packer, packing: PackingState) -> None:
        super().__init__(module)
        self.name, self.packer, self.packing = name, packer, packing

    @torch.compiler.disable  # The forward pass also runs inside the backward pass.
    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        # Some networks pass the input of a block by name.
        by_name = "" if arguments else next(name for name, value in keywords.items() if isinstance(value, Tensor))
        x, *others = arguments or (keywords.pop(by_name),)
        module = self.module
        modules = _modules(module)
        parameters = _trained_parameters(modules)
        records = torch.is_grad_enabled() and (x.requires_grad or parameters)
        if not module.training or not records or not x.numel():
            return self._inside(by_name, x, *others, **keywords)
        self.refuse_recomputation(Checkpointing.name)
        packing = self.packing
        name = packing.begin_call(self.name)
        place = PackContext(name, x.shape[0], packing.ranges, packing.overflow, noise=packing.noise)
        run = partial(self._run, modules, image_size_of(x), by_name)
        x, tokens = pop_tokens(x)
        return recompute(run, x, (tokens, *others), keywords, parameters, self.packer, place)

    def _run(
        self,
        modules: list[nn.Module],
        size: tuple[ImageSize, Size] | None,
        by_name: str,
        x: Tensor,
        tokens: Tokens | None,
        *args: Any,
        **keywords: Any,
    ) -> Any:
        x = attach_tokens(x, tokens)
        if not torch.is_grad_enabled():  # This is the first run, in the forward pass.
            return self._inside(by_name, x, *args, **keywords)
        self.packing.last.in_backward = True
        restore_image_size(size)
        # The recomputation must not update running statistics again, because autograd has already saved these tensors.
        moving = [m for m in modules if isinstance(m, nn.modules.batchnorm._BatchNorm) and m.training]
        before = [(m.momentum, m.num_batches_tracked) for m in moving]
        counts = [None if count is None else count.clone() for _, count in before]
        for m in moving:
            m.momentum = 0.0
        try:
            return self._inside(by_name, x, *args, **keywords)
        finally:
            # The count is restored instead of decremented, because a BatchNorm with a replaced forward pass may not
            # increase the count.
            for m, (momentum, counter), count in zip(moving, before, counts, strict=True):
                m.momentum = momentum
                if counter is not None and count is not None:
                    counter.copy_(count)

    def _inside(self, by_name: str, x: Tensor, *args: Any, **keywords: Any) -> Any:
        """Run the inner forward pass. x is passed by name unless `by_name` is empty."""
        if by_name:
            keywords[by_name] = x
            return self.within(*args, **keywords)
        return self.within(x, *args, **keywords)


def _modules(module: nn.Module) -> list[nn.Module]:
    """Return `module` and its submodules. In every step, ``module.modules()`` would take longer than an operation."""
    found: dict[nn.Module, None] = {module: None}
    queue = [module]
    for m in queue:
        for child in m._modules.values():
            if child is not None and child not in found:
                found[child] = None
                queue.append(child)
    return queue


def _trained_parameters(modules: list[nn.Module]) -> list[nn.Parameter]:
    """Return the parameters of modules that require a gradient. Shared parameters appear once."""
    found = {id(p): p for m in modules for p in m._parameters.values() if p is not None and p.requires_grad}
    return list(found.values())


@register
class Checkpointing(MemoryMethod):
    """Save only the input of each block, and recompute the forward pass of the block in the backward pass.

    If the block is a list of an attention module and a feed-forward network, the two modules are recomputed separately.
    Gradients are exact if ``input_dtype=same``. The forward pass of each recomputed block runs twice. Inputs cannot be
    pruned, because a block that is recomputed from a pruned input has a different gradient.

    Args:
        blocks: indices of the blocks to recompute, counted from 0. Negative indices count from the end. If None, all
            blocks are recomputed.
        input_dtype: storage format of the input of a block: ``same`` (dtype of the input), ``bf16``, ``int8`` (with one
            running range), or ``int4`` (with a minimum and a step for each group of 64 values, as in `LowBit`).

    Raises:
        SettingError: If a setting is invalid. Also raised by `apply` if a block index is out of range.
        UserError: Raised by `apply` if the model's blocks are not recognized.
    """

    name = "checkpointing"
    needs = frozenset({Needs.BLOCKS})

    def __init__(self, blocks: list[int] | None = None, input_dtype: Literal["same", "bf16", "int8", "int4"] = "same"):
        super().__init__()
        if blocks is not None:
            check_indices("blocks", blocks, "[0,1,2]", do="null means all blocks.")
        check_choice("input_dtype", input_dtype, INPUT_DTYPES)
        self.blocks, self.input_dtype = None if blocks is None else list(blocks), input_dtype
        if input_dtype not in ("int8", "int4"):
            self.libraries = ()

    def _apply(self, model: nn.Module, view: ModelView) -> Applied:
        names = view.blocks
        if self.blocks is not None:
            names = blocks_at(view, self.full_name("blocks"), self.blocks, once=False)
        packer, packing = INPUT_DTYPES[self.input_dtype], self._begin()
        for name in (unit for block in names for unit in view.called_modules(block)):
            module = model.get_submodule(name)
            put_around(module, _RecomputedForward(module, name, packer, packing))
        skipped = {block: Skipped(Reason.NOT_CHOSEN) for block in view.blocks if block not in names}
        every = "the only block" if len(names) == 1 else f"all {len(names)} blocks"
        which = f"{ranges(names) if skipped else every} {are(len(names))}"
        return Applied(self.name, names, skipped, summary=f"{which} recomputed in the backward pass")
