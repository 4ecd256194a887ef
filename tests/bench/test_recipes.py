"""Tests of recipes in the notation of the command line."""

from __future__ import annotations

import pytest

from efficient_ft.bench.recipes import in_both_precisions, parse_recipe, parse_recipes
from efficient_ft.cli.hydra.groups import CONF
from efficient_ft.core.errors import UserError


@pytest.mark.parametrize(
    ("text", "name", "overrides"),
    [
        ("lbp_wht", "lbp_wht", ["method=[lbp_wht]"]),
        ("lbp_wht:order=2", "lbp_wht:order=2", ["method=[lbp_wht]", "method.lbp_wht.order=2"]),
        ("exact=last_stage", "exact", ["method=[last_stage]"]),
        (
            "low=lbp_wht_published:order=2,padding=zero",
            "low",
            ["method=[lbp_wht_published]", "method.lbp_wht.order=2", "method.lbp_wht.padding=zero"],
        ),
        (
            "blocks:blocks=[3,7]+lbp_dct:order=6",
            "blocks:blocks=[3,7]+lbp_dct:order=6",
            ["method=[blocks,lbp_dct]", "method.blocks.blocks=[3,7]", "method.lbp_dct.order=6"],
        ),
        (
            "half=full:trainer.precision=bf16+mesa:recompute_inputs=false",
            "half",
            ["method=[full,mesa]", "trainer.precision=bf16", "method.mesa.recompute_inputs=false"],
        ),
    ],
)
def test_a_recipe_becomes_overrides_of_the_command_line(text: str, name: str, overrides: list[str]):
    recipe = parse_recipe(text, CONF)
    assert recipe.name == name
    assert list(recipe.overrides) == overrides


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["lbp_wht:"], "[NAME=]METHOD"),
        (["lbp_wht:order"], "settings must have the form KEY=VALUE, got order"),
        (["lbp.wht=full"], "METHOD:KEY=VALUE"),
        (["full", "full"], "Two recipes have the same name"),
        (["full:trainer.precision=auto"], "trainer.precision must be fp32, bf16 or fp16 in a recipe of a benchmark"),
    ],
)
def test_mistakes_are_refused(texts: list[str], message: str):
    with pytest.raises(UserError) as error:
        parse_recipes(texts, CONF)
    assert message in str(error.value)


def test_each_recipe_runs_in_both_precisions_unless_it_sets_one():
    recipes = parse_recipes(["full", "fixed=full:trainer.precision=bf16", "head"], CONF)
    both = {recipe.name: recipe.overrides for recipe in in_both_precisions(recipes)}
    assert list(both) == ["full", "head", "full bf16", "head bf16", "fixed"]
    assert both["head bf16"] == ("method=[head]", "trainer.precision=bf16")
    assert both["head"] == ("method=[head]", "trainer.precision=fp32")
    assert both["fixed"] == ("method=[full]", "trainer.precision=bf16")
