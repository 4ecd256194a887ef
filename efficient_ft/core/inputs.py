"""The type of the inputs of a network."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

#: The input of a network: images (B, C, H, W), or a mapping with the inputs of texts, (B, L) each.
Inputs = Tensor | Mapping[str, Tensor]
