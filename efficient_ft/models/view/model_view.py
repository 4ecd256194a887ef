"""The view of a model: the names of its parts, and the token layout of the input of each layer."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from efficient_ft.core.errors import SettingError, UserError, hint
from efficient_ft.models.marks import added_modules, is_inside, routed_modules
from efficient_ft.models.view.head import head_of, networks_in, other_heads
from efficient_ft.models.view.inputs import advice_for_inputs, other_inputs, refuse_required_inputs
from efficient_ft.models.view.layers import Layer, Reason, Skipped
from efficient_ft.models.view.probe import Call, Probed, layout_of, probe, takes_tokens
from efficient_ft.models.view.specified import specified
from efficient_ft.models.view.structure import (
    above,
    after,
    are_halves,
    parameters_under,
    shared_blocks,
    stages_of,
    stem_of,
)
from efficient_ft.models.view.towers import after_towers, holding, last_stages, pattern_of, towers_of

#: Name of the module that is excluded from the last stage, by model class, as reported for LBP-WHT.
LAST_STAGE_WITHOUT = {"EfficientFormerV2": "downsample"}
#: Pattern for the names of attention classes. Blocks with attention and an MLP (``ClassAttentionBlock``) do not match.
_ATTENTION = re.compile(r"^(?!.*Block$).*(Attention|Attn|MHSA|GPSA|XCA|LiteMLA)")
#: Functions that modules of attention call.
_ATTENTION_FUNCTIONS = {F.scaled_dot_product_attention, F.multi_head_attention_forward, F.softmax, torch.softmax,
                        Tensor.softmax}  # fmt: skip
#: Maximum number of prefix tokens that is inferred from the number of tokens.
_MOST_PREFIX_TOKENS = 16
#: Image size (H, W) in pixels for models that do not declare a size.
_USUAL_SIZE = (224, 224)


class ModelView:
    """A view of a model for methods. All names are full module names in forward order.

    Creating a view reads the structure of the model. The first access to `layers`, `block_grid` or `functions` runs a
    forward pass on fake tensors, and raises a UserError if the model cannot run on an input of `image_size`. Later
    changes to the model do not update the view. Create a new view after changing the model.

    Attributes:
        model: The model, which a view never changes.
        image_size: Image size (H, W) in pixels for the forward pass, or (tokens,) for a text model.
        stages: Block names of each stage, in order. An isotropic transformer is divided into four equal stages.
        stage_extras: Names of the other modules of each stage, for example downsampling layers.
        blocks: Names of all blocks.
        head: Names of the classifier's modules. See `models.view.head`.
        outside: Names of other modules and parameters that are outside of the pretrained networks in the model.
        head_note: Phrase that lists the inferred parts in reports, or an empty string if the head was declared.
        towers: Names of the networks with blocks if the model contains several, for example two image towers.
        tail: Names of the modules that run after the last stage (norms, decoder, head). If the model contains several
            networks, these modules follow the networks with `blocks`.
        prefix_note: Phrase that states the inferred number of prefix tokens in reports, or an empty string if the
            number was declared. The first access to `prefix_tokens` sets this attribute.
        size_note: Phrase that states the assumed image size in reports, or an empty string if the size is known or was
            not used. The forward pass on fake tensors sets this attribute.
    """

    def __init__(self, model: nn.Module, image_size: tuple[int, ...] | None = None, call: Call | None = None) -> None:
        self.model = model
        self.image_size = image_size or default_image_size(model)
        self.stages, self.stage_extras, container = stages_of(model)
        self.blocks: tuple[str, ...] = tuple(block for stage in self.stages for block in stage)
        head = head_of(model, self.image_size)
        self.head, self.outside, self.head_note = head.modules, head.others, head.note
        self.towers = towers_of(model, self.image_size)
        towers = self.towers
        self.tail: tuple[str, ...] = (
            after_towers(model, towers, container) if towers else after(model, container, len(self.stages))
        )
        self.prefix_note = self.size_note = ""
        self._size_is_given = image_size is not None
        self._size_is_assumed = image_size is None and assumed_size_note(model) != ""
        self._heads = head.candidates
        self._call = call

    @property
    def name(self) -> str:
        """The name of the timm architecture, or the class name of other models."""
        cfg = getattr(self.model, "pretrained_cfg", None) or {}
        return cfg.get("architecture") or type(self.model).__name__

    def new_parameters(self) -> dict[str, Tensor]:
        """Return the parameters in `head` and `outside`, which no method may freeze.

        Raises:
            UserError: If the network has several possible heads, and `classifier` has not been specified.
        """
        if self._heads:
            raise UserError(
                f"{self.name} has several possible heads ({', '.join(self._heads)}), so the head to train is unknown."
                + hint(
                    f" Pass the names of the heads to train, for example classifier={list(self._heads)}.",
                    " Use the method full, which trains all parameters.",
                )
            )
        return parameters_under(self.model, (*self.head, *self.outside))

    @property
    def has_class_token(self) -> bool:
        """Return True if the model has a class token. The class token is the first token."""
        if self.prefix_tokens < 1:
            return False
        for network in _with_inner(self._with_blocks):
            if getattr(network, "cls_token", None) is not None:
                return True
            if hasattr(network, "get_classifier"):  # models from timm declare their class token
                return False
        named = self._with_blocks.named_parameters()
        return not takes_tokens(self.model) and any(_CLASS_TOKEN.search(name) and p.numel() for name, p in named)

    @cached_property
    def shared_blocks(self) -> dict[str, list[str]]:
        """All full names of each block that the model contains several times (shared weights)."""
        return shared_blocks(self.model, self.blocks)

    @property
    def _with_blocks(self) -> nn.Module:
        """The model, or the first of several networks in it that contains blocks in `blocks`."""
        held = holding(self.towers, self.blocks)
        return self.model.get_submodule(held[0]) if held else self.model

    def called_modules(self, block: str) -> tuple[str, ...]:
        """Return the names of the modules that the network calls to run `block`.

        The result is the block itself, or its two halves if the block is a list without a forward method.
        """
        module = self.model.get_submodule(block)
        return tuple(f"{block}.{name}" for name, _ in module.named_children()) if are_halves(module) else (block,)

    @cached_property
    def prefix_tokens(self) -> int:
        """The number of class, distillation and register tokens, which precede the patch tokens.

        A number that the user specifies takes precedence over a number that the network declares or that its parameters
        contain. Otherwise, the number is the length of the sequence in the first block minus the number of patches. A
        difference of more than 16 tokens is ignored, and the result is 0.
        """
        declared = specified(self.model).get("prefix_tokens", prefix_tokens_of(self._with_blocks))
        if declared is not None or takes_tokens(self.model):
            return declared or 0
        inside = f"{self.blocks[0]}." if self.blocks else ""
        sequences = (x for name, x in self._probed.inputs.items() if name.startswith(inside) and len(x.shape) == 3)
        given = next(sequences, None)
        if given is None or not given.maps:
            return 0
        more = given.shape[1] - given.maps[0][0] * given.maps[0][1]
        if not 0 < more <= _MOST_PREFIX_TOKENS:
            return 0
        self.prefix_note = f"{more} {'tokens are' if more > 1 else 'token is'} assumed to precede the patches" + hint(
            " (to change this number, pass prefix_tokens)"
        )
        return more

    @cached_property
    def layers(self) -> tuple[Layer, ...]:
        """All linear layers and convolutions, including the head and excluding the layers of adapters."""
        added, routed, stem = added_modules(self.model), routed_modules(self.model), stem_of(self.model)
        layers = []
        for name, module in self.model.named_modules():
            if isinstance(module, nn.Linear | nn.Conv2d) and not is_inside(name, added):
                given = self._probed.inputs.get(name)
                tokens, why_not = layout_of(name, module, given, self.prefix_tokens, self.head, stem)
                if is_inside(name, routed):
                    tokens, why_not = None, Skipped(Reason.ROUTED)
                attention = any(_is_attention(m) for m in above(self.model, name))
                layers.append(Layer(name, module, tokens, why_not, attention, self._probed.reach.get(name)))
        return tuple(layers)

    @property
    def has_attention(self) -> bool:
        """Return True if a layer belongs to an attention module, or if a block calls a function for attention."""
        inside = tuple(f"{block}." for block in self.blocks)
        calls = (functions for name, functions in self._probed.functions.items() if f"{name}.".startswith(inside))
        return any(layer.in_attention for layer in self.layers) or any(_ATTENTION_FUNCTIONS & one for one in calls)

    @property
    def single_patch(self) -> bool:
        """Return True if the patch embedding produces one patch per image."""
        return tuple(getattr(getattr(self.model, "patch_embed", None), "grid_size", None) or ()) == (1, 1)

    @cached_property
    def block_grid(self) -> tuple[int, int] | None:
        """The token grid (H, W) of all blocks, or None if the tokens have no grid or the grids of the blocks differ."""
        inside = tuple(f"{block}." for block in self.blocks)
        layouts = {x.tokens for x in self.layers if x.tokens is not None and x.name.startswith(inside)}
        if len(layouts) != 1 or {(a.form, a.prefix) for a in layouts} != {("tokens", self.prefix_tokens)}:
            return None
        return next(iter(layouts)).grid

    def functions(self, name: str) -> frozenset[Callable[..., Any]] | None:
        """Return the torch functions that the forward method of the module `name` calls directly.

        The result is None if the method calls no torch functions.
        """
        return self._probed.functions.get(name)

    @property
    def has_dense_output(self) -> bool:
        """Return True if an output of the network has one value per position of the image, as in segmentation."""
        return self._probed.has_dense_output

    def check_block_order(self) -> None:
        """Raise SettingError if the user specifies the blocks in an order that contradicts the forward pass.

        The forward pass on fake tensors runs only if the order differs from the order of definition in the network.
        """
        names = list(specified(self.model).get("blocks", ()))
        if names == [name for name, _ in self.model.named_modules() if name in names]:
            return
        place = {name: number for number, name in enumerate(self._probed.calls)}
        called = [name for name in names if name in place]
        for one, other in itertools.pairwise(called):
            if place[other] < place[one]:
                do = f"The network runs {other!r} before {one!r}."
                raise SettingError("blocks", names, "a list in the order of the forward pass", do)

    def check_towers(self, *, one: bool = False) -> None:
        """Raise UserError if several networks in the model have blocks, and the user has not specified the blocks.

        Args:
            one: If True, specified blocks must belong to one network.
        """
        held = holding(self.towers, self.blocks)
        is_specified = "blocks" in specified(self.model)
        if not self.towers or (is_specified and not (one and len(held) > 1)):
            return
        patterns = {tower: pattern_of(self.model, tower) for tower in self.towers}
        first = patterns[self.towers[0]]
        which = f"blocks={(first[0] if len(first) == 1 else first)!r}"
        every = [pattern for tower in self.towers for pattern in patterns[tower]]
        listed = " and ".join(f"model.{tower}" for tower in self.towers)
        whole = "" if one else f" To use the blocks of all of them, pass blocks={every}."
        why = "and the method supports only one of them" if one else "so the blocks to use are unknown"
        raise UserError(
            f"{self.name} contains {len(self.towers)} networks with blocks ({', '.join(self.towers)}), {why}."
            + hint(
                f"{whole} To use the blocks of one network, pass only its blocks, for example {which}. Alternatively,"
                f" apply the method to {listed} separately (in a callback, pass network={self.towers[0]!r})."
            )
        )

    def _check_last_stage_is_separate(self) -> None:
        """Raise UserError if a block of the last stage is also a block of an earlier stage (shared weights)."""
        order = [name for name, _ in self.model.named_modules(remove_duplicate=False)]
        *earlier, last = (
            [n for block in stage for n in self.shared_blocks.get(block, [block])] for stage in self.stages
        )
        before = [order.index(name) for stage in earlier for name in stage]
        shared = next((block for block in self.stages[-1] if block in self.shared_blocks), None)
        if shared is not None and (not before or min(map(order.index, last)) < max(before)):
            names = self.shared_blocks[shared]
            raise UserError(
                f"the last stage of {self.name} shares its weights with earlier stages: {shared} occurs {len(names)}"
                f" times ({', '.join(names[:3])}{', …' if len(names) > 3 else ''})."
                " Use another selection method (head, full, bitfit or norm_last)."
            )

    @cached_property
    def _probed(self) -> Probed:
        if self._size_is_assumed:
            self.size_note = assumed_size_note(self.model)
        try:
            return probe(self.model, self.image_size, self._call)
        except UserError as error:
            if self._call is None:
                refuse_required_inputs(self.model, "the method")
            if self._size_is_given or takes_tokens(self.model):
                raise
            if self._size_is_assumed:
                origin = "The model does not declare an image size, so 224×224 was used."
            elif "image_size" in specified(self.model):
                origin = "This size is the value of image_size."
            else:
                origin = "The model declares this size."
            advice = hint(" If the model requires a different size, pass it, for example image_size=112.")
            _, optional = other_inputs(self.model)
            networks = networks_in(self.model)
            if optional and networks:
                advice += hint(f" If it requires other inputs ({', '.join(optional)}):")
                advice += advice_for_inputs(self.model, networks)
            raise UserError(f"{error}\n{origin}{advice}") from error

    def last_stage(self) -> tuple[str, ...]:
        """Return the blocks and other modules of the last stage, and all later modules.

        The modules in `LAST_STAGE_WITHOUT` are excluded. If the user specifies the classifier, other heads are also
        excluded. If the blocks belong to several networks, the result contains the last stage of each network.

        Raises:
            UserError: If no stages or blocks of the model are recognized, if the model contains several networks and
                the blocks are not specified, or if the last stage shares weights with earlier stages.
        """
        if not self.stages:
            raise UserError(
                f"no blocks were recognized in {self.name}, so the last stage is unknown."
                + hint(" If the network has blocks, pass their names, for example blocks='encoder.layers.*'.")
                + f" {hint('Otherwise, use', 'Use')} another selection method (head, full, bitfit or norm_last)."
            )
        self.check_towers()
        self._check_last_stage_is_separate()
        without = LAST_STAGE_WITHOUT.get(type(self.model).__name__)
        held = holding(self.towers, self.blocks)
        if len(held) > 1:
            last = last_stages(self.model, held, self.blocks)
        else:
            last = [(self.stage_extras[-1], self.stages[-1])]
        extras = [n for names, _ in last for n in names if without is None or n.split(".")[-1] != without]
        blocks = [block for _, names in last for block in names]
        heads = other_heads(self.model, self.image_size)
        return (*extras, *blocks, *(name for name in self.tail if name not in heads))


def _is_attention(module: nn.Module) -> bool:
    return _ATTENTION.search(type(module).__name__) is not None


def has_attention(model: nn.Module, name: str) -> bool:
    """Return True if the module `name` is or contains an attention module according to the names of classes."""
    return any(_is_attention(module) for module in model.get_submodule(name).modules())


def view(model: nn.Module, image_size: tuple[int, ...] | None = None, call: Call | None = None) -> ModelView:
    """Create a view of `model` without changing the model.

    Args:
        model: A network for images (B, channels, H, W) or for token ids of texts.
        image_size: Image size (H, W) in pixels, or (tokens,) for texts. The default is the size that the model
            declares.
        call: Arguments for the forward pass on fake tensors. By default, the network is called with images or texts
            only.
    """
    return ModelView(model, image_size, call)


def default_image_size(model: nn.Module) -> tuple[int, ...]:
    """Return the image size (H, W) in pixels that the model declares, or 224 × 224.

    A size that the user specifies (`specify`) takes precedence. Otherwise, the size is read from the patch embedding,
    the pretrained configuration or an attribute of the model, or of a pretrained network in the model. For a text
    model, return (tokens,), where tokens is the maximum number of tokens in the pretrained configuration, or the number
    of positions.
    """
    return specified(model).get("image_size") or _declared_size(model) or _USUAL_SIZE


def assumed_size_note(model: nn.Module) -> str:
    """Return the phrase that states the assumed image size, or an empty string if the image size is known."""
    if specified(model).get("image_size") or _declared_size(model):
        return ""
    height, width = _USUAL_SIZE
    return f"images of {height}×{width} pixels are assumed{hint(' (to change this size, pass image_size)')}"


def _declared_size(model: nn.Module) -> tuple[int, ...] | None:
    if takes_tokens(model):
        usual = (int(getattr(model.config, "max_position_embeddings", 512)),)  # type: ignore[union-attr,arg-type]
        return tuple(map(int, (getattr(model, "pretrained_cfg", None) or {}).get("input_size", usual)[-2:]))
    for network in _with_inner(model):
        size = _size_at_creation(network)
        if size is None:
            size = (getattr(network, "pretrained_cfg", None) or {}).get("input_size", (None,))[-2:]
            size = None if None in size else size
        config = getattr(network, "config", None)
        # torchvision's ViT has `image_size`, models of transformers have `config.image_size`, and their models for
        # images and texts have `config.vision_config.image_size`.
        for owner in (network, config, getattr(config, "vision_config", None)):
            size = getattr(owner, "image_size", None) if size is None else size
        if isinstance(size, int):
            return size, size
        if isinstance(size, tuple | list) and len(size) == 2:
            return tuple(map(int, size))
    return None


def _size_at_creation(network: nn.Module) -> Any:
    """Return the image size with which a network of timm was created, or None if the network does not store it."""
    embedding = getattr(network, "patch_embed", getattr(network, "stem", None))  # the stem of an MLP-Mixer
    for owner in (embedding, network):
        if getattr(owner, "img_size", None) is not None:
            return owner.img_size  # type: ignore[union-attr]
    tokens, strides = (getattr(network, name, None) for name in ("tokens_spatial_shape", "patch_stride"))  # Hiera
    return None if tokens is None or strides is None else [n * s for n, s in zip(tokens, strides, strict=True)]


def _with_inner(model: nn.Module) -> list[nn.Module]:
    """Return `model` and the pretrained networks that it contains."""
    inner = [] if hasattr(model, "get_classifier") else networks_in(model)
    networks = [model, *(model.get_submodule(name) for name in inner)]
    # timm's feature extractor for transformers contains the network.
    return [n for m in networks for n in ([m.model, m] if type(m).__name__ == "FeatureGetterNet" else [m])]  # type: ignore[misc]


#: Pattern for the parameter names of class tokens. In CLIP, the parameter is a vector.
_CLASS_TOKEN = re.compile(r"(^|\.)(cls_token|class_token|class_embedding)$")
#: Pattern for the parameter names of prefix tokens in networks that do not declare the number of prefix tokens.
_PREFIX_TOKENS = re.compile(rf"{_CLASS_TOKEN.pattern}|(^|\.)(dist_token|distillation_token|register_tokens)$")


def prefix_tokens_of(model: nn.Module) -> int | None:
    """Return the number of prefix tokens that the user specifies or that the network declares.

    If the network does not declare the number, count the tokens in its parameters. Return None if no
    parameter is recognized as a prefix token.
    """
    if "prefix_tokens" in specified(model):
        return int(specified(model)["prefix_tokens"])
    for network in _with_inner(model):
        declared = getattr(network, "num_prefix_tokens", None)
        if declared is not None or hasattr(network, "get_classifier"):
            return int(declared or 0)
    tokens = [p for name, p in model.named_parameters() if _PREFIX_TOKENS.search(name)]
    # The shape is (C,), (tokens, C) or (1, tokens, C).
    return sum(1 if p.dim() == 1 else p.shape[-2] for p in tokens if p.dim() in (1, 2, 3)) or None
