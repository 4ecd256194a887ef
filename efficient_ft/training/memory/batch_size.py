"""Select the batch size of a run with ``data.batch_size=auto``, and the accumulation for `data.effective_batch_size`.

The batch size is the largest one whose predicted memory (`training.memory.budget`) fits. The run folder contains the
selected batch size in config.yaml, so that a resumed run uses it even if the available memory has changed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from efficient_ft.config import Config
from efficient_ft.core.errors import SettingError, UserError
from efficient_ft.core.format import bytes_setting, format_bytes
from efficient_ft.core.process_memory import memory_limit_bytes, resident_bytes, room_bytes
from efficient_ft.cost import Prediction
from efficient_ft.record import config_file
from efficient_ft.training.kinds.base import RunData
from efficient_ft.training.memory.budget import Predictor, measured_predictor, require_within_budget
from efficient_ft.training.memory.watch import budget_of
from efficient_ft.training.output.console import rank, say
from efficient_ft.training.processes import from_first, is_connected, world_size
from efficient_ft.training.trainer import on_device

#: Percentage of the available memory that a run without `memory` may use. The rest is left for other programs.
PERCENT = 90
#: Largest batch size that is selected.
LARGEST = 1024
#: Minimum number of optimizer steps in an epoch for which a batch size is selected without `data.effective_batch_size`.
LEAST_STEPS = 10
#: Batch size that replaces ``auto`` until a batch size is selected.
PROVISIONAL = 8


def provisional(config: Config, folder: Path | None = None) -> Config:
    """Replace ``data.batch_size=auto`` by the batch size of the run in `folder`, or by `PROVISIONAL`.

    Call `with_selected_batch_size` with the result before training. Configurations with an integer are unchanged.
    """
    if isinstance(config.data.batch_size, int):
        return config
    stored = _stored(folder)
    return config.with_batch_size(*(stored or (PROVISIONAL, 1)))


def _stored(folder: Path | None) -> tuple[int, int] | None:
    """Return the batch size and the accumulation that the run in `folder` selected, or None if there is no such run."""
    if folder is None or not (folder / config_file.NAME).is_file():
        return None
    stored = config_file.read_config(folder)
    return (stored.data.batch_size, stored.trainer.grad_accum_steps) if stored.data.batch_size_selected else None


def with_effective_batch_size(config: Config, say: Callable[[str], None] = say) -> Config:
    """Set the accumulation for `data.effective_batch_size`, and print it with `say`.

    The batch size must be an integer.

    Raises:
        SettingError: If the number of samples per step cannot be divided between the batches of all processes.
    """
    effective, batch, world = config.data.effective_batch_size, config.data.batch_size, world_size(config)
    if effective is None or config.data.automatic:
        return config
    if effective % (batch * world):
        known = f"a multiple of {batch * world} (data.batch_size={batch} in each of {world} processes)"
        raise SettingError("data.effective_batch_size", effective, known)
    accumulate, given = effective // (batch * world), config.trainer.grad_accum_steps
    if given not in (1, accumulate):
        do = "Remove trainer.grad_accum_steps."
        raise SettingError(
            "trainer.grad_accum_steps", given, f"{accumulate} with data.effective_batch_size={effective}", do
        )
    say(f"Accumulation: {_samples(batch, accumulate, world)} (data.effective_batch_size={effective}).")
    return config.with_batch_size(batch, accumulate)


def with_selected_batch_size(
    config: Config, data: RunData, folder: Path | None
) -> tuple[Config, Prediction | None, Predictor | None]:
    """Select the batch size of a run, print it, and use it in `data`. Every process of a run must call this function.

    Args:
        config: the configuration of the run, which is the result of `provisional`.
        data: the opened data of the run.
        folder: the run folder, or None for a run that starts from the beginning. If the run in this folder has selected
            its batch size, this batch size is used.

    Returns:
        The configuration, and the prediction and the predictor, which are None if the batch size was not selected now.

    Raises:
        UserError: If no batch size fits.
    """
    if not config.data.batch_size_selected:
        return config, None, None
    predicted: Prediction | None = None
    predictor: Predictor | None = None
    # If Lightning starts the other processes, they are not connected yet. The first process has then written the file.
    chosen = _stored(folder)
    if chosen is not None:
        say(f"Batch size: {_samples(*chosen, world_size(config))}, which the run selected when it started.")
    elif rank() == 0 or not is_connected():
        predictor = measured_predictor(config, data, folder)
        chosen, predicted = _select(config, data, predictor)
    config = config.with_batch_size(*from_first(chosen))
    data.parts[""].use_batch_size(config.data.batch_size)
    return config, predicted, predictor


class _Room(NamedTuple):
    """The memory in bytes that a run may use, the memory for the run and its workers, and its description."""

    run: int
    whole: int
    what: str


def _room(config: Config) -> _Room:
    device, budget = on_device(config), budget_of(config)
    cuda = device.type == "cuda"
    if budget is not None:
        limit = memory_limit_bytes()
        return _Room(budget if cuda else min(budget, limit), limit, f"memory={config.memory}")
    if cuda:
        free = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
        what = f"{PERCENT} % of the {format_bytes(free)} that are free on the GPU"
        return _Room(PERCENT * free // 100, memory_limit_bytes(), what)
    free = room_bytes() // (world_size(config) // config.trainer.num_nodes)
    room = PERCENT * free // 100
    return _Room(room, room, f"{PERCENT} % of the {format_bytes(free)} that this process can use")


def _select(config: Config, data: RunData, predictor: Predictor) -> tuple[tuple[int, int], Prediction]:
    """Return the largest batch size that fits with its accumulation, and the prediction for this batch size."""
    world, effective, room = world_size(config), config.data.effective_batch_size, _room(config)
    samples = data.parts[""].splits["train"]
    sizes, why = candidates(samples, world, effective, config.optim.in_backward)
    resumed, predictor.resumed = predictor.resumed, True  # a continued run must fit, too
    cuda = on_device(config).type == "cuda"

    def applied(size: int) -> Config:
        accumulate = config.trainer.grad_accum_steps if effective is None else effective // (size * world)
        return config.with_batch_size(size, accumulate)

    def peak(size: int) -> int:
        return predictor(applied(size)).peak_bytes

    def excess(size: int) -> int:
        one = applied(size)
        own = predictor(one).peak_bytes
        whole = predictor.workers(one) + (resident_bytes() if cuda else own)
        return max(own - room.run, whole - room.whole)

    size = largest_fitting(sizes, excess)
    chosen = applied(size or sizes[0])
    predicted = predictor(chosen)
    predictor.resumed = resumed
    if size is None:
        if config.memory is not None:
            require_within_budget(chosen, predictor)  # states what the smallest size needs
        plan = f"run efficient-ft plan with the same model, data, and memory={bytes_setting(room.run)}"
        raise UserError(
            f"data.batch_size=auto: no batch size fits into {room.what}. With data.batch_size={sizes[0]}, the run"
            f" needs about {format_bytes(peak(sizes[0]))}, most of it for {predicted.phase}. Close other programs that"
            f" use memory, or {plan}."
        )
    accumulate = chosen.trainer.grad_accum_steps
    limits = why if size == sizes[-1] else f"{sizes[sizes.index(size) + 1]} would not fit"
    steps = -(-samples // (size * world * accumulate))
    say(
        f"Batch size: {_samples(size, accumulate, world)}, {steps} steps per epoch (data.batch_size=auto; {limits})."
        f" The run is predicted to need {format_bytes(predicted.peak_bytes)} of memory, and may use"
        f" {format_bytes(room.run)} ({room.what})."
    )
    return (size, accumulate), predicted


def _samples(batch: int, accumulate: int, world: int) -> str:
    text = f"{batch}"
    text += f" × {accumulate} accumulated batches" if accumulate > 1 else ""
    text += f" × {world} processes" if world > 1 else ""
    return text if text == f"{batch}" else f"{text} = {batch * accumulate * world} samples per optimizer step"


def candidates(samples: int, world: int, effective: int | None, whole: bool = False) -> tuple[list[int], str]:
    """Return the batch sizes that may be selected in ascending order, and the reason for the largest one.

    Args:
        samples: number of training samples.
        world: number of processes.
        effective: number of samples per optimizer step, or None. The batch sizes are then divisors of this number.
        whole: True if an optimizer step must consist of one batch.

    Raises:
        SettingError: If `effective` is larger than `samples` or cannot be divided between the processes.
    """
    if effective is None:
        most = min(LARGEST, max(1, samples // (LEAST_STEPS * world)))
        grid = sorted({size for power in range(LARGEST.bit_length()) for size in (2**power, 3 * 2**power // 2)})
        why = f"{LARGEST} is the limit" if most == LARGEST else f"an epoch must have at least {LEAST_STEPS} batches"
        return [size for size in grid if size <= most], why
    if effective % world or effective > samples:
        known = f"a multiple of {world}, the number of processes, and at most {samples}, the number of training samples"
        raise SettingError("data.effective_batch_size", effective, known)
    each = effective // world
    sizes = [each] if whole else [size for size in range(1, each + 1) if each % size == 0]
    return sizes, f"data.effective_batch_size={effective} is the limit"


def largest_fitting(sizes: Sequence[int], excess: Callable[[int], int]) -> int | None:
    """Return the largest of the ascending `sizes` for which `excess` is not positive, or None if there is none.

    `excess` must be ascending. The search starts at a small size and ends close to the result, because the memory of
    some networks is counted by running them.
    """
    place = max((i for i, size in enumerate(sizes) if size <= PROVISIONAL), default=0)
    while excess(sizes[place]) > 0:
        if not place:
            return None
        place -= 1
    for step in (2, 1):
        while place + step < len(sizes) and excess(sizes[place + step]) <= 0:
            place += step
    return sizes[place]
