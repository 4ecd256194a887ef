"""Tables that show published numbers of others (``others.yaml``) next to the values of this project."""

from __future__ import annotations

import shlex
from functools import cache
from pathlib import Path
from typing import Any

import timm
import yaml
from torch import nn

from docsgen import records
from docsgen.markdown import block, table
from docsgen.values import VALUES, signed
from efficient_ft.core.format import format_ratio
from efficient_ft.papers.published import published_table

OTHERS: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("others.yaml").read_text(encoding="utf-8"))

#: Number of tokens in the last stage of EfficientFormer-L1 at 224 px.
TOKENS = 49


def low_rank_flops(inputs: int, outputs: int, tokens: int, rank: int | None = None) -> int:
    """Return the FLOPs of the backward pass of a linear layer by Table 1 of the LBP-WHT paper.

    Args:
        inputs: number of input channels (C_x).
        outputs: number of output channels (C_y).
        tokens: number of tokens (L).
        rank: number of bases (R), or None for the exact backward pass.
    """
    if rank is None:
        return 4 * inputs * outputs * tokens
    return (4 * inputs * outputs + (2 * inputs + outputs) * tokens) * rank


@cache
def last_stage() -> list[tuple[int, int]]:
    """Return the channels (inputs, outputs) of the linear layers and 1×1 convolutions in the last stage."""
    blocks = timm.create_model("efficientformer_l1").get_submodule("stages.3.blocks")
    weights = [module.weight for module in blocks.modules() if isinstance(module, nn.Linear | nn.Conv2d)]
    return [(weight.shape[1], weight.shape[0]) for weight in weights]


@block
def instant() -> str:
    """Show INSTANT's costs and accuracies next to the counts and the published values of LBP-WHT."""
    reported, group = OTHERS["instant"], "efficientformer_l1.partial."
    executed = {
        cell["row"]: cell["executed"]
        for cell in records.load("costs")["cells"]
        if (cell["table"], cell["column"]) == ("lbp_wht/2", "bwd_mflops")
    }
    published = {row.name.removeprefix(group): row for row in published_table("lbp_wht/2").rows}
    rows = []
    for key, label in {
        "full_bp": "exact",
        "lp_l1_2": "LBP-WHT, order 2",
        "instant": "INSTANT",
        "lp_l1_4": "LBP-WHT, order 4",
        "lp_l1_8": "LBP-WHT, order 8",
    }.items():
        theirs = reported.get(key)
        shown = [f"{theirs['mflops']}", f"{theirs['accuracy']:.2f}"] if theirs else ["–", "–"]
        if row := published.get(key):
            rank = int(row.columns["rank"]) if row.columns["rank"] else None
            rule = sum(low_rank_flops(*layer, TOKENS, rank) for layer in last_stage()) / 1e6
            costs = [f"{rule:.1f}", f"{executed[row.name]:.1f}", row.costs["bwd_mflops"]]
            accuracies = [row.cells["acc_cifar100"].printed, row.costs["acc_mean"]]
        else:
            costs, accuracies = ["–"] * 3, ["–"] * 2
        rows.append([label, shown[0], *costs, shown[1], *accuracies])
    costs = [f"MFLOPs, {one}" for one in ("INSTANT", "formula of LBP-WHT", "executed", "LBP-WHT with `perf`")]
    accuracies = [f"accuracy %, {one}" for one in ("INSTANT", "LBP-WHT, CIFAR-100", "LBP-WHT, mean of six")]
    return table(["backward pass", *costs, *accuracies], rows)


@block
def others() -> str:
    """Show published values of others and our closest values, each relative to the baseline of its own source."""
    rows = []
    for one in OTHERS["compared"]:
        name, *arguments = shlex.split(one["ours"])
        ours, baseline = VALUES[name](*arguments), one["baseline"]
        if one.get("points"):
            published = [f"{value} points" for value in signed(*(v - baseline for v in one["published"]), form="+.1f")]
            ours += " points"
        else:
            published = [format_ratio(value / baseline) for value in one["published"]]
        rows.append([one["source"], one["measured"], " to ".join(published), ours, one["with"]])
    return table(["source", "measured", "published", "ours", "our network and recipes"], rows, left=2, text_last=True)
