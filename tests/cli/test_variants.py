"""Tests of method variants: the run folder contains the variant, and variants not in the paper are marked."""

from __future__ import annotations

import pytest

from efficient_ft.cli.hydra.conf import CONF
from efficient_ft.cli.hydra.variants import folder_of, not_as_published, published_recipes, variant
from efficient_ft.core.packages import method_of
from tests.cli.program import composed

OPTIONS = sorted(file.stem for file in (CONF / "method").glob("*.yaml"))


@pytest.mark.first(8, "slow")
@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_is_recognized_by_its_settings(option: str) -> None:
    extra = ["method.blocks.blocks=[0]"] if option == "blocks" else []
    (config,) = composed(f"method={option}", "model=deit_tiny", *extra)
    name = method_of(CONF / "method" / f"{option}.yaml")
    assert name is not None
    assert variant(name, config.method[name]) == option
    folder = f"{option}-ours" if not_as_published(config) else option
    assert folder_of(config).parts[:-1] == ("outputs", "digits", "deit_tiny_patch16_224.fb_in1k", folder)


def test_a_rank_of_ones_own_changes_no_variant() -> None:
    (own,) = composed("method=lbp_wht", "method.lbp_wht.order=7")
    (published,) = composed("method=lbp_wht_published", "method.lbp_wht.order=7")
    assert folder_of(own).parts[-2] == "lbp_wht-ours"
    assert folder_of(published).parts[-2] == "lbp_wht_published"


@pytest.mark.slow
def test_a_default_that_is_not_the_paper_s_says_so() -> None:
    (config,) = composed("method=lbp_wht")
    assert not_as_published(config) == [
        "lbp_wht differs from the published method: padding=ortho (published: reflect), as_published=false (published:"
        " true)."
        " For the published settings, use method=lbp_wht_published."
    ]
    assert not_as_published(composed("method=lbp_wht_published", "method.lbp_wht.order=2")[0]) == []
    assert not_as_published(composed("method=bsr", "model=deit_tiny")[0]) == []
    reflect = composed("method=lbp_wht", "method.lbp_wht.padding=reflect")[0]
    assert "padding" not in not_as_published(reflect)[0]
    (razor,) = composed("method=back_razor_mesa", "method.back_razor.sparsity=0.5")
    (sentence,) = not_as_published(razor)
    assert sentence.startswith("back_razor_mesa differs from the published method: ")
    assert "sparsity" not in sentence


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("method=lbp_wht model=efficientformer_l1 data=cifar100", "recipe=lbp_wht/cifar100 contains"),
        ("method=[full,alast] model=deit_small data=cifar100", "recipe=alast/cifar100 contains"),
        ("method=bsr model=deit_small data=cifar100", "recipe=bsr_deit/cifar100 contains"),
        (
            "method=[full,back_razor] model=efficientformer_l1 data=cars",
            "recipe=back_razor_cnn/cars and recipe=back_razor_vit/cars contain",
        ),
        ("method=lbp_wht model=efficientformer_l1 data=digits", None),
        ("method=full model=deit_small data=cifar100", None),
    ],
)
def test_the_recipe_of_the_published_run_is_named(arguments: str, said: str | None) -> None:
    (config,) = composed(*arguments.split())
    sentence = published_recipes(config, "none")
    assert sentence is None if said is None else str(sentence).startswith(f"{said} the settings of")
    assert published_recipes(config, "lbp_wht/cifar100") is None


def test_a_method_of_nobody_keeps_its_name() -> None:
    assert variant("unknown", {"a": 1}) == "unknown"
