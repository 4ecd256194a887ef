"""The frozen prefix of a network: all computations before the first trained layer.

The output of a frozen prefix for an image is the same in every step, so it can be computed once and stored.
`find_prefix` cuts the network after a module, and checks the cut by running the rest of the network from the stored
output. In this check, the network runs its own forward pass. The last module before the cut returns the stored output,
and the other modules before the cut return empty placeholders. Therefore, the check makes no assumptions about the
architecture.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_map_only

from efficient_ft.core.errors import UserError
from efficient_ft.models.frozen_batch_norm import FROZEN
from efficient_ft.models.prefix_form import Folds, Form, find_folds, replaced_forwards
from efficient_ft.models.weight_dtype import autocast_for

#: Maximum number of cuts that are tried, starting with the last cut. Cuts in a residual branch are often invalid.
_TRIES = 12
#: Exceptions that a network may raise if its forward pass depends on values that are replaced by placeholders.
_NOT_REPLACEABLE = (RuntimeError, TypeError, ValueError, AttributeError, IndexError)


@dataclass(frozen=True)
class _Like:
    """Shape and data type of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def empty(self, n: int, device: torch.device) -> Tensor:
        """Return a tensor for `n` images that uses only the memory of a single value."""
        return torch.zeros((), dtype=self.dtype, device=device).expand(n, *self.shape[1:])


@dataclass
class _Call:
    """A call of a module. `entered` and `left` are the numbers of the events at the start and end of the call."""

    name: str
    entered: int
    left: int = -1
    output: Any = None
    #: Dimensions of the output tensor in memory order.
    order: tuple[int, ...] = ()
    carries_more: bool = False


class FrozenPrefix:
    """The part of a network before a cut. No parameter of this part is trained.

    `find_prefix` creates instances of this class.

    Attributes:
        end: Name of the last module of the prefix.
        shape: Shape of the features of one image.
        dtype: Data type of the features.
        reason: Reason why the prefix ends, for example ``stages.3.blocks.0.norm1 trains``.
        model: The whole network.
        form: Way in which `features` computes the prefix. See `models.prefix_form`.
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
        """The device of the network."""
        return next(self.model.parameters()).device

    @property
    def values(self) -> int:
        """The number of feature values per image."""
        return math.prod(self.shape)

    @property
    def parts(self) -> list[str]:
        """The names of the modules that are not called if the features are given."""
        return [self.end, *self._skipped]

    def digest(self) -> str:
        """Return 16 hexadecimal digits that identify the weights and buffers of the prefix."""
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
        """Return the features (B, ...) of images (B, C, H, W), in the network's memory layout."""
        if self.form is Form.FP32:
            return self._features(images)
        if self._folds is None:
            self._folds = find_folds(self.model, lambda: self._features(images[:1]))
        if self.form is Form.FOLDED:
            with self._folds.active():
                return self._features(images).to(self.dtype)
        with self._folds.active(torch.bfloat16), torch.autocast(images.device.type, dtype=torch.bfloat16):
            found = torch.cat([self._features(part) for part in self._folds.parts(images)])
        if not torch.is_autocast_enabled(images.device.type):  # otherwise, later layers convert the features themselves
            found = found.to(self.dtype)
        return self.from_rows(self.to_rows(found))

    def _features(self, images: Tensor) -> Tensor:
        def leave(module: nn.Module, args: Any, output: Tensor) -> None:
            raise _Left(output)

        try:
            with self.model.get_submodule(self.end).register_forward_hook(leave), autocast_for(self.model):
                self.model(images)
        except _Left as left:
            features: Tensor = left.args[0]
            return features
        raise RuntimeError(f"{self.end} was not called")

    def input(self, images: Tensor) -> AbstractContextManager[Tensor]:
        """Return `replaced` for the features of `images`, which are computed in each call."""
        return self.replaced(self.features(images))

    def to_rows(self, features: Tensor) -> Tensor:
        """Flatten features (B, ...) to rows (B, values) in memory order."""
        return features.permute(self._order).flatten(1)

    def from_rows(self, rows: Tensor) -> Tensor:
        """Convert rows (B, values) from `to_rows` back to features (B, ...) in the network's memory layout."""
        in_memory = rows.view(len(rows), *(self.shape[d - 1] for d in self._order[1:]))
        return in_memory.permute([self._order.index(d) for d in range(len(self._order))])

    @contextmanager
    def replaced(self, features: Tensor) -> Iterator[Tensor]:
        """Context manager that makes the network compute its output from `features` (B, ...) instead of its input.

        Yields:
            An empty placeholder (B, C, H, W) to pass to the network as images.
        """

        def empty(like: _Like) -> Tensor:
            return like.empty(len(features), features.device)

        def constant(result: Any) -> Callable[..., Any]:
            return lambda *args, **kwargs: result

        outputs = {name: tree_map_only(_Like, empty, output) for name, output in self._skipped.items()}
        outputs[self.end] = features
        with replaced_forwards((self.model.get_submodule(name), constant(out)) for name, out in outputs.items()):
            yield empty(self._image)


class _Left(Exception):
    """The exception that stops a forward pass at the end of the prefix, with the output of the prefix as argument."""


def find_prefix(model: nn.Module, images: Tensor) -> FrozenPrefix:
    """Find the largest frozen prefix of `model` whose output determines all later computations.

    The prefix ends before the first module that has a trainable parameter, draws random numbers, computes batch
    statistics, or returns a tensor with additional attributes.

    Args:
        model: Network on the CPU in training mode, to which all methods have been applied.
        images: At least two images (B, C, H, W).

    Raises:
        UserError: If there is no such prefix. The message states the reason.
    """
    with _restored_buffers(model):
        trace = _Trace(model)
        trace.run(images)
        expected = _seeded(model, images)  # runs without hooks, because layers with hooks may compute differently
        end, reason = trace.first_that_matters()
        below = [call for call in trace.calls if 0 <= call.left <= end and trace.counts[call.name] == 1]
        ends = [call for call in below if isinstance(call.output, _Like) and call.output.shape[0] == len(images)]
        for call in sorted(ends, key=lambda call: call.left, reverse=True)[:_TRIES]:
            inside = {one.name: one for one in below if one.left <= call.left}
            outermost = [one for one in inside.values() if not any(name in inside for name in _ancestors(one.name))]
            if call not in outermost:
                continue
            prefix = FrozenPrefix(model, call, outermost, tuple(images.shape[1:]), reason)
            if _continues(model, prefix, images, expected) and _continues_in_evaluation(model, prefix, images):
                return prefix
    below_it = "no layer precedes it" if not ends else "later layers also use values computed before this layer"
    raise UserError(f"No part of the network can be computed once: {reason}, and {below_it}.")


class _Trace:
    """A recorder of a forward pass. An event is the start or the end of a module call."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._modules = dict(model.named_modules())
        self.calls: list[_Call] = []
        self.counts: Counter[str] = Counter()
        self._active: list[_Call] = []
        self._events = 0
        self._state = torch.get_rng_state()
        #: Number of the event before the first random number is drawn, and the name of the module that draws it.
        self._drawn: tuple[int, str] | None = None

    def run(self, images: Tensor) -> None:
        """Record a forward pass of the model with the random numbers of `_seeded`."""
        with ExitStack() as hooks:
            for name, module in self._modules.items():
                hooks.enter_context(module.register_forward_pre_hook(lambda m, args, name=name: self._enter(name)))
                hooks.enter_context(module.register_forward_hook(lambda m, args, output: self._leave(output)))
            _seeded(self.model, images, self._start)

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
        self.counts[name] += 1
        self._active.append(self.calls[-1])

    def _leave(self, output: Any) -> None:
        number = self._event()
        call = self._active.pop()
        call.left, call.output = number, tree_map_only(Tensor, lambda t: _Like(tuple(t.shape), t.dtype), output)
        if isinstance(output, Tensor):
            call.order = (0, *sorted(range(1, output.dim()), key=output.stride().__getitem__, reverse=True))
            call.carries_more = bool(vars(output))

    def first_that_matters(self) -> tuple[int, str]:
        """Return the number of the event before the first computation that must run in every step, and the reason."""
        found = [(self._drawn[0], f"{self._drawn[1]} draws random numbers")] if self._drawn else []
        for call in self.calls:
            for name in self._own(call.name):
                module = self._modules[name]
                frozen = type(module) in FROZEN.values() or not module.training
                if any(p.requires_grad for p in module.parameters(recurse=False)):
                    found.append((call.entered - 1, f"{name or 'the network itself'} trains"))
                elif isinstance(module, _BatchNorm) and (module.running_mean is None or not frozen):
                    found.append((call.entered - 1, f"{name} computes batch statistics"))
            if call.carries_more:
                found.append((call.entered - 1, f"{call.name} returns a tensor with additional attributes"))
        assert found, "nothing in the network trains"
        return min(found)

    def _own(self, called: str) -> list[str]:
        """Return the module `called` and its submodules that were never called.

        The forward method of `called` may use the parameters of these submodules directly.
        """
        below = f"{called}." if called else ""
        uncalled = [name for name in self._modules if name.startswith(below) and name not in self.counts]
        return [called, *(n for n in uncalled if next((a for a in _ancestors(n) if a in self.counts), "") == called)]


def _continues_in_evaluation(model: nn.Module, prefix: FrozenPrefix, images: Tensor) -> bool:
    """Return True if the prefix is also valid in evaluation mode, in which a network may compute differently."""
    training = {module: module.training for module in model.modules()}
    model.eval()
    try:
        return _continues(model, prefix, images, _seeded(model, images))
    finally:
        for module, mode in training.items():
            module.training = mode


@contextmanager
def _restored_buffers(model: nn.Module) -> Iterator[None]:
    """Restore the values of all buffers at the end of a ``with`` block, because a forward pass may update buffers."""
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    try:
        yield
    finally:
        for name, buffer in model.named_buffers():
            buffer.copy_(before[name])


def _ancestors(name: str) -> list[str]:
    """Return the names of the modules that contain `name`, starting with the innermost and excluding the network."""
    parts = name.split(".")
    return [".".join(parts[:k]) for k in range(len(parts) - 1, 0, -1)]


@torch.no_grad()
def _seeded(model: nn.Module, images: Tensor, start: Any = lambda: None) -> Tensor:
    """Run the model with the same random numbers in every call. Call `start` after seeding."""
    with torch.random.fork_rng(devices=[]), autocast_for(model):
        torch.manual_seed(0)
        start()
        output: Tensor = model(images)
        return output


def _continues(model: nn.Module, prefix: FrozenPrefix, images: Tensor, expected: Tensor) -> bool:
    """Return True if the network computes the output `expected` from the stored output of the prefix."""
    try:
        rows = prefix.to_rows(prefix.features(images)).clone()
        with prefix.replaced(prefix.from_rows(rows)) as placeholder:
            return torch.equal(_seeded(model, placeholder), expected)
    except _NOT_REPLACEABLE:
        return False
