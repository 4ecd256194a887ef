"""Select the precision of a run with ``trainer.precision=auto``.

A run uses bf16 if the processor or the GPU has bf16 units, and fp32 otherwise. On a CPU, a short measurement can only
reject bf16, and its result is stored in the user's cache folder. The first process decides for all processes. The
run folder contains the precision, so that a resumed run and evaluations of its weights use the same precision.
"""

from __future__ import annotations

import json
import math
import os
import platform
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from efficient_ft.config import Config
from efficient_ft.core.errors import UserError
from efficient_ft.core.format import format_ratio
from efficient_ft.core.parsing import parse_json
from efficient_ft.record.environment import device_name
from efficient_ft.record.files import json_text, write_text_atomically
from efficient_ft.record.formats import START_AGAIN
from efficient_ft.training.output.console import rank, say
from efficient_ft.training.processes import from_first, is_connected

#: Name of the file in a run folder that contains the precision that was selected for ``auto``. The file in the user's
#: cache folder has the same name.
NAME = "precision.json"
#: The measurement rejects bf16 if its time exceeds the time of fp32 by this factor.
_SLOWER = 1.1
#: Number of measured rounds, after one warm-up round.
_ROUNDS = 3


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
    choice = from_first((_stored(folder) or choose_precision(device)) if decides else None)
    say(f"Precision: {choice.precision} ({choice.reason}). {choice.other}".rstrip())
    return config.with_precision(choice.precision)


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


def choose_precision(device: torch.device) -> Choice:
    """Return the precision of a new run on `device`."""
    name = {"cpu": "processor", "cuda": "GPU"}.get(device.type)
    if name is None:
        return Choice("fp32", f"trainer.precision=auto does not use bf16 on {device.type}")
    if not has_bf16_units(device):
        return Choice("fp32", f"the {name} has no bf16 instructions")
    slower = relative_time() if device.type == "cpu" else 0.0
    if slower > _SLOWER:
        ratio = f"bf16 takes {format_ratio(slower)} the time of fp32 on this processor"
        return Choice("fp32", ratio, "trainer.precision=bf16 trains in bf16.")
    has = f"the {name} has bf16 instructions"
    return Choice("bf16", f"autocast; {has}", "trainer.precision=fp32 trains in fp32.")


def has_bf16_units(device: torch.device) -> bool:
    """Return True if a CPU or a CUDA device has instructions for products in bfloat16."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    # On x86, oneDNN also accepts bf16 on processors that have AVX-512 but not its bf16 instructions. Processors with
    # AMX have these instructions.
    supported: bool = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    is_x86 = platform.machine().lower() in ("x86_64", "amd64")
    return supported and (not is_x86 or torch.cpu._is_avx512_bf16_supported())


def bf16_is_emulated(device: torch.device) -> bool:
    """Return True if a CPU or a CUDA device has no bfloat16 instructions. Other devices are not checked."""
    return device.type in ("cpu", "cuda") and not has_bf16_units(device)


def relative_time() -> float:
    """Return the time of bf16 divided by the time of fp32 on this processor.

    The result is read from the user's cache folder. If the folder has no valid result, the times are measured.
    """
    file, key = cache_file(), f"{device_name('cpu')}, torch {torch.__version__}"
    known: dict[str, Any] = {}
    with suppress(OSError, ValueError):
        read = parse_json(file.read_text(encoding="utf-8"))
        known = read if isinstance(read, dict) else {}
    ratio = known.get(key)
    if isinstance(ratio, float) and math.isfinite(ratio) and ratio > 0:
        return ratio
    ratio = measured_time()
    with suppress(OSError):  # without a writable folder, every process measures
        file.parent.mkdir(parents=True, exist_ok=True)
        write_text_atomically(file, json.dumps({**known, key: ratio}, indent=1) + "\n")
    return ratio


def cache_file() -> Path:
    """Return the file that contains the results of `relative_time`, in the user's cache folder."""
    folder = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(folder) / "efficient_ft" / NAME


def measured_time() -> float:
    """Measure the result of `relative_time` with a linear layer and a convolution, forward and backward.

    The two precisions alternate. The measurement takes less than a second and uses no random numbers.
    """
    tokens, weight = torch.ones(394, 384), torch.ones(1536, 384, requires_grad=True)
    image = torch.ones(2, 64, 28, 28).to(memory_format=torch.channels_last)
    kernel = torch.ones(64, 64, 3, 3, requires_grad=True)
    seconds: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(1 + _ROUNDS):
        for in_bf16, times in seconds.items():
            start = time.perf_counter()
            with torch.autocast("cpu", torch.bfloat16, enabled=in_bf16):
                _pass(lambda: F.linear(tokens.requires_grad_(), weight), tokens, weight)
                _pass(lambda: F.conv2d(image.requires_grad_(), kernel, padding=1), image, kernel)
            times.append(time.perf_counter() - start)
    # The fastest round is the least disturbed by other programs. The first round creates the kernels.
    return min(seconds[True][1:]) / min(seconds[False][1:])


def _pass(forward: Callable[[], Tensor], *inputs: Tensor) -> None:
    output = forward()
    torch.autograd.grad(output, inputs, torch.ones_like(output))
