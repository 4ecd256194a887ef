"""Count the cost of a training step with several methods, without running the step.

The example requires no data, weights or GPU. The counted FLOPs and stored bytes are the same on every machine.

    python examples/count_cost.py
"""

from __future__ import annotations

import timm

from efficient_ft.cost import Executed, executed
from efficient_ft.methods import BSR, LBPWHT, BackRazor, Full, LastStage
from efficient_ft.methods.base import Method


def main(batch_size: int = 16) -> dict[str, Executed]:
    """Return the cost of a DeiT-S step for each recipe, and print the costs relative to full fine-tuning."""
    recipes: dict[str, list[Method]] = {
        "full": [Full()],
        "last stage": [LastStage()],
        "last stage, LBP-WHT": [LastStage(), LBPWHT(bases="l1", order=4)],
        "BSR": [BSR(blocks=[3, 7, 11], drop_at=[3, 6, 9], keep_rate=0.5)],
        "BSR, Back Razor": [BSR(blocks=[3, 7, 11], drop_at=[3, 6, 9], keep_rate=0.5), BackRazor(sparsity=0.9)],
    }
    counts = {}
    for name, methods in recipes.items():
        model = timm.create_model("deit_small_patch16_224", num_classes=37)
        counts[name] = executed(model, batch_size, (224, 224), methods=methods)
    full = counts["full"]
    print(f"{'DeiT-S, per image':24} {'GFLOP':>8} {'of full':>8} {'kept MiB':>9} {'of full':>8}")
    for name, count in counts.items():
        flops, full_flops = (c.forward_flops + c.backward_flops for c in (count, full))
        print(
            f"{name:24} {flops / 1e9:8.1f} {flops / full_flops:8.0%}"
            f" {count.saved_bytes / 2**20:9.1f} {count.saved_bytes / full.saved_bytes:8.0%}"
        )
    return counts


if __name__ == "__main__":
    main()
