"""Count costs that no benchmark measures: executed counts of every method, and the papers' costs by their rules.

Both are deterministic and need neither data, nor weights, nor an idle machine. Together they take some minutes, so that
their results are files under benchmarks/ and are not computed at every check.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

if TYPE_CHECKING:
    from efficient_ft.papers.published import Row, Table

ROOT = Path(__file__).resolve().parent.parent

#: By model, the batch and the recipes counted on it: ``counted.yaml``.
COUNTED: dict[str, dict[str, Any]] = yaml.safe_load(
    Path(__file__).with_name("counted.yaml").read_text(encoding="utf-8")
)

#: Number of classes of the counted networks.
CLASSES = 100

#: Of `count_adapters`: rank of the adapters in peft#2196 (317,772 parameters in all 53 convolutions of a ResNet-50).
PEFT_RANK = 4
#: Of `count_adapters`: batch size in peft#2196.
ADAPTERS_BATCH = 16


def counted() -> dict[str, dict[str, Any]]:
    """Return `COUNTED`, with ``method=NAME`` on DeiT-S for every method that it does not name."""
    from efficient_ft.methods import METHODS

    named = " ".join(argument for of in COUNTED.values() for given in of["recipes"].values() for argument in given)
    others = {name: [f"method={name}"] for name in METHODS if not re.search(rf"\b{name}\b", named)}
    of = COUNTED["deit_small"]
    return {**COUNTED, "deit_small": {**of, "recipes": {**of["recipes"], **others}}}


def _configured(model: str, batch: int, arguments: Sequence[str]) -> Any:
    from efficient_ft.cli.hydra.compose import configurations
    from efficient_ft.cli.hydra.groups import CONF

    given = [f"model={model}", "model.pretrained=false", f"data.batch_size={batch}", "recipe=none", *arguments]
    (config,) = configurations(CONF, "train", given, sweep=False)
    return config


def count_recipe(model: str, batch: int, arguments: Sequence[str]) -> dict[str, Any]:
    """Return the entry of a recipe of `counted`, counted with `efficient_ft.cost.executed`."""
    from efficient_ft.cost import executed
    from efficient_ft.methods.base import apply_methods
    from efficient_ft.methods.build import build_methods
    from efficient_ft.models import factory

    config = _configured(model, batch, arguments)
    network = factory.random_model(config.model, CLASSES)
    methods = build_methods(config)
    apply_methods(network, methods)
    height, width = factory.input_of(config.model).size
    count = executed(network, batch, (height, width), methods=methods)
    return {
        "arguments": list(arguments),
        "trainable_parameters": sum(p.numel() for p in network.parameters() if p.requires_grad),
        "executed": count.as_dict(),
    }


def record_counts() -> Path:
    """Count every recipe of `counted`; return the file written."""
    from efficient_ft.cli.hydra.groups import register
    from efficient_ft.models import factory

    register()
    models: dict[str, Any] = {}
    for model, of in counted().items():
        found = {name: count_recipe(model, of["batch"], arguments) for name, arguments in of["recipes"].items()}
        size = list(factory.input_of(_configured(model, of["batch"], []).model).size)
        models[model] = {"batch": of["batch"], "classes": CLASSES, "size": size, "recipes": found}
        print(model, flush=True)
    record = {"command": "python scripts/docs.py --record counts", "kind": "counted", "models": models}
    return _write("counted_methods", record)


def count_adapters(name: str) -> dict[str, Any]:
    """Return a row of `record_adapters`: settings and counts with frozen and with live BatchNorm statistics."""
    import timm
    from peft import LoraConfig, inject_adapter_in_model
    from torch import nn

    from efficient_ft.cost import executed
    from efficient_ft.methods import BackRazor, Checkpointing, LoRAFA, Mesa, Method, apply_methods

    lora_fa = LoRAFA(rank=PEFT_RANK)
    rows: dict[str, tuple[float | None, list[Method]]] = {
        "full": (None, []),
        "peft_dropout": (0.1, []),
        "peft": (0.0, []),
        "lora_fa": (None, [lora_fa]),
        "lora_fa+checkpointing": (None, [lora_fa, Checkpointing()]),
        "lora_fa+back_razor_exact_gradient": (None, [lora_fa, BackRazor(sparsity=0.0, value_dtype="same")]),
        "lora_fa+mesa": (None, [lora_fa, Mesa()]),
    }
    dropout, methods = rows[name]
    network = timm.create_model("resnet50", num_classes=1)
    apply_methods(network, methods)
    if dropout is not None:
        convolutions = [n for n, module in network.named_modules() if isinstance(module, nn.Conv2d)]
        inject_adapter_in_model(LoraConfig(r=PEFT_RANK, lora_dropout=dropout, target_modules=convolutions), network)
    counts = {
        statistics: executed(network, ADAPTERS_BATCH, (224, 224), methods=methods, frozen_bn=frozen).as_dict()
        for statistics, frozen in (("frozen", True), ("batch", False))
    }
    return {
        "trainable_parameters": sum(p.numel() for p in network.parameters() if p.requires_grad),
        "settings": [repr(method) for method in methods],
        "dropout": dropout,
        **counts,
    }


def record_adapters() -> Path:
    """Repeat the measurement of peft#2196 (ResNet-50, batch 16) and count LoRA-FA; return the file written.

    The network has one output, and adapters in every convolution. The issue does not report dropout in the adapters and
    BatchNorm with batch statistics. Both are inferred from its numbers.
    """
    lora_fa = [f"lora_fa{other}" for other in ("", "+checkpointing", "+back_razor_exact_gradient", "+mesa")]
    record = {
        "command": "python scripts/docs.py --record adapters",
        "kind": "counted",
        "model": "resnet50",
        "batch": ADAPTERS_BATCH,
        "classes": 1,
        "size": [224, 224],
        "rank": PEFT_RANK,
        "reported": {"source": "peft#2196", "full": 1310.95, "peft_dropout": 2618.32},
        "recipes": {name: count_adapters(name) for name in ["full", "peft_dropout", "peft", *lora_fa]},
    }
    return _write("adapters_resnet50", record)


def count_by_rule(table: Table, row: Row) -> dict[str, Any] | None:
    """Return the costs of a row of a published table by the papers' own rule, or None if no rule is known."""
    from efficient_ft.papers.rules import count_cost, count_settings

    how = count_settings(table, row)
    if how is None:
        return None
    found = count_cost(how)
    printed = row.costs.get("train_memory_mb") or row.costs.get("activation_memory_mb")
    gmacs = row.costs.get("fwd_gmacs")
    return {
        "row": row.name,
        "label": row.label,
        "published": None if printed is None else float(printed),
        "memory": None if printed is None else found.memory,
        "as_listed": found.as_listed if how.by_name and printed else None,
        "published_gmacs": None if gmacs is None else float(gmacs),
        "gmacs": None if gmacs is None else found.gmacs,
        "note": how.note,
    }


def record_published() -> Path:
    """Count the published tables by the papers' own rule; return the file written."""
    from efficient_ft.papers.published import published_table, table_names
    from efficient_ft.papers.rules import batch_and_unit

    tables = []
    for table in map(published_table, table_names()):
        rows = [found for row in table.rows if (found := count_by_rule(table, row)) is not None]
        print(table.name, len(rows), flush=True)
        if rows:
            unit = "MiB" if batch_and_unit(table, table.rows[0])[1] == 2**20 else "10⁶ B"
            about = {"table": table.name, "title": table.title, "conditions": table.conditions, "unit": unit}
            tables.append({**about, "rows": rows})
    record = {"command": "python scripts/docs.py --record published", "kind": "published rule", "tables": tables}
    return _write("published_rule", record)


def count_cells(table: Table, row: Row) -> list[dict[str, Any]]:
    """Return every reported cost of a row of a published table, by its rule and as executed."""
    from efficient_ft.cli.commands.table_costs import cost_cells

    cells = []
    for cell in cost_cells(table, row):
        by = "rule" if cell.rule is not None else None if cell.deviation is None else "executed"
        counted = {**asdict(cell), "by": by, "agrees": cell.agrees}
        del counted["reason"]  # the table's file has it
        cells.append({"table": table.name, "row": row.name, **counted})
    return cells


def record_costs() -> Path:
    """Count every reported cost of every table, by its rule and as executed; return the file written."""
    from efficient_ft.papers.published import published_table, table_names

    cells = []
    for table in map(published_table, table_names()):
        for row in table.rows:
            cells += count_cells(table, row)
        print(table.name, flush=True)
    record = {"command": "python scripts/docs.py --record costs", "kind": "printed costs", "cells": cells}
    return _write("table_costs", record)


def _write(name: str, record: Any) -> Path:
    file = ROOT / "benchmarks" / f"{name}.json"
    file.write_text(json.dumps(record, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return file


def prior() -> list[dict[str, Any]]:
    """Return one entry for each finished row of each study (`efficient_ft.planning.prior.Studied`)."""
    from efficient_ft.cli.hydra.compose import configured
    from efficient_ft.models import factory
    from efficient_ft.models.view import view
    from efficient_ft.planning.prior import Studied, network_kind
    from efficient_ft.record.study import Records, test_accuracy

    entries = []
    for folder in sorted((ROOT / "results").iterdir()):
        of = Records(folder)
        config = configured([*of.study.settings, "data.root=none", "model.pretrained=false"])
        texts = config.data.text is not None
        network = factory.random_model(config.model, 2)
        size = None if texts else factory.input_of(config.model).size[0]
        base = {run["seed"]: test_accuracy(run) for run in of.finished("full")} if "full" in of.study.rows else {}
        for row, arguments in of.study.rows.items():
            runs = {run["seed"]: test_accuracy(run) for run in of.finished(row)}
            seeds = base.keys() & runs.keys()
            if not runs:
                continue
            entry = Studied(
                row=row,
                study=of.study.title,
                folder=f"results/{folder.name}",
                arguments=tuple(arguments),
                model=config.model.name,
                kind=network_kind(network),
                blocks=len(view(network).blocks),
                image_size=size,
                task=config.task,
                pretrained="model=vit_digits" not in of.study.settings,
                lr=of.best_value(row) if of.study.tune.setting == "optim.lr" else None,
                accuracy=round(sum(runs.values()) / len(runs), 2),
                points_lost=round(sum(base[s] - runs[s] for s in seeds) / len(seeds), 1) if seeds else None,
                seeds=len(runs),
            )
            entries.append(asdict(entry))
    return entries


def record_prior() -> str:
    """Write the results of the finished studies for plans and searches; return the file's name."""
    file = ROOT / "efficient_ft" / "planning" / "prior.json"
    lines = ",\n".join(json.dumps(entry, ensure_ascii=False) for entry in prior())
    file.write_text(f"[\n{lines}\n]\n", encoding="utf-8")
    return str(file.relative_to(ROOT))
