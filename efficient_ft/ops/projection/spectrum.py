"""The energy of a gradient in each of the 64 Walsh–Hadamard bases."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from efficient_ft.ops.projection.transforms import BLOCK, pad_before_after, walsh


def block_energy(x_BHWC: Tensor) -> Tensor:
    """Compute the energy of a map in each basis, (8, 8) float32 by sequency (i, j).

    The energy is the sum of the squared coefficients over images, blocks and channels. The map is zero-padded, so that
    the energies of all 64 bases sum to the energy of the map (Parseval).
    """
    (top, bottom), (left, right) = pad_before_after(x_BHWC.shape[1]), pad_before_after(x_BHWC.shape[2])
    x = F.pad(x_BHWC.float(), (0, 0, left, right, top, bottom))
    h = torch.from_numpy(walsh()).to(x) / BLOCK**0.5
    x = x.unflatten(1, (-1, BLOCK)).unflatten(3, (-1, BLOCK))  # B, h, 8, w, 8, C
    coefficients = torch.einsum("iy,byxc->bixc", h, x.movedim(3, 1).flatten(0, 2).flatten(2).unflatten(2, (BLOCK, -1)))
    coefficients = torch.einsum("jx,bixc->bijc", h, coefficients)
    return coefficients.square().sum((0, 3))
