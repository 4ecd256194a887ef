"""Bits of each packed tensor under a budget of bytes, chosen by how much packing it changes the gradient.

In the steps of the profile every tensor is kept in 8 bits. When the backward pass reaches the output of a part of the
model, it runs from there down once as it is, and once more for each tensor that the part packs, with that tensor alone
rounded to 3 bits: the change of the gradient is measured, through all layers below. The change is the sum, over the
parts of the model, of the squared norm of the difference, relative to that of the part's own gradient: optimizers such
as Adam do not mind that one part's gradient is larger than another's.

The changes of several tensors add up, since their rounding errors are independent, and for each the change is
proportional to the squared rounding error, which gives the change at 2 and 4 bits. (On a trained small ViT the sum is
within 5 % of the change when all are rounded, and the two ratios within a tenth, for the median tensor.) Bits are then
bought where they lower the sum most for their bytes.

ActNN (Chen et al., ICML 2021) and GACT (Liu et al., ICML 2022) choose bits by the sensitivity of the gradient's
variance to them; measured changes, and relative to each part, are ours.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import GradientEdge
from torch.utils._pytree import tree_flatten, tree_unflatten

from efficient_ft.core.distributed import all_reduce_sum
from efficient_ft.methods.memory.packing import PackedForward
from efficient_ft.ops.packed import PackingState
from efficient_ft.ops.packing import BITS, GroupBits, PackContext, Packed, group_pack, group_unpack
from efficient_ft.ops.tokens import attach_tokens, pop_tokens

#: Bits of every tensor during the profile, from which changes are measured.
_EXACT = 8
#: Bits to which a tensor is rounded to measure its change.
_TRIAL = 3
#: Further steps of a profile in which no gradient was finite or other than zero (fp16 overflow, a head of zeros).
_IN_VAIN = 16


def bits_per_value(bits: int, group: int) -> float:
    """Return the size of a packed value with its share of the group's minimum and step."""
    return bits + 32 / group


@dataclass
class ChosenBits(PackingState):
    """The profile, and the bits chosen in it.

    Attributes:
        budget: mean bits per packed value, with its share of minimum and step.
        group: values of a group.
        stochastic: round at random.
        profile_steps: steps to be measured.
        steps: steps measured.
        in_vain: steps in which nothing could be measured.
        values: per image, of each tensor packed in the profile, by the name of its `PackContext`.
        changes: of the gradient, by tensor and bits, summed over the steps measured.
        bits: of each tensor; None: the profile is not over.
    """

    budget: float = 4.5
    group: int = 64
    stochastic: bool = False
    profile_steps: int = 1
    steps: int = 0
    in_vain: int = 0
    values: dict[str, float] = field(default_factory=dict)
    changes: dict[str, dict[int, float]] = field(default_factory=dict)
    bits: dict[str, int] | None = None
    #: Of this step: the parts that have run, and the changes measured.
    _parts: dict[str, nn.Module] = field(default_factory=dict)
    _step: dict[str, dict[int, float]] = field(default_factory=dict)
    #: The tensor rounded in the backward pass that is running, and its squared rounding errors by bits.
    _trial: str | None = None
    _errors: dict[int, float] = field(default_factory=dict)

    @property
    def default_bits(self) -> int:
        """Bits of a tensor that was not measured: the most that the budget has for all alike."""
        return max(bits for bits in BITS if bits_per_value(bits, self.group) <= self.budget)

    # ------------------------------------------------------------------ packing
    def pack(self, x: Tensor, context: PackContext) -> Packed:
        """Pack x in the bits chosen for it."""
        bits = _EXACT if self.bits is None else self.bits.get(context.name, self.default_bits)
        packed = GroupBits(bits, self.group, self.stochastic).pack(x, context)
        if self.bits is not None:
            return packed
        self.values[context.name] = x.numel() / context.samples
        return Packed(packed.tensors, partial(self._unpack, context.name, packed.unpack))

    def _unpack(self, name: str, unpack: Any, *tensors: Tensor) -> Tensor:
        """Unpack; the tensor on trial is rounded."""
        x: Tensor = unpack(*tensors)
        if name != self._trial:
            return x
        rounded = {bits: self._rounded(x, bits) for bits in BITS if bits < _EXACT}
        self._errors = {bits: (y - x).float().square().sum().item() for bits, y in rounded.items()}
        return rounded[_TRIAL]

    def _rounded(self, x: Tensor, bits: int) -> Tensor:
        seed = torch.randint(2**31, (), device=x.device) if self.stochastic else None
        codes, ranges = group_pack(x, bits, self.group, seed)
        return group_unpack(codes, ranges, x.numel(), bits, x.dtype).view(x.shape)

    # ------------------------------------------------------------------ the profile
    def begin_part(self, name: str, module: nn.Module) -> None:
        """Note that a part of the model runs in a step of the profile."""
        self._parts[name] = module

    def measure(self, part: str, output: GradientEdge, g: Tensor) -> None:
        """Measure the changes for the tensors of a part, in the backward pass; once in a step.

        Args:
            part: its name.
            output: of the part.
            g: the gradient there.
        """
        names = [name for name in self.values if name.rpartition("/")[0] == part and name not in self._step]
        trained = {name: [p for p in module.parameters() if p.requires_grad] for name, module in self._parts.items()}
        parameters = [p for group in trained.values() for p in group]
        if self.bits is not None or self._trial is not None or isinstance(g, FakeTensor) or not names or not parameters:
            return

        def gradients() -> dict[str, list[Tensor]]:
            """By part; of the parts above there are none."""
            self.last.held = None
            found = iter(torch.autograd.grad(output, parameters, g, retain_graph=True, allow_unused=True))
            by_part = {
                name: [t for t in (next(found) for _ in group) if t is not None] for name, group in trained.items()
            }
            return {name: group for name, group in by_part.items() if group}

        try:
            self._trial = ""  # the gradients taken here are not measured in turn
            exact = gradients()
            sizes = {name: _squared_norm(group) for name, group in exact.items()}
            for name in names:
                self._trial, self._errors = name, {}
                change = 0.0
                for of, group in gradients().items():
                    if sizes[of]:
                        differences = [a - b for a, b in zip(group, exact[of], strict=True)]
                        change += _squared_norm(differences) / sizes[of]
                error = self._errors.get(_TRIAL, 0.0)
                self._step[name] = {bits: change * e / error if error else 0.0 for bits, e in self._errors.items()}
        finally:
            self._trial, self.last.held = None, None

    def step_end(self) -> None:
        """End a step. After the last one of the profile choose the bits; the same on all processes."""
        if self.bits is not None or not self.values:
            return
        names, levels = sorted(self.values), [bits for bits in BITS if bits < _EXACT]
        found = [[self._step.get(name, {}).get(bits, 0.0) for bits in levels] for name in names]
        self._parts, self._step = {}, {}
        sums = all_reduce_sum(torch.tensor(found, dtype=torch.float64)).tolist()
        if not 0 < sum(map(sum, sums)) < math.inf:
            self.in_vain += 1
        else:
            self.steps += 1
            for name, row in zip(names, sums, strict=True):
                of = self.changes.setdefault(name, dict.fromkeys(levels, 0.0))
                self.changes[name] = {bits: of[bits] + change for bits, change in zip(levels, row, strict=True)}
        if self.steps == self.profile_steps or self.in_vain == _IN_VAIN:
            measured = {name: values for name, values in sorted(self.values.items()) if any(self._change_of(name))}
            self.bits = choose_bits(measured, self.changes, self.budget, self.group)

    def _change_of(self, name: str) -> list[float]:
        return list(self.changes.get(name, {}).values())

    def note(self) -> str | None:
        """Return what was chosen, for the report; None: nothing yet."""
        if self.bits is None:
            return None
        if not self.bits:
            return f"bits=auto: no change of the gradient could be measured; all tensors in {self.default_bits} bits"
        total = sum(self.values[name] for name in self.bits)
        mean = sum(self.values[name] * bits_per_value(bits, self.group) for name, bits in self.bits.items()) / total
        by_part: dict[str, str] = {}
        for name in self.values:  # in the order in which they are packed
            if name in self.bits:
                part = name.rpartition("/")[0]
                by_part[part] = f"{by_part.get(part, part)} {self.bits[name]}"
        return f"bits=auto: {mean:.2f} bits per value with minimum and step; by tensor: {', '.join(by_part.values())}"

    # ------------------------------------------------------------------ state
    def state_dict(self) -> dict[str, Any]:
        """Return the profile and the choice."""
        changes = {name: [[bits, change] for bits, change in of.items()] for name, of in self.changes.items()}
        return {
            "steps": self.steps,
            "in_vain": self.in_vain,
            "values": dict(self.values),
            "changes": changes,
            "bits": None if self.bits is None else dict(self.bits),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from the state of `state_dict`."""
        self.steps, self.in_vain = state_dict["steps"], state_dict["in_vain"]
        self.values = dict(state_dict["values"])
        self.changes = {name: dict(of) for name, of in state_dict["changes"].items()}
        self.bits = None if state_dict["bits"] is None else dict(state_dict["bits"])


class ChosenBitsPacker:
    """The packer of a `ChosenBits`; one object for all kinds of tensors, so that each is packed once."""

    def __init__(self, chosen: ChosenBits) -> None:
        self.chosen = chosen

    def pack(self, x: Tensor, context: PackContext) -> Packed:
        """Pack x in the bits chosen for it."""
        return self.chosen.pack(x, context)


class ProfiledForward(PackedForward):
    """A packed forward pass that is measured during the profile."""

    @torch.compiler.disable
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        chosen = self.packing
        assert isinstance(chosen, ChosenBits)
        if chosen.bits is not None or not self.training or not torch.is_grad_enabled():
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
    """The output of a part, where the backward pass is measured. It keeps nothing: its node knows what is below."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, chosen: ChosenBits, part: str) -> Tensor:
        ctx.chosen, ctx.part = chosen, part
        return y.detach()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        node, index = ctx.next_functions[0]
        ctx.chosen.measure(ctx.part, GradientEdge(node, index), g)
        return g, None, None


def choose_bits(
    values: Mapping[str, float], changes: Mapping[str, Mapping[int, float]], budget: float, group: int
) -> dict[str, int]:
    """Choose the bits of each tensor: the smallest sum of changes that the budget allows, to within one tensor.

    From the fewest bits on, the step to more bits that lowers the sum most for its bytes is taken first.

    Args:
        values: number of values, by tensor.
        changes: of the gradient, by tensor and bits; 0 for bits that are not there.
        budget: mean bits per value, with minimum and step; at least that of the fewest bits.
        group: values of a group.
    """
    chosen = dict.fromkeys(values, min(BITS))
    left = (budget - bits_per_value(min(BITS), group)) * sum(values.values()) * (1 + 1e-9)
    while True:
        best = None
        for name, n in values.items():
            has = chosen[name]
            for bits in BITS:
                cost = n * (bits - has)
                if bits <= has or cost > left:
                    continue
                gain = (changes[name].get(has, 0.0) - changes[name].get(bits, 0.0)) / cost
                if gain > 0 and (best is None or gain > best[0]):
                    best = gain, name, bits, cost
        if best is None:
            return chosen
        _, name, chosen[name], cost = best
        left -= cost


def _squared_norm(tensors: list[Tensor]) -> float:
    return float(torch.stack([t.float().square().sum() for t in tensors]).sum())
