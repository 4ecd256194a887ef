"""The cost columns of "Back Razor: Memory-Efficient Transfer Learning by Self-Sparsified Backpropagation" (Jiang et
al., NeurIPS 2022): Tables 3 (ViT-B/16, batch 128, MiB), 1 (ProxylessNAS-Mobile, batch 8, 10⁶ B) and 2 (ResNet-18, 10⁶
B), 224 px, 100 classes.

The paper does not say how some rows keep their values (bytes of a value). The choice that gives the published number
is stated in the row's note.
"""

from __future__ import annotations

from efficient_ft.cost.published import MESA, back_razor
from efficient_ft.methods import BitFit, HeadOnly, NormLast, TinyTL
from efficient_ft.papers.table import Row, Table

#: The network that TinyTL compared on contains its lite residual modules, frozen.
WITH_TINYTL = "with TinyTL's modules, frozen"

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
        Row("FT-Last", 31, (TinyTL, HeadOnly), note=WITH_TINYTL),
        Row("FT-Last, the plain model", 31, (HeadOnly,)),
        Row("FT-Norm+Last", 192, (TinyTL, NormLast), note=WITH_TINYTL),
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
#: The batch is printed as 128, with which the first convolution's output alone is 411 MB; 8 fits, with a byte for every
#: parameter, as TinyTL counts those that are frozen.
RESNET = Table(
    "Back Razor, Table 2: ResNet-18, batch 8, 10⁶ B; a byte for every parameter",
    "resnet18",
    8,
    10**6,
    (
        Row("FT-Full", 164.4, note="with the input of the global pooling, 164.4"),
        Row("Back Razor@90%", 41.7, (), back_razor(0.9, 4), True, note="4 B a value"),
    ),
    classes=10,
    parameter_value=1,
)
