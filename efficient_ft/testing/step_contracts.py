"""Contracts about steps: what a method may change, what it draws, what it saves, and what it keeps in memory."""

from __future__ import annotations

import copy
import gc
import io
import math
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from efficient_ft.methods.base import Method, plain_state_dict
from efficient_ft.methods.declarations import Adds
from efficient_ft.testing.contract_base import SETS_REQUIRES_GRAD, ContractTests, on_models
from efficient_ft.testing.models import MODELS, batch_of, model_of
from efficient_ft.testing.snapshots import (
    differing,
    identities,
    moved,
    process_state,
    seed_everything,
    structure,
    values,
)
from efficient_ft.testing.steps import Gradients, evaluate, largest_difference, stir, train_a_little, warm_up

#: Steps of the longest run, and those after which it is saved and continued.
_STEPS, _SAVED = 10, (1, 4, 8)
#: Maximum bytes per image in Python objects that do not count as a copy of an activation.
_NO_COPY = 512


class StepContracts(ContractTests):
    """A step changes gradients and nothing else, its choices follow from (seed, step), and its state is saved."""

    # ------------------------------------------------------------------ what a step may change
    @on_models(lambda row: row.models[:1])
    def test_steps_move_no_weights(self, row: str, name: str) -> None:
        """Only the optimizer changes parameters; buffers change in forward passes of training alone."""
        model, method = self.applied(row, name)
        stir(model)
        for step in range(3):
            for phase, call in (
                ("step_begin", lambda step=step: method.step_begin(step)),
                ("a training pass", lambda step=step: _pass(model, method, name, step)),
                ("evaluation", lambda: evaluate(model, name)),
                ("step_end", method.step_end),
            ):
                before, buffers = values(model), {n for n, _ in model.named_buffers()}
                call()
                names = [n for n in moved(before, model) if phase != "a training pass" or n not in buffers]
                assert not names, f"{phase} of step {step} changes the values of {', '.join(names[:5])}"

    @on_models(lambda row: row.models[:1])
    def test_steps_leave_the_model_as_applied(self, row: str, name: str) -> None:
        """No step adds or removes hooks, attributes, modules, buffers or parameters, or sets a training flag.

        Within a step, parameters that train after `apply` may be frozen (selections per step); none may be freed.
        """
        model, method = self.applied(row, name)
        applied, objects = structure(model), identities(model)
        for step in range(4):
            method.step_begin(step)
            within = structure(model)
            allowed = {k for k, v in applied.items() if k.endswith(": requires_grad") and v and not within.get(k, True)}
            if method.axis not in SETS_REQUIRES_GRAD:
                allowed = set()
            changed = differing(
                {k: v for k, v in applied.items() if k not in allowed},
                {k: v for k, v in within.items() if k not in allowed},
            )
            assert not changed, f"step_begin of step {step} changes {'; '.join(changed[:5])}"
            _pass(model, method, name, step)
            method.step_end()
            evaluate(model, name)
            changed = differing(applied, structure(model))
            assert not changed, f"step {step} changes {'; '.join(changed[:5])}"
            replaced = [n for n, key in identities(model).items() if objects.get(n) != key]
            assert not replaced, f"step {step} replaces {', '.join(replaced[:5])}: the optimizer holds the old objects"

    @on_models(lambda row: row.models[:1])
    def test_frozen_parameters_stay_frozen(self, row: str, name: str) -> None:
        """Parameters frozen after `apply` get no gradient in any step.

        Only selections and adapters may change `requires_grad`.

        Every second parameter is frozen before a method of another axis is applied.
        """
        model, method = model_of(name), self.rows[row].create()
        if method.axis not in SETS_REQUIRES_GRAD:
            for parameter in list(model.parameters())[::2]:
                parameter.requires_grad_(False)
        before = {n: p.requires_grad for n, p in model.named_parameters()}
        torch.manual_seed(1)
        method.apply(model)
        after = {n: p.requires_grad for n, p in model.named_parameters()}
        if method.axis not in SETS_REQUIRES_GRAD:
            changed = [n for n, trains in after.items() if before.get(n, trains) != trains]
            assert not changed, f"apply sets requires_grad of {', '.join(changed[:5])}"
        frozen = {n for n, trains in after.items() if not trains}
        for step in range(3):
            for phase, call in (
                ("step_begin", lambda step=step: method.step_begin(step)),
                ("a pass", lambda step=step: _pass(model, method, name, step)),
                ("step_end", method.step_end),
            ):
                call()
                freed = [
                    n for n, p in model.named_parameters() if n in frozen and (p.requires_grad or p.grad is not None)
                ]
                assert not freed, f"{phase} of step {step} trains {', '.join(freed[:5])}, frozen before"

    @on_models(lambda row: row.models[:1])
    def test_evaluation_changes_nothing(self, row: str, name: str) -> None:
        """Evaluation gives the same logits in `no_grad` and `inference_mode`, and leaves model and method as they were.

        The first pass of a new model may be one of these.
        """
        model, method = self.applied(row, name)
        stir(model)
        warm_up(model, method, name)
        untouched, untouched_method = copy.deepcopy((model, method))
        model.eval()
        before, shape, state = values(model), structure(model), copy.deepcopy(method.state_dict())
        images, _ = batch_of(name, seed=99)
        with torch.inference_mode():
            inferred = model(images).clone()
        with torch.no_grad():
            logits = model(images)
        with_gradients = model(images).detach()
        assert torch.equal(inferred, logits), "inference_mode gives other logits than no_grad"
        torch.testing.assert_close(with_gradients, logits, rtol=1e-10, atol=1e-12)
        names = moved(before, model)
        assert not names, f"evaluation changes the values of {', '.join(names[:5])}"
        changed = differing(shape, structure(model))
        model.train()
        assert not changed, f"evaluation changes {'; '.join(changed[:5])}"
        assert _same_state(method.state_dict(), state), "evaluation changes the method's state"
        for one, its in ((model, method), (untouched, untouched_method)):
            if self.rows[row].random:  # its forward pass draws from torch's generator
                torch.manual_seed(0)
            _pass(one, its, name, 0)
        difference = largest_difference(_gradients_of(untouched), _gradients_of(model))
        assert difference == 0, f"evaluation changes the gradients of the next pass, by {difference:.2g}"

    # ------------------------------------------------------------------ random choices
    @on_models(lambda row: row.models[:1])
    def test_random_choices_follow_from_seed_and_step(self, row: str, name: str) -> None:
        """Two runs whose global generators differ choose alike; only rows with `random` draw in forward passes."""
        draws = self.rows[row].random
        runs: list[list[Gradients]] = []
        for run in range(2):
            seed_everything(1)
            model, method = model_of(name), self.rows[row].create()
            method.apply(model)
            stir(model)
            runs.append([])
            for step in range(4):
                seed_everything(1000 * run + step)
                method.step_begin(step)
                if draws:
                    seed_everything(step)
                _pass(model, method, name, step)
                runs[-1].append(_gradients_of(model))
                seed_everything(2000 * run + step)
                method.step_end()
        for step, (first, second) in enumerate(zip(*runs, strict=True)):
            difference = largest_difference(first, second)
            assert difference == 0, (
                f"step {step}: two runs of the same seed differ by {difference:.2g}. Draw choices of a step from (seed,"
                " step); a method that draws in every forward pass, as dropout does, gives the reason in Row.random."
            )

    @on_models(lambda row: row.models[:1] if not row.random else ())
    def test_two_passes_of_a_step_are_equal(self, row: str, name: str) -> None:
        """Copies of model and method have equal gradients without a seed set before each pass."""
        model, method = self.applied(row, name)
        stir(model)
        warm_up(model, method, name)
        found = []
        for _ in range(2):
            copied, copied_method = copy.deepcopy((model, method))
            _pass(copied, copied_method, name, 0)
            found.append(_gradients_of(copied))
        difference = largest_difference(*found)
        assert difference == 0, (
            f"two passes of a step differ by {difference:.2g}: a generator is drawn from (Row.random)"
        )

    @on_models(lambda row: row.models[:1])
    def test_the_state_of_the_process_stays(self, row: str, name: str) -> None:
        """No call changes a global generator, the default dtype, a mode, or hooks of all modules.

        Methods that add modules may draw their initial values from torch's generator in `apply`.
        """
        r = self.rows[row]
        model, method = model_of(name), r.create()
        seed_everything(3)
        with _same_process("apply", {"torch's generator"} if Adds.MODULES in method.adds else set()):
            method.apply(model)
        for step in range(2):
            with _same_process(f"step_begin of step {step}"):
                method.step_begin(step)
            with _same_process("a training pass", {"torch's generator"} if r.random else set()):
                _pass(model, method, name, step)
            with _same_process(f"step_end of step {step}"):
                method.step_end()
        with _same_process("evaluation"):
            evaluate(model, name)
        with _same_process("state_dict and load_state_dict"):
            method.load_state_dict(method.state_dict())
            plain_state_dict(model, [method])
        with _same_process("remove"):
            method.remove(model)

    # ------------------------------------------------------------------ state
    def test_state_travels_in_a_checkpoint(self, row: str) -> None:
        """A run of ten steps, saved after some of them and continued by a new method, equals an uninterrupted one."""
        name = self.rows[row].models[0]
        model, method = self.applied(row, name)
        files: dict[int, bytes] = {}
        expected: list[Gradients] = []
        for step, found in _training(model, method, name, range(_STEPS)):
            expected.append(found)
            if step + 1 in _SAVED:
                file = io.BytesIO()
                torch.save({"model": model.state_dict(), "method": method.state_dict()}, file)
                files[step + 1] = file.getvalue()
        for load_first, (saved_after, content) in enumerate(files.items()):
            saved = torch.load(io.BytesIO(content), weights_only=True)
            resumed, again = model_of(name), self.rows[row].create()
            if load_first % 2:
                again.load_state_dict(saved["method"])
            again.apply(resumed)
            if not load_first % 2:
                again.load_state_dict(saved["method"])
            resumed.load_state_dict(saved["model"], strict=True)
            restored = _same_state(again.state_dict(), saved["method"])
            assert restored, f"state_dict differs after load_state_dict (saved after {saved_after} steps)"
            for step, found in _training(resumed, again, name, range(saved_after, _STEPS)):
                difference = largest_difference(expected[step], found)
                assert difference == 0, (
                    f"saved after {saved_after} steps and continued, step {step} differs by {difference:.2g}"
                )

    @on_models(lambda row: row.models[:1])
    def test_a_removed_method_begins_again(self, row: str, name: str) -> None:
        """Removed and applied to another model, a method does what a new one does."""
        model, used = self.applied(row, name)
        train_a_little(model, used, name, steps=3)
        used.load_state_dict(copy.deepcopy(used.state_dict()))
        used.remove(model)
        runs = []
        for method in (used, self.rows[row].create()):
            fresh = model_of(name)
            torch.manual_seed(1)
            method.apply(fresh)
            state = copy.deepcopy(method.state_dict())
            runs.append((state, [found for _, found in _training(fresh, method, name, range(3))]))
        assert _same_state(runs[0][0], runs[1][0]), "state of the model that it was removed from is left"
        for step, (again, new) in enumerate(zip(runs[0][1], runs[1][1], strict=True)):
            difference = largest_difference(new, again)
            assert difference == 0, f"applied again, step {step} differs from a new method's by {difference:.2g}"

    # ------------------------------------------------------------------ memory
    def test_nothing_hides_from_the_meter(self, row: str, name: str) -> None:
        """The bytes counted by the saved-tensors hook equal the bytes alive after the forward pass."""
        from efficient_ft.cost import kept_after_forward

        model, method = self.applied(row, name)
        model.float()
        size = (MODELS[name].size, MODELS[name].size)
        for precision in self.precisions(row, name):
            kept = kept_after_forward(model, 2, size, methods=[method], precision=precision)
            assert kept.hidden == (), precision
            assert kept.saved_bytes == kept.live_bytes, precision

    @on_models(lambda row: row.models[:1])
    def test_no_copy_of_an_activation_is_kept_outside_of_tensors(self, row: str, name: str) -> None:
        """The memory of Python and numpy after a forward pass does not grow with the number of images."""
        model, method = self.applied(row, name)
        warm_up(model, method, name)
        sizes = {2: math.inf, 6: math.inf}
        for count in (2, 6) * 6:  # caches are filled once, a copy is kept each time
            images, labels = batch_of(name, count=count)
            torch.manual_seed(0)
            gc.freeze()  # the objects of all else in the process are not searched
            tracemalloc.start()
            try:
                before = _python_bytes()
                loss = F.cross_entropy(model(images), labels)
                sizes[count] = min(sizes[count], _python_bytes() - before)
            finally:
                tracemalloc.stop()
                gc.unfreeze()
            loss.backward()
        growth = (sizes[6] - sizes[2]) / 4
        assert growth < _NO_COPY, (
            f"a forward pass keeps {growth:.0f} bytes per image in numpy arrays or other Python objects, which no count"
            " of saved tensors contains: save tensors through save_for_backward."
        )

    # ------------------------------------------------------------------ mixed precision
    def test_mixed_precision_trains(self, row: str, name: str) -> None:
        """Steps under bf16 autocast train: finite loss and weights, gradients in fp32."""
        model, method = self.applied(row, name)
        warm_up(model, method, name)
        model.float()
        images, labels = batch_of(name, torch.float32)
        before = {n: p.detach().clone() for n, p in model.named_parameters()}
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        for _ in range(2):  # an adapter's A has a gradient once its B is not zero
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = F.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
        assert torch.isfinite(loss)
        trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
        assert all(p.grad is not None or method.find_unused_parameters for p in trained.values())
        assert all(p.grad.dtype == p.dtype == torch.float32 for p in trained.values() if p.grad is not None)
        assert all(torch.isfinite(p).all() for p in trained.values())
        assert any((p != before[n]).any() for n, p in trained.items())


# ---------------------------------------------------------------------------------------------- helpers
def _pass(model: nn.Module, method: Method, name: str, seed: int) -> None:
    """Compute the gradients of a training pass; no generator is seeded."""
    model.train()
    for parameter in model.parameters():
        parameter.grad = None
    images, labels = batch_of(name, seed=seed)
    method.total_loss(F.cross_entropy(model(images), labels)).backward()


def _gradients_of(model: nn.Module) -> Gradients:
    return {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}


def _training(model: nn.Module, method: Method, name: str, steps: range) -> Iterator[tuple[int, Gradients]]:
    """Train, and yield each step's gradients after its end."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
    for step in steps:
        method.step_begin(step)
        torch.manual_seed(step)
        _pass(model, method, name, step)
        found = _gradients_of(model)
        optimizer.step()
        method.step_end()
        yield step, found


def _same_state(a: Any, b: Any) -> bool:
    """Return whether two states are equal, tensors by value."""
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return isinstance(a, Tensor) and isinstance(b, Tensor) and torch.equal(a, b)
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same_state(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(_same_state, a, b))
    return bool(a == b)


@contextmanager
def _same_process(phase: str, but: set[str] = frozenset()) -> Iterator[None]:  # type: ignore[assignment]
    """Assert that the state of the process is the same after a ``with`` block, except for what `but` names."""
    before = process_state()
    yield
    after = process_state()
    changed = [key for key in before if key not in but and before[key] != after[key]]
    assert not changed, f"{phase} changes {', '.join(changed)}"


def _python_bytes() -> int:
    """Return the bytes of all Python objects, numpy's arrays included, that were allocated since tracing began."""
    gc.collect()
    return tracemalloc.get_traced_memory()[0]
