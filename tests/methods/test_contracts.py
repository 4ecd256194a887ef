"""Tests of every method against every contract of the test kit, on the rows of `settings`, and of stacks."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import timm
import torch
from torch import Tensor, nn

from efficient_ft.core.errors import SettingError
from efficient_ft.cost import layer_flops
from efficient_ft.integrations.lightning import MethodCallback
from efficient_ft.methods import METHODS, apply_methods, plain_state_dict
from efficient_ft.testing import (
    CLASSES,
    MODELS,
    Gradients,
    MethodContracts,
    Row,
    evaluate,
    gradients,
    largest_difference,
    model_of,
    stir,
    worked_on_or_refused,
)
from tests.methods.settings import ROWS

#: The main row of each method, which is its first row. Every other row is a variant.
_MAIN = {r.method: row for row, r in reversed(ROWS.items())}.values()
#: Contracts that depend on the network. The other contracts are redundant on a second network.
_OF_NETWORKS = {
    "test_apply_reports_what_it_did_and_is_idempotent",
    "test_remove_gives_the_plain_model_back",
    "test_gradients_are_those_of_the_reference",
}

#: Contracts that take seconds for each method.
_SLOW = {
    "test_gradients_in_lower_precision_are_those_of_the_reference",
    "test_no_copy_of_an_activation_is_kept_outside_of_tensors",
}

#: Contracts that depend on the code path of a variant.
_OF_VARIANTS = {
    *_OF_NETWORKS,
    "test_the_class_keeps_the_contract",
    "test_the_row_is_complete",
    "test_settings_rebuild_the_method",
    "test_nothing_hides_from_the_meter",
    "test_off_is_plain_training_and_on_is_not",
    "test_off_runs_the_methods_own_code",
    "test_gradients_of_what_trains_are_the_plain_ones",
    "test_output_is_unchanged_at_first_and_changed_after_training",
    "test_gradients_are_near_the_plain_ones",
    "test_steps_move_no_weights",
    "test_state_travels_in_a_checkpoint",
}


def _on(models: slice, main: bool) -> dict[str, Row]:
    """Return the main rows or the variants, restricted to a slice of their models."""
    rows = {row: replace(r, models=r.models[models]) for row, r in ROWS.items() if (row in _MAIN) == main}
    return {row: r for row, r in rows.items() if r.models}


def _contracts() -> list[str]:
    return [name for name in dir(MethodContracts) if name.startswith("test_")]


class _Contracts(MethodContracts):
    __test__ = False

    def precisions(self, row: str, name: str) -> tuple[str, ...]:
        return ("bf16",) if name == ROWS[row].models[0] else ("fp32",)


class TestContracts(_Contracts):
    """The main row of each method on one network."""

    __test__ = True
    rows = _on(slice(0, 1), main=True)
    conf = Path(__file__).resolve().parents[2] / "conf" / "method"


#: Variants that other rows cover: a different precision, a different choice of blocks, or two variants at once.
_REPEATED = {
    "lora_fa_attention", "repnet_places", "lbp_wht_zero", "back_razor_exact", "back_razor_both_published",
    "checkpointing_bf16", "checkpointing_int4", "checkpointing_some", "tome_plain", "moe_published", "compact_kept",
    "mesa_published",
}  # fmt: skip
_VARIANTS = _on(slice(0, 1), main=False)


@pytest.mark.slow
class TestSlowContracts(_Contracts):
    """Contracts that take seconds for each method."""

    __test__ = True
    rows = TestContracts.rows


@pytest.mark.slow
class TestContractsOfVariants(_Contracts):
    """The variants on one network, with the contracts that depend on the code path."""

    __test__ = True
    rows = {row: r for row, r in _VARIANTS.items() if row not in _REPEATED}  # noqa: RUF012


@pytest.mark.exhaustive
class TestOtherContractsOfVariants(_Contracts):
    """The variants on one network, with the contracts that the main row already covers."""

    __test__ = True
    rows = TestContractsOfVariants.rows


@pytest.mark.exhaustive
class TestContractsOfRepeatedVariants(_Contracts):
    """The variants that other rows cover."""

    __test__ = True
    rows = {row: r for row, r in _VARIANTS.items() if row in _REPEATED}  # noqa: RUF012


@pytest.mark.slow
class TestContractsOnOtherNetworks(_Contracts):
    """The main rows on a second network, with the contracts that depend on the network."""

    __test__ = True
    rows = {row: replace(r, refused={}) for row, r in _on(slice(1, 2), main=True).items()}  # noqa: RUF012


@pytest.mark.exhaustive
class TestOtherContractsOnOtherNetworks(_Contracts):
    """The main rows on all further networks, with the contracts that the first network already covers."""

    __test__ = True
    rows = {row: replace(r, refused={}) for row, r in _on(slice(1, None), main=True).items()}  # noqa: RUF012


@pytest.mark.exhaustive
class TestContractsOfVariantsOnOtherNetworks(_Contracts):
    """The variants on all further networks."""

    __test__ = True
    rows = {row: replace(r, refused={}) for row, r in _on(slice(1, None), main=False).items()}  # noqa: RUF012


for _name in _contracts():
    if _name not in _OF_NETWORKS:
        setattr(TestContractsOnOtherNetworks, _name, None)
    setattr(TestContracts if _name in _SLOW else TestSlowContracts, _name, None)
    setattr(TestOtherContractsOfVariants if _name in _OF_VARIANTS else TestContractsOfVariants, _name, None)
for _class in (TestContractsOnOtherNetworks, TestOtherContractsOnOtherNetworks, TestContractsOfVariantsOnOtherNetworks):
    _class.test_the_row_is_complete = None  # These rows are incomplete.


class _InTheOtherPrecision(_Contracts):
    rows = {**TestContracts.rows, **_VARIANTS}  # noqa: RUF012

    def precisions(self, row: str, name: str) -> tuple[str, ...]:
        return tuple({"fp32", "bf16"} - set(super().precisions(row, name)))


@pytest.mark.exhaustive
@pytest.mark.parametrize(("row", "name"), [(row, n) for row, r in _InTheOtherPrecision.rows.items() for n in r.models])
def test_nothing_hides_from_the_meter_in_the_other_precision(row: str, name: str) -> None:
    _InTheOtherPrecision().test_nothing_hides_from_the_meter(row, name)


def test_every_method_has_a_row() -> None:
    assert {r.method for r in ROWS.values()} == set(METHODS.values())


def test_state_keys_tell_methods_and_settings_apart() -> None:
    methods = [r.create() for r in ROWS.values()] + [METHODS["lora"](), METHODS["lbp_wht"](), METHODS["lbp_dct"]()]
    assert len({m.state_key for m in methods}) == len(methods)


@pytest.mark.parametrize("row", TestContracts.rows)
def test_a_lightning_callback_carries_it(row: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, method = TestContracts().applied(row, ROWS[row].models[0])
    network, callback = SimpleNamespace(model=model), MethodCallback(method)
    for stage in ("fit", "validate"):
        callback.setup(SimpleNamespace(global_step=0), network, stage)
    assert network.model is model

    # Two micro-batches share an optimizer step. The step begins once and ends after the optimizer update.
    calls: list[str] = []
    monkeypatch.setattr(method, "step_begin", lambda step: calls.append(f"begin {step}"))
    monkeypatch.setattr(method, "step_end", lambda: calls.append("end"))
    for batch, (before, after) in enumerate([(7, 7), (7, 8), (8, 8), (8, 9)]):
        callback.on_train_batch_start(SimpleNamespace(global_step=before), network, None, batch)
        callback.on_train_batch_end(SimpleNamespace(global_step=after), network, None, None, batch)
    assert calls == ["begin 7", "end", "begin 8", "end"]


@pytest.mark.vary_one(slow=True)
@pytest.mark.parametrize("row", ["lbp_wht", "lbp_dct"])
@pytest.mark.parametrize("name", ["vit", "efficientformer", "swinv2"])
def test_every_projected_layer_is_reached_and_costs_less(row: str, name: str) -> None:
    size = (MODELS[name].size, MODELS[name].size)
    model, method = MODELS[name].create(), ROWS[row].create()
    exact = layer_flops(model, 4, size)
    method.apply(model)
    low = layer_flops(model, 4, size)
    assert method.applied is not None
    assert method.applied.touched
    for layer in method.applied.touched:
        assert low[layer].calls == 1
        assert 0 < low[layer].backward < exact[layer].backward


@pytest.mark.slow
@pytest.mark.parametrize("name", ["vit", "swinv2"])
def test_the_order_of_the_list_never_matters(name: str) -> None:
    def trained(order: tuple[str, ...]) -> tuple[list[str], Gradients]:
        model, methods = model_of(name), [ROWS[row].create() for row in order]
        torch.manual_seed(1)
        reports = apply_methods(model, methods)
        stir(model)
        gradient = gradients(model, name)
        fresh = model_of(name)
        fresh.load_state_dict(plain_state_dict(model, methods), strict=True)
        torch.testing.assert_close(evaluate(fresh, name), evaluate(model, name), rtol=1e-10, atol=1e-12)
        return [str(report) for report in reports], gradient

    orders = (("last_stage", "lora_all", "lbp_wht"), ("lbp_wht", "lora_all", "last_stage"))
    first, *others = (trained(order) for order in orders)
    for reports, gradient in others:
        assert reports == first[0]
        assert largest_difference(first[1], gradient) == 0


# ------------------------------------------------------------------------------------------------ arbitrary timm models
SMALL = re.compile(r"tiny|nano|pico|femto|atto|xxs|_xs|_x?s\d|mini|micro|_0\d\d|18|_b0")
LARGE = re.compile(r"base|large|huge|giant|_384|_448|_512")


def drawn(count: int) -> list[str]:
    """Draw small timm architectures, one per model family, with a fixed seed."""
    chance = random.Random(20260)
    families = sorted(timm.list_modules())
    chance.shuffle(families)
    candidates = [
        [n for n in timm.list_models(module=family) if SMALL.search(n) and not LARGE.search(n)] for family in families
    ]
    return [chance.choice(names) for names in candidates if names][:count]


def small(architecture: str) -> tuple[nn.Module, Tensor]:
    """Create a model and images of 96×96 pixels, or of the default size if the model does not support 96×96 pixels."""
    torch.manual_seed(0)
    try:
        plain = timm.create_model(
            architecture, num_classes=CLASSES, pretrained_cfg_overlay={"input_size": (3, 96, 96), "pool_size": (3, 3)}
        )
        images = torch.randn(2, 3, 96, 96)
        plain(images)
    except Exception:  # timm raises various exceptions.
        plain = timm.create_model(architecture, num_classes=CLASSES)
        images = torch.randn(2, *plain.pretrained_cfg["input_size"])
    return plain, images


# One row for each way of changing a model. The exhaustive test runs all rows.
QUICK = {row: ROWS[row] for row in ("last_stage", "lora_all", "lbp_wht")}


@pytest.mark.first(4, "exhaustive")
@pytest.mark.slow
@pytest.mark.parametrize("architecture", drawn(9))
def test_any_timm_model_is_worked_on_or_refused(architecture: str) -> None:
    assert worked_on_or_refused(*small(architecture), QUICK)


@pytest.mark.exhaustive
@pytest.mark.parametrize("architecture", drawn(200))
def test_many_timm_models_are_worked_on_or_refused(architecture: str) -> None:
    worked = worked_on_or_refused(*small(architecture), ROWS)
    assert {"full", "head"} <= set(worked)
    assert len(worked) > 4, worked


def test_a_setting_out_of_range_names_itself() -> None:
    for name, settings in {
        "lora": [{"rank": 0}, {"rank": 2.5}, {"alpha": 0}, {"targets": "mlp"}, {"dropout": 1.0}],
        "blocks": [{"blocks": []}, {"blocks": "3"}, {"blocks": [True]}],
    }.items():
        for setting in settings:
            with pytest.raises(SettingError) as error:
                METHODS[name](**setting)
            assert error.value.setting == next(iter(setting))
            assert str(next(iter(setting.values()))) in str(error.value)
