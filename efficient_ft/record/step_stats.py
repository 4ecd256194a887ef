"""``step_stats.jsonl`` of a run folder: one row per recorded optimizer step (`step_stats.interval`)."""

from __future__ import annotations

from pathlib import Path
from typing import NotRequired, TypedDict

from efficient_ft.record.rows import Rows

NAME = "step_stats.jsonl"


class StepStatsRow(TypedDict):
    """One recorded optimizer step. Lists have one entry per block, in the order of `blocks`.

    Numbers are from the step's first micro-batch and, with several processes, from the first process's part of it.
    Methods may add entries (`Method.step_stats`).

    Attributes:
        step: the optimizer step, counted from 1 as in metrics.jsonl.
        blocks: full names of the model's blocks.
        task: the task of this step, if there are several tasks.
        trained: the blocks in which at least one parameter required a gradient.
        budgets: ALaST's compute budget of each block.
        tokens: number of tokens per image in the block's output, including prefix and fused tokens; for a feature map,
            its number of positions. None if the block did not run.
        magnitudes: mean over images and tokens of ‖f(x)‖ / ‖f(x) + x‖, where f(x) + x is the block's output and f(x) is
            its difference from the input (Samragh et al., "Weight subcloning", 2023; Figure 2 of the ALaST paper). None
            if no token can be compared (downsampling).
        compared: number of tokens per image in this mean. Only tokens that are in both the input and the output of the
            block are compared, not tokens that it drops or fuses. If grid positions are unknown (merged tokens, or a
            drop in the last block), only prefix tokens are compared.
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
    """Return the file with the recorded steps (`StepStatsRow`) of the run in folder `run`."""
    return Rows(run / NAME)
