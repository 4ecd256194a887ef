"""Promise 10: recomputation is exact."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from efficient_ft.core.errors import UserError
from efficient_ft.integrations.session import MethodSession
from efficient_ft.methods.declarations import Adds, Axis
from tests.promises.children import returned
from tests.promises.methods import method_cases, methods_of, network_of
from tests.promises.trial import Trial, require

#: Settings of methods that recompute activations in the backward pass, and the largest difference of float64 gradients.
#: Checkpointing runs the same kernels again. Compact computes attention by a different formula with different rounding
#: errors.
_RECOMPUTING: dict[str, tuple[dict[str, Any], float]] = {
    "checkpointing": ({}, 0.0),
    "compact": ({"attention": "recomputed"}, 1e-10),
}
_IMAGES, _STEPS = 4, 3


def trials(long: bool) -> Iterator[Trial]:
    """Yield trials of every method with the package's recomputation and with both forms of PyTorch's checkpointing."""
    for case in method_cases(long):
        names = set(methods_of(case))
        for recomputing in _RECOMPUTING:
            if recomputing not in names:
                yield Trial(f"{recomputing} under {case}", _in_child, (_ours, case, recomputing))
        for reentrant in (False, True):
            form = "reentrant" if reentrant else "not reentrant"
            yield Trial(f"torch.utils.checkpoint ({form}) under {case}", _in_child, (_of_torch, case, reentrant))


def _in_child(folder: Path, function: Any, *arguments: Any) -> dict[str, float] | None:
    found: dict[str, float] | None = returned(function, *arguments, output=folder / "trial.log")
    return found


def _ours(case: str, recomputing: str) -> dict[str, float]:
    """Compare a case with and without a recomputing method, and record the outputs of recomputed blocks."""
    settings = methods_of(case)
    of_method, most = _RECOMPUTING[recomputing]
    added = {recomputing: of_method}
    try:
        with _Spy() as spy:
            recomputed = _trained(case, {**settings, **added})
    except UserError as error:
        require(_may_refuse(case), f"it is refused: {error}")
        return {"refused": 1.0}
    # With the method head, no parameter before the classifier requires gradients, so no block runs again.
    require(recomputing != "checkpointing" or case == "head" or spy.replayed > 0, "no block ran again")
    spy.require_replayed()
    _require_equal(_trained(case, settings), recomputed, most)
    return {"refused": 0.0, "blocks": float(spy.replayed)}


def _of_torch(case: str, reentrant: bool) -> dict[str, float]:
    """Compare a case with and without timm's ``set_grad_checkpointing``."""
    settings = methods_of(case)
    try:
        recomputed = _trained(case, settings, reentrant)
    except UserError as error:
        require(_may_refuse(case), f"it is refused: {error}")
        return {"refused": 1.0}
    _require_equal(_trained(case, settings, frozen=True), recomputed)
    return {"refused": 0.0}


def _may_refuse(case: str) -> bool:
    """Return True if a method of the case packs activations or adds a loss. Such methods reject recomputation."""
    from efficient_ft.config import check
    from efficient_ft.methods.build import build_methods
    from tests.promises.runs import configuration

    methods = build_methods(check(configuration(Path("images"), case)))
    return any(Axis.MEMORY in method.axes or Adds.LOSS in method.adds for method in methods)


def _trained(
    case: str, settings: dict[str, dict[str, Any]], reentrant: bool | None = None, frozen: bool = False
) -> dict[str, Tensor]:
    """Train a case for a few steps in float64. Return the gradients of every step and the final weights.

    Args:
        case: Name of a case of `methods`.
        settings: Methods with their settings.
        reentrant: Form of PyTorch's checkpointing, or None for no checkpointing.
        frozen: If True, the statistics of BatchNorm are frozen, as with `reentrant`.

    Raises:
        UserError: If the methods reject the network or each other.
    """
    from efficient_ft.config import check
    from efficient_ft.methods.build import build_methods
    from efficient_ft.models import factory
    from tests.promises.runs import configuration

    plain = configuration(Path("images"), case)
    plain["method"] = copy.deepcopy(settings)
    plain["model"] = network_of(case)
    config = check(plain)
    torch.manual_seed(0)
    network = factory.create_model(config.model, 4).double()
    if reentrant is not None:
        if not hasattr(network, "set_grad_checkpointing"):
            raise UserError("no checkpointing of its own")
        _checkpoint_by_torch(network, reentrant)
    # Frozen statistics are required because PyTorch's second forward pass would update BatchNorm again.
    session = MethodSession(network, build_methods(config), frozen_bn=frozen or reentrant is not None).apply()
    network.train()
    optimizer = torch.optim.SGD([p for p in network.parameters() if p.requires_grad], lr=0.05)
    held: dict[str, Tensor] = {}
    for step in range(_STEPS):
        generator = torch.Generator().manual_seed(step)
        images = torch.randn(_IMAGES, 3, 32, 32, generator=generator, dtype=torch.float64)
        labels = torch.randint(0, 4, (_IMAGES,), generator=generator)
        torch.manual_seed(100 + step)
        session.begin_step(step)
        loss: Tensor = session.loss(F.cross_entropy(network(images), labels))
        loss.backward()
        for name, parameter in network.named_parameters():
            if parameter.grad is not None:
                held[f"gradient of {name} in step {step}"] = parameter.grad.clone()
        optimizer.step()
        session.end_step()
        optimizer.zero_grad(set_to_none=True)
    held.update({f"{name} after the last step": value for name, value in network.state_dict().items()})
    return held


def _checkpoint_by_torch(network: nn.Module, reentrant: bool) -> None:
    """Turn on timm's checkpointing in the given form of ``torch.utils.checkpoint``."""
    import functools

    import timm.models.vision_transformer as vision_transformer
    from timm.models import _manipulate
    from torch.utils import checkpoint

    chosen = functools.partial(checkpoint.checkpoint, use_reentrant=reentrant)

    def in_form(*arguments: Any, use_reentrant: bool | None = None, **keywords: Any) -> Any:
        return chosen(*arguments, **keywords)

    for module in (_manipulate, vision_transformer):
        if hasattr(module, "checkpoint"):
            module.checkpoint = in_form  # type: ignore[attr-defined]
    network.set_grad_checkpointing(True)  # type: ignore[operator]


def _require_equal(one: dict[str, Tensor], other: dict[str, Tensor], most: float = 0.0) -> None:
    """Require that tensors differ by at most `most`. If `most` is 0, all bits must be equal."""
    require(one.keys() == other.keys(), f"other tensors: {sorted(one.keys() ^ other.keys())[:3]}")
    for name, value in one.items():
        difference = float((value.double() - other[name].double()).abs().max()) if value.numel() else 0.0
        require(torch.equal(value, other[name]) or 0 < difference <= most, f"{name} differs by {difference:.3g}")


class _Spy:
    """Context manager that records the outputs of recomputed blocks in the forward and backward passes."""

    def __init__(self) -> None:
        self.first: list[list[Tensor]] = []
        self.again: list[list[Tensor]] = []

    def __enter__(self) -> _Spy:
        from efficient_ft.methods.memory import checkpointing

        self._module, self._recompute = checkpointing, checkpointing.recompute

        def spied(function: Any, *arguments: Any) -> Any:
            number: list[int] = []

            def called(*args: Any, **keywords: Any) -> Any:
                result = function(*args, **keywords)
                tensors = [t.detach().clone() for t in _tensors(result)]
                if number:
                    self.again[number[0]] = tensors
                else:
                    number.append(len(self.first))
                    self.first.append(tensors)
                    self.again.append([])
                return result

            return self._recompute(called, *arguments)

        checkpointing.recompute = spied  # type: ignore[assignment]
        return self

    def __exit__(self, *_: object) -> None:
        self._module.recompute = self._recompute

    @property
    def replayed(self) -> int:
        """Number of blocks that ran again."""
        return sum(bool(again) for again in self.again)

    def require_replayed(self) -> None:
        """Require that every block that ran again returned the same bits."""
        for number, (first, again) in enumerate(zip(self.first, self.again, strict=True)):
            if not again:  # the block required no gradient
                continue
            require(len(first) == len(again), f"recomputed block {number} has {len(again)} results, not {len(first)}")
            for one, other in zip(first, again, strict=True):
                require(torch.equal(one, other), f"recomputed block {number} differs")


def _tensors(result: Any) -> list[Tensor]:
    if isinstance(result, Tensor):
        return [result]
    if isinstance(result, list | tuple):
        return [tensor for one in result for tensor in _tensors(one)]
    return []
