"""Recomputation: of a part of a model only the input is kept, packed, and the part runs again in the backward pass.

Chen, Xu, Zhang, Guestrin, "Training Deep Nets with Sublinear Memory Cost", 2016. torch.utils.checkpoint cannot keep its
input in another form; and it keeps it in a closure, where no one who counts saved tensors sees it.
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
from efficient_ft.ops.packed import load, save
from efficient_ft.ops.packing import Packer, Place


def recompute(
    function: Callable[..., Any],
    x: Tensor,
    others: Sequence[Any],
    keywords: dict[str, Any],
    parameters: Sequence[Tensor],
    packer: Packer,
    place: Place,
) -> Tensor:
    """`function(x, *others, **keywords)`, recomputed in the backward pass from x as `packer` keeps it.

    The forward pass is the plain one; the backward pass differs from it by what `packer` loses of x. Dropout is the
    same in both: the state of the random generators is kept.

    Args:
        function: a module's forward; it returns one tensor.
        x: (B, ...) activations.
        others, keywords: its other arguments. Tensors among them are kept as they are.
        parameters: those inside that need a gradient.

    Raises:
        UserError: the function returns something else than one tensor, or another argument needs a gradient.
    """
    leaves, form = tree_flatten((others, keywords))
    if any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves):
        raise UserError(
            "a block of which another argument needs a gradient cannot be recomputed; leave it out by `blocks`."
        )
    return _Recompute.apply(function, leaves, form, packer, place, x, *parameters)


def runs_again() -> bool:
    """Whether this forward pass is one of the backward pass: a part that is recomputed, here or by torch."""
    return torch._C._current_graph_task_id() != -1


class _Recompute(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        function: Callable[..., Any],
        leaves: list[Any],
        form: TreeSpec,
        packer: Packer,
        place: Place,
        x: Tensor,
        *parameters: Tensor,
    ) -> Tensor:
        ctx.state = _RandomState(x.device)
        ctx.autocast = _autocast_of(x.device.type)
        others, keywords = tree_unflatten(leaves, form)
        y = function(x, *others, **keywords)
        if not isinstance(y, Tensor):
            raise UserError(
                f"a block that returns {type(y).__name__} instead of a tensor cannot be recomputed; leave it out by"
                " `blocks`."
            )
        # Tensors go where autograd, and who counts what it keeps, can see them; the rest stays in its place.
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        save(ctx, packer.pack(x, place), *tensors, *parameters)
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
            stack.enter_context(ctx.state.again())
            for autocast in ctx.autocast:
                stack.enter_context(autocast())
            stack.enter_context(torch.enable_grad())
            y = ctx.function(x, *others, **keywords)
        found = list(torch.autograd.grad(y, wanted, g, allow_unused=True))
        g_x = found.pop(0) if ctx.needs_input_grad[5] else None
        return None, None, None, None, None, g_x, *found


class _RandomState:
    """The random generators' states, of the CPU and of one device."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.cpu = device, torch.get_rng_state()
        self.cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None

    def again(self) -> Any:
        """A context in which they are as they were, and after which as before it."""
        stack = ExitStack()
        stack.enter_context(torch.random.fork_rng(devices=[self.device] if self.cuda is not None else []))
        torch.set_rng_state(self.cpu)
        if self.cuda is not None:
            torch.cuda.set_rng_state(self.cuda, self.device)
        return stack


def _autocast_of(device: str) -> list[Callable[[], Any]]:
    """What enters the autocast that holds now."""
    if not torch.is_autocast_enabled(device):
        return []
    dtype, cache = torch.get_autocast_dtype(device), torch.is_autocast_cache_enabled()
    return [lambda: torch.autocast(device, dtype, cache_enabled=cache)]
