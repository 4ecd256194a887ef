"""Tests of properties of a network that the user specifies: image size, prefix tokens and blocks."""

from __future__ import annotations

from typing import Any

import pytest
import timm
import torch
import torchvision
from torch import Tensor, nn

from efficient_ft.core.errors import SettingError, UserError
from efficient_ft.integrations.session import MethodSession
from efficient_ft.integrations.transformers import MethodCallback
from efficient_ft.methods import LBPDCT, LISA, Checkpointing, Compact, HeadOnly, PatchDropout, apply_methods
from efficient_ft.models.view import specify, view
from efficient_ft.models.view.specified import specified


class Halves(nn.Module):
    """A vision transformer whose layers are lists of two halves, with two extra tokens, for images of 32×32 pixels."""

    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Conv2d(3, 24, 8, 8)
        self.extra = nn.Parameter(torch.randn(1, 2, 24))
        self.positions = nn.Parameter(torch.randn(1, 18, 24))
        self.transformer = nn.Module()
        self.transformer.parts = nn.ModuleList(
            nn.ModuleList([nn.Sequential(nn.LayerNorm(24), nn.Linear(24, 24)) for _ in range(2)]) for _ in range(depth)
        )
        self.mlp_head = nn.Linear(24, 5)

    def forward(self, images: Tensor) -> Tensor:
        x = self.embedding(images).flatten(2).mT
        x = torch.cat([self.extra.expand(len(x), -1, -1), x], 1) + self.positions
        for first, second in self.transformer.parts:  # type: ignore[union-attr,misc]
            x = x + first(x)
            x = x + second(x)
        return self.mlp_head(x.mean(1))


BLOCKS = "transformer.parts.*"


def named(blocks: int = 4) -> list[str]:
    return [f"transformer.parts.{layer}.{half}" for layer in range(blocks) for half in range(2)]


def test_an_image_size_that_no_attribute_declares_is_asked_for() -> None:
    model = Halves()
    with pytest.raises(UserError, match=r"does not declare an image size.*pass it, for example image_size="):
        LBPDCT(2).apply(model)
    report = LBPDCT(2).apply(model, image_size=32)
    assert len(report.touched) == 8
    assert view(model).image_size == (32, 32)
    assert specified(Halves()) == {}


def test_prefix_tokens_are_counted_if_no_parameter_has_a_known_name() -> None:
    model = Halves()
    specify(model, image_size=(32, 32), blocks=named())
    looked = view(model)
    assert looked.prefix_tokens == 2
    assert looked.block_grid == (4, 4)
    specify(model, prefix_tokens=1)
    assert view(model).block_grid is None
    with pytest.raises(UserError, match=r"18 tokens without positions on a grid, number of prefix tokens: 1.*pass"):
        PatchDropout().apply(model)
    message = r"can be changed \(.*18 tokens without positions on a grid.*; number of prefix tokens: 1\)\. If the"
    with pytest.raises(UserError, match=rf"{message} .* pass the correct number: prefix_tokens=N\. Otherwise, choose"):
        LBPDCT(2).apply(model)


def test_an_image_size_that_does_not_fit_is_named() -> None:
    with pytest.raises(UserError, match=r"images of 100×100: .*\nThis size is the value of image_size\. If the model"):
        LBPDCT(2).apply(Halves(), image_size=100)


def test_specified_blocks_are_the_units_of_all_methods() -> None:
    model = Halves()
    with pytest.raises(UserError, match=r"no blocks were recognized in Halves.*pass their names, for example blocks="):
        LISA(1).apply(model)
    with pytest.raises(SettingError, match=r"blocks must be names of modules with a forward method, got 'tr"):
        LISA(1).apply(model, blocks=BLOCKS)
    LISA(1).apply(model, blocks=named())
    assert view(model).stages == (tuple(named()[:2]), *(tuple(named()[i : i + 2]) for i in (2, 4, 6)))
    # Later methods use the same blocks.
    assert set(Checkpointing().apply(model).touched) == set(named())


class Reversed(nn.Module):
    """A network that runs its blocks in the reverse order of definition."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Sequential(nn.Conv2d(3, 3, 1), nn.ReLU()) for _ in range(3))

    def forward(self, images: Tensor) -> Tensor:
        for part in reversed(self.parts):
            images = part(images)
        return images.mean((2, 3))


def test_the_order_of_blocks_may_differ_from_the_order_of_definition() -> None:
    blocks = ["parts.2", "parts.1", "parts.0"]
    assert Checkpointing().apply(Reversed(), image_size=8, blocks=blocks).touched == tuple(blocks)


def test_one_block_may_contain_a_list() -> None:
    """A stage of a CNN is accepted as a block if several stages are passed, and an item of a list always."""
    model = torchvision.models.resnet18(num_classes=3)
    with pytest.raises(SettingError, match=r"layer4 has 2 modules\. .* pass blocks='layer4\.\*'"):
        Checkpointing().apply(model, blocks="layer4")
    assert Checkpointing().apply(model, blocks=["layer3", "layer4"]).touched == ("layer3", "layer4")
    model = nn.Sequential(nn.Sequential(nn.Sequential(nn.Conv2d(3, 3, 1)), nn.Sequential(nn.Conv2d(3, 3, 1))))
    assert Checkpointing().apply(model, blocks="0").touched == ("0",)


def test_blocks_of_several_containers_are_stages() -> None:
    model = torchvision.models.resnet18(num_classes=3)
    specify(model, blocks=["layer1.*", "layer2.*", "layer3.*", "layer4.*"])
    assert view(model).stages == view(torchvision.models.resnet18()).stages
    assert view(model).last_stage() == view(torchvision.models.resnet18()).last_stage()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "blocks"), [("swin_tiny_patch4_window7_224", "layers.{}.blocks.*"), ("pvt_v2_b0", "stages.{}.blocks.*")]
)
def test_specified_blocks_that_are_also_recognized_change_nothing(name: str, blocks: str) -> None:
    """The layers between the stages are packed in both cases, so that the saved bytes are equal."""
    costs, views = [], []
    for structure in ({}, {"blocks": [blocks.format(stage) for stage in range(4)]}):
        model = timm.create_model(name, num_classes=3)
        session = MethodSession(model, Compact(), **structure)  # type: ignore[arg-type]
        session.apply()
        costs.append(session.cost(1).saved_bytes)
        views.append(view(model))
    assert costs[0] == costs[1]
    assert views[0].stage_extras == views[1].stage_extras != ((),) * 4
    assert views[0].last_stage() == views[1].last_stage()
    assert views[0].tail == views[1].tail


@pytest.mark.parametrize(
    ("structure", "message"),
    [
        ({"image_size": 0}, r"image_size must be an integer >= 1 or a pair \(height, width\) of such integers, got 0"),
        ({"image_size": (224, 224, 3)}, "image_size must be"),
        ({"image_size": "224"}, "image_size must be"),
        ({"prefix_tokens": -1}, "prefix_tokens must be an integer >= 0, got -1"),
        ({"prefix_tokens": True}, "prefix_tokens must be"),
        (
            {"blocks": "transformer.layers.*"},
            r"blocks must be names of modules of Halves with parameters \(embedding, .* got 'tr",
        ),
        ({"blocks": ["mlp_head", "mlp_head"]}, "blocks must be unique, got 'mlp_head'"),
        (
            {"blocks": ["transformer.parts.0.0", "transformer.parts.0.0.1"]},
            r"blocks must be modules that do not contain each other, got 'transformer\.parts\.0\.0\.1'\. It is",
        ),
        (
            {"blocks": "transformer.parts"},
            r"blocks must be the names of individual blocks, got 'transformer\.parts'\. transformer\.parts has 4"
            r" modules\. To use each of them as a block, pass blocks='transformer\.parts\.\*'",
        ),
        ({"blocks": "transformer"}, r"got 'transformer'\. transformer\.parts has 4 modules"),
        (
            {"image_size": 32, "blocks": ["transformer.parts.1.0", "transformer.parts.0.1"]},
            r"blocks must be a list in the order of the forward pass, got \['transformer\.parts\.1\.0', .*\]\. The"
            r" network runs 'transformer\.parts\.0\.1' before 'transformer\.parts\.1\.0'\.",
        ),
        ({"classifier": "fc"}, "classifier must be a module of Halves"),
        ({"blocks": "mlp_head.*"}, r"blocks must be names of modules with parameters \(mlp_head contains none\)"),
        ({"blocks": 3}, "blocks must be a name of a module, or a list of names, got 3"),
        (
            {"blocks": [nn.Linear(2, 2)]},
            r"blocks must be a name of a module, or a list of names, got a Linear\. Pass the name of the module",
        ),
        (
            {"blocks": nn.ModuleList([nn.Linear(2, 2)])},
            r"got a ModuleList\. Pass the names of the modules in it, for example blocks='encoder\.layers\.\*'",
        ),
        ({"blocks": []}, r"blocks must be a list with at least one name, got \[\]\. To use the blocks that are rec"),
        ({"classifier": "mlp_haed"}, r"got 'mlp_haed'\. Did you mean 'mlp_head'\?"),
    ],
)
def test_a_wrong_value_is_refused_by_name(structure: dict[str, Any], message: str) -> None:
    model = Halves()
    with pytest.raises(SettingError, match=message):
        HeadOnly().apply(model, **structure)
    assert specified(model) == {}
    assert all(p.requires_grad for p in model.parameters())


def test_an_unknown_argument_is_refused_like_any_python_function_does() -> None:
    with pytest.raises(TypeError, match=r"unexpected keyword argument \'size\'\. Valid arguments are blocks, "):
        HeadOnly().apply(Halves(), size=32)  # type: ignore[call-arg]


def test_sessions_and_stacks_pass_the_properties_on() -> None:
    reports = apply_methods(Halves(), [HeadOnly(), Checkpointing()], image_size=32, blocks=named())
    assert set(reports[-1].touched) | set(reports[-1].skipped) == set(named())
    model = Halves()
    with MethodSession(model, LBPDCT(2), image_size=32, prefix_tokens=2) as session:
        assert len(session.reports[0].touched) == 8
        session.loss(model(torch.randn(2, 3, 32, 32)).square().mean()).backward()


def test_an_error_leaves_the_properties_as_they_were() -> None:
    model = Halves()
    specify(model, image_size=32, blocks=named())
    with pytest.raises(UserError, match="do not form a grid"):
        PatchDropout().apply(model, prefix_tokens=1)
    assert "prefix_tokens" not in specified(model)
    lisa = LISA(1)
    lisa.apply(model)
    lisa.apply(model, blocks=named(2))  # a second call has no effect
    assert view(model).blocks == tuple(named())


def test_an_inferred_number_of_prefix_tokens_is_reported() -> None:
    assert "2 tokens are assumed to precede the patches" in str(LBPDCT(2).apply(Halves(), image_size=32))
    assert "assumed" not in str(LBPDCT(2).apply(Halves(), image_size=32, prefix_tokens=2))


def test_blocks_inside_a_module_with_the_first_convolution_are_not_the_stem() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = Halves()

        def forward(self, images: Tensor) -> Tensor:
            return self.net(images)

    report = LBPDCT(2).apply(Outer(), image_size=32, blocks=[f"net.{name}" for name in named()])
    assert len(report.touched) == 8


@pytest.mark.parametrize("create", [lambda **more: MethodSession(Halves(), LISA(1), **more), MethodCallback])
def test_an_unknown_argument_is_rejected_when_the_object_is_created(create: Any) -> None:
    given: dict[str, Any] = {} if create is not MethodCallback else {"methods": LISA(1)}
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'img_size'\. .* Did you mean 'image_size'\?"):
        create(**given, img_size=64)


@pytest.mark.parametrize(("network", "given"), [(3, "3"), (Halves(), "a Halves")])
def test_a_callback_requires_the_name_of_the_network(network: Any, given: str) -> None:
    with pytest.raises(SettingError, match=rf"network must be the name of an attribute of the model, got {given}\."):
        MethodCallback(LISA(1), network=network)
