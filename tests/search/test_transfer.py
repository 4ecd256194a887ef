"""Tests of the transfer of studied recipes to networks with other numbers of blocks or tokens."""

from __future__ import annotations

import pytest

from efficient_ft.planning.prior import Studied, studied
from efficient_ft.search.transfer import studied_tokens, transferred


def row(*arguments: str, size: int | None = 224, model: str = "deit_tiny_patch16_224", blocks: int = 12) -> Studied:
    return Studied(
        row="a", study="a study", folder="results/a", arguments=arguments, model=model, kind="transformer",
        blocks=blocks, image_size=size, task="classification", pretrained=True, lr=1e-3, accuracy=80.0,
        points_lost=1.0, seeds=3,
    )  # fmt: skip


def test_a_recipe_is_unchanged_for_the_same_numbers_of_blocks_and_tokens() -> None:
    for one in studied():
        tokens = studied_tokens(one)
        if tokens is not None or "tome" not in one.row:
            assert transferred(one, one.blocks, tokens) == one.arguments


@pytest.mark.parametrize(("blocks", "expected"), [(24, 18), (6, 4), (1, 1)])
def test_the_number_of_blocks_that_are_trained_per_step_is_scaled(blocks: int, expected: int) -> None:
    given = row("method=alast", "method.alast.num_layers=9", "method.alast.budget_lr=1e-4")
    words = ("method=alast", f"method.alast.num_layers={expected}", "method.alast.budget_lr=1e-4")
    assert transferred(given, blocks, 196) == words


def test_a_default_number_of_blocks_is_scaled_too() -> None:
    assert transferred(row("method=lisa"), 24, 196) == ("method=lisa", "method.lisa.num_layers=4")
    assert transferred(row("method=lisa"), 12, 196) == ("method=lisa",)


@pytest.mark.parametrize(
    ("size", "r", "blocks", "tokens", "expected"),
    [
        (224, 16, 12, 196, 16),
        (224, 16, 24, 196, 8),  # as many tokens are merged by twice as many blocks
        (224, 16, 12, 49, 4),
        (112, 4, 12, 196, 16),
        (224, 16, 24, 576, 24),  # ViT-Large at 384 px
    ],
)
def test_tome_keeps_the_fraction_of_merged_tokens(size: int, r: int, blocks: int, tokens: int, expected: int) -> None:
    given = row("method=[full,tome]", f"method.tome.r={r}", size=size)
    assert transferred(given, blocks, tokens) == ("method=[full,tome]", f"method.tome.r={expected}")


def test_tome_without_a_value_has_the_default() -> None:
    assert transferred(row("method=tome"), 24, 196) == ("method=tome", "method.tome.r=4")


@pytest.mark.parametrize(
    ("arguments", "tokens"),
    [
        (("method=tome", "method.tome.r=16"), None),
        (("method=tome", "method.tome.r=1"), 49),  # a quarter of a token in each block
        (("method=tome", "method.tome.r=[8,4]"), 49),
        (("method=bsr",), 196),
        (("method=[full,evit]", "method.evit.keep_rate=0.5"), 196),
        (("method=bsr", "method.bsr.drop_at=[5,7,9]"), 196),
        (("method=blocks", "method.blocks.blocks=[3,7,11]"), 196),
    ],
)
def test_recipes_that_cannot_be_transferred_are_not_used(arguments: tuple[str, ...], tokens: int | None) -> None:
    assert transferred(row(*arguments), 24, tokens) is None


def test_tome_is_not_used_if_the_number_of_studied_tokens_is_unknown() -> None:
    given = ("method=tome", "method.tome.r=4")
    assert transferred(row(*given, model="swin_tiny"), 12, 196) is None
    assert transferred(row(*given, size=None), 12, 196) is None


def test_last_blocks_are_scaled_and_both_settings_of_a_stack_are_transferred() -> None:
    given = row("method=[blocks,tome,mesa]", "method.blocks.blocks=[6,7,8,9,10,11]", "method.tome.r=16")
    expected = ("method=[blocks,tome,mesa]", "method.blocks.blocks=[2,3]", "method.tome.r=16")
    assert transferred(given, 4, 64) == expected


def test_methods_that_are_no_longer_known_are_kept() -> None:
    assert transferred(row("method=[full,unknown]"), 24, 196) == ("method=[full,unknown]",)
