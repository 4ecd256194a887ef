"""Tests of the memory methods on real models: saved bytes, stacks, excluded tensors and invalid settings."""

from __future__ import annotations

import copy
import re
from functools import partial
from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
from timm.layers import RmsNorm, SwiGLUPacked, set_fused_attn
from torch import Tensor, nn

from efficient_ft.core.errors import SettingError, UserError
from efficient_ft.core.units import parse_bytes
from efficient_ft.cost import executed
from efficient_ft.cost.published import published
from efficient_ft.methods import (
    LBPDCT,
    LBPWHT,
    SWAT,
    BackRazor,
    BitFit,
    Checkpointing,
    Compact,
    LastStage,
    LoRA,
    LowBit,
    Mesa,
    Method,
    NormLast,
    apply_methods,
)
from efficient_ft.models.frozen_batch_norm import freeze_batch_norm
from efficient_ft.models.view import Reason, view
from efficient_ft.testing import MODELS, batch_of, gradients, largest_difference, model_of

DROP_NOTHING: dict[str, Any] = {"sparsity": 0.0, "value_dtype": "same"}
PUBLISHED: dict[str, Any] = {"norm_saves": "input", "recompute_inputs": False}


# ------------------------------------------------------------------------------------------------ saved bytes
def closed_form(model: nn.Module, sparsity: float) -> float:
    """Return the saved bytes per image of Back Razor with shared packing, by the reference page's formula (c = 2)."""
    n, channels, heads = 197, model.embed_dim, model.blocks[0].attn.num_heads
    d, a, k = n * channels, heads * n * n, 1 - sparsity
    block = (10 * d + a) * (2 * k + 1 / 8) + 2 * d * (2 * k + 1 / 8) + 8 * d + 16 * n
    return len(model.blocks) * block + 4 * 3 * 224**2 + 4 * d


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "improvement"),
    [("deit_tiny_patch16_224", 4.4), pytest.param("vit_base_patch16_224", 4.6, marks=pytest.mark.exhaustive)],
)
def test_saved_bytes_are_those_of_the_closed_form(name: str, improvement: float) -> None:
    with torch.device("meta"):
        model = timm.create_model(name)
        set_fused_attn(False)
        unfused = timm.create_model(name)
        set_fused_attn(True)
    plain, in_parts = (executed(m, 16, (224, 224)).saved_bytes for m in (model, unfused))
    for sparsity in (0.8, 0.9, 0.95):
        kept = executed(model, 16, (224, 224), methods=[BackRazor(sparsity, **PUBLISHED)]).saved_bytes
        assert kept == pytest.approx(closed_form(model, sparsity), rel=0.03)
        improved = executed(model, 16, (224, 224), methods=[BackRazor(sparsity)]).saved_bytes
        assert improved < 0.93 * kept
        if sparsity == 0.8:
            assert in_parts > 4.3 * kept
            assert plain > 3.6 * kept
            assert plain > improvement * improved


@pytest.mark.slow
def test_what_each_form_keeps_of_a_block() -> None:
    """The saved bytes of one block equal the closed form. Recomputed inputs are not saved."""
    model = timm.create_model("deit_tiny_patch16_224", depth=1)
    n, d = 197, 197 * 192
    a = 3 * n * n
    # Saved outside the block: images; input and statistics of the final norm; input of the head; loss.
    around = 4 * 3 * 224**2 + 4 * d + 8 * n + 4 * d + 4 * 1000 + 8

    def kept(method: Method) -> float:
        return executed(model, 8, (224, 224), methods=[method]).saved_bytes - around

    # inputs of both norms, qkv, proj, fc1, GELU and fc2; q, k, v and the softmax output
    assert kept(Mesa(recompute_inputs=False)) == pytest.approx(16 * d + a + 16 * n, rel=0.005)
    # normalized inputs of both norms; q, k, v and the softmax output; inputs of proj and GELU
    assert kept(Mesa()) == pytest.approx(10 * d + a + 8 * n, rel=0.005)
    assert kept(Mesa(attention="fused")) == pytest.approx(10 * d + 8 * n, rel=0.005)
    assert kept(Checkpointing()) == pytest.approx(4 * d, rel=0.005)
    assert kept(Checkpointing(input_dtype="bf16")) == pytest.approx(2 * d, rel=0.005)
    assert kept(Checkpointing(input_dtype="int8")) == pytest.approx(d, rel=0.005)


@pytest.mark.first(1, "exhaustive")
@pytest.mark.slow
@pytest.mark.parametrize("name", ["resnet18", "mobilenetv2_100"])
def test_a_convolutional_network_keeps_nothing_dense(name: str) -> None:
    """A network with frozen BatchNorm saves no dense fp32 tensors except for the tensors of the loss."""
    model = timm.create_model(name).train()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.requires_grad_(False)
    freeze_batch_norm(model)
    plain = executed(model, 8, (64, 64)).saved_bytes
    BackRazor(0.8).apply(model)
    known = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    dense: list[tuple[int, ...]] = []

    def watch(t: Tensor) -> Tensor:
        if t.dtype == torch.float32 and t.untyped_storage().data_ptr() not in known:
            dense.append(tuple(t.shape))
        return t

    with torch.autograd.graph.saved_tensors_hooks(watch, lambda t: t):
        F.cross_entropy(model(torch.randn(2, 3, 64, 64)), torch.tensor([0, 1]))
    assert set(dense) <= {(2, 1000), ()}, "more than the loss keeps"
    assert executed(model, 8, (64, 64)).saved_bytes < plain / 7


# ------------------------------------------------------------------------------------------------ stacking
@pytest.mark.vary_one(slow=True)
@pytest.mark.parametrize("name", ["vit", "swinv2", "efficientformer"])
@pytest.mark.parametrize("derive", [True, False])
def test_low_rank_backward_packs_its_projected_input(name: str, derive: bool) -> None:
    alone, stacked, packed = model_of(name), model_of(name), model_of(name)
    LBPWHT(order=3).apply(alone)
    apply_methods(stacked, [LBPWHT(order=3), BackRazor(**DROP_NOTHING, recompute_inputs=derive)])
    apply_methods(packed, [LBPWHT(order=3), BackRazor(0.8, recompute_inputs=derive)])
    expected = gradients(alone, name)
    assert largest_difference(expected, gradients(stacked, name)) < 1e-8
    assert largest_difference(expected, gradients(packed, name)) > 1e-2


@pytest.mark.slow
def test_every_stack_keeps_less_than_its_parts() -> None:
    model = timm.create_model("deit_tiny_patch16_224", depth=4)

    def kept(*methods: Method) -> float:
        return executed(model, 8, (224, 224), methods=methods).saved_bytes

    razor, wht = kept(BackRazor()), kept(LBPWHT())
    assert kept(LBPWHT(), BackRazor()) < min(razor, wht)
    assert kept(LBPDCT(), Mesa()) < min(kept(Mesa()), kept(LBPDCT()))
    assert kept(LoRA(), BackRazor()) < min(razor, kept(LoRA()))
    assert kept(LastStage(), BackRazor()) < 0.4 * razor
    assert kept(LBPWHT(), Checkpointing()) < wht


@pytest.mark.parametrize("method", [BackRazor(value_dtype="int8"), Mesa()])
def test_nothing_is_packed_below_the_lowest_trained_layer(method: Method) -> None:
    model = model_of("vit")
    method = type(method)(**method.settings())
    apply_methods(model, [LastStage(), method])
    gradients(model, "vit")
    places = method.state_dict()["ranges"]["by_name"]
    assert places
    assert all(place.startswith("blocks.3/") for place in places)


@pytest.mark.slow
def test_tables_of_relative_positions_are_no_activations() -> None:
    """Layers that compute tables of relative positions stay exact, even with a batch size of 1."""
    model = model_of("swinv2")
    method = BackRazor(0.9)
    skipped = method.apply(model).skipped
    tables = [n for n, _ in model.named_modules() if n.endswith(("cpb_mlp.0", "cpb_mlp.2"))]
    assert len(tables) == 6
    assert set(tables) <= set(skipped)
    # The weight gradient equals the dense product of the layer's input and output gradient.
    table = model.get_submodule(tables[1])
    assert isinstance(table, nn.Linear)
    inputs: list[Tensor] = []
    outputs: list[Tensor] = []
    table.register_forward_pre_hook(lambda _m, args: inputs.append(args[0].detach().clone()))
    table.register_forward_hook(lambda _m, _a, y: y.register_hook(outputs.append) and None)
    model(batch_of("swinv2")[0][:1]).sum().backward()
    assert table.weight.grad is not None
    exact = outputs[0].flatten(0, -2).T @ inputs[0].flatten(0, -2)
    torch.testing.assert_close(table.weight.grad, exact)


def test_what_changes_the_forward_pass_is_refused_with_low_rank_backward() -> None:
    model = model_of("vit")
    LBPWHT(order=3).apply(model)
    before = [module.__dict__.get("forward") for module in model.modules()]
    for method, why in ((BackRazor(prune="both"), "prune=both: low-rank layers"), (SWAT(), "low-rank layers")):
        with pytest.raises(UserError, match=f"method {method.name}: lbp_wht .* cannot be combined: {why}"):
            method.apply(model)
    assert [module.__dict__.get("forward") for module in model.modules()] == before
    assert BackRazor().apply(model).touched


# ------------------------------------------------------------------------------------------------ the negative control
@pytest.mark.first(1, "exhaustive")
@pytest.mark.slow
@pytest.mark.parametrize("name", ["vit", "resnet"])
def test_pruning_forward_too_changes_training_s_output_and_no_bytes(name: str) -> None:
    images, _ = batch_of(name)
    outputs, kept = [], []
    for prune in ("backward", "both"):
        model, method = model_of(name), BackRazor(0.7, prune=prune)
        method.apply(model)
        outputs.append(model(images).detach())
        kept.append(executed(model.float(), 2, (MODELS[name].size,) * 2, methods=[method]).saved_bytes)
    torch.testing.assert_close(outputs[0], model_of(name)(images).detach())
    assert (outputs[1] - outputs[0]).norm() > 0.05 * outputs[0].norm()
    assert kept[0] == kept[1]


# ------------------------------------------------------------------------------------------------ invalid inputs
@pytest.mark.slow
def test_a_value_too_large_for_fp16_is_reported() -> None:
    for values in ("fp16", "bf16"):
        model, method = model_of("vit").float(), BackRazor(value_dtype=values)
        method.apply(model)
        gradients(model, "vit")
        method.step_end()
        with torch.no_grad():
            model.blocks[1].mlp.fc1.weight *= 1e6
        gradients(model, "vit")
        if values == "bf16":
            method.step_end()
            continue
        with pytest.raises(UserError, match=r"exceeds the range of fp16.*use value_dtype=bf16"):
            method.step_end()
        method.step_end()  # The error is reported only once.


@pytest.mark.parametrize("method", [BackRazor(), SWAT(), Mesa(), Checkpointing(input_dtype="int8")])
def test_empty_batches_and_samples_of_zeros(method: Method) -> None:
    model = model_of("vit")
    method = type(method)(**method.settings())
    method.apply(model)
    model(torch.empty(0, 3, 32, 32).double()).sum().backward()
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())
    images = batch_of("vit")[0]
    images[0] = 0
    F.cross_entropy(model(images), torch.tensor([0, 1])).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    assert any(p.grad is not None and p.grad.any() for p in model.parameters())


@pytest.mark.parametrize("method", [BackRazor(), SWAT(), Checkpointing()])
def test_compilation_around_packed_parts_changes_nothing(method: Method) -> None:
    model = model_of("vit").float()
    type(method)(**method.settings()).apply(model)
    expected = gradients(model, "vit")
    compiled = torch.compile(model, backend="eager")
    model.zero_grad()
    images, labels = batch_of("vit", torch.float32)
    F.cross_entropy(compiled(images), labels).backward()
    assert largest_difference(expected, {n: p.grad for n, p in model.named_parameters()}) < 1e-5


@pytest.mark.slow
def test_one_way_of_keeping_activations_at_a_time() -> None:
    model = model_of("vit")
    first = BackRazor()
    first.apply(model)
    for second in (Mesa(), Checkpointing(), BackRazor(0.5), SWAT()):
        with pytest.raises(
            UserError,
            match=rf"{second.name}: back_razor has been applied .* both methods define how",
        ):
            second.apply(model)
        assert second.applied is None
    first.remove(model)
    assert Mesa().apply(model).touched


def test_a_model_with_nothing_to_pack_is_refused() -> None:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3))

        def forward(self, x: Tensor) -> Tensor:
            return x.mean((2, 3)) * self.scale

    model = Scale()
    for method in (BackRazor(), Mesa(), Checkpointing()):
        with pytest.raises(UserError, match=f"method {method.name}: n"):
            method.apply(model)
        assert not any("forward" in m.__dict__ for m in model.modules())


def test_settings_out_of_range_name_themselves() -> None:
    for method, setting, value in (
        (BackRazor, "sparsity", 1.0),
        (BackRazor, "sparsity", -0.1),
        (BackRazor, "sparsity", float("nan")),
        (BackRazor, "sparsity", True),
        (BackRazor, "value_dtype", "fp8"),
        (BackRazor, "norm_saves", "output"),
        (BackRazor, "attention", "flash"),
        (BackRazor, "threshold", "none"),
        (BackRazor, "prune", "forward"),
        (SWAT, "sparsity", 1),
        (SWAT, "sparsity", -0.1),
        (SWAT, "sparsity", "0.8"),
        (SWAT, "refresh_interval", 0),
        (SWAT, "refresh_interval", 2.0),
        (Mesa, "attention", "flash"),
        (Checkpointing, "blocks", []),
        (Checkpointing, "blocks", [1.5]),
        (Checkpointing, "input_dtype", "sparse"),
    ):
        with pytest.raises(SettingError) as error:
            method(**{setting: value})
        assert error.value.setting == setting
    for rounded in ({"attention": "fused"}, {"value_dtype": "int8"}):
        with pytest.raises(
            SettingError, match=r"^prune must be backward with (attention=fused|value_dtype=int8), got both"
        ):
            BackRazor(prune="both", **rounded)
    with pytest.raises(SettingError, match=r"blocks must be indices from -4 to 3, got \[4\]"):
        Checkpointing(blocks=[4]).apply(MODELS["vit"].create())


@pytest.mark.vary_one(slow=True)
@pytest.mark.parametrize("selection", [None, BitFit, NormLast])
@pytest.mark.parametrize("name", ["vit", "swinv2", "efficientformer", "resnet"])
@pytest.mark.parametrize("method", [lambda: BackRazor(), lambda: BackRazor(**PUBLISHED), lambda: Mesa()])
def test_after_the_backward_pass_no_dense_tensor_is_held(method: Any, name: str, selection: Any) -> None:
    model, packing = model_of(name), method()
    apply_methods(model, [packing] if selection is None else [selection(), packing])
    images, labels = batch_of(name)
    for _ in range(2):
        F.cross_entropy(model(images), labels).backward(retain_graph=True)
        assert packing._packing is not None
        assert packing._packing.last.held is None
    # After a partial backward pass, `step_end` releases the dense tensor.
    trained = [p for p in model.parameters() if p.requires_grad]
    torch.autograd.grad(F.cross_entropy(model(images), labels), trained[-1:])
    packing.step_end()
    assert packing._packing.last.held is None


class _OwnNorm(nn.LayerNorm):
    """A layer norm composed of operations that cannot be packed."""

    def forward(self, x: Tensor) -> Tensor:
        deviation, mean = torch.std_mean(x, -1, keepdim=True, correction=0)
        return torch.addcmul(self.bias, (x - mean) / deviation, self.weight)


@pytest.mark.slow
def test_operations_that_stay_dense_are_named_with_their_bytes() -> None:
    model = timm.create_model("vit_tiny_patch16_224", depth=2, num_classes=5)
    assert LowBit().apply(copy.deepcopy(model)).notes == ()
    for block in model.blocks:
        block.norm2 = _OwnNorm(192)
        block.mlp.act = nn.Softplus()
    changed = copy.deepcopy(model)
    method = LowBit()
    report = method.apply(changed)
    assert {n for n, why in report.skipped.items() if why.reason == Reason.UNPACKED_OPERATION} == {
        "blocks.0.norm2",
        "blocks.1.norm2",
    }
    (note,) = report.notes
    assert note in report.details()
    sizes = re.findall(r"(\w+) ([0-9.]+ \w+)", note.partition(": ")[2])
    named = {name: parse_bytes(name, size) / 2**20 for name, size in sizes}
    units = 2 * 197 * 192 * 4 / 2**20  # MiB of one value per token and channel in both blocks
    assert named["softplus"] == pytest.approx(4 * units, abs=0.01)
    assert named["addcmul"] == pytest.approx(units, abs=0.01)
    # The reported bytes are the difference to a network without these operations.
    dense = executed(changed, 2, (224, 224), methods=[method]).saved_bytes / 2**20
    for block in changed.blocks:
        block.norm2, block.mlp.act = nn.LayerNorm(192), nn.GELU()
    packed = executed(changed, 2, (224, 224), methods=[method]).saved_bytes / 2**20
    assert dense - packed == pytest.approx(sum(named.values()), abs=0.6 * units)


@pytest.mark.slow
def test_compact_keeps_nothing_for_a_relu_after_a_batch_norm() -> None:
    plain, model = model_of("mobilenet"), model_of("mobilenet")
    Compact().apply(model)
    bits = []

    def record(tensor: Tensor) -> Tensor:
        if tensor.dtype == torch.uint8:
            bits.append(tensor)
        return tensor

    images, labels = batch_of("mobilenet")
    with torch.autograd.graph.saved_tensors_hooks(record, lambda tensor: tensor):
        F.cross_entropy(model(images), labels)
    relus = [m for m in model.modules() if isinstance(m, (nn.ReLU, nn.ReLU6))]
    assert relus
    assert not bits
    assert largest_difference(gradients(model, "mobilenet"), gradients(plain, "mobilenet")) < 1e-12


@pytest.mark.slow
def test_mixed_attention_is_recomputed_in_every_fourth_block() -> None:
    with torch.device("meta"):
        model = timm.create_model("vit_tiny_patch16_224", depth=9, num_classes=3)
    kept = {}
    for attention in ("kept", "mixed", "recomputed"):
        kept[attention] = executed(model, 2, (224, 224), methods=[Compact(attention=attention)]).saved_bytes
    per_block = (kept["kept"] - kept["recomputed"]) / 9
    assert per_block == (197 * 192 + 197 * 3) * 4  # the output of attention, and one log-sum-exp per head and token
    assert kept["kept"] - kept["mixed"] == 2 * per_block


@pytest.mark.parametrize("name", ["vit", "swinv2"])
def test_compact_leaves_the_outputs_as_they_are(name: str) -> None:
    plain = model_of(name).float()
    model = copy.deepcopy(plain)
    Compact(attention="kept").apply(model)
    x, _ = batch_of(name)
    torch.testing.assert_close(model(x.float()), plain(x.float()), rtol=1e-6, atol=1e-6)


@pytest.mark.slow
def test_every_usual_normalization_is_packed() -> None:
    settings: dict[str, Any] = {"layers": (1, 1, 1, 1), "channels": (16, 16, 32, 32), "num_classes": 5}
    group = partial(nn.GroupNorm, 4)
    model = timm.create_model("resnet26", norm_layer=lambda channels, **_: group(channels), **settings)
    for method in (BackRazor(), Mesa(), LowBit(), Compact()):
        report = method.apply(copy.deepcopy(model))
        assert {n for n, m in model.named_modules() if isinstance(m, nn.GroupNorm)} <= set(report.touched)
        assert report.notes == ()
    for name in ("vit", "resnet", "swinv2", "efficientformer", "mobilenet"):
        report = BackRazor().apply(model_of(name))
        assert all(why.reason != Reason.UNPACKED_OPERATION for why in report.skipped.values())
        assert all("attention bias" in note for note in report.notes), report.notes


@pytest.mark.first(1, "exhaustive")
@pytest.mark.slow
@pytest.mark.parametrize("name", ["eva02_tiny_patch14_224", "vit_small_patch16_rope_224", "vit_tiny_patch16_224"])
def test_rotary_embeddings_swiglu_and_rms_norm_are_packed(name: str) -> None:
    small: dict[str, Any] = {"depth": 2, "num_classes": 5}
    if name.startswith("vit_tiny"):
        small |= {"norm_layer": partial(RmsNorm, eps=1e-6), "mlp_layer": SwiGLUPacked}
    with torch.device("meta"):
        model = timm.create_model(name, **small)
    plain = executed(model, 2, model.default_cfg["input_size"][1:]).saved_bytes
    method = LowBit()
    report = method.apply(model)
    kept = executed(model, 2, model.default_cfg["input_size"][1:], methods=[method]).saved_bytes
    sizes = re.findall(r" ([0-9.]+ \w+)", "".join(report.notes).partition(": ")[2])
    dense = sum(parse_bytes("size", size) for size in sizes)
    assert dense < 0.02 * plain, report.notes
    assert kept < 0.2 * plain


def test_a_network_of_sparse_weights_is_seen_and_counted_like_another() -> None:
    model = model_of("vit")
    before = view(model)
    apply_methods(model, [SWAT()])
    assert view(model).blocks == before.blocks
    assert view(model).head == before.head
    size = (MODELS["vit"].size,) * 2
    assert published(model, 2, size).bytes == published(model_of("vit"), 2, size).bytes


# ------------------------------------------------------------------------------------------------ on a GPU
@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("method", "cosine"),
    [
        (lambda: BackRazor(**PUBLISHED, threshold="exact"), 0.9999),
        (lambda: BackRazor(), 0.9999),
        (lambda: BackRazor(attention="fused"), 0.99),
        (lambda: BackRazor(value_dtype="int8"), 0.99),
        (lambda: Mesa(), 0.99),
        (lambda: Checkpointing(input_dtype="bf16"), 0.999),
    ],
    ids=["published", "improved", "fused", "back_razor_mesa", "mesa", "checkpointing"],
)
def test_a_gpu_gives_the_gradients_of_the_cpu(method: Any, cosine: float, precision: str) -> None:
    images, labels = torch.randn(4, 3, 224, 224), torch.arange(4)

    def gradient(device: str) -> Tensor:
        torch.manual_seed(0)
        model = timm.create_model("deit_tiny_patch16_224", depth=3, num_classes=10)
        apply_methods(model, [method()])
        model.to(device).train()
        with torch.autocast(device, torch.bfloat16, enabled=precision == "bf16" and device == "cuda"):
            loss = F.cross_entropy(model(images.to(device)), labels.to(device))
        loss.backward()
        return torch.cat([p.grad.flatten().cpu() for p in model.parameters()])

    on_cpu, on_gpu = gradient("cpu"), gradient("cuda")
    assert F.cosine_similarity(on_cpu, on_gpu, dim=0) > (cosine if precision == "fp32" else 0.98)
    assert on_gpu.norm() == pytest.approx(on_cpu.norm(), rel=0.01 if precision == "fp32" else 0.05)
