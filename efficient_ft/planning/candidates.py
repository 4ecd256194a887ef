"""Recipes that a plan examines: combinations of methods and optimizers."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from efficient_ft.config import Config
from efficient_ft.methods import METHODS
from efficient_ft.methods.base import OURS
from efficient_ft.methods.declarations import Axis, Exactness


@dataclass(frozen=True)
class Candidate:
    """Recipe to examine.

    Attributes:
        methods: options of the group ``method``.
        settings: settings of the methods and the optimizer, as on the command line.
        exactness: declared exactness class of the updates.
        added: exactness class of the methods that the plan adds to the user's methods, or None if the user named no
            methods.
        evidence: for each part of the recipe, the evidence that the updates are exact.
        row: name of the studied row (`planning.prior`) with the loss of accuracy of the recipe without its memory
            method. The name is None if the recipe was not studied.
        in_backward: True if the optimizer steps inside the backward pass.
        state_bits: number of bits of the optimizer's moments.
        micro_batches: number of micro-batches with accumulated gradients.
        time_factor: step time with the memory method, divided by the time of a step that executes the same FLOPs
            without the method (measured with ``bench step``).
    """

    methods: tuple[str, ...]
    settings: tuple[str, ...] = ()
    exactness: Exactness = Exactness.UNKNOWN
    added: Exactness | None = None
    evidence: tuple[str, ...] = ()
    row: str | None = None
    in_backward: bool = False
    state_bits: int = 32
    micro_batches: int = 1
    time_factor: float = 1.0

    @property
    def name(self) -> str:
        """Short name of the recipe, for example ``full+low_bit:bits=4, 8-bit moments``."""
        parts = []
        for method in self.methods:
            own = [s.removeprefix(f"method.{method}.") for s in self.settings if s.startswith(f"method.{method}.")]
            parts.append(method + (":" + ",".join(own) if own else ""))
        notes = [] if self.state_bits == 32 else [f"{self.state_bits}-bit moments"]
        notes += ["steps in backward"] if self.in_backward else []
        notes += [f"{self.micro_batches} micro-batches"] if self.micro_batches > 1 else []
        return ", ".join(["+".join(parts), *notes])

    def arguments(self, config: Config) -> list[str]:
        """Return the command-line settings that turn the run `config` into this recipe."""
        names = self.methods[0] if len(self.methods) == 1 else f"[{','.join(self.methods)}]"
        arguments = [f"method={names}", *self.settings]
        if self.state_bits != config.optim.state_bits:
            arguments.append(f"optim.state_bits={self.state_bits}")
        if self.in_backward and not config.optim.in_backward:
            arguments.append("optim.in_backward=true")
            if config.optim.grad_clip_norm is not None:
                arguments.append("optim.grad_clip_norm=null")
        if self.micro_batches > 1:
            arguments.append(f"data.batch_size={-(-config.data.batch_size // self.micro_batches)}")
            if config.data.effective_batch_size is None:
                arguments.append(f"trainer.grad_accum_steps={config.trainer.grad_accum_steps * self.micro_batches}")
        return arguments


#: Evidence that a method is exact, keyed by the name of the method.
EVIDENCE = {
    "full": "full: plain fine-tuning",
    "compact": "compact: the gradients agree to 1e-10 in float64 (selftest 10)",
    "checkpointing": "checkpointing: the gradients are bitwise equal (selftest 10)",
}
#: Settings with which a method is exact.
_EXACT_IF: dict[str, dict[str, Any]] = {"full": {"train_norms": True}, "compact": {"activation_dtype": "same"},
             "checkpointing": {"input_dtype": "same"}}  # fmt: skip
_IN_BACKWARD_EVIDENCE = "steps in backward: each update uses the complete gradient, and no gradient is clipped"

#: Recipes of the memory axis. Each recipe has options, settings, an exactness class, and a relative step time: the step
#: time divided by the time of a step that executes the same FLOPs without the options. The times were measured with
#: DeiT-S and batch size 16 on two EPYC cores with AVX-512. For the preferred recipes, a plan measures the time instead.
_MEMORY: tuple[tuple[tuple[str, ...], tuple[str, ...], Exactness, float], ...] = (
    ((), (), Exactness.EXACT, 1.0),
    (("compact",), (), Exactness.EXACT, 1.05),
    (("checkpointing",), (), Exactness.EXACT, 1.0),
    (("low_bit",), (), Exactness.NEAR, 1.05),
    (("low_bit",), ("method.low_bit.bits=8",), Exactness.NEAR, 1.05),
    (("low_bit",), ("method.low_bit.bits=3",), Exactness.APPROXIMATE, 1.08),
    (("low_bit",), ("method.low_bit.bits=2",), Exactness.APPROXIMATE, 1.12),
    (("checkpointing",), ("method.checkpointing.input_dtype=int4",), Exactness.APPROXIMATE, 1.02),
)
#: The smallest recipes. A plan always examines these recipes first, to find out whether any recipe can fit.
SMALLEST = (("head",), ("last_stage",))
#: Index of the memory method that is combined with recipes that train a part of the network or reduce the computation.
#: Of the near exact methods, this method uses the least memory.
_OF_STACKS = (3,)
#: Indices of memory methods that are also examined with an optimizer that steps inside the backward pass.
_IN_BACKWARD = (1, 2, 3, 6)
#: Recipes of the optimizer axis. Each recipe has the number of bits of the moments, True if the optimizer steps inside
#: the backward pass, and an exactness class.
_OPTIMIZER: tuple[tuple[Literal[32, 8, 4], bool, Exactness], ...] = (
    (32, False, Exactness.EXACT),
    (32, True, Exactness.EXACT),
    (8, False, Exactness.NEAR),
    (8, True, Exactness.NEAR),
    (4, True, Exactness.APPROXIMATE),
)
#: Exactness class of the optimizer for each number of bits of the moments.
_OF_BITS = {32: Exactness.EXACT, 8: Exactness.NEAR, 4: Exactness.APPROXIMATE}


def candidates(config: Config, blocks: int, chosen: Sequence[str] = (), memory: bool = True) -> list[Candidate]:
    """Return the recipes to examine for a run with `blocks` blocks: the smallest recipes, then the most useful recipes.

    All recipes contain the user's methods, which are listed in `chosen`. If `memory` is True, recipes with memory
    methods are included.
    """
    stacks = [_named(config, chosen)] if chosen else list(_stacks(blocks))
    found: list[tuple[float, Candidate]] = []
    for k, stack in enumerate(stacks):
        whole = k == 0
        alone = stack.methods in SMALLEST
        kinds = (
            range(len(_MEMORY)) if whole else (0, *_OF_STACKS[: stack.methods != ("head",)]) if alone else _OF_STACKS
        )
        for at in kinds if memory else (0,):
            methods, settings, exactness, factor = _MEMORY[at]
            packed = replace(
                stack,
                methods=(*stack.methods, *methods),
                settings=(*stack.settings, *settings),
                exactness=max(stack.exactness, exactness),
                added=None if stack.added is None else max(stack.added, exactness),
                evidence=(*stack.evidence, *(EVIDENCE[name] for name in methods if exactness is Exactness.EXACT)),
                row=None if whole and exactness is not Exactness.EXACT else stack.row,
                time_factor=factor,
            )
            if whole:
                every = _with_optimizers(packed, config, at in _IN_BACKWARD)
                found += [(at + (2.5 if one.in_backward else 0), one) for one in every]
            else:
                found.append((SMALLEST.index(packed.methods) - 2 if packed.methods in SMALLEST else 4 + k / 2, packed))
    if not chosen:
        found += [(9 + k / 100, one) for k, one in enumerate(_declared())]
    return [candidate for _, candidate in sorted(found, key=lambda pair: pair[0])]


def _named(config: Config, chosen: Sequence[str]) -> Candidate:
    """Return the recipe with the user's methods. The recipe is exact only if all methods are exact."""
    evidence = [_evidence(name, settings) for name, settings in config.method.items()]
    exact = all(evidence)
    exactness = Exactness.EXACT if exact else Exactness.UNKNOWN
    return Candidate(tuple(chosen), (), exactness, Exactness.EXACT, tuple(evidence) if exact else ())


def _evidence(name: str, settings: Mapping[str, Any]) -> str:
    """Return the evidence that a method with these settings is exact, or an empty string if there is none."""
    if settings.get("select", "keep") not in ("keep", "all"):
        return ""
    if name in _EXACT_IF:
        return (
            EVIDENCE[name] if all(settings.get(key, value) == value for key, value in _EXACT_IF[name].items()) else ""
        )
    for one in METHODS[name].candidates:
        if one.exactness is Exactness.EXACT and _complete(name, one.settings) == _complete(name, settings):
            return f"{name}: {one.evidence}"
    return ""


def _complete(name: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return all settings of a method, including defaults."""
    parameters = inspect.signature(METHODS[name]).parameters.values()
    return {p.name: settings.get(p.name, p.default) for p in parameters}


def _declared() -> Iterator[Candidate]:
    """Yield the candidates that methods from other packages declare."""
    for name, method in METHODS.items():
        if method.distribution == OURS:
            continue
        stack = (name,) if method.axis is Axis.SELECTION else ("full", name)
        for one in method.candidates:
            settings = tuple(f"method.{name}.{key}={_value(value)}" for key, value in one.settings.items())
            part = Exactness.PART if method.axis in (Axis.SELECTION, Axis.ADAPTERS) else Exactness.EXACT
            evidence = (EVIDENCE["full"], f"{name}: {one.evidence}") if one.exactness is Exactness.EXACT else ()
            yield Candidate(stack, settings, max(part, one.exactness), evidence=evidence, time_factor=one.time_factor)


def _value(value: object) -> str:
    """Format the value of a setting as on the command line."""
    if value is None:
        return "null"
    if isinstance(value, list | tuple):
        return f"[{','.join(map(_value, value))}]"
    return str(value).lower() if isinstance(value, bool) else str(value)


def split(candidate: Candidate, config: Config) -> Iterator[Candidate]:
    """Yield `candidate` with 2, 4, 8, ... micro-batches, unless its optimizer steps inside the backward pass."""
    if candidate.in_backward:
        return
    if config.model.frozen_bn is not True:  # BatchNorm statistics depend on the micro-batch
        candidate = replace(candidate, exactness=max(candidate.exactness, Exactness.APPROXIMATE), evidence=())
    parts = 2
    while parts <= config.data.batch_size:
        if config.data.batch_size % parts == 0:
            yield replace(candidate, micro_batches=parts)
        parts *= 2


def _stacks(blocks: int) -> Iterator[Candidate]:
    """Yield the recipes without a memory method. The first recipe trains all parameters exactly."""
    part, near = Exactness.PART, Exactness.APPROXIMATE
    upper = f"[{','.join(map(str, range(blocks // 2, blocks)))}]"
    yield Candidate(("full",), (), Exactness.EXACT, evidence=(EVIDENCE["full"],), row="full")
    yield Candidate(("full", "lora"), (), part, row="full+lora")
    yield Candidate(("full", "lbp_dct"), ("method.lbp_dct.order=4",), near, row="full+dct4")
    if blocks > 1:
        yield Candidate(("blocks",), (f"method.blocks.blocks={upper}",), part)
    yield Candidate(("bsr",), (), part, row="bsr")
    yield Candidate(("last_stage",), (), part, row="last_stage")
    yield Candidate(("bitfit",), (), part, row="bitfit")
    yield Candidate(("head",), (), part, row="head")
    yield Candidate(("full", "tome"), ("method.tome.r=4",), near, row="full+tome4")
    if blocks > 1:
        yield Candidate(("blocks", "tome"), (f"method.blocks.blocks={upper}", "method.tome.r=16"), part,
                        row="blocks6+tome16+mesa")  # fmt: skip


def _with_optimizers(candidate: Candidate, config: Config, backward: bool) -> Iterator[Candidate]:
    """Yield a copy of the recipe for each possible optimizer.

    Optimizers that step inside the backward pass are included only if `backward` is True. An optimizer that the user
    chose is not changed.
    """
    optim, trainer = config.optim, config.trainer
    own = Candidate(()).state_bits != optim.state_bits or optim.in_backward
    if own or optim.name == "sgd":
        kinds = [(optim.state_bits, optim.in_backward, _OF_BITS[optim.state_bits])]
        if candidate.added is None:  # the user chose the optimizer, so recipes are ordered by their other parts
            candidate = replace(candidate, added=candidate.exactness)
        if optim.name == "sgd" and not optim.in_backward:
            kinds.append((32, True, Exactness.EXACT))
    else:
        kinds = list(_OPTIMIZER)
    alone = trainer.grad_accum_steps == 1 and trainer.precision != "fp16"
    alone = alone and trainer.devices in (1, "auto") and trainer.num_nodes == 1
    for bits, in_backward, exactness in kinds:
        if in_backward and not (optim.in_backward or (alone and backward)):
            continue
        if in_backward and not optim.in_backward and optim.grad_clip_norm is not None:
            exactness = max(exactness, Exactness.NEAR)  # gradients are no longer clipped
        evidence = candidate.evidence if max(candidate.exactness, exactness) is Exactness.EXACT else ()
        yield replace(
            candidate,
            state_bits=bits,
            in_backward=in_backward,
            exactness=max(candidate.exactness, exactness),
            added=candidate.added if own or candidate.added is None else max(candidate.added, exactness),
            evidence=(*evidence, _IN_BACKWARD_EVIDENCE) if evidence and in_backward else evidence,
            row=candidate.row if exactness is Exactness.EXACT else None,
        )
