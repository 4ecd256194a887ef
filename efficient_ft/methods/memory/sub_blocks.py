"""Transformer blocks whose attention and feed-forward network run as chains of packed operations.

timm's pre-norm block consists of two halves: ``x + attention(norm(x))`` and ``x + mlp(norm(x))``. A half with the usual
layers runs as one autograd function (`efficient_ft.ops.saving.chains`). Another half runs in the mode
`PackedOperations`, with the same results.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from timm.layers import Attention, Mlp
from timm.layers.norm import LayerNorm
from timm.models.vision_transformer import Block
from torch import Tensor, nn
from torch._C import _len_torch_function_stack
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules.module import _has_any_global_hook

from efficient_ft.ops.saving import PackingState, Policy
from efficient_ft.ops.saving.chains import AttentionChain, Chain, FeedForwardChain, supports_plain

#: Settings of the normalization, settings of the operations between the linear layers, and parameters of a chain.
_Layers = tuple[tuple[Any, ...], Any, tuple[Tensor | None, ...]]
#: Function that returns a packing mode.
_Mode = Callable[[], AbstractContextManager[Any]]


class PackedBlock:
    """Forward pass of a usual block (see `is_usual`) in which tensors are packed.

    Args:
        block: Block of timm.
        policy: Storage format of each kind of tensor.
        state: Packing state that persists between steps.
        heads: Number of attention heads that have separate ranges.
    """

    def __init__(self, block: nn.Module, policy: Policy, state: PackingState, heads: int | None) -> None:
        self._block, self._state, self._heads = block, state, heads
        self._plain_attention = policy.plain_attention
        self._attention = AttentionChain(policy, "norm1", "attn.qkv", "attn", "attn.proj")
        self._feed_forward = FeedForwardChain(policy, "norm2", "mlp.fc1", "mlp.act", "mlp.fc2")

    @staticmethod
    def is_usual(module: nn.Module, policy: Policy) -> bool:
        """Return True if the module is a pre-norm block of timm, and chains support the policy."""
        return type(module) is Block and not policy.forward

    def __call__(self, x: Any, begin: Callable[[], tuple[str, _Mode]]) -> Tensor | None:
        """Run the block on x (B, N, C). Return None if neither half can run as a chain.

        `begin` starts a call of the part. It returns the name of the part for this call, and a function that returns a
        packing mode for layers that are not part of a chain.
        """
        if (
            type(x) not in (Tensor, FakeTensor)
            or x.dim() != 3
            or _len_torch_function_stack()
            or self._state.dense is not None
            or _has_any_global_hook()
            or (torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float32)
        ):
            return None
        parts: dict[str, Any] = self._block._modules
        attention, feed_forward = self._attention_layers(parts, x), self._feed_forward_layers(parts, x)
        if attention is None and feed_forward is None:
            return None
        region, mode = begin()
        x = x + self._half(self._attention, attention, x, "1", parts["attn"], region, mode)
        # The second half may compute gradients although the first half does not.
        return x + self._half(self._feed_forward, feed_forward, x, "2", parts["mlp"], region, mode)

    def _half(
        self, chain: Chain, layers: _Layers | None, x: Tensor, number: str, inner: nn.Module, region: str, mode: _Mode
    ) -> Tensor:
        """Return ``drop_path(ls(inner(norm(x))))``, which a block adds to x."""
        parts: dict[str, Any] = self._block._modules
        norm, scale, drop_path = (parts[f"{name}{number}"] for name in ("norm", "ls", "drop_path"))
        if layers is None:
            with mode():
                y: Tensor = drop_path(scale(inner(norm(x))))
            return y
        of_norm, settings, parameters = layers
        y = chain(self._state, region, self._heads, of_norm, settings, x, *parameters)
        if _is_usual(scale, nn.Identity) and _is_usual(drop_path, nn.Identity):
            return y
        with mode():
            z: Tensor = drop_path(scale(y))
        return z

    def _attention_layers(self, parts: dict[str, Any], x: Tensor) -> _Layers | None:
        norm, attention = parts["norm1"], parts["attn"]
        if not _is_usual_norm(norm) or not _is_usual(attention, Attention):
            return None
        of: dict[str, Any] = attention._modules
        qkv, proj, heads, dim = of["qkv"], of["proj"], attention.num_heads, attention.head_dim
        if (
            not (_is_usual(qkv, nn.Linear) and _is_usual(proj, nn.Linear))
            or not all(_is_usual(of[name], nn.Identity) for name in ("q_norm", "k_norm", "norm"))
            or not all(_is_off(of[name]) for name in ("attn_drop", "proj_drop"))
            or of.get("gate") is not None
            or not attention.fused_attn
            or not _trains(norm, x)
            or (self._plain_attention and not supports_plain(x, heads, dim))
        ):
            return None
        of_norm = norm.normalized_shape, norm.eps
        return of_norm, (heads, dim), (*_parameters(norm), *_parameters(qkv), *_parameters(proj))

    def _feed_forward_layers(self, parts: dict[str, Any], x: Tensor) -> _Layers | None:
        norm, mlp = parts["norm2"], parts["mlp"]
        if not _is_usual_norm(norm) or not _is_usual(mlp, Mlp):
            return None
        of: dict[str, Any] = mlp._modules
        first, second, act = of["fc1"], of["fc2"], of["act"]
        if (
            not (_is_usual(first, nn.Linear) and _is_usual(second, nn.Linear) and _is_usual(act, nn.GELU))
            or not _is_usual(of["norm"], nn.Identity)
            or not all(_is_off(of[name]) for name in ("drop1", "drop2"))
            or not _trains(norm, x)
        ):
            return None
        of_norm = norm.normalized_shape, norm.eps
        return of_norm, act.approximate, (*_parameters(norm), *_parameters(first), *_parameters(second))


def _is_usual(module: nn.Module, *classes: type[nn.Module]) -> bool:
    """Return True if a module has one of these classes, and neither a replaced forward method nor hooks."""
    return (
        type(module) in classes
        and "forward" not in module.__dict__
        and not module._forward_hooks
        and not module._forward_pre_hooks
        and not module._backward_hooks
        and not module._backward_pre_hooks
    )


def _is_usual_norm(norm: nn.Module) -> bool:
    return _is_usual(norm, nn.LayerNorm, LayerNorm) and not getattr(norm, "_fast_norm", False)


def _is_off(dropout: nn.Module) -> bool:
    return _is_usual(dropout, nn.Dropout) and not (dropout.training and dropout.p)


def _trains(norm: nn.Module, x: Tensor) -> bool:
    """Return True if the output of a normalization requires a gradient, as chains assume."""
    return x.requires_grad or any(p is not None and p.requires_grad for p in _parameters(norm))


def _parameters(layer: Any) -> tuple[Tensor | None, Tensor | None]:
    return layer.weight, layer.bias
