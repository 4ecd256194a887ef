"""Time the parts of a training step for each recipe."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from timm.layers import set_fused_attn, use_fused_attn
from torch import Tensor, nn

from efficient_ft.bench.recipes import Configure, Network, Recipe
from efficient_ft.bench.timing import alternate, summary, waiter
from efficient_ft.config import Config
from efficient_ft.core.errors import UserError
from efficient_ft.core.format import format_seconds
from efficient_ft.cost import StepSpec, TrainingStep, executed
from efficient_ft.methods.base import Method, apply_methods
from efficient_ft.methods.build import build_methods
from efficient_ft.methods.compiled import CompiledForward, compile_blocks
from efficient_ft.methods.forwards import forwards_of
from efficient_ft.models import factory
from efficient_ft.models.frozen_batch_norm import freeze_batch_norm
from efficient_ft.models.marks import ancestors
from efficient_ft.models.prefix import FrozenPrefix
from efficient_ft.models.prefix_form import Form
from efficient_ft.models.weight_dtype import store_weights
from efficient_ft.task import TASKS
from efficient_ft.training.costs import step_spec
from efficient_ft.training.features.prefix import measure_form, run_prefix
from efficient_ft.training.features.row_form import RowForm
from efficient_ft.training.features.store import from_stored
from efficient_ft.training.optimizer import build_optimizer
from efficient_ft.training.trainer import use_channels_last


class PartsTimer:
    """Time the parts of training steps, and inference of the frozen prefix without methods.

    The prefix ends before the first executed module that has a trainable parameter. Inference runs `plain`, a copy of
    the model without methods, in evaluation mode and without a graph, up to this module.
    """

    def __init__(self, step: TrainingStep, plain: nn.Module) -> None:
        self.step, self._plain, self._wait = step, plain.to(step.device).eval(), waiter(step.device)
        self._entered = 0.0
        #: Name of the first module after the frozen prefix, or None if there is no prefix that can be timed.
        self.prefix = self._find_prefix()
        if self.prefix is not None:
            step.model.get_submodule(self.prefix).register_forward_pre_hook(self._enter)
            plain.get_submodule(self.prefix).register_forward_pre_hook(self._stop)

    def _find_prefix(self) -> str | None:
        """Return the name of the first module after the prefix.

        The result is None if there is no prefix, if the module does not exist in both models, or if the trainable
        parameters can change in each step.
        """
        if self.step.methods.cost_steps > 1:
            return None
        order: list[tuple[str, bool]] = []
        handles = [
            module.register_forward_pre_hook(lambda m, _, n=name: order.append((n, _trains(m))))  # type: ignore[misc]
            for name, module in self.step.model.named_modules()
            if next(module.parameters(recurse=False), None) is not None
        ]
        self.step.forward()
        self.step.backward()
        self.step.update()  # optimizers that step inside the backward pass require this call
        for handle in handles:
            handle.remove()
        first = next((k for k, (_, trains) in enumerate(order) if trains), None)
        if first is None or first == 0:
            return None
        name = order[first][0]
        # A hook inside a compiled block would disable its compilation.
        blocks = [block for block in ancestors(name) if _is_compiled(self.step.model.get_submodule(block))]
        name = blocks[-1] if blocks else name
        return name if name in dict(self._plain.named_modules()) else None

    def _enter(self, *_: Any) -> None:
        if not self._entered:
            self._wait()
            self._entered = time.perf_counter()

    def _stop(self, *_: Any) -> None:
        raise _PrefixEnds

    def __call__(self) -> dict[str, float]:
        """Run one step and return the time of each part in seconds."""
        seconds = {}
        dtype = self.step.spec.dtype
        if self.prefix is not None:
            self._wait()
            start = time.perf_counter()
            with torch.no_grad(), torch.autocast(self.step.device.type, dtype=dtype, enabled=dtype is not None):
                try:
                    self.step.spec.task.logits(self._plain, self.step.inputs)
                except _PrefixEnds:
                    self._wait()
            seconds["prefix inference"] = time.perf_counter() - start
        self._entered = 0.0
        times = [time.perf_counter()]
        for part in (self.step.forward, self.step.backward, self.step.update):
            part()
            self._wait()
            times.append(time.perf_counter())
        if self.prefix is not None:
            seconds["prefix"] = self._entered - times[0]
        seconds["forward"], seconds["backward"], seconds["update"] = (b - a for a, b in pairwise(times))
        seconds["step"] = times[-1] - times[0]
        return seconds


class _PrefixEnds(Exception):
    """Exception that ends the forward pass of the plain model at the end of the prefix."""


def _is_compiled(module: nn.Module) -> bool:
    return any(isinstance(forward, CompiledForward) for forward in forwards_of(module))


def _trains(module: nn.Module) -> bool:
    return any(p.requires_grad for p in module.parameters(recurse=False))


def measure_steps(
    recipes: Sequence[Recipe], configure: Configure, network: Network, *, rounds: int = 10, warmup: int = 2
) -> dict[str, Any]:
    """Time and count training steps of each recipe on random weights and images.

    The baseline of a recipe is the first recipe with the same precision. A recipe with ``trainer.compile=true`` is
    compared with the same recipe without this setting, if that recipe is measured. The first step of compiled recipes
    is timed, too. Feature maps have the memory format that runs use (`trainer.channels_last`). `warmup` rounds run
    before the `rounds` timed rounds. The result is a JSON-serializable report, which `tables.report_text` formats.

    Raises:
        UserError: If a recipe or model cannot be used.
    """
    precisions: dict[str, str] = {}
    calls: dict[str, Callable[[], dict[str, float]]] = {}
    steps: dict[str, TrainingStep] = {}
    counts: dict[str, dict[str, Any]] = {}
    on_cpu = torch.device(network.device).type == "cpu"
    with unfused_attention() if network.unfused else nullcontext():
        for recipe in recipes:
            config = configure(network.model, [*network.overrides, *recipe.overrides])
            precisions[recipe.name] = config.trainer.precision
            step, counts[recipe.name] = _prepared(config, network)
            for _ in range(step.methods.warmup_steps):
                step()
            steps[recipe.name] = step
            calls[recipe.name] = PartsTimer(step, factory.random_model(config.model, network.num_classes))
            if recipe.wrap is not None:
                counts[recipe.name]["executed"]["saved_bytes"] = recipe.wrap(step) / network.batch_size
        for name in calls:
            if "compiled" in counts[name]:
                counts[name]["first_step_seconds"] = _seconds_of_the_first_step(calls[name])
        baselines = _baselines(recipes, precisions)
        result = summary(alternate(calls, rounds, warmup), baselines)
    compiled: list[str] = []
    for name, step in steps.items():
        if "compiled" in counts[name]:
            counts[name]["compiled"] = str(counts[name]["compiled"])
            first = format_seconds(counts[name]["first_step_seconds"])
            compiled.append(f"{name}: {counts[name]['compiled']} The first step took {first}.")
        counts[name].update(dtype=precisions[name], baseline=baselines[name])
        counts[name]["peak_bytes"] = counts[name]["executed"]["peak_bytes"] if on_cpu else step.cuda_peak()
    notes = [] if on_cpu else ["The peak memory is measured on the device."]
    notes += compiled
    if any("trainer.cache_features=on" in recipe.overrides for recipe in recipes):
        notes.append(
            "With trainer.cache_features=on, FLOPs and bytes are counted for a step that computes the stored features."
        )
    return {
        "kind": "step",
        "model": network.model,
        "batch": network.batch_size,
        "dtype": " and ".join(sorted(set(precisions.values()), reverse=True)),
        "attention": "unfused" if network.unfused else "timm's default",
        "baseline": recipes[0].name,
        "recipes": {name: {**counts[name], "measured": result[name]} for name in precisions},
        "notes": notes,
    }


def _baselines(recipes: Sequence[Recipe], precisions: dict[str, str]) -> dict[str, str]:
    """Return the name of the baseline of each recipe. `precisions` contains the precision of each recipe."""
    first = {precision: name for name, precision in reversed(precisions.items())}
    same = {recipe.overrides: recipe.name for recipe in recipes if recipe.wrap is None}
    baselines = {}
    for recipe in recipes:
        plain = tuple(one for one in recipe.overrides if one != "trainer.compile=true")
        default = first[precisions[recipe.name]]
        baselines[recipe.name] = same.get(plain, default) if plain != recipe.overrides else default
    return baselines


def _seconds_of_the_first_step(call: Callable[[], dict[str, float]]) -> float:
    """Return the time of the first step of a compiled recipe, without code that an earlier process has compiled."""
    with torch.compiler.config.patch(force_disable_caches=True):  # type: ignore[attr-defined]
        return call()["step"]


class _Counted(NamedTuple):
    """A network with its methods, the specification of its training step, and the counts of the step."""

    model: nn.Module
    methods: list[Method]
    spec: StepSpec
    counts: dict[str, Any]


def count_step(config: Config, network: Network) -> dict[str, Any]:
    """Return the counts in the record of a recipe: its methods, trained parameters, FLOPs and bytes."""
    with unfused_attention() if network.unfused else nullcontext():
        return _counted(config, network).counts


def _counted(config: Config, network: Network) -> _Counted:
    model = store_weights(factory.random_model(config.model, network.num_classes), config.trainer.weight_dtype)
    methods = build_methods(config)
    apply_methods(model, methods)
    size = factory.input_of(config.model).size
    spec = StepSpec(network.batch_size, size, config.trainer.precision, task=TASKS[config.task])
    if use_channels_last(config, torch.device(network.device)):
        model.to(memory_format=torch.channels_last)
    build = partial(build_optimizer, optim=config.optim, precision=config.trainer.precision)
    counted = executed(model, methods=methods, build_optimizer=build, **vars(spec))
    counts = {
        "methods": [repr(m) for m in methods],
        "trainable_parameters": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "executed": counted.as_dict(),
    }
    return _Counted(model, methods, spec, counts)


def _prepared(config: Config, network: Network) -> tuple[TrainingStep, dict[str, Any]]:
    model, methods, spec, counts = _counted(config, network)
    build = partial(build_optimizer, optim=config.optim, precision=config.trainer.precision)
    prefix = _prefix(config, model, methods, torch.device(network.device))
    replaced = None if prefix is None else _replacement(config, prefix)
    step = TrainingStep(model, methods, spec, device=network.device, build_optimizer=build, replace=replaced)
    excluded = () if prefix is None else prefix.parts
    compiled = compile_blocks(step.model, excluded) if config.trainer.compile else None
    return step, {**({} if compiled is None else {"compiled": compiled}), **counts}


def build_step(
    config: Config, network: nn.Module, device: torch.device | str, batch_size: int, channels_last: bool
) -> TrainingStep:
    """Build a training step of the run `config` with `batch_size` images, and apply the run's methods to `network`."""
    methods, spec = build_methods(config), replace(step_spec(config), batch_size=batch_size)
    apply_methods(network, methods)
    if channels_last:
        network.to(memory_format=torch.channels_last)
    build = partial(build_optimizer, optim=config.optim, precision=config.trainer.precision)
    step = TrainingStep(network, methods, spec, device=device, build_optimizer=build)
    if config.trainer.compile:  # after the step has replaced BatchNorm layers and added hooks
        compile_blocks(step.model)
    return step


def _prefix(config: Config, network: nn.Module, methods: Sequence[Method], device: torch.device) -> FrozenPrefix | None:
    """Return the frozen prefix for `trainer.prefix` and `trainer.cache_features`.

    The result is None if neither setting changes the input of the network.
    """
    options = config.trainer
    default = options.prefix is None and options.cache_features != "on"
    if options.cache_features != "on" and options.frozen_prefix == "fp32":
        return None
    freeze_batch_norm(network)  # BatchNorm in training mode would end the prefix
    try:
        prefix = run_prefix(config, network, methods)
    except UserError:
        if not default:
            raise
        return None
    measure_form(config, prefix, device)
    return None if prefix.form is Form.FP32 and options.cache_features != "on" else prefix


def _replacement(config: Config, prefix: FrozenPrefix) -> Callable[[Tensor], AbstractContextManager[Tensor]]:
    """Return the function that replaces the images by the features of the prefix.

    The stored features of the batch are kept in memory. These features are decoded in each step, but they are not read
    from disk.
    """
    options = config.trainer
    if options.cache_features != "on":
        return prefix.input
    form = RowForm(options.cache_dtype, prefix.values)
    stored: list[Tensor] = []

    def read(images: Tensor) -> AbstractContextManager[Tensor]:
        if not stored:
            stored.append(form.encode(prefix.to_rows(prefix.features(images))))
        return from_stored(prefix, form, stored[0])

    return read


@contextmanager
def unfused_attention() -> Iterator[None]:
    """Disable the fused attention kernel for models that are created inside the ``with`` block."""
    before, experimental = use_fused_attn(), use_fused_attn(experimental=True)
    set_fused_attn(False)
    try:
        yield
    finally:
        set_fused_attn(before, experimental)
