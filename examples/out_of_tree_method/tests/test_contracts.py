"""Check every contract of efficient-ft for both methods."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import every_nth_method
from every_nth_method import EveryNth, SampledRows
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import linear

from efficient_ft.testing import Instead, MethodContracts, Row


def sampled(method: Any, model: nn.Module, parameters: dict[str, Tensor], images: Tensor) -> Tensor:
    """Run the network with the expected weight gradients of the changed layers, and return the logits."""

    def add(layer: nn.Module, arguments: tuple[Tensor, ...], output: Tensor) -> Tensor:
        (x,), rows = arguments, math.ceil(method.rows * layer.out_features)
        part = x[:, :: method.stride].detach()
        term = output.new_zeros(output.shape)
        term[:, :: method.stride, :rows] = x.shape[1] / part.shape[1] * linear(part, layer.weight[:rows])
        return linear(x, layer.weight.detach(), layer.bias) + term - term.detach()

    if model.training:
        for name in method.applied.touched:
            model.get_submodule(name).register_forward_hook(add)
    return functional_call(model, parameters, (images,))


class TestContracts(MethodContracts):
    rows = {
        "every_nth": Row(
            EveryNth,
            {"n": 2},
            why_no_off="no value of n trains all parameters",
            instead=Instead.SAME_GRADIENTS,
            models=("vit", "resnet"),
            on_reference="exact",
        ),
        "sampled_rows": Row(
            SampledRows,
            {"rows": 0.5, "stride": 2},
            off={"rows": 1.0, "stride": 1},
            models=("vit", "swinv2", "efficientformer"),
            refused={"resnet": "no part of"},
            on_reference=sampled,
        ),
    }
    conf = Path(every_nth_method.__file__).parent / "conf" / "method"
