"""The memory budget of a run (the setting ``memory``). A run that is predicted to exceed its budget is rejected.

The prediction (`cost.predict`) covers the whole run: loading, training, evaluation, reading images, and the cost
report. `training.memory.watch` stops a run that still exceeds its budget.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch import nn

from efficient_ft.config import Config
from efficient_ft.core.allocator import allocator_in_use
from efficient_ft.core.errors import MemoryLimitError, UserError
from efficient_ft.core.format import format_bytes
from efficient_ft.core.process_memory import (
    memory_limit_bytes,
    process_limit_bytes,
    release_freed_memory,
    release_library_pages,
    resident_bytes,
)
from efficient_ft.cost import Demand, Forward, Prediction, count_evaluation, executed, predict
from efficient_ft.data.reading import Reading
from efficient_ft.methods.base import Method
from efficient_ft.methods.build import build_methods
from efficient_ft.methods.declarations import Axis
from efficient_ft.models import factory
from efficient_ft.models.weight_dtype import store_weights
from efficient_ft.task import tensors_of
from efficient_ft.training.callbacks.ema import RunOptimizer
from efficient_ft.training.costs import step_spec
from efficient_ft.training.kinds.base import RunData
from efficient_ft.training.kinds.registry import kind_of
from efficient_ft.training.last_layer import last_layer_in_fp32
from efficient_ft.training.memory.libraries import LibrarySizes, compiler_bytes, libraries
from efficient_ft.training.memory.measured import accumulated_gradients
from efficient_ft.training.memory.watch import budget_of
from efficient_ft.training.output import checkpoint
from efficient_ft.training.output.console import say
from efficient_ft.training.processes import world_size
from efficient_ft.training.trainer import on_device

#: Assumed memory of a data-loading process in bytes, excluding batches. Forked processes share most pages.
_WORKER = 96 * 2**20
#: Number of batches that each data-loading process loads in advance (torch's ``prefetch_factor``).
_AHEAD = 2


class Predictor:
    """Callable that predicts the memory of a run for different settings, for example different batch sizes.

    Args:
        config: the configuration of the run.
        images: the data set, or None if the data set is not available. Without data, evaluation images are assumed to
            have the size of training images.
        base_bytes: resident memory before the model is built, in bytes, or 0 on a GPU.
        device: the device on which the run trains.
        folder: the run folder, or None. If the run would resume from a checkpoint in this folder, the prediction
            includes the memory for loading the checkpoint.
    """

    def __init__(
        self, config: Config, images: RunData | None, base_bytes: int, device: torch.device, folder: Path | None = None
    ) -> None:
        self._images, self.base_bytes, self._device = images, base_bytes, device
        self.resumed = folder is not None and config.resume == "auto" and checkpoint.exists(folder / checkpoint.NAME)
        self._kind = kind_of(config)
        self._classes = self._kind.classes(config) if images is None else images.num_classes
        self._networks: dict[str, nn.Module] = {}
        #: Dict from precisions and configurations to the fields of `Demand` that depend on the training step.
        self._steps: dict[tuple[str, str], dict[str, Any]] = {}
        self._forwards: dict[tuple[str, str, int, tuple[int, ...]], Forward] = {}
        self._examples: dict[tuple[int, int], Forward] = {}
        self._inspection: int | None = None

    def network(self, config: Config) -> nn.Module:
        """Return the network of a run, on the meta device unless a method reads the weights in the first steps."""
        warm = any(method.warmup_steps for method in build_methods(config))
        key = config.model.model_dump_json() + str(warm) + config.trainer.weight_dtype
        if key not in self._networks:
            network = self._kind.random_network(config.model, self._classes)
            store_weights(network, config.trainer.weight_dtype)
            self._networks = {key: network if warm else network.to("meta")}  # keep only the last network
        return self._networks[key]

    def forget(self) -> None:
        """Free the networks but keep the counts."""
        self._networks.clear()
        gc.collect()

    def __call__(self, config: Config) -> Prediction:
        """Predict the memory of a run with the configuration `config` on the same data.

        Raises:
            UserError: If a method cannot be applied to the network.
        """
        return predict(self.demand(config), self.base_bytes, allocator_in_use(), self._device.type)

    def readings(self, config: Config) -> tuple[Reading, Reading]:
        """Return the memory required to read training batches and the memory required to read evaluation batches."""
        size = factory.input_of(config.model).size
        if self._images is None:
            return Reading(size), Reading(size)
        found = []
        for training in (True, False):
            each = [part.reading(training=training) for part in self._images.parts.values()]
            largest = max(each, key=lambda one: one.decode_bytes)
            found.append(largest if largest.own_size else replace(largest, size=size))
        return found[0], found[1]

    def demand(self, config: Config) -> Demand:
        """Count the memory that each phase of a run requires."""
        dump = config.model_dump_json(include={"method", "optim", "trainer", "data", "model"})
        key = (config.trainer.precision, dump)  # the dump contains the given precision, for example auto
        if key not in self._steps:
            self._steps[key] = self._step(config)
        return replace(self.around(config, build_methods(config)), **self._steps[key])

    def around(self, config: Config, methods: Sequence[Method] = ()) -> Demand:
        """Count the memory of each phase except the training step. Evaluation is counted with `methods` applied."""
        training, evaluation = self.readings(config)
        network, spec = self.network(config), step_spec(config)
        batch, evaluated = _samples(config, self._images)
        here = config.data.num_workers == 0
        if self._inspection is None:
            parts = () if self._images is None else self._images.parts.values()
            self._inspection = max((part.inspection_bytes() for part in parts), default=0)
        examples, examples_load = Forward(), 0
        if (figure := self._kind.figure_input(evaluation)) is not None:
            size, examples_load = figure
            if size not in self._examples:
                # Examples are predicted in fp32. Networks with weights in bf16 cannot be counted without autocast.
                precision = "fp32" if config.trainer.weight_dtype == "fp32" else spec.precision
                whole = replace(spec, task=self._kind.task, precision=precision)
                self._examples[size] = count_evaluation(network, whole, 1, size, methods)
            examples = self._examples[size]
        state = [*network.parameters(), *network.buffers()]
        # Weights are loaded and evaluated in fp32, even if training stores them in bf16.
        weights = sum(t.numel() * (4 if t.dtype == torch.bfloat16 else t.element_size()) for t in state)
        inputs, targets = spec.example(network, 1)
        return Demand(
            weights_bytes=weights,
            model_bytes=sum(t.numel() * t.element_size() for t in state),
            batch_bytes=batch * sum(t.numel() * t.element_size() for t in (*tensors_of(inputs), targets)),
            step_bytes=0,
            largest_bytes=0,
            optimizer_bytes=0,
            evaluation=self._forward(config, evaluated, evaluation.size, methods),
            load_bytes=training.load_bytes(batch) if here else 0,
            evaluation_load_bytes=evaluation.load_bytes(evaluated) if here else 0,
            examples=examples,
            examples_load_bytes=examples_load,
            inspection_bytes=self._inspection,
            pretrained=config.model.pretrained or config.model.weights is not None,
            copies=int(_copies_prefix(config) or any(m.warmup_steps for m in build_methods(config))),
            resumed=self.resumed,
            autocast=config.trainer.precision != "fp32",
        )

    def _step(self, config: Config) -> dict[str, Any]:
        network, (batch, _) = self.network(config), _samples(config, self._images)
        build = RunOptimizer(config)
        counted = executed(
            network,
            methods=build_methods(config),
            build_optimizer=build,
            **vars(replace(step_spec(config), batch_size=batch)),
        )
        gradients = accumulated_gradients(network, config.trainer.grad_accum_steps)
        optimizer = (counted.optimizer_bytes or 0) + build.average_bytes
        return {
            "model_bytes": counted.model_bytes,
            "batch_bytes": counted.batch_bytes,
            "step_bytes": counted.step_peak_bytes + optimizer + gradients,
            "largest_bytes": counted.largest_bytes,
            "optimizer_bytes": optimizer,
            "gradient_bytes": gradients,
        }

    def _forward(self, config: Config, samples: int, size: tuple[int, ...], methods: Sequence[Method]) -> Forward:
        dump = config.model_dump_json(include={"model", *(("method",) if methods else ())})
        key = (config.trainer.precision, dump, samples, size)
        if key not in self._forwards:
            network = self.network(config)
            spec = step_spec(config)
            self._forwards[key] = count_evaluation(network, spec, samples, size, methods, last_layer_in_fp32)
        return self._forwards[key]

    def workers(self, config: Config) -> int:
        """Return the memory of the data-loading processes in bytes. The budget does not include this memory."""
        count = config.data.num_workers
        if not count:
            return 0
        step, total = self.demand(config), 0
        readings, sizes = self.readings(config), _samples(config, self._images)
        batches = step.batch_bytes, step.evaluation.batch_bytes
        # The sum covers training and evaluation, because the workers of both loaders exist at the same time.
        for reading, samples, batch in zip(readings, sizes, batches, strict=True):
            total += count * (_WORKER + reading.load_bytes(samples) + (1 + _AHEAD) * batch)
        return total


def _samples(config: Config, images: RunData | None) -> tuple[int, int]:
    """Return the sizes of the largest training batch and of the largest evaluation batch."""
    train, evaluated = config.data.batch_size, config.data.eval_batch_size or config.data.batch_size
    if images is None or len(images.parts) > 1:  # the split sizes are unknown or do not limit the batch sizes
        return train, evaluated
    (part,) = images.parts.values()
    others = [count for split, count in part.splits.items() if split != "train"]
    return min(train, part.splits["train"]), min(evaluated, max(others, default=evaluated))


def measured_predictor(config: Config, images: RunData, folder: Path | None) -> Predictor:
    """Load the libraries of a run, measure the memory of this process, and return a predictor for the run."""
    device = on_device(config)
    on_cpu = device.type != "cuda"
    predictor = Predictor(config, images, 0, device, folder)
    if on_cpu:
        release_library_pages()  # without this call, counting a small network would set the peak memory of the run
    predictor.demand(config)  # loads libraries, so that `base_bytes` includes their memory
    predictor.forget()
    if on_cpu:
        names = libraries(config.optim.state_bits, build_methods(config))
        LibrarySizes()(names)  # loads optional libraries
        release_freed_memory()
        release_library_pages()
        predictor.base_bytes = resident_bytes() + compiler_bytes(names)
    return predictor


def require_within_budget(config: Config, predictor: Predictor) -> Prediction:
    """Return the predicted memory of a run with a memory budget.

    Call this function before any files are written. `predictor` is the result of `measured_predictor`.

    Raises:
        UserError: If the prediction exceeds the budget, or if the run and its workers need more memory than the
            container has. The error message suggests settings that fit.
    """
    budget, device = budget_of(config), on_device(config)
    assert budget is not None
    on_cpu = device.type != "cuda"
    limit = memory_limit_bytes()
    if on_cpu and budget > limit:
        say(
            f"memory={config.memory} ({format_bytes(budget)}): this machine or its container has less memory. The"
            f" budget is reduced to {format_bytes(limit)}."
        )
        budget = limit
    predicted = predictor(config)
    if predicted.peak_bytes > budget:
        own = format_bytes(predicted.base_bytes)
        base = f" The interpreter and its libraries use {own} of this memory." if on_cpu else ""
        raise MemoryLimitError(
            f"memory={config.memory} ({format_bytes(budget)}): the run would take about"
            f" {format_bytes(predicted.peak_bytes)} of memory.{base} The run needs the most memory for"
            f" {predicted.phase}{_decided_by(config, predicted.phase)}. {_what_fits(config, predictor, budget)}"
        )
    _require_room(config, predictor, predicted, device)
    predictor.forget()
    release_freed_memory()
    return predicted


def _decided_by(config: Config, phase: str) -> str:
    """Return the settings that determine the memory of a phase, in parentheses, or an empty string."""
    data, kind = config.data, kind_of(config)
    noun = kind.task.sample
    if phase in ("training", "reading training batches"):
        return f" (data.batch_size={data.batch_size}, {kind.size_setting(config)})"
    if phase in ("evaluation", "reading evaluation batches", "evaluating the saved weights"):
        size = kind.evaluation_size(config)
        if data.eval_batch_size is None:
            return f" (data.eval_batch_size=null, which uses data.batch_size={data.batch_size}; {size})"
        return f" (data.eval_batch_size={data.eval_batch_size}, {size})"
    if phase in ("predicting examples", "inspecting the data"):
        return f" (the size of the {noun} files determines this memory)"
    return ""


def _what_fits(config: Config, predictor: Predictor, budget: int) -> str:
    """Return sentences that suggest settings within the budget and the command for finding more recipes."""
    if predictor.base_bytes + predictor.demand(config).weights_bytes > budget:
        return "No recipe for this model fits into this budget. Increase the budget, or choose a smaller model."
    plan = f"To find recipes that fit, run efficient-ft plan with the same model, data, and memory={config.memory}."
    for start in (config, *kind_of(config).smaller_inputs(config)):
        fits = fitting(start, predictor, budget)
        if fits is not None:
            return f"With {_changes(config, fits)}, the run is predicted to fit. {plan}"
    return plan


def fitting(config: Config, predictor: Predictor, budget: int) -> Config | None:
    """Reduce the sizes that determine the largest phase until the run fits into `budget` bytes.

    Returns:
        The changed configuration, or None if no sizes fit.
    """
    changed: Config | None = config
    with suppress(UserError):  # the network may not support images of this size
        while changed is not None:
            predicted = predictor(changed)
            if predicted.peak_bytes <= budget:
                return changed
            changed = _smaller(changed, predicted.phase)
    return None


def _smaller(config: Config, phase: str) -> Config | None:
    """Return a configuration that reduces the memory of a phase, or None if no setting reduces this memory."""
    data, trainer = config.data, config.trainer
    if phase.startswith("reading") and data.num_workers == 0 and kind_of(config).decodes_files:
        return config.model_copy(update={"data": data.model_copy(update={"num_workers": 1})})
    if phase in ("evaluation", "evaluating the saved weights", "reading evaluation batches"):
        size = data.eval_batch_size or data.batch_size
        if size > 1:
            return config.model_copy(update={"data": data.model_copy(update={"eval_batch_size": size // 2})})
    if phase in ("training", "reading training batches") and data.batch_size > 1 and not config.tasks:
        parts = next(parts for parts in range(2, data.batch_size + 1) if data.batch_size % parts == 0)
        whole = config.optim.in_backward or world_size(config) > 1
        size = data.batch_size // (2 if whole else parts)
        accumulate = trainer.grad_accum_steps * (1 if whole else parts)
        return config.model_copy(
            update={
                "data": data.model_copy(update={"batch_size": size}),
                "trainer": trainer.model_copy(update={"grad_accum_steps": accumulate}),
            }
        )
    return None


def _changes(config: Config, fits: Config) -> str:
    """Return the settings in which `fits` differs from `config`, as arguments of the command line."""
    names = "model.image_size data.batch_size trainer.grad_accum_steps data.eval_batch_size data.num_workers"
    values = {name: attrgetter(name) for name in names.split()}
    return " ".join(f"{name}={value(fits)}" for name, value in values.items() if value(fits) != value(config))


def _require_room(config: Config, predictor: Predictor, predicted: Prediction, device: torch.device) -> None:
    """Print the memory of the worker processes. Raise UserError if the memory of the container is not sufficient."""
    workers = predictor.workers(config)
    count = config.data.num_workers
    if workers:
        say(
            f"The run needs about {format_bytes(predicted.peak_bytes)} of its memory budget ({config.memory}). The"
            f" worker processes (data.num_workers={count}) need about {format_bytes(workers)} in addition."
        )
    own = predicted.peak_bytes if device.type != "cuda" else resident_bytes()
    limit, allowed = memory_limit_bytes(), process_limit_bytes()
    if own + workers > limit:
        raise UserError(
            f"data.num_workers={count}: the run needs about {format_bytes(own)}, and its worker processes need about"
            f" {format_bytes(workers)}, but this machine or its container has only {format_bytes(limit)}. Set"
            " data.num_workers=0, or reduce the batch size."
        )
    if allowed is not None and own > allowed:
        raise UserError(
            f"memory={config.memory}: the run needs about {format_bytes(own)}, but the limits of this process allow"
            f" only {format_bytes(allowed)}. Raise these limits (ulimit -v, ulimit -d), or reduce the batch size."
        )


def smaller_evaluation(config: Config, device: torch.device, base_bytes: int, room: int) -> int | None:
    """Return an evaluation batch size that is predicted to fit into `room` bytes.

    The result is None if a smaller evaluation batch is not sufficient or not necessary.
    """
    fits = fitting(config, Predictor(config, None, base_bytes, device), room)
    if fits is None or fits.data.batch_size != config.data.batch_size or fits == config:
        return None
    return fits.data.eval_batch_size


def largest_batch(config: Config, device: torch.device, base_bytes: int, room: int) -> int:
    """Return approximately the largest batch size that is predicted to fit into `room` bytes, or 0 if no size fits.

    The result is at most the configured batch size.
    """
    predictor = Predictor(config, None, base_bytes, device)

    def predicted(batch: int) -> int:
        evaluated = min(config.data.eval_batch_size or batch, batch)
        sizes = {"batch_size": batch, "eval_batch_size": evaluated}
        return predictor(config.model_copy(update={"data": config.data.model_copy(update=sizes)})).peak_bytes

    most = config.data.batch_size
    if predicted(most) <= room:
        return most
    low, high = predicted(1), predicted(2)
    if low > room:
        return 0
    # Extrapolate linearly, because memory is nearly linear in the batch size. Then reduce the batch size until the
    # prediction fits the available memory.
    guess = min(most - 1, 1 + math.floor((room - low) / max(high - low, 1)))
    while guess > 1 and predicted(guess) > room:
        guess = guess * 9 // 10
    return guess


def _copies_prefix(config: Config) -> bool:
    """Return True if a run may keep a copy of the weights of its frozen prefix."""
    if config.trainer.prefix is None and list(config.method) == ["full"]:
        return False
    selects = any(Axis.SELECTION in (method.axis, *method.other_axes) for method in build_methods(config))
    return config.trainer.frozen_prefix != "fp32" and (selects or config.trainer.prefix is not None)
