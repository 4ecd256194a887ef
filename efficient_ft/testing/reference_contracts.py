"""Contracts about what a method computes: its reference, and the case in which it is switched off."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

import torch
import torch.nn.functional as F
from torch import nn

from efficient_ft.methods.base import Method
from efficient_ft.testing.contract_base import SETS_REQUIRES_GRAD, ContractTests, on_models
from efficient_ft.testing.models import model_of
from efficient_ft.testing.references import Case, check_case
from efficient_ft.testing.rows import Instead, Row
from efficient_ft.testing.snapshots import Lines, traced_lines
from efficient_ft.testing.steps import evaluate, gradients, largest_difference, stir, train_a_little, warm_up

#: The folder of this package.
_PACKAGE = Path(__file__).resolve().parents[1]
#: Number of the step in which gradients are compared again: one in which what is refreshed every ten steps is new.
_LATER = 10
#: The name of this package in Python.
OURS = "efficient_ft"


def _referenced(row: Row) -> tuple[str, ...]:
    """The small models on which a row is compared with its reference."""
    return tuple(name for name in row.models if name not in row.unreferenced)


class ReferenceContracts(ContractTests):
    """The method computes the same as the row's reference; switched off it is plain training."""

    # ------------------------------------------------------------------ the reference
    @on_models(_referenced)
    def test_gradients_are_those_of_the_reference(self, row: str, name: str) -> None:
        """In training, logits, gradients and buffers equal the reference's in float64, in a later step too."""
        cases = [Case(), Case(count=1), Case(seeds=(0, 1), count=3), Case(channels_last=True)]
        if self.rows[row].method.axis not in SETS_REQUIRES_GRAD:
            cases.append(Case(frozen=True))
        model, method = self._check(row, name, *cases)
        train_a_little(model, method, name, steps=_LATER)
        method.step_begin(_LATER)
        check_case(self.rows[row], model, method, name, Case(), in_place=True)

    @on_models(_referenced)
    def test_gradients_in_evaluation_are_those_of_the_reference(self, row: str, name: str) -> None:
        """In evaluation mode with gradients, logits and gradients equal the reference's in float64."""
        self._check(row, name, Case(training=False))

    @on_models(_referenced)
    def test_gradients_in_lower_precision_are_those_of_the_reference(self, row: str, name: str) -> None:
        """In fp32 and under bf16 autocast, gradients are as near to the reference as its own rounding allows."""
        self._check(row, name, Case("fp32"), Case("bf16"))

    def _check(self, row: str, name: str, *cases: Case) -> tuple[nn.Module, Method]:
        model, method = model_of(name), self.rows[row].create()
        torch.manual_seed(1)
        method.apply(model)
        stir(model)
        warm_up(model, method, name)
        for case in cases:
            if f"{name}, {case.precision}" not in self.rows[row].unreferenced:
                check_case(self.rows[row], model, method, name, case)
        return model, method

    # ------------------------------------------------------------------ off means off
    @on_models(lambda row: row.models if row.off is not None else ())
    def test_off_is_plain_training_and_on_is_not(self, row: str, name: str) -> None:
        """The off value equals plain training with shortcuts disabled; the row's own settings differ from it."""
        r = self.rows[row]
        plain = gradients(model_of(name), name)
        with ExitStack() as stack:
            for owner, attribute, replacement in r.shortcuts:
                stack.enter_context(mock.patch.object(owner, attribute, replacement))
            model, method = model_of(name), r.create(**(r.off or {}))
            torch.manual_seed(1)
            method.apply(model)
            warm_up(model, method, name)
            assert largest_difference(plain, gradients(model, name)) < 1e-8
        if not r.off:
            return  # off as it is
        model, method = self.applied(row, name)
        warm_up(model, method, name)
        assert largest_difference(plain, gradients(model, name)) > 1e-2

    @on_models(lambda row: row.models if row.instead == Instead.SAME_GRADIENTS else ())
    def test_gradients_of_what_trains_are_the_plain_ones(self, row: str, name: str) -> None:
        """Selections leave the gradients of what trains exact."""
        plain = gradients(model_of(name), name)
        model, _ = self.applied(row, name)
        chosen = gradients(model, name)
        trains = {n for n, p in model.named_parameters() if p.requires_grad}
        assert 0 < len(trains) < len(plain)
        assert {n for n, g in chosen.items() if g is not None} == trains
        assert largest_difference({n: plain[n] for n in trains}, {n: chosen[n] for n in trains}) < 1e-10

    @on_models(lambda row: row.models if row.instead == Instead.SAME_OUTPUT else ())
    def test_output_is_unchanged_at_first_and_changed_after_training(self, row: str, name: str) -> None:
        """Adapters leave the output unchanged at initialization, and change it after training."""
        plain = self.rows[row].initial_model(model_of(name))
        model, method = self.applied(row, name)
        torch.testing.assert_close(evaluate(model, name), evaluate(plain, name), rtol=1e-10, atol=1e-12)
        train_a_little(model, method, name)
        assert (evaluate(model, name) - evaluate(plain, name)).abs().max() > 1e-4

    @on_models(lambda row: row.models if row.instead == Instead.NEAR_GRADIENTS else ())
    def test_gradients_are_near_the_plain_ones(self, row: str, name: str) -> None:
        """The mean gradient over several seeds is close to the exact one."""
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
        """The off value is evidence only if it runs the code that the row's own settings run.

        At least half of the lines of the method's package that run in a step must run, and, if the method has autograd
        functions, a backward pass of one of them.
        """
        r = self.rows[row]
        ran: list[Lines] = []
        for settings, shortcuts in (({}, ()), (r.off or {}, r.shortcuts)):
            with ExitStack() as stack:
                for owner, attribute, replacement in shortcuts:
                    stack.enter_context(mock.patch.object(owner, attribute, replacement))
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
            why = f"runs no backward pass of the method's own autograd functions ({', '.join(sorted(on.backwards))})"
        elif len(on.lines - off.lines) > len(on.lines) / 2:
            why = (
                f"leaves out {len(on.lines - off.lines)} of the {len(on.lines)} lines that run with the row's settings"
            )
        assert not why, (
            f"off={r.off} {why}, and so is no evidence for them. Choose a value with which the method's own computation"
            " runs, disable the shortcut in Row.shortcuts, or give Row.why_no_off instead."
        )


def _own_code(row: Row) -> list[str]:
    """Return the folders of the code of a row's method: the packages of its class and of those it derives from."""
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
