"""Faster forms in which a frozen prefix can compute, and the choice of one by measurement.

Nothing in a frozen prefix needs a gradient. So a BatchNorm with frozen statistics is folded into the convolution before
it, which saves a pass over its map, and products run in bfloat16 where the processor has units for them.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from efficient_ft.models.frozen_batch_norm import FROZEN, FrozenBatchNormAct2d

#: A form is taken if its output deviates by at most this (relative, Frobenius norm).
ALLOWED = {"folded": 1e-3, "bf16": 0.05}
#: And if it takes at most this share of the time of the next simpler one.
_WORTH = 0.9
#: Rounds timed, after one that is not.
_ROUNDS = 3


class Form(StrEnum):
    """A form of the prefix: as it is; with folded BatchNorm; that in bfloat16 autocast as well."""

    FP32 = "fp32"
    FOLDED = "folded"
    BF16 = "bf16"


class Folds:
    """Convolutions and the BatchNorm layers with frozen statistics that can be folded into them.

    Args:
        pairs: of a convolution and the layer behind it.
    """

    def __init__(self, pairs: Sequence[tuple[nn.Conv2d, _BatchNorm]]) -> None:
        self._pairs = list(pairs)
        self._folded: list[tuple[Tensor, Tensor]] = []

    def __len__(self) -> int:
        return len(self._pairs)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Fold inside a ``with`` block: without gradients, and only there."""
        if not self._folded or self._folded[0][0].device != self._pairs[0][0].weight.device:
            self._folded = [folded(conv, norm) for conv, norm in self._pairs]
        changed: list[tuple[nn.Module, Any]] = []
        try:
            for (conv, norm), weights in zip(self._pairs, self._folded, strict=True):
                for module, forward in ((conv, _convolve(conv, *weights)), (norm, _rest(norm))):
                    changed.append((module, module.__dict__.get("forward")))
                    module.__dict__["forward"] = forward
            yield
        finally:
            for module, before in reversed(changed):
                if before is None:
                    del module.__dict__["forward"]
                else:
                    module.__dict__["forward"] = before


def find_folds(model: nn.Module, run: Callable[[], Any]) -> Folds:
    """Find the convolutions whose output the next BatchNorm with frozen statistics takes.

    What else uses the output of such a convolution is not seen here: compare the results before a fold is used.

    Args:
        model: has the modules.
        run: a forward pass of `model`, or of a part of it.
    """
    made: dict[int, tuple[nn.Conv2d, Tensor]] = {}  # holds the outputs, so that no other tensor has their ids
    calls: Counter[nn.Module] = Counter()
    pairs: list[tuple[nn.Conv2d, _BatchNorm]] = []

    def after(module: nn.Module, args: Any, output: Tensor) -> None:
        assert isinstance(module, nn.Conv2d)
        calls[module] += 1
        made[id(output)] = module, output

    def before(module: nn.Module, args: Any) -> None:
        assert isinstance(module, _BatchNorm)
        calls[module] += 1
        found = made.get(id(args[0])) if args else None
        if found is not None:
            pairs.append((found[0], module))

    handles = []
    for module in model.modules():
        if type(module) is nn.Conv2d and module.padding_mode == "zeros":
            handles.append(module.register_forward_hook(after))
        elif type(module) in FROZEN.values():
            handles.append(module.register_forward_pre_hook(before))
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    takers = Counter(conv for conv, _ in pairs)
    return Folds([(c, n) for c, n in pairs if calls[c] == calls[n] == takers[c] == 1])


@torch.no_grad()
def folded(conv: nn.Conv2d, norm: _BatchNorm) -> tuple[Tensor, Tensor]:
    """The weight (as the convolution's) and bias (C_out,) of convolution and normalization in one."""
    assert norm.running_mean is not None
    assert norm.running_var is not None
    scale = (norm.running_var.double() + norm.eps).rsqrt()
    if norm.weight is not None:
        scale = scale * norm.weight.double()
    bias = -norm.running_mean.double() if conv.bias is None else conv.bias.double() - norm.running_mean.double()
    bias = bias * scale
    if norm.bias is not None:
        bias = bias + norm.bias.double()
    return (conv.weight * scale[:, None, None, None].to(conv.weight.dtype)), bias.to(conv.weight.dtype)


def _convolve(conv: nn.Conv2d, weight: Tensor, bias: Tensor) -> Callable[[Tensor], Tensor]:
    geometry: tuple[Any, ...] = (conv.stride, conv.padding, conv.dilation, conv.groups)
    return lambda x: F.conv2d(x, weight, bias, *geometry)


def _rest(norm: _BatchNorm) -> Callable[[Tensor], Tensor]:
    """The rest of a folded BatchNorm layer: its activation, if it has one."""
    if isinstance(norm, FrozenBatchNormAct2d):
        return lambda x: norm.act(norm.drop(x))
    return lambda x: x


def autocast_of(form: Form, device: torch.device) -> Any:
    """The autocast of a form, a context manager."""
    return torch.autocast(device.type, dtype=torch.bfloat16) if form is Form.BF16 else nullcontext()


def choose_form(
    run: Callable[[Form], Tensor], forms: Sequence[Form]
) -> tuple[Form, dict[str, float], dict[str, float]]:
    """Time the forms in turn, and choose the fastest that is exact enough.

    Args:
        run: computes the features of a batch in a form.
        forms: from the simplest on, `Form.FP32` first.

    Returns:
        The form; by form the median seconds, and the deviation of the output from that in fp32.
    """
    outputs = {form: run(form).float() for form in forms}
    exact = outputs[Form.FP32]
    size = exact.norm().clamp(min=torch.finfo(exact.dtype).tiny)
    deviation = {form: float((found - exact).norm() / size) for form, found in outputs.items()}
    seconds: dict[Form, list[float]] = {form: [] for form in forms}
    for _ in range(_ROUNDS):
        for form in forms:
            start = time.perf_counter()
            run(form)
            seconds[form].append(time.perf_counter() - start)
    medians = {form: statistics.median(times) for form, times in seconds.items()}
    chosen = Form.FP32
    for form in forms[1:]:
        if deviation[form] <= ALLOWED[form] and medians[form] <= _WORTH * medians[chosen]:
            chosen = form
    return (
        chosen,
        {str(form): round(value, 5) for form, value in medians.items()},
        {str(form): deviation[form] for form in forms},
    )
