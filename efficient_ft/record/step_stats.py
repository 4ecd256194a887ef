"""Contents of ``step_stats.jsonl``, with one row for each recorded optimizer step (`step_stats.interval`)."""

from __future__ import annotations

from pathlib import Path
from typing import NotRequired, TypedDict

from efficient_ft.record.rows import Rows

NAME = "step_stats.jsonl"


class StepStatsRow(TypedDict):
    """Row for one recorded optimizer step. Each list has one entry per block, in the order of `blocks`.

    The values describe the first micro-batch of the step. With several processes, the values describe only the part of
    this micro-batch that the first process computes. Methods may add entries (`Method.step_stats`).

    Attributes:
        step: number of the optimizer step, counted from 1 as in metrics.jsonl.
        blocks: full names of the model's blocks.
        task: name of the task of this step, if there are several tasks.
        trained: names of the blocks in which at least one parameter required a gradient.
        budgets: compute budget of each block in ALaST.
        tokens: number of tokens per image in the output of the block, including prefix and fused tokens. For a feature
            map, the value is the number of positions. The value is None if the block did not run.
        magnitudes: relative magnitude ‖f(x)‖ / ‖f(x) + x‖, averaged over images and tokens (Samragh et al., "Weight
            subcloning", 2023; Figure 2 of the ALaST paper). The output of the block is f(x) + x, and f(x) is the
            difference between the output and the input. The value is None if no token can be compared (downsampling).
        compared: number of tokens per image over which `magnitudes` is averaged. A token is compared only if it is in
            both the input and the output of the block. Tokens that the block drops or fuses are not compared. If grid
            positions are unknown (merged tokens, or tokens dropped in the last block), only prefix tokens are compared.
    """

    step: int
    blocks: list[str]
    task: NotRequired[str]
    trained: list[str]
    budgets: NotRequired[list[float]]
    tokens: list[int | None]
    magnitudes: list[float | None]
    compared: list[float | None]


def step_stats_file(run: Path) -> Rows:
    """Return the file that contains the recorded steps (`StepStatsRow`) of the run in folder `run`."""
    return Rows(run / NAME)
