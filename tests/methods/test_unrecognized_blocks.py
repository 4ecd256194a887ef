"""Tests of networks in which some or all blocks are not recognized, because the names of their lists are uncommon."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from efficient_ft.core.errors import UserError, on_command_line
from efficient_ft.methods import SWAT, BackRazor, Compact, LowBit, Mesa, Method
from efficient_ft.models.view import view


def layer() -> nn.Module:
    return nn.TransformerEncoderLayer(32, 2, 64, batch_first=True, dropout=0.0)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.project(torch.softmax(x @ x.mT, -1) @ x)


CONTAINERS: dict[str, Any] = {
    "list": lambda: nn.ModuleList([layer() for _ in range(3)]),
    "dictionary": lambda: nn.ModuleDict({name: layer() for name in "abc"}),
    "sequence": lambda: nn.Sequential(*(layer() for _ in range(3))),
    "halves": lambda: nn.ModuleList(
        [nn.ModuleList([Attention(), nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 32))]) for _ in range(3)]
    ),
}


class Network(nn.Module):
    """A vision transformer for images of 64×64 pixels whose blocks are in an attribute with an uncommon name."""

    def __init__(self, container: str = "list") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.patch = nn.Conv2d(3, 32, 8, 8)
        self.stack = CONTAINERS[container]()
        self.result = nn.Linear(32, 5)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patch(images).flatten(2).mT
        for block in self.stack.values() if isinstance(self.stack, nn.ModuleDict) else self.stack:
            for part in block if isinstance(block, nn.ModuleList) else [block]:
                x = part(x)
        return self.result(x.mean(1))


def saved_bytes(model: nn.Module) -> int:
    """Return the bytes that a training step saves, except parameters."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    held: dict[int, Tensor] = {}

    def pack(x: Tensor) -> Tensor:
        if x.untyped_storage().data_ptr() not in own:
            held[x.untyped_storage().data_ptr()] = x
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        loss = model.train()(torch.randn(2, 3, 64, 64)).sum()
    loss.backward()
    return sum(x.untyped_storage().nbytes() for x in held.values())


@pytest.mark.parametrize(
    ("method", "container"),
    [*((LowBit, container) for container in CONTAINERS), *((one, "list") for one in (Compact, BackRazor, Mesa, SWAT))],
)
def test_blocks_in_a_list_with_an_uncommon_name_are_packed(method: type[Method], container: str) -> None:
    model = Network(container)
    assert not view(model).blocks
    before = saved_bytes(model)
    report = method().apply(model, image_size=64)
    layers = {n for n, m in model.named_modules() if isinstance(m, nn.Linear) and n.startswith("stack.")}
    assert layers <= set(report.touched)
    assert str(report.skipped["patch"]) == "dense, as published"
    assert saved_bytes(model) < (0.95 if method in (Compact, SWAT) or container == "halves" else 0.55) * before


@pytest.mark.parametrize("container", ["dictionary", "halves"])
def test_gradients_of_packed_lists_are_exact(container: str) -> None:
    model = Network(container).double()
    packed = copy.deepcopy(model)
    Compact().apply(packed, image_size=64)
    images = torch.randn(2, 3, 64, 64, dtype=torch.float64)
    for net in (model, packed):
        net.train()(images).square().sum().backward()
    for (name, plain), found in zip(model.named_parameters(), packed.parameters(), strict=True):
        assert plain.grad is not None
        torch.testing.assert_close(found.grad, plain.grad, msg=name, rtol=1e-10, atol=1e-12)


class Mixed(Network):
    """A network with one recognized block, followed by blocks in a list with an uncommon name."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([layer()])
        self.later = nn.ModuleList([layer() for _ in range(2)])
        self.head = self.result
        del self.result

    def forward(self, images: Tensor) -> Tensor:
        x = self.patch(images).flatten(2).mT
        for block in (*self.stack, *self.blocks, *self.later):
            x = block(x)
        return self.head(x.mean(1))


def test_layers_after_the_blocks_that_stay_dense_are_named() -> None:
    """Published methods leave all layers after the recognized blocks dense, so the report names them and `blocks`."""
    note = (
        "6 layers in later 0–1 are outside of the blocks (if they belong to blocks, pass the names of all blocks as the"
        " argument blocks)"
    )
    report = BackRazor().apply(Mixed(), image_size=64)
    assert note in str(report)
    assert {name.partition(".")[0] for name in report.touched} == {"stack", "blocks"}
    everything = BackRazor().apply(Mixed(), image_size=64, blocks=["stack.*", "blocks.*", "later.*"])
    assert "outside of the blocks" not in str(everything)
    assert {name.partition(".")[0] for name in LowBit().apply(Mixed(), image_size=64).touched} == {
        "stack", "blocks", "later", "head"
    }  # fmt: skip


def test_a_layer_before_the_blocks_that_stays_dense_is_reported() -> None:
    model = Mixed()
    model.stack = nn.ModuleList([nn.LayerNorm(32)])
    report = BackRazor().apply(model, image_size=64)
    assert str(report.skipped["stack.0"]) == "outside of the blocks"


class Whole(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 32, 8, 8)
        self.head = Attention()

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.patch(images).flatten(2).mT).mean(1)


def test_a_network_of_which_nothing_can_be_packed_is_rejected_with_the_argument() -> None:
    with pytest.raises(UserError, match=r"no part of the model Whole can be changed \(dense, as published\)") as error:
        BackRazor().apply(Whole(), image_size=64)
    assert "If the network has blocks, pass their names, for example blocks='encoder.layers.*'." in str(error.value)
    with on_command_line(), pytest.raises(UserError) as error:
        BackRazor().apply(Whole(), image_size=64)
    assert "blocks=" not in str(error.value)
