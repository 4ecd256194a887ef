"""Base classes of the methods that drop or merge tokens by replacing the forward passes of transformer blocks.

A transformer block consists of two halves: attention and the feed-forward network. The number of tokens is reduced
between the two halves of a block or after the second half. Each block passes a record of the remaining tokens
(`ops.tokens.Tokens`) to the next block.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeCopyMode
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from efficient_ft.core.errors import SettingError, UserError, hint
from efficient_ft.core.fake import FakeTensors
from efficient_ft.methods.base import Method
from efficient_ft.methods.forwards import OwnForward, foreign_forward, put_inside, take_away
from efficient_ft.methods.tokens.block_forms import (
    BlockForm,
    accepts_any_tokens,
    example_inputs,
    form_of,
    positions_in,
    rotary_of,
    why_not,
)
from efficient_ft.models.marks import added_modules, marks_of
from efficient_ft.models.view import ModelView
from efficient_ft.models.weight_dtype import to_float32
from efficient_ft.ops.saving import current_packing, packing_suspended
from efficient_ft.ops.tokens import (
    Tokens,
    attach_tokens,
    class_attention,
    drop,
    is_token_reduction_suspended,
    pop_tokens,
    token_context,
)

#: Functions that compute the scores q kᵀ and the attention map (B, H, N, N) in unfused attention.
PRODUCTS = (Tensor.matmul, Tensor.__matmul__, torch.matmul)
SOFTMAX = (Tensor.softmax, torch.softmax, F.softmax)


class Attention(TorchFunctionMode):
    """Context manager that records the attention of the class token in fused and unfused attention operations.

    Args:
        prefix: number P of prefix tokens. The first prefix token is the class token.

    Attributes:
        scores_BL: attention of the class token to each of the L = N − P patch tokens, averaged over the heads, in at
            least single precision. The attribute is None if no attention was computed.
    """

    scores_BL: Tensor | None = None

    def __init__(self, prefix: int) -> None:
        super().__init__()
        self.prefix = prefix
        #: Factors and result of the last matrix product before the softmax.
        self._product: tuple[Any, ...] = ()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            q, k, *others = args
            packing = current_packing()
            if packing is not None and packing.policy.fused is None:
                # As in unfused attention, q and k are contiguous, so that k is saved only once.
                q, k = q.contiguous(), k.contiguous()
            self.scores_BL = class_attention(q, k, self.prefix, kwargs.get("scale"))
            return func(q, k, *others, **kwargs)
        result = func(*args, **kwargs)
        if func in PRODUCTS and self.scores_BL is None:
            self._product = (*args, *kwargs.values(), result)
        elif func in SOFTMAX and result.dim() == 4:
            self.scores_BL, self._product = self._of_map(args[0], result), ()
        return result

    def _of_map(self, logits_BHNN: Tensor, map_BHNN: Tensor) -> Tensor:
        """Return the attention of the class token. `logits_BHNN` is the input of the softmax."""
        wide = torch.promote_types(logits_BHNN.dtype, torch.float32)
        scores_BL = map_BHNN[:, :, 0, self.prefix :].mean(1, dtype=wide)
        if logits_BHNN.dtype == wide:
            return scores_BL
        # In half precision, many tokens would have equal scores. The values are therefore computed in single precision.
        # The gradients flow through the attention map, so that no further tensor is saved.
        with torch.no_grad(), packing_suspended():
            if self._product and self._product[-1] is logits_BHNN:
                q_BHND, k_BHDN, _ = self._product
                values_BL = class_attention(q_BHND, k_BHDN.mT, self.prefix, 1.0)
            else:
                values_BL = logits_BHNN[:, :, 0].to(wide).softmax(-1)[..., self.prefix :].mean(1)
        return scores_BL + (values_BL - scores_BL.detach())


class Place(NamedTuple):
    """Position of a block in a model, and layout of its tokens.

    `prefix` is the number of prefix tokens, and `positions` is the number H · W of positions in the grid of patch
    tokens. If `last` is True, no record of tokens is attached to the output of the block.
    """

    method_name: str
    prefix: int
    positions: int
    last: bool


#: Form of a block that is not split into halves.
_ANY = BlockForm((), (), "", ())


class TokenForward(OwnForward):
    """Forward pass of a block that keeps all its tokens, while other blocks of the model drop or merge tokens.

    The record of the tokens is taken from the input and attached to the output. If a block has several such forward
    passes, only one of them runs: the outermost forward pass that drops or merges tokens, or the innermost forward pass
    if none of them does.
    """

    def __init__(self, module: nn.Module, place: Place) -> None:
        super().__init__(module)
        self.method_name, self.prefix, self.positions, self.last = place
        # A block that keeps all its tokens may have any forward pass, if no block has rotary embeddings.
        self.form = form_of(type(module)) or _ANY

    def __call__(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        # An inner forward pass of this kind handles the record of the tokens.
        if any(isinstance(inner, TokenForward) for inner in self.all_inside()):
            result: Tensor = self.within(x, *args, **kwargs)
            return result
        self.refuse_checkpointing()
        x, tokens = pop_tokens(x)
        with token_context(tokens):
            if self.form.rotary is None:
                return self.passed_on(self.within(x, *args, **kwargs), tokens)
            return self.passed_on(self.within(x, **self.given(tokens, args, kwargs)), tokens)

    def passed_on(self, x: Tensor, tokens: Tokens | None) -> Tensor:
        """Return x with the record of its tokens attached for the next block. In the last block, return x unchanged."""
        return x if self.last else attach_tokens(x, tokens)

    def given(self, tokens: Tokens | None, others: Sequence[Any], keywords: Mapping[str, Any]) -> dict[str, Any]:
        """Return the inputs of the block by name, with the rotary embeddings of the remaining `tokens`."""
        inputs = self.form.named(others, keywords)
        name = self.form.rotary
        if name is None or tokens is None or tokens.rotary_index_BL is None or inputs.get(name) is None:
            return inputs
        # Most networks pass the same embeddings to all blocks, so the selected embeddings are cached. The cache also
        # keeps the original embeddings, so that a new object at the same address is not mistaken for them.
        of, rotary = tokens.cache.get("rotary", (None, None))
        if of is not inputs[name]:
            rotary = rotary_of(inputs[name], tokens.rotary_index_BL)
            # Recomputation must save the same tensors as the forward pass, so trained embeddings are not cached.
            if not any(leaf.requires_grad for leaf in tree_leaves(inputs[name])):
                tokens.cache["rotary"] = (inputs[name], rotary)
        return {**inputs, name: rotary}

    def refuse_checkpointing(self) -> None:
        """Raise UserError if the gradient checkpointing of `transformers` is enabled, which this class does not run."""
        if getattr(self.module, "gradient_checkpointing", False) and self.module.training and torch.is_grad_enabled():
            raise UserError(
                f"method {self.method_name}: gradient checkpointing of transformers cannot be combined with methods"
                " that drop or merge tokens. Call model.gradient_checkpointing_disable(), and use the method"
                " checkpointing instead."
            )

    def popped(
        self, x: Tensor, others: Sequence[Any], keywords: Mapping[str, Any]
    ) -> tuple[Tensor, Tokens | None, Mapping[str, Any]]:
        """Return x, the record of its tokens, and the inputs of the block with the embeddings of these tokens.

        Raise UserError if the model is exported by TorchScript, or if the block is called with an unsupported
        argument, for example a mask.
        """
        if torch.onnx.is_in_onnx_export() and not torch.compiler.is_exporting():
            name = self.method_name
            raise UserError(
                f"method {name}: torch.onnx.export with dynamo=False does not support dropping or merging tokens."
                f" Use dynamo=True, or remove the method first: {name}.remove(model). The exported model then uses all"
                " tokens."
            )
        self.refuse_checkpointing()
        x, tokens = pop_tokens(x)
        inputs = self.given(tokens, others, keywords)
        for name in self.form.inputs:  # transformers passes further keywords that do not change the computation
            value = inputs.get(name)
            if value is not None and value is not False and name != self.form.rotary:
                raise UserError(
                    f"{type(self.module).__name__}: the argument {name} is not supported in blocks that drop or merge"
                    f" tokens. Use a model that does not pass {name} to its blocks."
                )
        return x, tokens, inputs

    def record(self, x: Tensor, tokens: Tokens | None, inputs: Mapping[str, Any]) -> Tokens:
        """Return `tokens`, or the record of all tokens if no token was removed before this block."""
        return tokens or Tokens.full(x, self.prefix, self.positions, positions_in(self.form, inputs))

    def first_half(self, x: Tensor, inputs: Mapping[str, Any], observer: TorchFunctionMode | None) -> Tensor:
        """Return x plus the attention output. If `observer` is given, attention runs inside this context manager."""
        with observer or nullcontext():
            return x + self.form.attend(self.module, x, inputs)

    def second_half(self, x: Tensor) -> Tensor:
        """Return x plus the output of the feed-forward network for x."""
        return x + self.form.feed_forward(self.module, x)


class DroppingForward(TokenForward):
    """Forward pass of a block that drops tokens after attention and before the feed-forward network.

    `keep` is a function that takes the number of patch tokens and returns the number of patch tokens to keep. If `fuse`
    is True, the dropped tokens are fused into one token, which is appended to the kept tokens.
    """

    def __init__(self, module: nn.Module, place: Place, keep: Callable[[int], int], fuse: bool) -> None:
        super().__init__(module, place)
        self.keep, self.fuse = keep, fuse

    def __call__(self, x: Tensor, *others: Any, **keywords: Any) -> Tensor:
        if is_token_reduction_suspended():
            return super().__call__(x, *others, **keywords)
        x, tokens, inputs = self.popped(x, others, keywords)
        attention = Attention(self.prefix)
        with token_context(tokens):
            x = self.first_half(x, inputs, attention)
        x, tokens = self.drop(x, attention, self.record(x, tokens, inputs))
        with token_context(tokens):
            return self.passed_on(self.second_half(x), tokens)

    def drop(self, x: Tensor, attention: Attention, tokens: Tokens) -> tuple[Tensor, Tokens]:
        """Drop the tokens with the lowest recorded attention, and return the remaining tokens and their record."""
        if attention.scores_BL is None:
            raise UserError(
                f"method {self.method_name}: the attention of {type(self.module).__name__} was not found, because it"
                " computes neither scaled_dot_product_attention nor a softmax. Use another implementation of attention"
                " (in transformers: attn_implementation='sdpa')."
            )
        count = attention.scores_BL.shape[1]
        kept = self.keep(count)
        with packing_suspended():
            x, index_BK = drop(x, attention.scores_BL, self.prefix, kept, self.fuse)
        return x, tokens.dropped(index_BK, self.positions, self.fuse and kept < count)


def grid_positions(view: ModelView) -> int:
    """Return the number H · W of positions in the grid of patch tokens. The method must declare `Needs.TOKEN_GRID`."""
    assert view.block_grid is not None
    height, width = view.block_grid
    return height * width


def block_channels(view: ModelView, block: str) -> int:
    """Return the number C of channels of the tokens (B, N, C) that a block receives."""
    return next(layer.channels[0] for layer in view.layers if layer.name.startswith(f"{block}."))


def classifies_by_class_token(model: nn.Module) -> bool:
    """Return True if `model` is a `timm` model whose classifier uses only prefix tokens.

    Models from other packages are excluded, because they may use patch tokens although they have the same attributes.
    """
    by_token = getattr(model, "global_pool", None) == "token" and getattr(model, "attn_pool", None) is None
    return by_token and type(model).__module__.startswith("timm.models.")


def run_dropping(block: nn.Module, x: Tensor, prefix: int, inputs: Callable[[int], dict[str, Any]]) -> None:
    """Run a block that drops one token, first on N tokens and then on N − 1 tokens."""
    patches = x.shape[1] - prefix
    place = Place("dropping", prefix, patches, True)
    for given in (x, x[:, :-1]):
        count = given.shape[1] - prefix
        DroppingForward(block, place, lambda count: count - 1, False)(given, **inputs(count))


class _Refused:
    """Replacement for a function that requires all tokens of each block. Calling the replacement raises UserError.

    `methods` contains the names of all applied methods that remove tokens.
    """

    def __init__(self, function: str) -> None:
        self.function, self.methods = function, list[str]()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        name = self.methods[-1]
        raise UserError(
            f"method {name}: the function {self.function} requires all tokens of each block, but the method"
            f" removes tokens. Remove the method first: {name}.remove(model)."
        )


#: Names of functions of `timm` models that arrange the output tokens of blocks on the grid.
_ALL_TOKENS = ("forward_intermediates", "get_intermediate_layers")


class TokenMethod(Method):
    """Base class of the methods that replace the forward passes of transformer blocks."""

    def refuse_other_blocks(self, view: ModelView, names: Sequence[str], whole: bool = False) -> None:
        """Raise UserError if a block in `names` cannot be split into the two halves that `TokenForward` runs.

        If `whole` is True, blocks that cannot be split but accept any number of tokens are also allowed. UserError is
        also raised if a block has a custom forward pass or contains a module that another method has added.
        """
        added = added_modules(view.model)
        for name in names:
            block = view.model.get_submodule(name)
            new = {f"{name}.{part}" for part, _ in block.named_children()} & added
            if new:
                owners = (mark.method for mark in marks_of(view.model) if new & set(mark.modules))
                raise UserError(
                    f"method {self.name}: the block {name} of {view.name} has a module that was added by"
                    f" {next(owners, 'another library')}. Drop or merge tokens only in other blocks."
                )
            if foreign_forward(block) is not None:
                raise self._own_forward(view, name)
            form = form_of(type(block))
            if form is None and whole and accepts_any_tokens(type(block)):
                continue
            if form is None:
                if any(form_of(base) for base in type(block).__mro__[1:] if issubclass(base, nn.Module)):
                    raise self._own_forward(view, name)
                reason = why_not(type(block)) or "blocks of this class are not supported"
                if view.called_modules(name) != (name,):
                    reason = "the block is a list without a forward method"
                raise UserError(
                    f"method {self.name}: tokens cannot be dropped or merged in the blocks of {view.name}"
                    f" ({type(block).__name__}): {reason}. Use a network with supported blocks, for example a ViT from"
                    " timm or transformers."
                )
            prefix = getattr(getattr(block, form.attends), "num_prefix_tokens", view.prefix_tokens)
            if form.rotary is not None and prefix != view.prefix_tokens:
                raise UserError(
                    f"method {self.name}: the block {name} of {view.name} treats {prefix} tokens as prefix tokens"
                    f" without rotary embeddings, but the number of prefix tokens of the network is"
                    f" {view.prefix_tokens}."
                    + hint(f" If the latter is incorrect, pass the correct number: prefix_tokens={prefix}.")
                )

    def _own_forward(self, view: ModelView, name: str) -> UserError:
        block = type(view.model.get_submodule(name)).__name__
        return UserError(
            f"method {self.name}: the block {name} of {view.name} ({block}) has a custom forward pass, which the method"
            " would bypass. Use the original block, or move the modification into the attention or feed-forward module"
            " of the block. The forward methods of these modules are still called."
        )

    def refuse_unfit_model(self, view: ModelView) -> None:
        """If `refuse_other_blocks` rejects every block, raise the error for the first block."""
        errors = []
        for name in view.blocks:
            try:
                return self.refuse_other_blocks(view, [name])
            except UserError as error:
                errors.append(error)
        raise errors[0]

    def refuse_fixed_tokens(
        self,
        view: ModelView,
        run: Callable[[nn.Module, Tensor, int, Callable[[int], dict[str, Any]]], None],
        names: Sequence[str] | None = None,
    ) -> None:
        """Raise UserError unless each block accepts tokens of shape (B, N, C) for every N.

        The check runs copies of the blocks on fake tensors.

        Args:
            view: view of a model that has blocks and satisfies `Needs.TOKEN_GRID`.
            run: function that runs a block in the same way as the method, once on all tokens (1, N, C) and once on
                fewer tokens. The function is called with the block, the tokens, the number of prefix tokens, and a
                function that returns the other inputs of the block for a number of patch tokens.
            names: names of the blocks to check. The default is all blocks.
        """
        mode, positions = FakeTensors(), grid_positions(view)
        for name in view.blocks if names is None else names:
            block = view.model.get_submodule(name)
            like = next(block.parameters())
            channels = block_channels(view, name)
            with FakeCopyMode(mode):
                probe = copy.deepcopy(block).eval()
            to_float32(probe)  # the copy runs without autocast
            try:
                with mode, torch.no_grad():
                    x = torch.empty(1, view.prefix_tokens + positions, channels, device=like.device, dtype=like.dtype)
                    run(probe, x, view.prefix_tokens, partial(example_inputs, block, like=x))
            except UserError:
                raise
            except Exception as error:
                raise UserError(
                    f"method {self.name}: the blocks of {view.name} ({type(block).__name__}) do not accept tokens"
                    f" of shape (B, N, C) for every N: {str(error).splitlines()[0]}"
                ) from error

    def give_forwards(
        self, model: nn.Module, view: ModelView, chosen: Mapping[str, tuple[type[TokenForward], tuple[Any, ...]]]
    ) -> None:
        """Replace the forward passes of all blocks of `model` in place.

        `chosen` maps block names to the class of the new forward pass and the constructor arguments after `place`. All
        other blocks receive a `TokenForward`.
        """
        positions = grid_positions(view)
        if any(form.rotary for form in (form_of(type(model.get_submodule(name))) for name in view.blocks) if form):
            self.refuse_other_blocks(view, view.blocks)  # every block receives the embeddings of its tokens
            forms = ((name, form_of(type(module))) for name, module in model.named_modules())
            for name in (name for name, form in forms if form and form.rotary and name not in view.blocks):
                raise SettingError(
                    "blocks", repr(view.blocks), f"a list of all blocks with rotary embeddings ({name}, …)"
                )
        for function in _ALL_TOKENS:
            if hasattr(model, function):
                found = vars(model).get(function)
                refused = found if isinstance(found, _Refused) else _Refused(function)
                refused.methods.append(self.name)
                setattr(model, function, refused)
        for name in view.blocks:
            block, (kind, settings) = model.get_submodule(name), chosen.get(name, (TokenForward, ()))
            place = Place(self.name, view.prefix_tokens, positions, name == view.blocks[-1])
            put_inside(block, kind(block, place, *settings))

    def _remove(self, model: nn.Module) -> None:
        for function in _ALL_TOKENS:
            refused = vars(model).get(function)
            if isinstance(refused, _Refused) and self.name in refused.methods:
                refused.methods.remove(self.name)
                if not refused.methods:
                    delattr(model, function)
        take_away(model, TokenForward, lambda forward: forward.method_name == self.name)
