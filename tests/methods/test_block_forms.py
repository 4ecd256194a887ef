"""Tests of the table of block forms: the halves of each block, its inputs, and rotary embeddings of dropped tokens."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import transformers
from timm.layers import PatchDropoutWithIndices
from timm.layers.pos_embed_sincos import apply_keep_indices_nlc
from timm.models.deepseek_vit import DeepseekVitBlock
from timm.models.eva import Eva, EvaBlock, EvaBlockPostNorm
from timm.models.vision_transformer import Block, ResPostBlock
from torch import Tensor, nn

from efficient_ft.core.errors import UserError
from efficient_ft.methods import Method
from efficient_ft.methods.tokens.block_forms import FORMS, example_inputs, form_of, rotary_of, why_not
from efficient_ft.methods.tokens.evit import EViT
from efficient_ft.methods.tokens.patch_dropout import PatchDropout
from efficient_ft.methods.tokens.tome import ToMe
from efficient_ft.ops.tokens import current_tokens
from efficient_ft.testing import lively

WIDTH, HEADS, PATCHES = 32, 2, 9


def _of_transformers(name: str, config: str, **settings: Any) -> nn.Module:
    """Create a block of a small network from `transformers`."""
    sizes = {"hidden_size": WIDTH, "num_attention_heads": HEADS, "intermediate_size": 48, "num_hidden_layers": 1,
             "image_size": 12, "patch_size": 4, **settings}  # fmt: skip
    model = getattr(transformers, name)(getattr(transformers, config)(**sizes))
    return next(module for module in model.modules() if form_of(type(module)) is not None)


@pytest.mark.parametrize(
    ("network", "config", "settings", "reason"),
    [
        ("HieraModel", "HieraConfig", {}, "attention uses windows and pools tokens"),
        (
            "SamVisionModel",
            "SamVisionConfig",
            {"num_hidden_layers": 2, "global_attn_indexes": [1]},
            "attention uses windows and relative position biases",
        ),
        ("ResNetModel", "ResNetConfig", {}, "ResNetModel has no attention blocks"),
    ],
)
@pytest.mark.parametrize("method", [ToMe(1), PatchDropout()])
def test_the_difference_of_an_unsupported_network_is_named(
    method: Method, network: str, config: str, settings: dict[str, Any], reason: str
) -> None:
    with torch.device("meta"):
        model = getattr(transformers, network)(getattr(transformers, config)(**settings))
    with pytest.raises(UserError, match=reason):
        method.apply(model)


class Encoder(nn.Module):
    """A network of torch's encoder layers for images of 16×16 pixels. `patches` selects patch tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, WIDTH, 4, 4)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, HEADS, 48, batch_first=True, dropout=0.0) for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, 3)
        self.patches: Tensor | None = None

    def forward(self, images: Tensor) -> Tensor:
        x = self.patch(images).flatten(2).mT
        if self.patches is not None:
            x = x.gather(1, self.patches[..., None].expand(-1, -1, WIDTH))
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean(1))


def test_patches_are_dropped_before_torch_s_encoder_layers() -> None:
    model, images = Encoder().double(), torch.randn(2, 3, 16, 16, dtype=torch.float64)
    with pytest.raises(UserError, match=r"TransformerEncoderLayer\): nn\.MultiheadAttention does not expose"):
        ToMe(1).apply(model, image_size=16)
    method = PatchDropout(keep_rate=0.5)
    method.apply(model, image_size=16)
    found: list[Any] = []
    handle = model.layers[1].linear1.register_forward_hook(lambda *_: found.append(current_tokens()))
    output = model.train()(images)
    handle.remove()
    assert found[0].grid_index_BL.shape == (2, 8)
    method.remove(model)
    model.patches = found[0].grid_index_BL
    torch.testing.assert_close(output, model(images), rtol=1e-12, atol=1e-12)


_eva = partial(EvaBlock, WIDTH, HEADS, num_prefix_tokens=2, drop_path=0.3)

#: A function that creates a block for each form.
BLOCKS: dict[str, Callable[[], nn.Module]] = {
    "timm.models.vision_transformer.Block": lambda: Block(WIDTH, HEADS, init_values=0.5, drop_path=0.3, proj_drop=0.2),
    "timm.models.vision_transformer.ResPostBlock": lambda: ResPostBlock(WIDTH, HEADS, init_values=0.5, drop_path=0.3),
    "timm.models.eva.EvaBlock": lambda: _eva(init_values=0.5, swiglu_mlp=True, scale_mlp=True, qk_norm=True),
    "timm.models.eva.EvaBlockPostNorm": lambda: EvaBlockPostNorm(WIDTH, HEADS, num_prefix_tokens=2, drop_path=0.3),
    "timm.models.deepseek_vit.DeepseekVitBlock": lambda: DeepseekVitBlock(WIDTH, HEADS),
    "transformers.models.vit.modeling_vit.ViTLayer": lambda: _of_transformers("ViTModel", "ViTConfig"),
    "transformers.models.deit.modeling_deit.DeiTLayer": lambda: _of_transformers("DeiTModel", "DeiTConfig"),
    "transformers.models.ijepa.modeling_ijepa.IJepaLayer": lambda: _of_transformers("IJepaModel", "IJepaConfig"),
    "transformers.models.dinov2.modeling_dinov2.Dinov2Layer": lambda: _of_transformers(
        "Dinov2Model", "Dinov2Config", drop_path_rate=0.3
    ),
    "transformers.models.dinov2_with_registers.modeling_dinov2_with_registers.Dinov2WithRegistersLayer": lambda: (
        _of_transformers("Dinov2WithRegistersModel", "Dinov2WithRegistersConfig", use_swiglu_ffn=True)
    ),
    "transformers.models.dinov3_vit.modeling_dinov3_vit.DINOv3ViTLayer": lambda: _of_transformers(
        "DINOv3ViTModel", "DINOv3ViTConfig", use_gated_mlp=True
    ),
    "transformers.models.clip.modeling_clip.CLIPEncoderLayer": lambda: _of_transformers(
        "CLIPVisionModel", "CLIPVisionConfig"
    ),
    "transformers.models.siglip.modeling_siglip.SiglipEncoderLayer": lambda: _of_transformers(
        "SiglipVisionModel", "SiglipVisionConfig"
    ),
    "transformers.models.siglip2.modeling_siglip2.Siglip2EncoderLayer": lambda: _of_transformers(
        "Siglip2VisionModel", "Siglip2VisionConfig"
    ),
}


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("training", [True, False])
def test_the_halves_of_a_block_are_its_forward_pass(name: str, training: bool) -> None:
    torch.manual_seed(0)
    block = lively(BLOCKS[name]()).double().train(training)
    assert f"{type(block).__module__}.{type(block).__qualname__}" == name
    form = FORMS[name]
    assert form_of(type(block)) is form
    prefix = getattr(getattr(block, form.attends), "num_prefix_tokens", 2)
    x = torch.randn(2, prefix + PATCHES, WIDTH, dtype=torch.float64, requires_grad=True)
    inputs = example_inputs(block, PATCHES, x)
    if form.rotary is not None:
        angles = torch.rand(PATCHES, WIDTH // HEADS, dtype=torch.float64)
        sine_and_cosine = angles.sin(), angles.cos()
        inputs[form.rotary] = torch.cat(sine_and_cosine, -1) if form.rotary == "rope" else sine_and_cosine[::-1]
    torch.manual_seed(1)
    expected = block(x, **inputs)
    torch.manual_seed(1)
    half = x + form.attend(block, x, inputs)
    found = half + form.feed_forward(block, half)
    assert torch.equal(found, expected)
    (a,), (b,) = (torch.autograd.grad(result.square().sum(), x) for result in (found, expected))
    torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_a_block_is_recognized_by_the_forward_pass_of_its_class() -> None:
    class Inherits(Block):
        pass

    class Changes(Block):
        def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
            return 2 * super().forward(x, attn_mask, is_causal)

    assert form_of(Inherits) is form_of(Block)
    assert form_of(Changes) is None
    Changes.forward.__module__, Changes.forward.__qualname__ = Block.forward.__module__, Block.forward.__qualname__
    assert form_of(Changes) is None, "the name of the function is not sufficient"
    assert why_not(Block) is None


# ------------------------------------------------------------------------------------------------ rotary embeddings
def small_eva(**settings: Any) -> Eva:
    """Create a small network with rotary embeddings in float64, for images of 32×32 pixels (an 8×8 grid)."""
    torch.manual_seed(0)
    sizes = {"img_size": 32, "patch_size": 4, "embed_dim": 48, "depth": 4, "num_heads": 3, "num_classes": 5}
    forms = {"use_abs_pos_emb": False, "use_rot_pos_emb": True, "rope_type": "dinov3", "num_reg_tokens": 2}
    model = Eva(**{**sizes, **forms, **settings})  # type: ignore[arg-type]
    lively(model).double()
    return model


NETWORKS: dict[str, dict[str, Any]] = {
    "dinov3": {"rope_rotate_half": True, "init_values": 1.0, "global_pool": "token"},
    "eva02": {"rope_type": "cat", "use_abs_pos_emb": True, "swiglu_mlp": True, "scale_mlp": True, "num_reg_tokens": 0},
    "pe": {"rope_type": "cat", "class_token": True, "global_pool": "map", "attn_pool_num_heads": 2},
    "mixed": {"rope_type": "mixed", "global_pool": "avg"},
    "qk norm, gates": {"attn_type": "rope", "qk_norm": True, "num_reg_tokens": 1},
    "norms after": {"use_post_norm": True, "qkv_fused": False},
}


def images(count: int = 2) -> Tensor:
    return torch.randn(count, 3, 32, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


class _TheSame(PatchDropoutWithIndices):
    """Patch dropout of `timm`, with the indices that `efficient_ft` draws."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        count = x.shape[1] - self.num_prefix_tokens
        kept = torch.rand(len(x), count).argsort(1)[:, : count // 2].sort(1).values
        taken = x[:, self.num_prefix_tokens :].gather(1, kept.unsqueeze(-1).expand(-1, -1, x.shape[-1]))
        return torch.cat([x[:, : self.num_prefix_tokens], taken], 1), kept


@pytest.mark.parametrize("name", NETWORKS)
def test_dropped_patches_equal_those_of_timm(name: str) -> None:
    expected, found = small_eva(**NETWORKS[name], patch_drop_rate=0.5), small_eva(**NETWORKS[name])
    assert expected.patch_drop is not None
    expected.patch_drop = _TheSame(0.5, expected.patch_drop.num_prefix_tokens)
    PatchDropout(0.5).apply(found)
    values = []
    for model in (expected, found):
        torch.manual_seed(7)
        output = model.train()(images())
        output.square().sum().backward()
        values.append({"output": output, **{n: p.grad for n, p in model.named_parameters() if p.grad is not None}})
    assert values[0].keys() == values[1].keys()
    for key, value in values[0].items():
        torch.testing.assert_close(values[1][key], value, rtol=1e-10, atol=1e-12, msg=key)


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("method", [partial(ToMe, 0), partial(PatchDropout, 1.0)], ids=["tome", "patch_dropout"])
def test_off_values_do_not_change_a_bit(name: str, method: Callable[[], Method]) -> None:
    plain, own = small_eva(**NETWORKS[name]), small_eva(**NETWORKS[name])
    method().apply(own)
    for training in (True, False):
        assert torch.equal(own.train(training)(images()), plain.train(training)(images()))


@pytest.mark.parametrize("name", NETWORKS)
def test_a_kept_token_has_its_own_embedding_whatever_the_order(name: str) -> None:
    """EViT with ``keep_rate=1`` only sorts the tokens, which does not change the class token or the mean."""
    plain, own = small_eva(**NETWORKS[name]), small_eva(**NETWORKS[name])
    EViT([0, 2], keep_rate=1.0).apply(own)
    torch.testing.assert_close(own(images()), plain(images()), rtol=1e-10, atol=1e-12)


def test_embeddings_of_some_tokens_are_those_that_timm_gathers() -> None:
    index = torch.randint(0, PATCHES, (3, 4))
    x = torch.zeros(3, PATCHES, 8)
    axial, mixed = torch.randn(PATCHES, 8), torch.randn(2, PATCHES, 8)
    assert torch.equal(rotary_of(axial, index), apply_keep_indices_nlc(x, axial, index).unsqueeze(1))
    assert torch.equal(rotary_of(mixed, index), apply_keep_indices_nlc(x, mixed, index))
    of_images = torch.randn(3, 1, PATCHES, 8)
    assert torch.equal(rotary_of(of_images, index)[1, 0, 2], of_images[1, 0, index[1, 2]])
    cosine, sine = rotary_of((axial, axial + 1), index)
    assert torch.equal(sine, cosine + 1)


def test_an_own_forward_pass_is_refused_in_every_block_if_there_are_rotary_embeddings() -> None:
    class Changes(EvaBlock):
        def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            return super().forward(x, *args, **kwargs)

    model = small_eva()
    model.blocks[3].__class__ = Changes
    with pytest.raises(UserError, match=r"blocks\.3 of Eva \(Changes\) has a custom forward pass"):
        EViT([1]).apply(model)


@pytest.mark.slow
def test_the_methods_train_on_images_of_another_size() -> None:
    other = torch.randn(2, 3, 48, 24, dtype=torch.float64)
    plain, own = small_eva(dynamic_img_size=True).eval(), small_eva(dynamic_img_size=True).eval()
    EViT([0, 2], keep_rate=1.0).apply(own)
    torch.testing.assert_close(own(other), plain(other), rtol=1e-10, atol=1e-12)
    for method in (ToMe(4), EViT([1]), PatchDropout(0.5)):
        model = small_eva(dynamic_img_size=True)
        method.apply(model)
        model(other).square().sum().backward()
        assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("name", NETWORKS)
def test_recomputation_by_timm_gives_the_same_gradients(name: str) -> None:
    for make in (partial(EViT, [0, 2]), partial(ToMe, 4), partial(PatchDropout, 0.5)):
        found = []
        for recomputes in (False, True):
            model = small_eva(**NETWORKS[name])
            make().apply(model)
            model.set_grad_checkpointing(recomputes)
            torch.manual_seed(2)
            model.train()(images()).square().sum().backward()
            found.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
        for parameter, grad in found[0].items():
            torch.testing.assert_close(found[1][parameter], grad, rtol=1e-10, atol=1e-12, msg=parameter)


def test_all_blocks_with_rotary_embeddings_must_be_specified() -> None:
    with pytest.raises(UserError, match=r"blocks must be a list of all blocks with rotary embeddings \(blocks\.2, …\)"):
        EViT([0]).apply(small_eva(), blocks=["blocks.0", "blocks.1"])
