"""``step_stats.jsonl`` of a run folder: one row per recorded optimizer step (`step_stats.interval`)."""

from __future__ import annotations

from pathlib import Path
from typing import NotRequired, TypedDict

from efficient_ft.record.rows import Rows

NAME = "step_stats.jsonl"


class StepStatsRow(TypedDict):
    """One recorded optimizer step. Lists have one entry per block, in the order of `blocks`.

    The numbers describe the first micro-batch of the step. With several processes, they describe the part of this
    micro-batch that the first process computes. Methods may add entries (`Method.step_stats`).

    Attributes:
        step: the optimizer step, counted from 1 as in metrics.jsonl.
        blocks: full names of the model's blocks.
        task: the task of this step, if there are several tasks.
        trained: the blocks in which at least one parameter required a gradient.
        budgets: compute budget of each block in ALaST.
        tokens: number of tokens per image in the output of the block, including prefix and fused tokens. For a feature
            map, the number of positions. None if the block did not run.
        magnitudes: mean over images and tokens of ‖f(x)‖ / ‖f(x) + x‖, where f(x) + x is the output of the block and
            f(x) is the difference between output and input (Samragh et al., "Weight subcloning", 2023; Figure 2 of the
            ALaST paper). None if no token can be compared (downsampling).
        compared: number of tokens per image over which `magnitudes` is averaged. Tokens are compared only if they are
            in both the input and the output of the block. Tokens that the block drops or fuses are not compared. If
            grid positions are unknown (merged tokens, or a drop in the last block), only prefix tokens are compared.
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
