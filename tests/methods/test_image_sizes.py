"""Tests of training with several image sizes (progressive resizing): each method follows the size of the images."""

from __future__ import annotations

import copy
import pickle
from collections import UserDict
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any
from unittest import mock

import pytest
import timm
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F

from efficient_ft.core.errors import UserError
from efficient_ft.integrations.session import MethodSession
from efficient_ft.methods import (
    LBPDCT,
    LBPWHT,
    ALaST,
    BackRazor,
    Checkpointing,
    EViT,
    LowBit,
    Method,
    PatchDropout,
    ToMe,
    apply_methods,
)
from efficient_ft.methods.backprop.low_rank import LowRankLinear
from efficient_ft.models.view import view
from efficient_ft.testing import CLASSES, MODELS, Gradients, Instead, largest_difference, lively
from efficient_ft.testing.steps import gradients_of
from tests.methods.settings import ROWS

Size = tuple[int, int]
_SWIN: dict[str, Any] = {"img_size": 64, "window_size": 4, "embed_dim": 32, "depths": (1, 2), "num_heads": (1, 2),
                         "drop_path_rate": 0.0, "num_classes": CLASSES, "strict_img_size": False}  # fmt: skip
#: Functions that create a network that accepts several image sizes, and two sizes.
NETWORKS: dict[str, tuple[Callable[[], nn.Module], Size, Size]] = {
    "vit": (lambda: MODELS["vit"].create(dynamic_img_size=True), (32, 32), (48, 32)),
    "resnet": (MODELS["resnet"].create, (64, 64), (96, 96)),
    "rotary": (lambda: MODELS["rotary"].create(dynamic_img_size=True), (32, 32), (48, 48)),
    "swin": (lambda: timm.create_model("swin_tiny_patch4_window7_224", **_SWIN), (64, 64), (96, 96)),
    "swinv2": (lambda: MODELS["swinv2"].create(strict_img_size=False), (64, 64), (96, 64)),
    "mobilenet": (MODELS["mobilenet"].create, (64, 64), (96, 96)),
}
#: First row of each method.
FIRST = {row.method.name: name for name, row in reversed(ROWS.items())}
#: Methods of the default tests, one for each way in which a method depends on the number of tokens.
OFTEN = ("lbp_wht", "back_razor", "alast", "tome", "patch_dropout")


def cases() -> list[Any]:
    """Return all pairs of a method and a network that the method supports."""
    found = []
    for network in NETWORKS:
        for method, row in FIRST.items():
            reason = ROWS[row].refused.get("swinv2" if network == "swin" else network)
            if reason is None and (method, network) not in _UNSUPPORTED:
                often = network == "vit" and method in OFTEN
                marks = () if often else pytest.mark.slow if network == "vit" else pytest.mark.exhaustive
                found.append(pytest.param(method, network, marks=marks, id=f"{method}-{network}"))
    return found


#: Pairs of a method and a network that `apply` rejects, in addition to `Row.refused`.
_UNSUPPORTED = {
    ("lora", "resnet"), ("lora", "mobilenet"), ("moe", "resnet"), ("moe", "mobilenet"), ("moe", "swin"),
    ("repnet", "rotary"), ("repnet", "swin"), ("tinytl", "rotary"), ("tinytl", "swin"),
    *((method, network) for method in ("bsr", "bsr_moe") for network in ("resnet", "mobilenet", "swin", "swinv2")),
    *((method, "swin") for method in ("alast", "evit", "tome", "patch_dropout")),
}  # fmt: skip


def network_of(name: str) -> nn.Module:
    torch.manual_seed(0)
    return lively(NETWORKS[name][0]().double())


def batch(size: Size, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.randn(2, 3, 6, 6, generator=generator, dtype=torch.float64)
    return F.interpolate(coarse, size=size, mode="bicubic"), torch.randint(0, CLASSES, (2,), generator=generator)


def one_pass(model: nn.Module, size: Size, seed: int, *methods: Method) -> Gradients:
    model.train()
    model.zero_grad()
    torch.manual_seed(seed)
    images, labels = batch(size, seed)
    loss = F.cross_entropy(model(images), labels)
    for method in methods:
        loss = method.total_loss(loss)
    loss.backward()
    return gradients_of(model)


def step(model: nn.Module, size: Size, number: int, *methods: Method) -> Gradients:
    for method in methods:
        method.step_begin(number)
    found = one_pass(model, size, number, *methods)
    for method in methods:
        method.step_end()
    return found


def applied(name: str, method: Method, **structure: Any) -> nn.Module:
    model = network_of(name)
    torch.manual_seed(1)
    method.apply(model, **structure)
    return model


@pytest.mark.parametrize(("method", "network"), cases())
def test_gradients_do_not_depend_on_earlier_sizes(method: str, network: str) -> None:
    """After steps at a first size, the gradients at a second size equal those of a method applied at this size.

    The projected layers depend on the size at which the method is applied, so the test projects all layers.
    """
    row, (_, first, second) = ROWS[FIRST[method]], NETWORKS[network]
    with ExitStack() as stack:
        for owner, attribute, replacement in row.shortcuts:
            stack.enter_context(mock.patch.object(owner, attribute, replacement))
        own = row.create()
        model, last = applied(network, own), own.warmup_steps
        for number in range(last + 1):
            step(model, first, number, own)
        state = copy.deepcopy(own.state_dict())
        found = step(model, second, last + 1, own)
        fresh = row.create()
        again = applied(network, fresh, image_size=second)
        fresh.load_state_dict(state)
        assert largest_difference(step(again, second, last + 1, fresh), found) < 1e-10
        if row.instead == Instead.SAME_GRADIENTS:
            plain = one_pass(network_of(network), second, last + 1)
            trained = [name for name, g in found.items() if g is not None]
            assert largest_difference({n: plain[n] for n in trained}, {n: found[n] for n in trained}) < 1e-10
        model.eval()
        with torch.no_grad():
            for size in (second, first):
                assert model(batch(size, 3)[0]).isfinite().all()


@pytest.mark.parametrize(("method", "network"), cases())
def test_methods_that_are_exact_are_exact_at_every_size(method: str, network: str) -> None:
    row, (_, first, second) = ROWS[FIRST[method]], NETWORKS[network]
    if row.off is None:
        pytest.skip(row.why_no_off)
    exact = {**row.off, **({"num_layers": 3} if "num_layers" in row.off and network.startswith("swin") else {})}
    with ExitStack() as stack:
        for owner, attribute, replacement in row.shortcuts:
            stack.enter_context(mock.patch.object(owner, attribute, replacement))
        own = row.create(**exact)
        model, plain = applied(network, own), network_of(network)
        for number, size in enumerate((first, second, first, second)[: 2 + own.warmup_steps]):
            found = step(model, size, number, own)
        assert largest_difference(one_pass(plain, size, number), found) < 1e-9


def test_two_grids_with_the_same_number_of_tokens() -> None:
    with mock.patch.object(LBPDCT, "_costs_more", return_value=None):
        own, fresh = LBPDCT(order=2), LBPDCT(order=2)
        model, again = applied("vit", own), applied("vit", fresh, image_size=(16, 64))
    square = one_pass(model, (32, 32), 0)
    wide = one_pass(model, (16, 64), 0)
    assert largest_difference(one_pass(again, (16, 64), 0), wide) < 1e-12
    assert largest_difference(one_pass(model, (32, 32), 0), square) == 0


@pytest.mark.parametrize(
    "methods", [[LBPDCT(order=2)], [LBPDCT(order=2), Checkpointing()]], ids=["alone", "recomputed"]
)
def test_micro_batches_of_two_sizes_share_a_backward_pass(methods: list[Method]) -> None:
    """Blocks are recomputed at the first size after the forward pass at the second size."""
    model, alone = network_of("vit"), network_of("vit")
    apply_methods(model, methods)
    LBPDCT(order=2).apply(alone)
    sizes: list[Size] = [(32, 32), (48, 32)]
    torch.stack([F.cross_entropy(model(x), y) for x, y in (batch(size, 0) for size in sizes)]).sum().backward()
    each = [one_pass(alone, size, 0) for size in sizes]
    together: Gradients = {name: each[0][name] + each[1][name] for name in each[0]}  # type: ignore[operator]
    assert largest_difference(together, gradients_of(model)) < 1e-10


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["method", "timm", "timm, reentrant", "transformers"])
def test_recomputed_blocks_use_the_grid_of_their_forward_pass(kind: str) -> None:
    """Images of both sizes have 64 patch tokens, so that the number of tokens does not determine the grid."""
    sizes: list[Size] = [(16, 64), (32, 32), (64, 16)]
    network = _of_transformers if kind == "transformers" else partial(network_of, "vit")
    model: Any = network()
    alone = copy.deepcopy(model)
    for one in (model, alone):
        apply_methods(one, [LBPWHT(order=2)], image_size=(32, 32))
    if kind == "method":
        apply_methods(model, [Checkpointing()])
    elif kind == "transformers":
        model.inner.gradient_checkpointing_enable()
    else:
        model.set_grad_checkpointing(True)
    with mock.patch("timm.models._manipulate.use_reentrant_ckpt", return_value=kind == "timm, reentrant"):
        model.train()
        torch.stack([F.cross_entropy(model(x), y) for x, y in (batch(size, 0) for size in sizes)]).sum().backward()
    each = [one_pass(alone, size, 0) for size in sizes]
    together: Gradients = {name: sum(found[name] for found in each) for name in each[0]}  # type: ignore[misc]
    assert largest_difference(together, gradients_of(model)) < 1e-10
    assert largest_difference(each[0], each[1]) > 1e-3


class _OfTransformers(nn.Module):
    """A ViT of transformers that accepts several image sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = transformers.ViTForImageClassification(
            transformers.ViTConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
                                   image_size=32, patch_size=4, num_labels=CLASSES)
        )  # fmt: skip

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.inner(pixel_values=images, interpolate_pos_encoding=True).logits
        return logits


def _of_transformers() -> nn.Module:
    torch.manual_seed(0)
    return lively(_OfTransformers().double())


def test_a_recomputed_block_with_an_unknown_grid_is_rejected() -> None:
    model: Any = applied("vit", LBPWHT(order=2)).train()
    model.set_grad_checkpointing(True)
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda x: x):  # as in offloading
        losses = [model(batch(size, 0)[0]).sum() for size in ((16, 64), (48, 32), (32, 32))]
    losses[1].backward()
    with pytest.raises(UserError, match=r"on 65 tokens, but images of 32×32 and of 16×64 have .*Use the method Check"):
        losses[0].backward()


class _Unpack(nn.Module):
    """Network whose images may be inside a mapping, tuple or list."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, batch: Any) -> Tensor:
        while not isinstance(batch, Tensor):
            batch = batch["image"] if isinstance(batch, Mapping) else batch[-1]
        logits: Tensor = self.inner(batch)
        return logits


@pytest.mark.parametrize(
    "pack",
    [
        lambda x: {"mask": x[:, :1, :8, :8], "image": x},
        lambda x: ([0, x[0]], [x]),
        lambda x: UserDict(name="a", image=x),
    ],
    ids=["dict", "tuple", "mapping"],
)
def test_images_inside_other_objects_are_followed(pack: Callable[[Tensor], Any]) -> None:
    model, plain = _Unpack(network_of("vit")), applied("vit", LBPWHT(order=2))
    LBPWHT(order=2).apply(model.train(), image_size=(32, 32))
    images, labels = batch((16, 64), 0)
    F.cross_entropy(model(pack(images)), labels).backward()
    assert largest_difference(one_pass(plain, (16, 64), 0), gradients_of(model.inner)) == 0


def test_a_network_in_evaluation_mode_follows_the_size_if_its_blocks_are_trained() -> None:
    model: Any = applied("vit", LBPWHT(order=2))
    expected = one_pass(model, (16, 64), 0)
    model = applied("vit", LBPWHT(order=2)).eval()
    model.blocks.train()
    images, labels = batch((16, 64), 0)
    F.cross_entropy(model(images), labels).backward()
    assert largest_difference(expected, gradients_of(model)) == 0


def test_the_grids_of_a_size_are_determined_once() -> None:
    model = applied("vit", LBPWHT(order=2))
    with mock.patch("efficient_ft.methods.backprop.low_rank.view", wraps=view) as probes:
        for size in ((32, 32), (48, 32), (32, 32), (48, 32), (16, 64), (48, 32)):
            one_pass(model, size, 0)
    assert [call.args[1] for call in probes.call_args_list] == [(48, 32), (16, 64)]


def test_a_copy_follows_the_size_and_remove_leaves_no_hook() -> None:
    own = LBPDCT(order=2)
    model = applied("vit", own)
    before = one_pass(model, (32, 32), 0)
    copied, copied_method = copy.deepcopy((model, own))
    pickled = pickle.loads(pickle.dumps(model))
    wide = one_pass(copied, (48, 32), 0)
    assert largest_difference(one_pass(pickled, (48, 32), 0), wide) == 0
    layers = [m.low_rank.tokens.grid for m in model.modules() if isinstance(m, LowRankLinear)]
    assert set(layers) == {(8, 8)}, "the original is unchanged"
    assert largest_difference(one_pass(model, (32, 32), 0), before) == 0
    copied_method.remove(copied)
    own.remove(model)
    for module in (*copied.modules(), *model.modules()):
        assert not module._forward_pre_hooks
        assert not module._forward_pre_hooks_with_kwargs


def test_a_part_of_the_network_is_rejected_at_another_size() -> None:
    model: Any = applied("vit", LBPDCT(order=2))
    with pytest.raises(UserError, match=r"received 97 tokens, but 1 prefix .* grid of 8×8 .*Call the network itself"):
        model.forward_features(batch((48, 32), 0)[0])


@pytest.mark.slow
def test_a_size_that_cannot_be_projected_is_rejected() -> None:
    model = applied("vit", LBPWHT(order=2, padding="reflect"))
    with pytest.raises(UserError, match=r"a layer with a grid of 2×8 tokens cannot be projected: .* Use larger images"):
        one_pass(model, (8, 32), 0)


@pytest.mark.parametrize("method", [EViT([1], 0.5), ALaST(2, budget_init=0.6), PatchDropout(0.5)], ids=lambda m: m.name)
def test_dropped_tokens_of_another_size_have_no_grid_positions(method: Method) -> None:
    model = network_of("vit")
    with mock.patch.object(LBPDCT, "_costs_more", return_value=None):
        apply_methods(model, [method, LBPDCT(order=2)])
    method.step_begin(0)
    one_pass(model, (32, 32), 0)
    with pytest.raises(UserError, match=r"grid positions of .* are unknown.* use a single image size"):
        one_pass(model, (48, 32), 0)


@pytest.mark.parametrize(
    ("method", "counts"),
    [
        (ToMe(8), [(57, 49, 41, 33), (89, 81, 73, 65)]),
        (EViT([1, 2], 0.5, fuse=False), [(65, 33, 17, 17), (97, 49, 25, 25)]),
        (PatchDropout(0.5), [(33,) * 4, (49,) * 4]),
        (ALaST(2, budget_init=0.5), [(65, 33, 17, 9), (97, 49, 25, 13)]),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_the_number_of_tokens_follows_the_size(method: Method, counts: list[tuple[int, ...]]) -> None:
    model: Any = network_of("vit")
    method.apply(model)
    method.step_begin(0)
    seen: list[int] = []
    for block in model.blocks:
        block.mlp.register_forward_hook(lambda module, args, out: seen.append(args[0].shape[1]))
    for size, expected in zip(((32, 32), (48, 32)), counts, strict=True):
        seen.clear()
        one_pass(model, size, 0)
        assert tuple(seen) == expected


def test_values_are_pruned_at_every_size() -> None:
    model = applied("vit", BackRazor(sparsity=0.8))
    saved: dict[Size, int] = {}
    for size in ((32, 32), (64, 32)):
        kept: dict[int, int] = {}

        def pack(x: Tensor, kept: dict[int, int] = kept) -> Tensor:
            kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            model(batch(size, 0)[0])
        own = {p.untyped_storage().data_ptr() for p in model.parameters()}
        saved[size] = sum(n for at, n in kept.items() if at not in own)
    assert saved[64, 32] < 4 * saved[32, 32]


def _vit_of_transformers() -> nn.Module:
    torch.manual_seed(0)
    about = transformers.ViTConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
                                   image_size=32, patch_size=4, num_labels=CLASSES)  # fmt: skip
    return lively(transformers.ViTForImageClassification(about).double()).train()


@pytest.mark.parametrize("pack", [lambda x: ((x,), {}), lambda x: ((), {"pixel_values": x})], ids=["first", "named"])
def test_arguments_of_the_call_determine_which_sizes_are_accepted(
    pack: Callable[[Tensor], tuple[tuple[Tensor, ...], dict[str, Tensor]]],
) -> None:
    """A ViT of transformers accepts another size only with an argument, which the call on fake tensors also receives.

    The batch size differs from that of the fake tensors, and the labels are arguments of the call.
    """
    with mock.patch.object(LBPDCT, "_costs_more", return_value=None):
        model, again = _vit_of_transformers(), _vit_of_transformers()
        LBPDCT(order=2).apply(model)
        LBPDCT(order=2).apply(again, image_size=(48, 64))
    images, labels = torch.randn(3, 3, 48, 64, dtype=torch.float64), torch.tensor([0, 1, 2])
    args, kwargs = pack(images)
    for one in (model, again):
        one(*args, **kwargs, labels=labels, interpolate_pos_encoding=True).loss.backward()
    assert largest_difference(gradients_of(model), gradients_of(again)) < 1e-12
    with pytest.raises(ValueError, match=r"Input image size \(40\*40\) doesn't match model"):
        model(images[..., :40, :40])


@pytest.mark.slow
def test_a_network_of_transformers_is_counted_at_another_size() -> None:
    session = MethodSession(_vit_of_transformers(), LowBit(), image_size=(48, 64)).apply()
    larger, own = session.cost(2, (48, 64)), session.cost(2, (32, 32))
    assert larger.forward_flops > 2 * own.forward_flops
