"""Record what has no measurement of its own: executed counts of every method, and the papers' memory rule.

Both are deterministic and need neither data, nor weights, nor an idle machine. Together they take some minutes, so that
their results are files under benchmarks/ and are not computed at every check.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]

#: Model, batch, and the recipes counted on it: a name for the record, and the arguments of the command line.
COUNTED: dict[str, tuple[int, dict[str, tuple[str, ...]]]] = {
    "deit_small": (
        16,
        {
            "full": ("method=full",),
            "head": ("method=head",),
            "last_stage": ("method=last_stage",),
            "blocks": ("method=blocks", "method.blocks.blocks=[3,7,11]"),
            "bitfit": ("method=bitfit",),
            "norm_last": ("method=norm_last",),
            "lbp_wht": ("method=[full,lbp_wht]",),
            "lbp_wht_last_stage": ("method=lbp_wht",),
            "lbp_dct": ("method=[full,lbp_dct]",),
            "lbp_dct_last_stage": ("method=lbp_dct",),
            "back_razor": ("method=back_razor",),
            "back_razor_exact_gradient": (
                "method=back_razor",
                "method.back_razor.sparsity=0",
                "method.back_razor.value_dtype=same",
            ),
            "mesa": ("method=mesa",),
            "swat": ("method=swat",),
            "checkpointing": ("method=checkpointing",),
            "evit": ("method=evit",),
            "tome": ("method=tome",),
            "bsr": ("method=bsr",),
            "alast": ("method=alast", "method.alast.budget_lr=0"),
            "uniform_layers": ("method=uniform_layers",),
            "lisa": ("method=lisa",),
            "top_layers": ("method=top_layers",),
            "lora": ("method=[full,lora]",),
            "lora_last_stage": ("method=lora",),
            "lora_all": ("method=[full,lora_all]",),
            "repnet": ("method=repnet",),
            "moe": ("method=moe",),
            "bsr_moe": ("method=bsr_moe",),
            "bsr_moe_published": ("method=bsr_moe_published",),
        },
    ),
    "proxyless_mobile": (
        8,
        {
            "full": ("method=full",),
            "tinytl": ("method=tinytl",),
            "tinytl_batch_norm": ("method=tinytl_batch_norm",),
            "tinytl_batch_norm+back_razor": (
                "method=[tinytl_batch_norm,back_razor]",
                "method.back_razor.sparsity=0",
                "method.back_razor.value_dtype=same",
            ),
            "back_razor": ("method=back_razor", "method.back_razor.sparsity=0.9"),
        },
    ),
    "resnet50": (
        16,
        {"full": ("method=full",), "bsr_cnn": ("method=bsr_cnn",), "repnet": ("method=repnet",)},
    ),
    "efficientformer_l1": (
        32,
        {
            "full": ("method=full",),
            "lbp_wht": ("method=lbp_wht",),
            "lbp_wht+back_razor": ("method=[lbp_wht,back_razor]",),
        },
    ),
}


def counted() -> dict[str, tuple[int, dict[str, tuple[str, ...]]]]:
    """`COUNTED`, with ``method=NAME`` on DeiT-S for every method that it does not name."""
    from efficient_ft.methods import METHODS

    named = " ".join(argument for _, recipes in COUNTED.values() for given in recipes.values() for argument in given)
    batch, recipes = COUNTED["deit_small"]
    others = {name: (f"method={name}",) for name in METHODS if not re.search(rf"\b{name}\b", named)}
    return {**COUNTED, "deit_small": (batch, {**recipes, **others})}


def record_counts() -> Path:
    """Count every recipe of `counted` with `efficient_ft.cost.executed`; returns the file written."""
    from efficient_ft.cli.compose import configurations
    from efficient_ft.cli.groups import CONF, register
    from efficient_ft.cost import executed
    from efficient_ft.methods.base import apply_methods
    from efficient_ft.methods.build import build_methods
    from efficient_ft.models import factory

    register()
    models: dict[str, Any] = {}
    for model, (batch, recipes) in counted().items():
        found: dict[str, Any] = {}
        for name, arguments in recipes.items():
            given = [f"model={model}", "model.pretrained=false", f"data.batch_size={batch}", "recipe=none", *arguments]
            (config,) = configurations(CONF, "train", given, sweep=False)
            network = factory.create_model(config.model, 100)
            height, width = factory.input_of(config.model).size
            methods = build_methods(config)
            apply_methods(network, methods)
            count = executed(network, batch, (height, width), methods=methods)
            found[name] = {
                "arguments": list(arguments),
                "trainable_parameters": sum(p.numel() for p in network.parameters() if p.requires_grad),
                "executed": count.as_dict(),
            }
            print(f"{model} {name}: {count}", flush=True)
        models[model] = {"batch": batch, "classes": 100, "size": [height, width], "recipes": found}
    record = {"command": "python scripts/docs.py --record counts", "kind": "counted", "models": models}
    return _write("counted_methods", record)


def record_published() -> Path:
    """Count the published tables by the papers' own rule; returns the file written."""
    from efficient_ft.papers import TABLES, bsr

    tables = []
    for table in TABLES:
        rows = []
        for row in table.rows:
            count = table.count(row)
            rows.append(
                {
                    "label": row.label,
                    "published": row.published,
                    "memory": count.memory,
                    "as_listed": count.as_listed if row.by_name else None,
                    "published_gmacs": row.gmacs,
                    "gmacs": count.gmacs if row.gmacs is not None else None,
                    "note": row.note,
                }
            )
            print(table.title, rows[-1], flush=True)
        tables.append({"title": table.title, "rows": rows})
    moe = [
        {"label": label, "published_gmacs": gmacs, "gmacs": bsr.moe_gmacs(methods)} for label, gmacs, methods in bsr.MOE
    ]
    tables.append({"title": "BSR, Table 6: ViT-B/16 with experts, batch 128, 10⁹ multiply-adds", "rows": moe})
    record = {"command": "python scripts/docs.py --record published", "kind": "published rule", "tables": tables}
    return _write("published_rule", record)


def _write(name: str, record: Any) -> Path:
    file = ROOT / "benchmarks" / f"{name}.json"
    file.write_text(json.dumps(record, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return file
