"""Table of the transformer blocks that can be split into attention and feed-forward network.

Each block in the table has two halves. In each half, the input passes through a series of submodules, and the result is
added to the input. A method can therefore drop or merge tokens between the two halves. Blocks are recognized by the
forward pass of their class. A class that inherits this forward pass is also recognized.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only


@dataclass(frozen=True)
class BlockForm:
    """The two halves of a block, and the inputs of its forward pass.

    Attributes:
        attention: names of the submodules of the first half, in order of execution. A name can also refer to a
            parameter (such as a LayerScale weight), by which the tokens are multiplied. Names that the block does not
            have are skipped.
        network: names of the submodules of the second half, in the same format.
        attends: name of the submodule in `attention` that receives `inputs` in addition to the tokens. If this module
            returns a tuple, the first element is used.
        inputs: names of the inputs of the forward pass after the tokens, in order.
        rotary: name of the input that contains the rotary position embeddings of the patch tokens, or None.
    """

    attention: tuple[str, ...]
    network: tuple[str, ...]
    attends: str
    inputs: tuple[str, ...]
    rotary: str | None = None

    def named(self, others: Sequence[Any], keywords: Mapping[str, Any]) -> dict[str, Any]:
        """Return all arguments of ``forward`` except the tokens, by name."""
        return {**dict(zip(self.inputs, others, strict=False)), **keywords}

    def attend(self, block: nn.Module, x_BNC: Tensor, inputs: Mapping[str, Any]) -> Tensor:
        """Return the output of the first half without the residual connection."""
        for name in self.attention:
            part = getattr(block, name, None)
            if name == self.attends:
                assert part is not None
                x_BNC = part(x_BNC, **inputs)
                x_BNC = x_BNC[0] if isinstance(x_BNC, tuple) else x_BNC
            else:
                x_BNC = _passed(part, x_BNC)
        return x_BNC

    def feed_forward(self, block: nn.Module, x_BNC: Tensor) -> Tensor:
        """Return the output of the second half without the residual connection."""
        for name in self.network:
            x_BNC = _passed(getattr(block, name, None), x_BNC)
        return x_BNC


def _passed(part: Any, x: Tensor) -> Tensor:
    if part is None:
        return x
    result: Tensor = part * x if isinstance(part, Tensor) else part(x)
    return result


def _form(attention: str, network: str, inputs: str, attends: str = "attn", rotary: str | None = None) -> BlockForm:
    return BlockForm(tuple(attention.split()), tuple(network.split()), attends, tuple(inputs.split()), rotary)


_TIMM = "timm.models"
_HF = "transformers.models"
_OF_VIT = _form("layernorm_before attention dropout", "layernorm_after mlp dropout", "attention_mask", "attention")
_OF_DINO = _form(
    "norm1 attention layer_scale1 drop_path", "norm2 mlp layer_scale2 drop_path", "attention_mask", "attention"
)
_OF_CLIP = _form("layer_norm1 self_attn", "layer_norm2 mlp", "attention_mask", "self_attn")

#: Forms of the supported blocks, by the full name of the class that defines the forward pass.
FORMS: dict[str, BlockForm] = {
    f"{_TIMM}.vision_transformer.Block": _form(
        "norm1 attn ls1 drop_path1", "norm2 mlp ls2 drop_path2", "attn_mask is_causal"
    ),
    f"{_TIMM}.vision_transformer.ResPostBlock": _form(
        "attn norm1 drop_path1", "mlp norm2 drop_path2", "attn_mask is_causal"
    ),
    f"{_TIMM}.eva.EvaBlock": _form(
        "norm1 attn gamma_1 drop_path1", "norm2 mlp gamma_2 drop_path2", "rope attn_mask is_causal", rotary="rope"
    ),
    f"{_TIMM}.eva.EvaBlockPostNorm": _form(
        "attn norm1 drop_path1", "mlp norm2 drop_path2", "rope attn_mask is_causal", rotary="rope"
    ),
    f"{_TIMM}.deepseek_vit.DeepseekVitBlock": _form(
        "norm1 attn drop_path1", "norm2 mlp drop_path2", "rope", rotary="rope"
    ),
    f"{_HF}.vit.modeling_vit.ViTLayer": _OF_VIT,
    f"{_HF}.deit.modeling_deit.DeiTLayer": _OF_VIT,
    f"{_HF}.ijepa.modeling_ijepa.IJepaLayer": _OF_VIT,
    f"{_HF}.dinov2.modeling_dinov2.Dinov2Layer": _OF_DINO,
    f"{_HF}.dinov2_with_registers.modeling_dinov2_with_registers.Dinov2WithRegistersLayer": _OF_DINO,
    f"{_HF}.dinov3_vit.modeling_dinov3_vit.DINOv3ViTLayer": _form(
        "norm1 attention layer_scale1 drop_path",
        "norm2 mlp layer_scale2 drop_path",
        "attention_mask position_embeddings",
        "attention",
        "position_embeddings",
    ),
    f"{_HF}.clip.modeling_clip.CLIPEncoderLayer": _OF_CLIP,
    f"{_HF}.siglip.modeling_siglip.SiglipEncoderLayer": _OF_CLIP,
    f"{_HF}.siglip2.modeling_siglip2.Siglip2EncoderLayer": _OF_CLIP,
}

_MULTIHEAD = "nn.MultiheadAttention does not expose its queries and keys"

#: Reasons why other blocks are not supported, by the full name of the class that defines the forward pass.
_WHY_NOT = {
    f"{_TIMM}.vision_transformer.ParallelScalingBlock": "attention and feed-forward network run in parallel",
    f"{_TIMM}.vision_transformer.DiffParallelScalingBlock": "attention and feed-forward network run in parallel",
    f"{_TIMM}.vision_transformer.ParallelThingsBlock": "each half consists of several parallel branches",
    f"{_TIMM}.beit.Block": "attention uses relative position biases",
    f"{_TIMM}.vision_transformer_relpos.RelPosBlock": "attention uses relative position biases",
    f"{_TIMM}.vision_transformer_relpos.ResPostRelPosBlock": "attention uses relative position biases",
    f"{_TIMM}.mlp_mixer.MixerBlock": "the layers require a fixed number of tokens",
    f"{_TIMM}.mlp_mixer.ResBlock": "the layers require a fixed number of tokens",
    f"{_TIMM}.mlp_mixer.SpatialGatingBlock": "the layers require a fixed number of tokens",
    f"{_TIMM}.levit.LevitBlock": "attention uses relative position biases",
    f"{_TIMM}.cait.LayerScaleBlock": "attention maps are mixed across heads (talking-heads attention)",
    f"{_TIMM}.vision_transformer_sam.Block": "attention uses windows and relative position biases",
    f"{_TIMM}.hiera.HieraBlock": "attention uses windows and pools tokens",
    f"{_TIMM}.swin_transformer.SwinTransformerBlock": "attention uses windows of a grid",
    f"{_TIMM}.swin_transformer_v2.SwinTransformerV2Block": "attention uses windows of a grid",
    "torchvision.models.vision_transformer.EncoderBlock": _MULTIHEAD,
    "open_clip.transformer.ResidualAttentionBlock": _MULTIHEAD,
    f"{_HF}.beit.modeling_beit.BeitLayer": "attention uses relative position biases",
    f"{_HF}.swin.modeling_swin.SwinLayer": "attention uses windows of a grid",
    f"{_HF}.swinv2.modeling_swinv2.Swinv2Layer": "attention uses windows of a grid",
    f"{_HF}.hiera.modeling_hiera.HieraLayer": "attention uses windows and pools tokens",
    f"{_HF}.sam.modeling_sam.SamVisionLayer": "attention uses windows and relative position biases",
    "torchvision.models.swin_transformer.SwinTransformerBlock": "attention uses windows of a grid",
    "torchvision.models.swin_transformer.SwinTransformerBlockV2": "attention uses windows of a grid",
    "torch.nn.modules.transformer.TransformerEncoderLayer": _MULTIHEAD,
}


#: Blocks that accept any number of tokens in any order, but cannot be split into two halves.
_WHOLE = {
    f"{_TIMM}.vision_transformer.ParallelScalingBlock",
    f"{_TIMM}.vision_transformer.DiffParallelScalingBlock",
    f"{_TIMM}.vision_transformer.ParallelThingsBlock",
    "torchvision.models.vision_transformer.EncoderBlock",
    "open_clip.transformer.ResidualAttentionBlock",
    "torch.nn.modules.transformer.TransformerEncoderLayer",
}


def accepts_any_tokens(block: type[nn.Module]) -> bool:
    """Return True if a class of blocks accepts any number of tokens in any order."""
    return form_of(block) is not None or _owner(block.forward) in _WHOLE


def form_of(block: type[nn.Module]) -> BlockForm | None:
    """Return the form of a class of blocks, or None if the forward pass of the class is not in the table."""
    return FORMS.get(_owner(block.forward))


def why_not(block: type[nn.Module]) -> str | None:
    """Return the reason why a class of blocks is not supported, or None if the reason is not known."""
    return _WHY_NOT.get(_owner(block.forward))


def _owner(forward: Callable[..., Any] | None) -> str:
    """Return the full name of the class that defines a forward pass, or "" if the class cannot be found.

    The name is compared with the function in the module, so that a function with a copied name is not accepted.
    """
    while forward is not None:
        name = f"{forward.__module__}.{forward.__qualname__}".removesuffix(".forward")
        module, _, owner = name.rpartition(".")
        if getattr(getattr(sys.modules.get(module), owner, None), "forward", None) is forward:
            return name
        # transformers wraps the forward pass of each subclass again.
        wraps = getattr(forward, "__code__", None)
        wrapped = wraps is not None and wraps.co_name == _WRAPPER
        forward = getattr(forward, "__wrapped__", None) if wrapped else None
    return ""


#: Name of the function in transformers that wraps the forward pass of a block to run gradient checkpointing.
_WRAPPER = "forward_with_checkpointing"


def rotary_of(rotary: Any, index_BK: Tensor) -> Any:
    """Return the rotary embeddings of the patch tokens at `index_BK`.

    Args:
        rotary: a tensor or a tuple of tensors. The shape is (L, E) or (H, L, E) if all images share the embeddings.
            Otherwise, the shape is (B, 1, L, E) or (B, H, L, E). L is the number of patch tokens before any token is
            removed.
        index_BK: index of the embedding of each remaining patch token.

    Returns:
        Embeddings of shape (B, 1, K, E) or (B, H, K, E), in the same structure as `rotary`.
    """
    return tree_map_only(Tensor, lambda of: _taken(of, index_BK), rotary)


def _taken(embedding: Tensor, index_BK: Tensor) -> Tensor:
    if embedding.dim() < 4:
        rows = embedding if embedding.dim() == 3 else embedding[None]
        return rows[:, index_BK].transpose(0, 1)
    index = index_BK[:, None, :, None].expand(-1, embedding.shape[1], -1, embedding.shape[-1])
    return torch.gather(embedding.expand(index_BK.shape[0], -1, -1, -1), 2, index)


def positions_in(form: BlockForm, inputs: Mapping[str, Any]) -> int | None:
    """Return the number L of rotary embeddings in the inputs of a block, or None if there are none."""
    rotary = None if form.rotary is None else inputs.get(form.rotary)
    if rotary is None:
        return None
    first = rotary if isinstance(rotary, Tensor) else rotary[0]
    return int(first.shape[-2])


def example_inputs(block: nn.Module, patches: int, like: Tensor) -> dict[str, Any]:
    """Return inputs for a block with `patches` patch tokens, in the data type and on the device of `like`.

    Masks are None, and rotary embeddings are zeros.
    """
    form = form_of(type(block))
    if form is None:
        return {}
    inputs: dict[str, Any] = {name: None for name in form.inputs if name.endswith("mask")}
    if form.rotary is not None:
        channels = int(getattr(block, form.attends).head_dim)
        if form.rotary == "rope":  # one tensor contains sine and cosine
            inputs[form.rotary] = like.new_zeros(patches, 2 * channels)
        else:
            inputs[form.rotary] = (like.new_zeros(patches, channels), like.new_zeros(patches, channels))
    return inputs
