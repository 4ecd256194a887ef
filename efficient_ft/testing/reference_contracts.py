"""Contracts that compare gradients with a reference and, for the settings `Row.off`, with plain training."""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from efficient_ft.methods.base import Method
from efficient_ft.testing.models import batch_of, model_of
from efficient_ft.testing.rows import SETS_REQUIRES_GRAD, ContractTests, Instead, Row, apply_seeded, on_models
from efficient_ft.testing.snapshots import Lines, traced_lines
from efficient_ft.testing.steps import Gradients, evaluate, gradients, largest_difference, stir, train_a_little, warm_up

#: A method is assumed to round values if the `rtol` of its row is larger than this value.
_ROUNDS = 1e-6
#: Number of passes whose mean gradient is compared if a method rounds values randomly.
_SEEDS = 24
#: Errors are relative to the norm of the gradient, but at least to this fraction of the largest gradient norm. Smaller
#: gradients may be zero in exact arithmetic (for example for a bias before normalization).
_SMALL = {"fp64": 1e-4, "fp32": 1e-2, "bf16": 1e-2}
#: Maximum relative errors of a gradient and of its component along the reference, for each precision. `Row.rtol` (half
#: of `Row.rtol` for the component) and 3 × the error of the reference in this precision are added to each limit. The
#: limits under bf16 are larger, because the method and the reference may select different values.
_LOWER = {"fp64": (0.0, 0.0), "fp32": (1e-3, 1e-3), "bf16": (0.25, 0.05)}
#: Folder of this package.
_PACKAGE = Path(__file__).resolve().parents[1]
#: Later step in which gradients are compared again. Some methods refresh their state every ten steps.
_LATER = 10
#: Import name of this package.
OURS = "efficient_ft"


@dataclass(frozen=True)
class Case:
    """The configuration of a forward and backward pass.

    Attributes:
        precision: ``fp64``, ``fp32``, or ``bf16`` (autocast with fp32 weights).
        training: True for training mode, or False for evaluation mode with gradients.
        count: Number of images.
        seeds: Seeds of the images, one for each micro-batch. The gradients of the micro-batches are added.
        channels_last: True if the model and the images are in channels-last memory format.
        frozen: True if every second parameter is frozen.
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
        """Dtype of the weights."""
        return torch.float64 if self.precision == "fp64" else torch.float32


def check_case(row: Row, model: nn.Module, method: Method, name: str, case: Case, *, in_place: bool = False) -> None:
    """Compare the logits, gradients and buffers of one optimizer step with the reference of `row`.

    Args:
        row: Test row that contains the settings of the method.
        model: The small model `name` to which the method is applied. By default, a copy of this model is run.
        method: The applied method, whose `step_begin` has already been called.
        name: Name of the small model.
        case: Configuration of the pass.
        in_place: If True, run the model itself instead of a copy, because a copy loses the hooks on parameters.

    Raises:
        AssertionError: If a value differs by more than `row` allows. The error message names the parameter.
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
    expected, in_lower = _parameters(model, torch.float64), _parameters(model, case.dtype)
    for again in range(_SEEDS if rounds and row.random else 1):
        model.zero_grad()
        for seed in case.seeds:
            reference = None if again else _expected(row, model, method, name, case, seed, expected)
            if reference is not None and case.precision != "fp64":
                _expected(row, model, method, name, case, seed, in_lower)
            torch.manual_seed(seed + 100 * again)
            logits = _run(model, method, name, case, seed)
            if reference is not None and case.precision == "fp64":
                _check_logits(logits, reference, model, case)
        found.append({n: None if p.grad is None else p.grad.double() for n, p in model.named_parameters()})
    of_lower = None if case.precision == "fp64" else {n: p.grad for n, p in in_lower.items()}
    _check_gradients(row, model, _mean(found), {n: p.grad for n, p in expected.items()}, of_lower, case)


@dataclass(frozen=True)
class _Expected:
    logits: Tensor
    buffers: Mapping[str, Tensor]


def _parameters(model: nn.Module, dtype: torch.dtype) -> dict[str, Tensor]:
    return {n: p.detach().to(dtype).clone().requires_grad_(p.requires_grad) for n, p in model.named_parameters()}


def _run(model: nn.Module, method: Method, name: str, case: Case, seed: int) -> Tensor:
    """Run a forward and a backward pass, which accumulates gradients in the model, and return the logits."""
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
    row: Row, model: nn.Module, method: Method, name: str, case: Case, seed: int, parameters: dict[str, Tensor]
) -> _Expected:
    """Compute the reference in the dtype of `parameters`, and accumulate its gradients in `parameters`."""
    dtype = next(iter(parameters.values())).dtype
    plain = model_of(name)
    if case.channels_last:
        plain.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    buffers = dict(plain.named_buffers())
    with torch.no_grad():
        for n, buffer in model.named_buffers():
            if n in buffers and buffers[n].shape == buffer.shape:
                buffers[n].copy_(buffer)
    plain.to(dtype).train(case.training)
    images, labels = _batch(name, case, seed)
    images = images.to(dtype)
    torch.manual_seed(seed)
    in_bf16 = case.precision == "bf16" and dtype != torch.float64
    with torch.enable_grad(), torch.autocast("cpu", torch.bfloat16, enabled=in_bf16):
        assert row.on_reference is not None, "the row has no on_reference"
        if row.on_reference == "exact":
            result = functional_call(plain, parameters, (images,))
        else:
            result = row.on_reference(method, plain, dict(parameters), images)
        logits, own_loss = result if isinstance(result, tuple) else (result, None)
        loss = F.cross_entropy(logits, labels)
    loss = loss if own_loss is None else loss + own_loss
    loss.backward()
    return _Expected(logits.detach(), dict(plain.named_buffers()))


def _check_logits(logits: Tensor, reference: _Expected, model: nn.Module, case: Case) -> None:
    close = functools.partial(torch.testing.assert_close, rtol=1e-8, atol=1e-9)
    close(logits, reference.logits, msg=lambda text: f"logits ({case}): {text}")
    for name, buffer in model.named_buffers():
        expected = reference.buffers.get(name)
        if expected is not None and expected.shape == buffer.shape:
            close(buffer, expected, msg=functools.partial("buffer {} ({}): {}".format, name, case))


def _check_gradients(
    row: Row, model: nn.Module, found: Gradients, expected: Gradients, in_lower: Gradients | None, case: Case
) -> None:
    """Compare the gradient of every parameter with the reference, relative to the norm of the gradient."""
    trains = {n for n, p in model.named_parameters() if p.requires_grad}
    rounds = row.rtol > _ROUNDS
    largest = max((g.norm().item() for g in expected.values() if g is not None), default=0.0)
    small = max(_SMALL[case.precision], 1e-2 if rounds else 0) * largest
    of_precision = _LOWER[case.precision]
    wrong = []
    for name, g in found.items():
        if name not in trains:
            assert g is None, f"the parameter {name} is frozen, but has a gradient ({case})"
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
        f"{name} has a relative error of {error:.2g} (limit: {allowed:.2g}). The component of the gradient along the"
        f" reference is {scale:.3g} × the reference"
        for name, error, allowed, scale in worst[:3]
    )


def _mean(found: list[Gradients]) -> Gradients:
    def mean(each: list[Tensor | None]) -> Tensor | None:
        some = [g for g in each if g is not None]
        return torch.stack(some).sum(0) / len(each) if some else None

    return {n: mean([gradients[n] for gradients in found]) for n in found[0]}


def _referenced(row: Row) -> tuple[str, ...]:
    """Return the small models on which a row is compared with its reference."""
    return tuple(name for name in row.models if name not in row.unreferenced)


class ReferenceContracts(ContractTests):
    """Contracts that compare the results of a method with a reference and, for `Row.off`, with plain training."""

    @on_models(_referenced)
    def test_gradients_are_those_of_the_reference(self, row: str, name: str) -> None:
        """In training, logits, gradients and buffers equal those of the reference in float64, even in a later step."""
        cases = [Case(), Case(count=1), Case(seeds=(0, 1), count=3), Case(channels_last=True)]
        if self.rows[row].method.axis not in SETS_REQUIRES_GRAD:
            cases.append(Case(frozen=True))
        model, method = self._check(row, name, *cases)
        train_a_little(model, method, name, steps=_LATER)
        method.step_begin(_LATER)
        check_case(self.rows[row], model, method, name, Case(), in_place=True)

    @on_models(_referenced)
    def test_gradients_in_evaluation_are_those_of_the_reference(self, row: str, name: str) -> None:
        """In evaluation mode with gradients, logits and gradients equal those of the reference in float64."""
        self._check(row, name, Case(training=False))

    @on_models(_referenced)
    def test_gradients_in_lower_precision_are_those_of_the_reference(self, row: str, name: str) -> None:
        """In fp32 and under bf16 autocast, the error of gradients is bounded by the rounding error of the reference."""
        self._check(row, name, Case("fp32"), Case("bf16"))

    def _check(self, row: str, name: str, *cases: Case) -> tuple[nn.Module, Method]:
        model, method = apply_seeded(model_of(name), self.rows[row].create())
        stir(model)
        warm_up(model, method, name)
        for case in cases:
            if f"{name}, {case.precision}" not in self.rows[row].unreferenced:
                check_case(self.rows[row], model, method, name, case)
        return model, method

    @on_models(lambda row: row.models if row.off is not None else ())
    def test_off_is_plain_training_and_on_is_not(self, row: str, name: str) -> None:
        """With the settings `Row.off` and without shortcuts, gradients equal those of plain training.

        With the settings of the row, the gradients differ.
        """
        r = self.rows[row]
        plain = gradients(model_of(name), name)
        with _replaced(r.shortcuts):
            model, method = apply_seeded(model_of(name), r.create(**(r.off or {})))
            warm_up(model, method, name)
            assert largest_difference(plain, gradients(model, name)) < 1e-8
        if not r.off:  # the settings of the row already equal plain training
            return
        model, method = self.applied(row, name)
        warm_up(model, method, name)
        assert largest_difference(plain, gradients(model, name)) > 1e-2

    @on_models(lambda row: row.models if row.instead == Instead.SAME_GRADIENTS else ())
    def test_gradients_of_what_trains_are_the_plain_ones(self, row: str, name: str) -> None:
        """If a method selects the trained parameters, the gradients of these parameters are exact."""
        plain = gradients(model_of(name), name)
        model, _ = self.applied(row, name)
        chosen = gradients(model, name)
        trains = {n for n, p in model.named_parameters() if p.requires_grad}
        assert 0 < len(trains) < len(plain)
        assert {n for n, g in chosen.items() if g is not None} == trains
        assert largest_difference({n: plain[n] for n in trains}, {n: chosen[n] for n in trains}) < 1e-10

    @on_models(lambda row: row.models if row.instead == Instead.SAME_OUTPUT else ())
    def test_output_is_unchanged_at_first_and_changed_after_training(self, row: str, name: str) -> None:
        """Adapters do not change the output at initialization, but change the output after training."""
        plain = self.rows[row].initial_model(model_of(name))
        model, method = self.applied(row, name)
        torch.testing.assert_close(evaluate(model, name), evaluate(plain, name), rtol=1e-10, atol=1e-12)
        train_a_little(model, method, name)
        assert (evaluate(model, name) - evaluate(plain, name)).abs().max() > 1e-4

    @on_models(lambda row: row.models if row.instead == Instead.NEAR_GRADIENTS else ())
    def test_gradients_are_near_the_plain_ones(self, row: str, name: str) -> None:
        """Gradients are close to those of plain training, but not equal."""
        plain = gradients(model_of(name), name)
        model, _ = self.applied(row, name)
        near = gradients(model, name)
        assert near.keys() == plain.keys()
        a, b = (torch.cat([g.flatten() for g in found.values() if g is not None]) for found in (plain, near))
        assert F.cosine_similarity(a, b, dim=0) > 0.99
        assert abs(b.norm() / a.norm() - 1) < 0.02
        assert largest_difference(plain, near) > 1e-6

    @on_models(lambda row: row.models[:1] if row.off else ())
    def test_off_runs_the_methods_own_code(self, row: str, name: str) -> None:
        """A step with `Row.off` executes at least half of the lines that a step with the row's settings executes.

        Only lines of the method's package are counted. If the step with the row's settings runs backward passes of
        autograd functions, the step with `Row.off` must also run such a backward pass. Otherwise, the comparison with
        plain training would not test the code of the method.
        """
        r = self.rows[row]
        ran: list[Lines] = []
        for settings, shortcuts in (({}, ()), (r.off or {}, r.shortcuts)):
            with _replaced(shortcuts):
                model, method = model_of(name), r.create(**settings)
                method.apply(model)
                warm_up(model, method, name)
                gradients(model, name)  # fills caches
                with traced_lines(_own_code(r)) as lines:
                    method.step_begin(method.warmup_steps)
                    gradients(model, name)
                    method.step_end()
                ran.append(lines)
        on, off = ran
        why = ""
        if on.backwards and not off.backwards:
            why = f"no backward pass of the method's autograd functions runs ({', '.join(sorted(on.backwards))})"
        elif len(on.lines - off.lines) > len(on.lines) / 2:
            why = f"the step skips {len(on.lines - off.lines)} of {len(on.lines)} lines that the row's settings execute"
        assert not why, (
            f"off={r.off}: {why}. Therefore, the off value does not test this code. Choose an off value that runs the"
            " method's computation, disable the shortcut in Row.shortcuts, or set Row.why_no_off instead."
        )


@contextmanager
def _replaced(shortcuts: tuple[tuple[type, str, Callable[..., Any]], ...]) -> Iterator[None]:
    """Replace the attributes of `Row.shortcuts` inside a ``with`` block."""
    with ExitStack() as stack:
        for owner, attribute, replacement in shortcuts:
            stack.enter_context(mock.patch.object(owner, attribute, replacement))
        yield


def _own_code(row: Row) -> list[str]:
    """Return the folders with the code of a row's method: the packages of its class and base classes."""
    folders = []
    for kind in row.method.__mro__:
        package = sys.modules.get(kind.__module__.partition(".")[0])
        file = getattr(package, "__file__", None)
        if file is None or kind.__module__ in ("abc", "builtins", "typing"):
            continue
        if package is not None and package.__name__ == OURS:
            folders += [str(_PACKAGE / "methods"), str(_PACKAGE / "ops")]
        else:
            folders.append(str(Path(file).parent) if hasattr(package, "__path__") else file)
    return folders
