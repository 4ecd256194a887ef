"""Faster ways to compute a frozen prefix, and the selection of the fastest way.

A frozen prefix can be computed faster because it does not require gradients. Folding a BatchNorm with frozen statistics
into the preceding convolution saves a pass over the feature map. On processors with bfloat16 units, matrix products can
run in bfloat16. On a CPU, oneDNN then computes a layer and the following activation in one pass, weights are converted
and reordered only once, and a batch is processed in parts whose feature maps fit into the cache.

A prefix in one of these forms is not compiled. For EfficientFormer-L1 on an AMD EPYC (Zen 4), compiling with constant
folding took 29 s for the first batch size and 15 s for the second.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from typing import Any

import timm.layers
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from efficient_ft.models.frozen_batch_norm import FROZEN, FrozenBatchNormAct2d
from efficient_ft.models.weight_dtype import stores_bf16

#: For each form, the maximum relative deviation (Frobenius norm) of its output from the output in fp32.
ALLOWED = {"folded": 1e-3, "bf16": 0.05}
#: A form is selected only if its time is at most this fraction of the time of the best simpler form.
_WORTH = 0.9
#: Maximum size in bytes of the widest feature map of a part of a batch.
_PART_BYTES = 8 * 2**20
#: Activations that oneDNN computes in the kernel of the preceding layer, with the arguments of the operation.
_ACTIVATIONS: dict[type | None, tuple[str, list[float], str]] = {
    nn.ReLU: ("relu", [], ""),
    nn.ReLU6: ("hardtanh", [0.0, 6.0], ""),
    nn.SiLU: ("swish", [], ""),
    nn.Hardswish: ("hardswish", [], ""),
    timm.layers.GELU: ("gelu", [], "none"),
}
#: If a run has a lower precision: maximum deviation and maximum time of a form, relative to the unchanged form.
_NOISE, _VETO = 1.1, 1.1
#: Maximum number of timed rounds, after one warm-up round, and the time in seconds after which no round is started.
_ROUNDS, _SECONDS = 3, 3.0


class Form(StrEnum):
    """The way to compute a prefix: unchanged, with folded BatchNorm, or with folded BatchNorm and in bfloat16.

    The unchanged form runs in the precision of the run.
    """

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


@dataclass
class _Chain:
    """A layer, with the BatchNorm layer and the activation that process its output."""

    layer: nn.Conv2d | nn.Linear
    norm: _BatchNorm | None = None
    activation: nn.Module | None = None

    def extend(self, module: nn.Module) -> bool:
        """Add `module`, which processes the output of the chain. Return False if the chain cannot contain it."""
        if self.activation is not None:
            return False
        if not isinstance(module, _BatchNorm):
            self.activation = module
        elif self.norm is None and isinstance(self.layer, nn.Conv2d):
            self.norm = module
            if isinstance(module, FrozenBatchNormAct2d) and type(module.act) is not nn.Identity:
                self.activation = module.act
        else:
            return False
        return True

    def modules(self) -> list[nn.Module]:
        """Return the modules of the chain."""
        return [module for module in (self.layer, self.norm, self.activation) if module is not None]

    @torch.no_grad()
    def forwards(self, dtype: torch.dtype | None) -> dict[nn.Module, Callable[..., Any]]:
        """Return the functions that replace the forward functions of the modules. See `Folds.active` for `dtype`."""
        layer, norm, weight, bias = self.layer, self.norm, self.layer.weight, self.layer.bias
        forwards: dict[nn.Module, Callable[..., Any]] = {}
        if norm is not None:
            assert isinstance(layer, nn.Conv2d)
            weight, bias = folded(layer, norm)
            forwards[norm] = _rest(norm)
        if dtype is None:
            if isinstance(layer, nn.Conv2d) and norm is not None:
                forwards[layer] = partial(layer._conv_forward, weight=weight, bias=bias)
            return forwards
        if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
            run = layer._conv_forward if isinstance(layer, nn.Conv2d) else F.linear
            w, b = weight.to(dtype), None if bias is None else bias.to(dtype)
            forwards[layer] = lambda x: run(x.to(dtype), w, b)
            return forwards
        activation = _activation(self.activation)
        if activation is not None:
            forwards |= dict.fromkeys(self.modules(), lambda x: x)
        constants = weight.to(dtype), bias, activation or ("none", [], "")
        forwards[layer] = _ConvKernel(layer, *constants) if isinstance(layer, nn.Conv2d) else _LinearKernel(*constants)
        return forwards


def _activation(module: nn.Module | None) -> tuple[str, list[float], str] | None:
    """Return the arguments with which oneDNN computes an activation, or None if it cannot compute this activation."""
    if type(module) is nn.GELU:
        return "gelu", [], module.approximate
    return _ACTIVATIONS.get(type(module))


class _ConvKernel:
    """A convolution and an activation as one operation of oneDNN. The weight is stored in the order of the kernel."""

    def __init__(self, conv: nn.Conv2d, weight: Tensor, bias: Tensor | None, activation: tuple[Any, ...]) -> None:
        self._where: Any = conv.padding, conv.stride, conv.dilation, conv.groups
        self._weight, self._bias, self._activation = weight, bias, activation

    def __call__(self, x: Tensor) -> Tensor:
        x = x.to(self._weight.dtype)
        if self._weight.layout is torch.strided:
            reorder: Any = torch._C._nn.mkldnn_reorder_conv2d_weight  # the order depends on the size of the images
            self._weight = reorder(self._weight.to_mkldnn(), *self._where, list(x.shape))
        y: Tensor = torch.ops.mkldnn._convolution_pointwise(
            x, self._weight, self._bias, *self._where, *self._activation
        )
        return y


class _LinearKernel:
    """A linear layer and an activation as one operation of oneDNN. The weight is stored in the order of the kernel."""

    def __init__(self, weight: Tensor, bias: Tensor | None, activation: tuple[Any, ...]) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight)
        self._dtype, self._bias, self._activation = weight.dtype, bias, activation

    def __call__(self, x: Tensor) -> Tensor:
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x.to(self._dtype), self._weight, self._bias, *self._activation)
        return y


class Folds:
    """Layers of a prefix that run together with the BatchNorm layers and activations that process their output.

    Args:
        chains: Layers, each with the modules that process its output.
        widest: Maximum number of values per image in the output of a layer.
    """

    def __init__(self, chains: Sequence[_Chain], widest: int) -> None:
        self._chains, self._widest = list(chains), widest
        self._forwards: list[tuple[nn.Module, Callable[..., Any]]] = []
        self._made: Any = None

    def __len__(self) -> int:
        return sum(chain.norm is not None for chain in self._chains)

    @contextmanager
    def active(self, dtype: torch.dtype | None = None) -> Iterator[None]:
        """Context manager that makes the model run with folded layers. Gradients must be disabled.

        Args:
            dtype: Data type in which the layers run. Their weights are converted once, and on a CPU, activations run in
                the kernel of the preceding layer. If None, BatchNorm is folded and nothing else changes.
        """
        modules = [module for chain in self._chains for module in chain.modules()]
        tensors = [tensor for m in modules for tensor in (*m.parameters(recurse=False), *m.buffers(recurse=False))]
        made = dtype, [(tensor.device, tensor._version) for tensor in tensors]
        if made != self._made:  # the model was moved or changed, or the form differs
            self._forwards = [pair for chain in self._chains for pair in chain.forwards(dtype).items()]
            self._made = made
        with replaced_forwards(self._forwards):
            yield

    def parts(self, images: Tensor) -> Sequence[Tensor]:
        """Split images (B, C, H, W) into parts whose feature maps in bfloat16 fit into the cache of a CPU."""
        if images.device.type != "cpu":
            return [images]
        return images.chunk(max(1, -(-len(images) * self._widest * 2 // _PART_BYTES)))


def find_folds(model: nn.Module, run: Callable[[], Tensor]) -> Folds:
    """Find layers whose output is the input of a BatchNorm layer with frozen statistics or of an activation.

    `run` runs a forward pass of `model` or of a part of it with one image, and returns the output. If the output of a
    layer is also used elsewhere, the output of `run` changes. In this case, activations remain separate, or also
    BatchNorm layers.
    """
    ends: dict[int, tuple[_Chain, Tensor, int]] = {}  # contains the outputs, so that their ids stay unique
    entered: dict[nn.Module, _Chain | None] = {}
    calls: Counter[nn.Module] = Counter()
    chains: list[_Chain] = []
    widest = 0

    def before(module: nn.Module, args: Any) -> None:
        chain, _, version = ends.get(id(args[0]) if args else 0, (None, None, 0))
        entered[module] = chain if chain is not None and args[0]._version == version else None

    def after(module: nn.Module, args: Any, output: Tensor) -> None:
        nonlocal widest
        calls[module] += 1
        chain = entered[module]
        if isinstance(module, nn.Conv2d | nn.Linear):
            widest, chain = max(widest, output.numel()), _Chain(module)
            chains.append(chain)
        elif chain is None or not chain.extend(module):
            return
        ends[id(output)] = chain, output, output._version

    # Weights that are stored in bfloat16 can only be compared in bfloat16.
    dtype, limit = (torch.bfloat16, ALLOWED["bf16"]) if stores_bf16(model) else (None, ALLOWED["folded"])
    with torch.no_grad(), torch.autocast(next(model.parameters()).device.type, enabled=False):
        with ExitStack() as hooks:
            for module in model.modules():
                if _can_be_combined(module):
                    hooks.enter_context(module.register_forward_pre_hook(before))
                    hooks.enter_context(module.register_forward_hook(after))
            exact = run()
        once = [chain for chain in chains if all(calls[module] <= 1 for module in chain.modules())]
        for found in (once, [replace(chain, activation=None) for chain in once], [_Chain(c.layer) for c in once]):
            folds = Folds(found, widest)
            with (
                suppress(RuntimeError),
                folds.active(dtype or exact.dtype),
            ):  # some processors lack some kernels of oneDNN
                if relative_deviation(run(), exact) <= limit:
                    return folds
    return Folds([], widest)


def _can_be_combined(module: nn.Module) -> bool:
    """Return True if a chain can contain `module`.

    Methods may have replaced the class or the forward function only by one with the attribute `same_values`. A method
    that is bound to the module itself was assigned by another library and can compute other values.
    """
    forward, kind = vars(module).get("forward"), type(module)
    own = getattr(forward, "__self__", forward)
    if forward is not None and (own is module or not getattr(own, "same_values", False)):
        return False
    if kind in FROZEN.values() or _activation(module) is not None:
        return True
    if isinstance(module, nn.Conv2d) and (module.padding_mode != "zeros" or isinstance(module.padding, str)):
        return False
    return kind in (nn.Conv2d, nn.Linear) or (
        isinstance(module, nn.Conv2d | nn.Linear) and getattr(kind, "same_values", False)
    )


def relative_deviation(found: Tensor, exact: Tensor) -> float:
    """Return the relative deviation (Frobenius norm) of `found` from `exact`."""
    size = exact.float().norm().clamp(min=torch.finfo(torch.float32).tiny)
    return float((found.float() - exact.float()).norm() / size)


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


def choose_form(
    run: Callable[[Form], Tensor], forms: Sequence[Form], exact: Tensor | None = None
) -> tuple[Form, dict[str, float], dict[str, float]]:
    """Time the forms alternately, and select the fastest form with a sufficiently exact output.

    Args:
        run: Function that computes the features of a batch in the given form.
        forms: Forms in order of increasing complexity, starting with `Form.FP32`.
        exact: Output in fp32, if `run` computes `Form.FP32` in a lower precision. Another form may then deviate as much
            as `Form.FP32`. It is selected unless it is clearly slower, so that noise in the times does not change the
            results of a run. If None, `Form.FP32` is exact.

    Returns:
        The selected form, the shortest time of each form in seconds, and the relative deviation of each form from the
        output in fp32.
    """
    outputs = {form: run(form) for form in forms}
    reference = outputs[Form.FP32] if exact is None else exact
    deviation = {form: relative_deviation(output, reference) for form, output in outputs.items()}
    seconds: dict[Form, list[float]] = {form: [] for form in forms}
    for _ in range(_ROUNDS):
        for form in forms:
            start = time.perf_counter()
            run(form)
            seconds[form].append(time.perf_counter() - start)
        if sum(map(sum, seconds.values())) > _SECONDS:
            break
    shortest = {form: min(measured) for form, measured in seconds.items()}
    chosen = Form.FP32
    for form in forms[1:]:
        allowed, worth = ALLOWED[form], _WORTH
        if exact is not None:
            allowed, worth = _NOISE * deviation[Form.FP32], _VETO
        if deviation[form] <= allowed and shortest[form] <= worth * shortest[chosen]:
            chosen = form
    times = {str(form): round(value, 5) for form, value in shortest.items()}
    return chosen, times, {str(form): deviation[form] for form in forms}
