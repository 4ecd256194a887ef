"""Selection of bits and group size for each packed tensor under a byte budget, by the change of the gradient.

During the profile, all tensors are saved in 8 bits. When the backward pass reaches the output of a part of the model,
it runs once from this output without changes. It then runs again for each tensor that the part packs, with only this
tensor rounded to 3 bits. The change is the squared norm of the difference, relative to the squared norm of the part's
own gradient, summed over the parts of the model. It is relative because optimizers such as Adam are insensitive to the
scale of a part's gradient.

The changes of several tensors are additive, because their rounding errors are independent. The change of each tensor is
proportional to the squared rounding error, which yields the change for all other formats. On a trained small ViT, the
sum is within 5 % of the change when all tensors are rounded. Bits are then assigned where they reduce the sum most.

A part that is frozen in a profiling step (`lisa`, `uniform_layers`) is not measured in this step, because its effect on
the gradients of other parts does not predict the effect on its own gradient.

ActNN (Chen et al., ICML 2021) and GACT (Liu et al., ICML 2022) select bits by the sensitivity of the gradient's
variance. Measuring the change relative to each part is our extension.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import GradientEdge
from torch.utils._pytree import tree_flatten, tree_unflatten

from efficient_ft.core.distributed import all_reduce_sum
from efficient_ft.methods.memory.packing import PackedForward
from efficient_ft.ops.saving import PackingState
from efficient_ft.ops.storage import BITS, GroupBits, PackContext, Packed, group_length, group_pack, group_unpack
from efficient_ft.ops.tokens import attach_tokens, pop_tokens

#: Storage format of a tensor: bits per value, and values per group.
Form = tuple[int, int]
#: Bits of every tensor during the profile. Changes are measured relative to this precision.
_EXACT = 8
#: Bits to which a tensor is rounded to measure its change.
_TRIAL = 3
#: Number of steps without a finite, nonzero gradient (fp16 overflow, zero-initialized head) after which a profile ends.
_IN_VAIN = 16


def bits_per_value(form: Form) -> float:
    """Return the bits per packed value, including the value's part of the group's minimum and step."""
    bits, group = form
    return bits + 32 / group


def packed_bits(n: int, form: Form) -> int:
    """Return the number of bits of n packed values. The last group may be padded."""
    bits, group = form
    length = group_length(n, group)
    return -(-n // length) * (bits * length + 32)


@dataclass
class ChosenBits(PackingState):
    """The profile and the selected storage formats.

    Attributes:
        budget: mean number of bits per packed value, including minimum and step.
        groups: allowed numbers of values per group.
        stochastic: if True, values are rounded stochastically.
        profile_steps: number of steps to measure.
        steps: number of measured steps.
        in_vain: number of steps without a measurement.
        values: number of values of each tensor packed in the profile, by the name of its `PackContext`.
        changes: change of the gradient by tensor and format, summed over the measured steps.
        forms: selected format by tensor; None until the profile is finished.
    """

    budget: float = 4.5
    groups: tuple[int, ...] = (64,)
    stochastic: bool = False
    profile_steps: int = 1
    steps: int = 0
    in_vain: int = 0
    values: dict[str, int] = field(default_factory=dict)
    changes: dict[str, dict[Form, float]] = field(default_factory=dict)
    forms: dict[str, Form] | None = None
    #: State of the current step: part of each parameter by id, frozen parts, and measured changes.
    _part_of: dict[int, str] = field(default_factory=dict)
    _frozen: dict[str, nn.Module] = field(default_factory=dict)
    _step: dict[str, dict[Form, float]] = field(default_factory=dict)
    #: Tensor that is rounded in the running backward pass, and its squared rounding errors by format.
    _trial: str | None = None
    _errors: dict[Form, float] = field(default_factory=dict)

    @property
    def all_forms(self) -> list[Form]:
        """All formats in increasing order of size."""
        return sorted(((bits, group) for bits in BITS for group in self.groups), key=bits_per_value)

    @property
    def default(self) -> Form:
        """Format of a tensor that was not measured: the largest format that fits the budget for all tensors."""
        return max((f for f in self.all_forms if bits_per_value(f) <= self.budget), key=bits_per_value)

    def pack(self, x: Tensor, context: PackContext) -> Packed:
        """Pack x in its selected format."""
        form = (_EXACT, min(self.groups)) if self.forms is None else self.forms.get(context.name, self.default)
        packed = GroupBits(*form, self.stochastic).pack(x, context)
        if self.forms is not None:
            return packed
        self.values[context.name] = x.numel()
        return Packed(packed.tensors, partial(self._unpack, context.name, packed.unpack))

    def _unpack(self, name: str, unpack: Any, *tensors: Tensor) -> Tensor:
        x: Tensor = unpack(*tensors)
        if name != self._trial:
            return x
        rounded = {form: self._rounded(x, *form) for form in self.all_forms if form[0] < _EXACT}
        self._errors = {form: (y - x).float().square().sum().item() for form, y in rounded.items()}
        return rounded[_TRIAL, min(self.groups)]

    def _rounded(self, x: Tensor, bits: int, group: int) -> Tensor:
        seed = self.noise.next_seed(x.device) if self.stochastic else None
        codes, ranges = group_pack(x, bits, group, seed)
        return group_unpack(codes, ranges, x.numel(), bits, x.dtype).view(x.shape)

    def begin_part(self, name: str, module: nn.Module) -> None:
        """Record that a part of the model runs in a profiling step."""
        self._part_of.update((id(p), name) for p in module.parameters())
        if not _trains(module):
            self._frozen[name] = module

    def measure(self, part: str, output: GradientEdge, g: Tensor) -> None:
        """Measure the changes for the tensors of a part, once per step, in the backward pass with the gradient `g`."""
        names = [name for name in self.values if _part(name) == part and name not in self._step]
        if self.forms is not None or self._trial is not None or isinstance(g, FakeTensor) or not names:
            return
        parameters = _parameters_below(output.node)
        if not parameters:
            return
        parts = [self._part_of.get(id(p), "") for p in parameters]

        def gradients() -> dict[str, list[Tensor]]:
            """Return the gradients by part. Parameters outside of all parts form one group."""
            self.last.held = None
            by_part: dict[str, list[Tensor]] = {}
            found = torch.autograd.grad(output, parameters, g, retain_graph=True, allow_unused=True)
            for name, t in zip(parts, found, strict=True):
                by_part.setdefault(name, []).extend([] if t is None else [t])
            return by_part

        try:
            self._trial = ""  # the backward passes that run here must not be measured
            exact = gradients()
            sizes = {name: _squared_norm(group) for name, group in exact.items()}
            for name in names:
                self._trial, self._errors = name, {}
                change = 0.0
                for of, group in gradients().items():
                    if sizes[of]:
                        differences = [a - b for a, b in zip(group, exact[of], strict=True)]
                        change += _squared_norm(differences) / sizes[of]
                error = self._errors.get((_TRIAL, min(self.groups)), 0.0)
                self._step[name] = {form: change * e / error if error else 0.0 for form, e in self._errors.items()}
        finally:
            self._trial, self.last.held = None, None

    def step_end(self) -> None:
        """End a step. After the last profiling step, select the formats, which are equal on all processes."""
        if self.forms is not None or not self.values:
            return
        names, forms = sorted(self.values), [form for form in self.all_forms if form[0] < _EXACT]
        # Selections have already ended the step. Paused parts therefore require gradients again, unlike permanently
        # frozen parts.
        paused = {part for part, module in self._frozen.items() if _trains(module)}
        measured_now = {name: of for name, of in self._step.items() if _part(name) not in paused}
        found = [[measured_now.get(name, {}).get(form, 0.0) for form in forms] for name in names]
        self._part_of, self._frozen, self._step = {}, {}, {}
        sums = all_reduce_sum(torch.tensor(found, dtype=torch.float64)).tolist()
        if not 0 < sum(map(sum, sums)) < math.inf:
            self.in_vain += 1
        else:
            self.steps += 1
            for name, row in zip(names, sums, strict=True):
                before = self.changes.get(name, {})
                self.changes[name] = {f: before.get(f, 0.0) + change for f, change in zip(forms, row, strict=True)}
        if self.steps == self.profile_steps or self.in_vain == _IN_VAIN:
            # The last batches and the padded lengths of texts may differ between processes.
            counts = all_reduce_sum(torch.tensor([self.values[name] for name in names])).tolist()
            found_at = dict(zip(names, counts, strict=True))
            measured = {name: n for name, n in found_at.items() if any(self.changes.get(name, {}).values())}
            self.forms = choose_forms(measured, self.changes, self.budget, self.all_forms)

    def note(self) -> str | None:
        """Return a description of the selected formats, or None before the selection."""
        if self.forms is None:
            return None
        bits, group = self.default
        if not self.forms:
            return f"bits=auto: no change of the gradient was measured; all tensors have {bits} bits, groups of {group}"
        total = sum(self.values[name] for name in self.forms)
        mean = sum(packed_bits(self.values[name], form) for name, form in self.forms.items()) / total
        by_part: dict[str, str] = {}
        for name in self.values:  # in packing order
            if name in self.forms:
                part, form = _part(name), "{}/{}".format(*self.forms[name])
                by_part[part] = f"{by_part.get(part, part)} {form}"
        listed = ", ".join(by_part.values())
        return f"bits=auto: {mean:.2f} bits per value with minimum and step; bits/group of each tensor: {listed}"

    def state_dict(self) -> dict[str, Any]:
        """Return the profile and the selected formats."""
        return {
            "steps": self.steps,
            "in_vain": self.in_vain,
            "values": dict(self.values),
            "changes": {name: [[*form, c] for form, c in of.items()] for name, of in self.changes.items()},
            "forms": None if self.forms is None else {name: list(form) for name, form in self.forms.items()},
            "noise": self.noise.state_dict() if self.noise.used else None,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state returned by `state_dict`."""
        if state_dict.get("noise") is not None:
            self.noise.load_state_dict(state_dict["noise"])
        self.steps, self.in_vain = state_dict["steps"], state_dict["in_vain"]
        self.values, forms = dict(state_dict["values"]), state_dict["forms"]
        self.changes = {name: {(b, g): c for b, g, c in of} for name, of in state_dict["changes"].items()}
        self.forms = None if forms is None else {name: (bits, group) for name, (bits, group) in forms.items()}


@dataclass(frozen=True, eq=False)
class ChosenBitsPacker:
    """Packer that uses a `ChosenBits`. All kinds of tensors share one packer, so that each tensor is packed once."""

    chosen: ChosenBits
    named: ClassVar[bool] = True

    def pack(self, x: Tensor, context: PackContext) -> Packed:
        """Pack x in its selected format."""
        return self.chosen.pack(x, context)


class ProfiledForward(PackedForward):
    """Packed forward pass that is measured during the profile."""

    @torch.compiler.disable
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        chosen = self.packing
        assert isinstance(chosen, ChosenBits)
        if chosen.forms is not None or not self.training or not torch.is_grad_enabled():
            return super().__call__(*args, **kwargs)
        chosen.begin_part(self.name, self.module)
        leaves, form = tree_flatten(super().__call__(*args, **kwargs))
        for i, y in enumerate(leaves):
            if isinstance(y, Tensor) and y.requires_grad:
                y, tokens = pop_tokens(y)
                leaves[i] = attach_tokens(_Output.apply(y, chosen, self.name), tokens)
                break
        return tree_unflatten(leaves, form)


class _Output(torch.autograd.Function):
    """Identity function for the output of a part, which measures the part in the backward pass. It saves no tensors."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, chosen: ChosenBits, part: str) -> Tensor:
        ctx.chosen, ctx.part = chosen, part
        return y.detach()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        node, index = ctx.next_functions[0]
        ctx.chosen.measure(ctx.part, GradientEdge(node, index), g)
        return g, None, None


def choose_forms(
    values: Mapping[str, int], changes: Mapping[str, Mapping[Form, float]], budget: float, forms: Sequence[Form]
) -> dict[str, Form]:
    """Select the format of each tensor that minimizes the sum of changes under the budget, up to the size of one
    tensor.

    All tensors start in the smallest format. Each iteration enlarges the format of the tensor whose change decreases
    most per bit. `forms` is sorted by size, and missing formats have a change of 0. `budget` is the mean number of bits
    per value, which must be at least the size of the smallest format.
    """
    chosen = dict.fromkeys(values, forms[0])
    left = budget * sum(values.values()) * (1 + 1e-9) - sum(packed_bits(n, forms[0]) for n in values.values())
    while True:
        best = None
        for name, n in values.items():
            has, of = chosen[name], changes[name]
            for form in forms:
                cost = packed_bits(n, form) - packed_bits(n, has)
                if not 0 < cost <= left:
                    continue
                gain = (of.get(has, 0.0) - of.get(form, 0.0)) / cost
                if gain > 0 and (best is None or gain > best[0]):
                    best = gain, name, form, cost
        if best is None:
            return chosen
        _, name, chosen[name], cost = best
        left -= cost


def _parameters_below(node: Any) -> list[Tensor]:
    """Return the parameters below `node`, except in compiled code, whose backward pass can run only once."""
    seen, nodes, found = {node}, [node], []
    while nodes:
        node = nodes.pop()
        if hasattr(node, "variable"):
            found.append(node.variable)
        for below, _ in () if "CompiledFunction" in node.name() else node.next_functions:
            if below is not None and below not in seen:
                seen.add(below)
                nodes.append(below)
    return found


def _part(name: str) -> str:
    """Return the part of the model to which a packed tensor belongs, without the number of the call."""
    return name.partition("/")[0].partition("(")[0]


def _trains(module: nn.Module) -> bool:
    return any(p.requires_grad for p in module.parameters())


def _squared_norm(tensors: list[Tensor]) -> float:
    return float(sum(t.float().square().sum() for t in tensors))
