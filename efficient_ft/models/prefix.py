"""The frozen prefix of a network: all computations before the first trained layer.

The output of a frozen prefix for an image is the same in every step, so it can be computed once and stored.
`find_prefix` cuts the network after a module, and checks the cut by running the rest of the network from the stored
output. In this check, the network runs its own forward pass. The last module before the cut returns the stored output,
and the other modules before the cut return empty placeholders. Therefore, the check makes no assumptions about the
architecture. If later layers use several outputs, as the decoder of a segmentation network does, all of these outputs
can be stored.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from efficient_ft.core.errors import UserError
from efficient_ft.core.inputs import Inputs
from efficient_ft.models.frozen_batch_norm import FROZEN
from efficient_ft.models.marks import ancestors, is_inside
from efficient_ft.models.prefix_form import Folds, Form, find_folds, replaced_forwards
from efficient_ft.models.weight_dtype import autocast_for

#: Maximum number of cuts that are tried, starting with the last cut. Cuts in a residual branch are often invalid.
_TRIES = 12
#: End of the reason for a prefix that ends before a BatchNorm layer whose statistics are not frozen.
BATCH_STATISTICS = "computes batch statistics"
#: End of the reason for a prefix that ends before dropout or a similar layer.
RANDOM_NUMBERS = "draws random numbers"
#: Inputs of text networks that layers after the prefix also use. These inputs are stored together with the features.
KEPT_INPUTS = ("attention_mask",)
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


@dataclass(frozen=True)
class _Output:
    """A tensor in the output of the module `module`. `index` is its position in the flattened output."""

    module: str
    index: int
    like: _Like
    #: Dimensions of the tensor in memory order.
    order: tuple[int, ...]

    @property
    def values(self) -> int:
        """The number of values per image."""
        return math.prod(self.like.shape[1:])

    def to_rows(self, tensor: Tensor) -> Tensor:
        """Flatten a tensor (B, ...) to rows (B, values) in memory order."""
        return tensor.permute(self.order).flatten(1)

    def from_rows(self, rows: Tensor) -> Tensor:
        """Convert rows (B, values) from `to_rows` back to a tensor (B, ...) in the same memory layout."""
        in_memory = rows.reshape(len(rows), *(self.like.shape[d] for d in self.order[1:]))
        return in_memory.permute([self.order.index(d) for d in range(len(self.order))])


@dataclass
class _Call:
    """A call of a module. `entered` and `left` are the numbers of the events at the start and end of the call."""

    name: str
    entered: int
    left: int = -1
    output: Any = None
    tensors: Sequence[_Output] = ()
    carries_more: bool = False


class FrozenPrefix:
    """The part of a network before a cut. No parameter of this part is trained.

    `find_prefix` creates instances of this class. Its *features* are the tensors that the layers after the cut use. If
    there is a single tensor, `features` returns this tensor (B, ...). If there are several tensors, `features` returns
    their values as rows (B, values).

    Attributes:
        end: Name of the last module of the prefix.
        shapes: Shape of each tensor for one image.
        dtype: Data type of the features.
        reason: Reason why the prefix ends, for example ``stages.3.blocks.0.norm1 trains``.
        model: The whole network.
        form: Way in which `features` computes the prefix. See `models.prefix_form`.
    """

    def __init__(
        self,
        model: nn.Module,
        end: str,
        stored: Sequence[_Output],
        skipped: Sequence[_Call],
        inputs: Any,
        reason: str,
    ) -> None:
        self.model, self._inputs, self.end, self.reason = model, inputs, end, reason
        self._stored, self._skipped = list(stored), {call.name: call.output for call in skipped}
        self.shapes = [one.like.shape[1:] for one in stored]
        self.dtype = reduce(torch.promote_types, (one.like.dtype for one in stored))
        self.form = Form.FP32
        self._folds: Folds | None = None

    @property
    def device(self) -> torch.device:
        """The device of the network."""
        return next(self.model.parameters()).device

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the features of one image."""
        return self.shapes[0] if len(self.shapes) == 1 else (self.values,)

    @property
    def values(self) -> int:
        """The number of feature values per image."""
        return sum(one.values for one in self._stored)

    @property
    def parts(self) -> list[str]:
        """The names of the modules that are not called if the features are given."""
        return list(self._skipped)

    def digest(self) -> str:
        """Return 16 hexadecimal digits that identify the weights and buffers of the prefix."""
        inside = frozenset(self._skipped)
        around = {"", *(name for one in inside for name in ancestors(one))}
        found = hashlib.blake2b(digest_size=8)
        for name, tensor in [*self.model.named_parameters(), *self.model.named_buffers()]:
            owner = name.rpartition(".")[0]
            if owner in around or is_inside(owner, inside):
                found.update(name.encode())
                found.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
        return found.hexdigest()

    @torch.no_grad()
    def features(self, images: Any) -> Tensor:
        """Return the features (B, ...) of images (B, C, H, W) or texts, in the network's memory layout."""
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

    def _features(self, images: Inputs) -> Tensor:
        outputs: dict[str, list[Any]] = {}

        def keep(name: str, output: Any) -> None:
            outputs[name] = tree_flatten(output)[0]
            if name == self.end:
                raise _Left

        with ExitStack() as hooks, suppress(_Left), autocast_for(self.model):
            for name in {self.end, *(one.module for one in self._stored)}:
                module = self.model.get_submodule(name)
                hooks.enter_context(module.register_forward_hook(lambda m, args, out, name=name: keep(name, out)))
            run_network(self.model, images)
        assert self.end in outputs, f"{self.end} was not called"
        tensors: list[Tensor] = [outputs[one.module][one.index] for one in self._stored]
        return tensors[0] if len(tensors) == 1 else torch.cat(list(map(_Output.to_rows, self._stored, tensors)), 1)

    def resized(self, images: Inputs) -> FrozenPrefix:
        """Return the same prefix for inputs of another size in evaluation mode. The network must be on the CPU.

        Args:
            images: At least two images (B, C, H, W) or texts of the other size.
        """
        training = {module: module.training for module in self.model.modules()}
        self.model.eval()
        try:
            trace = _Trace(self.model)
            trace.run(images)
        finally:
            for module, mode in training.items():
                module.training = mode
        calls = {call.name: call for call in trace.calls}
        stored = [
            next(one for one in calls[before.module].tensors if one.index == before.index) for before in self._stored
        ]
        skipped = [calls[name] for name in self._skipped]
        found = FrozenPrefix(self.model, self.end, stored, skipped, _likes(images), self.reason)
        found.form = self.form
        return found

    @property
    def size(self) -> tuple[int, ...]:
        """The size (H, W) of the images."""
        size: tuple[int, ...] = self._inputs.shape[-2:]
        return size

    def input(self, images: Tensor, *targets: Tensor) -> AbstractContextManager[Tensor]:
        """Return `replaced` for the features of `images`, which are computed in each call. `targets` are not used."""
        return self.replaced(self.features(images))

    def to_rows(self, features: Tensor) -> Tensor:
        """Flatten features to rows (B, values) in memory order."""
        return self._stored[0].to_rows(features) if len(self._stored) == 1 else features

    def from_rows(self, rows: Tensor) -> Tensor:
        """Convert rows (B, values) from `to_rows` back to features in the network's memory layout."""
        return self._stored[0].from_rows(rows) if len(self._stored) == 1 else rows

    @contextmanager
    def replaced(self, features: Tensor, given: Mapping[str, Tensor] = {}) -> Iterator[Any]:
        """Context manager that makes the network compute its output from `features` instead of its input.

        `given` contains the inputs of a text network that layers after the prefix use (`kept_inputs`).

        Yields:
            An empty placeholder (B, C, H, W) to pass to the network as images. For texts, a mapping with `given` and
            empty placeholders of the other inputs.
        """
        several, device = len(self._stored) > 1, features.device
        parts = features.split([one.values for one in self._stored], 1) if several else [features]
        outputs = {
            (one.module, one.index): one.from_rows(part).to(one.like.dtype) if several else part
            for one, part in zip(self._stored, parts, strict=True)
        }

        def output(name: str, likes: Any) -> Any:
            flat, form = tree_flatten(likes)
            made = [
                outputs.get((name, index), like.empty(len(features), features.device))
                if isinstance(like, _Like)
                else like
                for index, like in enumerate(flat)
            ]
            return tree_unflatten(made, form)

        def constant(result: Any) -> Callable[..., Any]:
            return lambda *args, **kwargs: result

        modules = {self.model.get_submodule(name): output(name, likes) for name, likes in self._skipped.items()}
        with replaced_forwards((module, constant(result)) for module, result in modules.items()):
            placeholder = tree_map_only(_Like, lambda like: like.empty(len(features), device), self._inputs)
            yield {**placeholder, **given} if given else placeholder


def kept_inputs(inputs: Inputs) -> dict[str, Tensor]:
    """Return the inputs of a text network that layers after the prefix use. Images have no such inputs."""
    return {name: inputs[name] for name in KEPT_INPUTS if name in inputs} if isinstance(inputs, Mapping) else {}


class _Left(Exception):
    """The exception that stops a forward pass at the end of the prefix."""


def find_prefix(model: nn.Module, images: Inputs, *, several: bool = False) -> FrozenPrefix:
    """Find the largest frozen prefix of `model` whose output determines all later computations.

    The prefix ends before the first module that has a trainable parameter, draws random numbers, computes batch
    statistics, or returns a tensor with additional attributes.

    Args:
        model: Network on the CPU in training mode, to which all methods have been applied.
        images: At least two images (B, C, H, W), or a mapping with the inputs of at least two texts, (B, L) each.
        several: If True, later layers may use several outputs of the prefix. If False, they may use only the output of
            its last module.

    Raises:
        UserError: If there is no such prefix. The message states the reason.
    """
    with _restored_buffers(model):
        trace = _Trace(model)
        trace.run(images)
        count = tree_flatten(_likes(images))[0][0].shape[0]
        expected = _seeded(model, images)  # runs without hooks, because layers with hooks may compute differently
        end, reason = trace.first_that_matters()
        below = [call for call in trace.calls if 0 <= call.left <= end and trace.counts[call.name] == 1]
        ends = [call for call in below if several or isinstance(call.output, _Like)]
        ends = [call for call in ends if any(one.like.shape[0] == count for one in call.tensors)]
        for call in sorted(ends, key=lambda call: call.left, reverse=True)[:_TRIES]:
            inside = {one.name: one for one in below if one.left <= call.left}
            outermost = [one for one in inside.values() if not any(name in inside for name in ancestors(one.name))]
            if call not in outermost:
                continue
            cut = partial(FrozenPrefix, model, call.name, skipped=outermost, inputs=_likes(images), reason=reason)
            works = partial(_works, cut, images, expected)
            calls = outermost if several else [call]
            stored = [one for c in calls for one in c.tensors if one.like.shape[0] == count]
            if works(stored):
                return cut(_needed(stored, works))
    below_it = "no layer precedes it" if not ends else "later layers also use values computed before this layer"
    raise UserError(f"The network has no frozen prefix (layers with constant outputs): {reason}, and {below_it}.")


def _needed(stored: Sequence[_Output], works: Callable[[Sequence[_Output]], bool]) -> list[_Output]:
    """Return the outputs in `stored` that later layers use. `works` states whether given outputs are sufficient.

    Outputs are dropped in halves, because most outputs are not used.
    """
    kept = list(stored)

    def drop(part: Sequence[_Output]) -> None:
        nonlocal kept
        left = [one for one in kept if one not in part]
        if works(left):
            kept = left
        elif len(part) > 1:
            drop(part[: len(part) // 2])
            drop(part[len(part) // 2 :])

    if len(stored) > 1:
        drop(stored[: len(stored) // 2])
        drop(stored[len(stored) // 2 :])
    return kept


def _works(
    cut: Callable[[Sequence[_Output]], FrozenPrefix], images: Inputs, expected: Tensor, stored: Sequence[_Output]
) -> bool:
    """Return True if the rest of the network computes the same output from the tensors in `stored`."""
    if not stored:
        return False
    prefix = cut(stored)
    return _continues(prefix.model, prefix, images, expected) and _continues_in_evaluation(prefix.model, prefix, images)


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

    def run(self, images: Inputs) -> None:
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
        call.left, call.output = number, tree_map_only(Tensor, _like, output)
        tensors = [(index, t) for index, t in enumerate(tree_flatten(output)[0]) if isinstance(t, Tensor) and t.dim()]
        call.tensors = [_Output(call.name, index, _like(t), _memory_order(t)) for index, t in tensors]
        call.carries_more = any(vars(t) for _, t in tensors)

    def first_that_matters(self) -> tuple[int, str]:
        """Return the number of the event before the first computation that must run in every step, and the reason."""
        found = [(self._drawn[0], f"{self._drawn[1]} {RANDOM_NUMBERS}")] if self._drawn else []
        for call in self.calls:
            for name in self._own(call.name):
                module = self._modules[name]
                frozen = type(module) in FROZEN.values() or not module.training
                if any(p.requires_grad for p in module.parameters(recurse=False)):
                    found.append((call.entered - 1, f"{name or 'the network itself'} trains"))
                elif isinstance(module, _BatchNorm) and (module.running_mean is None or not frozen):
                    found.append((call.entered - 1, f"{name} {BATCH_STATISTICS}"))
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
        return [called, *(n for n in uncalled if next((a for a in ancestors(n) if a in self.counts), "") == called)]


def _continues_in_evaluation(model: nn.Module, prefix: FrozenPrefix, images: Inputs) -> bool:
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


def _like(tensor: Tensor) -> _Like:
    return _Like(tuple(tensor.shape), tensor.dtype)


def _likes(inputs: Inputs) -> Any:
    """Return the shapes and data types of the inputs of a network, in the same structure."""
    return tree_map_only(Tensor, _like, dict(inputs) if isinstance(inputs, Mapping) else inputs)


def run_network(model: nn.Module, inputs: Inputs) -> Any:
    """Return the output of a network for images, or for a mapping with the inputs of texts."""
    return model(**inputs) if isinstance(inputs, Mapping) else model(inputs)


def _memory_order(tensor: Tensor) -> tuple[int, ...]:
    """Return the dimensions of a tensor (B, ...) in memory order. The dimension of the batch remains the first."""
    return (0, *sorted(range(1, tensor.dim()), key=tensor.stride().__getitem__, reverse=True))


@torch.no_grad()
def _seeded(model: nn.Module, images: Inputs, start: Any = lambda: None) -> Tensor:
    """Return the logits of the model with the same random numbers in every call. Call `start` after seeding."""
    with torch.random.fork_rng(devices=[]), autocast_for(model):
        torch.manual_seed(0)
        start()
        output: Any = run_network(model, images)
        logits: Tensor = getattr(output, "logits", output)  # `transformers` returns an object
        return logits


def _continues(model: nn.Module, prefix: FrozenPrefix, images: Inputs, expected: Tensor) -> bool:
    """Return True if the network computes the output `expected` from the stored output of the prefix."""
    try:
        rows = prefix.to_rows(prefix.features(images)).clone()
        with prefix.replaced(prefix.from_rows(rows), kept_inputs(images)) as placeholder:
            return torch.equal(_seeded(model, placeholder), expected)
    except _NOT_REPLACEABLE:
        return False
