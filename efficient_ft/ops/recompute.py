"""Recomputation: only the input of a part of a model is kept, packed, and the part runs again in the backward pass.

Source: Chen, Xu, Zhang, Guestrin, "Training Deep Nets with Sublinear Memory Cost", 2016. `torch.utils.checkpoint`
cannot keep its input in another form, and it keeps it in a closure, hidden from the meter of saved tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from efficient_ft.core.errors import UserError
from efficient_ft.ops.autocast import current_autocast
from efficient_ft.ops.packed import load, save
from efficient_ft.ops.packing import PackContext, Packer


def recompute(
    function: Callable[..., Any],
    x: Tensor,
    others: Sequence[Any],
    keywords: dict[str, Any],
    parameters: Sequence[Tensor],
    packer: Packer,
    context: PackContext,
) -> Tensor:
    """Return `function(x, *others, **keywords)`, recomputed in the backward pass from the packed x.

    The forward pass uses x itself, and the recomputed one the unpacked x. Dropout is the same in both: the state of the
    random generators is kept.

    Args:
        function: a module's forward; it returns one tensor.
        x: (B, ...) activations.
        others, keywords: the other arguments of `function`. Tensors in them are kept as they are.
        parameters: the parameters of the part that need a gradient.
        packer: packs x.
        context: in which x is packed.

    Raises:
        UserError: the function does not return a tensor, or another argument needs a gradient.
    """
    leaves, form = tree_flatten((others, keywords))
    if any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves):
        raise UserError(
            "Only the first argument of a recomputed block may need a gradient, and another argument needs one."
            " Leave the block out of `blocks`."
        )
    return _Recompute.apply(function, leaves, form, packer, context, x, *parameters)


class _Recompute(torch.autograd.Function):
    """Runs a function without recording it, and once more, recorded, in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        function: Callable[..., Any],
        leaves: list[Any],
        form: TreeSpec,
        packer: Packer,
        context: PackContext,
        x: Tensor,
        *parameters: Tensor,
    ) -> Tensor:
        ctx.state = _RandomState(x.device)
        ctx.autocast = current_autocast(x.device.type)
        others, keywords = tree_unflatten(leaves, form)
        y = function(x, *others, **keywords)
        if not isinstance(y, Tensor):
            raise UserError(
                f"The output of a recomputed block must be a tensor, got {type(y).__name__}."
                " Leave the block out of `blocks`."
            )
        # Tensors are saved where autograd and the meter can see them; other leaves stay in their positions.
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        save(ctx, packer.pack(x, context), *tensors, *parameters)
        ctx.leaves, ctx.form = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves], form
        ctx.gaps = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        ctx.function, ctx.type = function, x.dtype
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, *tensors = load(ctx)
        leaves, parameters = list(ctx.leaves), tensors[len(ctx.gaps) :]
        for i, tensor in zip(ctx.gaps, tensors, strict=False):
            leaves[i] = tensor
        others, keywords = tree_unflatten(leaves, ctx.form)
        x = x.detach().to(ctx.type).requires_grad_(ctx.needs_input_grad[5])
        wanted = [*([x] if ctx.needs_input_grad[5] else []), *parameters]
        with ExitStack() as stack:
            stack.enter_context(ctx.state.restored())
            stack.enter_context(ctx.autocast())
            stack.enter_context(torch.enable_grad())
            y = ctx.function(x, *others, **keywords)
        found = list(torch.autograd.grad(y, wanted, g, allow_unused=True))
        g_x = found.pop(0) if ctx.needs_input_grad[5] else None
        return None, None, None, None, None, g_x, *found


class _RandomState:
    """The states of the random generators of the CPU and of one device."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.cpu = device, torch.get_rng_state()
        self.cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None

    def restored(self) -> ExitStack:
        """Restore these states inside a ``with`` block, and the current ones at its end."""
        stack = ExitStack()
        stack.enter_context(torch.random.fork_rng(devices=[self.device] if self.cuda is not None else []))
        torch.set_rng_state(self.cpu)
        if self.cuda is not None:
            torch.cuda.set_rng_state(self.cuda, self.device)
        return stack
