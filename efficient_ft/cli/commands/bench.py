"""``efficient-ft bench``: measure and compare recipes."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from efficient_ft.bench.recipes import BOTH
from efficient_ft.cli.device import require_device
from efficient_ft.cli.exits import report_outcome
from efficient_ft.cli.hydra import processes
from efficient_ft.cli.hydra.conf import CONF
from efficient_ft.cli.terminal import Help, add_columns_option, count, count_or_zero, seed
from efficient_ft.config import Config, ModelConfig
from efficient_ft.core.allocator import CHOICES, restart_with, use_allocator
from efficient_ft.core.errors import SettingError, UserError
from efficient_ft.core.files import write_text_atomically
from efficient_ft.core.text import paragraph
from efficient_ft.record.files import json_text

if TYPE_CHECKING:
    from efficient_ft.bench.recipes import Network, Recipe

# Heavy modules are imported after the arguments are parsed, so that ``--help`` responds immediately.

PROG = "efficient-ft bench"

#: Maximum number of threads per processor that ``--threads`` accepts.
_THREADS_PER_PROCESSOR = 16

#: Recipes of ``bench step`` if none is given. The last recipe is timm's unmodified model in its own memory format.
_DEFAULT_RECIPES = ("last_stage", "lbp_wht", "timm=last_stage:trainer.channels_last=false,trainer.prefix=fp32")
#: Keys of a ``bench memory`` record whose values are included in the report of ``bench step``.
PROCESS_KEYS = ("interpreter_bytes", "with_model_bytes", "optimizer", "optimizer_bytes", "counted_bytes", "memory",
                "compiler_used")  # fmt: skip

DESCRIPTION = """\
Compare recipes. One process measures all recipes in turn after a warm-up. The process memory of each recipe is measured
in a separate process.

    efficient-ft bench step --model efficientformer_l1 --batch 32 last_stage lbp_wht lbp_wht:order=2
    efficient-ft bench memory --model deit_small --batch 16 full back_razor checkpointing
    efficient-ft bench layer
    efficient-ft bench loop
    efficient-ft bench gradient --model vit_micro --weights FILE --images DIR back_razor mesa
    efficient-ft bench optimizer
    efficient-ft bench overhead

A recipe is METHOD[:KEY=VALUE,...][+METHOD...] with the names and settings of the command line. NAME=RECIPE sets the
name of a recipe. A key with a dot is the full name of a setting (full:trainer.precision=bf16). The baseline of a recipe
is the first recipe with the same precision. The baseline of a recipe with trainer.compile=true is the same recipe
without this setting, if both are measured. --dtype both measures each recipe in fp32 and in bf16.

step measures the parts of training steps. On a CPU, feature maps use the channels-last memory format, as in training.
To measure timm's unmodified model, set trainer.channels_last=false and trainer.prefix=fp32 in a recipe. memory compares
the growth of a process with the counted peak. loop measures the overhead of the framework over a bare PyTorch loop.
gradient compares gradients with the exact gradients, and counts the bytes saved for the backward pass. optimizer
includes torchao and bitsandbytes if they are installed. overhead times the forward and the backward pass of a very
small ViT, whose arithmetic takes almost no time.

Times are medians with quartiles. A ratio is the median of recipe / baseline over all rounds. FLOPs and bytes are
counted from executed operations. On CUDA, the allocator measures peaks.
"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a benchmark, print its tables, and write its report as JSON if `--json` is given."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    command = parser()
    options, unknown = command.parse_known_args(arguments)
    if unknown:
        word, bench = unknown[0], f"{PROG} {options.kind}" if hasattr(options, "kind") else PROG
        if word.startswith("-"):
            raise UserError(f"{word} is not an option of {bench}. See {bench} --help.")
        if not getattr(options, "recipes", None):
            raise UserError(f"{word}: the command {bench} does not accept recipes. See {bench} --help.")
        together = shlex.join([*options.recipes, word])
        raise UserError(f"{word}: options must not separate recipes. Use {bench} {together} ...")
    if not hasattr(options, "run"):
        command.print_help()
    elif getattr(options, "alone", False):
        _measure_alone(options)
    else:
        _measure(options, arguments)


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command."""
    parser = argparse.ArgumentParser(prog=PROG, description=DESCRIPTION, formatter_class=Help)
    kinds = parser.add_subparsers(metavar="step|memory|layer|loop|gradient|optimizer|overhead", dest="kind")
    step = _add_kind(kinds, "step", _step, 10, "measure the parts of training steps", both=True)
    _add_model(step, "efficientformer_l1", 32, "*")
    step.add_argument("--unfused", action="store_true", help="do not use fused attention")
    steps = "number of steps used to measure the process memory of each recipe (default: 3; 0 disables the measurement)"
    step.add_argument("--memory-steps", type=count_or_zero, default=3, metavar="N", help=steps)

    text = "measure the counted memory of training steps, and the process memory in a separate process per recipe"
    memory = _add_kind(kinds, "memory", _memory, None, text, both=True)
    _add_model(memory, "deit_small", 16, "+")
    memory.add_argument("--unfused", action="store_true", help="do not use fused attention")
    memory.add_argument("--optim", default="adamw", help="optimizer in conf/optim (default adamw)")
    memory.add_argument("--steps", type=count, default=3, help="number of measured steps (default 3)")
    memory.add_argument(
        "--warmup", type=count_or_zero, default=2, help="number of warm-up steps before the measured steps (default 2)"
    )
    # This hidden option is passed to the process that measures a single recipe.
    memory.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)

    text = "measure the exact and low-rank backward passes of a linear layer"
    layer = _add_kind(kinds, "layer", _layer, 30, text, both=True)
    shapes = "layer shape (default: the four layers in Table 5 of the LBP-WHT paper); repeat for more layers"
    layer.add_argument("--shape", action="append", metavar="C_IN,C_OUT,HxW", help=shapes)
    layer.add_argument("--batch", type=count, default=32, help="batch size (default 32)")
    layer.add_argument("--orders", default="2,4,6,8,15", help="orders of the projector (default 2,4,6,8,15)")
    layer.add_argument(
        "--projector", choices=("wht", "dct"), default="wht", help="basis of the projector (default wht)"
    )
    padding = "padding of the WHT projector (default ortho)"
    layer.add_argument("--padding", choices=("ortho", "zero", "reflect"), default="ortho", help=padding)
    layer.add_argument("--profile", action="store_true", help="also print the time of each part of the backward pass")
    layer.add_argument(
        "--layout", choices=("tokens", "map"), default="tokens", help="tokens: linear; map: 1×1 convolution"
    )

    loop = _add_kind(kinds, "loop", _loop, 60, "compare the framework with a bare PyTorch loop", both=True)
    jobs = "model in conf/model, or default (default: default and deit_small); repeat for more jobs"
    loop.add_argument("--job", action="append", metavar="NAME", help=jobs)
    loop.add_argument("--batch", type=count, help="batch size (default: 8, or the batch size of the default job)")
    loop.add_argument("--images", type=Path, metavar="DIR", help="image folder (default: the digits)")
    loop.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="setting for all jobs")

    text = "compare the gradients of recipes with exact gradients"
    gradient = _add_kind(kinds, "gradient", _gradient, None, text)
    _add_model(gradient, "deit_tiny", 16, "+")
    gradient.add_argument("--weights", metavar="FILE", help="weights with timm's parameter names (default: random)")
    gradient.add_argument("--images", type=Path, metavar="DIR", help="images DIR/CLASS/* (default: noise)")
    gradient.add_argument("--batches", type=count, default=8, help="number of disjoint batches to measure (default 8)")
    gradient.add_argument("--seed", type=seed, default=0, help="seed for images, random weights and rounding")

    _add_kind(kinds, "optimizer", _optimizer, 10, "compare AdamW steps with 8-bit, 4-bit and 32-bit moments")

    text = "measure the overhead of recipes per operation on a very small ViT (12 blocks, width 48, 5 tokens)"
    overhead = _add_kind(kinds, "overhead", _overhead, 50, text)
    default = " (default: full and the methods that replace operations)"
    overhead.add_argument("recipes", nargs="*", metavar="RECIPE", help=f"method with settings{default}")
    overhead.add_argument("--batch", type=count, default=1, help="batch size (default 1)")
    overhead.set_defaults(threads=1)  # more threads would add the time in which threads start and wait
    return parser


def _add_kind(
    kinds: Any, name: str, run: Callable[..., Any], rounds: int | None, text: str, both: bool = False
) -> argparse.ArgumentParser:
    """Add a benchmark with the options that all benchmarks share, and return its parser.

    `rounds` is the default value of ``--rounds``, or None to omit this option. If `both` is True, the benchmark can
    measure both precisions.
    """
    sub: argparse.ArgumentParser = kinds.add_parser(name, help=text, description=text, formatter_class=Help)
    sub.set_defaults(run=run)
    if rounds is not None:
        sub.add_argument("--rounds", type=count, default=rounds, help=f"number of timed rounds (default {rounds})")
        sub.add_argument(
            "--warmup", type=count, default=2, help="number of warm-up rounds before the timed rounds (default 2)"
        )
    sub.add_argument("--threads", type=count, help="number of CPU threads (default: torch's default)")
    sub.add_argument("--device", default="cpu", help="cpu (default), cuda, cuda:1")
    dtypes = ("fp32", "bf16", "fp16", *([BOTH] if both else []))
    meaning = "fp32, or the autocast dtype" + ("; both: measure each recipe in fp32 and in bf16" if both else "")
    sub.add_argument("--dtype", choices=dtypes, default="fp32", help=meaning)
    sub.add_argument("--allocator", choices=CHOICES, default="auto", help="default auto; see conf/train.yaml")
    sub.add_argument("--json", type=Path, metavar="FILE", help="also write the report to FILE")
    add_columns_option(sub)
    return sub


def _add_model(sub: argparse.ArgumentParser, model: str, batch: int, recipes: str) -> None:
    """Add the argument for recipes and the options of the measured network. `recipes` is `nargs` of this argument."""
    default = f" (default: {' '.join(_DEFAULT_RECIPES)})" if recipes == "*" else ""
    sub.add_argument("recipes", nargs=recipes, metavar="RECIPE", help=f"method with settings{default}")
    sub.add_argument("--model", default=model, help=f"name of a model in conf/model or in timm (default {model})")
    sub.add_argument("--batch", type=count, default=batch, help=f"batch size (default {batch})")
    sub.add_argument("--size", type=count, help="image size in pixels (default: the image size of the model)")
    sub.add_argument("--classes", type=count, default=100, help="number of classes (default 100)")


def _set_up(options: argparse.Namespace) -> str:
    """Set up the allocator, the threads and the device of this process. Return the name of the allocator."""
    restart_with(options.allocator, "--allocator")
    allocator = use_allocator(options.allocator, "--allocator")  # must be set before the first tensor is created
    import torch

    if options.threads:
        most = _THREADS_PER_PROCESSOR * (os.cpu_count() or 1)
        if options.threads > most:  # torch ends the process if it cannot start all threads.
            raise SettingError("--threads", options.threads, f"an integer from 1 to {most} on this machine")
        torch.set_num_threads(options.threads)
    require_device(options.device)
    return allocator


def _measure(options: argparse.Namespace, arguments: Sequence[str]) -> None:
    allocator = _set_up(options)
    from efficient_ft.bench.tables import report_text
    from efficient_ft.record.environment import busy_note, environment

    here = {**environment(options.device), "allocator": allocator}
    threads = f"{here['threads']} thread{'s' * (here['threads'] != 1)}"
    about = f"{here['device']}, {threads}, torch {here['torch']}, allocator: {allocator}, {here['date']}"
    for line in (about, busy_note(here)):
        if line:
            print(paragraph(f"# {line}", "#   "))
    report = {"command": _command(arguments, options.json), "environment": here, **options.run(options)}
    print(f"\n{report_text(report, options.columns)}")
    if options.json is not None:
        write_text_atomically(options.json, json_text(report, indent=2) + "\n")
        print(f"\nWritten: {options.json}")


def _command(arguments: Sequence[str], file: Path | None) -> str:
    """Return the command line that the report records.

    An absolute path of the JSON file is replaced by a relative path, or by the file name.
    """
    words = [*PROG.split(), *arguments]
    if file is not None and file.is_absolute():
        here = Path.cwd()
        name = file.relative_to(here) if file.is_relative_to(here) else Path(file.name)
        words = [word.replace(str(file), str(name)) for word in words]
    return shlex.join(words)


def configure(model: str | None, overrides: Sequence[str]) -> Config:
    """Return the checked configuration of a run with random weights. See `efficient_ft.bench.recipes.Configure`."""
    from efficient_ft.cli.hydra.compose import configured
    from efficient_ft.cli.hydra.rows import merged

    chosen = []
    if model is not None:
        known = (CONF / "model" / f"{model}.yaml").is_file()
        chosen = [f"model={model}"] if known else ["model=timm", f"model.name={model}"]
        chosen.append("model.pretrained=false")
        chosen += _task_of(CONF / "model" / f"{model}.yaml", overrides) if known else []
    return configured(merged(*chosen, *overrides))


#: Settings for each task other than image classification. No data is read.
_TASKS = {
    "segmentation": ["task=segmentation", "data=mask_folder", "data.root=none"],
    "text": ["task=text", "data=text_folder", "data.root=none"],
}


def _task_of(option: Path, overrides: Sequence[str]) -> list[str]:
    """Return the task settings for a model in conf/model, or an empty list if `overrides` set the task."""
    # The configuration is not validated, because it may lack a name that the user must set.
    task = ModelConfig.model_construct(**yaml.safe_load(option.read_text(encoding="utf-8"))).family
    return [] if any(word.startswith("task=") for word in overrides) else _TASKS.get(task, [])


def network_of(options: argparse.Namespace) -> Network:
    """Return the network of a benchmark with the given options."""
    from efficient_ft.bench.recipes import Network

    unfused = getattr(options, "unfused", False)
    dtype = "fp32" if options.dtype == BOTH else options.dtype  # the recipes then contain their precision
    return Network(options.model, options.batch, options.size, options.classes, dtype, options.device, unfused)


def _step(options: argparse.Namespace) -> dict[str, Any]:
    from efficient_ft.bench.recipes import in_both_precisions, parse_recipes
    from efficient_ft.bench.step import measure_steps

    recipes = parse_recipes(options.recipes or _DEFAULT_RECIPES, CONF)
    if options.dtype == BOTH:
        recipes = in_both_precisions(recipes)
    # Memory is measured first, because timing keeps all recipes in the memory of this process.
    records = {}
    if options.memory_steps:
        settings = {**vars(options), "optim": "adamw", "steps": options.memory_steps, "warmup": 2}
        _check(recipes, settings)
        for recipe in recipes:
            records[recipe.name] = _memory_of(recipe, settings)
    report = measure_steps(recipes, configure, network_of(options), rounds=options.rounds, warmup=options.warmup)
    for name, record in records.items():
        if "failure" in record:
            report["notes"].append(f"The process memory of {name} was not measured: {record['failure']}")
        else:
            report["recipes"][name]["process"] = {key: record[key] for key in PROCESS_KEYS}
    return report


def _memory(options: argparse.Namespace) -> dict[str, Any]:
    from efficient_ft.bench.memory import memory_report
    from efficient_ft.bench.recipes import in_both_precisions, parse_recipes

    recipes = parse_recipes(options.recipes, CONF)
    if options.dtype == BOTH:
        recipes = in_both_precisions(recipes)
    _check(recipes, vars(options))
    records = {recipe.name: _memory_of(recipe, vars(options)) for recipe in recipes}
    dtype = "fp32 and bf16" if options.dtype == BOTH else options.dtype
    return memory_report(options.model, options.batch, dtype, options.unfused, records)


def _check(recipes: Sequence[Recipe], options: Mapping[str, Any]) -> None:
    from efficient_ft.methods.build import build_methods

    size = [] if options["size"] is None else [f"model.image_size={options['size']}"]
    for recipe in recipes:
        build_methods(configure(options["model"], [*size, f"optim={options['optim']}", *recipe.overrides]))


def _memory_of(recipe: Recipe, options: Mapping[str, Any]) -> dict[str, Any]:
    """Measure the memory of a recipe in a separate process. See `_in_own_process`.

    If the process compiles kernels, which are stored for later processes, the measurement is repeated once.
    """
    print(paragraph(f"# Measuring the memory of the recipe {recipe.name}", "#   "), flush=True)
    record = _in_own_process(recipe, options)
    if not record.get("compiler_used"):
        return record
    print(
        paragraph("# The process compiled kernels. The measurement is repeated with stored kernels.", "#   "),
        flush=True,
    )
    return _in_own_process(recipe, options)


def _in_own_process(recipe: Recipe, options: Mapping[str, Any]) -> dict[str, Any]:
    """Measure the memory of a recipe in a separate process.

    Return the record, or a dict with the reason as ``failure`` if the process fails.
    """
    arguments = [*recipe.overrides, "--alone"]
    shared = "model batch size classes threads device optim steps warmup allocator"
    for key in shared.split():
        if options[key] is not None:
            arguments += [f"--{key}", str(options[key])]
    if options["dtype"] != BOTH:
        arguments += ["--dtype", options["dtype"]]
    if options["unfused"]:
        arguments.append("--unfused")
    ended = processes.run([sys.executable, "-m", "efficient_ft", "bench", "memory", *arguments], environment={})
    if ended.results is None:
        print(ended.printed, end="", file=sys.stderr)
        return {"failure": ended.failure or "the process returned no result"}
    if "mistake" in ended.results:
        raise UserError(ended.results["mistake"])
    return ended.results


def _measure_alone(options: argparse.Namespace) -> None:
    """Measure the memory of one recipe, given by its overrides, and pass its record to the parent process."""
    try:
        _set_up(options)
        from efficient_ft.bench.memory import measure_memory
        from efficient_ft.bench.recipes import Recipe

        record = measure_memory(
            Recipe("", tuple(options.recipes)),
            configure,
            network_of(options),
            optim=options.optim,
            steps=options.steps,
            warmup=options.warmup,
        )
    except UserError as error:
        record = {"mistake": str(error)}
    report_outcome(results=record)


def _layer(options: argparse.Namespace) -> dict[str, Any]:
    from efficient_ft.bench.layer import TABLE_5, LayerShape, measure_layers

    if not re.fullmatch(r"\d+(,\d+)*", options.orders):
        raise SettingError("--orders", options.orders, "integers separated by commas", "Example: 2,4,6.")
    orders = [int(order) for order in options.orders.split(",")]
    for order in orders:
        if not 1 <= order <= 15:
            raise SettingError("--orders", order, "integers from 1 to 15")
    return measure_layers(
        [LayerShape.parse(text) for text in options.shape or TABLE_5],
        orders,
        batch_size=options.batch,
        projector=options.projector,
        padding=options.padding,
        layout=options.layout,
        precision=options.dtype,
        device=options.device,
        rounds=options.rounds,
        warmup=options.warmup,
        profile=options.profile,
    )


def _loop(options: argparse.Namespace) -> dict[str, Any]:
    from efficient_ft.bench.loop import DEFAULT_JOB, measure_loops
    from efficient_ft.cli.hydra.rows import check_settings

    check_settings(options.set)
    return measure_loops(
        options.job or (DEFAULT_JOB, "deit_small"),
        configure,
        batch_size=options.batch,
        precision=options.dtype,
        device=options.device,
        rounds=options.rounds,
        warmup=options.warmup,
        images=options.images,
        settings=options.set,
    )


def _gradient(options: argparse.Namespace) -> dict[str, Any]:
    from efficient_ft.bench.gradient import measure_gradients
    from efficient_ft.bench.recipes import parse_recipes

    return measure_gradients(
        parse_recipes(options.recipes, CONF),
        configure,
        network_of(options),
        weights=options.weights,
        images=options.images,
        batches=options.batches,
        seed=options.seed,
    )


def _optimizer(options: argparse.Namespace) -> dict[str, Any]:
    from efficient_ft.bench.optimizer import measure_optimizers

    if options.dtype != "fp32":
        raise SettingError("--dtype", options.dtype, "fp32", "Optimizers compute in float32.")
    return measure_optimizers(options.device, rounds=options.rounds, warmup=options.warmup)


def _overhead(options: argparse.Namespace) -> dict[str, Any]:
    from efficient_ft.bench.overhead import RECIPES, measure_overhead
    from efficient_ft.bench.recipes import parse_recipes

    return measure_overhead(
        parse_recipes(options.recipes or RECIPES, CONF),
        configure,
        batch_size=options.batch,
        precision=options.dtype,
        device=options.device,
        rounds=options.rounds,
        warmup=options.warmup,
    )
