"""Logits in float32 for evaluation in bf16 and fp16.

Under autocast, logits are rounded to 16 bits. The two largest logits of an image can then be equal, so that the
predicted class is arbitrary. In evaluation, the last layer therefore computes in float32. In training, the last layer
uses autocast like all other layers, because rounding its output hardly changes the gradients.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from efficient_ft.methods.forwards import OwnForward, foreign_forward, put_inside, take_away
from efficient_ft.models.tasks import PerTask
from efficient_ft.models.view import view
from efficient_ft.ops.autocast import autocast_disabled


@contextmanager
def last_layer_in_fp32(network: nn.Module) -> Iterator[None]:
    """Compute the last layer of the head of `network` in float32 within the ``with`` block.

    The last layer is the last linear layer or convolution in each module of the head, and in the head of each task.
    Layers whose class or instance replaces the forward pass of `nn.Linear` or `nn.Conv2d` are not changed. Without
    autocast, nothing changes.
    """
    device = next((p.device.type for p in network.parameters()), "cpu")
    layers = _last_layers(network) if torch.is_autocast_enabled(device) else []
    for layer in layers:
        put_inside(layer, _SinglePrecision(layer))
    try:
        yield
    finally:
        for layer in layers:
            take_away(layer, _SinglePrecision)


class _SinglePrecision(OwnForward):
    """Forward pass of a linear layer or a convolution in float32."""

    def __call__(self, x: Tensor) -> Tensor:
        layer = self.module
        assert isinstance(layer, nn.Linear | nn.Conv2d)
        bias = None if layer.bias is None else layer.bias.float()
        with autocast_disabled(x):
            if isinstance(layer, nn.Linear):
                return F.linear(x.float(), layer.weight.float(), bias)
            return layer._conv_forward(x.float(), layer.weight.float(), bias)


def _last_layers(network: nn.Module) -> list[nn.Module]:
    heads = [network.get_submodule(name) for name in view(network).head]
    heads = [part for head in heads for part in (head.values() if isinstance(head, PerTask) else [head])]
    found: list[nn.Module] = []
    for head in heads:
        inside = [m for m in head.modules() if isinstance(m, nn.Linear | nn.Conv2d)]
        plain = (nn.Linear.forward, nn.Conv2d.forward)
        found += [m for m in inside[-1:] if type(m).forward in plain and foreign_forward(m) is None]
    return found
