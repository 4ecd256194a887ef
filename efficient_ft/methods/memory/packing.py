"""What every method that packs activations shares: where in a model, and for how long.

In training, parts of the model (blocks, stem, downsampling) run their forward pass inside a `PackedOperations` mode.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from efficient_ft.core.errors import UserError
from efficient_ft.methods.base import Applied
from efficient_ft.methods.forwards import put_around
from efficient_ft.methods.memory.base import MemoryForward, MemoryMethod
from efficient_ft.models.view import NOT_OF_IMAGES, OF_EXPERTS, ModelView, is_norm, view
from efficient_ft.ops.packed import PackedOperations, PackingState, Policy, packing_suspended


class _PackedForward(MemoryForward):
    """Packs in training what the module saves."""

    def __init__(self, module: nn.Module, name: str, policy: Policy, session: PackingState) -> None:
        super().__init__(module)
        self.name, self.policy, self.session = name, policy, session
        counts = (getattr(m, "num_heads", None) for m in module.modules())
        self.heads: int | None = next((count for count in counts if type(count) is int), None)

    @torch.compiler.disable  # the operations are taken as they run; around a packed part all may be compiled
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.training or not torch.is_grad_enabled():
            return self.within(*args, **kwargs)
        x = next((t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)), None)
        if x is None or not x.numel():
            return self.within(*args, **kwargs)
        with PackedOperations(self.policy, self.session, self.name, x.shape[0], self.heads):
            return self.within(*args, **kwargs)


class _PlainForward(MemoryForward):
    """Of a module inside a packed part that does not work on the images."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with packing_suspended():
            return self.within(*args, **kwargs)


class ActivationPacking(MemoryMethod):
    """Base of the methods that pack what the backward pass needs, by a `Policy`.

    In a model with attention, blocks and what lies between stages are packed, and a stem of several convolutions; the
    patch embedding, the final normalisation and the head stay dense and exact, as published. In a network without
    attention everything is packed, the stem and the classifier too, as published. Layers of which nothing needs a
    gradient keep nothing, whatever the method: what trains is not its business. torch.compile leaves packed parts as
    they are.
    """

    def policy(self) -> Policy:
        """How each kind of activation is kept."""
        raise NotImplementedError  # abstract

    def _left_plain(self, seen: ModelView) -> dict[str, str]:
        """Layers that this method leaves as they are, wherever they lie, with the reason."""
        return {}

    def _packs(self, module: nn.Module) -> bool:
        """Whether this kind of module is what the method is about: what the report names."""
        return isinstance(module, nn.Linear | nn.Conv2d) or is_norm(module)

    def _forward_of(
        self, module: nn.Module, name: str, session: PackingState, layers: dict[str, nn.Module]
    ) -> MemoryForward:
        """The forward of a part; `layers` are those of the part that are touched, by their full names."""
        return _PackedForward(module, name, self.policy(), session)

    def _apply(self, model: nn.Module) -> Applied:
        self._refuse_second(model)
        seen = view(model)
        parts, skipped = _parts(seen)
        plain = {x.name: x.why_not for x in seen.layers if x.why_not in (NOT_OF_IMAGES, OF_EXPERTS)}
        plain.update(self._left_plain(seen))
        inside = {
            part: [
                f"{part}.{name}" if name else part
                for name, module in model.get_submodule(part).named_modules()
                if self._packs(module)
            ]
            for part in parts
        }
        names = [name for part in parts for name in inside[part]]
        skipped.update({name: why for name, why in plain.items() if name in names})
        touched = tuple(name for name in names if name not in plain)
        if not touched:
            return Applied(self.name, (), skipped)
        session = self._begin()
        for part in parts:
            module = model.get_submodule(part)
            if part not in plain:
                layers = {name: model.get_submodule(name) for name in inside[part] if name not in plain}
                put_around(module, self._forward_of(module, part, session, layers))
        for name in plain:
            module = model.get_submodule(name)
            if name in names and name not in parts:
                put_around(module, _PlainForward(module))
        return Applied(self.name, touched, skipped)


def refuse_low_rank(model: nn.Module, who: str) -> None:
    """Raise UserError for a model with low-rank backward, whose layers compute and keep what no mode changes."""
    if any(hasattr(module, "low_rank") for module in model.modules()):
        raise UserError(
            f"{who} cannot be stacked with low-rank backward, whose layers have a dense forward pass of their own and"
            " keep their projected input."
        )


def _parts(seen: ModelView) -> tuple[list[str], dict[str, str]]:
    """Full names of the modules to be packed, none inside another, and those left dense, with the reason."""
    inner = [*seen.blocks, *(name for extras in seen.stage_extras for name in extras)]
    holders = {name.split(".")[0] for name in inner}
    around = [name for name, _ in seen.model.named_children() if name not in holders]
    if not any(layer.in_attention for layer in seen.layers):
        return [*around, *inner] if inner else around, {}
    parts, dense = list(inner), {}
    for name in around:
        convolutions = sum(isinstance(m, nn.Conv2d) for m in seen.model.get_submodule(name).modules())
        if name in seen.tail or any(h == name or h.startswith(f"{name}.") for h in seen.head):
            dense[name] = "the final normalisation or the head: dense, as published"
        elif convolutions > 1:
            parts.append(name)
        elif convolutions:
            dense[name] = "the patch embedding: dense, as published"
    return parts, dense
