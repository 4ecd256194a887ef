"""Back Razor's memory columns beside our count by the same rule: ``python scripts/published.py``

Tables 3 (ViT-B/16, batch 128, MiB) and 1 (ProxylessNAS-Mobile, batch 8, 10⁶ B), 224 px, 100 classes, of Jiang et al.,
"Back Razor: Memory-Efficient Transfer Learning by Self-Sparsified Backpropagation", NeurIPS 2022. Nothing is trained or
run: it takes seconds and needs neither data nor weights. How a row's values are kept where the paper does not say
(bytes of a value) is what gives its number, and stands in the row's note.
"""

from __future__ import annotations

from dataclasses import dataclass

import timm
import torch

import efficient_ft.models.proxyless  # noqa: F401  registers proxyless_mobile
from efficient_ft.cost import Keeping, published
from efficient_ft.cost.published import DENSE, MESA, back_razor
from efficient_ft.methods import BitFit, HeadOnly, Method, NormLast, TinyTL
from efficient_ft.models.view import is_norm

CLASSES = 100


@dataclass(frozen=True)
class Row:
    """A row of a published table.

    Attributes:
        published: in the table's unit.
        methods: applied one after the other.
        keeping: how activations are kept.
        frozen_norms: scales and shifts do not train, as Back Razor has it in CNNs.
        size: of the square images, in pixels.
    """

    label: str
    published: float
    methods: tuple[type[Method], ...] = ()
    keeping: Keeping = DENSE
    frozen_norms: bool = False
    size: int = 224
    note: str = ""


@dataclass(frozen=True)
class Table:
    title: str
    architecture: str
    batch_size: int
    unit: int
    rows: tuple[Row, ...]

    def count(self, row: Row) -> float:
        """Our number for `row`, in the table's unit."""
        with torch.device("meta"):
            model = timm.create_model(self.architecture, num_classes=CLASSES)
            for method in row.methods:
                method().apply(model)
            if row.frozen_norms:
                for module in filter(is_norm, model.modules()):
                    module.requires_grad_(False)
        return published(model, self.batch_size, (row.size, row.size), row.keeping).bytes / self.unit


#: The network that TinyTL compared on: its lite residual modules are there, frozen.
BESIDE_TINYTL = "with TinyTL's modules, frozen"

VIT = Table(
    "Back Razor, Table 3: ViT-B/16, batch 128, MiB",
    "vit_base_patch16_224",
    128,
    2**20,
    (
        Row("FT-Last", 525, (HeadOnly,)),
        Row("FT-Full", 19235),
        Row("BitFit", 9460, (BitFit,)),
        Row("Mesa", 5442, keeping=MESA),
        Row("Back Razor@80%", 4565, keeping=back_razor(0.8), note="LayerNorm: 2 B a value"),
        Row("Back Razor@90%", 3912, keeping=back_razor(0.9, norm_bytes=4), note="LayerNorm: 4 B a value"),
        Row("Back Razor@95%", 3496, keeping=back_razor(0.95, norm_bytes=4), note="LayerNorm: 4 B a value"),
        Row("Back Razor@80% + Mesa", 2937, keeping=back_razor(0.8, 1)),
    ),
)
CNN = Table(
    "Back Razor, Table 1: ProxylessNAS-Mobile, batch 8, 10⁶ B",
    "proxyless_mobile",
    8,
    10**6,
    (
        Row("FT-Last", 31, (TinyTL, HeadOnly), note=BESIDE_TINYTL),
        Row("FT-Last, the plain model", 31, (HeadOnly,)),
        Row("FT-Norm+Last", 192, (TinyTL, NormLast), note=BESIDE_TINYTL),
        Row("FT-Norm+Last, the plain model", 192, (NormLast,)),
        Row("FT-Full", 366),
        Row("TinyTL", 37, (TinyTL,)),
        Row("TinyTL@320", 65, (TinyTL,), size=320),
        *(
            Row(f"Back Razor@{share}%", memory, (), back_razor(share / 100, 4), True, note="4 B a value")
            for share, memory in ((90, 42), (95, 41), (97, 40), (99, 39))
        ),
    ),
)


def main() -> None:
    for table in (VIT, CNN):
        print(f"{table.title}\n{'':34}{'published':>10}{'ours':>10}")
        for row in table.rows:
            print(f"{row.label:34}{row.published:10}{table.count(row):10.1f}  {row.note}".rstrip())
        print()


if __name__ == "__main__":
    main()
