"""Messages for out-of-memory errors.

Each message states the size of the failed allocation, the settings that determine the memory usage, and a batch size
that fits into memory.
"""

from __future__ import annotations

import gc
import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch

from efficient_ft.config import Config
from efficient_ft.core.errors import MemoryLimitError, UserError
from efficient_ft.core.format import bytes_setting, format_bytes
from efficient_ft.core.process_memory import release_freed_memory, resident_bytes, room_bytes
from efficient_ft.core.units import parse_bytes
from efficient_ft.data.loader import refuse_killed_worker
from efficient_ft.training.memory.budget import largest_batch, smaller_evaluation
from efficient_ft.training.trainer import on_device

#: Substrings of torch's messages for out-of-memory errors that have no specific exception class.
_TEXTS = ("DefaultCPUAllocator", "std::bad_alloc", "MPS backend out of memory", "CUDA out of memory")
#: Pattern for the size of the failed allocation in error messages of torch and NumPy.
_ASKED = re.compile(r"(?:tried to allocate|unable to allocate) ([\d.]+) ?([KMGT]i?B|bytes)", re.IGNORECASE)
#: Methods that are suggested, in this order, if no batch size fits, and short descriptions of the methods.
_SMALLER = (
    (("full", "checkpointing"), "exact gradients, but each block is computed twice"),
    (("last_stage",), "only the last blocks are trained"),
    (("head",), "only the classifier is trained"),
)


@contextmanager
def out_of_memory(config: Config) -> Iterator[None]:
    """Inside a ``with`` block, convert out-of-memory errors to errors whose messages suggest a batch size.

    The memory is predicted as for the setting ``memory``. Before the prediction, objects in the block are freed.

    Raises:
        UserError: If the device or the process has too little memory, or if a data-loading process was killed.
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
        taken = torch.cuda.memory_reserved(device) if device.type == "cuda" else resident_bytes()
        free = max(0, _room(device) - taken)
        _forget(error)
    asked = _asked(text)
    data, size = config.data, config.model.image_size
    shape = "default of the network" if size is None else size
    where = {"cpu": "the CPU", "mps": "Apple's GPU"}.get(device.type, str(device))
    if device.type == "cuda":
        where = f"the GPU ({torch.cuda.get_device_name(device)})"
    raise MemoryLimitError(
        f"Out of memory on {where}: {'' if asked is None else f'the run tried to allocate {format_bytes(asked)}, and '}"
        f"{format_bytes(free)} of memory is free. The memory of a step depends on data.batch_size={data.batch_size},"
        f" model.image_size ({shape}) and method={'+'.join(config.method)}. The memory of evaluation depends on"
        f" data.eval_batch_size ({data.eval_batch_size or data.batch_size})."
        f" {_what_fits(config, device)}"
    )


def _forget(error: BaseException | None) -> None:
    """Free the objects, e.g. the model and activations, that the frames of an error and its causes reference."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__context__
    gc.collect()
    release_freed_memory()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _asked(text: str) -> int | None:
    """Return the size of the failed allocation in bytes, or None if the error does not state the size."""
    found = _ASKED.search(text)
    if found is None:
        return None
    if found[2].lower() == "bytes":
        return int(found[1])
    with suppress(UserError):
        return parse_bytes("memory", f"{found[1]}{found[2]}")
    return None


def _room(device: torch.device) -> int:
    """Return the number of bytes that this process can use: its current memory plus the free memory."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device)
    return room_bytes()


def _what_fits(config: Config, device: torch.device) -> str:
    """Return sentences that suggest a batch size or a method, and the command for finding other recipes."""
    room = _room(device)
    memory = bytes_setting(room)
    plan = f"To find recipes that fit, run efficient-ft plan with the same model, data, and memory={memory}."
    if config.tasks:
        return f"Reduce data.batch_size. {plan}"
    try:
        evaluated = smaller_evaluation(config, device, resident_bytes(), room)
        if evaluated is not None:
            return f"With data.eval_batch_size={evaluated}, the run is predicted to fit into memory. {plan}"
        largest = largest_batch(config, device, resident_bytes(), room)
        if largest == config.data.batch_size:
            return (
                f"A training step is predicted to fit into {format_bytes(room)}. Close other programs that use memory,"
                f" or reduce data.batch_size or data.eval_batch_size. {plan}"
            )
        if largest:
            wanted = config.data.eval_batch_size
            also = f" data.eval_batch_size={largest}" if wanted is not None and wanted > largest else ""
            same = _same_steps(config, largest)
            return f"With data.batch_size={largest}{also}, the run is predicted to fit into memory.{same} {plan}"
        for methods, about in _SMALLER:
            smaller = config.model_copy(update={"method": {name: {} for name in methods}})
            if set(methods) != set(config.method) and (
                largest := largest_batch(smaller, device, resident_bytes(), room)
            ):
                names = methods[0] if len(methods) == 1 else f"[{','.join(methods)}]"
                return (
                    f"With this method, no batch size is predicted to fit into memory. With method={names}"
                    f" data.batch_size={largest}, the run is predicted to fit ({about}). {plan}"
                )
    except (UserError, RuntimeError, MemoryError):  # the prediction failed, e.g. because it ran out of memory
        return f"Reduce data.batch_size. {plan}"
    return f"No batch size is predicted to fit into memory. Choose a smaller model, or reduce model.image_size. {plan}"


def _same_steps(config: Config, largest: int) -> str:
    """Return a sentence with settings that keep the optimizer steps, with at most `largest` samples per micro-batch."""
    batch, accumulate = config.data.batch_size, config.trainer.grad_accum_steps
    if config.optim.in_backward:
        return ""
    parts = next(parts for parts in range(2, batch + 1) if batch % parts == 0 and batch // parts <= largest)
    settings = f"data.batch_size={batch // parts} trainer.grad_accum_steps={accumulate * parts}"
    return f" To keep the optimizer steps unchanged, use {settings}."
