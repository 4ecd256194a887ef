"""Tests of the published tables as data: they are complete and exact, and each row has settings that repeat it."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest

from efficient_ft.core.errors import UserError
from efficient_ft.papers.published import (
    FOLDER,
    PAPERS,
    baseline_of,
    chosen_rows,
    figures,
    published_table,
    table_names,
)
from tests.cli.program import composed

TABLES = [published_table(name) for name in table_names()]
CELLS = [(table, row, key, cell) for table in TABLES for row in table.rows for key, cell in row.cells.items()]


def test_every_numbered_table_is_there() -> None:
    numbers = {paper: [table.number for table in TABLES if table.paper == paper] for paper in PAPERS}
    assert numbers == {"lbp_wht": [*range(1, 7)], "back_razor": [*range(1, 7)], "alast": [*range(1, 8)],
                       "bsr": [*range(1, 9)]}  # fmt: skip


def test_every_accuracy_has_a_command() -> None:
    assert len(CELLS) == 720
    for table, row, key, cell in CELLS:
        assert cell.arguments, (table.name, row.name, key)
        assert 0 < cell.accuracy < 1, (table.name, row.name, key)


def test_accuracies_are_fractions_of_what_is_printed() -> None:
    def of(table: str, row: str, column: str) -> Any:
        return chosen_rows(published_table(table), [row])[0].cells[column]

    lbp = of("lbp_wht/2", "efficientformer_l1.partial.lp_l1_2", "acc_cifar100")
    assert (lbp.printed, lbp.accuracy) == ("75.61", pytest.approx(0.7561))
    assert of("alast/7", "deit_t.alast", "acc_flowers").accuracy == 0.79
    razor = of("back_razor/1", "back_razor_90", "acc_pets")
    assert (razor.printed, razor.accuracy) == ("92.9", 0.929)


def test_files_are_the_tables_of_the_papers(shared_data: Path) -> None:
    """The tables equal the independent transcriptions of the papers."""
    source = shared_data.parent / "papers" / "tables"
    compared = 0
    for table in TABLES:
        for file in source.glob(f"{table.paper}_table{table.number}.csv"):
            with open(file, encoding="utf-8") as theirs, open(FOLDER / f"{table.name}.csv", encoding="utf-8") as ours:
                assert list(csv.reader(ours)) == list(csv.reader(theirs)), table.name
            compared += 1
    assert compared == 27


@pytest.mark.slow
@pytest.mark.parametrize("table", [table for table in TABLES if not table.reason], ids=lambda table: table.name)
def test_a_row_of_every_kind_composes(table: Any) -> None:
    """The last cell composes for one row per combination of method and model."""
    kinds = {(row.columns.get("model"), row.columns.get("method")): row for row in table.rows}
    for row in kinds.values():
        arguments = [cell.arguments for cell in row.cells.values() if cell.arguments][-1:] or [row.arguments]
        (config,) = composed(*arguments[0])
        assert config.method, row.name


@pytest.mark.slow
def test_settings_are_those_of_the_row() -> None:
    def config(table: str, row: str, column: str) -> Any:
        cell = chosen_rows(published_table(table), [row])[0].cells[column]
        return composed(*cell.arguments)[0]

    lora = config("alast/5", "lora_alast", "acc_cifar100")
    assert (lora.optim.lr, lora.model.name) == (1e-3, "vit_base_patch16_224.augreg_in1k")
    assert set(lora.method) == {"lora", "alast"}
    razor = config("back_razor/1", "back_razor_97", "acc_cars")
    assert razor.method["full"] == {"train_norms": False}
    assert razor.method["back_razor"]["sparsity"] == 0.97
    assert razor.method["back_razor"]["recompute_inputs"] is False
    late = config("bsr/8", "5_7_9", "acc_cifar10")
    assert late.method["bsr"]["drop_at"] == [5, 7, 9]
    assert late.method["bsr"]["keep_rate"] == pytest.approx(0.3)
    both = config("back_razor/3", "back_razor_80_mesa", "acc_food")
    assert (both.method["back_razor"]["value_dtype"], both.trainer.max_steps) == ("int8", 20_000)
    tiny = config("back_razor/1", "tinytl_320", "acc_aircraft")
    assert (tiny.model.image_size, tiny.optim.lr) == (320, 1.6e-3)


def test_ratios_are_against_the_row_that_the_paper_means() -> None:
    def baseline(table: str, row: str) -> tuple[str, str]:
        found = published_table(table)
        other, first = baseline_of(found, chosen_rows(found, [row])[0])
        return other.name, first.name

    assert baseline("bsr/7", "4_11") == ("bsr/2", "baseline")
    assert baseline("bsr/4", "backrazor_80") == ("back_razor/3", "ft_full")
    assert baseline("bsr/4", "ours") == ("bsr/4", "ft_full")
    assert baseline("lbp_wht/2", "swinv2_small.partial.lp_l1_4") == ("lbp_wht/2", "swinv2_small.partial.full_bp")


def test_an_unknown_table_or_row_lists_the_known_ones() -> None:
    with pytest.raises(UserError, match=r"one of lbp_wht/1, .*, got lbp_wth/2\. Did you mean 'lbp_wht/2'"):
        published_table("lbp_wth/2")
    with pytest.raises(UserError, match=r"one of ft_full, ft_last, ours \(bsr/3\), got our\. Did you mean 'ours'"):
        chosen_rows(published_table("bsr/3"), ["our"])


def test_every_figure_says_what_draws_it() -> None:
    names = [figure.name for figure in figures()]
    assert len(names) == len(set(names)) == 17
    assert {name.partition("/")[0] for name in names} == set(PAPERS)
