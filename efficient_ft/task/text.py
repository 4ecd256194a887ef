"""Classification of texts: one class per text, or per pair of texts."""

from __future__ import annotations

import torch

from efficient_ft.task.base import Inputs
from efficient_ft.task.classification import Classification

#: Example tokens have ids below this number, which exist in every vocabulary.
_FEW = 4


class TextClassification(Classification):
    """Token ids and attention mask (B, L), logits (B, classes), cross-entropy, top-1 accuracy."""

    name = "text"
    item = sample = "text"
    input_dimensions = 1
    _shape = "(texts, classes)"

    def example_inputs(
        self, batch_size: int, channels: int, input_size: tuple[int, ...], generator: torch.Generator | None = None
    ) -> Inputs:
        ids = torch.randint(1, _FEW, (batch_size, *input_size), generator=generator)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
