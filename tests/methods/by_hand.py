"""Operations and saved values of a step of the small ViT, counted by hand, and blocks chosen once to count it for."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from efficient_ft.methods.selection.per_step import LayersPerStep
from efficient_ft.testing import CLASSES

# Of the small ViT: 4 blocks of width C and H heads; N tokens are a class token and an 8×8 grid of 4×4 patches.
DEPTH, C, H, N = 4, 48, 3, 65


class Fixed(LayersPerStep):
    """The same blocks in every step."""

    name = "fixed"
    cost_steps = 1

    def __init__(self, blocks: list[int], embeddings: bool = False) -> None:
        super().__init__(len(blocks), embeddings, None)
        self.blocks, self.embeddings = blocks, embeddings

    def choose(self, step: int, count: int) -> list[int]:
        return self.blocks


def backward_flops(trained: Sequence[int], tokens: Sequence[int], embeddings: bool) -> int:
    """By hand, per image, a multiply-add counted as 2.

    Args:
        trained: the blocks that train.
        tokens: N of every block.
        embeddings: whether what comes before the blocks trains.
    """
    flops = 2 * 2 * C * CLASSES  # the head's weight, and its input for the norm before it
    for block, count in enumerate(tokens):
        if embeddings or block >= min(trained):
            products = 2 * count * 12 * C * C  # qkv 3 C², projection C², feed-forward network 8 C²
            # inputs' gradients everywhere (the lowest block's first norm wants one too), weights' where they train
            flops += products * (2 if block in trained else 1)
            flops += 4 * 2 * count**2 * C  # of q, k, attention and v
    return flops + (2 * 64 * (3 * 4 * 4) * C if embeddings else 0)  # images need no gradient


def saved_bytes(trained: Sequence[int], tokens: Sequence[int], embeddings: bool, batch: int) -> float:
    """By hand, per image, in single precision, attention fused. `tokens`: of every block, and behind the last."""
    floats = 0
    for block, count in enumerate(tokens[:-1]):
        if embeddings or block >= min(trained):
            floats += 10 * count * C  # both norms' inputs; q, k, v; attention's output; the activation's input (4)
            floats += 4 * count + H * count  # the norms' means and deviations; attention's normalizer
            if block in trained:
                floats += 6 * count * C  # what qkv and both layers of the feed-forward network are given
    floats += 2 * tokens[-1] * C + 2 * tokens[-1]  # the last norm's input and output, of which the head takes a part
    floats += 3 * 32 * 32 if embeddings else 0
    kept = 4 * (floats + CLASSES) + 8 + 4 / batch  # the loss: log-probabilities, labels, the sum of weights
    for block, (before, after) in enumerate(itertools.pairwise(tokens)):
        if after < before and (embeddings or block >= min(trained)):
            kept += 8 * (before - 1)  # places of the patch tokens, by attention
    return kept
