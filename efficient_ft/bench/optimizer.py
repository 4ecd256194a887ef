"""Compare optimizer steps of low-bit AdamW and `torch.optim.AdamW` on the same gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from efficient_ft.bench.timing import summary
from efficient_ft.cost import time_steps
from efficient_ft.optim import LowBitAdamW, state_tensors

BASELINE = "torch AdamW, 32 bits"
#: Number of values in a row: two blocks of the low-bit format, or one block of torchao's 8-bit format.
_WIDTH = 256
#: Number of steps in most cases, in cases with gradients that begin late, and in the longest case.
_STEPS, _PAUSED, _LONG = 60, 240, 3000
_LR = 1e-3

Make = Callable[[list[nn.Parameter]], Optimizer]


def measure_optimizers(device: torch.device | str = "cpu", *, rounds: int = 10, warmup: int = 2) -> dict[str, Any]:
    """Compare optimizers on gradients with a large spread, on channels whose gradients begin late, and over many steps.

    torchao and bitsandbytes are included if they are installed. torchao runs without compilation. After `warmup`
    rounds, `rounds` steps of a parameter of shape 768 × 3072 are timed. The result is a JSON-serializable report, which
    `tables.report_text` formats. For each optimizer and case, ``largest`` is the largest step relative to AdamW's
    largest step, ``error`` is the relative error of all steps, and ``size`` is the norm of the last tenth of the steps,
    divided by the norm for AdamW.
    """
    makers = optimizers()
    torch.compiler.set_stance("force_eager")  # torchao's compilation takes minutes and requires a C++ compiler on a CPU
    try:
        size = _bytes_per_value(makers, torch.device(device))
        cases = {name: _compare(makers, gradients, torch.device(device)) for name, gradients in _cases().items()}
        built = {name: _with_state(make, torch.device(device))[1] for name, make in makers.items()}
        timed = time_steps({name: optimizer.step for name, optimizer in built.items()}, rounds, warmup)
    finally:
        torch.compiler.set_stance("default")
    times = summary({name: {"step": seconds} for name, seconds in timed.items()}, BASELINE)
    measured = {}
    for name in makers:
        own = {case: of[name] for case, of in cases.items()}
        measured[name] = {"bytes_per_value": size[name], "cases": own, "measured": times[name]}
    return {"kind": "optimizer", "baseline": BASELINE, "optimizers": measured}


def optimizers() -> dict[str, Make]:
    """Return functions that create the available optimizers, keyed by name. The first optimizer is the baseline."""
    options: dict[str, Any] = {"lr": _LR, "weight_decay": 0.0}
    makers: dict[str, Make] = {BASELINE: lambda p: torch.optim.AdamW(p, **options)}
    for bits in (8, 4):
        makers[f"LowBitAdamW, {bits} bits"] = lambda p, bits=bits: LowBitAdamW(p, **options, bits=bits)  # type: ignore[misc]
    if find_spec("torchao"):
        from torchao import optim

        makers["torchao, 8 bits"] = lambda p: optim.AdamW8bit(p, **options)
        makers["torchao, 4 bits"] = lambda p: optim.AdamW4bit(p, **options)
    if find_spec("bitsandbytes"):
        import bitsandbytes

        makers["bitsandbytes, 8 bits"] = lambda p: bitsandbytes.optim.AdamW8bit(p, **options)
    return makers


def _cases() -> dict[str, Callable[[], Iterator[Tensor]]]:
    """Return a dict from the name of each case to a function that yields gradients."""
    spreads = {f"spread 1e{d}": lambda d=d: _spread(d, _STEPS) for d in (2, 3, 4, 6)}
    late = {"late": lambda: _late(False), "late, one sign": lambda: _late(True)}
    return {**spreads, **late, f"{_LONG:,} steps": lambda: _spread(1, _LONG)}


def _spread(decades: float, steps: int) -> Iterator[Tensor]:
    """Yield Gaussian gradients whose magnitudes are spread over `decades` powers of 10 within a row."""
    for step in range(steps):
        chance = torch.Generator().manual_seed(step)
        yield torch.randn(64, _WIDTH, generator=chance) * torch.logspace(0, -decades, _WIDTH)


def _late(one_sign: bool) -> Iterator[Tensor]:
    """Yield gradients in which every seventh channel is 0 during the first three quarters of the steps."""
    for step, gradient in enumerate(_spread(2, _PAUSED)):
        if one_sign:
            gradient[:, ::7] = torch.logspace(0, -2, _WIDTH)[::7]
        gradient[:, ::7] *= step >= _PAUSED * 3 // 4
        yield gradient


def _compare(
    makers: dict[str, Make], gradients: Callable[[], Iterator[Tensor]], device: torch.device
) -> dict[str, dict[str, float]]:
    """Return each optimizer's largest step, error and size of the last steps, relative to the baseline."""
    weights = {name: nn.Parameter(torch.zeros(64, _WIDTH, device=device)) for name in makers}
    built = {name: make([weights[name]]) for name, make in makers.items()}
    largest, errors, total = dict.fromkeys(makers, 0.0), dict.fromkeys(makers, 0.0), 0.0
    norms: dict[str, list[float]] = {name: [] for name in makers}
    for gradient in gradients():
        steps = {}
        for name, optimizer in built.items():
            weights[name].data.zero_()
            weights[name].grad = gradient.to(device, copy=True)
            optimizer.step()
            steps[name] = weights[name].detach().double() / _LR
            largest[name] = max(largest[name], float(steps[name].abs().max()))
            norms[name].append(float(steps[name].norm()))
        total += float(steps[BASELINE].square().sum())
        for name in makers:
            errors[name] += float((steps[name] - steps[BASELINE]).square().sum())
    last = {name: math.hypot(*of[-(len(of) // 10) :]) for name, of in norms.items()}
    return {
        name: {
            "largest": largest[name] / largest[BASELINE],
            "largest_step": largest[name],
            "error": (errors[name] / total) ** 0.5,
            "size": last[name] / last[BASELINE],
        }
        for name in makers
    }


def _with_state(make: Make, device: torch.device) -> tuple[nn.Parameter, Optimizer]:
    """Return a parameter of shape 768 × 3072, and its optimizer after one step."""
    chance = torch.Generator().manual_seed(0)
    weight = nn.Parameter(torch.zeros(768, 3072, device=device))
    weight.grad = torch.randn(768, 3072, generator=chance).to(device)
    optimizer = make([weight])
    optimizer.step()
    return weight, optimizer


def _bytes_per_value(makers: dict[str, Make], device: torch.device) -> dict[str, float]:
    """Return the mean number of bytes per value of the two moments, without step counts and codebooks (256 values)."""
    sizes = {}
    for name, make in makers.items():
        weight, optimizer = _with_state(make, device)
        held = [t for t in state_tensors(optimizer) if t.numel() > 256]
        sizes[name] = sum(t.nbytes for t in held) / weight.numel() / 2
    return sizes
