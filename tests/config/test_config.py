"""The schema, its messages, the methods made from it, and the folder of a run."""

from __future__ import annotations

import copy
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from efficient_ft.config import Config, check, fingerprint, run_folder, setting_names
from efficient_ft.core.errors import SettingError, UserError
from efficient_ft.methods import build
from efficient_ft.methods.base import Method
from efficient_ft.methods.build import build_methods

PLAIN: dict[str, Any] = {
    "model": {"name": "resnet18"},
    "data": {"name": "cifar10", "root": "./data"},
    "method": {"full": None},
    "optim": {"name": "adamw", "lr": 1e-3},
    "trainer": {"epochs": 2},
}


def with_settings(**changes: Any) -> dict[str, Any]:
    """PLAIN with ``group__key=value`` put in."""
    plain = copy.deepcopy(PLAIN)
    for name, value in changes.items():
        *groups, key = name.split("__")
        node = plain
        for group in groups:
            node = node.setdefault(group, {})
        node[key] = value
    return plain


# ---------------------------------------------------------------------- schema and messages
@pytest.mark.parametrize(
    ("setting", "value", "said"),
    [
        ("optim__lr", "abc", "optim.lr=abc: allowed is a number above 0."),
        ("optim__lr", -1, "optim.lr=-1: allowed is a number above 0."),
        ("optim__lr", float("nan"), "optim.lr=NaN: allowed is a number above 0."),
        ("optim__lr", "1", "optim.lr=1: allowed is a number above 0."),
        ("trainer__epochs", True, "trainer.epochs=true: allowed is a whole number of at least 1."),
        ("trainer__epochs", 1.5, "trainer.epochs=1.5: allowed is a whole number of at least 1."),
        ("trainer__epochs", "???", "trainer.epochs=???: allowed is a whole number of at least 1. It has no default"),
        ("trainer__progress", "yes", "trainer.progress=yes: allowed is true or false."),
        ("trainer__precision", "fp8", "trainer.precision=fp8: allowed are fp32, bf16, fp16."),
        ("trainer__devices", "al", "trainer.devices=al: allowed is a whole number of at least 1 or auto."),
        ("step_stats__interval", -1, "step_stats.interval=-1: allowed is a whole number of at least 0."),
        ("trainer__max_steps", 0, "trainer.max_steps=0: allowed is -1 (no limit) or"),
        ("data__name", "cifar1000", "Did you mean 'cifar100'?"),
        ("data__augment__scale", [0.5], "data.augment.scale=[0.5]: allowed is a list of 2"),
        ("data__augment__scale", [0.9, 0.5], "[smallest, largest]"),
        ("data__augment", 3, "data.augment=3: allowed is a mapping"),
        ("model__image_size", [224, 0], "model.image_size=[224, 0]: allowed is"),
        ("model__std", [1.0], "model.mean=null: allowed is a list of numbers"),
        ("optim__momentum", 0.5, "It belongs to optim=sgd."),
        ("method", {}, "method={}: allowed is a mapping"),
        ("method", "full", "method=full: allowed is a mapping"),
        ("optim", None, "optim=null: allowed is a mapping"),
        ("optim__lrr", 1, "optim.lrr=1: there is no such setting"),
        ("optim__lrr", 1, "Did you mean 'lr'?"),
        ("optim__epochs", 1, "Did you mean 'trainer.epochs'?"),
        ("lr", 1, "lr=1: there is no such setting; a run has"),
        ("lr", 1, "Did you mean 'optim.lr'?"),
        (
            "data__augment__scael",
            1,
            "data.augment.scael=1: there is no such setting; data.augment has flip, name, resize, scale.",
        ),
        ("a__typo", 1, 'a={"typo": 1}: there is no such setting'),
        ("seed", -1, "seed=-1: allowed is a whole number of at least 0"),
    ],
)
def test_a_mistake_is_named_with_key_value_and_what_is_allowed(setting: str, value: Any, said: str) -> None:
    with pytest.raises(SettingError) as caught:
        check(with_settings(**{setting: value}))
    assert said in str(caught.value)


def test_settings_that_exclude_each_other_are_refused() -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"evaluate": "run", "cost_only": True}, "cost_only"),
        ({"model__name": "vit_digits", "model__pretrained": True}, "model.pretrained"),
        ({"trainer__precision": "fp16", "trainer__accelerator": "cpu"}, "trainer.precision"),
        ({"model__mean": [0.5, 0.5, 0.5], "model__std": [0.5]}, "model.std"),
        ({"data__augment__name": "none", "data__augment__resize": 256}, "data.augment.resize"),
        ({"optim__name": "sgd", "optim__betas": [0.5, 0.9]}, "optim.betas"),
    ]
    for changes, said in cases:
        with pytest.raises(SettingError) as caught:
            check(with_settings(**changes))
        assert caught.value.setting == said


@settings(max_examples=20, deadline=None)
@given(name=st.text(st.characters(codec="ascii", categories=["L"]), min_size=1, max_size=8), value=st.integers())
@pytest.mark.parametrize("group", ["model", "data", "optim", "trainer", "logger", "cost", "step_stats"])
def test_unknown_keys_are_refused_everywhere_by_their_full_name(group: str, name: str, value: int) -> None:
    if f"{group}.{name}" in setting_names() or name in ("kwargs", "augment"):
        return
    with pytest.raises(SettingError) as caught:
        check(with_settings(**{f"{group}__{name}": value}))
    assert caught.value.setting == f"{group}.{name}"


#: Valid values besides PLAIN's, of settings that change a run's result.
_MATTERS = {
    "model__name": "resnet50",
    "model__pretrained": False,
    "model__image_size": [64, 96],
    "model__select": "all",
    "data__name": "pets",
    "data__batch_size": 3,
    "data__augment__flip": False,
    "data__val_fraction": 0.3,
    "method": {"full": {}, "lora": {"rank": 3}},
    "optim__lr": 0.5,
    "optim__grad_clip_norm": 1.0,
    "optim__betas": [0.5, 0.6],
    "trainer__epochs": 3,
    "trainer__precision": "bf16",
    "seed": 1,
}
_SHOWN_ONLY = {
    "trainer__progress": False,
    "trainer__accelerator": "cpu",
    "resume": "never",
    "evaluate": "somewhere",
    "logger__name": "wandb",
    "data__num_workers": 0,
    "data__download": False,
    "data__eval_batch_size": 7,
    "data__root": "elsewhere",
    "keep_freed_memory": False,
    "cost__steps": 9,
    "step_stats__interval": 4,
}


@settings(max_examples=50, deadline=None)
@given(st.sets(st.sampled_from(sorted(_MATTERS))), st.sets(st.sampled_from(sorted(_SHOWN_ONLY))))
def test_the_folder_follows_from_what_matters_and_survives_writing_out(matters: set[str], shown: set[str]) -> None:
    base = check(with_settings(**{name: _MATTERS[name] for name in matters}))
    same = check(with_settings(**{name: {**_MATTERS, **_SHOWN_ONLY}[name] for name in matters | shown}))
    assert run_folder(base) == run_folder(same)
    assert (fingerprint(base) == fingerprint(check(PLAIN))) == (not matters)
    # What a run writes down is the run again.
    assert check(same.model_dump(mode="json")) == same


def test_a_folder_of_images_is_told_apart_by_its_place() -> None:
    runs = [check(with_settings(data__name="folder", data__root=root)) for root in ("a/pets", "a/./pets/", "b/pets")]
    assert fingerprint(runs[0]) == fingerprint(runs[1]) != fingerprint(runs[2])
    assert run_folder(runs[0]).startswith("outputs/pets/resnet18/full/")


def test_the_folder_names_data_model_and_methods_safely() -> None:
    run = check(with_settings(model__name="hf_hub:org/a b", method={"lora": {}, "full": {}}))
    assert run_folder(run).split("/")[:-1] == ["outputs", "cifar10", "hf_hub_org_a_b", "full+lora"]


# ---------------------------------------------------------------------- several data sets in turn
def two_tasks(**changes: Any) -> dict[str, Any]:
    return with_settings(tasks={"a": {"name": "cifar10"}, "b": {"name": "pets"}}, **changes)


def test_tasks_are_part_of_the_run_in_their_order_and_the_one_data_set_is_not() -> None:
    run = check(two_tasks())
    assert run.data == run.tasks["a"]
    assert run_folder(run).startswith("outputs/a+b/resnet18/full/")
    assert check(run.model_dump(mode="json")) == run
    assert fingerprint(check(two_tasks(data__batch_size=3))) == fingerprint(run)
    assert fingerprint(check(two_tasks(tasks__a__num_workers=0, tasks__b__root="elsewhere"))) == fingerprint(run)
    turned = check(with_settings(tasks={"b": {"name": "pets"}, "a": {"name": "cifar10"}}))
    others = [turned, check(two_tasks(tasks__b__batch_size=3)), check(two_tasks(seed=1)), check(PLAIN)]
    assert len({fingerprint(other) for other in [run, *others]}) == 5


def test_a_run_of_one_data_set_says_nothing_of_tasks() -> None:
    for none in ({}, None):
        run = check(with_settings(tasks=none))
        assert run == check(PLAIN)
        assert "tasks" not in run.model_dump(mode="json")
    # As it was before there were tasks.
    assert fingerprint(run) == "aafdb4ae"


@pytest.mark.parametrize(
    ("setting", "value", "said"),
    [
        ("tasks", {"a": {"name": "pets"}}, "tasks=a: allowed is two data sets or more. For one: tasks=none data=NAME."),
        ("tasks__b__batch_size", 0, "tasks.b.batch_size=0: allowed is a whole number of at least 1."),
        ("tasks__b__batchsize", 1, "tasks.b.batchsize=1: there is no such setting; tasks.b has augment"),
        ("tasks__b__name", "cat", "tasks.b.name=cat: allowed are"),
        ("tasks__b", 3, "tasks.b=3: allowed is a mapping"),
        ("tasks", "bsr_moe", "tasks=bsr_moe: allowed is a mapping from names"),
        ("tasks__b__select_best_on", "test", "tasks.b.select_best_on=test: allowed is val, as for a"),
        (
            "tasks__b__augment",
            {"scale": [0.9, 0.1]},
            "tasks.b.augment.scale=[0.9, 0.1]: allowed is [smallest,",
        ),
        ("tasks__c d", {"name": "pets"}, "tasks=c d: allowed is names of letters, digits, _ and -"),
    ],
)
def test_a_mistake_in_a_task_is_named_as_such(setting: str, value: Any, said: str) -> None:
    plain = two_tasks()
    if "__" in setting:
        plain = two_tasks(**{setting: value})
    else:
        plain[setting] = value
    with pytest.raises(SettingError) as caught:
        check(plain)
    assert str(caught.value).startswith(said)


def test_a_task_that_no_network_can_name_is_refused_before_anything_is_loaded() -> None:
    with pytest.raises(SettingError, match=r"^tasks=keys: "):
        build_methods(check(two_tasks(tasks__keys={"name": "cifar10"})))


# ---------------------------------------------------------------------- methods
class _Selection(Method):
    axis = "selection"

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


class LowRank(Method):
    name, axis = "low_rank", "backprop"

    def __init__(self, bases: Literal["l1", "linf"] = "l1", order: int = 4, scale: float | None = None) -> None:
        if not 1 <= order <= 15:
            raise SettingError("order", order, "1 to 15")
        self.bases, self.order, self.scale = bases, order, scale


class Adapter(Method):
    name, axis = "adapter", "adapters"

    def __init__(self, rank: int = 8) -> None:
        self.rank = rank


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> None:
    import efficient_ft.methods

    known = {m.name: m for m in (Full, LastStage, Blocks, LowRank, Adapter)}
    monkeypatch.setattr(efficient_ft.methods, "METHODS", known)


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
    with pytest.raises(SettingError, match=r"model\.select=lst_stage.*Did you mean 'last_stage'\?"):
        build_methods(check(plain))


@pytest.mark.usefixtures("registry")
def test_selections_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(UserError, match="full and last_stage both select"):
        made(full={}, last_stage={})
    with pytest.raises(UserError, match=r"method.low_rank.select=all, method.adapter.select=last_stage disagree"):
        made(low_rank={"select": "all"}, adapter={"select": "last_stage"})
    # Named, it settles what they disagree about; and who keeps has no say.
    assert made(low_rank={"select": "all"}, adapter={"select": "last_stage"}, full={})[0] == "full"
    assert made(low_rank={"select": "keep"}, adapter={"select": "last_stage"})[0] == "last_stage"


@pytest.mark.usefixtures("registry")
@pytest.mark.parametrize(
    ("methods", "setting", "said"),
    [
        ({"low_rnk": {}}, "method", "Did you mean 'low_rank'?"),
        ({"low_rank": {"oder": 3}}, "method.low_rank.oder", "Did you mean 'order'?"),
        ({"low_rank": {"order": "abc"}}, "method.low_rank.order", "a whole number"),
        ({"low_rank": {"order": 2.5}}, "method.low_rank.order", "a whole number"),
        ({"low_rank": {"order": 99}}, "method.low_rank.order", "1 to 15"),
        ({"low_rank": {"bases": "l2"}}, "method.low_rank.bases", "l1, linf"),
        ({"low_rank": {"scale": "x"}}, "method.low_rank.scale", "a number or null"),
        ({"low_rank": {"select": "lst_stage"}}, "method.low_rank.select", "Did you mean 'last_stage'?"),
        ({"low_rank": {"select": "blocks"}}, "method.low_rank.select", "all, keep, last_stage"),
        ({"full": {"select": "all"}}, "method.full.select", "method.full has none"),
        ({"blocks": {}}, "method.blocks.blocks", "It has no default"),
        ({"blocks": {"blocks": "???"}}, "method.blocks.blocks", "It has no default"),
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

    with pytest.raises(SettingError, match=r"method.odd.x=1: there is no such setting; method.odd has hook."):
        build._build(Odd, "odd", {"x": 1})


def test_configurations_cannot_be_changed_behind_their_folder() -> None:
    with pytest.raises(ValueError, match="frozen"):
        check(PLAIN).optim.lr = 1.0  # type: ignore[misc]
    assert set(Config.model_fields) >= set(PLAIN)
