"""Tests of `torch.compile` with methods: compiling changes neither the gradients nor the saved bytes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
from functorch.compile import nop
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.exc import TritonMissing
from torch.nn import functional as F

from efficient_ft.cost.run_flops import FlopsCounter
from efficient_ft.methods import LBPWHT, METHODS, Full, LastStage
from efficient_ft.methods.base import apply_methods, plain_state_dict
from efficient_ft.methods.compiled import CompiledBlocks, compile_blocks, run_eagerly
from efficient_ft.models.view import view
from efficient_ft.testing import batch_of, model_of
from tests.methods.settings import ROWS, rows_on_vit


def whole(network: nn.Module) -> Any:
    return torch.compile(network, backend="aot_eager")


def eager(network: nn.Module) -> Any:
    return network


def two_steps(
    row: str, compiled: Callable[[nn.Module], Any], model: str = "vit", dtype: torch.dtype = torch.float64
) -> list[tuple[int, dict[str, Tensor]]]:
    """Run two steps and return the bytes saved by autograd and the gradients of each step."""
    torch.compiler.reset()
    network: nn.Module = model_of(model).to(dtype).train()
    torch.manual_seed(1)
    method = ROWS[row].create()
    method.apply(network)
    run: Any = compiled(network)
    own = {p.untyped_storage().data_ptr() for p in network.parameters()}
    found = []
    for step in range(2):
        images, labels = batch_of(model, dtype, seed=step)
        saved: dict[int, int] = {}

        def pack(tensor: Tensor, saved: dict[int, int] = saved) -> Tensor:
            saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        method.step_begin(step)
        torch.manual_seed(5)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = method.total_loss(F.cross_entropy(run(images), labels))
        loss.backward()
        gradients = {n: p.grad.clone() for n, p in network.named_parameters() if p.grad is not None}
        method.step_end()
        network.zero_grad()
        found.append((sum(n for at, n in saved.items() if at not in own), gradients))
    return found


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Assert equal names, and equal values up to rounding."""
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-10, atol=1e-12, msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("row", rows_on_vit(("checkpointing", "lbp_wht")))
def test_a_compiled_network_has_the_same_gradients_and_keeps_as_little(row: str) -> None:
    plain = two_steps(row, eager)
    for (kept, expected), (bytes_, gradients) in zip(plain, two_steps(row, whole), strict=True):
        assert_same(gradients, expected)
        assert bytes_ <= 1.05 * kept  # The compiled graph has different autograd nodes.
    assert_same(two_steps(row, eager)[0][1], plain[0][1])  # Tracing has no side effects.


# ------------------------------------------------------------------------------------------ trainer.compile
#: Reasons why blocks are not compiled, by method.
NOT_COMPILED = {
    **dict.fromkeys(("lbp_wht", "lbp_dct"), "low-rank layers"),
    **dict.fromkeys(("back_razor", "mesa", "low_bit", "compact"), "packed activations"),
    **dict.fromkeys(("moe", "bsr_moe"), "the tokens of each expert depend on the images"),
    "swat": "sparse weights",
    "alast": "a different number of tokens in each step",
}
#: For each method, its first row and the first model of this row.
FIRST = {row.method.name: (name, row.models[0]) for name, row in reversed(ROWS.items())}


def compiled_alike(row: str, model: str, **options: Any) -> CompiledBlocks:
    """Assert that compiled blocks have the gradients of the plain model, and return the report of the compilation."""
    reports: list[CompiledBlocks] = []

    def compiled(network: nn.Module) -> nn.Module:
        reports.append(compile_blocks(network, tell=pytest.fail, **options))
        return network

    for (_, expected), (_, gradients) in zip(
        two_steps(row, eager, model), two_steps(row, compiled, model), strict=True
    ):
        assert_same(gradients, expected)
    return reports[0]


@pytest.mark.slow
@pytest.mark.parametrize("method", FIRST)
def test_compiled_blocks_have_the_same_gradients(method: str) -> None:
    report = compiled_alike(*FIRST[method], backend="eager")
    assert set(report.eager) == {NOT_COMPILED[method]} if method in NOT_COMPILED else not report.eager
    some = method not in NOT_COMPILED or method.endswith("moe")  # other blocks have no experts
    assert bool(report.compiled) == some


def test_the_reasons_belong_to_methods() -> None:
    assert set(NOT_COMPILED) < set(METHODS)


class Counted:
    """Backend that counts compiled graphs and their calls."""

    def __init__(self) -> None:
        self.graphs = self.calls = 0

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.graphs += 1

        def run(*args: Any) -> Any:
            self.calls += 1
            return graph(*args)

        return run


def counted(network: nn.Module, *methods: Any, **options: Any) -> Counted:
    """Apply methods, compile the blocks in training mode, and return the backend."""
    torch.compiler.reset()
    for method in methods:
        method.apply(network)
    backend: Any = Counted()
    compile_blocks(network.train(), backend=backend, tell=pytest.fail, **options)
    return backend


def test_equal_blocks_share_the_compiled_code() -> None:
    network = model_of("vit")
    backend = counted(network, Full())
    for _ in range(2):
        network(batch_of("vit", torch.float64)[0]).sum().backward()
    assert (backend.graphs, backend.calls) == (1, 8)


def test_a_smaller_batch_and_evaluation_run_eagerly() -> None:
    network = model_of("vit")
    backend = counted(network)
    images, _ = batch_of("vit", torch.float64)
    for batch in (images, images[:1], images):
        network(batch)
    assert (backend.graphs, backend.calls) == (1, 8)
    network.eval()(images)
    assert backend.calls == 8


def test_observed_steps_and_copies_run_eagerly() -> None:
    network = model_of("vit")
    images, _ = batch_of("vit", torch.float64)
    with FlopsCounter() as plain:
        network(images)
    backend = counted(network)
    network(images)
    assert backend.calls == 4
    with FlopsCounter() as counter:
        network(images)
    copy.deepcopy(network)(images)
    assert backend.calls == 4
    assert counter.flops == plain.flops
    seen: list[Any] = []
    with network.get_submodule("blocks.1.mlp.fc1").register_forward_hook(lambda *args: seen.append(args)):
        network(images)
    assert seen
    assert backend.calls == 4 + 3  # the other blocks


def test_weights_keep_their_names_and_compilation_can_be_undone() -> None:
    network, plain = model_of("vit"), model_of("vit")
    method = Full()
    counted(network, method)
    assert plain_state_dict(network, [method]).keys() == plain.state_dict().keys() == network.state_dict().keys()
    run_eagerly(network)
    method.remove(network)
    assert not any("forward" in vars(module) for module in network.modules())


def test_a_prefix_that_is_computed_in_another_way_is_not_compiled() -> None:
    network = model_of("vit")
    LastStage().apply(network)
    report = compile_blocks(network, ["patch_embed", "blocks.0", "blocks.1.norm1"], backend="eager")
    assert report.eager == {"frozen prefix": ["blocks.0", "blocks.1"]}
    assert str(report) == "2 of 4 blocks compiled. Not compiled: blocks 0–1 (frozen prefix)."


@pytest.mark.slow
@pytest.mark.parametrize("model", ["vit", "efficientformer"])
def test_frozen_blocks_with_low_rank_layers_are_compiled(model: str) -> None:
    found = []
    for compiles in (False, True):
        torch.compiler.reset()
        network = model_of(model).train()
        apply_methods(network, [LastStage(), LBPWHT(bases="l1", order=3)])
        if compiles:
            report = compile_blocks(network, backend="eager", tell=pytest.fail)
        images, labels = batch_of(model, torch.float64)
        F.cross_entropy(network(images), labels).backward()
        found.append({n: p.grad for n, p in network.named_parameters() if p.grad is not None})
    assert_same(found[1], found[0])
    assert len(report.compiled) == 3
    assert set(report.eager) == {"low-rank layers"}


def test_without_a_compiler_the_blocks_run_eagerly_and_one_message_is_printed() -> None:
    def broken(graph: Any, inputs: Any) -> Any:
        raise RuntimeError("no compiler")

    network = model_of("vit")
    images, _ = batch_of("vit", torch.float64)
    expected = network(images)
    torch.compiler.reset()
    messages: list[str] = []
    backend: Any = broken
    report = compile_blocks(network.train(), backend=backend, tell=messages.append)
    torch.testing.assert_close(network(images), expected, rtol=0, atol=0)
    network(images)
    (message,) = messages
    assert "cannot compile the blocks (" in message
    assert "no compiler" in message
    assert "requires a C++ compiler" in message
    assert report.eager == {"compilation failed": [f"blocks.{k}" for k in range(4)]}


def test_a_block_that_cannot_be_traced_runs_eagerly(monkeypatch: pytest.MonkeyPatch) -> None:
    network = model_of("vit")
    forward = type(network.get_submodule("blocks.0")).forward

    def untraceable(self: nn.Module, x: Tensor, **options: Any) -> Tensor:
        torch._dynamo.graph_break()
        return forward(self, x, **options)

    monkeypatch.setattr(type(network.get_submodule("blocks.0")), "forward", untraceable)
    torch.compiler.reset()
    messages: list[str] = []
    report = compile_blocks(network.train(), backend="eager", tell=messages.append)
    for _ in range(2):
        network(batch_of("vit", torch.float64)[0])
    (message,) = messages
    assert "cannot compile the blocks of the class Block" in message
    assert not report.compiled


def test_a_failure_in_the_backward_pass_of_the_compiler_runs_the_blocks_eagerly() -> None:
    def broken(graph: Any, inputs: Any) -> Any:
        raise RuntimeError("no backward pass")

    network = model_of("vit").train()
    torch.compiler.reset()
    messages: list[str] = []
    backend: Any = aot_autograd(fw_compiler=nop, bw_compiler=broken)
    report = compile_blocks(network, backend=backend, tell=messages.append)
    network(batch_of("vit", torch.float64)[0]).sum().backward()
    (message,) = messages
    assert "no backward pass" in message
    assert not report.compiled


def test_without_triton_the_message_names_the_requirements_of_a_gpu() -> None:
    def broken(graph: Any, inputs: Any) -> Any:
        raise TritonMissing(None)

    network = model_of("vit").to("meta").train()  # a device other than the CPU
    torch.compiler.reset()
    messages: list[str] = []
    backend: Any = broken
    report = compile_blocks(network, backend=backend, tell=messages.append)
    network(batch_of("vit", torch.float64)[0].to("meta"))
    (message,) = messages
    assert "cannot compile the blocks (" in message
    assert message.endswith(" On a GPU, torch.compile requires Triton and compute capability 7.0 or higher.")
    assert not report.compiled


def test_blocks_are_reported_once_if_the_backend_fails_after_a_class(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(graph: Any, inputs: Any) -> Any:
        raise RuntimeError("no compiler")

    network = model_of("efficientformer").train()
    names = list(view(network).blocks)
    first = type(network.get_submodule(names[0]))
    forward = first.forward

    def untraceable(self: nn.Module, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return forward(self, x)

    monkeypatch.setattr(first, "forward", untraceable)
    torch.compiler.reset()
    messages: list[str] = []
    backend: Any = broken
    report = compile_blocks(network, backend=backend, tell=messages.append)
    network(batch_of("efficientformer", torch.float64)[0])
    assert len(messages) == 2
    assert not report.compiled
    assert sorted(report.eager["compilation failed"]) == sorted(names)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("row", "model"), [("lora", "vit"), ("checkpointing", "vit"), ("last_stage", "efficientformer")]
)
def test_the_compiler_changes_gradients_only_by_rounding(row: str, model: str) -> None:
    compiled_alike(row, model)


@pytest.mark.slow
def test_the_compiler_draws_the_same_random_numbers() -> None:
    found = []
    for compiles in (False, True):
        torch.compiler.reset()
        torch.manual_seed(0)
        network = timm.create_model(
            "vit_tiny_patch16_224", img_size=32, depth=2, num_classes=10, drop_path_rate=0.5, proj_drop_rate=0.3
        ).double()
        if compiles:
            compile_blocks(network.train(), tell=pytest.fail)
        torch.manual_seed(1)
        network.train()(torch.randn(8, 3, 32, 32, dtype=torch.float64)).square().sum().backward()
        found.append({n: p.grad for n, p in network.named_parameters() if p.grad is not None})
    assert_same(found[1], found[0])
