"""Lack of memory while a run trains, in words: what was asked for, what decides it, and what would fit."""

from __future__ import annotations

import gc
import re
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import psutil
import torch

from efficient_ft.config import Config
from efficient_ft.core.errors import UserError
from efficient_ft.core.format import bytes_setting, format_bytes
from efficient_ft.core.process_memory import memory_limit_bytes, release_freed_memory, resident_bytes
from efficient_ft.core.units import parse_bytes
from efficient_ft.data import class_count
from efficient_ft.data.loader import refuse_killed_worker
from efficient_ft.methods.build import build_methods
from efficient_ft.models import factory
from efficient_ft.training.budget import predicted_peak
from efficient_ft.training.trainer import on_device

#: Texts of the errors of torch's allocators on a CPU and on Apple's GPUs, which have no class of their own.
_TEXTS = ("DefaultCPUAllocator", "std::bad_alloc", "MPS backend out of memory", "CUDA out of memory")
#: How they, and NumPy, say what was asked for.
_ASKED = re.compile(r"(?:tried to allocate|unable to allocate) ([\d.]+) ?([KMGT]i?B|bytes)", re.IGNORECASE)
#: Methods in the order in which they are suggested where not even one image at a time fits, and what they are.
_SMALLER = (
    (("full", "checkpointing"), "exact, computes each block twice"),
    (("last_stage",), "trains the last blocks"),
    (("head",), "trains the classifier"),
)


@contextmanager
def out_of_memory(config: Config) -> Iterator[None]:
    """Turn lack of memory inside the block into a message with the batch size that is predicted to fit.

    The prediction is that of the setting ``memory``. What the block has built is freed before it is made.

    Args:
        config: of the run that trains inside.

    Raises:
        UserError: the device or the process has too little memory, or a process that loads data was killed.
    """
    try:
        yield
        return
    except (RuntimeError, MemoryError) as error:
        refuse_killed_worker(error)
        text = str(error)
        cuda = isinstance(error, torch.OutOfMemoryError) or "CUDA out of memory" in text
        if not cuda and not isinstance(error, MemoryError) and not any(known in text for known in _TEXTS):
            raise
        device = on_device(config)
        if "DefaultCPUAllocator" in text or isinstance(error, MemoryError):
            device = torch.device("cpu")
        free = max(0, _room(device) - _taken(device))
        _forget(error)
    asked = _asked(text)
    data, size = config.data, config.model.image_size
    shape = "the network's own" if size is None else size
    raise UserError(
        f"Out of memory on {_named(device)}: {'more was' if asked is None else f'{format_bytes(asked)} more were'}"
        f" asked for than is free, {format_bytes(free)}. A step's memory follows from"
        f" data.batch_size={data.batch_size}, model.image_size ({shape}) and method={'+'.join(config.method)}."
        f" {_what_fits(config, device)}"
    )


def _forget(error: BaseException | None) -> None:
    """Free what the frames of an error, and of those that it followed, hold: the model and a step's activations."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__context__
    gc.collect()
    release_freed_memory()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _asked(text: str) -> int | None:
    """The bytes that an error says were asked for."""
    found = _ASKED.search(text)
    if found is None:
        return None
    if found[2].lower() == "bytes":
        return int(found[1])
    with suppress(UserError):
        return parse_bytes("memory", f"{found[1]}{found[2]}")
    return None


def _named(device: torch.device) -> str:
    if device.type != "cuda":
        return {"cpu": "the CPU", "mps": "Apple's GPU"}.get(device.type, str(device))
    return f"the GPU ({torch.cuda.get_device_name(device)})"


def _taken(device: torch.device) -> int:
    """Memory of a device that this process has."""
    return torch.cuda.memory_reserved(device) if device.type == "cuda" else resident_bytes()


def _room(device: torch.device) -> int:
    """The memory that this process may take in all: what it has, and what is free within all limits."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device)
    process = psutil.Process().memory_info()
    sizes = [memory_limit_bytes(), process.rss + psutil.virtual_memory().available]
    if sys.platform != "win32":
        import resource

        for limit, used in ((resource.RLIMIT_AS, process.vms), (resource.RLIMIT_DATA, getattr(process, "data", 0))):
            allowed, _ = resource.getrlimit(limit)
            if allowed != resource.RLIM_INFINITY:
                sizes.append(process.rss + max(0, allowed - used))
    return min(sizes)


def _what_fits(config: Config, device: torch.device) -> str:
    """Sentences on what would fit: the largest batch size, else a method, and the command that finds recipes."""
    room = _room(device)
    plan = f"efficient-ft plan with the same model, data and memory={bytes_setting(room)} finds recipes that fit."
    if config.tasks:
        return f"Reduce data.batch_size; or {plan}"
    try:
        largest = _largest_batch(config, device, room)
        if largest == config.data.batch_size:
            return (
                f"A step is predicted to fit into {format_bytes(room)}: close what else takes memory, or reduce"
                f" data.batch_size or data.eval_batch_size; or {plan}"
            )
        if largest:
            return f"data.batch_size={largest} is predicted to fit{_same_steps(config, largest)}; or {plan}"
        for methods, about in _SMALLER:
            smaller = config.model_copy(update={"method": {name: {} for name in methods}})
            if set(methods) != set(config.method) and (largest := _largest_batch(smaller, device, room)):
                names = methods[0] if len(methods) == 1 else f"[{','.join(methods)}]"
                return (
                    f"No batch size is predicted to fit with this method; method={names} data.batch_size={largest}"
                    f" would ({about}); or {plan}"
                )
    except (UserError, RuntimeError, MemoryError):  # no prediction, also for lack of memory
        return f"Reduce data.batch_size; or {plan}"
    return f"No batch size is predicted to fit. Choose a smaller model or model.image_size; or {plan}"


def _same_steps(config: Config, largest: int) -> str:
    """The settings of the same optimizer steps in micro-batches of at most `largest` images, as a clause."""
    batch, accumulate = config.data.batch_size, config.trainer.grad_accum_steps
    if config.optim.in_backward:
        return ""
    parts = next(parts for parts in range(2, batch + 1) if batch % parts == 0 and batch // parts <= largest)
    return f" (the same steps: data.batch_size={batch // parts} trainer.grad_accum_steps={accumulate * parts})"


def _largest_batch(config: Config, device: torch.device, room: int) -> int:
    """The largest batch size, at most the configured one, that is predicted to fit into `room`; 0: none does."""
    network = factory.random_model(config.model, class_count(config.data) or 1000).to("meta")
    before = resident_bytes()  # the model's memory is given back, the libraries' is not

    def predicted(batch: int) -> int:
        smaller = config.model_copy(update={"data": config.data.model_copy(update={"batch_size": batch})})
        return predicted_peak(smaller, network, build_methods(config), before, device)

    most = config.data.batch_size
    if predicted(most) <= room:
        return most
    low, high = predicted(1), predicted(2)
    if low > room:
        return 0
    # Nearly linear in the batch: the guess is tried, and lowered where it is too large.
    guess = min(most - 1, 1 + int((room - low) / max(high - low, 1)))
    while guess > 1 and predicted(guess) > room:
        guess = guess * 9 // 10
    return guess
