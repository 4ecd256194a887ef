"""Count the cost of a plan's recipes on fake tensors, without weights or data, in about one second per recipe."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch
from torch import nn

from efficient_ft.config import Config
from efficient_ft.core.context import set_context
from efficient_ft.core.errors import UserError
from efficient_ft.cost import Demand
from efficient_ft.cost.executed import count
from efficient_ft.cost.probe import Probe, undisturbed
from efficient_ft.methods.base import Method
from efficient_ft.methods.build import build_methods
from efficient_ft.models import factory
from efficient_ft.models.view import view
from efficient_ft.models.weight_dtype import store_weights
from efficient_ft.training.callbacks.ema import RunOptimizer
from efficient_ft.training.costs import step_spec
from efficient_ft.training.kinds.registry import kind_of
from efficient_ft.training.memory.budget import Predictor
from efficient_ft.training.optimizer import build_optimizer


@dataclass(frozen=True)
class Counted:
    """Counts of one optimizer step of a recipe, including all micro-batches.

    Attributes:
        resident_bytes: size of the model and the batch, which exist before the step.
        step_bytes: peak memory of the step in addition to `resident_bytes`, including the optimizer's state and
            accumulated gradients.
        largest_bytes: size of the largest tensor that an operation creates.
        optimizer_bytes: size of the optimizer's state, which is included in `step_bytes`.
        flops: number of FLOPs of the step.
        trainable: number of trainable parameters.
        gradient_bytes: size of the gradients of all trainable parameters.
        ema_bytes: size of the averaged weights, which is included in `step_bytes`.
    """

    resident_bytes: int
    step_bytes: int
    largest_bytes: int
    optimizer_bytes: int
    flops: float
    trainable: int
    gradient_bytes: int = 0
    ema_bytes: int = 0

    @property
    def peak_bytes(self) -> int:
        """Counted peak memory in bytes, including the model, the batch and the optimizer's state."""
        return self.resident_bytes + self.step_bytes


class Counter:
    """Count steps of recipes. `config` names the network, which has `num_classes` classes."""

    def __init__(self, config: Config, num_classes: int) -> None:
        self._config, self.classes = config, num_classes
        self._light = self.network().to("meta")
        self.blocks = len(view(self._light).blocks)
        self.parameters = sum(p.numel() for p in self._light.parameters())
        self._found: dict[str, Counted] = {}
        self._shares: dict[int, float] = {}

    def network(self) -> nn.Module:
        """Return a new network with random weights on the CPU."""
        network = kind_of(self._config).random_network(self._config.model, self.classes)
        return store_weights(network, self._config.trainer.weight_dtype)

    def __call__(self, config: Config, methods: list[Method] | None = None) -> Counted:
        """Count a step of the run `config`, which uses the network of this counter.

        Raises:
            UserError: If the methods cannot be built or applied to the network.
        """
        plain = config.model_copy(update={"optim": config.optim.model_copy(update={"state_bits": 32})})
        key = plain.model_dump_json(include={"method", "optim", "trainer", "data"})
        if key not in self._found:
            self._found[key] = self._count(plain, build_methods(config) if methods is None else methods)
        counted, bits = self._found[key], config.optim.state_bits
        if bits == 32 or not counted.optimizer_bytes:
            return counted
        small = round(counted.optimizer_bytes * self._share(config, bits))
        return replace(counted, step_bytes=counted.step_bytes - counted.optimizer_bytes + small, optimizer_bytes=small)

    def _share(self, config: Config, bits: int) -> float:
        """Return the size of the full optimizer state with `bits` bits, divided by the size with 32 bits."""
        if bits not in self._shares:
            sizes = []
            for of in (32, bits):
                optim = config.optim.model_copy(update={"state_bits": of, "in_backward": False})
                build = functools.partial(build_optimizer, optim=optim, precision=config.trainer.precision)
                sizes.append(Probe(self._light, (), step_spec(config), build).optimizer_bytes())
            self._shares[bits] = sizes[1] / sizes[0]
        return self._shares[bits]

    def _count(self, config: Config, methods: list[Method]) -> Counted:
        spec = step_spec(config)
        warm, build = max((method.warmup_steps for method in methods), default=0), RunOptimizer(config)
        with set_context("short_reports", True):
            probe = Probe(self.network() if warm else self._light, methods, spec, build)
        with undisturbed():
            probe.warm_up()
            try:
                steps = probe.watch(spec.batch_size, True, [(step, False) for step in range(probe.methods.cost_steps)])
            except UserError:
                raise
            except Exception:  # the model does not support fake tensors (see `executed`)
                probe = Probe(self.network(), methods, spec, build)
                probe.warm_up()
                counted = count(probe)
                resident, peak = counted.model_bytes + counted.batch_bytes, counted.peak_bytes
                optimizer, flops = counted.optimizer_bytes or 0, counted.flops * spec.batch_size
                largest = counted.largest_bytes
            else:
                resident, peak = steps[0].model_bytes + steps[0].batch_bytes, max(step.peak for step in steps)
                optimizer, largest = steps[0].optimizer_bytes or 0, max(step.largest for step in steps)
                flops = sum(sum(step.flops.values()) for step in steps) / len(steps)
        trains = [p for p in probe.model.parameters() if p.requires_grad]
        parts = config.trainer.grad_accum_steps
        gradients = sum(p.numel() * p.element_size() for p in trains)
        return Counted(
            resident_bytes=resident,
            step_bytes=peak - resident + optimizer + build.average_bytes + (gradients if parts > 1 else 0),
            largest_bytes=largest,
            optimizer_bytes=optimizer,
            flops=flops * parts,
            trainable=sum(p.numel() for p in trains),
            gradient_bytes=gradients,
            ema_bytes=build.average_bytes,
        )


class RunPhases:
    """Compute the memory demand of recipes from their counts. All recipes share the demand of evaluation and reading.

    Evaluation is counted once for each batch size, on the network without methods. `base` is the run without a recipe.
    """

    def __init__(self, base: Config) -> None:
        kind = kind_of(base)
        images = None if kind.missing(base) else kind.open(base, factory.input_of(base.model))
        self._predictor = Predictor(base, images, 0, torch.device("cpu"))
        self._shared: dict[str, Demand] = {}

    def demand(self, config: Config, counted: Counted) -> Demand:
        """Return the memory demand of the run `config`, whose step has the counts `counted`."""
        key = config.model_dump_json(include={"data", "trainer"})
        if key not in self._shared:
            self._shared[key] = self._predictor.around(config)
        shared = self._shared[key]
        return replace(
            shared,
            model_bytes=max(counted.resident_bytes - shared.batch_bytes, shared.model_bytes),
            step_bytes=counted.step_bytes,
            largest_bytes=counted.largest_bytes,
            optimizer_bytes=counted.optimizer_bytes + counted.ema_bytes,
            gradient_bytes=counted.gradient_bytes if config.trainer.grad_accum_steps > 1 else 0,
        )
