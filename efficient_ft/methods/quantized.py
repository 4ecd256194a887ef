"""Checks that reject quantized weights (torchao, bitsandbytes) in the layers that a method trains or changes.

The weight of a quantized layer is an integer tensor, or a tensor subclass that implements only some operations.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from efficient_ft.core.errors import UserError

_DO = (
    "Apply the method to a network that is not quantized, dequantize the layer (in torchao: layer.weight ="
    " nn.Parameter(layer.weight.dequantize())), or quantize only layers that the method does not change."
)


def is_quantized(tensor: Tensor) -> bool:
    """Return True if a weight cannot be used like a plain tensor of floating-point numbers."""
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return True
    return not isinstance(tensor, FakeTensor) and type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__


def quantized_parameters(model: nn.Module) -> dict[str, str]:
    """Return a mapping from the full names of quantized parameters to the names of their classes or data types."""
    named = model.named_parameters(remove_duplicate=False)
    return {name: _kind(parameter) for name, parameter in named if is_quantized(parameter)}


def _kind(tensor: Tensor) -> str:
    if tensor.is_floating_point():
        return type(tensor).__name__
    return str(tensor.dtype).removeprefix("torch.")


def refuse_quantized(method: str, model: nn.Module, parameters: Iterable[str], action: str = "change") -> None:
    """Raise UserError if one of `parameters`, which are full names, is quantized.

    Args:
        method: name of the method.
        model: network that contains the parameters.
        parameters: full names of parameters that the method trains or with which it computes.
        action: verb for the message: ``change``, ``train`` or ``adapt``.
    """
    quantized = quantized_parameters(model)
    found = [name for name in parameters if name in quantized]
    if not found:
        return
    layer, _, parameter = found[0].rpartition(".")
    others = f" ({len(found)} layers in total)" if len(found) > 1 else ""
    raise UserError(
        f"method {method}: the layer {layer} is quantized{others}. The method cannot {action} a {parameter} of type"
        f" {quantized[found[0]]}. {_DO}"
    )
