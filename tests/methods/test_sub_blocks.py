"""Tests of blocks that run as chains: results, names and saved bytes are those of the mode `PackedOperations`."""

from __future__ import annotations

import copy
import pickle
import sys
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel

from efficient_ft.cost.meter import Meter
from efficient_ft.methods import METHODS, apply_methods
from efficient_ft.methods.memory.sub_blocks import PackedBlock
from efficient_ft.ops.saving import chains

METHODS_AND_SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "low_bit": ("low_bit", {}),
    "low_bit, stochastic": ("low_bit", {"bits": 2, "rounding": "stochastic"}),
    "low_bit, unfused": ("low_bit", {"attention": "unfused"}),
    "mesa": ("mesa", {}),
    "mesa, inputs": ("mesa", {"recompute_inputs": False}),
    "back_razor": ("back_razor", {}),
    "back_razor, published": ("back_razor", {"norm_saves": "input", "recompute_inputs": False}),
    "compact": ("compact", {}),
}


def vit(**settings: Any) -> nn.Module:
    torch.manual_seed(0)
    sizes = {"img_size": 16, "patch_size": 8, "depth": 4, "embed_dim": 24, "num_heads": 3, "num_classes": 4}
    return timm.create_model("vit_tiny_patch16_224", **{**sizes, **settings})


def trained(model: nn.Module, name: str, dtype: torch.dtype | None = None, steps: int = 2) -> dict[str, Any]:
    """Apply a method, and return the result of `steps_of`."""
    method, settings = METHODS_AND_SETTINGS[name]
    applied = METHODS[method](**settings)
    apply_methods(model, [applied])
    return steps_of(model, applied, dtype, steps)


def steps_of(model: nn.Module, applied: Any, dtype: torch.dtype | None = None, steps: int = 2) -> dict[str, Any]:
    """Run steps, and return the gradients, the state of the method and the sizes of saved tensors."""
    torch.manual_seed(1)
    x, saved, found = torch.randn(2, 3, 16, 16), dict[int, int](), []

    def see(t: Tensor) -> Tensor:
        saved[t.untyped_storage()._cdata] = t.untyped_storage().nbytes()
        return t

    for step in range(steps):
        applied.step_begin(step)
        saved.clear()  # freed addresses are used again
        model.zero_grad()
        with (
            torch.autocast("cpu", dtype=dtype, enabled=dtype is not None),
            torch.autograd.graph.saved_tensors_hooks(see, lambda t: t),
        ):
            loss = model.train()(x).float().square().sum()
        loss.backward()
        applied.step_end()
        found.append([p.grad for p in model.parameters()])
    return {"gradients": found, "state": applied.state_dict(), "saved": sorted(saved.values())}


@pytest.fixture
def chained(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list of the classes of the chains that ran."""
    ran: list[str] = []
    call = chains.Chain.__call__

    def counted(chain: chains.Chain, *arguments: Any) -> Tensor:
        ran.append(type(chain).__name__)
        return call(chain, *arguments)

    monkeypatch.setattr(chains.Chain, "__call__", counted)
    return ran


def in_the_mode(monkeypatch: pytest.MonkeyPatch, *arguments: Any, **settings: Any) -> dict[str, Any]:
    with monkeypatch.context() as patched:
        patched.setattr(PackedBlock, "__call__", lambda *_: None)
        return trained(*arguments, **settings)


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    for ours, theirs in zip(one["gradients"], other["gradients"], strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert (a is None and b is None) or torch.equal(a, b)
    assert one["state"] == other["state"]
    assert one["saved"] == other["saved"]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("name", METHODS_AND_SETTINGS)
def test_chains_give_the_results_of_the_mode(
    name: str, dtype: torch.dtype | None, chained: list[str], monkeypatch: pytest.MonkeyPatch
):
    ours = trained(vit(), name, dtype)
    assert chained == ["AttentionChain", "FeedForwardChain"] * 8
    assert_same(ours, in_the_mode(monkeypatch, vit(), name, dtype))


def test_decisions_are_those_for_the_kernel_of_attention(chained: list[str], monkeypatch: pytest.MonkeyPatch):
    """The output of torch's fused kernel has a different memory layout from the output of the unfused kernel."""

    def after_the_other_kernel() -> dict[str, Any]:
        model, applied = vit(), METHODS["low_bit"]()
        apply_methods(model, [applied])
        with sdpa_kernel(SDPBackend.MATH):
            steps_of(model, applied, steps=1)
        return steps_of(model, applied)

    ours = after_the_other_kernel()
    assert chained
    with monkeypatch.context() as patched:
        patched.setattr(PackedBlock, "__call__", lambda *_: None)
        theirs = after_the_other_kernel()
    assert_same(ours, theirs)


def test_the_kernel_of_attention_is_that_of_real_tensors_after_a_count():
    """For fake tensors, with which steps are counted, torch selects another kernel."""
    x = torch.zeros(2, 5, 24)
    chains._chooses_flash.cache_clear()
    with FakeTensorMode() as mode:
        counted = chains.supports_plain(mode.from_tensor(x), 3, 8)
    assert counted
    assert chains.supports_plain(x, 3, 8)


@pytest.mark.parametrize(
    ("settings", "chain"),
    [
        ({"init_values": 0.1}, ["AttentionChain", "FeedForwardChain"]),
        ({"drop_path_rate": 0.5}, ["AttentionChain", "FeedForwardChain"]),
        ({"qk_norm": True}, ["FeedForwardChain"]),
        ({"attn_drop_rate": 0.1}, ["FeedForwardChain"]),
        ({"act_layer": nn.SiLU}, ["AttentionChain"]),
        ({"mlp_layer": timm.layers.SwiGLUPacked, "act_layer": nn.SiLU, "qk_norm": True}, []),
    ],
)
def test_unusual_halves_run_in_the_mode(
    settings: dict[str, Any], chain: list[str], chained: list[str], monkeypatch: pytest.MonkeyPatch
):
    ours = trained(vit(**settings), "mesa")
    assert chained == chain * 8
    assert_same(ours, in_the_mode(monkeypatch, vit(**settings), "mesa"))


def test_frozen_layers_save_nothing_for_their_weights(chained: list[str], monkeypatch: pytest.MonkeyPatch):
    def partly_frozen() -> nn.Module:
        model = vit()
        for name, p in model.named_parameters():
            p.requires_grad_("bias" in name or "blocks.3" in name)
        return model

    ours = trained(partly_frozen(), "mesa")
    assert chained
    assert_same(ours, in_the_mode(monkeypatch, partly_frozen(), "mesa"))


def test_hooks_of_users_run(chained: list[str]):
    model, seen = vit(), []
    model.blocks[1].attn.qkv.register_forward_hook(lambda *_: seen.append("qkv"))
    model.blocks[2].mlp.register_full_backward_hook(lambda *_: seen.append("mlp"))
    trained(model, "low_bit", steps=1)
    assert seen[-2:] == ["qkv", "mlp"]  # `apply` also runs the model
    assert chained == [*["AttentionChain", "FeedForwardChain"], *["FeedForwardChain", "AttentionChain"], *chained[4:]]
    with nn.modules.module.register_module_forward_hook(lambda m, *_: seen.append(type(m).__name__)):
        model(torch.randn(2, 3, 16, 16))
    assert seen.count("GELU") == 4


def test_models_are_copied_after_a_step():
    model = vit()
    trained(model, "mesa", steps=1)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        other(torch.randn(2, 3, 16, 16)).sum().backward()


def test_another_batch_size_is_decided_separately():
    one, other = (torch.randn(n, 3, 16, 16) for n in (2, 5))
    gradients = []
    for batches in ([one, other], [other]):
        model = vit()
        apply_methods(model, [METHODS["low_bit"]()])
        for x in batches:
            model.zero_grad()
            model(x).sum().backward()
        gradients.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_a_chain_calls_few_python_functions():
    """The count does not depend on the machine. `efficient-ft bench overhead` measures the time."""
    model = vit()
    apply_methods(model, [METHODS["compact"]()])
    x, count = torch.randn(1, 3, 16, 16), 0
    for _ in range(2):
        model(x).sum().backward()

    def see(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(see)
    try:
        model(x).sum().backward()
    finally:
        sys.setprofile(None)
    assert count < 4 * 280, "functions per block, forward and backward; the mode calls 700"


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("name", ["low_bit", "mesa", "back_razor"])
def test_the_backward_pass_of_a_feed_forward_network_holds_two_hidden_tensors(name: str, dtype: torch.dtype | None):
    model = vit(img_size=64, depth=1, mlp_ratio=32)
    method, settings = METHODS_AND_SETTINGS[name]
    applied = METHODS[method](**settings)
    apply_methods(model, [applied])
    applied.step_begin(0)
    for _ in range(2):  # the first pass of a process also allocates constants of the kernels
        with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
            loss = model.train()(torch.randn(16, 3, 64, 64)).float().square().sum()
        with Meter([]) as meter:
            loss.backward()
        model.zero_grad()
    hidden = 16 * 65 * 32 * 24 * (4 if dtype is None else 2)
    assert 2 * hidden < meter.peak < 2.6 * hidden


def test_the_gradient_of_a_chain_cannot_be_differentiated():
    model = vit()
    apply_methods(model, [METHODS["compact"]()])
    weight = model.blocks[0].mlp.fc1.weight
    loss = model(torch.randn(2, 3, 16, 16)).square().sum()
    (g,) = torch.autograd.grad(loss, [weight], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        g.sum().backward()
