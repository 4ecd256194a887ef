"""Selection of the number of bits and the group size for each packed tensor under a memory budget.

The selection is based on how much the gradient changes if a tensor is rounded. During the profile, all tensors are
saved in 8 bits. When the backward pass reaches the output of a part of the model, the gradients below this output are
first computed without further rounding. The gradients are then computed again for each tensor that the part packs, with
only this tensor rounded to 3 bits. The relative change of a part's gradient is the squared norm of the difference
between the two gradients, divided by the squared norm of the gradient without further rounding. The change for the
tensor is the sum of the relative changes over all parts that have a gradient. Relative changes are used because
optimizers such as Adam are insensitive to the scale of a part's gradient.

The changes for several tensors are additive, because the rounding errors of different tensors are independent. The
change for each tensor is proportional to its squared rounding error. The changes for all other formats are computed
from this relation. On a trained small ViT, the sum of the changes differs by at most 5 % from the change if all tensors
are rounded. Finally, additional bits are assigned to the tensors for which these bits reduce the sum most.

If a part is frozen in a profiling step (for example, by `lisa` or `uniform_layers`), the tensors of this part are not
measured in this step. The effect of these tensors on other gradients does not predict the effect on the frozen part.

ActNN (Chen et al., ICML 2021) and GACT (Liu et al., ICML 2022) select bits based on how strongly rounding affects the
variance of the gradient. These papers do not measure the change relative to the gradient of each part.
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

#: Storage format of a tensor: number of bits per value, and number of values per group.
Form = tuple[int, int]
#: Number of bits per value during the profile. Changes are measured relative to this precision.
_EXACT = 8
#: Number of bits to which a tensor is rounded to measure the change of the gradient.
_TRIAL = 3
#: The profile ends after this number of steps without a finite, nonzero gradient. Such steps occur, for example, after
#: an fp16 overflow or with a zero-initialized head.
_IN_VAIN = 16


def bits_per_value(form: Form) -> float:
    """Return the mean number of bits per packed value, including the minimum and the step of each group."""
    bits, group = form
    return bits + 32 / group


def packed_bits(n: int, form: Form) -> int:
    """Return the number of bits that `n` packed values require, including the padding of the last group."""
    bits, group = form
    length = group_length(n, group)
    return -(-n // length) * (bits * length + 32)


@dataclass(eq=False)
class ChosenBits(PackingState):
    """Packer that stores each tensor in a selected format, and the state of the profile that selects the formats.

    All kinds of tensors share one packer, so that each tensor is packed only once.

    Attributes:
        budget: mean number of bits per packed value, including the minimum and the step of each group.
        groups: group sizes that may be selected. A group size is the number of values that share a minimum and a step.
        stochastic: if True, values are rounded stochastically.
        profile_steps: number of steps in which changes must be measured.
        steps: number of steps in which changes have been measured.
        in_vain: number of steps without a finite, nonzero change of the gradient.
        values: number of values of each tensor that was packed in the profile. The keys are the names of the tensors.
        changes: change of the gradient for each tensor and each format, summed over the measured steps.
        forms: selected format of each tensor, or None before the end of the profile.
    """

    named: ClassVar[bool] = True
    budget: float = 4.5
    groups: tuple[int, ...] = (64,)
    stochastic: bool = False
    profile_steps: int = 1
    steps: int = 0
    in_vain: int = 0
    values: dict[str, int] = field(default_factory=dict)
    changes: dict[str, dict[Form, float]] = field(default_factory=dict)
    forms: dict[str, Form] | None = None
    #: State of the current step: the part that contains each parameter (keyed by id), the frozen parts, and the
    #: measured changes.
    _part_of: dict[int, str] = field(default_factory=dict)
    _frozen: dict[str, nn.Module] = field(default_factory=dict)
    _step: dict[str, dict[Form, float]] = field(default_factory=dict)
    #: Name of the tensor that is rounded in the current backward pass, and its squared rounding error for each format.
    _trial: str | None = None
    _errors: dict[Form, float] = field(default_factory=dict)

    @property
    def all_forms(self) -> list[Form]:
        """All formats, sorted by increasing size."""
        return sorted(((bits, group) for bits in BITS for group in self.groups), key=bits_per_value)

    @property
    def default(self) -> Form:
        """Format of tensors that were not measured: the largest format within the budget if all tensors used it."""
        return max((f for f in self.all_forms if bits_per_value(f) <= self.budget), key=bits_per_value)

    def pack(self, x: Tensor, context: PackContext) -> Packed:
        """Pack the tensor `x` in the format that was selected for this tensor."""
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
        """Record that a part of the model runs in the current profiling step."""
        self._part_of.update((id(p), name) for p in module.parameters())
        if not _trains(module):
            self._frozen[name] = module

    def measure(self, part: str, output: GradientEdge, g: Tensor) -> None:
        """Measure the changes for the tensors of a part, at most once per step. `g` is the gradient of its output."""
        names = [name for name in self.values if _part(name) == part and name not in self._step]
        if self.forms is not None or self._trial is not None or isinstance(g, FakeTensor) or not names:
            return
        parameters = _parameters_below(output.node)
        if not parameters:
            return
        parts = [self._part_of.get(id(p), "") for p in parameters]

        def gradients() -> dict[str, list[Tensor]]:
            """Return a mapping from parts to their gradients. Parameters outside of all parts form one group."""
            self.last.held = None
            by_part: dict[str, list[Tensor]] = {}
            found = torch.autograd.grad(output, parameters, g, retain_graph=True, allow_unused=True)
            for name, t in zip(parts, found, strict=True):
                by_part.setdefault(name, []).extend([] if t is None else [t])
            return by_part

        try:
            self._trial = ""  # With an empty name, the backward passes below are not measured.
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
        """End a step, and select the formats after the last profiling step. All processes select the same formats."""
        if self.forms is not None or not self.values:
            return
        names, forms = sorted(self.values), [form for form in self.all_forms if form[0] < _EXACT]
        # Selection methods have already ended the step. Parts that were frozen only in this step therefore require
        # gradients again, unlike permanently frozen parts.
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
            # Sum the counts, because the last batches and the padded lengths of texts may differ between processes.
            counts = all_reduce_sum(torch.tensor([self.values[name] for name in names])).tolist()
            found_at = dict(zip(names, counts, strict=True))
            measured = {name: n for name, n in found_at.items() if any(self.changes.get(name, {}).values())}
            self.forms = choose_forms(measured, self.changes, self.budget, self.all_forms)

    def note(self) -> str | None:
        """Return a description of the selected formats, or None if the formats have not been selected yet."""
        if self.forms is None:
            return None
        bits, group = self.default
        if not self.forms:
            return f"bits=auto: no change was measured, so all tensors use {bits} bits and groups of {group} values"
        total = sum(self.values[name] for name in self.forms)
        mean = sum(packed_bits(self.values[name], form) for name, form in self.forms.items()) / total
        by_part: dict[str, str] = {}
        for name in self.values:  # in packing order
            if name in self.forms:
                part, form = _part(name), "{}/{}".format(*self.forms[name])
                by_part[part] = f"{by_part.get(part, part)} {form}"
        listed = ", ".join(by_part.values())
        return (
            f"bits=auto: {mean:.2f} bits per value are used on average, including minimum and step; the number of bits"
            f" and the group size of each tensor are: {listed}"
        )

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


class ProfiledForward(PackedForward):
    """Forward pass that packs tensors. During the profile, the change of the gradient is measured for each tensor."""

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
    """Identity function for the output of a part. The backward pass measures the changes. No tensors are saved."""

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
    """Select a format for each tensor such that the sum of the changes is approximately minimal under the budget.

    All tensors start with the smallest format. Each iteration selects a larger format for the tensor whose change
    decreases most per additional bit. `forms` must be sorted by size. Formats that are missing from `changes` count as
    a change of 0. `budget` is the mean number of bits per value and must be sufficient for the smallest format.
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
    """Return the name of the part that packs the tensor `name`, without the call index."""
    return name.partition("/")[0].partition("(")[0]


def _trains(module: nn.Module) -> bool:
    return any(p.requires_grad for p in module.parameters())


def _squared_norm(tensors: list[Tensor]) -> float:
    return float(sum(t.float().square().sum() for t in tensors))
