"""Tests of building methods from a configuration: settings, selections and error messages."""

from __future__ import annotations

from typing import Any, Literal

import pytest
from torch import nn

from efficient_ft.config import check
from efficient_ft.core.errors import SettingError, UserError
from efficient_ft.methods import build
from efficient_ft.methods.base import Applied, Method
from efficient_ft.methods.build import build_methods
from efficient_ft.methods.declarations import Axis
from efficient_ft.models.view import ModelView
from tests.config.settings import PLAIN, two_tasks


class _Stub(Method):
    def _apply(self, model: nn.Module, view: ModelView) -> Applied:
        raise AssertionError("made, not applied")

    def _remove(self, model: nn.Module) -> None:
        raise AssertionError("made, not applied")


class _Selection(_Stub):
    axis = Axis.SELECTION

    def __init__(self) -> None:
        pass


class Full(_Selection):
    name = "full"


class LastStage(_Selection):
    name = "last_stage"


class Blocks(_Selection):
    name = "blocks"

    def __init__(self, blocks: tuple[int, ...]) -> None:
        self.blocks = blocks


class LowRank(_Stub):
    name, axis = "low_rank", Axis.BACKPROP

    def __init__(self, bases: Literal["l1", "linf"] = "l1", order: int = 4, scale: float | None = None) -> None:
        if not 1 <= order <= 15:
            raise SettingError("order", order, "1 to 15")
        self.bases, self.order, self.scale = bases, order, scale


class Adapter(_Stub):
    name, axis = "adapter", Axis.ADAPTERS

    def __init__(self, rank: int = 8) -> None:
        self.rank = rank


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {m.name: m for m in (Full, LastStage, Blocks, LowRank, Adapter)}
    monkeypatch.setattr(build, "METHODS", known)


def made(**methods: Any) -> list[str]:
    return [m.name for m in build_methods(check({**PLAIN, "method": methods}))]


@pytest.mark.usefixtures("registry")
def test_a_recipe_brings_its_selection_unless_one_is_named() -> None:
    recipe = {"order": 2, "select": "last_stage"}
    assert made(low_rank=recipe) == ["last_stage", "low_rank"]
    assert made(low_rank={**recipe, "select": "all"}) == ["full", "low_rank"]
    assert made(low_rank={**recipe, "select": "keep"}) == ["low_rank"]
    assert made(low_rank={"order": 2}) == ["low_rank"]
    assert made(low_rank=recipe, full={}) == ["full", "low_rank"]
    assert made(blocks={"blocks": [1, 2]}, low_rank=recipe) == ["blocks", "low_rank"]


@pytest.mark.usefixtures("registry")
def test_the_order_of_the_list_changes_nothing() -> None:
    one = made(low_rank={"select": "all"}, adapter={"select": "all"})
    assert one == made(adapter={"select": "all"}, low_rank={"select": "all"}) == ["full", "adapter", "low_rank"]


@pytest.mark.usefixtures("registry")
def test_a_default_selection_that_is_none_is_said_even_where_another_is_named() -> None:
    plain = {**PLAIN, "method": {"full": {}}}
    plain["model"] = {**plain["model"], "select": "lst_stage"}
    with pytest.raises(SettingError, match=r"model\.select must be .*, got lst_stage\. Did you mean 'last_stage'\?"):
        build_methods(check(plain))


@pytest.mark.usefixtures("registry")
def test_selections_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(UserError, match="full and last_stage both select"):
        made(full={}, last_stage={})
    with pytest.raises(UserError, match=r"low_rank.select=all, method.adapter.select=last_stage select different p"):
        made(low_rank={"select": "all"}, adapter={"select": "last_stage"})
    # An explicit selection overrides the settings. A method with select=keep is ignored.
    assert made(low_rank={"select": "all"}, adapter={"select": "last_stage"}, full={})[0] == "full"
    assert made(low_rank={"select": "keep"}, adapter={"select": "last_stage"})[0] == "last_stage"


@pytest.mark.usefixtures("registry")
@pytest.mark.parametrize(
    ("methods", "setting", "said"),
    [
        ({"low_rnk": {}}, "method", "Did you mean 'low_rank'?"),
        ({"low_rank": {"oder": 3}}, "method.low_rank.oder", "Did you mean 'order'?"),
        ({"low_rank": {"order": "abc"}}, "method.low_rank.order", "an integer"),
        ({"low_rank": {"order": 2.5}}, "method.low_rank.order", "an integer"),
        ({"low_rank": {"order": 99}}, "method.low_rank.order", "1 to 15"),
        ({"low_rank": {"bases": "l2"}}, "method.low_rank.bases", "l1, linf"),
        ({"low_rank": {"scale": "x"}}, "method.low_rank.scale", "a number or null"),
        ({"low_rank": {"select": "lst_stage"}}, "method.low_rank.select", "Did you mean 'last_stage'?"),
        ({"low_rank": {"select": "blocks"}}, "method.low_rank.select", "all, keep, last_stage"),
        ({"full": {"select": "all"}}, "method.full.select", "method.full has no settings"),
        ({"blocks": {}}, "method.blocks.blocks", "The setting has no default"),
        ({"blocks": {"blocks": "???"}}, "method.blocks.blocks", "The setting has no default"),
    ],
)
def test_settings_of_a_method_are_checked_against_its_constructor(methods: Any, setting: str, said: str) -> None:
    with pytest.raises(SettingError) as caught:
        made(**methods)
    assert caught.value.setting == setting
    assert str(caught.value).startswith(setting)
    assert said in str(caught.value)


@pytest.mark.usefixtures("registry")
def test_settings_arrive_in_the_type_of_the_constructor() -> None:
    (blocks,) = build_methods(check({**PLAIN, "method": {"blocks": {"blocks": [3, 7]}}}))
    assert blocks.settings() == {"blocks": (3, 7)}


def test_every_real_method_can_be_made_from_its_defaults() -> None:
    from efficient_ft.methods import METHODS

    needed = {"blocks": {"blocks": [0]}}
    for name, method in METHODS.items():
        methods = build_methods(check({**PLAIN, "method": {name: needed.get(name, {})}}))
        assert [type(m) for m in methods] == [method]


def test_the_schema_describes_a_type_that_yaml_cannot_express() -> None:
    class Odd(Adapter):
        def __init__(self, hook: type | None = None) -> None: ...

    with pytest.raises(SettingError, match=r"method.odd.x=1: there is no such setting. method.odd has hook."):
        build._build(Odd, "odd", {"x": 1})


def test_a_task_that_no_network_can_name_is_refused_before_anything_is_loaded() -> None:
    with pytest.raises(SettingError, match=r"^tasks must be .*, got 'keys'"):
        build_methods(check(two_tasks(tasks__keys={"name": "cifar10"})))
