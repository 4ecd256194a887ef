"""Faster ways to compute a frozen prefix, and the selection of the fastest way.

A frozen prefix can be computed faster because it does not require gradients. Folding a BatchNorm with frozen statistics
into the preceding convolution saves a pass over the feature map. On processors with bfloat16 units, matrix products can
run in bfloat16.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from enum import StrEnum
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from efficient_ft.models.frozen_batch_norm import FROZEN, FrozenBatchNormAct2d

#: For each form, the maximum relative deviation (Frobenius norm) of its output from the output in fp32.
ALLOWED = {"folded": 1e-3, "bf16": 0.05}
#: A form is selected only if its time is at most this fraction of the time of the best simpler form.
_WORTH = 0.9
#: Number of timed rounds, after one warm-up round.
_ROUNDS = 3


class Form(StrEnum):
    """The way to compute a prefix: unchanged, with folded BatchNorm, or with folded BatchNorm and bfloat16 autocast."""

    FP32 = "fp32"
    FOLDED = "folded"
    BF16 = "bf16"


@contextmanager
def replaced_forwards(forwards: Iterable[tuple[nn.Module, Callable[..., Any]]]) -> Iterator[None]:
    """Context manager that replaces the forward functions of modules."""
    changed: list[tuple[nn.Module, Any]] = []
    try:
        for module, forward in forwards:
            changed.append((module, module.__dict__.get("forward")))
            module.__dict__["forward"] = forward
        yield
    finally:
        for module, before in reversed(changed):
            if before is None:
                del module.__dict__["forward"]
            else:
                module.__dict__["forward"] = before


class Folds:
    """Pairs of a convolution and a BatchNorm layer with frozen statistics that can be folded into the convolution."""

    def __init__(self, pairs: Sequence[tuple[nn.Conv2d, _BatchNorm]]) -> None:
        self._pairs = list(pairs)
        self._folded: list[tuple[Tensor, Tensor]] = []

    def __len__(self) -> int:
        return len(self._pairs)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Context manager that makes the model run with folded layers. Gradients must be disabled."""
        if not self._folded or self._folded[0][0].device != self._pairs[0][0].weight.device:
            self._folded = [folded(conv, norm) for conv, norm in self._pairs]
        forwards: list[tuple[nn.Module, Callable[..., Any]]] = []
        for (conv, norm), (weight, bias) in zip(self._pairs, self._folded, strict=True):
            forwards += [(conv, partial(conv._conv_forward, weight=weight, bias=bias)), (norm, _rest(norm))]
        with replaced_forwards(forwards):
            yield


def find_folds(model: nn.Module, run: Callable[[], Any]) -> Folds:
    """Find convolutions whose output is the input of a BatchNorm layer with frozen statistics.

    `run` runs a forward pass of `model` or of a part of it. The search does not detect whether the output of a
    convolution is also used elsewhere. Therefore, compare the outputs with and without folding before using the result.
    """
    made: dict[int, tuple[nn.Conv2d, Tensor]] = {}  # contains the outputs, so that their ids stay unique
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

    with ExitStack() as hooks:
        for module in model.modules():
            if type(module) is nn.Conv2d and module.padding_mode == "zeros":
                hooks.enter_context(module.register_forward_hook(after))
            elif type(module) in FROZEN.values():
                hooks.enter_context(module.register_forward_pre_hook(before))
        run()
    takers = Counter(conv for conv, _ in pairs)
    return Folds([(c, n) for c, n in pairs if calls[c] == calls[n] == takers[c] == 1])


@torch.no_grad()
def folded(conv: nn.Conv2d, norm: _BatchNorm) -> tuple[Tensor, Tensor]:
    """Fold a BatchNorm layer into a convolution.

    Returns:
        The weight, which has the shape of ``conv.weight``, and the bias (C_out,) of the folded convolution.
    """
    assert norm.running_mean is not None
    assert norm.running_var is not None
    scale = (norm.running_var.double() + norm.eps).rsqrt()
    if norm.weight is not None:
        scale = scale * norm.weight.double()
    mean = norm.running_mean.double()
    bias = (-mean if conv.bias is None else conv.bias.double() - mean) * scale
    if norm.bias is not None:
        bias = bias + norm.bias.double()
    weight = conv.weight.to(torch.promote_types(conv.weight.dtype, torch.float32))
    return weight * scale[:, None, None, None].to(weight.dtype), bias.to(weight.dtype)


def _rest(norm: _BatchNorm) -> Callable[[Tensor], Tensor]:
    """Return the part of a BatchNorm layer that is not folded: its dropout and activation, or the identity."""
    if isinstance(norm, FrozenBatchNormAct2d):
        return lambda x: norm.act(norm.drop(x))
    return lambda x: x


def autocast_of(form: Form, device: torch.device) -> Any:
    """Return the autocast context manager for a form."""
    return torch.autocast(device.type, dtype=torch.bfloat16) if form is Form.BF16 else nullcontext()


def choose_form(
    run: Callable[[Form], Tensor], forms: Sequence[Form]
) -> tuple[Form, dict[str, float], dict[str, float]]:
    """Time the forms alternately, and select the fastest form with a sufficiently exact output.

    `run` computes the features of a batch in the given form. `forms` is in order of increasing complexity, starting
    with `Form.FP32`.

    Returns:
        The selected form, the median time of each form in seconds, and the relative deviation of each form from the
        output in fp32.
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
    medians = {form: statistics.median(measured) for form, measured in seconds.items()}
    chosen = Form.FP32
    for form in forms[1:]:
        if deviation[form] <= ALLOWED[form] and medians[form] <= _WORTH * medians[chosen]:
            chosen = form
    times = {str(form): round(value, 5) for form, value in medians.items()}
    return chosen, times, {str(form): deviation[form] for form in forms}
