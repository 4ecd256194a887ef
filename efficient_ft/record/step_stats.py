"""``step_stats.jsonl`` of a run folder: one row per recorded optimizer step (`step_stats.interval`)."""

from __future__ import annotations

from pathlib import Path
from typing import NotRequired, TypedDict

from efficient_ft.record.rows import Rows

NAME = "step_stats.jsonl"


class StepStatsRow(TypedDict):
    """One recorded optimizer step; lists have one entry per block, in the order of `blocks`.

    Numbers are those of the step's first micro-batch and, with several processes, of the first process's share of it.
    Methods may add entries (`Method.step_stats`).

    Attributes:
        step: the optimizer step, counted from 1 as in metrics.jsonl.
        blocks: full names of the model's blocks.
        task: the task of this step, where there are several.
        trained: the blocks in which a parameter required a gradient in this step.
        budgets: ALaST's compute budget of each block in this step.
        tokens: tokens of each image in the block's output, prefix and fused tokens included (of a feature map: its
            positions). None: the block did not run.
        magnitudes: mean over images and tokens of ‖f(x)‖ / ‖f(x) + x‖, where f(x) + x is the block's output and f(x)
            its difference from the input (Samragh et al., "Weight subcloning", 2023; Figure 2 of the ALaST paper).
            None: no token can be compared (downsampling).
        compared: tokens per image in that mean. A token is compared if it is in the input and in the output of the
            block: tokens dropped or newly fused in the block are not. Where grid positions are unknown (merged tokens,
            a drop in the last block), only prefix tokens are compared.
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
    """The rows (`StepStatsRow`) of the run in folder `run`; none if it recorded nothing."""
    return Rows(run / NAME)
