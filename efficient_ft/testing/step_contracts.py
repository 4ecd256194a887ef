"""Contracts of a training step: permitted changes, random numbers, state, and memory."""

from __future__ import annotations

import copy
import gc
import io
import math
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from efficient_ft.methods.base import Method, plain_state_dict
from efficient_ft.methods.declarations import Adds
from efficient_ft.testing.models import MODELS, batch_of, model_of
from efficient_ft.testing.rows import SETS_REQUIRES_GRAD, ContractTests, apply_seeded, on_models
from efficient_ft.testing.snapshots import differing, moved, process_state, seed_everything, structure, values
from efficient_ft.testing.steps import (
    Gradients,
    evaluate,
    gradients_of,
    largest_difference,
    run_pass,
    stir,
    train_a_little,
    warm_up,
)

#: Number of steps of the longest run, and the numbers of steps after which the run is saved.
_STEPS, _SAVED = 10, (1, 4, 8)
#: Maximum growth of Python's memory in bytes per image. This limit is smaller than a copy of an activation.
_NO_COPY = 512


class StepContracts(ContractTests):
    """Contracts of a training step.

    A step changes only gradients. Random choices depend only on (seed, step), and the state of a method can be saved.
    """

    @on_models(lambda row: row.models[:1])
    def test_steps_move_no_weights(self, row: str, name: str) -> None:
        """Only the optimizer changes parameters, and only forward passes in training change buffers."""
        model, method = self.applied(row, name)
        stir(model)
        for step in range(3):
            for phase, call in _phases(model, method, name, step):
                before, buffers = values(model), {n for n, _ in model.named_buffers()}
                call()
                names = [n for n in moved(before, model) if phase != "a training pass" or n not in buffers]
                assert not names, f"in step {step}, {phase} changes the values of {', '.join(names[:5])}"

    @on_models(lambda row: row.models[:1])
    def test_steps_leave_the_model_as_applied(self, row: str, name: str) -> None:
        """No step adds or removes hooks, attributes, modules, buffers or parameters, or changes training flags.

        Within a step, methods that select parameters may freeze trainable parameters, but must not unfreeze parameters.
        """
        model, method = self.applied(row, name)
        applied, objects = structure(model), dict(model.named_parameters())
        for step in range(4):
            method.step_begin(step)
            within = structure(model)
            if method.axis in SETS_REQUIRES_GRAD:
                frozen = [k for k, v in applied.items() if k.endswith(": requires_grad") and v and not within.get(k, v)]
                within.update(dict.fromkeys(frozen, True))
            changed = differing(applied, within)
            assert not changed, f"in step {step}, step_begin changes {'; '.join(changed[:5])}"
            run_pass(model, name, step, method)
            method.step_end()
            evaluate(model, name)
            changed = differing(applied, structure(model))
            assert not changed, f"step {step} changes {'; '.join(changed[:5])}"
            replaced = [n for n, p in model.named_parameters() if objects.get(n) is not p]
            assert not replaced, f"step {step} must not replace the parameters {', '.join(replaced[:5])}"

    @on_models(lambda row: row.models[:1])
    def test_frozen_parameters_stay_frozen(self, row: str, name: str) -> None:
        """Parameters that are frozen after `apply` receive no gradient in any step.

        Only selection and adapter methods may change `requires_grad`. For methods of other axes, every second parameter
        is frozen before `apply`.
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
            assert not changed, f"apply must not change requires_grad of {', '.join(changed[:5])}"
        frozen = {n for n, trains in after.items() if not trains}
        for step in range(3):
            for phase, call in _phases(model, method, name, step):
                call()
                parameters = {n: p for n, p in model.named_parameters() if n in frozen}
                freed = [n for n, p in parameters.items() if p.requires_grad or p.grad is not None]
                assert not freed, f"in step {step}, {phase} trains the frozen parameters {', '.join(freed[:5])}"

    @on_models(lambda row: row.models[:1])
    def test_evaluation_changes_nothing(self, row: str, name: str) -> None:
        """Evaluation returns the same logits in `no_grad` and `inference_mode`.

        Evaluation does not change the model or the method.
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
        assert torch.equal(inferred, logits), "the logits in inference_mode differ from the logits in no_grad"
        torch.testing.assert_close(with_gradients, logits, rtol=1e-10, atol=1e-12)
        names = moved(before, model)
        assert not names, f"evaluation changes the values of {', '.join(names[:5])}"
        changed = differing(shape, structure(model))
        model.train()
        assert not changed, f"evaluation changes {'; '.join(changed[:5])}"
        assert _same_state(method.state_dict(), state), "evaluation changes the method's state"
        for one, its in ((model, method), (untouched, untouched_method)):
            if self.rows[row].random:
                torch.manual_seed(0)
            run_pass(one, name, 0, its)
        _assert_equal(gradients_of(untouched), gradients_of(model), "evaluation changes the gradients of the next pass")

    @on_models(lambda row: row.models[:1])
    def test_random_choices_follow_from_seed_and_step(self, row: str, name: str) -> None:
        """Two runs with different states of the global generators have equal gradients.

        Only methods whose row sets `random` may draw from a global generator in a forward pass.
        """
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
                run_pass(model, name, step, method)
                runs[-1].append(gradients_of(model))
                seed_everything(2000 * run + step)
                method.step_end()
        for step, (first, second) in enumerate(zip(*runs, strict=True)):
            hint = "Derive random choices from (seed, step), or set Row.random if forward passes are random (dropout)."
            _assert_equal(first, second, f"two runs with the same seed differ in step {step}. {hint}")

    @on_models(lambda row: row.models[:1] if not row.random else ())
    def test_two_passes_of_a_step_are_equal(self, row: str, name: str) -> None:
        """Without seeding, passes of two copies of a model and its method have equal gradients."""
        model, method = self.applied(row, name)
        stir(model)
        warm_up(model, method, name)
        found = []
        for _ in range(2):
            copied, copied_method = copy.deepcopy((model, method))
            run_pass(copied, name, 0, copied_method)
            found.append(gradients_of(copied))
        first, second = found
        _assert_equal(first, second, "two passes of a step differ. If the passes draw random numbers, set Row.random.")

    @on_models(lambda row: row.models[:1])
    def test_the_state_of_the_process_stays(self, row: str, name: str) -> None:
        """Methods do not change a global generator, the default dtype, a torch mode, or global module hooks.

        Methods that add modules may draw initial values from torch's generator in `apply`.
        """
        r = self.rows[row]
        model, method = model_of(name), r.create()
        seed_everything(3)
        with _same_process("apply", *(["torch's generator"] if Adds.MODULES in method.adds else [])):
            method.apply(model)
        for step in range(2):
            with _same_process(f"step_begin of step {step}"):
                method.step_begin(step)
            with _same_process("a training pass", *(["torch's generator"] if r.random else [])):
                run_pass(model, name, step, method)
            with _same_process(f"step_end of step {step}"):
                method.step_end()
        with _same_process("evaluation"):
            evaluate(model, name)
        with _same_process("state_dict and load_state_dict"):
            method.load_state_dict(method.state_dict())
            plain_state_dict(model, [method])
        with _same_process("remove"):
            method.remove(model)

    def test_state_travels_in_a_checkpoint(self, row: str) -> None:
        """A run that is saved and continued by a new method object equals an uninterrupted run."""
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
            assert restored, f"load_state_dict does not restore the state saved after {saved_after} steps"
            for step, found in _training(resumed, again, name, range(saved_after, _STEPS)):
                _assert_equal(
                    expected[step], found, f"step {step} differs in a run that was continued after {saved_after} steps"
                )

    @on_models(lambda row: row.models[:1])
    def test_a_removed_method_begins_again(self, row: str, name: str) -> None:
        """A method that was removed and then applied to another model trains like a new method."""
        model, used = self.applied(row, name)
        train_a_little(model, used, name, steps=3)
        used.load_state_dict(copy.deepcopy(used.state_dict()))
        used.remove(model)
        runs = []
        for method in (used, self.rows[row].create()):
            fresh, _ = apply_seeded(model_of(name), method)
            state = copy.deepcopy(method.state_dict())
            runs.append((state, [found for _, found in _training(fresh, method, name, range(3))]))
        assert _same_state(runs[0][0], runs[1][0]), "remove must delete the state of the method"
        for step, (again, new) in enumerate(zip(runs[0][1], runs[1][1], strict=True)):
            _assert_equal(new, again, f"in step {step}, the re-applied method differs from a new method")

    def test_nothing_hides_from_the_meter(self, row: str, name: str) -> None:
        """Saved-tensors hooks count the same number of bytes as the forward pass leaves in memory."""
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
        """The memory of Python and NumPy objects after a forward pass does not grow with the number of images."""
        model, method = self.applied(row, name)
        warm_up(model, method, name)
        sizes = {2: math.inf, 6: math.inf}
        for count in (2, 6) * 6:  # several passes are run, because the first passes fill caches
            images, labels = batch_of(name, count=count)
            torch.manual_seed(0)
            gc.freeze()  # excludes existing objects from garbage collection
            tracemalloc.start()
            try:
                gc.collect()
                before = tracemalloc.get_traced_memory()[0]
                loss = F.cross_entropy(model(images), labels)
                gc.collect()
                sizes[count] = min(sizes[count], tracemalloc.get_traced_memory()[0] - before)
            finally:
                tracemalloc.stop()
                gc.unfreeze()
            loss.backward()
        growth = (sizes[6] - sizes[2]) / 4
        assert growth < _NO_COPY, (
            f"a forward pass stores {growth:.0f} bytes per image in NumPy arrays or other Python objects, which are not"
            " counted as saved tensors. Save tensors with save_for_backward."
        )

    def test_mixed_precision_trains(self, row: str, name: str) -> None:
        """Under bf16 autocast, steps change the weights, gradients are in fp32, and loss and weights are finite."""
        model, method = self.applied(row, name)
        warm_up(model, method, name)
        model.float()
        images, labels = batch_of(name, torch.float32)
        before = {n: p.detach().clone() for n, p in model.named_parameters()}
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        for _ in range(2):  # two steps are required, because the gradient of an adapter's A is zero while B is zero
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


def _phases(model: nn.Module, method: Method, name: str, step: int) -> list[tuple[str, Callable[[], Any]]]:
    """Return the phases of a step in order, each with a function that runs the phase."""
    return [
        ("step_begin", lambda: method.step_begin(step)),
        ("a training pass", lambda: run_pass(model, name, step, method)),
        ("evaluation", lambda: evaluate(model, name)),
        ("step_end", method.step_end),
    ]


def _assert_equal(expected: Gradients, found: Gradients, message: str) -> None:
    difference = largest_difference(expected, found)
    assert difference == 0, f"{message} (the largest relative error is {difference:.2g})"


def _training(model: nn.Module, method: Method, name: str, steps: range) -> Iterator[tuple[int, Gradients]]:
    """Train, and yield the number and the gradients of each step after the step has ended."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
    for step in steps:
        method.step_begin(step)
        torch.manual_seed(step)
        run_pass(model, name, step, method)
        found = gradients_of(model)
        optimizer.step()
        method.step_end()
        yield step, found


def _same_state(a: Any, b: Any) -> bool:
    """Return True if two states are equal. Tensors are compared by value."""
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return isinstance(a, Tensor) and isinstance(b, Tensor) and torch.equal(a, b)
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same_state(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(_same_state, a, b))
    return bool(a == b)


@contextmanager
def _same_process(phase: str, *but: str) -> Iterator[None]:
    """Assert that a ``with`` block does not change the state of the process, except for the entries in `but`."""
    before = process_state()
    yield
    after = process_state()
    changed = [key for key in before if key not in but and before[key] != after[key]]
    assert not changed, f"{phase} changes {', '.join(changed)}"
