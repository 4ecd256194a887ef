"""Tests of searches with several networks: the choice, the proposals, and the race on a simulated machine."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from efficient_ft.cli.hydra.conf import CONF
from efficient_ft.core.errors import SettingError, UserError
from efficient_ft.core.parsing import parse_yaml
from efficient_ft.report.page import PAGE
from efficient_ft.report.search_page import write_search_page
from efficient_ft.search.halving import networks_first
from efficient_ft.search.networks import IMAGENET, examined, most_networks, preferred, propose_each
from efficient_ft.search.search import open_search
from efficient_ft.search.state import NAME, Arm, Proposed, SearchState, read_state
from efficient_ft.search.text import command_of, result_text
from tests.search.test_search import DATA, RECIPES, Machine

#: Recipes of the networks, as in `RECIPES`: the large network is more accurate, but its steps take longer.
NETWORKS = {"small_stack": (0.7, 100, 0.2), "small_full": (0.72, 110, 0.2), "small_head": (0.5, 20, 0.1),
            "large_stack": (0.9, 130, 0.4), "large_full": (0.92, 300, 1.5), "large_head": (0.6, 20, 0.4)}  # fmt: skip
MEMORY = 2 * 2**30


def part(network: str, recipes: Sequence[str] = ("stack", "full", "head"), smallest_bytes: int = 2**30) -> Proposed:
    arms = [
        Arm(name=name, recipe=name, arguments=[f"method={network}_{name}", f"model={network}"], folder=name, lr=1e-3,
            points_lost=25.0 if name == "head" else 0.0, source="", needed_bytes=1, baseline=name != "stack")
        for name in recipes
    ]  # fmt: skip
    refused = {"bsr": "needs memory=3GB"}
    return Proposed(arms=arms, refused=refused, data=DATA, seconds=5.0, smallest="head", smallest_bytes=smallest_bytes)


class Proposals:
    """Function that proposes the recipes of networks, each in `taken` seconds, and records its arguments."""

    def __init__(self, parts: dict[str, Proposed | str], taken: float = 8.0) -> None:
        self.parts, self.taken, self.now = parts, taken, 0.0
        self.calls: list[tuple[str, int, float]] = []

    def __call__(self, network: str, recipes: int, seconds: float) -> Proposed:
        self.calls.append((network, recipes, seconds))
        self.now += self.taken
        found = self.parts[network]
        if isinstance(found, str):
            raise UserError(found)
        return found

    def each(self, limit: int | None, count: int = 6, seconds: float = 100.0) -> Proposed:
        return propose_each(list(self.parts), limit, count, seconds, MEMORY, self, lambda: self.now)


def options() -> dict[str, str]:
    found = {file.stem: parse_yaml(file.read_text())["name"] for file in (CONF / "model").glob("*.yaml")}
    return {option: name for option, name in found.items() if name in IMAGENET}


# ------------------------------------------------------------------------------------------------ choice
def test_the_table_names_the_networks_of_options_and_plausible_numbers() -> None:
    assert set(IMAGENET) == set(options().values())
    for one in IMAGENET.values():
        assert 60 < one.top1 < 90
        assert 1 < one.parameters < 100


@pytest.mark.slow
def test_the_table_has_the_parameters_of_the_networks() -> None:
    import timm

    for name in ("deit_tiny_patch16_224.fb_in1k", "mobilenetv2_100.ra_in1k", "resnet18.tv_in1k", "proxyless_mobile.mit_in1k"):  # fmt: skip  # noqa: E501
        import efficient_ft.models.proxyless  # noqa: F401  registers the network

        count = sum(parameter.numel() for parameter in timm.create_model(name.partition(".")[0]).parameters())
        assert IMAGENET[name].parameters == pytest.approx(count / 1e6, abs=0.006)


def test_the_most_accurate_network_of_each_size_comes_first() -> None:
    found = preferred(options())
    assert found[:4] == ["efficientformerv2_l", "efficientformer_l1", "swinv2_small", "vit_small"]
    assert "swinv2_small_224" not in found  # the same network as swinv2_small
    assert preferred({"b": "unknown_b", "a": "unknown_a", "resnet18": "resnet18.tv_in1k"}) == ["resnet18", "a", "b"]


def test_the_smallest_network_is_examined() -> None:
    order = preferred(options())
    assert examined(order, options(), 2) == [*order[:3], "mobilenetv2"]
    assert examined(order[:3], options(), 2) == order[:3]
    assert examined(["mobilenetv2", *order[:3], "x"], {**options(), "x": "y"}, 2) == ["mobilenetv2", *order[:3]]


def test_short_budgets_have_few_networks() -> None:
    assert [most_networks(count) for count in (3, 6, 8, 9, 11, 12)] == [2, 2, 2, 3, 3, 4]


# ------------------------------------------------------------------------------------------------ proposals
def test_arms_alternate_and_their_names_name_the_network() -> None:
    found = Proposals({"small": part("small"), "large": part("large", ["stack"])}).each(None, count=3)
    assert [arm.name for arm in found.arms] == ["small stack", "large stack", "small full"]
    assert [arm.folder for arm in found.arms] == ["small_stack", "large_stack", "small_full"]
    assert [arm.network for arm in found.arms] == ["small", "large", "small"]
    assert [arm.recipe for arm in found.arms] == ["stack", "stack", "full"]
    assert [arm.baseline for arm in found.arms] == [False, False, True]
    assert found.refused == {"small bsr": "needs memory=3GB", "large bsr": "needs memory=3GB"}


def test_every_named_network_has_an_arm() -> None:
    parts: dict[str, Proposed | str] = {name: part(name) for name in "abcde"}
    found = Proposals(parts).each(None, count=3)
    assert [arm.network for arm in found.arms] == list("abcde")


def test_networks_share_the_time() -> None:
    proposals = Proposals({"a": part("a"), "b": part("b"), "c": part("c")}, taken=8.0)
    found = proposals.each(None, count=7, seconds=60.0)
    # Each process takes 3 seconds to start, in addition to the 5 seconds of its proposals.
    assert proposals.calls == [("a", 3, 20.0), ("b", 3, 55.0 / 2), ("c", 3, 50.0)]
    assert found.seconds == 24.0 - 3.0
    slow = part("a").model_copy(update={"seconds": 80.0})
    late = Proposals({"a": slow, "b": part("b")}, taken=83.0)
    late.each(None, seconds=60.0)
    assert late.calls[1] == ("b", 3, 15.0)


def test_one_network_has_plain_names() -> None:
    found = Proposals({"": part("")}).each(None)
    assert [(arm.name, arm.network) for arm in found.arms] == [("stack", ""), ("full", ""), ("head", "")]
    assert found.refused == {"bsr": "needs memory=3GB"}
    automatic = Proposals({"small": part("small"), "large": part("large", [])}).each(2)
    assert (automatic.arms[0].name, automatic.arms[0].network) == ("stack", "small")


def test_networks_without_a_recipe_are_reported() -> None:
    found = Proposals({"small": part("small"), "large": part("large", [], 3 * 2**30)}).each(None)
    assert {arm.network for arm in found.arms} == {"small"}
    assert found.networks == {"large": "The recipe head needs the least memory: memory=3GiB."}


@pytest.mark.parametrize("limit", [None, 2])
def test_if_no_recipe_fits_the_smallest_budget_of_all_networks_is_named(limit: int | None) -> None:
    parts: dict[str, Proposed | str] = {"large": part("large", [], 5 * 2**30), "small": part("small", [], 3 * 2**30)}
    with pytest.raises(
        SettingError,
        match=r"memory must be at least 3GiB, got 2.00 GiB\. The recipe head with model=small needs the least",
    ):
        Proposals(parts).each(limit)
    with pytest.raises(SettingError, match=r"at least 5GiB, got 2.00 GiB\. The recipe head needs the least memory"):
        Proposals({"": part("", [], 5 * 2**30)}).each(None)


def test_if_no_recipe_can_be_used_the_reason_is_named() -> None:
    unusable = part("a", []).model_copy(update={"smallest": None, "refused": {"full": "no blocks"}})
    with pytest.raises(UserError, match=r"No recipe can be used with this model\. full: no blocks"):
        Proposals({"": unusable}).each(None)
    assert Proposals({"a": unusable, "b": part("b")}).each(None).networks["a"].endswith("full: no blocks")


def test_automatic_networks_that_cannot_be_used_are_replaced() -> None:
    parts: dict[str, Proposed | str] = {
        "a": "the image size cannot be used", "b": part("b"), "c": part("c", []), "d": part("d"), "e": part("e"),
    }  # fmt: skip
    proposals = Proposals(parts)
    found = proposals.each(2)
    assert list(dict.fromkeys(arm.network for arm in found.arms)) == ["b", "d"]
    assert set(found.networks) == {"a", "c"}
    assert found.networks["a"] == "the image size cannot be used"
    assert [call[0] for call in proposals.calls] == ["a", "b", "c", "d"]
    # If the time is over, networks are not replaced. A failed process has no measured start.
    late = Proposals(parts, taken=50.0).each(2, seconds=54.0)
    assert {arm.network for arm in late.arms} == {"b"}


def test_errors_of_named_networks_and_errors_of_all_networks_end_the_search() -> None:
    with pytest.raises(UserError, match=r"^model=b: the image size cannot be used"):
        Proposals({"a": part("a"), "b": "the image size cannot be used"}).each(None)
    same = Proposals({"a": "the data are damaged", "b": "the data are damaged", "c": part("c")})
    with pytest.raises(UserError, match=r"^the data are damaged"):
        same.each(2)
    assert len(same.calls) == 2
    with pytest.raises(UserError, match="first"):
        Proposals({"a": "first", "b": "second"}).each(2)


# ------------------------------------------------------------------------------------------------ race
@pytest.fixture
def raced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., SearchState]:
    """Return a function that runs a search with two networks on a simulated machine."""
    for name, values in NETWORKS.items():
        monkeypatch.setitem(RECIPES, name, values)

    def run(budget: float, unit: str = "seconds", parts: dict[str, Proposed | str] | None = None) -> SearchState:
        machine = Machine()

        def propose(count: int, seconds: float) -> Proposed:
            proposals = Proposals(parts or {"small": part("small"), "large": part("large")})
            found = proposals.each(None, count, seconds)
            machine.now += proposals.now
            return found

        def run_slice(arguments: Sequence[str], log: Path) -> object:
            name = arguments[0].partition("=")[2]
            assert arguments[1] == f"model={name.partition('_')[0]}"
            own = log.parent / name  # With one network, the folder has another name.
            return machine.run_slice([arguments[0], *arguments[2:-1], f"hydra.run.dir='{own}'"], Path(f"{own}.log"))

        search = open_search(tmp_path, ["model=x"], MEMORY, budget, unit, propose, run_slice)  # type: ignore[arg-type]
        search.clock = machine.clock
        search.__post_init__()
        state = search.run()
        assert unit == "steps" or 0.85 * budget <= machine.now <= 1.05 * budget
        return state

    return run


@pytest.mark.parametrize(("budget", "unit"), [(1800, "seconds"), (3600, "seconds"), (3000, "steps")])
def test_the_best_network_is_trained_to_the_end(raced: Callable[..., SearchState], budget: float, unit: str) -> None:
    state = raced(budget, unit)
    assert state.finished
    assert state.final is not None
    assert state.final.arm == "large stack"
    assert "model=large" in command_of(state)


def test_the_best_recipe_of_each_network_continues_after_the_first_round(raced: Callable[..., SearchState]) -> None:
    state = raced(1800)
    assert {arm.network for arm in state.arms if len(arm.slices) > 1} == {"small", "large"}
    first = sorted(state.arms, key=lambda arm: -arm.slices[0].value)
    assert [arm.network for arm in first[:2]] == ["small", "small"]
    assert first[1].stopped == "round 1: the best recipe of each network continued"
    assert first[-1].stopped == "round 1: 2 recipes were better"


def test_the_best_arm_of_each_network_precedes_the_others() -> None:
    order = [one.model_copy(update={"network": network}) for network in "aab" for one in part(network).arms[:1]]
    assert [id(arm) for arm in networks_first(order)] == [id(order[index]) for index in (0, 2, 1)]


@pytest.mark.usefixtures("wide")
def test_the_result_and_the_page_state_the_network(raced: Callable[..., SearchState], tmp_path: Path) -> None:
    state = raced(1800)
    text = result_text(state, tmp_path)
    assert text.splitlines()[0].split()[:2] == ["network", "recipe"]
    assert "stack with model=large and optim.lr=0.001: val accuracy" in text
    assert "for small full" in text
    assert "large bsr: not used, because it needs memory=3GB." in text
    write_search_page(tmp_path, tmp_path / "report")
    page = (tmp_path / "report" / PAGE).read_text(encoding="utf-8")
    assert "Search: large stack" in page
    assert re.search(r"<th[^>]*>(<[^>]*>)*network<", page)
    assert "large bsr: needs memory=3GB" in page


@pytest.mark.usefixtures("wide")
def test_a_network_without_recipes_is_named_in_the_result(raced: Callable[..., SearchState], tmp_path: Path) -> None:
    state = raced(600, parts={"small": part("small"), "large": part("large", [])})
    text = result_text(state, tmp_path)
    assert text.splitlines()[0].split()[0] == "recipe"  # only one network takes part
    assert "large is excluded. The recipe head needs the least memory: memory=1GiB." in text
    assert "with model=small and optim.lr" in text
    (page,) = write_search_page(tmp_path, tmp_path / "report")
    assert "These networks were excluded" in page.read_text(encoding="utf-8")


def test_a_state_of_an_earlier_version_has_no_networks(raced: Callable[..., SearchState], tmp_path: Path) -> None:
    state = raced(600)
    plain = json.loads((tmp_path / NAME).read_text())
    del plain["networks"]
    for arm in plain["arms"]:
        del arm["network"]
    (tmp_path / NAME).write_text(json.dumps(plain))
    found = read_state(tmp_path)
    assert found is not None
    assert found.networks == {}
    assert not found.several_networks
    assert found.final == state.final
