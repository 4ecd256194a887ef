"""Select the precision of a run with ``trainer.precision=auto``.

A run uses bf16 if the processor or the GPU has bf16 instructions, and fp32 otherwise. On a CPU, networks with fewer
than a million parameters and narrow layers use fp32. For other networks, a short measurement can only reject bf16, and
its result is stored in the user's cache folder. The first process decides for all processes. The run folder contains
the precision, so that a resumed run and evaluations of its weights use the same precision.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from efficient_ft.config import Config
from efficient_ft.core.errors import UserError
from efficient_ft.core.format import format_ratio
from efficient_ft.core.parsing import parse_json
from efficient_ft.core.process_memory import release_freed_memory
from efficient_ft.cost import AUTOCAST, TrainingStep
from efficient_ft.cost.probe import undisturbed
from efficient_ft.methods.base import apply_methods
from efficient_ft.methods.build import build_methods
from efficient_ft.record.environment import device_name
from efficient_ft.record.files import json_text, write_text_atomically
from efficient_ft.record.formats import START_AGAIN
from efficient_ft.training.bf16_units import has_bf16_units
from efficient_ft.training.costs import step_spec
from efficient_ft.training.kinds.registry import kind_of
from efficient_ft.training.output.console import rank, say
from efficient_ft.training.processes import from_first, is_connected

#: Name of the file in a run folder that contains the precision that was selected for ``auto``. The file in the user's
#: cache folder has the same name.
NAME = "precision.json"
#: The measurement rejects bf16 if its time exceeds the time of fp32 by this factor.
_SLOWER = 1.1
#: On a CPU, networks with fewer parameters and fewer products per value (see `_products_per_value`) use fp32. Measured
#: with two threads of a Zen 4 processor:
#:
#: network       parameters   products per value   time of a step, bf16 / fp32
#: ViT              0.3 M             58                    1.58
#: ViT              0.6 M             87                    1.13
#: ViT              0.8 M            101                    1.05
#: ViT              1.04 M           115                    0.88
#: ResNet           0.4 M            179                    0.53
#: XCiT-nano        2.9 M             80                    0.76
#: BERT-tiny        4.4 M             90                    0.79
_SMALL, _NARROW = 1_000_000, 110
#: Number of rounds in which products are timed, after one warm-up round.
_ROUNDS = 3
#: Maximum number of images and approximate time (seconds) of a timed step of a network in fp32.
_MOST_IMAGES, _STEP_SECONDS = 8, 0.5
#: Names of the types of devices that may have bf16 instructions.
_NAMES = {"cpu": "processor", "cuda": "GPU"}
#: Sentence that is printed if ``auto`` has selected fp32 on a device with bf16 instructions.
_BF16 = "To train in bf16, set trainer.precision=bf16."


class Choice(NamedTuple):
    """A precision (``fp32`` or ``bf16``), the reason, and a sentence about the alternative or an empty string."""

    precision: str
    reason: str
    other: str = ""


def resolve_precision(config: Config, device: torch.device, folder: Path | None = None) -> Config:
    """Replace ``trainer.precision=auto`` by a precision, and print the precision and the reason in one line.

    Every process of a run must call this function.

    Args:
        config: the configuration of the run. If `trainer.precision` is not ``auto``, the configuration is unchanged.
        device: the device of the run.
        folder: a run folder, or None. If the run in this folder has started with ``auto``, its precision is used.

    Raises:
        UserError: If the file with the precision in `folder` is damaged.
    """
    if config.trainer.precision != "auto":
        say(f"Precision: {config.trainer.precision} (trainer.precision={config.trainer.precision}).")
        return config
    # If Lightning starts the other processes, they are not connected yet. The first process has then written the file.
    decides = rank() == 0 or not is_connected()
    choice = from_first((_stored(folder) or choose_precision(config, device)) if decides else None)
    say(f"Precision: {choice.precision} ({choice.reason}). {choice.other}".rstrip())
    return config.with_precision(choice.precision)


def in_bf16(config: Config, device: torch.device, folder: Path | None = None) -> Config | None:
    """Return a copy of `config` in bf16 if ``auto`` has selected fp32 on a device with bf16 instructions, or None.

    A run uses the copy if it does not fit into its memory budget in fp32. The arguments are those of
    `resolve_precision`. A run that has already started keeps its precision.
    """
    automatic = config.given_precision == "auto" and config.trainer.precision == "fp32"
    if not automatic or _stored(folder) is not None or device.type not in _NAMES or not has_bf16_units(device):
        return None
    return config.with_precision("bf16")


def precision_note(config: Config, device: torch.device) -> dict[str, str]:
    """Return the file name and the text that record the precision in a run folder.

    The result is empty if the run has not selected its precision.
    """
    if config.given_precision != "auto":
        return {}
    return {NAME: json_text({"precision": config.trainer.precision, "device": device_name(device)})}


def _stored(folder: Path | None) -> Choice | None:
    """Return the precision with which the run in `folder` started, or None if the folder contains no precision."""
    if folder is None or not (folder / NAME).is_file():
        return None
    file = folder / NAME
    try:
        noted: Any = parse_json(file.read_text(encoding="utf-8"))
        precision, device = noted["precision"], noted["device"]
        if precision not in ("fp32", "bf16") or not isinstance(device, str):
            raise ValueError("the file contains no precision")
    except (OSError, ValueError, TypeError, LookupError) as error:
        raise UserError(
            f"{file} is damaged. Remove this file to select the precision again, or start a new run. {START_AGAIN}"
        ) from error
    return Choice(precision, f"the run started in {precision} on {device}")


def choose_precision(config: Config, device: torch.device) -> Choice:
    """Return the precision of a new run on `device`."""
    name = _NAMES.get(device.type)
    if name is None:
        return Choice("fp32", f"trainer.precision=auto does not use bf16 on {device.type}")
    if not has_bf16_units(device):
        return Choice("fp32", f"the {name} has no bf16 instructions")
    if device.type == "cpu":
        network = _network(config)
        is_timed = _has_slow_convolutions(network)
        if not is_timed and _is_small(network):
            return Choice("fp32", "on a CPU, bf16 is slower for small networks with narrow layers", _BF16)
        ratio, what = _relative_time(config, is_timed)
        if ratio > _SLOWER:
            reason = f"bf16 takes {format_ratio(ratio)} the time of fp32 {what} on this processor"
            return Choice("fp32", reason, _BF16)
    reason = f"autocast; the {name} has bf16 instructions"
    return Choice("bf16", reason, "To train in fp32, set trainer.precision=fp32.")


def _relative_time(config: Config, is_timed: bool) -> tuple[float, str]:
    """Return the time of bf16 divided by the time of fp32 on this processor, and the name of the timed computation.

    Results are read from the user's cache folder. If `is_timed` is True, steps of the network are timed, and otherwise
    only products of a fixed size.
    """
    here = f"{device_name('cpu')}, torch {torch.__version__}, 1 thread"
    ratio = _cached(here, products_time)
    if ratio > _SLOWER or not is_timed:
        return ratio, "in matrix products and convolutions"
    settings = config.model_dump_json(include={"model", "method"}).encode()
    digest = hashlib.blake2b(settings, digest_size=4).hexdigest()
    key = f"{here}, {config.model.name}, {'+'.join(config.method)}, {digest}"
    return _cached(key, lambda: network_time(config)), "in a step of this network"


def _cached(key: str, measure: Callable[[], float]) -> float:
    """Return a result of the cache file. If the file has no valid result, measure and store the result."""
    file, known = cache_file(), {}
    with suppress(OSError, ValueError):
        read = parse_json(file.read_text(encoding="utf-8"))
        known = read if isinstance(read, dict) else {}
    ratio = known.get(key)
    if isinstance(ratio, float) and math.isfinite(ratio) and ratio > 0:
        return ratio
    ratio = measure()
    release_freed_memory()
    with suppress(OSError):  # without a writable folder, every run measures
        file.parent.mkdir(parents=True, exist_ok=True)
        write_text_atomically(file, json.dumps({**known, key: ratio}, indent=1) + "\n")
    return ratio


def cache_file() -> Path:
    """Return the file with the measured times, in the user's cache folder."""
    folder = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(folder) / "efficient_ft" / NAME


def products_time() -> float:
    """Time a linear layer and a convolution, forward and backward. Return the time of bf16 divided by that of fp32.

    The measurement takes less than a second and uses no random numbers.
    """
    tokens, weight = torch.ones(394, 384, requires_grad=True), torch.ones(1536, 384, requires_grad=True)
    kernel = torch.ones(64, 64, 3, 3, requires_grad=True)
    image = torch.ones(2, 64, 28, 28).to(memory_format=torch.channels_last).requires_grad_()

    def run(precision: str) -> None:
        with torch.autocast("cpu", AUTOCAST[precision], enabled=precision == "bf16"):
            outputs = F.linear(tokens, weight), F.conv2d(image, kernel, padding=1)
        torch.autograd.grad(outputs, (tokens, weight, image, kernel), [torch.ones_like(y) for y in outputs])

    return _ratio(run, rounds=1 + _ROUNDS)


def network_time(config: Config) -> float:
    """Time training steps of a run on random images, without updates. Return the time of bf16 divided by that of fp32.

    The batch is reduced, so that the measurement takes a few seconds and, in a run with a memory budget, needs less
    memory than the run: with half of the images (at least one), a step in fp32 needs about as much memory as a step in
    bf16 or less.
    """
    kind = kind_of(config)
    most = min(config.data.batch_size, _MOST_IMAGES) // (1 if config.memory is None else 2) or 1
    with undisturbed():
        network = kind.random_network(config.model, kind.classes(config)).to(memory_format=torch.channels_last)
        methods = build_methods(config)
        apply_methods(network, methods)
        spec = replace(step_spec(config.with_precision("fp32")), batch_size=min(most, 2))

        def run(precision: str) -> None:
            step.spec = replace(spec, precision=precision)
            step.forward()
            step.backward()
            step.model.zero_grad(set_to_none=True)

        step = TrainingStep(network, methods, spec)
        run("fp32")
        images = int(spec.batch_size * _STEP_SECONDS / _seconds(run, "fp32"))
        spec = replace(spec, batch_size=min(most, max(spec.batch_size, images)))
        step = TrainingStep(network, methods, spec)
        return _ratio(run, rounds=1 + _ROUNDS)


def _ratio(run: Callable[[str], None], rounds: int) -> float:
    """Run bf16 and fp32 alternately. Return the time of bf16 divided by the time of fp32.

    The first round is not used, because it creates kernels. The fastest of the other rounds is used, because it is the
    least disturbed by other programs.
    """
    seconds: dict[str, list[float]] = {"fp32": [], "bf16": []}
    for _ in range(rounds):
        for precision, times in seconds.items():
            times.append(_seconds(run, precision))
    return min(seconds["bf16"][1:]) / min(seconds["fp32"][1:])


def _seconds(run: Callable[[str], None], precision: str) -> float:
    """Return the processor time of `run` with one thread.

    Processor time excludes the time in which other programs run. With several threads, it would include the time in
    which a thread waits for another thread, which depends on other programs.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        start = time.process_time()
        run(precision)
        return time.process_time() - start
    finally:
        torch.set_num_threads(threads)


def _network(config: Config) -> nn.Module:
    """Build the network of a run on the meta device."""
    kind = kind_of(config)
    with undisturbed(), torch.device("meta"):
        return kind.random_network(config.model, kind.classes(config))


def _is_small(network: nn.Module) -> bool:
    """Return True if the layers of `network` are too few and too narrow for bf16 to be faster on a CPU.

    The rule reads only the sizes of layers, so the precision depends neither on the load of the machine nor on a cache.
    """
    parameters = sum(parameter.numel() for parameter in network.parameters())
    return parameters < _SMALL and _products_per_value(network) < _NARROW


def _products_per_value(network: nn.Module) -> float:
    """Return the number of products that linear layers and convolutions compute for each value that they read or write.

    At each position (a token or a pixel), a layer computes one product for each weight, and reads and writes one value
    for each channel. Autocast converts many of these values. In narrow layers, the conversions take longer than the
    faster products save. The number is infinite if `network` has none of these layers.
    """
    weights = values = 0
    for module in network.modules():
        if isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d):
            outputs, inputs = module.weight.shape[:2]
            weights += module.weight.numel()
            values += outputs + inputs * getattr(module, "groups", 1)
    return weights / values if values else math.inf


def _has_slow_convolutions(network: nn.Module) -> bool:
    """Return True if `network` has depthwise convolutions for which oneDNN may have no fast kernel in bf16.

    These are convolutions with a stride, and the gradients of kernels that are larger than 3 x 3.
    """
    return any(
        isinstance(module, nn.Conv2d)
        and module.groups == module.in_channels > 1
        and (max(module.kernel_size) > 3 or max(module.stride) > 1)
        for module in network.modules()
    )
