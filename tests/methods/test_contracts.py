"""Every method through every contract, driven by the table in `settings`."""

from __future__ import annotations

import copy
import inspect
import pickle
import random
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
from omegaconf import OmegaConf
from torch import Tensor, nn

from efficient_ft.core.errors import SettingError, UserError
from efficient_ft.cost import kept_after_forward, layer_flops
from efficient_ft.integrations.lightning import MethodCallback
from efficient_ft.methods import METHODS, LastStage, apply_methods, plain_state_dict
from efficient_ft.methods.base import ORDER_OF_APPLICATION, Method
from tests.methods.settings import (
    CASES,
    CLASSES,
    MODELS,
    ROWS,
    Row,
    batch_of,
    evaluate,
    gradients,
    model_of,
    train_a_little,
    warm_up,
)

CONF = Path(__file__).resolve().parents[2] / "conf" / "method"
Gradients = dict[str, Tensor | None]


def largest_difference(a: Gradients, b: Gradients) -> float:
    """Largest relative error (by norm) of a gradient; infinite where one has a gradient and the other none."""
    assert a.keys() == b.keys()
    worst = 0.0
    # Gradients that are zero in theory (a bias before a normalisation) are rounding noise: measured by the largest.
    scale = max((g.norm().item() for g in a.values() if g is not None), default=0.0)
    for name, g in a.items():
        other = b[name]
        if (g is None) != (other is None):
            return float("inf")
        if g is not None and other is not None:
            worst = max(worst, (g - other).norm().item() / max(g.norm().item(), 1e-6 * scale))
    return worst


def applied_to(row: str, name: str, **changes: Any) -> tuple[nn.Module, Method]:
    model, method = model_of(name), ROWS[row].create(**changes)
    torch.manual_seed(1)
    method.apply(model)
    return model, method


def stir(model: nn.Module) -> None:
    """Adapters and gates start at zero: give them a value that shows."""
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if re.search(r"lora_B|mlp\.gate|lite_residual\.norm2|side_module\.(norm2|attn\.proj|mlp\.fc2)", name):
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)


# ------------------------------------------------------------------------------------------------ the table
def test_every_method_has_a_row() -> None:
    assert {r.method for r in ROWS.values()} == set(METHODS.values())
    for name, method in METHODS.items():
        assert method.name == name
        assert method.axis in ORDER_OF_APPLICATION


@pytest.mark.parametrize("row", ROWS)
def test_a_row_says_what_stands_in_for_a_missing_off_value(row: str) -> None:
    r = ROWS[row]
    assert (r.off is None) == bool(r.why_no_off) == bool(r.instead)
    assert set(r.models) | set(r.refused) <= set(MODELS)
    assert not set(r.models) & set(r.refused)


# ------------------------------------------------------------------------------------------------ 1, 2: surgery
@pytest.mark.parametrize(("row", "name"), CASES)
def test_apply_reports_what_it_did_and_is_idempotent(row: str, name: str) -> None:
    model, method = model_of(name), ROWS[row].create()
    assert method.applied is None
    report = method.apply(model)
    names = {n for n, _ in model.named_modules()} | {n for n, _ in model.named_parameters()}
    plain = {n.replace(".base_layer", "") for n in names}
    assert report.touched
    assert len(set(report.touched)) == len(report.touched)
    assert set(report.touched) <= names
    assert set(report.skipped) <= plain
    assert all(report.skipped.values())
    assert report.method == method.name
    assert method.name in str(report)

    keys, classes = list(model.state_dict()), [type(m) for m in model.modules()]
    assert method.apply(model) is report is method.applied
    assert list(model.state_dict()) == keys
    assert [type(m) for m in model.modules()] == classes


@pytest.mark.parametrize(("row", "name"), [(r, n) for r in ROWS for n in ROWS[r].refused])
def test_models_it_cannot_serve_are_refused_with_the_reason(row: str, name: str) -> None:
    model = model_of(name)
    before = {n: p.requires_grad for n, p in model.named_parameters()}
    with pytest.raises(UserError, match=re.escape(ROWS[row].refused[name])) as error:
        ROWS[row].create().apply(model)
    assert ROWS[row].method.name in str(error.value)
    assert {n: p.requires_grad for n, p in model.named_parameters()} == before


@pytest.mark.parametrize("row", ROWS)
def test_a_wrapped_model_is_refused(row: str) -> None:
    model = model_of("vit")
    distributed = torch.nn.parallel.DistributedDataParallel.__new__(torch.nn.parallel.DistributedDataParallel)
    nn.Module.__init__(distributed)
    distributed.module = model
    for wrapped in (nn.DataParallel(model), distributed, torch.compile(model)):
        method = ROWS[row].create()
        with pytest.raises(UserError, match="plain model first"):
            method.apply(wrapped)
        assert method.applied is None


@pytest.mark.parametrize(("row", "name"), CASES)
def test_copies_and_pickles_train_alike(row: str, name: str) -> None:
    model, method = applied_to(row, name)
    stir(model)
    warm_up(model, method, name)
    copied, copied_method = copy.deepcopy((model, method))
    pickled, pickled_method = pickle.loads(pickle.dumps((model, method)))
    assert copied_method.applied == pickled_method.applied == method.applied
    expected = gradients(model, name)
    assert largest_difference(expected, gradients(copied, name)) == 0
    assert largest_difference(expected, gradients(pickled, name)) == 0

    # What is done to a copy leaves the original as it is.
    keys = list(model.state_dict())
    copied_method.remove(copied)
    assert list(copied.state_dict()) == list(model_of(name).state_dict())
    assert list(model.state_dict()) == keys
    assert largest_difference(expected, gradients(model, name)) == 0


@pytest.mark.parametrize("row", ROWS)
def test_a_lightning_callback_carries_it(row: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, method = model_of(ROWS[row].models[0]), ROWS[row].create()
    network, callback = SimpleNamespace(model=model), MethodCallback(method)
    for stage in ("fit", "validate"):
        callback.setup(SimpleNamespace(global_step=0), network, stage)
    assert network.model is model
    assert method.applied is not None

    # Two micro-batches share an optimizer step: it begins once, and ends once the optimizer has stepped.
    calls: list[str] = []
    monkeypatch.setattr(method, "step_begin", lambda step: calls.append(f"begin {step}"))
    monkeypatch.setattr(method, "step_end", lambda: calls.append("end"))
    for batch, (before, after) in enumerate([(7, 7), (7, 8), (8, 8), (8, 9)]):
        callback.on_train_batch_start(SimpleNamespace(global_step=before), network, None, batch)
        callback.on_train_batch_end(SimpleNamespace(global_step=after), network, None, None, batch)
    assert calls == ["begin 7", "end", "begin 8", "end"]


# ------------------------------------------------------------------------------------------------ 3: off means off
@pytest.mark.parametrize(("row", "name"), [(r, n) for r, n in CASES if ROWS[r].off is not None])
def test_off_is_plain_training_and_on_is_not(row: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    r = ROWS[row]
    for owner, attribute, replacement in r.shortcuts:
        monkeypatch.setattr(owner, attribute, replacement)
    plain = gradients(model_of(name), name)
    model, method = applied_to(row, name, **(r.off or {}))
    warm_up(model, method, name)
    assert largest_difference(plain, gradients(model, name)) < 1e-8
    if not r.off:
        return  # off as it is
    model, method = applied_to(row, name)
    warm_up(model, method, name)
    assert largest_difference(plain, gradients(model, name)) > 1e-2


@pytest.mark.parametrize(("row", "name"), [(r, n) for r, n in CASES if ROWS[r].instead.startswith("gradients of")])
def test_gradients_of_what_trains_are_the_plain_ones(row: str, name: str) -> None:
    plain = gradients(model_of(name), name)
    model, _ = applied_to(row, name)
    chosen = gradients(model, name)
    trains = {n for n, p in model.named_parameters() if p.requires_grad}
    assert 0 < len(trains) < len(plain)
    assert {n for n, g in chosen.items() if g is not None} == trains
    assert largest_difference({n: plain[n] for n in trains}, {n: chosen[n] for n in trains}) < 1e-10


@pytest.mark.parametrize(("row", "name"), [(r, n) for r, n in CASES if ROWS[r].instead.startswith("output unchanged")])
def test_output_is_unchanged_at_first_and_changed_after_training(row: str, name: str) -> None:
    plain = ROWS[row].reference(model_of(name))
    model, method = applied_to(row, name)
    torch.testing.assert_close(evaluate(model, name), evaluate(plain, name), rtol=1e-10, atol=1e-12)
    train_a_little(model, method, name)
    assert (evaluate(model, name) - evaluate(plain, name)).abs().max() > 1e-4


@pytest.mark.parametrize(("row", "name"), [(r, n) for r, n in CASES if ROWS[r].instead.startswith("gradients are")])
def test_gradients_are_near_the_plain_ones(row: str, name: str) -> None:
    plain = gradients(model_of(name), name)
    model, _ = applied_to(row, name)
    near = gradients(model, name)
    assert near.keys() == plain.keys()
    a, b = (torch.cat([g.flatten() for g in found.values() if g is not None]) for found in (plain, near))
    assert F.cosine_similarity(a, b, dim=0) > 0.99
    assert abs(b.norm() / a.norm() - 1) < 0.02
    assert largest_difference(plain, near) > 1e-6


# ------------------------------------------------------------------------------------------------ 4, 5: evaluation
@pytest.mark.parametrize(("row", "name"), CASES)
def test_what_is_exported_is_the_pretrained_model_s_own(row: str, name: str) -> None:
    """After training the weights load into plain timm, by its names, and give there what the method's model gives.

    What cannot be merged is added there first; all of the model's own names are there.
    """
    model, method = applied_to(row, name)
    before = evaluate(ROWS[row].reference(model_of(name)), name)
    assert torch.allclose(evaluate(model, name), before, rtol=1e-10, atol=1e-12) != bool(ROWS[row].own_evaluation)
    train_a_little(model, method, name)
    keys = list(model.state_dict())
    exported = plain_state_dict(model, [method])
    assert list(model.state_dict()) == keys

    fresh = MODELS[name].create().double()
    assert fresh.state_dict().keys() <= exported.keys()
    if not method.merges:
        ROWS[row].create().apply(fresh)
    fresh.load_state_dict(exported, strict=True)
    after = evaluate(fresh, name)
    torch.testing.assert_close(after, evaluate(model, name), rtol=1e-10, atol=1e-12)
    assert (after - before).abs().max() > 1e-5


@pytest.mark.parametrize(("row", "name"), CASES)
def test_remove_gives_the_plain_model_back(row: str, name: str) -> None:
    plain = model_of(name)
    next(plain.parameters()).requires_grad = False
    model, method = copy.deepcopy(plain), ROWS[row].create()
    method.apply(model)
    train_a_little(model, method, name)
    method.remove(model)
    assert method.applied is None
    assert [(n, type(m)) for n, m in model.named_modules()] == [(n, type(m)) for n, m in plain.named_modules()]
    assert {n: p.requires_grad for n, p in model.named_parameters()} == {
        n: p.requires_grad for n, p in plain.named_parameters()
    }
    plain.load_state_dict(model.state_dict())
    assert largest_difference(gradients(plain, name), gradients(model, name)) == 0
    # And it can be applied again, here or to another model.
    assert method.apply(model).touched


# ------------------------------------------------------------------------------------------------ settings
def constructor_of(file: Path) -> tuple[type[Method], dict[str, Any]]:
    package = re.match(r"# @package method\.(\w+)\n", file.read_text(encoding="utf-8"))
    assert package, f"{file.name} must begin with its package"
    values = OmegaConf.to_container(OmegaConf.load(file))
    assert isinstance(values, dict)
    return METHODS[package[1]], values  # type: ignore[return-value]


@pytest.mark.parametrize("file", sorted(CONF.glob("*.yaml")), ids=lambda f: f.stem)
def test_a_yaml_holds_the_constructor_s_arguments(file: Path) -> None:
    method, values = constructor_of(file)
    parameters = inspect.signature(method).parameters
    select = values.pop("select", None)
    assert (select is None) == (method.axis == "selection"), "recipes bring a default selection, selections do not"
    assert values.keys() == parameters.keys()
    if file.stem == method.name:
        assert values == {n: "???" if p.default is p.empty else p.default for n, p in parameters.items()}
    else:
        assert any(values[n] != p.default for n, p in parameters.items()), "a variant differs from its method"


def test_every_method_has_a_yaml_of_its_name() -> None:
    assert set(METHODS) <= {f.stem for f in CONF.glob("*.yaml")}


@pytest.mark.parametrize("row", ROWS)
def test_settings_rebuild_the_method(row: str) -> None:
    method = ROWS[row].create()
    again = type(method)(**method.settings())
    assert again.settings() == method.settings()
    assert again.state_key == method.state_key
    assert repr(again) == repr(method)


def test_state_keys_tell_methods_and_settings_apart() -> None:
    methods = [r.create() for r in ROWS.values()] + [METHODS["lora"](), METHODS["lbp_wht"](), METHODS["lbp_dct"]()]
    keys = [m.state_key for m in methods]
    assert len(set(keys)) == len(keys)
    assert all(k.startswith(m.name) for k, m in zip(keys, methods, strict=True))


# ------------------------------------------------------------------------------------------------ state
@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("load_first", [True, False])
def test_state_travels_in_a_checkpoint(row: str, load_first: bool, tmp_path: Path) -> None:
    name = ROWS[row].models[0]
    model, method = applied_to(row, name)
    train_a_little(model, method, name)
    torch.save({"model": model.state_dict(), "method": method.state_dict()}, tmp_path / "checkpoint")
    saved = torch.load(tmp_path / "checkpoint", weights_only=True)

    resumed, again = model_of(name), ROWS[row].create()
    if load_first:
        again.load_state_dict(saved["method"])
    again.apply(resumed)
    if not load_first:
        again.load_state_dict(saved["method"])
    resumed.load_state_dict(saved["model"], strict=True)
    assert again.state_dict() == method.state_dict()
    for each in (method, again):
        each.step_begin(2)
    assert largest_difference(gradients(model, name), gradients(resumed, name)) == 0


# ------------------------------------------------------------------------------------------------ the meter
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(("row", "name"), CASES)
def test_nothing_hides_from_the_meter(row: str, name: str, precision: str) -> None:
    model, method = MODELS[name].create(), ROWS[row].create()
    size = MODELS[name].size
    kept = kept_after_forward(model, 2, (size, size), methods=[method], precision=precision)
    assert kept.hidden == ()
    assert kept.saved_bytes == kept.live_bytes


@pytest.mark.parametrize("row", ["lbp_wht", "lbp_dct"])
@pytest.mark.parametrize("name", ["vit", "efficientformer", "swinv2"])
def test_every_projected_layer_is_reached_and_costs_less(row: str, name: str) -> None:
    size = MODELS[name].size
    model, method = MODELS[name].create(), ROWS[row].create()
    exact = layer_flops(model, 4, (size, size))
    method.apply(model)
    low = layer_flops(model, 4, (size, size))
    assert method.applied is not None
    assert method.applied.touched
    for layer in method.applied.touched:
        assert low[layer].calls == 1
        assert 0 < low[layer].backward < exact[layer].backward


# ------------------------------------------------------------------------------------------------ stacking
@pytest.mark.parametrize(("row", "name"), CASES)
def test_only_selections_and_adapters_decide_what_trains(row: str, name: str) -> None:
    model = model_of(name)
    LastStage().apply(model)
    before = {n: p.requires_grad for n, p in model.named_parameters()}
    method = ROWS[row].create()
    assert ROWS[row].what_trains == (method.axis in ("selection", "adapters"))
    method.apply(model)
    if not ROWS[row].what_trains:
        assert {n: p.requires_grad for n, p in model.named_parameters()} == before


@pytest.mark.parametrize("name", ["vit", "swinv2"])
def test_the_order_of_the_list_never_matters(name: str) -> None:
    def trained(order: tuple[str, ...]) -> tuple[list[str], Gradients]:
        model, methods = model_of(name), [ROWS[row].create() for row in order]
        torch.manual_seed(1)
        reports = apply_methods(model, methods)
        stir(model)
        gradient = gradients(model, name)
        fresh = MODELS[name].create().double()
        fresh.load_state_dict(plain_state_dict(model, methods), strict=True)
        torch.testing.assert_close(evaluate(fresh, name), evaluate(model, name), rtol=1e-10, atol=1e-12)
        return [str(report) for report in reports], gradient

    orders = (("last_stage", "lora_all", "lbp_wht"), ("lbp_wht", "lora_all", "last_stage"))
    first, *others = (trained(order) for order in orders)
    for reports, gradient in others:
        assert reports == first[0]
        assert largest_difference(first[1], gradient) == 0


# ------------------------------------------------------------------------------------------------ 10: any model
@pytest.mark.parametrize(("row", "name"), CASES)
def test_mixed_precision_trains(row: str, name: str) -> None:
    model, method = applied_to(row, name)
    warm_up(model, method, name)
    model.float()
    images, labels = batch_of(name, torch.float32)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for _ in range(2):  # an adapter's A has a gradient once its B is not zero
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
    assert torch.isfinite(loss)
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    assert all(p.grad is not None or method.find_unused_parameters for p in trained.values())
    assert all(p.grad.dtype == p.dtype == torch.float32 for p in trained.values() if p.grad is not None)
    assert all(torch.isfinite(p).all() for p in trained.values())
    assert any((p != before[n]).any() for n, p in trained.items())


SMALL = re.compile(r"tiny|nano|pico|femto|atto|xxs|_xs|_x?s\d|mini|micro|_0\d\d|18|_b0")
LARGE = re.compile(r"base|large|huge|giant|_384|_448|_512")


def drawn(count: int) -> list[str]:
    """Small timm architectures that nobody named: families in a seeded order, one model of each."""
    chance = random.Random(20260)
    families = sorted(timm.list_modules())
    chance.shuffle(families)
    candidates = [
        [n for n in timm.list_models(module=family) if SMALL.search(n) and not LARGE.search(n)] for family in families
    ]
    return [chance.choice(names) for names in candidates if names][:count]


def small(architecture: str) -> tuple[nn.Module, Tensor]:
    """The model and images for it, of 96 pixels where its architecture allows that."""
    try:
        plain = timm.create_model(
            architecture, num_classes=CLASSES, pretrained_cfg_overlay={"input_size": (3, 96, 96), "pool_size": (3, 3)}
        )
        images = torch.randn(2, 3, 96, 96)
        plain(images)
    except Exception:  # timm's own, of many kinds
        plain = timm.create_model(architecture, num_classes=CLASSES)
        images = torch.randn(2, *plain.pretrained_cfg["input_size"])
    return plain, images


def worked_on_or_refused(architecture: str, rows: dict[str, Row]) -> None:
    torch.manual_seed(0)
    plain, images = small(architecture)
    names = list(plain.state_dict())
    for row in rows.values():
        model, method = copy.deepcopy(plain), row.create()
        try:
            report = method.apply(model)
        except UserError:
            assert list(model.state_dict()) == names
            continue
        assert report.touched or report.notes
        model.train()
        loss = F.cross_entropy(model(images), torch.tensor([0, 1]))
        loss.backward()
        assert torch.isfinite(loss)
        assert any(p.grad is not None for p in model.parameters())
        assert all(p.grad is None for p in model.parameters() if not p.requires_grad)
        exported = list(plain_state_dict(model, [method]))
        assert [n for n in exported if n in names] == names
        assert len(exported) == len(names) or not method.merges


# One of each way to change a model on every drawn one; the slow test takes all rows.
QUICK = {"last_stage": ROWS["last_stage"], "lora_all": ROWS["lora_all"], "lbp_wht": ROWS["lbp_wht"]}


@pytest.mark.parametrize("architecture", drawn(6))
def test_any_timm_model_is_worked_on_or_refused(architecture: str) -> None:
    worked_on_or_refused(architecture, QUICK)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", drawn(200))
def test_many_timm_models_are_worked_on_or_refused(architecture: str) -> None:
    worked_on_or_refused(architecture, ROWS)


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
