"""The view of a model: the names of its parts, and the token layout of the input of each layer."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cached_property
from typing import Any

from torch import Tensor, nn

from efficient_ft.core.errors import UserError
from efficient_ft.models.marks import added_modules, is_inside, routed_modules
from efficient_ft.models.view.head import head_of, networks_in
from efficient_ft.models.view.layers import Layer, Reason, Skipped
from efficient_ft.models.view.probe import Probed, layout_of, probe, takes_tokens
from efficient_ft.models.view.specified import specified
from efficient_ft.models.view.structure import above, after, parameters_under, stages_of, stem_of

#: Name of the module that is excluded from the last stage, by model class, as reported for LBP-WHT.
LAST_STAGE_WITHOUT = {"EfficientFormerV2": "downsample"}
#: Pattern for the names of attention classes. Blocks with attention and an MLP (``ClassAttentionBlock``) do not match.
_ATTENTION = re.compile(r"^(?!.*Block$).*(Attention|Attn|MHSA|GPSA|XCA|LiteMLA)")
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
        head_note: Phrase for reports that lists the inferred parts, or an empty string if the head was declared.
        tail: Names of the modules that run after the last stage (norms, decoder, head).
        prefix_note: Phrase for reports that states the inferred number of prefix tokens, or an empty string if the
            number was declared. The first access to `prefix_tokens` sets this attribute.
    """

    def __init__(self, model: nn.Module, image_size: tuple[int, ...] | None = None) -> None:
        self.model = model
        self.image_size = image_size or default_image_size(model)
        self.stages, self.stage_extras, container = stages_of(model)
        self.blocks: tuple[str, ...] = tuple(block for stage in self.stages for block in stage)
        head = head_of(model)
        self.head, self.outside, self.head_note = head.modules, head.others, head.note
        self.tail: tuple[str, ...] = after(model, container)
        self.prefix_note = ""

    @property
    def name(self) -> str:
        """The name of the timm architecture, or the class name of other models."""
        cfg = getattr(self.model, "pretrained_cfg", None) or {}
        return cfg.get("architecture") or type(self.model).__name__

    def new_parameters(self) -> dict[str, Tensor]:
        """Return the parameters in `head` and `outside`, which no method may freeze."""
        return parameters_under(self.model, (*self.head, *self.outside))

    @property
    def has_class_token(self) -> bool:
        """Return True if the model has a class token. The class token is the first token."""
        if self.prefix_tokens < 1:
            return False
        for network in _with_inner(self.model):
            if getattr(network, "cls_token", None) is not None:
                return True
            if hasattr(network, "get_classifier"):  # models from timm declare their class token
                return False
        named = self.model.named_parameters()
        return not takes_tokens(self.model) and any(_CLASS_TOKEN.search(name) and p.numel() for name, p in named)

    @cached_property
    def prefix_tokens(self) -> int:
        """The number of class, distillation and register tokens, which precede the patch tokens.

        A number that the user specifies takes precedence over a number that the network declares or that its parameters
        contain. Otherwise, the number is the length of the sequence in the first block minus the number of patches. A
        difference of more than 16 tokens is ignored, and the result is 0.
        """
        declared = prefix_tokens_of(self.model)
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
        self.prefix_note = (
            f"{more} {'tokens are' if more > 1 else 'token is'} assumed to precede the patches (to change this number,"
            " pass prefix_tokens)"
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
                attention = any(_ATTENTION.search(type(m).__name__) for m in above(self.model, name))
                layers.append(Layer(name, module, tokens, why_not, attention, self._probed.reach.get(name)))
        return tuple(layers)

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

    @cached_property
    def _probed(self) -> Probed:
        try:
            return probe(self.model, self.image_size)
        except UserError as error:
            known = specified(self.model).get("image_size") or _declared_size(self.model)
            if self.image_size != _USUAL_SIZE or known is not None:
                raise
            raise UserError(
                f"{error}\nThe model does not declare an image size, so 224×224 was used. If the model requires a"
                " different size, pass it: apply(model, image_size=112)."
            ) from error

    def last_stage(self) -> tuple[str, ...]:
        """Return the blocks and other modules of the last stage, and all later modules.

        The modules in `LAST_STAGE_WITHOUT` are excluded.

        Raises:
            UserError: If no stages or blocks of the model are recognized.
        """
        if not self.stages:
            raise UserError(
                f"No stages or blocks of {self.name} were recognized, so there is no last stage. Use another selection"
                " (head, full, bitfit, norm_last)."
            )
        without = LAST_STAGE_WITHOUT.get(type(self.model).__name__)
        extras = (n for n in self.stage_extras[-1] if without is None or n.split(".")[-1] != without)
        return (*extras, *self.stages[-1], *self.tail)


def view(model: nn.Module, image_size: tuple[int, ...] | None = None) -> ModelView:
    """Create a view of `model` without changing the model.

    Args:
        model: A network for images (B, channels, H, W) or for token ids of texts.
        image_size: Image size (H, W) in pixels, or (tokens,) for texts. The default is the size that the model
            declares.
    """
    return ModelView(model, image_size)


def default_image_size(model: nn.Module) -> tuple[int, ...]:
    """Return the image size (H, W) in pixels that the model declares, or 224 × 224.

    The user specifies the size (`specify`), or the patch embedding, the pretrained configuration or an attribute of the
    model declares it. If the model contains a pretrained network, this network may also declare the size. For a text
    model, return (tokens,), where tokens is the maximum number of tokens in the pretrained configuration, or the number
    of positions.
    """
    return specified(model).get("image_size") or _declared_size(model) or _USUAL_SIZE


def _declared_size(model: nn.Module) -> tuple[int, ...] | None:
    if takes_tokens(model):
        usual = (int(getattr(model.config, "max_position_embeddings", 512)),)  # type: ignore[union-attr,arg-type]
        return tuple(map(int, (getattr(model, "pretrained_cfg", None) or {}).get("input_size", usual)[-2:]))
    for network in _with_inner(model):
        size: Any = getattr(getattr(network, "patch_embed", None), "img_size", None)
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


def _with_inner(model: nn.Module) -> list[nn.Module]:
    """Return `model` and the pretrained networks that it contains."""
    inner = [] if hasattr(model, "get_classifier") else networks_in(model)
    return [model, *(model.get_submodule(name) for name in inner)]


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
    return sum(1 if p.dim() == 1 else p.shape[1] for p in tokens if p.dim() in (1, 3)) or None
