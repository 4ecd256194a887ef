"""Measure the exact and the low-rank backward pass of one linear layer."""

from __future__ import annotations

import itertools
import re
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity

from efficient_ft.bench.recipes import in_precision, precisions_of
from efficient_ft.bench.timing import alternate, summary, waiter
from efficient_ft.core.errors import SettingError
from efficient_ft.cost import AUTOCAST, Meter, time_steps
from efficient_ft.ops.projection import (
    CosineProjector,
    WalshProjector,
    backward_flops,
    low_pass_l1,
    low_rank_conv1x1,
    low_rank_linear,
)

Padding = Literal["ortho", "zero", "reflect"]

#: Layers in Table 5 of the LBP-WHT paper.
TABLE_5 = ("448,1792,7x7", "1792,448,7x7", "768,3072,7x7", "3072,768,7x7")

#: Number of profiled backward passes.
_PROFILED = 8
#: Names of operators that compute matrix products.
_PRODUCTS = {"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::convolution_backward"}
#: Size of the square matrices whose product is timed to measure the peak rate of the processor.
_LARGE = 1024


@dataclass(frozen=True)
class LayerShape:
    """Shape of a linear layer over a grid of tokens: numbers of channels, and (height, width) of the grid."""

    c_in: int
    c_out: int
    grid: tuple[int, int]

    @classmethod
    def parse(cls, text: str) -> LayerShape:
        """Parse ``C_IN,C_OUT,HxW``.

        Raises:
            SettingError: If `text` does not have the form ``C_IN,C_OUT,HxW``.
        """
        numbers = re.fullmatch(r"(\d+),(\d+),(\d+)x(\d+)", text)
        if numbers is None:
            raise SettingError("--shape", text, "of the form C_IN,C_OUT,HxW", "Example: 448,1792,7x7.")
        c_in, c_out, height, width = map(int, numbers.groups())
        return cls(c_in, c_out, (height, width))

    def __str__(self) -> str:
        return f"{self.c_in},{self.c_out},{self.grid[0]}x{self.grid[1]}"


def measure_layers(
    shapes: Sequence[LayerShape],
    orders: Sequence[int] = (2, 4, 6, 8, 15),
    *,
    batch_size: int = 32,
    projector: Literal["wht", "dct"] = "wht",
    padding: Padding = "ortho",
    layout: Literal["tokens", "map"] = "tokens",
    precision: str = "fp32",
    device: torch.device | str = "cpu",
    rounds: int = 30,
    warmup: int = 2,
    profile: bool = False,
) -> dict[str, Any]:
    """Time the exact and low-rank backward passes of layers, and count their FLOPs.

    The parameters are the options of the command. If `precision` is ``both``, each layer is measured in fp32 and in
    bf16. `orders` are the orders of LP_L1 to compare. `padding` is the padding
    of the WHT (see `LBPWHT`). `layout` is ``tokens`` (B, N, C) for a linear layer, or ``map`` (B, C, H, W) for a 1×1
    convolution.

    Returns:
        A JSON-serializable report, which `tables.report_text` formats.

    Raises:
        SettingError: If the padding does not support a grid.
    """
    measured, notes = {}, []
    precisions = precisions_of(precision)
    for shape, of in itertools.product(shapes, precisions):
        dtype, key = AUTOCAST[of] or torch.float32, in_precision(str(shape), of, precisions)
        functions = _functions(shape, orders, projector, padding, layout)
        same = [name for name, function in functions.items() if function is functions["exact"] and name != "exact"]
        notes += [f"{key}: {name} is exact, as in a run, because a low-rank pass costs more." for name in same]
        inputs, g = _tensors(shape, batch_size, layout, torch.device(device), dtype)
        flops = {}
        for name, function in functions.items():
            y = function(*(i.to(dtype) for i in inputs))
            with Meter() as meter, meter.phase("backward"):
                torch.autograd.grad(y, inputs, g)
            flops[name] = meter.flops["backward"] / batch_size
        calls = {name: _timed(function, inputs, g, dtype) for name, function in functions.items()}
        result = summary(alternate(calls, rounds, warmup), "exact")
        measured[key] = {n: {"backward_flops": flops[n], "measured": parts} for n, parts in result.items()}
        peak = _peak(torch.device(device), dtype) if profile else 0.0
        for name, function in functions.items() if profile else ():
            measured[key][name]["profile"] = {
                **_profiled(function, inputs, g, dtype, flops[name] * batch_size),
                "peak_flops_per_second": peak,
            }
    return {
        "kind": "layer",
        "batch": batch_size,
        "dtype": " and ".join(precisions),
        "projector": projector,
        "padding": padding,
        "layout": layout,
        "baseline": "exact",
        "shapes": measured,
        "notes": notes,
    }


def _functions(
    shape: LayerShape, orders: Sequence[int], projector: str, padding: Padding, layout: str
) -> dict[str, Callable[..., Tensor]]:
    """Return the exact layer, and a low-rank layer for each order.

    If a low-rank layer would not reduce the cost, the exact layer is returned instead, as in a run.
    """
    low_rank = low_rank_linear if layout == "tokens" else low_rank_conv1x1
    exact = torch.nn.functional.linear if layout == "tokens" else torch.nn.functional.conv2d
    functions: dict[str, Callable[..., Tensor]] = {"exact": exact}
    for order in orders:
        made: Any = WalshProjector(low_pass_l1(order), padding) if projector == "wht" else CosineProjector(order)
        try:
            projection = made.projection(shape.grid, 0, (shape.c_in, shape.c_out))
        except ValueError as error:
            raise SettingError("--shape", shape, "a grid that the padding supports", str(error)) from error
        costs = backward_flops(projection, (shape.c_in, shape.c_out))
        functions[f"order {order}"] = partial(low_rank, projection=projection) if costs[1] < costs[0] else exact
    return functions


def _tensors(
    shape: LayerShape, batch_size: int, layout: str, device: torch.device, dtype: torch.dtype
) -> tuple[list[Tensor], Tensor]:
    """Return a random input, weight and bias that require gradients, and a random gradient of the output."""
    generator = torch.Generator().manual_seed(0)

    def random(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=generator).to(device)

    height, width = shape.grid
    if layout == "tokens":
        x, g = (random(batch_size, height * width, c) for c in (shape.c_in, shape.c_out))
        weight = random(shape.c_out, shape.c_in)
    else:
        x, g = (random(batch_size, c, height, width) for c in (shape.c_in, shape.c_out))
        weight = random(shape.c_out, shape.c_in, 1, 1)
    return [x.requires_grad_(), weight.requires_grad_(), random(shape.c_out).requires_grad_()], g.to(dtype)


def _timed(
    function: Callable[..., Tensor], inputs: Sequence[Tensor], g: Tensor, dtype: torch.dtype
) -> Callable[[], dict[str, float]]:
    """Return a function that runs a forward and a backward pass and returns the time of each pass in seconds."""
    wait = waiter(g.device)

    def call() -> dict[str, float]:
        times = [time.perf_counter()]
        with torch.autocast(g.device.type, dtype=dtype, enabled=dtype != torch.float32):
            y = function(*inputs)
        wait()
        times.append(time.perf_counter())
        torch.autograd.grad(y, inputs, g)
        wait()
        times.append(time.perf_counter())
        return {"forward": times[1] - times[0], "backward": times[2] - times[1]}

    return call


def _profiled(
    function: Callable[..., Tensor], inputs: Sequence[Tensor], g: Tensor, dtype: torch.dtype, flops: float
) -> dict[str, float]:
    """Profile a backward pass.

    Returns:
        A dict with the times in seconds of matrix products and convolutions (``products``), of other operators
        (``passes``), and of dispatch, Python and waiting (``rest``). The dict also contains the throughput of the
        products in FLOP/s (``rate``) and the number of operator calls (``calls``).
    """
    on_gpu, wait = g.device.type == "cuda", waiter(g.device)
    with torch.autocast(g.device.type, dtype=dtype, enabled=dtype != torch.float32):
        outputs = [function(*inputs) for _ in range(_PROFILED + 1)]
    torch.autograd.grad(outputs.pop(), inputs, g)
    wait()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with torch.profiler.profile(activities=activities) as trace:
        start = time.perf_counter()
        for y in outputs:
            torch.autograd.grad(y, inputs, g)
        wait()
        whole = time.perf_counter() - start
    products = passes = 0.0
    calls = 0
    for event in trace.key_averages():
        if event.key.startswith("aten::"):
            seconds = (event.self_device_time_total if on_gpu else event.self_cpu_time_total) / 1e6
            calls += event.count
            if event.key in _PRODUCTS:
                products += seconds
            else:
                passes += seconds
    parts = {"products": products, "passes": passes, "rest": max(whole - products - passes, 0.0)}
    return {
        **{name: seconds / _PROFILED for name, seconds in parts.items()},
        "rate": flops * _PROFILED / products,
        "calls": calls / _PROFILED,
    }


def _peak(device: torch.device, dtype: torch.dtype) -> float:
    """Return the number of FLOPs per second that a large matrix product reaches."""
    a, b = (torch.randn(_LARGE, _LARGE, device=device, dtype=dtype) for _ in range(2))
    seconds = time_steps({"product": lambda: torch.mm(a, b)}, steps=10, warmup=0)["product"]
    return 2 * _LARGE**3 / statistics.median(seconds)
