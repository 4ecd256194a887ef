"""Plans: the recipes that fit a budget, the one recommended, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import efficient_ft
from efficient_ft.cli.compose import configurations
from efficient_ft.cli.groups import CONF, register
from efficient_ft.config import Config
from efficient_ft.core.errors import SettingError, UserError
from efficient_ft.core.format import bytes_setting, format_bytes
from efficient_ft.cost import executed
from efficient_ft.methods import BackRazor, Exactness, PlanCandidate, registry
from efficient_ft.methods.build import build_methods
from efficient_ft.models import factory
from efficient_ft.planning import Candidate, Examined, Excluded, Option, Plan, Trial, make_plan, planner
from efficient_ft.planning.calibration import FILE, calibration, calibration_text, record
from efficient_ft.planning.candidates import candidates, split
from efficient_ft.planning.counting import Counted, Counter
from efficient_ft.planning.options import recommend, with_cosine, with_front
from efficient_ft.planning.studies import points_lost
from efficient_ft.planning.text import plan_text
from efficient_ft.planning.timing import try_recipe
from efficient_ft.report.plan_figure import plan_chart
from efficient_ft.training.optimizer import build_optimizer
from efficient_ft.training.run_task import step_spec

pytestmark = pytest.mark.usefixtures("wide")

#: A small network on the digits, which need no files.
SETTINGS = ("model=vit_digits", "data=digits", "data.num_workers=0", "trainer.max_steps=5")


def configure(settings: Sequence[str]) -> Config:
    register()
    (config,) = configurations(CONF, "train", settings, sweep=False)
    return config


def few(names: Sequence[str]):
    """Examine only the candidates of these names."""
    return lambda *arguments: [one for one in candidates(*arguments) if one.name in names]


@pytest.fixture
def three(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "candidates", few(["full", "full+low_bit", "full+checkpointing, steps in backward"]))
    monkeypatch.setattr(planner, "resident_bytes", lambda: 10**9)  # other tests make the process larger
    monkeypatch.setattr(planner, "memory_limit_bytes", lambda: 10**15)


def a_plan(memory: int = 10**12, **settings: object) -> Plan:
    return make_plan(SETTINGS, configure, memory_bytes=memory, **settings)  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------ counts
@pytest.mark.parametrize("method", ["full", "[full,low_bit]", "[full,checkpointing]", "last_stage"])
@pytest.mark.parametrize("optim", [(), ("optim.in_backward=true", "optim.grad_clip_norm=null")])
def test_counts_are_those_of_a_run(method: str, optim: tuple[str, ...]) -> None:
    config = configure([*SETTINGS, f"method={method}", *optim])
    counted = Counter(config, 10)(config)
    spec = step_spec(config)
    expected = executed(
        factory.random_model(config.model, 10),
        spec.batch_size,
        spec.input_size,
        methods=build_methods(config),
        build_optimizer=lambda model: build_optimizer(model, config.optim, config.trainer.precision),
        in_chans=spec.in_chans,
        label_smoothing=spec.label_smoothing,
    )
    assert counted.resident_bytes == expected.model_bytes + expected.batch_bytes
    assert expected.optimizer_bytes is not None
    # A first step also fills caches of a few KiB, which `executed` has filled before.
    assert counted.step_bytes == pytest.approx(expected.step_peak_bytes + expected.optimizer_bytes, rel=1e-3)
    assert counted.optimizer_bytes == expected.optimizer_bytes


@pytest.mark.slow
def test_few_bits_of_the_optimizer_are_counted_without_another_step() -> None:
    plain = configure([*SETTINGS, "method=full"])
    counter = Counter(plain, 10)
    for bits in (8, 4):
        config = configure([*SETTINGS, "method=full", f"optim.state_bits={bits}"])
        exact = Counter(config, 10)._count(config, build_methods(config))
        assert counter(config).optimizer_bytes == pytest.approx(exact.optimizer_bytes, rel=1e-3)
        assert counter(config).step_bytes == pytest.approx(exact.step_bytes, rel=0.02)


@pytest.mark.slow
def test_accumulation_adds_the_gradients() -> None:
    whole = configure([*SETTINGS, "method=full"])
    halves = configure([*SETTINGS, "method=full", "data.batch_size=16", "trainer.grad_accum_steps=2"])
    a, b = Counter(whole, 10)(whole), Counter(halves, 10)(halves)
    same = configure([*SETTINGS, "method=full", "data.batch_size=16"])
    weights = sum(p.numel() * 4 for p in factory.random_model(whole.model, 10).parameters())
    assert b.step_bytes == Counter(same, 10)(same).step_bytes + weights
    assert b.flops == pytest.approx(a.flops)


# ------------------------------------------------------------------------------------------------ candidates
@pytest.mark.exhaustive
def test_every_candidate_is_a_command_of_its_own() -> None:
    base = configure([*SETTINGS, "method=full"])
    every = candidates(base, 6)
    assert len({one.name for one in every}) == len(every) > 25
    for one in every:
        config = configure([*SETTINGS, *one.arguments(base)])
        build_methods(config)
        assert config.optim.state_bits == one.state_bits
        assert config.optim.in_backward == one.in_backward


def test_the_users_own_choices_are_kept() -> None:
    base = configure([*SETTINGS, "method=lora", "optim.state_bits=8"])
    every = candidates(base, 6, ["lora"], True)
    assert {one.methods[0] for one in every} == {"lora"}
    assert {one.state_bits for one in every} == {8}
    assert not any(argument.startswith("optim.") for one in every for argument in one.arguments(base))
    assert {one.methods for one in candidates(base, 6, ["lora", "mesa"], False)} == {("lora", "mesa")}


def test_a_batch_is_split_into_equal_parts() -> None:
    base = configure([*SETTINGS, "method=full", "data.batch_size=12"])
    parts = list(split(Candidate(("full",)), base))
    assert [one.micro_batches for one in parts] == [2, 4]
    assert parts[0].arguments(base)[-2:] == ["data.batch_size=6", "trainer.grad_accum_steps=2"]
    assert not list(split(Candidate(("full",), in_backward=True), base))


def test_the_smallest_recipes_come_first_then_plain_fine_tuning() -> None:
    base = configure([*SETTINGS, "method=full"])
    assert [one.name for one in candidates(base, 4)][:3] == ["head", "last_stage", "full"]


@pytest.mark.parametrize("memory", [10**12, None])
def test_head_and_last_stage_are_examined_with_the_smallest_planning_time(
    memory: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planner, "resident_bytes", lambda: 10**9)  # other tests make the process larger
    seen: list[Examined] = []
    # Without room for anything, too.
    found = a_plan(memory or 10**9 + 10**7, planning_seconds=1e-6, ready=seen.append)
    assert [(one.number, one.name) for one in seen] == [(1, "head"), (2, "last_stage")]
    assert all(one.fits == (memory is not None) for one in seen)
    assert found.examined == 2
    assert len(found.not_examined) == seen[0].of - 2 > 25
    text = plan_text(found)
    assert f"Not examined ({len(found.not_examined)}): planning took " in text
    assert "--planning-time 1m examines more." in text
    impossible = text.partition("Not possible (2; the budget is 963 MiB):")[2].partition("Not examined")[0]
    assert ("head" in impossible and "last_stage" in impossible and "needs 1." in impossible) == (memory is None)
    assert sum(not one["examined"] for one in found.as_dict()["excluded"]) == len(found.not_examined)


def test_a_recommendation_says_on_how_many_recipes_it_rests() -> None:
    one, two = option(Exactness.EXACT, 1, 1), option(Exactness.EXACT, 2, 2)
    unknown = Excluded("other", "not examined", examined=False)
    above = Excluded("large", "its process may take 8.38 GiB", 9 * 10**9, Exactness.EXACT)

    def said(options: tuple[Option, ...], *excluded: Excluded) -> str:
        text = plan_text(Plan(4 * 10**9, 4 * 10**9, 0, "x", "cpu", options, excluded, options[0], 1, "x", None, 60.0))
        return text.partition("The recommendation ")[2].partition("\n")[0]

    assert said((one,), unknown) == (
        "is based on one recipe: only 1 of 2 was examined. --planning-time 3m examines more.")  # fmt: skip
    assert said((one,)) == "is based on one recipe: only 1 was examined."
    assert said((one,), above) == "is based on one recipe: only this one of the 2 examined recipes fits."
    assert said((one, two), above, unknown) == "is based on 3 of 4 recipes. --planning-time 2m examines more."
    assert said((one, two), above) == ""


# ------------------------------------------------------------------------------------------------ choice
def option(exactness: Exactness, gigabytes: float, seconds: float, **more: object) -> Option:
    counted = Counted(0, 0, 0, 0, 1.0, 1)
    name = f"{exactness.name} {gigabytes} {seconds}"
    return Option(name, (), exactness, counted, round(gigabytes * 1e9), step_seconds=seconds, **more)  # type: ignore[arg-type]


def test_the_fastest_of_the_best_class_is_recommended_and_the_smaller_of_equally_fast_ones() -> None:
    exact, slow = option(Exactness.EXACT, 3, 1.01), option(Exactness.EXACT, 2, 1.3)
    near, small = option(Exactness.NEAR, 1, 0.5), option(Exactness.EXACT, 2.5, 1.02)
    assert recommend([near, exact, slow, small], 1.0, None) == small
    assert recommend([near, exact, slow], 1.0, 0.7) == near
    assert recommend([exact, slow], 1.0, 0.7) is None


def test_what_loses_too_much_or_is_not_known_is_not_recommended() -> None:
    lossy = option(Exactness.PART, 1, 1, points_lost={"a": 0.5, "b": 2.0})
    assert recommend([lossy], 1.0, None) is None
    assert recommend([lossy], 2.0, None) == lossy
    assert recommend([replace(lossy, points_lost={})], 100.0, None) is None


def test_a_plan_without_a_recommendation_says_what_would_allow_one() -> None:
    studied = option(Exactness.PART, 1, 1, points_lost={"a": 0.5, "b": 2.04}, on_front=True)
    unknown = option(Exactness.PART, 0.9, 1, on_front=True)
    above = Excluded("low bits", "its process may take 1.40 GiB", 1_500_000_000, Exactness.NEAR)
    further = Excluded("whole", "its process may take 2.33 GiB", 2_500_000_000, Exactness.EXACT)
    plan = Plan(
        1_200_000_000,
        1_200_000_000,
        0,
        "tcmalloc",
        "cpu",
        (studied, unknown),
        (further, above),
        None,
        1,
        "x",
        None,
        1.0,
    )
    text = plan_text(plan)
    assert f"{studied.name} loses the least of those that were studied: loss=2.1 allows it." in text
    assert "never studied" in text
    assert "With memory=1.5GB a recipe fits that is near exact: low bits." in text
    close = replace(above, process_bytes=plan.memory_bytes + 1)
    assert "low bits: needs slightly more than 1.12 GiB" in plan_text(replace(plan, excluded=(further, close)))
    slow = replace(plan, options=(option(Exactness.EXACT, 1, 9, on_front=True),))
    assert "time=LONGER allows them" in plan_text(slow)


def test_the_front_has_what_nothing_else_is_better_than() -> None:
    a, b = option(Exactness.EXACT, 3, 1), option(Exactness.EXACT, 2, 2)
    worse, rough = option(Exactness.NEAR, 3, 2), option(Exactness.APPROXIMATE, 1, 1)
    marked = with_front([a, b, worse, rough])
    assert [one.on_front for one in marked] == [True, True, False, True]


def test_a_gradient_further_from_the_exact_one_than_supposed_is_approximate() -> None:
    near = option(Exactness.NEAR, 1, 1)
    assert with_cosine(near, 0.95).exactness is Exactness.APPROXIMATE
    assert with_cosine(near, 0.999).exactness is Exactness.NEAR
    assert with_cosine(near, None) == near


def test_nothing_is_exact_by_default() -> None:
    assert Candidate(("full",)).exactness is Exactness.UNKNOWN
    assert PlanCandidate().exactness is Exactness.UNKNOWN
    for one in candidates(configure([*SETTINGS, "method=full"]), 6):
        assert (one.exactness is Exactness.EXACT) == bool(one.evidence), one.name


@pytest.mark.parametrize(
    ("method", "settings", "exact"),
    [
        ("full", (), True),
        ("[full,compact]", (), True),
        ("[full,checkpointing]", (), True),
        ("[full,checkpointing]", ("method.checkpointing.input_dtype=int4",), False),
        ("[full,compact]", ("method.compact.activation_dtype=bf16",), False),
        ("full", ("method.full.train_norms=false",), False),
        ("[full,back_razor]", (), False),
        ("[full,tome,low_bit]", (), False),
        ("head", (), False),
    ],
)
def test_methods_that_the_user_names_are_exact_only_with_evidence(
    method: str, settings: tuple[str, ...], exact: bool
) -> None:
    base = configure([*SETTINGS, f"method={method}", *settings])
    plain = candidates(base, 6, list(base.method), False)[0]
    assert plain.exactness is (Exactness.EXACT if exact else Exactness.UNKNOWN)
    assert len(plain.evidence) == (len(base.method) if exact else 0)


def test_steps_in_backward_are_not_exact_where_they_end_the_clipping() -> None:
    for clip, expected in (("5.0", Exactness.NEAR), ("null", Exactness.EXACT)):
        base = configure([*SETTINGS, "method=full", f"optim.grad_clip_norm={clip}"])
        (one,) = [c for c in candidates(base, 6) if c.name == "full+compact, steps in backward"]
        assert one.exactness is expected


@pytest.mark.parametrize(("bits", "expected"), [(32, Exactness.EXACT), (8, Exactness.NEAR), (4, Exactness.APPROXIMATE)])
def test_few_bits_of_the_user_s_optimizer_are_not_exact(bits: int, expected: Exactness) -> None:
    base = configure([*SETTINGS, "method=full", f"optim.state_bits={bits}", "optim.grad_clip_norm=null"])
    plain = next(one for one in candidates(base, 6) if one.methods == ("full",) and not one.in_backward)
    assert plain.exactness is expected
    assert plain.added is (None if bits == 32 else Exactness.EXACT), "the plan adds nothing to it"


def test_parts_of_a_batch_are_not_exact_where_batch_norm_follows_the_batch() -> None:
    exact = Candidate(("full",), exactness=Exactness.EXACT, evidence=("full: plain fine-tuning",))
    for frozen, expected in (("true", Exactness.EXACT), ("false", Exactness.APPROXIMATE)):
        base = configure([*SETTINGS, "method=full", f"model.frozen_bn={frozen}"])
        assert next(split(exact, base)).exactness is expected


def test_an_unknown_recipe_gets_its_class_from_what_is_measured() -> None:
    unknown = option(Exactness.UNKNOWN, 1, 1, added=Exactness.EXACT)
    assert with_cosine(unknown, None).exactness is Exactness.UNKNOWN
    assert with_cosine(unknown, 0.999).exactness is Exactness.NEAR
    assert with_cosine(unknown, 0.9).exactness is Exactness.APPROXIMATE
    assert with_cosine(unknown, 0.999, whole=False).exactness is Exactness.PART


def test_a_cosine_that_nobody_measured_is_unknown_in_the_table() -> None:
    named = option(Exactness.UNKNOWN, 1, 1, added=Exactness.EXACT, on_front=True)
    plan = Plan(4 * 10**9, 4 * 10**9, 0, "x", "cpu", (named,), (), named, 1, "x", None, 60.0)
    line = next(line for line in plan_text(plan).splitlines() if line.startswith(named.name))
    assert line.split().count("unknown") == 2, "class and cosine"
    assert "exact: shown by" not in plan_text(plan)


class _Declared(BackRazor):
    name = "declared_razor"
    candidates = (PlanCandidate({"sparsity": 0.5}, Exactness.APPROXIMATE), PlanCandidate({"sparsity": 0.25}))


def test_a_method_of_another_package_takes_part_as_it_declares(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_Declared, "distribution", "another")
    monkeypatch.setitem(registry._registered, "declared_razor", (_Declared, "another"))
    found = {one.name: one for one in candidates(configure([*SETTINGS, "method=full"]), 6)}
    assert found["full+declared_razor:sparsity=0.5"].exactness is Exactness.APPROXIMATE
    assert found["full+declared_razor:sparsity=0.25"].exactness is Exactness.UNKNOWN


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        ((PlanCandidate({}, Exactness.EXACT),), "must give the evidence of an exact one"),
        ((PlanCandidate({"rank": 3}),), "must name settings of the constructor, got 'rank'"),
        ((PlanCandidate(time_factor=0.0),), "must have a time_factor > 0"),
        (("full",), "must be a tuple of PlanCandidate"),
    ],
)
def test_candidates_that_cannot_be_used_are_rejected_with_the_method(declared: object, message: str) -> None:
    broken = type("Broken", (BackRazor,), {"name": "broken_razor", "candidates": declared})
    assert message in str(registry.broken_contract(broken))


# ------------------------------------------------------------------------------------------------ plans
@pytest.mark.slow
@pytest.mark.usefixtures("three")
def test_a_plan_with_room_recommends_plain_fine_tuning() -> None:
    found = a_plan()
    assert {one.name for one in found.options} == {
        "full", "full+low_bit", "full+checkpointing, steps in backward"}  # fmt: skip
    assert found.recommended is not None
    assert found.recommended.exactness is Exactness.EXACT
    assert found.steps == 5
    assert all(one.step_seconds for one in found.options)
    text = plan_text(found)
    assert found.recommended.command in text
    assert "memory=1000GB" in text
    configure(list(found.recommended.arguments))
    series = {one.name: one for one in plan_chart(found).panels[0].series}
    assert series["exact"].y == [one.step_seconds for one in found.options if one.exactness is Exactness.EXACT]


@pytest.mark.exhaustive
@pytest.mark.usefixtures("three")
def test_a_tight_budget_excludes_and_names_the_smallest_that_would_do() -> None:
    wide = a_plan()
    by_name = {one.name: one for one in wide.options}
    growth = {name: one.process_bytes - wide.base_bytes for name, one in by_name.items()}
    assert growth["full+checkpointing, steps in backward"] < growth["full"]
    weights = max(one.counted.resident_bytes for one in wide.options)
    tight = a_plan(memory=wide.base_bytes + weights + 2**22)
    assert tight.options == ()
    assert tight.recommended is None
    assert {one.name for one in tight.excluded} == set(by_name)
    assert f"No recipe fits. The smallest sufficient budget is {bytes_setting(tight.smallest_bytes)}" in plan_text(
        tight
    )
    again = a_plan(memory=tight.smallest_bytes + 2**24)
    assert tight.smallest in {one.name for one in again.options}


@pytest.mark.slow
@pytest.mark.usefixtures("three")
def test_a_budget_below_the_weights_is_refused() -> None:
    with pytest.raises(SettingError, match=r"memory must be at least .* Choose a smaller model, data.batch_size"):
        a_plan(memory=10**6)


def test_a_time_without_images_is_refused(tmp_path: Path) -> None:
    settings = ("model=deit_tiny", "data=cifar100", f"data.root={tmp_path}")
    with pytest.raises(SettingError, match="time must be left out without the images"):
        make_plan(settings, configure, memory_bytes=10**12, max_seconds=60)


@pytest.mark.slow
@pytest.mark.usefixtures("three")
def test_a_container_with_less_memory_sets_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "memory_limit_bytes", lambda: 3 * 10**9)
    found = a_plan(memory=8 * 10**9)
    assert (found.memory_bytes, found.asked_bytes) == (3 * 10**9, 8 * 10**9)
    assert "7.45 GiB were asked for; this machine or its container may take 2.79 GiB, which counts." in plan_text(found)


@pytest.mark.slow
@pytest.mark.usefixtures("three")
def test_the_recommended_recipe_is_tried() -> None:
    asked = []

    def attempt(arguments: Sequence[str], classes: int, seconds: float) -> Trial:
        asked.append((list(arguments), classes))
        return Trial(peak_bytes=7 * 10**8, step_seconds=0.25, steps=4)

    found = a_plan(attempt=attempt)
    assert found.recommended is not None
    assert asked == [(list(found.recommended.arguments), 10)]
    above = 7 * 10**8 + planner.RUN_ONLY
    assert found.recommended.measured_bytes == found.recommended.peak_bytes == found.base_bytes + above
    assert (found.recommended.step_seconds, found.recommended.timed) == (0.25, True)
    assert [one.measured_bytes is not None for one in found.options].count(True) == 1
    text = plan_text(found, every=True)
    shown = format_bytes(found.base_bytes + above)
    assert shown in text
    assert f"≈ {shown}" not in text
    assert "the recommended recipe ran for a few steps in a separate process" in text


@pytest.mark.exhaustive
@pytest.mark.usefixtures("three")
def test_a_recipe_that_does_not_keep_the_budget_in_its_trial_gives_way_to_the_next() -> None:
    wide = a_plan()
    need = {one.name: one.process_bytes - wide.base_bytes for one in wide.options}
    memory = wide.base_bytes + 2 * max(need.values())
    tried = []

    def attempt(arguments: Sequence[str], classes: int, seconds: float) -> Trial:
        tried.append(next(name for name, of in by_arguments.items() if of == tuple(arguments)))
        above = memory if len(tried) == 1 else need[tried[-1]]
        return Trial(above, 0.1, 3)

    by_arguments = {one.name: one.arguments for one in wide.options}
    found = a_plan(memory=memory, attempt=attempt)
    # By as much as the first was above its prediction the others may be as well: none of them fits any more.
    assert len(tried) == 1
    assert found.recommended is None
    (reason,) = [one.reason for one in found.excluded if one.name == tried[0]]
    assert reason.startswith("its process took, in a trial and with a margin, ")
    assert found.smallest_bytes > memory

    tried.clear()

    def fails_first(arguments: Sequence[str], classes: int, seconds: float) -> Trial:
        trial = attempt(arguments, classes, seconds)
        if len(tried) == 1:
            raise UserError("killed by SIGKILL, likely for lack of memory")
        return trial

    found = a_plan(memory=memory, attempt=fails_first)
    assert len(set(tried)) == 2
    assert found.recommended is not None
    assert found.recommended.name == tried[1]
    assert "its trial failed: killed by SIGKILL, likely for lack of memory" in {one.reason for one in found.excluded}


@pytest.mark.exhaustive
@pytest.mark.usefixtures("three")
def test_steps_that_are_too_long_and_machines_without_room_have_no_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    def attempt(*arguments: object) -> Trial:
        raise AssertionError("tried")

    with pytest.raises(AssertionError, match="tried"):
        a_plan(attempt=attempt)
    with monkeypatch.context() as less:
        less.setattr(planner, "memory_limit_bytes", lambda: 2 * 10**9)  # this process has half of them already
        assert a_plan(attempt=attempt).recommended is not None
    with monkeypatch.context() as less:
        less.setattr(planner.psutil, "virtual_memory", lambda: SimpleNamespace(available=10**6))
        assert a_plan(attempt=attempt).recommended is not None
    monkeypatch.setattr(planner, "_TRIED_STEP", 0.0)
    assert a_plan(attempt=attempt).recommended is not None


@pytest.mark.slow
def test_a_trial_takes_steps_of_the_whole_batch() -> None:
    config = configure([*SETTINGS, "method=[full,low_bit]", "data.batch_size=16", "trainer.grad_accum_steps=2"])
    trial = try_recipe(config, 10, max_seconds=1e-9)
    assert trial.steps == 1
    assert trial.step_seconds > 0
    assert trial.peak_bytes > 2**20, "the network and its step"


@pytest.mark.slow
def test_a_split_batch_fits_where_the_whole_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "candidates", few(["full"]))
    monkeypatch.setattr(planner._Planner, "fits", lambda self, o, memory: o.counted.resident_bytes <= memory)
    monkeypatch.setattr(planner, "resident_bytes", lambda: -(2**30))
    (whole,) = a_plan().options
    found = a_plan(memory=whole.counted.resident_bytes - 1, split_batch=True)  # the batch is part of what is resident
    assert [one.name for one in found.options] == ["full, 2 micro-batches"]
    assert "trainer.grad_accum_steps=2" in found.options[0].arguments


@pytest.mark.exhaustive
@pytest.mark.usefixtures("three")
def test_the_library_function_is_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    found = efficient_ft.plan(*SETTINGS, memory="900GB")
    assert isinstance(found, Plan)
    assert found.memory_bytes == 900 * 10**9
    with pytest.raises(UserError, match="memory must be a number with a unit"):
        efficient_ft.plan(*SETTINGS, memory="4")
    with pytest.raises(AttributeError, match="no attribute 'plans'"):
        efficient_ft.plans  # noqa: B018
    json.dumps(found.as_dict())


@pytest.mark.exhaustive
def test_gradients_are_compared_on_the_users_own_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    network = factory.random_model(configure([*SETTINGS, "method=full"]).model, 10)
    torch.save(network.state_dict(), tmp_path / "weights.pth")
    names = ["full+low_bit:bits=8, 8-bit moments", "full+low_bit:bits=2", "full+lora+low_bit"]
    monkeypatch.setattr(planner, "candidates", few(names))
    settings = (*SETTINGS, f"model.weights={tmp_path / 'weights.pth'}")
    found = {one.name: one for one in make_plan(settings, configure, memory_bytes=10**12).options}
    assert found[names[0]].cosine is not None
    assert found[names[0]].cosine > 0.99
    coarse = found[names[1]].cosine
    assert coarse is not None
    assert 0 < coarse < found[names[0]].cosine
    assert found[names[2]].cosine is None, "adapters have no exact gradient to compare with"


# ------------------------------------------------------------------------------------------------ records
def test_what_rows_lost_comes_from_the_finished_studies() -> None:
    assert all(value == 0 for value in points_lost("full").values())
    assert points_lost("head")["DeiT-Tiny on Caltech-101, 112 px, 2 epochs"] > 5
    assert points_lost(None) == points_lost("no such row") == {}


@pytest.mark.parametrize("line", ["{", "[]", '{"run": 3}', "[" * 100_000, "\udcff"])
def test_damaged_records_of_plans_are_refused(line: str, tmp_path: Path) -> None:
    (tmp_path / FILE).write_bytes(line.encode(errors="surrogateescape"))
    with pytest.raises(UserError, match=r"plans\.jsonl is damaged \(.*\)\. Remove the line"):
        calibration([tmp_path])


@pytest.mark.exhaustive
@pytest.mark.usefixtures("three")
def test_predictions_stand_next_to_what_runs_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from efficient_ft.training.run import run

    with pytest.raises(UserError, match="no plans here"):
        calibration([tmp_path])
    found = a_plan()
    record(found, tmp_path)
    assert (tmp_path / FILE).read_text().count("\n") == len(found.options)
    with pytest.raises(UserError, match="None of the planned runs has finished"):
        calibration_text([tmp_path])
    (full,) = [one for one in found.options if one.name == "full"]
    results = run(configure([*full.arguments, "memory=100GB", "trainer.progress=false"]), tmp_path / "run")
    assert results["memory"]["budget_bytes"] == 100 * 10**9
    assert results["memory"]["predicted_peak_bytes"] < 100 * 10**9
    (pair,) = calibration([tmp_path])
    assert pair["felt"] == (full.process_bytes, results["memory"]["peak_bytes"])
    assert pair["counted"][0] == pytest.approx(pair["counted"][1], rel=0.02)
    assert pair["within_budget"]
    assert "1 planned runs have finished, 0 of them above their budget." in calibration_text([tmp_path])
