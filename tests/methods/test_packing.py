"""Tests of packing on real models: frozen blocks, non-finite steps, separate noise, recomputation and old states."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from efficient_ft.core.errors import UserError
from efficient_ft.methods import (
    SWAT,
    BackRazor,
    Checkpointing,
    Compact,
    LowBit,
    Mesa,
    Method,
    UniformLayers,
    apply_methods,
)
from efficient_ft.methods.forwards import forwards_of
from efficient_ft.testing import batch_of, gradients, lively, model_of


def relative_error(exact: dict[str, Tensor], found: dict[str, Tensor], within: str = "") -> float:
    names = [name for name, g in exact.items() if within in name and g is not None]
    a, b = (torch.cat([g[name].flatten() for name in names]) for g in (exact, found))
    return float((a - b).norm() / a.norm())


def again(method: Method) -> Any:
    return type(method)(**method.settings())


RANGED = [
    Mesa(),
    Mesa(recompute_inputs=False),
    Mesa(attention="fused"),
    BackRazor(value_dtype="int8"),
    BackRazor(attention="fused"),
]


@pytest.mark.vary_one(slow=True)
@pytest.mark.parametrize("method", RANGED, ids=repr)
@pytest.mark.parametrize("name", ["vit", "resnet"])
def test_a_block_that_paused_has_the_ranges_of_its_own_tensors(method: Method, name: str) -> None:
    """A step with a frozen block records the same ranges as a step that trains all blocks."""
    if name == "resnet" and isinstance(method, BackRazor) and method.attention == "fused":
        pytest.skip("only attention has ranges")
    model, method = model_of(name), again(method)
    prefix = "blocks.2" if name == "vit" else "layer2"
    straight, steady = copy.deepcopy(model), again(method)
    exact = gradients(copy.deepcopy(model), name)
    for net, packing, pauses in ((model, method, True), (straight, steady, False)):
        packing.apply(net)
        net.get_submodule(prefix).requires_grad_(not pauses)
        gradients(net, name)
        packing.step_end()
        net.get_submodule(prefix).requires_grad_(True)
    errors = [relative_error(exact, gradients(net, name), prefix) for net in (model, straight)]
    assert errors[0] < 1.1 * errors[1] + 1e-3
    ranges = [m.state_dict()["ranges"]["by_name"] for m in (method, steady)]
    assert ranges[0].keys() == ranges[1].keys()
    assert {key: value[:2] for key, value in ranges[0].items()} == {key: value[:2] for key, value in ranges[1].items()}


def test_ranges_in_a_stack_that_samples_blocks_stay_with_their_tensors() -> None:
    """The ranges of a run with sampled blocks equal the ranges of a run that trains all blocks."""
    model, method, full = model_of("vit"), Mesa(), Mesa()
    straight, selection = copy.deepcopy(model), UniformLayers(num_layers=1)
    apply_methods(model, [selection, method])
    full.apply(straight)
    for step in range(4):
        selection.step_begin(step)
        for net in (model, straight):
            gradients(net, "vit")
        for one in (selection, method, full):
            one.step_end()
    found, expected = (m.state_dict()["ranges"]["by_name"] for m in (method, full))
    assert found
    for name, (low, high, _) in found.items():  # equal batches and weights have equal extremes
        torch.testing.assert_close(torch.tensor([low, high]), torch.tensor(expected[name][:2]))


def of_activations(state: dict[str, Any]) -> dict[str, Any]:
    """Return the ranges, or SWAT's thresholds, of activations. The thresholds of weights have keys without a slash."""
    return {k: v for k, v in state.get("of", {}).items() if "/" in k} or state.get("ranges", {}).get("by_name", {})


@pytest.mark.vary_one
@pytest.mark.parametrize(
    "method",
    [Mesa(), BackRazor(value_dtype="int8"), Checkpointing(input_dtype="int8"), SWAT(refresh_interval=1)],
    ids=repr,
)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_batch_that_is_not_finite_leaves_no_trace(method: Method, bad: float) -> None:
    model, method = model_of("vit"), again(method)
    method.apply(model)
    images = batch_of("vit")[0]
    wrong = images.clone()
    wrong[0, 0, 0, 0] = bad
    for first in (wrong, images, wrong):
        before = method.state_dict()
        model.zero_grad()
        model(first).sum().backward()
        if first is wrong:
            assert not all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
        method.step_end()
        if first is wrong:
            after = method.state_dict()
            assert of_activations(after) == of_activations(before)
    model.zero_grad()
    assert all(g.isfinite().all() for g in gradients(model, "vit").values() if g is not None)


# ------------------------------------------------------------------------------------------------ noise
@pytest.mark.first(1, "exhaustive")
@pytest.mark.parametrize(
    "method",
    [Mesa(), BackRazor(value_dtype="int8"), LowBit(2, rounding="stochastic"), Checkpointing(input_dtype="int8")],
)
def test_rounding_leaves_torch_s_generator_to_dropout(method: Method) -> None:
    """Stochastic rounding does not use torch's generator, so that dropout and drop path equal plain training."""
    model = timm.create_model(
        "vit_tiny_patch16_224", img_size=32, depth=3, embed_dim=48, num_heads=3, num_classes=5, drop_path_rate=0.5,
        proj_drop_rate=0.3, attn_drop_rate=0.2,
    )  # fmt: skip
    lively(model).train()
    found = []
    for packs in (False, True):
        net = copy.deepcopy(model)
        if packs:
            again(method).apply(net)
        torch.manual_seed(3)
        y = net(torch.ones(4, 3, 32, 32))
        y.sum().backward()
        found.append((y.detach(), torch.get_rng_state()))
    (plain, state), (packed, state_packed) = found
    torch.testing.assert_close(packed, plain, rtol=1e-5, atol=1e-6)
    assert torch.equal(state_packed, state)


@pytest.mark.first(1, "slow")
@pytest.mark.parametrize("method", [Mesa(), LowBit(4, rounding="stochastic")], ids=repr)
def test_noise_follows_from_seed_and_step_and_continues_from_a_checkpoint(method: Method) -> None:
    def run(steps: range, state: dict[str, Any] | None = None, seed: int = 1) -> tuple[list[Any], Any]:
        torch.manual_seed(seed)
        model, one = model_of("vit"), again(method)
        one.apply(model)
        if state is not None:
            torch.manual_seed(99)
            one.load_state_dict(state)
        found = []
        for _ in steps:
            torch.rand(3)  # Other uses of torch's generator have no effect.
            found.append(gradients(model, "vit"))
            one.step_end()
        return found, one.state_dict()

    straight, _ = run(range(3))
    first, state = run(range(1))
    rest, _ = run(range(1, 3), state)
    for a, b in zip(straight, first + rest, strict=True):
        assert all(torch.equal(a[key], b[key]) for key in a)
    name = "blocks.3.attn.qkv.weight"
    assert not torch.equal(run(range(1), seed=2)[0][0][name], straight[0][name])


# ------------------------------------------------------------------------------------------------ position networks
POSITION_NETWORKS: dict[str, dict[str, Any]] = {
    "swinv2_tiny_window8_256": {"window_size": 4, "embed_dim": 64, "depths": (1, 1), "num_heads": (4, 8)},
    "vit_relpos_small_patch16_224": {"depth": 2, "embed_dim": 64, "num_heads": 4},
    "vit_relpos_base_patch32_plus_rpn_256": {"depth": 2, "embed_dim": 64, "num_heads": 4, "patch_size": 16},
}


@pytest.mark.slow
@pytest.mark.first(1, "slow")
@pytest.mark.parametrize("name", POSITION_NETWORKS)
def test_gradients_of_networks_of_positions_are_near_the_exact_ones(name: str) -> None:
    torch.manual_seed(0)
    model = timm.create_model(name, img_size=64, num_classes=5, drop_path_rate=0, **POSITION_NETWORKS[name])
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    lively(model.double())
    x = torch.randn(3, 3, 64, 64, dtype=torch.float64)

    def found(net: nn.Module) -> dict[str, Tensor]:
        net.train().zero_grad()
        F.cross_entropy(net(x), torch.arange(3)).backward()
        return {key: p.grad.clone() for key, p in net.named_parameters() if p.grad is not None}

    exact, part = found(copy.deepcopy(model)), "cpb_mlp" if "swinv2" in name else "rel_pos"
    for method in (Mesa(), LowBit(), LowBit(8), LowBit(attention="unfused"), Compact()):
        net = copy.deepcopy(model)
        report = method.apply(net)
        assert relative_error(exact, found(net), part) < (0.1 if method.name != "compact" else 1e-6), method
        assert (method.name == "low_bit" and method.bits == 4) == any("saved in 8 bits" in n for n in report.notes)


# ------------------------------------------------------------------------------------------------ rejected models
@pytest.mark.parametrize("method", [Mesa(), BackRazor(), LowBit(), Compact(), SWAT(), Checkpointing()], ids=repr)
def test_checkpointing_of_the_model_s_own_after_packing_is_refused(method: Method) -> None:
    model, method = model_of("vit"), again(method)
    method.apply(model)
    model.set_grad_checkpointing(True)  # type: ignore[operator]
    with pytest.raises(UserError, match=rf"method {method.name}: .*set_grad_checkpointing\(False\)"):
        gradients(model, "vit")
    model.set_grad_checkpointing(False)  # type: ignore[operator]
    model.zero_grad()
    gradients(model, "vit")


@pytest.mark.slow
def test_attention_with_one_key_head_stays_torch_s_and_is_named() -> None:
    model = timm.create_model("mobilenetv4_hybrid_medium", num_classes=5).train()
    for method in (Mesa(), BackRazor(), LowBit(attention="unfused")):
        net = copy.deepcopy(model)
        assert any("scaled_dot_product_attention" in note for note in method.apply(net).notes)
        net(torch.randn(2, 3, 64, 64)).sum().backward()


def test_the_layers_of_a_list_after_the_blocks_are_packed() -> None:
    class WithList(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            settings = {"img_size": 32, "patch_size": 8, "depth": 2, "embed_dim": 48, "num_heads": 3}
            self.net = timm.create_model("vit_tiny_patch16_224", num_classes=0, **settings)
            self.extra = nn.ModuleList([nn.Linear(48, 48) for _ in range(2)])
            self.head = nn.Linear(48, 5)

        def forward(self, x: Tensor) -> Tensor:
            x = self.net.forward_features(x)
            for layer in self.extra:
                x = nn.functional.gelu(layer(x))
            logits: Tensor = self.head(x[:, 0])
            return logits

    model = WithList()
    LowBit().apply(model)
    assert all(forwards_of(layer) for layer in model.extra)
    assert not forwards_of(model.extra)
