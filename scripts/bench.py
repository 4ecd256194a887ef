"""Measure recipes against each other: alternately, in one process, after a warm-up; nothing is left out.

    python scripts/bench.py step --model efficientformer_l1 --batch 32 last_stage lbp_wht lbp_wht:order=2
    python scripts/bench.py layer
    python scripts/bench.py loop
    python scripts/bench.py gradient --model vit_micro --weights FILE --images DIR back_razor mesa

``step``: training steps of a model with each recipe, by their parts; on a CPU all but the baseline in channels-last
memory, as runs there are. ``layer``: the backward pass of one linear layer,
exact and low-rank. ``loop``: what the framework adds to a bare PyTorch loop, per step. ``gradient``: how near the
gradients of each recipe come to the exact ones of the same network and batch, and the bytes it keeps.

A recipe is ``METHOD[:KEY=VALUE,...][+METHOD...]`` with the names and settings of the command line, and may be given
another name: ``NAME=RECIPE``. A key with a dot is the full name of any setting (``full:trainer.precision=bf16``). The
first recipe is the baseline. Times are medians with quartiles; a ratio is the median over the rounds of
baseline / recipe, both from the same round. FLOPs and bytes are executed ones (counted); on CUDA, peaks are measured
(what the allocator gave out).
"""

from __future__ import annotations

import argparse
import copy
import datetime
import json
import os
import platform
import re
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

if TYPE_CHECKING:
    from efficient_ft.config import Config

ROOT = Path(__file__).resolve().parent.parent
CONF = ROOT / "conf"

#: C_in, C_out and the token grid of the layers in Table 5 of the LBP-WHT paper.
TABLE_5 = ("448,1792,7x7", "1792,448,7x7", "768,3072,7x7", "3072,768,7x7")

Rounds = dict[str, dict[str, list[float]]]


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    options = _parser().parse_args(arguments)
    for folder in (ROOT, ROOT / "scripts"):
        if str(folder) not in sys.path:
            sys.path.insert(0, str(folder))
    from efficient_ft.core.allocator import keep_freed_memory
    from efficient_ft.core.errors import UserError, replace_unprintable

    replace_unprintable()
    allocator = "system"
    if not options.system_allocator and keep_freed_memory():
        allocator = "keeping freed memory (glibc)"
    try:
        environment = _environment(options, allocator)
        print(f"# {environment['device']}, {environment['threads']} threads, torch {environment['torch']},", end=" ")
        print(f"allocator: {allocator}, {environment['date']}")
        if environment["load"] is not None and environment["load"] > 0.5:
            print(f"# this machine is busy (load {environment['load']:.1f}): times will be uncertain, ratios less so")
        report = options.run(options)
    except UserError as error:
        print(f"bench.py: {error}", file=sys.stderr)
        return 2
    report = {"command": shlex.join(["bench.py", *arguments]), "environment": environment, **report}
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
        print(f"\nwritten: {options.json}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bench.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    kinds = parser.add_subparsers(required=True, metavar="step|layer|loop|gradient")

    def kind(name: str, run: Callable[..., dict[str, Any]], rounds: int | None, text: str) -> argparse.ArgumentParser:
        sub = kinds.add_parser(name, help=text, description=text)
        sub.set_defaults(run=run, kind=name)
        if rounds is not None:
            sub.add_argument("--rounds", type=_count, default=rounds, help=f"timed rounds (default {rounds})")
            sub.add_argument("--warmup", type=_count, default=2, help="rounds before that, not timed (default 2)")
        sub.add_argument("--threads", type=_count, help="CPU threads (default: torch's)")
        sub.add_argument("--device", default="cpu", help="cpu (default), cuda, cuda:1")
        sub.add_argument("--dtype", choices=("fp32", "bf16", "fp16"), default="fp32", help="fp32, or autocast in it")
        sub.add_argument("--system-allocator", action="store_true", help="leave glibc's allocator as it is")
        sub.add_argument("--json", type=Path, metavar="FILE", help="write everything to FILE as well")
        return sub

    step = kind("step", _step, 10, "training steps of a model, by their parts")
    step.add_argument("recipes", nargs="*", metavar="RECIPE", help="default: last_stage lbp_wht")
    step.add_argument("--model", default="efficientformer_l1", help="a model of conf/model or of timm")
    step.add_argument("--batch", type=_count, default=32)
    step.add_argument("--size", type=_count, help="pixels (default: the model's)")
    step.add_argument("--classes", type=_count, default=100)
    step.add_argument("--unfused", action="store_true", help="attention in its parts (timm's default: fused)")

    layer = kind("layer", _layer, 30, "the backward pass of one linear layer, exact and low-rank")
    layer.add_argument(
        "--shape", action="append", metavar="C_IN,C_OUT,HxW", help=f"may be repeated (default {' '.join(TABLE_5)})"
    )
    layer.add_argument("--batch", type=_count, default=32)
    layer.add_argument("--orders", default="2,4,6,8,15", help="default 2,4,6,8,15")
    layer.add_argument("--projector", choices=("wht", "dct"), default="wht")
    layer.add_argument("--padding", choices=("ortho", "zero", "reflect"), default="ortho", help="of wht")
    layer.add_argument("--layout", choices=("tokens", "map"), default="tokens", help="linear, or 1×1 convolution")

    loop = kind("loop", _loop, 60, "a step of the framework and of a bare PyTorch loop")
    loop.add_argument(
        "--job",
        action="append",
        metavar="NAME",
        help="default: the default job; or a model of conf/model, trained whole. May be repeated (default: both of"
        " default and deit_small)",
    )
    loop.add_argument("--batch", type=_count, help="default: the job's own; 8 for a model")

    gradient = kind("gradient", _gradient, None, "gradients of recipes beside the exact ones, on one network")
    gradient.add_argument("recipes", nargs="+", metavar="RECIPE")
    gradient.add_argument("--model", default="deit_tiny", help="a model of conf/model or of timm")
    gradient.add_argument("--weights", metavar="FILE", help="its weights, in timm's names (default: random ones)")
    gradient.add_argument("--images", type=Path, metavar="DIR", help="DIR/CLASS/* (default: noise)")
    gradient.add_argument("--size", type=_count, help="pixels (default: the model's)")
    gradient.add_argument("--classes", type=_count, default=100, help="without --images (default 100)")
    gradient.add_argument("--batch", type=_count, default=16)
    gradient.add_argument("--batches", type=_count, default=8, help="disjoint batches measured (default 8)")
    gradient.add_argument("--seed", type=int, default=0, help="of the images, random weights and rounding")
    return parser


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: a whole number of at least 1 is wanted")
    return int(text)


def _environment(options: argparse.Namespace, allocator: str) -> dict[str, Any]:
    import torch

    from efficient_ft.core.errors import SettingError

    if options.threads:
        torch.set_num_threads(options.threads)
    try:
        device = torch.device(options.device)
    except RuntimeError:
        raise SettingError("--device", options.device, "cpu, cuda or cuda:N") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise SettingError("--device", options.device, "cpu on this machine", "There is no CUDA device.")
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu_name(),
        "threads": torch.get_num_threads(),
        "allocator": allocator,
        "load": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
    }


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


# ---------------------------------------------------------------------------------------------- measuring
def alternate(calls: Mapping[str, Callable[[], dict[str, float]]], rounds: int, warmup: int) -> Rounds:
    """Run all calls once per round, in turn; each gives the seconds of its parts. The warm-up is not kept."""
    seconds: Rounds = {name: {} for name in calls}
    for number in range(warmup + rounds):
        for name, call in calls.items():
            parts = call()
            if number >= warmup:
                for part, value in parts.items():
                    seconds[name].setdefault(part, []).append(value)
    return seconds


def quartiles(values: Sequence[float]) -> dict[str, float]:
    """Median, quartiles and mean."""
    if len(values) == 1:
        return {"median": values[0], "q1": values[0], "q3": values[0], "mean": values[0]}
    q1, median, q3 = statistics.quantiles(values, n=4, method="inclusive")
    return {"median": median, "q1": q1, "q3": q3, "mean": statistics.fmean(values)}


def summary(seconds: Rounds, baseline: str) -> dict[str, dict[str, Any]]:
    """By recipe and part: median, quartiles, all values, and the ratio to `baseline` (above 1: faster)."""
    out: dict[str, dict[str, Any]] = {}
    for name, parts in seconds.items():
        out[name] = {}
        for part, values in parts.items():
            out[name][part] = {**quartiles(values), "seconds": values}
            base = seconds[baseline].get(part)
            if base is not None:
                out[name][part]["times_faster"] = quartiles([b / v for b, v in zip(base, values, strict=True)])
    return out


def _ms(value: Mapping[str, float]) -> str:
    return f"{value['median'] * 1e3:.1f} [{value['q1'] * 1e3:.1f}–{value['q3'] * 1e3:.1f}]"


def _times(value: Mapping[str, Any]) -> str:
    return f"{value['times_faster']['median']:.2f}×" if "times_faster" in value else ""


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[k]) for row in (head, *rows)) for k in range(len(head))]
    lines = [
        "  ".join(c.ljust(w) if k == 0 else c.rjust(w) for k, (c, w) in enumerate(zip(r, widths, strict=True)))
        for r in (head, *rows)
    ]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


# ---------------------------------------------------------------------------------------------- recipes
@dataclass(frozen=True)
class Recipe:
    """A name for the tables and what the command line would be given for its methods."""

    name: str
    overrides: tuple[str, ...]


def parse_recipe(text: str) -> Recipe:
    """``[NAME=]METHOD[:KEY=VALUE,...][+METHOD...]`` as overrides of the configuration.

    Raises:
        UserError: not of that form.
    """
    from efficient_ft.core.errors import UserError

    name, equals, rest = text.partition("=")
    if not equals or ":" in name:
        name, rest = text, text
    elif "." in name:
        raise UserError(f"{text}: settings are named in the recipe they are of: METHOD:KEY=VALUE.")
    options, overrides = [], []
    for part in re.split(r"\+(?![^\[]*\])", rest):
        option, colon, settings = part.partition(":")
        if not re.fullmatch(r"\w+", option) or (colon and not settings):
            raise UserError(f"{text}: a recipe has the form [NAME=]METHOD[:KEY=VALUE,...][+METHOD...].")
        options.append(option)
        for setting in re.split(r",(?![^\[]*\])", settings) if settings else ():
            if not re.fullmatch(r"[\w.]+=.+", setting):
                raise UserError(f"{text}: settings have the form KEY=VALUE, not {setting}.")
            full = "." in setting.partition("=")[0]
            overrides.append(setting if full else f"method.{_package(option)}.{setting}")
    return Recipe(name, (f"method=[{','.join(options)}]", *overrides))


def parse_recipes(texts: Sequence[str]) -> list[Recipe]:
    """Recipes of different names.

    Raises:
        UserError: one that is not of the form, or two of the same name.
    """
    from efficient_ft.core.errors import UserError

    recipes = [parse_recipe(text) for text in texts]
    names = [recipe.name for recipe in recipes]
    if len(set(names)) < len(names):
        raise UserError(f"Two recipes of the same name ({', '.join(names)}); name one: NAME=RECIPE.")
    return recipes


def _package(option: str) -> str:
    """Variants of one method share its settings' name."""
    file = CONF / "method" / f"{option}.yaml"
    found = re.search(r"^# @package method\.(\w+)", file.read_text(encoding="utf-8")) if file.is_file() else None
    return found[1] if found else option


def _config(model: str | None, overrides: Sequence[str]) -> Config:
    """The checked configuration of a run on random weights."""
    from efficient_ft.cli.compose import configurations, register

    register()
    chosen = []
    if model is not None:
        chosen = (
            [f"model={model}"]
            if (CONF / "model" / f"{model}.yaml").is_file()
            else ["model=timm", f"model.name={model}"]
        )
        chosen.append("model.pretrained=false")
    return configurations(CONF, "train", [*chosen, *overrides], sweep=False)[0]


# ---------------------------------------------------------------------------------------------- step
class Parts:
    """Training steps of a model, timed by their parts, and the bare inference of their frozen prefix.

    The prefix ends where the first module is entered that has a trainable parameter of its own. Its bare inference is
    the plain model's, in evaluation mode and without a graph, up to that same place.
    """

    def __init__(self, step: Any, plain: Any, wait: Callable[[], None]) -> None:
        import torch

        self._torch, self.step, self._plain, self._wait = torch, step, plain.to(step.device).eval(), wait
        self._entered = 0.0
        self.prefix = self._find_prefix()
        if self.prefix is not None:
            step.model.get_submodule(self.prefix).register_forward_pre_hook(self._enter)
            plain.get_submodule(self.prefix).register_forward_pre_hook(self._stop)

    def _find_prefix(self) -> str | None:
        """The module that ends the frozen prefix; None where there is none, or the plain model has no such module.

        None too where what trains changes from step to step: each timed step is another one's.
        """
        if any(method.cost_steps > 1 for method in self.step.methods):
            return None
        order: list[tuple[str, bool]] = []
        handles = [
            module.register_forward_pre_hook(lambda m, _, n=name: order.append((n, _trains(m))))  # type: ignore[misc]
            for name, module in self.step.model.named_modules()
            if next(module.parameters(recurse=False), None) is not None
        ]
        self.step.forward()
        self.step.backward()
        for handle in handles:
            handle.remove()
        first = next((k for k, (_, trains) in enumerate(order) if trains), None)
        if first in (None, 0):
            return None
        name = order[first][0]
        return name if name in dict(self._plain.named_modules()) else None

    def _enter(self, *_: Any) -> None:
        if not self._entered:
            self._wait()
            self._entered = time.perf_counter()

    def _stop(self, *_: Any) -> None:
        raise _Reached

    def __call__(self) -> dict[str, float]:
        seconds = {}
        if self.prefix is not None:
            self._wait()
            start = time.perf_counter()
            with (
                self._torch.no_grad(),
                self._torch.autocast(self.step.device.type, dtype=self.step.dtype, enabled=self.step.dtype is not None),
            ):
                try:
                    self._plain(self.step.images)
                except _Reached:
                    self._wait()
            seconds["prefix inference"] = time.perf_counter() - start
        self._entered = 0.0
        times = [time.perf_counter()]
        for part in (self.step.forward, self.step.backward, self.step.update):
            part()
            self._wait()
            times.append(time.perf_counter())
        if self.prefix is not None:
            seconds["prefix"] = self._entered - times[0]
        seconds["forward"], seconds["backward"], seconds["update"] = (b - a for a, b in pairwise(times))
        seconds["step"] = times[-1] - times[0]
        return seconds


class _Reached(Exception):
    pass


def _trains(module: Any) -> bool:
    return any(p.requires_grad for p in module.parameters(recurse=False))


def _waiter(device: str) -> Callable[[], None]:
    import torch

    return torch.cuda.synchronize if torch.device(device).type == "cuda" else lambda: None


def _step(options: argparse.Namespace) -> dict[str, Any]:
    import timm
    import torch

    from efficient_ft import cost
    from efficient_ft.methods.base import apply_methods
    from efficient_ft.methods.build import build_methods
    from efficient_ft.models import factory

    recipes = parse_recipes(options.recipes or ("last_stage", "lbp_wht"))
    names = [recipe.name for recipe in recipes]
    size = [] if options.size is None else [f"model.image_size={options.size}"]
    calls: dict[str, Parts] = {}
    counts: dict[str, dict[str, Any]] = {}
    on_cpu = torch.device(options.device).type == "cpu"
    if options.unfused:
        timm.layers.set_fused_attn(False)
    for recipe in recipes:
        config = _config(options.model, [*size, f"trainer.precision={options.dtype}", *recipe.overrides])
        model = factory.random_model(config.model, options.classes)
        methods = build_methods(config)
        apply_methods(model, methods)
        shape: dict[str, Any] = {
            "input_size": factory.input_of(config.model).size,
            "precision": config.trainer.precision,
        }
        if on_cpu and recipe is not recipes[0]:  # as runs on a CPU do; the baseline stays as it comes from timm
            model.to(memory_format=torch.channels_last)
        counted = cost.executed(model, options.batch, methods=methods, **shape)
        step = cost.TrainingStep(
            model,
            methods,
            batch_size=options.batch,
            device=options.device,
            **shape,
        )
        for _ in range(max((m.warmup_steps for m in methods), default=0)):
            step()
        calls[recipe.name] = Parts(step, factory.random_model(config.model, options.classes), _waiter(options.device))
        counts[recipe.name] = {
            "methods": [repr(m) for m in methods],
            "trainable_parameters": sum(p.numel() for p in model.parameters() if p.requires_grad),
            "executed": counted.as_dict(),
        }
    result = summary(alternate(calls, options.rounds, options.warmup), names[0])
    base = counts[names[0]]["executed"]
    for name, call in calls.items():
        counts[name]["peak_bytes"] = counts[name]["executed"]["peak_bytes"] if on_cpu else call.step.cuda_peak()
    rows = []
    for name in names:
        parts, count = result[name], counts[name]["executed"]
        rows.append(
            [
                name,
                *(_ms(parts["backward"]), _times(parts["backward"])),
                *(_ms(parts["step"]), _times(parts["step"])),
                _ms(parts["forward"]),
                _ms(parts["prefix"]) if "prefix" in parts else "–",
                _ms(parts["prefix inference"]) if "prefix inference" in parts else "–",
                f"{count['backward_flops'] / 1e6:.0f}",
                f"{base['backward_flops'] / max(count['backward_flops'], 1):.2f}×",
                f"{count['saved_bytes'] * options.batch / 2**20:.1f}",
                f"{counts[name]['peak_bytes'] / 2**20:.0f}",
            ]
        )
    attention = ", unfused attention" if options.unfused else ""
    print(f"\n{options.model}, batch {options.batch}, {options.dtype}{attention}, {options.rounds} rounds;", end=" ")
    print(f"baseline: {names[0]}")
    if on_cpu:
        print("The baseline is timm's model as it comes; the others hold convolutional maps in channels-last memory.")
    print("milliseconds: median [quartiles]; ×: baseline / recipe; MFLOPs per image and MiB are executed ones", end="")
    print("\n" if on_cpu else ", the peak is the device's\n")
    head = ["recipe", "backward", "×", "whole step", "×", "forward", "frozen prefix", "its bare inference"]
    print(table([*head, "backward MFLOPs", "×", "saved MiB", "peak MiB"], rows))
    return {
        "kind": "step",
        "model": options.model,
        "batch": options.batch,
        "dtype": options.dtype,
        "attention": "unfused" if options.unfused else "timm's default",
        "baseline": names[0],
        "recipes": {name: {**counts[name], "measured": result[name]} for name in names},
    }


# ---------------------------------------------------------------------------------------------- layer
def _layer(options: argparse.Namespace) -> dict[str, Any]:
    import torch

    from efficient_ft.core.errors import SettingError
    from efficient_ft.cost import Meter
    from efficient_ft.ops.projection import (
        CosineProjector,
        WalshProjector,
        low_pass_l1,
        low_rank_conv1x1,
        low_rank_linear,
    )

    if not re.fullmatch(r"\d+(,\d+)*", options.orders):
        raise SettingError("--orders", options.orders, "whole numbers with commas, e.g. 2,4,6")
    orders = [int(order) for order in options.orders.split(",")]
    for order in orders:
        if not 1 <= order <= 15:
            raise SettingError("--orders", order, "orders from 1 to 15")
    device, wait = torch.device(options.device), _waiter(options.device)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[options.dtype]
    low_rank = low_rank_linear if options.layout == "tokens" else low_rank_conv1x1
    exact = torch.nn.functional.linear if options.layout == "tokens" else torch.nn.functional.conv2d
    shapes: dict[str, Any] = {}
    for text in options.shape or TABLE_5:
        numbers = re.fullmatch(r"(\d+),(\d+),(\d+)x(\d+)", text)
        if numbers is None:
            raise SettingError("--shape", text, "C_IN,C_OUT,HxW, e.g. 448,1792,7x7")
        c_in, c_out, height, width = map(int, numbers.groups())
        generator = torch.Generator().manual_seed(0)

        def random(*shape: int, generator: torch.Generator = generator) -> torch.Tensor:
            return torch.randn(*shape, generator=generator).to(device)

        if options.layout == "tokens":
            x, g = (random(options.batch, height * width, c) for c in (c_in, c_out))
            weight = random(c_out, c_in)
        else:
            x, g = (random(options.batch, c, height, width) for c in (c_in, c_out))
            weight = random(c_out, c_in, 1, 1)
        inputs = [x.requires_grad_(), weight.requires_grad_(), random(c_out).requires_grad_()]
        g = g.to(dtype)
        functions: dict[str, Callable[..., torch.Tensor]] = {"exact": exact}
        for order in orders:
            projector: Any = (
                WalshProjector(low_pass_l1(order), options.padding)
                if options.projector == "wht"
                else CosineProjector(order)
            )
            try:
                projection = projector.projection((height, width), 0, (c_in, c_out))
            except ValueError as error:
                raise SettingError("--shape", text, "a grid that the padding can serve", str(error)) from error
            functions[f"order {order}"] = lambda x, w, b, p=projection: low_rank(x, w, b, p)

        def call(
            function: Callable[..., torch.Tensor],
            inputs: list[torch.Tensor] = inputs,
            g: torch.Tensor = g,
        ) -> dict[str, float]:
            times = [time.perf_counter()]
            with torch.autocast(device.type, dtype=dtype, enabled=dtype != torch.float32):
                y = function(*inputs)
            wait()
            times.append(time.perf_counter())
            torch.autograd.grad(y, inputs, g)
            wait()
            times.append(time.perf_counter())
            return {"forward": times[1] - times[0], "backward": times[2] - times[1]}

        flops = {}
        for name, function in functions.items():
            y = function(*(i.to(dtype) for i in inputs))
            with Meter() as meter, meter.phase("backward"):
                torch.autograd.grad(y, inputs, g)
            flops[name] = meter.flops["backward"] / options.batch
        calls = {name: (lambda f=function: call(f)) for name, function in functions.items()}
        result = summary(alternate(calls, options.rounds, options.warmup), "exact")
        print(
            f"\n{text}, batch {options.batch}, {options.dtype}, {options.layout}, {options.projector}; baseline: exact"
        )
        rows = [
            [
                name,
                *(_ms(parts["backward"]), _times(parts["backward"])),
                *(f"{flops[name] / 1e6:.2f}", f"{flops['exact'] / flops[name]:.2f}×"),
                *(_ms(parts["forward"]), _times(parts["forward"])),
            ]
            for name, parts in result.items()
        ]
        print(table(["", "backward ms", "×", "MFLOPs/image", "×", "forward ms", "×"], rows))
        shapes[text] = {n: {"backward_flops": flops[n], "measured": parts} for n, parts in result.items()}
    return {
        "kind": "layer",
        "batch": options.batch,
        "dtype": options.dtype,
        "projector": options.projector,
        "padding": options.padding,
        "layout": options.layout,
        "baseline": "exact",
        "shapes": shapes,
    }


# ---------------------------------------------------------------------------------------------- loop
class Paced:
    """A loader that takes one bare step before it gives out a batch, and times the framework from batch to batch.

    So both run alternately in one process, on the same batches. From the moment a batch is given out until the next one
    is asked for, everything is the framework's: hooks, callbacks, progress, the step itself; loading is in neither.
    """

    def __init__(self, loader: Any, bare: Any, wait: Callable[[], None], enough: int, seconds: list[Any]) -> None:
        self._loader, self._bare, self._wait = loader, bare, wait
        self._enough, self._seconds = enough, seconds

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def __iter__(self) -> Iterator[Any]:
        for batch in self._loader:
            images, labels = (t.to(self._bare.device) for t in batch)
            self._bare.images, self._bare.labels = images, labels
            self._wait()
            start = time.perf_counter()
            self._bare()
            self._wait()
            middle = time.perf_counter()
            yield batch
            self._wait()
            self._seconds.append((middle - start, time.perf_counter() - middle))
            if len(self._seconds) >= self._enough:
                raise _Reached


def _loop(options: argparse.Namespace) -> dict[str, Any]:
    jobs: dict[str, Any] = {}
    for job in options.job or ("default", "deit_small"):
        jobs[job] = _one_loop(job, options)
    return {"kind": "loop", "baseline": "bare loop", "jobs": jobs}


def _one_loop(job: str, options: argparse.Namespace) -> dict[str, Any]:
    """The run of `job` as the command line makes it, until enough steps are measured."""
    import torch

    from efficient_ft.cost import TrainingStep
    from efficient_ft.data import ImageData
    from efficient_ft.methods.base import apply_methods
    from efficient_ft.methods.build import build_methods
    from efficient_ft.models import factory
    from efficient_ft.training.module import build_optimizer
    from efficient_ft.training.run import run

    batch = options.batch or (None if job == "default" else 8)
    overrides = ["data.num_workers=0", "data=digits", "trainer.epochs=1000", "trainer.limit_eval_batches=1"]
    overrides += [] if job == "default" else ["method=full"]
    overrides += [] if batch is None else [f"data.batch_size={batch}"]
    overrides += [f"trainer.accelerator={'cpu' if options.device == 'cpu' else 'gpu'}"]
    config = _config(None if job == "default" else job, [*overrides, f"trainer.precision={options.dtype}"])
    size, classes = factory.input_of(config.model).size, 10
    model, methods = factory.random_model(config.model, classes), build_methods(config)
    apply_methods(model, methods)
    if options.device == "cpu":  # as the framework does: the loop is compared, not the memory format
        model.to(memory_format=torch.channels_last)
    bare = TrainingStep(
        model,
        methods,
        batch_size=config.data.batch_size,
        input_size=size,
        precision=config.trainer.precision,
        label_smoothing=config.optim.label_smoothing,
        frozen_bn=config.model.frozen_bn,
        device=options.device,
        clip=config.optim.grad_clip_norm,
        build_optimizer=lambda network: build_optimizer(network, config.optim, config.trainer.precision),
    )
    pairs: list[tuple[float, float]] = []
    train_loader = ImageData.train_loader

    def paced(images: Any, *arguments: Any) -> Paced:
        loader = train_loader(images, *arguments)
        return Paced(loader, bare, _waiter(options.device), options.warmup + options.rounds, pairs)

    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.object(ImageData, "train_loader", paced),
        suppress(_Reached),
    ):
        run(config, Path(folder) / "run")
    pairs = pairs[options.warmup :]
    result: dict[str, Any] = {
        "batch": config.data.batch_size,
        "bare loop": {**quartiles([b for b, _ in pairs]), "seconds": [b for b, _ in pairs]},
        "framework": {**quartiles([f for _, f in pairs]), "seconds": [f for _, f in pairs]},
        "overhead_percent": quartiles([100 * (f / b - 1) for b, f in pairs]),
    }
    over = result["overhead_percent"]
    print(
        f"\n{job}: {config.model.name}, {size[0]}×{size[1]}, batch {config.data.batch_size}, {options.dtype},", end=" "
    )
    print(f"{len(pairs)} rounds; baseline: bare loop; milliseconds per step")
    rows = [[name, _ms(result[name])] for name in ("bare loop", "framework")]
    print(table(["", "step"], rows))
    print(f"the framework adds {over['median']:.2f} % [{over['q1']:.2f}–{over['q3']:.2f}] per step")
    return result


# ---------------------------------------------------------------------------------------------- gradient
def _gradient(options: argparse.Namespace) -> dict[str, Any]:
    import torch

    # the other study of gradients, beside this file
    from gradient_error import compare, drawn, image_folder

    from efficient_ft import cost
    from efficient_ft.core.errors import UserError
    from efficient_ft.methods.base import apply_methods
    from efficient_ft.methods.build import build_methods
    from efficient_ft.models import factory
    from efficient_ft.models.view import view

    recipes = parse_recipes(options.recipes)
    network = [] if options.size is None else [f"model.image_size={options.size}"]
    if options.weights is not None:
        network += [f"model.weights='{options.weights}'"]
    configs = {
        recipe.name: _config(options.model, [*network, f"trainer.precision={options.dtype}", *recipe.overrides])
        for recipe in recipes
    }
    config = next(iter(configs.values()))
    size, needed = factory.input_of(config.model).size, options.batches
    generator = torch.Generator().manual_seed(options.seed)
    if options.images is not None:
        images = image_folder(options.images, config.model)
        classes = len(images.classes)
        batches = list(drawn(images, options.batch, needed, 0, options.seed))
        if len(batches) < needed:
            raise UserError(f"--images: {options.images} has too few images for {needed} batches of {options.batch}.")
    else:
        classes = options.classes
        batches = [
            (
                torch.randn(options.batch, 3, *size, generator=generator),
                torch.randint(classes, (options.batch,), generator=generator),
            )
            for _ in range(needed)
        ]
    torch.manual_seed(options.seed)
    plain = (factory.random_model if options.weights is None else factory.create_model)(config.model, classes)
    plain.to(options.device)
    seen = view(plain)
    for name in seen.head if options.weights is None else ():  # often zero in a new network: no gradient would pass it
        weight = getattr(plain.get_submodule(name), "weight", None)
        if weight is not None:
            torch.nn.init.trunc_normal_(weight, std=0.02)
    inside = tuple(f"{name}." for name in (*seen.blocks, *(n for extras in seen.stage_extras for n in extras)))

    candidates: dict[str, tuple[Any, list[Any], str]] = {}
    result: dict[str, dict[str, Any]] = {}
    done: dict[str, int] = {}
    for name, config in configs.items():
        model, methods, precision = copy.deepcopy(plain), build_methods(config), str(config.trainer.precision)
        apply_methods(model, methods)
        candidates[name] = model, methods, precision
        settings = config.model_dump(mode="json", include={"model", "method", "trainer"})
        if options.weights is not None:
            settings["model"]["weights"] = Path(options.weights).name
        counted = cost.executed(model, options.batch, size, methods=methods, precision=precision)
        result[name] = {
            "configuration": settings,
            "methods": [repr(m) for m in methods],
            "trainable_parameters": sum(p.numel() for p in model.parameters() if p.requires_grad),
            "executed": counted.as_dict(),
        }
        done[name] = max((m.warmup_steps for m in methods), default=0)
        for step in range(done[name]):
            _step_gradients(model, methods, precision, batches[step % needed], step, options)

    scores: dict[str, dict[str, list[tuple[float, float]]]] = {name: {} for name in candidates}
    for step, batch in enumerate(batches):
        exact = _step_gradients(plain, [], "fp32", batch, step, options)
        for name, (model, methods, precision) in candidates.items():
            found = _step_gradients(model, methods, precision, batch, done[name] + step, options)
            keys = [key for key in found if key.startswith(inside) and key in exact]
            kinds: dict[str, list[str]] = {"blocks": keys}
            for key in keys:
                kinds.setdefault(key.split(".")[-2], []).append(key)
            for kind, members in kinds.items():
                if any(exact[key].any() for key in members):
                    scores[name].setdefault(kind, []).append(compare(exact, found, members))
    for name, by_kind in scores.items():
        if "blocks" not in by_kind:
            raise UserError(f"{name}: no parameter of the blocks has a gradient; nothing can be compared.")
        for column, title in enumerate(("error", "cosine")):
            result[name][title] = {
                kind: {"mean": round(statistics.fmean(v), 6), "min": min(v), "max": max(v)}
                | ({"batches": v} if kind == "blocks" else {})
                for kind, pairs in by_kind.items()
                for v in ([round(pair[column], 6) for pair in pairs],)
            }
    print(
        f"\n{options.model}, {size[0]}×{size[1]}, {needed} batches of {options.batch}: gradients of the blocks'",
        end=" ",
    )
    print("trained parameters beside the exact ones\n")
    rows = [
        [
            name,
            *(f"{record['cosine']['blocks'][k]:.4f}" for k in ("mean", "min", "max")),
            f"{record['error']['blocks']['mean']:.4f}",
            f"{record['executed']['saved_bytes'] / 2**20:.3f}",
        ]
        for name, record in result.items()
    ]
    print(table(["recipe", "cosine", "min", "max", "relative error", "saved MiB / image"], rows))
    return {
        "kind": "gradient",
        "model": options.model,
        "weights": "random" if options.weights is None else Path(options.weights).name,
        "images": "noise" if options.images is None else "/".join(options.images.resolve().parts[-2:]),
        "size": list(size),
        "batch": options.batch,
        "batches": needed,
        "seed": options.seed,
        "recipes": result,
    }


def _step_gradients(
    model: Any, methods: Sequence[Any], precision: str, batch: tuple[Any, Any], step: int, options: argparse.Namespace
) -> dict[str, Any]:
    """Gradient of every trained parameter, by the plain model's names, after one step of which no parameter moves."""
    import torch
    import torch.nn.functional as F

    from efficient_ft.cost.executed import AUTOCAST
    from efficient_ft.models.frozen_batch_norm import freeze_batch_norm

    model.train()
    freeze_batch_norm(model)
    model.zero_grad(set_to_none=True)
    images, labels = (t.to(options.device) for t in batch)
    torch.manual_seed(options.seed + step)  # rounding at random
    for method in methods:
        method.step_begin(step)
    dtype = AUTOCAST[precision]
    with torch.autocast(images.device.type, dtype=dtype, enabled=dtype is not None):
        loss = F.cross_entropy(model(images), labels)
    loss.backward()
    for method in methods:
        method.step_end()
    found = {
        name.replace(".base_layer", ""): p.grad.detach().clone()
        for name, p in model.named_parameters()
        if p.grad is not None
    }
    model.zero_grad(set_to_none=True)
    return found


if __name__ == "__main__":
    sys.exit(main())
