"""The cost columns of Back Razor and BSR beside our count by the same rules: ``python scripts/published.py``

Tables 3 (ViT-B/16, batch 128, MiB) and 1 (ProxylessNAS-Mobile, batch 8, 10⁶ B), 224 px, 100 classes, of Jiang et al.,
"Back Razor: Memory-Efficient Transfer Learning by Self-Sparsified Backpropagation", NeurIPS 2022. How a row's values
are kept where the paper does not say (bytes of a value) is what gives its number, and stands in the row's note.

Tables 2 to 8 of Sarkar et al., "Block Selective Reprogramming for On-device Training of Vision Transformers", CVPR
Workshops 2024 (DeiT-S and ViT-B/16, batch 128, MiB; the forward pass's multiply-adds). Four rows of Table 7 do not
measure what they say, see `named_alike`.

Nothing is trained or run: it takes half a minute and needs neither data nor weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import timm
import torch
from torch import nn

import efficient_ft.models.proxyless  # noqa: F401  registers proxyless_mobile
from efficient_ft.cost.published import (
    BSR_RULE,
    DENSE,
    MESA,
    TINYTL_RULE,
    Keeping,
    Operation,
    Rule,
    back_razor,
    operations,
    parameter_bytes,
    peak,
)
from efficient_ft.methods import BSR, BitFit, Blocks, EViT, HeadOnly, Method, NormLast, TinyTL
from efficient_ft.models.view import is_norm


@dataclass(frozen=True)
class Row:
    """A row of a published table.

    Attributes:
        published: memory, in the table's unit.
        methods: applied one after the other.
        keeping: how activations are kept.
        frozen_norms: scales and shifts do not train, as Back Razor has it in CNNs.
        size: of the square images, in pixels.
        gmacs: published multiply-adds of the batch's forward pass, in 10⁹.
        by_name: indices of blocks of which the published count unfroze `named_alike`.
    """

    label: str
    published: float
    methods: tuple[Callable[[], Method], ...] = ()
    keeping: Keeping = DENSE
    frozen_norms: bool = False
    size: int = 224
    gmacs: float | None = None
    by_name: tuple[int, ...] = ()
    note: str = ""


@dataclass(frozen=True)
class Count:
    """Our numbers for a row: memory in the table's unit, 10⁹ multiply-adds of the batch.

    Attributes:
        as_listed: memory, had only the blocks listed been unfrozen.
    """

    memory: float
    gmacs: float
    as_listed: float


@dataclass(frozen=True)
class Table:
    """A published table.

    Attributes:
        parameters: they are part of its memory.
    """

    title: str
    architecture: str
    batch_size: int
    unit: int
    rows: tuple[Row, ...]
    rule: Rule = TINYTL_RULE
    classes: int = 100
    parameters: bool = True

    def count(self, row: Row) -> Count:
        """Our numbers for `row`."""
        model, size = self.model(row), (row.size, row.size)
        running = operations(model, size, rule=self.rule)
        memory = as_listed = self._memory(model, running, row)
        frozen = {name: p for name, p in model.named_parameters() if not p.requires_grad}
        if alike := named_alike(frozen, row.by_name):
            for name in alike:
                frozen[name].requires_grad_(True)
            # The published count goes by each weight where a layer is linear or a normalisation, but lets no gradient
            # pass through attention and GELU before the first block listed, whatever trains there.
            trains = operations(model, size, rule=self.rule)
            both = [t if t.kind in ("product", "norm") else p for t, p in zip(trains, running, strict=True)]
            memory = self._memory(model, both, row)
        return Count(memory, sum(op.macs for op in running) * self.batch_size / 1e9, as_listed)

    def model(self, row: Row) -> nn.Module:
        """What is counted in `row`, on the meta device."""
        with torch.device("meta"):
            model = timm.create_model(self.architecture, num_classes=self.classes)
            for method in row.methods:
                method().apply(model)
            if row.frozen_norms:
                for module in filter(is_norm, model.modules()):
                    module.requires_grad_(False)
        return model

    def _memory(self, model: nn.Module, running: Sequence[Operation], row: Row) -> float:
        parameters = parameter_bytes(model) if self.parameters else 0
        return (peak(running, row.keeping)[0] * self.batch_size + parameters) / self.unit


def named_alike(names: Iterable[str], blocks: Sequence[int]) -> list[str]:
    """Those of the parameters' `names` that BSR's Table 7 takes for part of the `blocks`: an index occurs in them.

    Of 2 these are block 2 and each block's ``norm2`` and ``fc2``; of 0 blocks 0 and 10.
    """
    return [name for name in names if any(str(block) in name for block in blocks)]


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


DEIT = "deit_small_patch16_224"

#: What the published count of Table 7 unfroze; what it would be with the gradient that this needs in blocks 0 and 1.
ALIKE = "also norm2 and fc2 of all blocks; with their gradient in blocks 0 and 1"
BSR_TABLES = (
    Table(
        "BSR, Table 3: DeiT-S, batch 128, MiB and 10⁹ multiply-adds",
        DEIT,
        128,
        2**20,
        (
            Row("FT-Full", 8649, gmacs=589),
            Row("FT-Last", 369, (HeadOnly,), gmacs=589, note="not derived: TinyTL's rule gives 242"),
            Row("BSR", 1433, (BSR,), gmacs=295),
        ),
        BSR_RULE,
        10,
    ),
    Table(
        "BSR, Table 4: ViT-B/16, batch 128, MiB and 10⁹ multiply-adds (Back Razor's rows: above)",
        "vit_base_patch16_224",
        128,
        2**20,
        (
            Row("FT-Full", 17388, gmacs=2249),
            Row("FT-Last", 525, (HeadOnly,), gmacs=2249, note="Back Razor's number, by TinyTL's rule (above)"),
            Row("BSR", 2938, (BSR,), gmacs=1129),
        ),
        BSR_RULE,
    ),
    Table(
        "BSR, Table 5: DeiT-S, batch 1, activations only, MiB and 10⁹ multiply-adds",
        DEIT,
        1,
        2**20,
        (
            Row("FT-Full", 66.9, gmacs=4.6),
            Row("BSR", 34.3, (partial(Blocks, [3, 7, 11]),), gmacs=4.6, note="without dropping tokens"),
        ),
        BSR_RULE,
        10,
        parameters=False,
    ),
    Table(
        "BSR, Table 2: DeiT-S, batch 128, MiB, all tokens (with dropping: Table 7)",
        DEIT,
        128,
        2**20,
        tuple(
            Row(str(blocks), memory, (partial(Blocks, blocks),))
            for blocks, memory in (([10, 11], 1477), ([9, 10, 11], 2187), ([8, 9, 10, 11], 2896))
        ),
        BSR_RULE,
        10,
    ),
    Table(
        # Drops in blocks 3, 6, 9, as in the rest of the paper: the caption's 4th, 7th, and 11th (3, 6, 10) would give
        # 1470 for [3, 7, 11].
        "BSR, Table 7: DeiT-S, batch 128, MiB; ours with names matched by substring, and as listed",
        DEIT,
        128,
        2**20,
        tuple(
            Row(str(blocks), memory, (partial(BSR, blocks),), by_name=tuple(blocks), note=note)
            for blocks, memory, note in (
                ([3, 6, 9, 11], 1526, ""),
                ([2, 5, 8, 11], 2809, f"{ALIKE}: 3329"),
                ([4, 7, 10, 11], 1132, ""),
                ([8, 9, 10, 11], 502, ""),
                ([0, 2, 5, 8], 3705, "also norm2 and fc2 of all blocks, and block 10; as listed 3118 are kept"),
                ([3, 7, 11], 1433, ""),
                ([4, 7, 11], 1079, ""),
                ([2, 7, 11], 2731, f"{ALIKE}: 3251"),
                ([9, 10, 11], 333, ""),
                ([2, 5, 8], 2785, f"{ALIKE}: 3305; as listed 2036 are kept"),
                ([4, 11], 986, ""),
                ([7, 11], 460, ""),
                ([10, 11], 215, ""),
            )
        ),
        BSR_RULE,
        10,
    ),
    Table(
        "BSR, Table 8: DeiT-S, batch 128, MiB and 10⁹ multiply-adds, blocks 3, 7, 11",
        DEIT,
        128,
        2**20,
        tuple(
            Row(
                f"drop {1 - keep:.1f} in {drop_at}",
                memory,
                (partial(BSR, drop_at=drop_at, keep_rate=keep),),
                gmacs=gmacs,
            )
            for keep, drop_at, memory, gmacs in (
                (0.7, [1, 3, 5, 7, 9], 1363, 270),
                (0.5, [3, 6, 9], 1433, 295),
                (0.3, [5, 7, 9], 1673, 311),
            )
        ),
        BSR_RULE,
        10,
    ),
)

#: BSR's Table 6, 10⁹ multiply-adds of ViT-B/16 with experts for batch 128, and what drops tokens there.
MOE = (("MoE, baseline", 1801, ()), ("MoE, BSR", 1237, (partial(EViT, [3, 6, 9], 0.7, fuse=False),)))


def moe_gmacs(methods: Sequence[Callable[[], Method]]) -> float:
    """Multiply-adds as Table 6 counts them: linear layers and the patch embedding, neither attention's products nor the
    experts of blocks 3, 7, 11 (nor the gates, whose 0.05 % are lost in rounding)."""
    with torch.device("meta"):
        model = timm.create_model("vit_base_patch16_224", num_classes=0)
        for method in methods:
            method().apply(model)
    experts = tuple(f"blocks.{block}.mlp." for block in (3, 7, 11))
    counted = (op for op in operations(model, (224, 224)) if op.kind == "product" and not op.name.startswith(experts))
    return 128 * sum(op.macs for op in counted) / 1e9


def show(table: Table) -> None:
    """Print a table, with the columns that it has."""
    has_macs = any(row.gmacs is not None for row in table.rows)
    listed = any(row.by_name for row in table.rows)
    heads = ["published", "ours", *["as listed"] * listed, *["published", "ours"] * has_macs]
    print(f"{table.title}\n{'':34}" + "".join(f"{head:>10}" for head in heads))
    for row in table.rows:
        count = table.count(row)
        line = f"{row.label:34}{row.published:10}{count.memory:10.1f}"
        line += f"{count.as_listed:10.1f}" if listed else ""
        line += f"{row.gmacs:10}{count.gmacs:10.1f}" if has_macs else ""
        print(f"{line}  {row.note}".rstrip())
    print()


def main() -> None:
    for table in (VIT, CNN, *BSR_TABLES):
        show(table)
    print(f"BSR, Table 6: ViT-B/16, batch 128, 10⁹ multiply-adds\n{'':34}{'published':>10}{'ours':>10}")
    for label, gmacs, methods in MOE:
        print(f"{label:34}{gmacs:10}{moe_gmacs(methods):10.1f}")


if __name__ == "__main__":
    main()
