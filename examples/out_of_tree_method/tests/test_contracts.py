"""EveryNth through every contract of efficient-ft."""

from __future__ import annotations

from pathlib import Path

import every_nth_method
from every_nth_method import EveryNth

from efficient_ft.testing import Instead, MethodContracts, Row


class TestContracts(MethodContracts):
    rows = {
        "every_nth": Row(
            EveryNth,
            {"n": 2},
            why_no_off="what trains is the choice itself",
            instead=Instead.SAME_GRADIENTS,
            models=("vit", "resnet"),
            on_reference="exact",
        )
    }
    conf = Path(every_nth_method.__file__).parent / "conf" / "method"
