"""Tests of the options of a plan: their exactness, the Pareto front and the recommended option."""

from __future__ import annotations

import re
import shlex
from dataclasses import replace

import pytest

from efficient_ft.methods import BackRazor, Exactness, PlanCandidate, registry
from efficient_ft.planning import Candidate, Excluded, Option, Plan
from efficient_ft.planning.candidates import candidates, split
from efficient_ft.planning.counting import Counted
from efficient_ft.planning.options import recommend, with_cosine, with_front
from efficient_ft.planning.text import plan_text
from tests.planning.common import SETTINGS, configure

pytestmark = pytest.mark.usefixtures("wide")


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
    assert f"Of the studied recipes, {studied.name} has the smallest loss. Set loss=2.1 to allow this recipe." in text
    assert "Recipes without a study are not recommended" in text
    assert "Set memory=1.5GB to allow the near exact recipe low bits." in text
    close = replace(above, process_bytes=plan.memory_bytes + 1)
    assert "low bits: needs slightly more than 1.12 GiB" in plan_text(replace(plan, excluded=(further, close)))
    slow = replace(plan, options=(option(Exactness.EXACT, 1, 9, on_front=True),))
    assert "Increase time=TIME to allow these recipes." in plan_text(slow)


def test_commands_can_be_pasted_into_a_shell() -> None:
    arguments = ("data.root='my photos (1)'", "model.weights=/a/$HOME;b", "method=[full,lora]", "optim.lr=1e-3")
    made = replace(option(Exactness.EXACT, 1, 1), arguments=arguments)
    assert shlex.split(made.command) == ["efficient-ft", *arguments]
    assert made.words[-1] == "optim.lr=1e-3"


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
    assert "Evidence that recipes are exact" not in plan_text(plan)


@pytest.mark.parametrize(("width", "times"), [(80, ["410 ms"]), (140, ["410 ms", "6 min 44 s"])])
def test_the_times_of_a_step_and_of_the_run_have_their_own_columns(
    width: int, times: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    one = replace(option(Exactness.NEAR, 3, 0.41, timed=True, on_front=True), name="full+compact, 8-bit moments")
    plan = Plan(4 * 10**9, 4 * 10**9, 0, "x", "cpu", (one,), (), one, 1, "x", 985, 1.0)
    lines = plan_text(plan).splitlines()
    header = next(line for line in lines if line.startswith("recipe  "))
    cells = re.split(r"  +", next(line for line in lines if line.startswith("full+compact")))
    assert cells[2 : 2 + len(times)] == times
    assert re.split(r"  +", header)[2 : 2 + len(times)] == ["step", "run"][: len(times)]


class _Declared(BackRazor):
    name = "declared_razor"
    candidates = (PlanCandidate({"sparsity": 0.5}, Exactness.APPROXIMATE), PlanCandidate({"sparsity": 0.25}))


def test_a_method_of_another_package_takes_part_as_it_declares(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_Declared, "distribution", "another")
    monkeypatch.setitem(registry._registered, "declared_razor", _Declared)
    found = {one.name: one for one in candidates(configure([*SETTINGS, "method=full"]), 6)}
    assert found["full+declared_razor:sparsity=0.5"].exactness is Exactness.APPROXIMATE
    assert found["full+declared_razor:sparsity=0.25"].exactness is Exactness.UNKNOWN


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        ((PlanCandidate({}, Exactness.EXACT),), "must name a test or measurement as evidence"),
        ((PlanCandidate({"rank": 3}),), "must contain only settings of the constructor, got 'rank'"),
        ((PlanCandidate(time_factor=0.0),), "must have a time_factor > 0"),
        (("full",), "must be a tuple of PlanCandidate"),
    ],
)
def test_candidates_that_cannot_be_used_are_rejected_with_the_method(declared: object, message: str) -> None:
    broken = type("Broken", (BackRazor,), {"name": "broken_razor", "candidates": declared})
    assert message in str(registry.broken_contract(broken))


def test_a_recommendation_says_on_how_many_recipes_it_rests() -> None:
    one, two = option(Exactness.EXACT, 1, 1), option(Exactness.EXACT, 2, 2)
    unknown = Excluded("other", "not examined", examined=False)
    above = Excluded("large", "its process may take 8.38 GiB", 9 * 10**9, Exactness.EXACT)

    def said(options: tuple[Option, ...], *excluded: Excluded) -> str:
        text = plan_text(Plan(4 * 10**9, 4 * 10**9, 0, "x", "cpu", options, excluded, options[0], 1, "x", None, 60.0))
        return text.partition("The recommendation ")[2].partition("\n")[0]

    assert said((one,), unknown) == (
        "is based on one recipe: only 1 of 2 was examined. To examine more recipes, use --planning-time 3m."
    )
    assert said((one,)) == "is based on one recipe: only 1 was examined."
    assert said((one,), above) == "is based on one recipe: only one of the 2 examined recipes fits."
    more = "is based on 3 of 4 recipes. To examine more recipes, use --planning-time 2m."
    assert said((one, two), above, unknown) == more
    assert said((one, two), above) == ""
