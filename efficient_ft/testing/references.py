"""Comparison of a method's logits and gradients with those of its row's reference."""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from efficient_ft.methods.base import Method
from efficient_ft.testing.models import batch_of, model_of
from efficient_ft.testing.rows import Row
from efficient_ft.testing.steps import Gradients

#: A row with a larger `rtol` has a method that rounds values.
_ROUNDS = 1e-6
#: Passes whose mean gradient is compared where a method rounds values.
_SEEDS = 24
#: Gradients smaller than this share of the largest one are compared with that share of it: they may be zero in theory
#: (a bias before a normalization), and then are rounding noise.
_SMALL = {"fp64": 1e-4, "fp32": 1e-2, "bf16": 1e-2}
#: Relative error of a gradient and of its length along the reference that is allowed besides the row's own, and besides
#: 3 × the reference's own error in that precision. Under bf16 a method may choose other values than the reference.
_LOWER = {"fp64": (0.0, 0.0), "fp32": (1e-3, 1e-3), "bf16": (0.25, 0.05)}


@dataclass(frozen=True)
class Case:
    """The circumstances of a forward and backward pass.

    Attributes:
        precision: ``fp64``, ``fp32``, or ``bf16`` (autocast, with weights in fp32).
        training: training mode, or evaluation mode with gradients.
        count: number of images.
        seeds: of the images of each micro-batch; their gradients are added.
        channels_last: the memory format of model and images.
        frozen: every second parameter is frozen.
    """

    precision: str = "fp64"
    training: bool = True
    count: int = 2
    seeds: tuple[int, ...] = (0,)
    channels_last: bool = False
    frozen: bool = False

    def __str__(self) -> str:
        words = [self.precision, "training" if self.training else "evaluation with gradients", f"batch {self.count}"]
        words += [f"{len(self.seeds)} micro-batches"] if len(self.seeds) > 1 else []
        words += ["channels_last"] if self.channels_last else []
        return ", ".join(words + (["half of the parameters frozen"] if self.frozen else []))

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights."""
        return torch.float64 if self.precision == "fp64" else torch.float32


def check_case(row: Row, model: nn.Module, method: Method, name: str, case: Case, *, in_place: bool = False) -> None:
    """Compare logits, gradients and buffers of one optimizer step with those of the row's reference.

    Args:
        row: the row of the method's settings.
        model: the small model `name` with the method applied; a copy of it is run.
        method: the method, in a step that has begun.
        name: of the small model.
        case: the circumstances of the pass.
        in_place: run the model itself: a copy has no hooks on parameters.

    Raises:
        AssertionError: they differ by more than the row allows; the message names the parameter.
    """
    if not in_place:
        model, method = copy.deepcopy((model, method))
    model.to(case.dtype)
    if case.channels_last:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    if case.frozen:
        for parameter in list(model.parameters())[::2]:
            parameter.requires_grad_(False)
    rounds = row.rtol > _ROUNDS
    found: list[Gradients] = []
    expected: Gradients | None = None
    in_lower: Gradients | None = None
    for again in range(_SEEDS if rounds and row.random else 1):
        _clear(model)
        for seed in case.seeds:
            reference = None if again else _expected(row, model, method, name, case, seed, in_double=True)
            if reference is not None:
                expected = _added(expected, reference.gradients)
                if case.precision != "fp64":
                    lower = _expected(row, model, method, name, case, seed, in_double=False)
                    in_lower = _added(in_lower, lower.gradients)
            torch.manual_seed(seed + 100 * again)
            logits = _run(model, method, name, case, seed)
            if reference is not None and case.precision == "fp64":
                _check_logits(logits, reference, model, case)
        found.append({n: None if p.grad is None else p.grad.double() for n, p in model.named_parameters()})
    assert expected is not None
    _check_gradients(row, model, _mean(found), expected, in_lower, case)


@dataclass(frozen=True)
class _Expected:
    logits: Tensor
    gradients: Gradients
    buffers: Mapping[str, Tensor]


def _clear(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = None


def _run(model: nn.Module, method: Method, name: str, case: Case, seed: int) -> Tensor:
    """Add the gradients of a pass to those of the model, and return the logits."""
    model.train(case.training)
    images, labels = _batch(name, case, seed)
    with torch.enable_grad():
        with torch.autocast("cpu", torch.bfloat16, enabled=case.precision == "bf16"):
            logits = model(images)
            loss = F.cross_entropy(logits, labels)
        if case.training:
            loss = method.total_loss(loss)
        loss.backward()
    model.train()
    return logits.detach()


def _batch(name: str, case: Case, seed: int) -> tuple[Tensor, Tensor]:
    images, labels = batch_of(name, case.dtype, seed, case.count)
    return images.contiguous(memory_format=torch.channels_last) if case.channels_last else images, labels


def _expected(
    row: Row, model: nn.Module, method: Method, name: str, case: Case, seed: int, in_double: bool
) -> _Expected:
    """Compute the reference, in float64 or in the case's own precision."""
    dtype = torch.float64 if in_double else case.dtype
    plain = model_of(name)
    if case.channels_last:
        plain.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    buffers = dict(plain.named_buffers())
    with torch.no_grad():
        for n, buffer in model.named_buffers():
            if n in buffers and buffers[n].shape == buffer.shape:
                buffers[n].copy_(buffer)
    plain.to(dtype).train(case.training)
    parameters = {n: p.detach().to(dtype).clone().requires_grad_(p.requires_grad) for n, p in model.named_parameters()}
    images, labels = _batch(name, case, seed)
    images = images.to(dtype)
    torch.manual_seed(seed)
    with torch.enable_grad(), torch.autocast("cpu", torch.bfloat16, enabled=case.precision == "bf16" and not in_double):
        assert row.on_reference is not None, "the row gives no on_reference"
        if row.on_reference == "exact":
            result = functional_call(plain, parameters, (images,))
        else:
            result = row.on_reference(method, plain, dict(parameters), images)
        logits, own_loss = result if isinstance(result, tuple) else (result, None)
        loss = F.cross_entropy(logits, labels)
    loss = loss if own_loss is None else loss + own_loss
    loss.backward()
    return _Expected(logits.detach(), {n: p.grad for n, p in parameters.items()}, dict(plain.named_buffers()))


def _check_logits(logits: Tensor, reference: _Expected, model: nn.Module, case: Case) -> None:
    torch.testing.assert_close(
        logits, reference.logits, rtol=1e-8, atol=1e-9, msg=lambda text: f"logits ({case}): {text}"
    )
    for name, buffer in model.named_buffers():
        expected = reference.buffers.get(name)
        if expected is not None and expected.shape == buffer.shape:
            torch.testing.assert_close(
                buffer, expected, rtol=1e-8, atol=1e-9, msg=functools.partial("buffer {} ({}): {}".format, name, case)
            )


def _check_gradients(
    row: Row, model: nn.Module, found: Gradients, expected: Gradients, in_lower: Gradients | None, case: Case
) -> None:
    """Compare the gradients of every parameter, each by its own norm."""
    trains = {n for n, p in model.named_parameters() if p.requires_grad}
    rounds = row.rtol > _ROUNDS
    small = max(_SMALL[case.precision], 1e-2 if rounds else 0) * _largest(expected)
    of_precision = _LOWER[case.precision]
    wrong = []
    for name, g in found.items():
        if name not in trains:
            assert g is None, f"{name} is frozen, but has a gradient ({case})"
            continue
        reference = expected[name]
        zeros = torch.zeros_like(model.get_parameter(name), dtype=torch.float64)
        g, reference = zeros if g is None else g, zeros if reference is None else reference
        size = max(reference.norm().item(), small)
        error = (g - reference).norm().item() / size if size else g.norm().item()
        lower = None if in_lower is None else in_lower[name]
        own = 0.0 if lower is None or not size else (lower.double() - reference).norm().item() / size
        allowed, bias = (
            row.rtol * share + least + 3 * own for share, least in zip((1, 0.5), of_precision, strict=True)
        )
        scale = (g * reference).sum().item() / reference.square().sum().item() if reference.any() else 1.0
        if not error <= allowed or (reference.norm() > small and not abs(scale - 1) <= bias):
            wrong.append((name, error, allowed, scale))
    worst = sorted(wrong, key=lambda x: -x[1])
    assert not wrong, f"{len(wrong)} gradients differ from the reference ({case}): " + "; ".join(
        f"{name}: relative error {error:.2g} (allowed {allowed:.2g}), {scale:.3g} × the reference along it"
        for name, error, allowed, scale in worst[:3]
    )


def _largest(gradients: Gradients) -> float:
    return max((g.norm().item() for g in gradients.values() if g is not None), default=0.0)


def _added(total: Gradients | None, more: Gradients) -> Gradients:
    if total is None:
        return more
    pairs = {n: (total[n], g) for n, g in more.items()}
    return {n: b if a is None else a if b is None else a + b for n, (a, b) in pairs.items()}


def _mean(found: list[Gradients]) -> Gradients:
    def mean(each: list[Tensor | None]) -> Tensor | None:
        some = [g for g in each if g is not None]
        return torch.stack(some).sum(0) / len(each) if some else None

    return {n: mean([gradients[n] for gradients in found]) for n in found[0]}
