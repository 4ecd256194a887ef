"""Recomputation: a part of a model saves only its packed input and runs again in the backward pass.

Source: Chen, Xu, Zhang, Guestrin, "Training Deep Nets with Sublinear Memory Cost", 2016. `torch.utils.checkpoint` is
not used, because it cannot pack its input. In addition, `torch.utils.checkpoint` stores the input in a closure, where
saved-tensor hooks do not count the input.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from efficient_ft.ops.autocast import current_autocast
from efficient_ft.ops.first_order import first_order
from efficient_ft.ops.saving import load, save
from efficient_ft.ops.storage import PackContext, Packer


def recompute(
    function: Callable[..., Any],
    x: Tensor,
    others: Sequence[Any],
    keywords: dict[str, Any],
    parameters: Sequence[Tensor],
    packer: Packer,
    context: PackContext,
) -> Any:
    """Return `function(x, *others, **keywords)`, and recompute the result in the backward pass from the packed x.

    The forward pass uses the original x, and the recomputation uses the unpacked x. The states of the random number
    generators are restored before the recomputation, so that dropout is the same in both passes.

    Args:
        function: Forward method of a module, which returns a tensor, or a tuple, list or dictionary of tensors.
        x: Activations, (B, ...).
        others, keywords: Other arguments of `function`. Tensors in these arguments are saved unchanged and receive
            gradients.
        parameters: Parameters that `function` uses and that require a gradient.
        packer: Packer for x.
        context: Context in which x is packed.
    """
    leaves, form = tree_flatten((others, keywords))
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    # Tensors are passed as separate arguments, so that autograd tracks the tensors. `fixed` contains all other leaves.
    fixed = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    at = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]

    # If no argument is a tensor, the arguments are passed unchanged. Tensors must not be referenced here, because
    # autograd saves them.
    plain = None if tensors else (others, keywords)

    def with_tensors(tensors: Sequence[Tensor]) -> Any:
        arguments = list(fixed)
        for i, tensor in zip(at, tensors, strict=True):
            arguments[i] = tensor
        return tree_unflatten(arguments, form)

    def call(x: Tensor, *tensors: Tensor) -> tuple[TreeSpec | None, list[Any]]:
        others, keywords = plain or with_tensors(tensors)
        result = function(x, *others, **keywords)
        if isinstance(result, Tensor):
            return None, [result]
        results, result_form = tree_flatten(result)
        return result_form, results

    result_form, *results = _Recompute.apply(call, len(tensors), packer, context, x, *tensors, *parameters)
    return results[0] if result_form is None else tree_unflatten(results, result_form)


class _Recompute(torch.autograd.Function):
    """Function that runs `call` without recording a graph, and again with recording in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        call: Callable[..., tuple[TreeSpec | None, list[Any]]],
        count: int,
        packer: Packer,
        context: PackContext,
        x: Tensor,
        *others: Tensor,
    ) -> tuple[Any, ...]:
        """Return the tree structure and the leaves of the result. A single tensor has the structure None.

        The first `count` tensors of `others` are arguments of the function. The remaining tensors are parameters.
        """
        cuda = torch.cuda.get_rng_state(x.device) if x.device.type == "cuda" else None
        ctx.state = x.device, torch.get_rng_state(), cuda
        ctx.autocast = current_autocast(x.device.type)
        form, results = call(x, *others[:count])
        save(ctx, packer.pack(x, context), *others)
        ctx.call, ctx.count, ctx.type = call, count, x.dtype
        return form, *results

    @staticmethod
    @first_order
    def backward(ctx: Any, _: None, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        x, *others = load(ctx)
        x = x.detach().to(ctx.type)
        # The arguments are detached from their graph. The parameters are not detached, because the function references
        # them directly.
        arguments = [x, *(tensor.detach() for tensor in others[: ctx.count])]
        inputs = [*arguments, *others[ctx.count :]]
        needed = ctx.needs_input_grad[4:]
        for tensor, needs in zip(arguments, needed, strict=False):
            tensor.requires_grad_(needs)
        with _restored(*ctx.state), ctx.autocast(), torch.enable_grad():
            _form, results = ctx.call(*arguments)
        recorded = [(y, g) for y, g in zip(results, grads, strict=True) if isinstance(y, Tensor) and y.requires_grad]
        outputs, grad_outputs = zip(*recorded, strict=True)
        wanted = [tensor for tensor, needs in zip(inputs, needed, strict=True) if needs]
        found = iter(torch.autograd.grad(outputs, wanted, grad_outputs, allow_unused=True))
        return None, None, None, None, *(next(found) if needs else None for needs in needed)


@contextmanager
def _restored(device: torch.device, cpu: Tensor, cuda: Tensor | None) -> Iterator[None]:
    """Restore the random number generator states of the CPU and of `device` inside a ``with`` block."""
    now = torch.get_rng_state()
    cuda_now = None if cuda is None else torch.cuda.get_rng_state(device)
    torch.set_rng_state(cpu)
    if cuda is not None:
        torch.cuda.set_rng_state(cuda, device)
    try:
        yield
    finally:
        torch.set_rng_state(now)
        if cuda_now is not None:
            torch.cuda.set_rng_state(cuda_now, device)
