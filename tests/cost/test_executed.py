"""Tests of the counts against examples by hand, real runs, and known values of real models."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import timm
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

from efficient_ft.core.errors import UserError
from efficient_ft.cost import Executed, executed, kept_after_forward, layer_flops
from efficient_ft.cost.executed import ON_FAKE_TENSORS, count_batch
from efficient_ft.cost.meter import Meter
from efficient_ft.cost.probe import Probe, undisturbed
from efficient_ft.cost.step import StepMethods, StepSpec, forward_and_loss
from efficient_ft.methods import LBPWHT, LISA, LastStage
from efficient_ft.methods.base import Applied
from efficient_ft.methods.selection.static import Full
from efficient_ft.models.view import ModelView
from efficient_ft.optim import LowBitAdamW, step_in_backward
from tests.cost.flat import SMALL_SWIN, SMALL_VIT, Checkpointed, Flat

SMALL_EFFICIENTFORMER = {"depths": (1, 1, 1, 2)}


def really(model: nn.Module, batch: int, size: int, precision: str = "fp32") -> Executed:
    """Count a step on real tensors."""
    with undisturbed():
        return count_batch(Probe(model, (), StepSpec(batch, (size, size), precision, 0.1)), batch, fake=False)


# ---------------------------------------------------------------------------------------------- by hand
def test_a_small_network_by_hand():
    batch, inputs, hidden, classes = 5, 3 * 4 * 4, 7, 3
    count = executed(Flat(nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, classes)), batch, (4, 4))
    assert count.counted_on == ON_FAKE_TENSORS
    assert count.forward_flops == 2 * inputs * hidden + 2 * hidden * classes
    # the images require no gradient
    assert count.backward_flops == 2 * inputs * hidden + 4 * hidden * classes
    # images, ReLU output (shared with the second layer), log-softmax, labels and total weight of the loss
    assert count.saved_bytes * batch == 4 * batch * (inputs + hidden + classes) + 8 * batch + 4
    parameters = 4 * (inputs * hidden + hidden + hidden * classes + classes)
    assert count.model_bytes == parameters
    gradients = parameters
    floor = parameters + 4 * batch * inputs + 8 * batch  # model, images and labels are always in memory
    assert floor + gradients <= count.peak_bytes <= floor + gradients + count.saved_bytes * batch


def test_the_optimizer_by_hand():
    """With small activations, the peak consists of the model and its gradients."""
    side, batch, layers = 256, 2, 4
    model = Flat(*(nn.Linear(side, side, bias=False) for _ in range(layers)))
    one = 4 * side * side

    def counted(make) -> Executed:
        return executed(model, batch, (16, 16), in_chans=1, build_optimizer=lambda net: make(net.parameters()))

    plain = counted(lambda p: torch.optim.AdamW(p, fused=True))
    assert plain.optimizer_bytes == layers * (2 * one + 4)
    low = [counted(lambda p, bits=bits: LowBitAdamW(p, bits=bits)) for bits in (8, 4)]
    assert [count.optimizer_bytes for count in low] == [
        layers * (2 * (one // 4) + 10 * side * side // 128 + 4),
        layers * (2 * (one // 8) + 10 * side * side // 128 + 4),
    ]
    ordinary = executed(model, batch, (16, 16), in_chans=1)
    assert ordinary.optimizer_bytes is None
    assert {count.peak_bytes for count in (plain, *low)} == {ordinary.peak_bytes}
    assert ordinary.peak_bytes >= 2 * layers * one
    inside = counted(lambda p: step_in_backward(torch.optim.AdamW(p, fused=True)))
    # one gradient is stored at a time, and two while the next is computed
    assert layers * one + one <= inside.peak_bytes < layers * one + 2 * one
    assert (inside.optimizer_bytes, inside.flops) == (plain.optimizer_bytes, plain.flops)
    # an update that copies its parameter adds the copies to the peak
    several = counted(lambda p: step_in_backward(torch.optim.AdamW(p, foreach=False, fused=False)))
    assert several.peak_bytes >= inside.peak_bytes + one


@pytest.mark.slow
def test_the_optimizer_of_layers_that_train_in_some_steps():
    model = timm.create_model("vit_tiny_patch16_224", **SMALL_VIT, num_classes=10)
    counts = [
        executed(model, 2, (64, 64), methods=[LISA(num_layers=1)], build_optimizer=make)
        for make in (
            lambda net: LowBitAdamW(p for p in net.parameters() if p.requires_grad),
            lambda net: step_in_backward(LowBitAdamW(p for p in net.parameters() if p.requires_grad)),
        )
    ]
    every = executed(model, 2, (64, 64), build_optimizer=lambda net: LowBitAdamW(net.parameters()))
    assert {count.optimizer_bytes for count in counts} == {every.optimizer_bytes}, "each layer's, once it has trained"
    assert counts[1].peak_bytes <= counts[0].peak_bytes


def test_frozen_layers_below_the_first_trained_one_keep_and_compute_nothing():
    model = Flat(nn.Linear(48, 100), nn.ReLU(), nn.Linear(100, 10))
    model.layers[0].requires_grad_(False)
    count = executed(model, 4, (4, 4))
    assert count.backward_flops == 2 * 100 * 10
    assert count.saved_bytes * 4 == 4 * (4 * 100 + 4 * 10) + 8 * 4 + 4


def test_casts_of_weights_are_freed_before_the_backward_pass():
    frozen = nn.Linear(192, 4096).requires_grad_(False)
    model = nn.Sequential(nn.Flatten(), frozen, nn.Linear(4096, 10))
    images, labels = torch.randn(2, 3, 8, 8), torch.tensor([0, 1])
    with undisturbed(), Meter([*model.parameters(), images]) as meter:
        _, loss = forward_and_loss(model, StepMethods(()), images, labels, StepSpec(2, (8, 8), "bf16"))
        created = sum(tensor.nbytes for tensor in meter.created().values())
    assert loss.requires_grad
    assert created < frozen.weight.numel() * 2, "the cast of the frozen weight"


def test_autocast_counts_the_low_precision_copies():
    batch = 6
    count = executed(Flat(nn.Linear(48, 10, bias=False)), batch, (4, 4), precision="bf16")
    plain = executed(Flat(nn.Linear(48, 10, bias=False)), batch, (4, 4))
    # images in bf16 and logits in fp32; the weight's copy is not saved, because the images require no gradient
    assert count.saved_bytes * batch == 2 * batch * 48 + 4 * batch * 10 + 8 * batch + 4
    assert count.forward_flops == plain.forward_flops
    two = Flat(nn.Linear(48, 20, bias=False), nn.Linear(20, 10, bias=False))
    kept = executed(two, batch, (4, 4), precision="bf16").saved_bytes * batch
    assert kept == 2 * batch * (48 + 20) + 2 * 20 * 10 + 4 * batch * 10 + 8 * batch + 4


@pytest.mark.parametrize("groups", [1, 2, 8])
@pytest.mark.parametrize("transposed", [False, True])
def test_convolutions_cost_twice_the_forward_in_the_backward(groups: int, transposed: bool):
    """PyTorch's formula overestimates a grouped weight gradient by the factor `groups`."""
    kind = nn.ConvTranspose2d if transposed else nn.Conv2d

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Conv2d(3, 8, 1)
            self.conv = kind(8, 16, 3, stride=2, padding=1, groups=groups)
            self.head = nn.Linear(16, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.conv(self.stem(x)).mean((2, 3)))

    flops = layer_flops(Net(), 2, (12, 12))["conv"]
    positions = 12 * 12 if transposed else 6 * 6
    assert flops.forward == 2 * 8 * 16 // groups * 9 * positions
    assert flops.backward == 2 * flops.forward
    frozen = Net()
    frozen.stem.requires_grad_(False)  # the input of conv requires no gradient
    assert layer_flops(frozen, 2, (12, 12))["conv"].backward == flops.forward


def test_recomputation_is_counted_in_the_backward_pass_and_in_the_peak():
    def layers() -> list[nn.Module]:
        return [nn.Linear(48, 400), nn.GELU(), nn.Linear(400, 400), nn.GELU(), nn.Linear(400, 10)]

    plain, again = executed(Flat(*layers()), 64, (4, 4)), executed(Checkpointed(*layers()), 64, (4, 4))
    assert again.forward_flops == plain.forward_flops
    # recomputation stops at the last layer's input and skips its products
    missing = 2 * 400 * 10
    assert again.backward_flops in (
        plain.backward_flops + plain.forward_flops,
        plain.backward_flops + plain.forward_flops - missing,
    )
    assert again.saved_bytes < plain.saved_bytes / 3
    assert again.peak_bytes > again.model_bytes + plain.saved_bytes * 64  # recomputation stores all activations at once


# ---------------------------------------------------------------------------------------------- against real runs
@pytest.mark.parametrize(
    ("name", "arguments", "size", "precision"),
    [
        ("vit_tiny_patch16_224", {**SMALL_VIT, "drop_path_rate": 0.1}, 64, "fp32"),
        ("vit_tiny_patch16_224", SMALL_VIT, 64, "bf16"),
        ("deit_tiny_distilled_patch16_224", SMALL_VIT, 64, "fp32"),
        ("efficientformer_l1", SMALL_EFFICIENTFORMER, 224, "fp32"),
        pytest.param("efficientformerv2_s0", {}, 224, "fp32", marks=pytest.mark.slow),
        ("swinv2_tiny_window8_256", {**SMALL_SWIN, "drop_path_rate": 0.1}, 64, "fp32"),
        ("resnet18", {}, 64, "fp32"),
        ("resnet18", {}, 64, "bf16"),
    ],
)
def test_fake_tensors_count_what_a_real_run_counts(name: str, arguments: dict[str, Any], size: int, precision: str):
    model = timm.create_model(name, num_classes=10, **arguments)
    count = executed(model, 2, (size, size), precision=precision, label_smoothing=0.1)
    assert count.counted_on == ON_FAKE_TENSORS
    assert count == really(model, 2, size, precision)


def test_the_peak_is_the_allocators():
    """The counted peak equals the peak of the allocations reported by torch's profiler."""
    model = timm.create_model("vit_tiny_patch16_224", img_size=64, depth=2, num_classes=10).train()
    images, labels = torch.randn(32, 3, 64, 64), torch.zeros(32, dtype=torch.long)
    resident = sum(t.nbytes for t in [*model.parameters(), *model.buffers(), images, labels])
    with profile(profile_memory=True, activities=[ProfilerActivity.CPU]) as trace:
        logits = model(images)
        loss = F.cross_entropy(logits, labels, label_smoothing=0.1)
        loss.backward()
    allocations = [e for e in trace.profiler.kineto_results.events() if e.name() == "[memory]"]
    live = np.cumsum([e.nbytes() for e in sorted(allocations, key=lambda e: e.start_ns())])
    counted = executed(model, 32, (64, 64), label_smoothing=0.1).peak_bytes - resident
    assert counted == pytest.approx(live.max(), rel=0.001)


class Peeking(Flat):
    """A model that branches on a tensor value, which fake tensors do not have."""

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return x if float(x.detach().abs().sum()) >= 0 else -x


def test_a_model_that_looks_at_values_is_counted_by_real_runs_and_says_so():
    layers = [nn.Linear(48, 9), nn.ReLU(), nn.Linear(9, 5)]
    plain, peeking = executed(Flat(*layers), 40, (4, 4)), executed(Peeking(*layers), 40, (4, 4))
    assert "real runs of 4 and 8 images" in peeking.counted_on
    assert "DataDependent" in peeking.counted_on
    assert (peeking.forward_flops, peeking.backward_flops) == (plain.forward_flops, plain.backward_flops)
    assert peeking.saved_bytes == pytest.approx(plain.saved_bytes)
    assert peeking.batch_size == 40
    assert peeking.peak_bytes == pytest.approx(
        plain.peak_bytes, rel=0.1
    )  # the peak is the maximum of several linear functions
    few = executed(Peeking(*layers), 8, (4, 4))
    assert few.counted_on.startswith("a real run (DataDependent")
    assert few.peak_bytes == executed(Flat(*layers), 8, (4, 4)).peak_bytes


def test_a_model_with_a_fault_raises_its_own_error():
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        executed(Flat(nn.Linear(47, 5)), 8, (4, 4))


# ---------------------------------------------------------------------------------------------- known figures
def on_meta(name: str, **arguments: Any) -> nn.Module:
    """Create a model on the meta device, without memory or initial values."""
    with torch.device("meta"):
        return timm.create_model(name, **arguments)


def trained_last(model: nn.Module, *prefixes: str) -> nn.Module:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith(prefixes))
    return model


@pytest.mark.slow
def test_efficientformer_l1_last_stage():
    model = trained_last(on_meta("efficientformer_l1", num_classes=100), "stages.3", "norm", "head")
    count = executed(model, 32, (224, 224))
    assert count.backward_flops == pytest.approx(1585e6, rel=0.01)
    assert count.saved_bytes * 32 == pytest.approx(202.7 * 2**20, rel=0.001)


@pytest.mark.slow
def test_swinv2_small_last_stage_reaches_qkv():
    model = trained_last(on_meta("swinv2_small_window8_256", num_classes=100), "layers.3", "norm", "head")
    flops = layer_flops(model, 1, (256, 256))
    assert sum(f.backward for f in flops.values()) == pytest.approx(3827e6, rel=0.01)
    # the attention module uses the weight directly, so forward of qkv is never called
    assert flops["layers.3.blocks.0.attn.qkv"] == (2 * 768 * 3 * 768 * 64, 4 * 768 * 3 * 768 * 64, 0)
    assert flops["layers.0.blocks.0.mlp.fc1"].backward == 0
    assert flops["layers.3.blocks.0.mlp.fc1"].calls == 1


@pytest.mark.slow
def test_deit_small_fused_and_unfused():
    model = on_meta("deit_small_patch16_224")
    fused = executed(model, 16, (224, 224))
    assert fused.flops == pytest.approx(27.5e9, rel=0.005)
    assert fused.saved_bytes * 16 == pytest.approx(906 * 2**20, rel=0.001)
    for module in model.modules():
        if hasattr(module, "fused_attn"):
            module.fused_attn = False
    unfused = executed(model, 16, (224, 224))
    assert unfused.saved_bytes * 16 == pytest.approx(1076 * 2**20, rel=0.001)
    assert (unfused.forward_flops, unfused.backward_flops) == (fused.forward_flops, fused.backward_flops)


@pytest.mark.slow
def test_vit_base_with_a_large_batch():
    count = executed(on_meta("vit_base_patch16_224"), 128, (224, 224))
    assert count.flops == pytest.approx(105.1e9, rel=0.002)
    assert count.peak_bytes > 128 * count.saved_bytes > 10 * 2**30


# ---------------------------------------------------------------------------------------------- methods
@pytest.mark.slow
def test_methods_are_counted_and_left_as_they_are():
    model = timm.create_model("vit_tiny_patch16_224", img_size=64, depth=4, num_classes=10)
    methods = [LastStage(), LBPWHT(order=2)]
    exact = executed(model, 4, (64, 64), methods=[LastStage()])
    low = executed(model, 4, (64, 64), methods=methods)
    assert low.counted_on == ON_FAKE_TENSORS
    assert low.backward_flops < 0.5 * exact.backward_flops
    assert low.saved_bytes < exact.saved_bytes
    # methods are applied only to a copy of the model
    assert all(m.applied is None for m in methods)
    assert all(p.requires_grad for p in model.parameters())
    for method in methods:
        method.apply(model)
    assert executed(model, 4, (64, 64), methods=methods) == low
    flops = layer_flops(model, 4, (64, 64), methods=methods)
    assert flops["blocks.3.mlp.fc1"].backward < flops["blocks.3.mlp.fc1"].forward
    assert not kept_after_forward(model, 4, (64, 64), methods=methods).hidden


def test_methods_are_applied_to_a_copy_without_memory_for_its_weights():
    model = Flat(nn.Linear(48, 9), nn.ReLU(), nn.Linear(9, 5))
    probe = Probe(model, [Full()], StepSpec(4, (4, 4)))
    assert all(p.is_meta for p in probe.model.parameters())
    assert all(p.requires_grad and not p.is_meta for p in model.parameters())


class Looking(Full):
    """A method that reads weights when it is applied."""

    def _apply(self, model: nn.Module, view: ModelView) -> Applied:
        assert all(float(p.detach().abs().sum()) > 0 for p in model.parameters())
        return super()._apply(model, view)


def test_a_method_that_looks_at_weights_is_applied_to_a_real_copy():
    model = Flat(nn.Linear(48, 9), nn.ReLU(), nn.Linear(9, 5))
    assert executed(model, 4, (4, 4), methods=[Looking()]) == executed(model, 4, (4, 4), methods=[Full()])


@pytest.mark.parametrize("batch", [4, 40])
def test_methods_not_yet_applied_are_counted_by_real_runs_as_well(batch: int):
    layers = [nn.Linear(48, 9), nn.ReLU(), nn.Linear(9, 5)]
    plain, peeking = (executed(of(*layers), batch, (4, 4), methods=[Full()]) for of in (Flat, Peeking))
    assert "real run" in peeking.counted_on
    assert peeking.backward_flops == plain.backward_flops


@pytest.mark.slow
def test_a_method_that_profiles_first_is_counted_in_its_steady_step():
    # with an 8×8 grid, the chosen bases are distinct
    model = timm.create_model("vit_tiny_patch16_224", img_size=128, num_classes=10, depth=2)
    shape = (128, 128)
    chosen = executed(model, 4, shape, methods=[LBPWHT(bases="lhe", order=2, profile_steps=2)])
    fixed = executed(model, 4, shape, methods=[LBPWHT(order=2)])
    assert chosen.counted_on == ON_FAKE_TENSORS
    # the cost of the bias gradient depends on whether the constant base is chosen
    assert chosen.backward_flops == pytest.approx(fixed.backward_flops, rel=0.001)
    assert chosen.backward_flops < 0.5 * executed(model, 4, shape).backward_flops


# ---------------------------------------------------------------------------------------------- hidden tensors
@pytest.mark.parametrize(
    ("name", "arguments", "size", "precision"),
    [
        ("vit_tiny_patch16_224", SMALL_VIT, 64, "fp32"),
        ("vit_tiny_patch16_224", SMALL_VIT, 64, "bf16"),
        ("efficientformer_l1", SMALL_EFFICIENTFORMER, 224, "fp32"),
        ("swinv2_tiny_window8_256", SMALL_SWIN, 64, "fp32"),
        ("resnet18", {}, 64, "fp32"),
    ],
)
def test_what_lives_after_the_forward_pass_is_what_the_hook_saw(
    name: str, arguments: dict[str, Any], size: int, precision: str
):
    kept = kept_after_forward(timm.create_model(name, **arguments), 2, (size, size), precision=precision)
    assert kept.hidden == ()
    assert kept.saved_bytes == kept.live_bytes > 0


def test_a_real_run_shows_the_same():
    model = timm.create_model("resnet18", num_classes=10)
    assert kept_after_forward(model, 2, (64, 64), fake=False) == kept_after_forward(model, 2, (64, 64))


class _Hiding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.copy = x.half()  # saved without save_for_backward
        return x * 2

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * 2 + 0 * ctx.copy


class Hiding(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return _Hiding.apply(x)


def test_what_hides_from_the_hook_is_found():
    kept = kept_after_forward(Flat(nn.Linear(48, 20), Hiding(), nn.Linear(20, 5)), 3, (4, 4))
    assert [(made.shape, made.nbytes) for made in kept.hidden] == [((3, 20), 2 * 3 * 20)]
    assert kept.live_bytes - kept.saved_bytes == 2 * 3 * 20


# ---------------------------------------------------------------------------------------------- state of the caller
@pytest.mark.slow
def test_nothing_of_the_users_is_disturbed():
    model = timm.create_model("efficientformer_l1", num_classes=10, drop_path_rate=0.2).eval()
    with torch.no_grad():
        model(torch.zeros(1, 3, 224, 224))  # fills the attention bias cache
    caches = {n: m.attention_bias_cache for n, m in model.named_modules() if hasattr(m, "attention_bias_cache")}
    assert any(caches.values())
    cached = {n: dict(c) for n, c in caches.items()}
    model.stem.train()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    flags = {n: m.training for n, m in model.named_modules()}
    gradients = {n: (p.grad, p.grad.sum().item(), p.data_ptr()) for n, p in model.named_parameters()}
    values = {n: t.clone() for n, t in model.state_dict().items()}
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()  # noqa: NPY002

    with torch.no_grad():  # the caller's grad mode has no effect
        layer_flops(model, 2, (224, 224))
        kept_after_forward(model, 1, (224, 224), fake=False)

    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert np.array_equal(np.random.get_state()[1], states[2])  # noqa: NPY002
    assert {n: m.training for n, m in model.named_modules()} == flags
    assert all(torch.equal(t, values[n]) for n, t in model.state_dict().items())
    for name, parameter in model.named_parameters():
        gradient, total, pointer = gradients[name]
        assert parameter.grad is gradient
        assert (gradient.sum().item(), parameter.data_ptr()) == (total, pointer)
    for name, cache in caches.items():
        assert all(cache[k] is v for k, v in cached[name].items())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    model.train()(torch.randn(2, 3, 224, 224)).sum().backward()  # the model can still be trained


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"precision": "int8"}, "precision must be one of fp32, bf16, fp16, got int8"),
        ({"batch_size": 0}, "batch_size must be an integer >= 1, got 0"),
        ({"input_size": (4,)}, r"input_size must be a pair \(height, width\) of integers >= 1, got \(4,\)"),
        ({"input_size": (4, 0)}, r"input_size must be .*, got \(4, 0\)"),
        ({"in_chans": 1.5}, "in_chans must be an integer >= 1, got 1.5"),
    ],
)
def test_settings_out_of_range_are_refused(arguments: dict[str, Any], message: str):
    given = {"batch_size": 2, "input_size": (4, 4), **arguments}
    with pytest.raises(UserError, match=message):
        executed(Flat(nn.Linear(48, 5)), **given)


def test_a_model_without_logits_is_refused():
    class Pair(Flat):
        def forward(self, x: Tensor) -> Any:
            return super().forward(x), x

    with pytest.raises(UserError, match="Pair must return logits"):
        executed(Pair(nn.Linear(48, 5)), 2, (4, 4))


def test_without_weights_the_error_of_a_model_is_raised() -> None:
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.head = nn.Conv2d(3, 4, 8, 8), nn.Linear(4, 5)

        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                raise RuntimeError("this model cannot be trained")
            logits: Tensor = self.head(self.conv(x).mean((2, 3)))
            return logits

    with torch.device("meta"):
        model = Broken()
    with pytest.raises(RuntimeError, match="this model cannot be trained"):
        executed(model, 2, (32, 32))
