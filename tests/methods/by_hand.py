"""Closed-form FLOPs and saved bytes of a training step of the small ViT, and a method with a fixed choice of blocks."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from efficient_ft.methods.selection.per_step import LayersPerStep
from efficient_ft.testing import CLASSES

# The small ViT has 4 blocks of width C with H heads. Its N tokens are a class token and an 8×8 grid of 4×4 patches.
DEPTH, C, H, N = 4, 48, 3, 65


class Fixed(LayersPerStep):
    """A method that trains the same blocks in every step."""

    name = "fixed"
    cost_steps = 1

    def __init__(self, blocks: list[int], embeddings: bool = False) -> None:
        super().__init__(len(blocks), embeddings, None)
        self.blocks, self.embeddings = blocks, embeddings

    def choose(self, step: int, count: int) -> list[int]:
        return self.blocks


def backward_flops(trained: Sequence[int], tokens: Sequence[int], embeddings: bool) -> int:
    """Compute the backward FLOPs per image in closed form. A multiply-add counts as 2 FLOPs.

    Args:
        trained: The indices of the trained blocks.
        tokens: The number of tokens N in each block.
        embeddings: If True, the layers before the blocks train.
    """
    flops = 2 * 2 * C * CLASSES  # gradients of the head's weight and input
    for block, count in enumerate(tokens):
        if embeddings or block >= min(trained):
            products = 2 * count * 12 * C * C  # qkv 3 C², projection C², feed-forward network 8 C²
            # Every layer computes the gradient of its input. Only trained blocks compute the gradients of weights.
            flops += products * (2 if block in trained else 1)
            flops += 4 * 2 * count**2 * C  # gradients of q, k, v and the attention map
    return flops + (2 * 64 * (3 * 4 * 4) * C if embeddings else 0)  # images require no gradient


def saved_bytes(trained: Sequence[int], tokens: Sequence[int], embeddings: bool, batch: int) -> float:
    """Compute the saved bytes per image in closed form, in single precision with fused attention.

    Args:
        trained: The indices of the trained blocks.
        tokens: The number of tokens in each block and after the last block.
        embeddings: If True, the layers before the blocks train.
        batch: The batch size.
    """
    floats = 0
    for block, count in enumerate(tokens[:-1]):
        if embeddings or block >= min(trained):
            floats += 10 * count * C  # inputs of both norms; q, k, v; attention output; input of GELU (4)
            floats += 4 * count + H * count  # means and deviations of the norms; log-sum-exp of attention
            if block in trained:
                floats += 6 * count * C  # inputs of qkv, fc1 (C each) and fc2 (4 C)
    floats += 2 * tokens[-1] * C + 2 * tokens[-1]  # input and output of the final norm, and its statistics
    floats += 3 * 32 * 32 if embeddings else 0
    kept = 4 * (floats + CLASSES) + 8 + 4 / batch  # the loss saves log-probabilities, labels and the sum of weights
    for block, (before, after) in enumerate(itertools.pairwise(tokens)):
        if after < before and (embeddings or block >= min(trained)):
            kept += 8 * (before - 1)  # indices of the patch tokens, sorted by attention
    return kept
