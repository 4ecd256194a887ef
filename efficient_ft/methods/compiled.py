"""Compile the blocks of a network with ``torch.compile``.

Each block is compiled as a whole, and blocks with the same structure share the compiled code. A network of equal blocks
is therefore compiled as fast as a single block. Module names do not change, and copies of the network run eagerly, so
that counted costs and exported weights do not depend on compilation. Evaluation also runs eagerly.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import takewhile
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import _len_torch_dispatch_stack, _len_torch_function_stack
from torch.utils._pytree import tree_leaves

from efficient_ft.methods.forwards import OwnForward, forwards_of, put_around, take_away
from efficient_ft.methods.summary import count, within
from efficient_ft.models.view import view

#: Maximum number of compiled versions. The blocks of a network have several shapes, and a block has a version for each
#: combination of trained and frozen inputs and parameters.
_VERSIONS = 64


@dataclass
class CompiledBlocks:
    """Report of `compile_blocks`.

    Attributes:
        compiled: names of the compiled blocks.
        eager: mapping from reasons to the names of the blocks that are not compiled for this reason.
    """

    compiled: list[str] = field(default_factory=list)
    eager: dict[str, list[str]] = field(default_factory=dict)

    def __str__(self) -> str:
        total = len(self.compiled) + sum(map(len, self.eager.values()))
        text = f"{len(self.compiled)} of {count(total, 'block')} compiled."
        reasons = [f"{within(names)} ({reason})" for reason, names in self.eager.items()]
        return f"{text} Not compiled: {'; '.join(reasons)}." if reasons else text

    def move(self, names: Collection[str], reason: str) -> None:
        """Move blocks from `compiled` to `eager`."""
        self.compiled = [name for name in self.compiled if name not in names]
        self.eager.setdefault(reason, []).extend(names)


class CompiledForward(OwnForward):
    """Forward pass of a block that is compiled in training.

    A call runs eagerly in evaluation, and if the batch is smaller than an earlier batch. A call also runs eagerly if a
    torch function mode, a dispatch mode, a later hook or a later replacement of a forward pass observes the block. A
    copy of the network runs eagerly.

    Attributes:
        largest: size of the largest batch so far. A resumed run restores this size, so that it compiles the same calls.
    """

    same_values = True

    def __init__(self, module: nn.Module, compiler: _Compiler, frozen: bool) -> None:
        super().__init__(module)
        self._compiler: _Compiler | None = compiler
        self._frozen = frozen  # if True, only calls that compute no gradients run compiled
        self.largest = 0
        self._parts = list(_with_state(module))

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_compiler": None, "_parts": []}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        compiler = self._compiler
        if compiler is None or not self.module.training or not self._runs_compiled(args, kwargs):
            return self.within(*args, **kwargs)
        return compiler(self, args, kwargs)

    def _runs_compiled(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        if _len_torch_function_stack() or _len_torch_dispatch_stack():
            return False
        x = args[0] if args and isinstance(args[0], Tensor) else None
        if x is None:
            x = next((t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)), None)
        if x is None or not x.dim() or len(x) < self.largest:
            return False
        if self._frozen and (x.requires_grad or any(p.requires_grad for p in self.module.parameters())):
            return False
        if any(_state(module) != state for module, state in self._parts):
            return False
        self.largest = len(x)
        return True


def _with_state(block: nn.Module) -> Iterator[tuple[nn.Module, tuple[Any, ...]]]:
    """Yield the modules inside `block` with their states. The compiled code does not detect changes of these states."""
    for module in block.modules():
        if module is not block:
            yield module, _state(module)


def _state(module: nn.Module) -> tuple[Any, ...]:
    """Return the replaced forward pass and the numbers of hooks of a module."""
    hooks = module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks
    return (module.__dict__.get("forward"), *map(len, hooks))


class _Compiler:
    """Compile and run the forward passes of blocks. If a block cannot be compiled, similar blocks run eagerly.

    The blocks of each class have their own compiled function, and therefore their own limit of compiled versions.

    Args:
        backend: backend of ``torch.compile``.
        report: report that is updated if compilation fails.
        tell: function that prints a message.
    """

    def __init__(self, backend: str | Callable[..., Any], report: CompiledBlocks, tell: Callable[[str], None]) -> None:
        logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)  # a machine may have CUDA but no GPU
        limits: Any = torch._dynamo.config  # a module that replaces itself
        limits.recompile_limit = max(limits.recompile_limit, _VERSIONS)
        self._backend = _whole_backend(backend)
        self._report, self._tell = report, tell
        self._compiled: dict[type[nn.Module], Callable[..., Any]] = {}
        self._classes: dict[type[nn.Module], list[str]] = {}
        self._eager: set[type[nn.Module]] = set()

    def add(self, block: nn.Module, name: str, frozen: bool) -> CompiledForward:
        kind = type(block)
        if kind not in self._compiled:
            function: Any = FunctionType(_run.__code__.replace(), globals())  # a new code object has its own versions
            self._compiled[kind] = torch.compile(function, backend=self._backend, fullgraph=True, dynamic=False)
        self._classes.setdefault(kind, []).append(name)
        return CompiledForward(block, self, frozen)

    def __call__(self, forward: CompiledForward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if type(forward.module) in self._eager:
            return forward.within(*args, **kwargs)
        try:
            return self._compiled[type(forward.module)](forward.module, forward.inner, *args, **kwargs)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            result = forward.within(*args, **kwargs)  # raises errors that do not come from the compiler
            from torch._dynamo.exc import ShortenTraceback  # base class of errors of the backend, also of TritonMissing

            on_cpu = all(t.device.type == "cpu" for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor))
            self._give_up(type(forward.module), error, isinstance(error, ShortenTraceback), on_cpu)
            return result

    def _give_up(self, block: type[nn.Module], error: Exception, everywhere: bool, on_cpu: bool) -> None:
        """Run blocks of a class eagerly, or all blocks if the compiler does not work. Print the reason."""
        classes = [one for one in self._classes if one not in self._eager] if everywhere else [block]
        which = "the blocks" if everywhere else f"the blocks of the class {block.__name__}"
        self._eager.update(classes)
        self._report.move([name for one in classes for name in self._classes[one]], "compilation failed")
        inner = getattr(error, "inner_exception", error)
        cause = (str(inner).strip().splitlines() or [type(inner).__name__])[0]
        needs = ""
        if everywhere and on_cpu:
            needs = " On a CPU, torch.compile requires a C++ compiler, such as g++."
        elif everywhere:
            needs = " On a GPU, torch.compile requires Triton and compute capability 7.0 or higher."
        self._tell(
            f"warning: torch.compile cannot compile {which} ({cause}). The run continues without compiling them"
            f" (trainer.compile=true).{needs}"
        )


def _whole_backend(backend: str | Callable[..., Any]) -> Callable[..., Any]:
    """Return a backend that also compiles the backward pass before the first call.

    By default, the backward pass is compiled in ``loss.backward()``. A block cannot run eagerly after a failure there.
    With inductor, random numbers are the same as in eager mode.
    """
    options: Any = {"config_patches": {"fallback_random": True}} if backend == "inductor" else {}

    def compile_graph(graph: Any, inputs: Any) -> Any:
        from torch._dynamo import lookup_backend
        from torch._functorch import config

        compiler: Any = lookup_backend(backend)
        with config.patch(force_non_lazy_backward_lowering=True):
            return compiler(graph, inputs, **options)

    return compile_graph


def _run(module: nn.Module, inner: Callable[..., Any] | None, *args: Any, **kwargs: Any) -> Any:
    """Run a forward pass without `CompiledForward`."""
    return type(module).forward(module, *args, **kwargs) if inner is None else inner(*args, **kwargs)


def compile_blocks(
    model: nn.Module,
    excluded: Collection[str] = (),
    backend: str | Callable[..., Any] = "inductor",
    tell: Callable[[str], None] = print,
) -> CompiledBlocks:
    """Compile the blocks of `model` at their next calls in training.

    Blocks remain eager if they contain a part whose class declares a reason (`OwnForward.not_compiled`). Blocks with
    low-rank layers are compiled only before the first trained parameter, where no gradient is computed. If a block
    is recomputed in the backward pass, the code inside the recomputed part is compiled.

    Args:
        model: network to which all methods are applied.
        excluded: names of modules that have their own implementation. Blocks that contain or are part of these modules
            remain eager.
        backend: backend of ``torch.compile``.
        tell: function that prints a message if compilation fails later.
    """
    report = CompiledBlocks()
    compiler = _Compiler(backend, report, tell)
    below = _below(model)
    for name in view(model).blocks:
        block = model.get_submodule(name)
        reason, if_frozen = _not_compiled(block)
        frozen = if_frozen and all(f"{name}.{parameter}" in below for parameter, _ in block.named_parameters())
        reason = "" if frozen else reason
        if any(_contains(name, other) or _contains(other, name) for other in excluded):
            reason = "frozen prefix"
        if reason:
            report.eager.setdefault(reason, []).append(name)
            continue
        report.compiled.append(name)
        _put(block, compiler.add(block, name, frozen))
    return report


def largest_batches(model: nn.Module) -> dict[str, int]:
    """Return the size of the largest compiled batch of each compiled block (`CompiledForward.largest`)."""
    return {name: forward.largest for name, forward in _compiled_forwards(model)}


def restore_largest_batches(model: nn.Module, sizes: Mapping[str, int]) -> None:
    """Restore the result of `largest_batches`."""
    for name, forward in _compiled_forwards(model):
        forward.largest = sizes.get(name, 0)


def _compiled_forwards(model: nn.Module) -> Iterator[tuple[str, CompiledForward]]:
    for name, module in model.named_modules():
        for forward in forwards_of(module):
            if isinstance(forward, CompiledForward):
                yield name, forward


def run_eagerly(model: nn.Module) -> None:
    """Undo `compile_blocks`."""
    take_away(model, CompiledForward)


def _put(block: nn.Module, forward: CompiledForward) -> None:
    """Make `forward` the outermost replacement of a block, or the outermost one inside the recomputed part."""
    recomputed = [one for one in forwards_of(block) if one.recomputes]
    if recomputed:
        forward.inner, recomputed[-1].inner = recomputed[-1].inner, forward
    else:
        put_around(block, forward)


def _not_compiled(block: nn.Module) -> tuple[str, bool]:
    """Return the reason why a block is not compiled, or an empty string, and whether it is compiled if it is frozen."""
    parts: list[Any] = [part for module in block.modules() for part in (module, *forwards_of(module))]
    parts = [part for part in parts if getattr(part, "not_compiled", "")]
    if not parts:
        return "", False
    always = [part for part in parts if not getattr(part, "compiled_if_frozen", False)]
    return str((always or parts)[0].not_compiled), not always


def _below(model: nn.Module) -> set[str]:
    """Return the names of the parameters that are registered before the first trained parameter."""
    parameters = model.named_parameters(remove_duplicate=False)
    return {name for name, _ in takewhile(lambda pair: not pair[1].requires_grad, parameters)}


def _contains(outer: str, inner: str) -> bool:
    return inner == outer or inner.startswith(f"{outer}.")
