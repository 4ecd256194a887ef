"""Tests of modules whose forward method requires other inputs in addition to images."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import timm
import torch
from open_clip.transformer import VisionTransformer
from torch import Tensor, nn

from efficient_ft.core.errors import UserError
from efficient_ft.integrations.session import MethodSession
from efficient_ft.methods import LBPDCT, LISA, Checkpointing, Compact, HeadOnly, LastStage, LoRA, Method, ToMe


def _timm() -> nn.Module:
    return timm.create_model("vit_tiny_patch16_224", num_classes=0, img_size=64, embed_dim=48, depth=4)  # type: ignore[no-any-return]


def _open_clip() -> nn.Module:
    return VisionTransformer(image_size=64, patch_size=16, width=32, layers=4, heads=2, mlp_ratio=2.0, output_dim=48)


class Own(nn.Module):
    """A classifier of images with metadata."""

    def __init__(self, net: nn.Module | None = None) -> None:
        super().__init__()
        self.net = net or _timm()
        self.meta = nn.Linear(5, 8)
        self.head = nn.Linear(56, 3)

    def forward(self, image: Tensor, metadata: Tensor) -> Tensor:
        return self.head(torch.cat([self.net(image), self.meta(metadata)], 1))


class Optional(Own):
    """A classifier whose metadata have the default value None, but are required."""

    def forward(self, image: Tensor, metadata: Tensor | None = None) -> Tensor:
        assert metadata is not None, "metadata must be given"
        return super().forward(image, metadata)


def step(model: nn.Module, session: MethodSession) -> None:
    with session.step(0):
        session.loss(model(torch.randn(2, 3, 64, 64), torch.randn(2, 5)).square().mean()).backward()


PROBING: list[Callable[[], Method]] = [lambda: LBPDCT(1), LoRA, lambda: ToMe(2), Compact]


@pytest.mark.parametrize("tower", [_timm, _open_clip])
@pytest.mark.parametrize("create", PROBING)
def test_the_message_names_the_network_that_takes_images(
    tower: Callable[[], nn.Module], create: Callable[[], Method]
) -> None:
    message = (
        r"Own requires inputs in addition to images \(metadata\), but the method calls the network with images alone\."
        r" Apply the methods to the network that takes only images, model\.net\.\nIn a callback, pass network='net', or"
        r" network='NAME\.net' if"
    )
    with pytest.raises(UserError, match=message) as error:
        create().apply(Own(tower()))
    assert "image_size" not in str(error.value)


@pytest.mark.parametrize("create", PROBING)
def test_the_advice_works(create: Callable[[], Method]) -> None:
    model = Own()
    with MethodSession(model.net, create()) as session:
        step(model, session)
        assert session.cost(2).saved_bytes > 0
    assert model.head.weight.grad is not None
    assert model.meta.weight.grad is not None


@pytest.mark.parametrize("create", [Checkpointing, LastStage, HeadOnly, lambda: LISA(1)])
def test_methods_that_do_not_call_the_network_accept_it(create: Callable[[], Method]) -> None:
    model = Own()
    with MethodSession(model, create()) as session:
        step(model, session)
        with pytest.raises(UserError, match=r"\(metadata\), but the counted step calls .* model\.net\."):
            session.cost()
        assert "model.net." in str(session)
    assert model.head.weight.grad is not None


def test_inputs_with_a_default_value_are_named_after_the_reason() -> None:
    message = (
        r"metadata must be given\n.* image_size=112\. If it requires other inputs \(metadata\): Apply .* model\.net\."
    )
    with pytest.raises(UserError, match=message):
        LBPDCT(1).apply(Optional())


def test_a_module_without_a_known_network() -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Conv2d(3, 8, 4, 4), nn.Conv2d(8, 8, 1), nn.ReLU())

        def forward(self, image: Tensor, scale: Tensor) -> Tensor:
            return self.layers(image).mean((2, 3)) * scale

    with pytest.raises(UserError, match=r"\(scale\), .* Apply the methods to a part of Plain that takes only images\."):
        LBPDCT(1).apply(Plain())
