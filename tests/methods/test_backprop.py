"""Tests of LBP-WHT and LBP-DCT on real models: predicted costs, projected layers and the basis choice of LHE."""

from __future__ import annotations

import copy
import pickle
import re

import pytest
import timm
import torch
from torch import nn

from efficient_ft.core.errors import SettingError, UserError
from efficient_ft.cost import executed, layer_flops
from efficient_ft.methods import LBPDCT, LBPWHT, Full, LastStage, apply_methods
from efficient_ft.methods.backprop.low_rank import LowRank, LowRankConv2d, LowRankLinear
from efficient_ft.models.view import Reason, TokenLayout, view
from efficient_ft.ops.projection import CosineProjector, Projection, WalshProjector, low_pass_l1
from efficient_ft.testing import batch_of, model_of

# A pattern of all layers that the paper projects, for each model.
NAMED = {
    "efficientformer_l1": r"stages\.\d\.blocks\.\d+\.(mlp\.fc[12]|token_mixer\.(qkv|proj))",
    "efficientformer_l7": r"stages\.\d\.blocks\.\d+\.(mlp\.fc[12]|token_mixer\.(qkv|proj))",
    "efficientformerv2_s0": (
        r"stages\.\d\.(blocks\.\d+\.(mlp\.fc[12]\.conv|token_mixer\.([qkv]|proj)\.conv|token_mixer\.talking_head[12])"
        r"|downsample\.attn\.(q\.proj|k|v|proj)\.conv)"
    ),
    "swinv2_small_window8_256": (r"layers\.\d\.(blocks\.\d+\.(attn\.(qkv|proj)|mlp\.fc[12])|downsample\.reduction)"),
}
NAMED["efficientformerv2_l"] = NAMED["efficientformerv2_s0"]
#: Large models, which only exhaustive runs test. The contracts test small models of the same families.
LARGE = ("efficientformer_l7", "efficientformerv2_s0", "efficientformerv2_l", "swinv2_small_window8_256")
SIZE = {"swinv2_small_window8_256": 256}


@pytest.fixture(scope="module")
def pristine():
    """Return a function that copies a cached architecture with random weights."""
    made: dict[str, nn.Module] = {}

    def get(name: str) -> nn.Module:
        if name not in made:
            made[name] = timm.create_model(name, num_classes=100)
        return copy.deepcopy(made[name])

    return get


def backward_mflops(model: nn.Module, size: int, *methods) -> float:
    # A batch of 64 images amortizes the costs per batch, for example of SwinV2's position MLP.
    return executed(model, 64, (size, size), methods=[LastStage(), *methods]).backward_flops / 1e6


@pytest.mark.slow
@pytest.mark.first(1, "slow")
@pytest.mark.parametrize(
    ("order", "padding", "expected"),
    [
        (2, "ortho", 198), (4, "ortho", 425), (8, "ortho", 1202), (8, "zero", 1267),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in [
            (6, "ortho", 781), (2, "zero", 198), (4, "zero", 425), (6, "zero", 781),
            (2, "reflect", 198), (4, "reflect", 425), (6, "reflect", 781), (8, "reflect", 1267),
        ]),
    ],
)  # fmt: skip
def test_efficientformer_l1_last_stage_costs_what_was_predicted(pristine, order, padding, expected):
    found = backward_mflops(pristine("efficientformer_l1"), 224, LBPWHT(order=order, padding=padding))
    assert found == pytest.approx(expected, rel=0.03)


@pytest.mark.slow
def test_the_exact_last_stages_cost_what_was_predicted(pristine):
    assert backward_mflops(pristine("efficientformer_l1"), 224) == pytest.approx(1585, rel=0.01)
    assert backward_mflops(pristine("swinv2_small_window8_256"), 256) == pytest.approx(3827, rel=0.01)


@pytest.mark.slow
def test_swinv2_small_last_stage_all_nine_linears_reached(pristine):
    model, method = pristine("swinv2_small_window8_256"), LBPWHT(order=4)
    assert backward_mflops(model, 256, method) == pytest.approx(674, rel=0.03)
    apply_methods(model, [LastStage(), method])
    last = [n for n in method.applied.touched if n.startswith("layers.3")]
    assert len(last) == 9
    assert all(layer.calls == 1 for n, layer in layer_flops(model, 1, (256, 256)).items() if n in last)


@pytest.mark.slow
def test_swinv2_as_published_leaves_qkv_exact(pristine):
    model = pristine("swinv2_small_window8_256")
    applied = LBPWHT(padding="reflect", as_published=True).apply(model)
    assert not any(n.endswith("qkv") for n in applied.touched)
    assert applied.skipped["layers.3.blocks.0.attn.qkv"].reason == Reason.AS_PUBLISHED


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.exhaustive] if n in LARGE else []) for n in NAMED])
def test_every_named_layer_falls_by_the_predicted_amount(pristine, name):
    """In full training with forced projections, exactly the named layers are projected, with the predicted FLOPs."""
    model, size = pristine(name), SIZE.get(name, 224)
    exact = layer_flops(model, 1, (size, size), methods=[Full()])
    method = LBPWHT(order=4, padding="zero", as_published=name != "swinv2_small_window8_256")
    applied = method.apply(model)
    named = {n for n, m in model.named_modules() if re.fullmatch(NAMED[name], n)}
    assert set(applied.touched) == named
    low = layer_flops(model, 1, (size, size))
    layers = {layer.name: layer for layer in view(model).layers}
    for n in named:
        layer = layers[n]
        projection = WalshProjector(low_pass_l1(4), "zero").projection(layer.tokens.grid, 0, layer.channels)
        c_in, c_out = layer.channels
        windows = exact[n].forward // (2 * c_in * c_out * projection.tokens)  # number of windows
        project = projection.flops * windows
        assert exact[n].backward == pytest.approx(4 * c_in * c_out * projection.tokens * windows)
        # k and v reuse the projected input of q. In a downsampling attention, v reuses the projected input of k.
        projected = 0 if re.search(r"(token_mixer\.[kv]|attn\.v)\.conv$", n) else c_in * project
        assert low[n].forward == pytest.approx(exact[n].forward + projected)
        # The bias gradient is a linear combination of the coefficients, summed over images and windows.
        bias = 0 if layer.module.bias is None else 2 * projection.rank * c_out
        expected = 4 * c_in * c_out * projection.rank * windows + (c_in + c_out) * project + bias
        assert low[n].backward == pytest.approx(expected)
        assert low[n].calls == 1
    for n in set(exact) - named:
        assert low[n].backward == exact[n].backward, n


@pytest.mark.slow
def test_a_layer_that_would_cost_more_stays_exact_and_is_reported(pristine):
    model = pristine("efficientformerv2_s0")
    applied = LBPWHT().apply(model)
    talking = [n for n in applied.skipped if "talking_head" in n]
    assert len(talking) == 8
    assert all(applied.skipped[n].reason == Reason.EXACT_IS_CHEAPER for n in talking)
    assert all(type(model.get_submodule(n)) is nn.Conv2d for n in talking)
    assert "layers keep the exact backward pass" in applied.notes[0]


@pytest.mark.slow
def test_evaluation_is_the_plain_layer_and_training_is_not(pristine):
    model = pristine("efficientformer_l1")
    plain = copy.deepcopy(model)
    LBPWHT(order=2).apply(model)
    x = torch.randn(2, 3, 224, 224)
    assert torch.equal(model.eval()(x), plain.eval()(x))
    kinds = {type(m) for m in model.modules()}
    assert {LowRankLinear, LowRankConv2d} <= kinds


def vit(**kwargs) -> nn.Module:
    torch.manual_seed(0)
    return timm.create_model(
        "vit_tiny_patch16_224", img_size=56, patch_size=8, depth=2, num_classes=5, global_pool="avg", **kwargs
    )


def step(model: nn.Module, seed: int = 0) -> dict[str, torch.Tensor]:
    """Run one training step and return its gradients."""
    generator = torch.Generator().manual_seed(seed)
    model.train().zero_grad()
    model(torch.randn(4, 3, 56, 56, generator=generator)).logsumexp(1).sum().backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def test_lhe_profiles_exactly_then_chooses_per_layer():
    model, exact = vit(), step(vit())
    method = LBPWHT(bases="lhe", order=3, profile_steps=2)
    method.apply(model)
    assert method.warmup_steps == 2
    for k in range(2):
        method.step_begin(k)
        gradients = step(model)
        for n, g in gradients.items():
            torch.testing.assert_close(g, exact[n], msg=lambda m, n=n: f"{n}: profiling must be exact. {m}")
        method.step_end()
    state = method.state_dict()
    chosen = {n: {tuple(p) for p in pairs} for n, pairs in state["chosen"].items()}
    assert set(chosen) == set(method.applied.touched)
    assert all(len(pairs) == 6 for pairs in chosen.values())
    assert state["energy"] == {}
    low = step(model)
    assert not torch.allclose(low["blocks.0.attn.qkv.weight"], exact["blocks.0.attn.qkv.weight"], rtol=1e-2)


def test_lhe_chooses_the_bases_of_most_energy():
    model = vit()
    method = LBPWHT(bases="lhe", order=2, profile_steps=1)
    method.apply(model)
    seen: list[torch.Tensor] = []
    layer = model.blocks[1].mlp.fc1
    layer.register_full_backward_hook(lambda m, g_in, g_out: seen.append(g_out[0]))
    step(model)
    method.step_end()
    from tests.ops import reference

    every = [(i, j) for i in range(8) for j in range(8)]
    energy = sum(
        (reference.coefficients(g[1:].reshape(7, 7, -1).double().numpy(), every, "zero") ** 2).sum(1) for g in seen[0]
    )
    top = {every[k] for k in energy.argsort()[-3:]}
    assert set(layer.low_rank.projector.pairs) == top


def test_lhe_falls_back_to_low_pass_where_no_gradient_reaches_the_grid():
    model = timm.create_model("vit_tiny_patch16_224", img_size=56, patch_size=8, depth=2, num_classes=5)
    method = LBPWHT(bases="lhe", order=3, profile_steps=1)
    method.apply(model)
    step(model)
    method.step_end()
    assert model.blocks[1].mlp.fc1.low_rank.projector.pairs == low_pass_l1(3)  # The head reads only the class token.
    assert model.blocks[0].mlp.fc1.low_rank.projector.pairs != low_pass_l1(3)


def test_lhe_counts_no_pass_that_overflowed():
    model, method = vit(), LBPWHT(bases="lhe", order=2, profile_steps=2)
    method.apply(model)
    step(model)
    method.step_end()
    shares = {n: torch.tensor(e) for n, e in method.state_dict()["energy"].items()}
    (model(torch.randn(2, 3, 56, 56)).sum() * torch.inf).backward()
    for n, e in method.state_dict()["energy"].items():
        assert torch.equal(torch.tensor(e), shares[n])


@pytest.mark.parametrize("done", [1, 3])
def test_lhe_state_travels(done):
    """A run resumed during or after the profile makes the same choices as an uninterrupted run."""
    settings = {"bases": "lhe", "order": 3, "profile_steps": 2}
    straight, method = vit(), LBPWHT(**settings)
    method.apply(straight)
    for k in range(done):
        step(straight, k)
        method.step_end()
    resumed, other = vit(), LBPWHT(**settings)
    state = pickle.loads(pickle.dumps(method.state_dict()))
    if done == 1:
        other.load_state_dict(state)  # before `apply`
        other.apply(resumed)
    else:
        other.apply(resumed)
        other.load_state_dict(state)
    for k in range(done, 4):
        for a, b in zip(step(straight, k).values(), step(resumed, k).values(), strict=True):
            assert torch.equal(a, b)
        method.step_end()
        other.step_end()
    assert method.state_dict() == other.state_dict()


@pytest.mark.parametrize("method", [LBPWHT(order=3), LBPDCT(order=3), LBPWHT(bases="linf", order=2, padding="zero")])
def test_a_low_rank_step_differs_from_exact_and_keeps_biases_exact_in_the_last_layer(method):
    model, exact = vit(), step(vit())
    copy.deepcopy(method).apply(model)
    low = step(model)
    assert low.keys() == exact.keys()
    torch.testing.assert_close(low["blocks.1.mlp.fc2.bias"], exact["blocks.1.mlp.fc2.bias"])
    torch.testing.assert_close(low["head.weight"], exact["head.weight"])
    for n in ("blocks.0.mlp.fc1.weight", "blocks.0.attn.qkv.weight"):
        assert ((low[n] - exact[n]).norm() / exact[n].norm()).item() > 0.01


@pytest.mark.parametrize(
    ("settings", "setting"),
    [
        ({"bases": "l2"}, "bases"), ({"order": 0}, "order"), ({"order": 16}, "order"),
        ({"order": 2.5}, "order"), ({"order": "4"}, "order"), ({"order": True}, "order"),
        ({"bases": "linf", "order": 9}, "order"), ({"padding": "mirror"}, "padding"), ({"profile_steps": 0}, "profile"),
    ],
)  # fmt: skip
def test_settings_out_of_range_are_refused_by_name(settings, setting):
    with pytest.raises(SettingError, match=setting):
        LBPWHT(**settings)


def test_dct_order_out_of_range():
    with pytest.raises(SettingError, match=r"order must be .*, got 16"):
        LBPDCT(order=16)


def test_reflect_on_a_grid_too_small_is_refused_with_layer_and_reason():
    model = timm.create_model("vit_tiny_patch16_224", img_size=48, depth=1, num_classes=2)  # a grid of 3×3 tokens
    with pytest.raises(UserError, match=r"blocks\.0\.attn\.qkv on a 3×3 grid.*mirrored rows.*padding=ortho"):
        LBPWHT(padding="reflect").apply(model)
    assert not any(isinstance(m, LowRankLinear) for m in model.modules())


def test_a_refusal_leaves_the_model_as_it_was():
    model = timm.create_model("resnet26", num_classes=2)
    model.pretrained_cfg = {**model.pretrained_cfg, "input_size": (3, 96, 96)}  # a 3×3 grid only in the last stage
    with pytest.raises(UserError, match=r"layer4.*3×3 grid"):
        LBPWHT(padding="reflect").apply(model)
    assert not any(isinstance(m, LowRankConv2d) for m in model.modules())


def test_two_projectors_are_refused():
    model = vit()
    LBPWHT().apply(model)
    with pytest.raises(
        UserError,
        match=r"lbp_dct: lbp_wht has been applied .*, and both methods replace",
    ):
        LBPDCT().apply(model)


def test_one_object_serves_one_model():
    method, model = LBPWHT(), vit()
    applied = method.apply(model)
    assert method.apply(model) is applied
    both = copy.deepcopy((model, method))
    assert both[1].apply(both[0]).touched == applied.touched
    with pytest.raises(UserError, match="applied to another model"):
        method.apply(vit())


def test_tokens_of_another_size_that_do_not_come_from_images_are_named():
    model = vit(dynamic_img_size=True)
    LBPWHT(order=2).apply(model)
    model.train()(torch.randn(2, 3, 64, 64))  # the grid follows the image size, see test_image_sizes
    with pytest.raises(ValueError, match="received 26 tokens, but 1 prefix tokens and a grid of"):
        model.blocks[0](torch.randn(2, 26, 192, requires_grad=True))


def test_a_model_with_nothing_to_project_is_refused():
    with pytest.raises(UserError, match="lbp_wht: no part of the model ResNet can be changed"):
        LBPWHT().apply(timm.create_model("resnet18", num_classes=2))


def test_frozen_layers_below_the_lowest_trained_one_run_plain():
    model = vit()
    apply_methods(model, [LastStage(), LBPWHT(order=2)])
    gradients = step(model)
    assert not any(n.startswith("blocks.0") for n in gradients)
    saved: list[tuple[int, ...]] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(tuple(t.shape)) or t, lambda t: t):
        model.blocks[0](model.norm_pre(torch.randn(4, 50, 192)))
    assert saved == []


@pytest.mark.parametrize("method", [LBPWHT(padding="ortho"), LBPDCT(order=4)], ids=lambda method: method.name)
def test_gradients_do_not_depend_on_the_memory_format(method):
    plain, found = model_of("resnet"), []
    for form in (torch.contiguous_format, torch.channels_last):
        model = copy.deepcopy(plain).to(memory_format=form)
        apply_methods(model, [Full(), type(method)(**method.settings())])
        images, labels = batch_of("resnet")
        torch.nn.functional.cross_entropy(model(images.to(memory_format=form)), labels).backward()
        found.append([p.grad for p in model.parameters()])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


def test_copies_of_a_layer_do_not_contain_its_projection():
    how = LowRank(CosineProjector(2), TokenLayout("tokens", (7, 7), 1))
    projection = how.projection((7, 7), (3, 4))
    assert how.projection((7, 7), (3, 4)) is projection
    assert how.projection((5, 5), (3, 4)).tokens == 26
    for copied in (copy.deepcopy(how), pickle.loads(pickle.dumps(how))):
        assert not any(isinstance(value, Projection) for value in [*vars(copied).values(), *copied._last])
        assert copied.projection((7, 7), (3, 4)) is projection
    how.projector = CosineProjector(3)  # as after profiling
    assert how.projection((7, 7), (3, 4)) is not projection
