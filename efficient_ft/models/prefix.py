"""The frozen prefix of a network: all computations below the first trained layer.

Only the output of a frozen prefix matters. It is the same in every step for the same image, so it can be computed once
and stored. `find_prefix` finds a place to cut the network, and checks it by running the rest of the network from the
stored output. The check runs the network's own forward pass: modules below the cut return empty placeholders, and the
last one returns the stored output. This makes no assumptions about the architecture.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_map_only

from efficient_ft.core.errors import UserError
from efficient_ft.models.frozen_batch_norm import FROZEN
from efficient_ft.models.prefix_form import Folds, Form, autocast_of, find_folds

#: Number of candidate cuts, from the last one down. Cuts in a residual branch or before a second use are not valid.
_TRIES = 12
#: Exceptions of a network that depends on values that are replaced by placeholders.
_NOT_REPLACEABLE = (RuntimeError, TypeError, ValueError, AttributeError, IndexError)


@dataclass(frozen=True)
class _Like:
    """Shape and type of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def empty(self, n: int, device: torch.device) -> Tensor:
        """Return a tensor of N images that occupies the memory of one value."""
        return torch.zeros((), dtype=self.dtype, device=device).expand(n, *self.shape[1:])


@dataclass
class _Call:
    """A call of a module: the events of entering and leaving it, and its result."""

    name: str
    entered: int
    left: int = -1
    output: Any = None
    #: Dimensions of a tensor output in memory order.
    order: tuple[int, ...] = ()
    carries_more: bool = False


class FrozenPrefix:
    """A network that is cut after a module, below which no parameter trains. Created by `find_prefix`.

    Attributes:
        end: name of the last module of the prefix.
        shape: shape of the features of one image.
        dtype: type of the features.
        reason: why the prefix ends, e.g. ``stages.3.blocks.0.norm1 trains``.
        model: the network.
        form: form of the computation in `features`, see `models.prefix_form`.
    """

    def __init__(
        self, model: nn.Module, end: _Call, skipped: Sequence[_Call], image: tuple[int, ...], reason: str
    ) -> None:
        self.model, self._image = model, _Like((1, *image), torch.float32)
        self._skipped = {call.name: call.output for call in skipped if call.name != end.name}
        self.end, self.shape, self.dtype = end.name, end.output.shape[1:], end.output.dtype
        self._order, self.reason = end.order, reason
        self.form = Form.FP32
        self._folds: Folds | None = None

    @property
    def device(self) -> torch.device:
        """Device of the network."""
        return next(self.model.parameters()).device

    @property
    def values(self) -> int:
        """Number of values of the features of one image."""
        return math.prod(self.shape)

    def digest(self) -> str:
        """Return 16 hex digits that identify the weights and buffers of the prefix."""
        inside = {self.end, *self._skipped}
        around = {"", *(name for one in inside for name in _ancestors(one))}
        found = hashlib.blake2b(digest_size=8)
        for name, tensor in [*self.model.named_parameters(), *self.model.named_buffers()]:
            owner = name.rpartition(".")[0]
            if owner in around or not inside.isdisjoint([owner, *_ancestors(owner)]):
                found.update(name.encode())
                found.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
        return found.hexdigest()

    @torch.no_grad()
    def features(self, images: Tensor) -> Tensor:
        """Run the prefix.

        Args:
            images: (B, C, H, W).

        Returns:
            The features (B, ...), in the memory layout of the network.
        """
        if self.form is Form.FP32:
            return self._features(images)
        if self._folds is None:
            self._folds = find_folds(self.model, lambda: self._features(images[:1]))
        with self._folds.active(), autocast_of(self.form, images.device):
            return self._features(images).to(self.dtype)

    def _features(self, images: Tensor) -> Tensor:
        def leave(module: nn.Module, args: Any, output: Tensor) -> None:
            raise _Left(output)

        handle = self.model.get_submodule(self.end).register_forward_hook(leave)
        try:
            self.model(images)
        except _Left as left:
            return left.output
        finally:
            handle.remove()
        raise RuntimeError(f"{self.end} was not called")

    def to_rows(self, features: Tensor) -> Tensor:
        """Return features (B, ...) in storage order: (B, values), in the order of their memory."""
        return features.permute(self._order).flatten(1)

    def from_rows(self, rows: Tensor) -> Tensor:
        """Invert `to_rows`: return features (B, ...) in the memory layout of the network."""
        in_memory = rows.view(len(rows), *(self.shape[d - 1] for d in self._order[1:]))
        return in_memory.permute([self._order.index(d) for d in range(len(self._order))])

    @contextmanager
    def replaced(self, features: Tensor) -> Iterator[Tensor]:
        """Make the network compute from `features` instead of its input, in a ``with`` block.

        Args:
            features: (B, ...).

        Yields:
            An empty placeholder (B, C, H, W) to pass as images.
        """
        before = []

        def put(name: str, result: Any) -> None:
            module = self.model.get_submodule(name)
            before.append((module, module.__dict__.get("forward")))
            module.__dict__["forward"] = lambda *args, **kwargs: result

        def empty(like: _Like) -> Tensor:
            return like.empty(len(features), features.device)

        try:
            for name, output in self._skipped.items():
                put(name, tree_map_only(_Like, empty, output))
            put(self.end, features)
            yield empty(self._image)
        finally:
            for module, forward in before:
                if forward is None:
                    del module.__dict__["forward"]
                else:
                    module.__dict__["forward"] = forward


class _Left(Exception):
    """Ends a forward pass at the end of the prefix."""

    def __init__(self, output: Tensor) -> None:
        super().__init__()
        self.output = output


def find_prefix(model: nn.Module, images: Tensor) -> FrozenPrefix:
    """Find the largest frozen prefix of `model` whose output determines everything after it.

    The prefix ends before the first module that has a trainable parameter, draws random numbers, computes batch
    statistics, or returns a tensor that carries more than its values.

    Args:
        model: the network on the CPU, with its methods applied, in training mode.
        images: (B, C, H, W), at least two images.

    Raises:
        UserError: there is no such prefix; the message gives the reason.
    """
    with _buffers_kept(model):
        return _find_prefix(model, images)


def _find_prefix(model: nn.Module, images: Tensor) -> FrozenPrefix:
    trace = _Trace(model)
    trace.run(images)
    expected = _seeded(model, images)  # without hooks, because layers with hooks may compute differently
    end, reason = trace.first_that_matters()
    below = [call for call in trace.calls if 0 <= call.left <= end and trace.once(call)]
    ends = [call for call in below if isinstance(call.output, _Like) and call.output.shape[0] == len(images)]
    for call in sorted(ends, key=lambda call: call.left, reverse=True)[:_TRIES]:
        inside = {one.name: one for one in below if one.left <= call.left}
        outermost = [one for one in inside.values() if not any(name in inside for name in _ancestors(one.name))]
        if call not in outermost:
            continue
        prefix = FrozenPrefix(model, call, outermost, tuple(images.shape[1:]), reason)
        if _continues(model, prefix, images, expected) and _continues_in_evaluation(model, prefix, images):
            return prefix
    below_it = "nothing is below it" if not ends else "what is below it is used again later"
    raise UserError(f"No part of the network can be computed once: {reason}, and {below_it}.")


class _Trace:
    """Record a forward pass as a sequence of events."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._modules = dict(model.named_modules())
        self.calls: list[_Call] = []
        self._counts: Counter[str] = Counter()
        self._active: list[_Call] = []
        self._events = 0
        self._state = torch.get_rng_state()
        #: The event before the first random number, and the module that drew it.
        self._drawn: tuple[int, str] | None = None

    def run(self, images: Tensor) -> None:
        """Run the model as in `_seeded`."""
        handles = []
        for name, module in self._modules.items():
            handles.append(module.register_forward_pre_hook(lambda m, args, name=name: self._enter(name)))
            handles.append(module.register_forward_hook(lambda m, args, output: self._leave(output)))
        try:
            _seeded(self.model, images, self._start)
        finally:
            for handle in handles:
                handle.remove()

    def _start(self) -> None:
        self._state = torch.get_rng_state()

    def _event(self) -> int:
        state = torch.get_rng_state()
        if self._drawn is None and not torch.equal(state, self._state):
            self._drawn = self._events, self._active[-1].name
        self._state = state
        self._events += 1
        return self._events

    def _enter(self, name: str) -> None:
        self.calls.append(_Call(name, self._event()))
        self._counts[name] += 1
        self._active.append(self.calls[-1])

    def _leave(self, output: Any) -> None:
        number = self._event()
        call = self._active.pop()
        call.left, call.output = number, tree_map_only(Tensor, lambda t: _Like(tuple(t.shape), t.dtype), output)
        if isinstance(output, Tensor):
            call.order = (0, *sorted(range(1, output.dim()), key=output.stride().__getitem__, reverse=True))
            call.carries_more = bool(vars(output))

    def once(self, call: _Call) -> bool:
        """Return True if the module of `call` was called once."""
        return self._counts[call.name] == 1

    def first_that_matters(self) -> tuple[int, str]:
        """Return the event before the first computation that differs between steps, and the reason."""
        found = [(self._drawn[0], f"{self._drawn[1]} draws random numbers")] if self._drawn else []
        for call in self.calls:
            for name in self._own(call.name):
                module = self._modules[name]
                if any(p.requires_grad for p in module.parameters(recurse=False)):
                    found.append((call.entered - 1, f"{name or 'the network itself'} trains"))
                elif isinstance(module, _BatchNorm) and _is_live(module):
                    found.append((call.entered - 1, f"{name} computes statistics of the batch"))
            if call.carries_more:
                found.append((call.entered - 1, f"{call.name} passes on more than its values"))
        assert found, "nothing in the network trains"
        return min(found)

    def _own(self, called: str) -> list[str]:
        """A module and those below it that were never called: what it does with their parameters is its own doing."""
        below = f"{called}." if called else ""
        uncalled = [name for name in self._modules if name.startswith(below) and name not in self._counts]
        return [called, *(n for n in uncalled if next((a for a in _ancestors(n) if a in self._counts), "") == called)]


def _continues_in_evaluation(model: nn.Module, prefix: FrozenPrefix, images: Tensor) -> bool:
    """Check the prefix in evaluation mode, where a network may compute differently."""
    training = {module: module.training for module in model.modules()}
    model.eval()
    try:
        return _continues(model, prefix, images, _seeded(model, images))
    finally:
        for module, mode in training.items():
            module.training = mode


@contextmanager
def _buffers_kept(model: nn.Module) -> Iterator[None]:
    """Restore the values of buffers, such as statistics updated by a forward pass, at the end of the block."""
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    try:
        yield
    finally:
        for name, buffer in model.named_buffers():
            buffer.copy_(before[name])


def _is_live(norm: _BatchNorm) -> bool:
    """Return True if the layer uses batch statistics."""
    return norm.running_mean is None or (norm.training and type(norm) not in FROZEN.values())


def _ancestors(name: str) -> list[str]:
    """Return the names of the parent modules of a module, the nearest first, without the network."""
    parts = name.split(".")
    return [".".join(parts[:k]) for k in range(len(parts) - 1, 0, -1)]


@torch.no_grad()
def _seeded(model: nn.Module, images: Tensor, start: Any = lambda: None) -> Tensor:
    """Run the model with the same random numbers in every call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        start()
        output: Tensor = model(images)
        return output


def _continues(model: nn.Module, prefix: FrozenPrefix, images: Tensor, expected: Tensor) -> bool:
    """Return True if the network computes the same result from the stored output as from the images."""
    try:
        rows = prefix.to_rows(prefix.features(images)).clone()
        with prefix.replaced(prefix.from_rows(rows)) as placeholder:
            return torch.equal(_seeded(model, placeholder), expected)
    except _NOT_REPLACEABLE:
        return False
