"""Reference implementations of the methods in dense torch operations, used by the table of settings.

Each reference is called as ``reference(method, model, parameters, images)`` (see `efficient_ft.testing.Reference`) and
computes logits. Autograd differentiates the logits to obtain the expected gradients of the method's backward pass.

If a gradient is not the derivative of the forward pass (pruned or projected activations), the reference computes
``value + term - term.detach()``. This expression has the value of the forward pass and the gradient of `term`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode

from efficient_ft.methods import Method
from efficient_ft.models.view import view
from efficient_ft.ops.projection import WalshProjector, lowest_first

Parameters = dict[str, Tensor]


def called(model: nn.Module, parameters: Parameters, images: Tensor, forward: Callable[..., Tensor]) -> Tensor:
    """Return ``forward(model, images)`` with the model's parameters replaced."""
    model.forward = partial(forward, model)  # type: ignore[method-assign]
    return functional_call(model, parameters, (images,))


def straight(value: Tensor, *terms: Tensor) -> Tensor:
    """Return `value` with the gradients of `terms`."""
    return value.detach() + sum((term - term.detach() for term in terms), torch.zeros((), dtype=value.dtype))


# ------------------------------------------------------------------------------------------------ adapters
def lora(method: Method, model: nn.Module, parameters: Parameters, images: Tensor) -> Tensor:
    """Replace the weight of each adapted layer by W + alpha / r · B A."""
    merged: Parameters = {}
    for name, value in parameters.items():
        if ".lora_" in name:
            continue
        plain = name.replace(".base_layer", "")
        if plain != name and name.endswith("weight"):
            layer = name.removesuffix(".base_layer.weight")
            a, b = (parameters[f"{layer}.lora_{letter}.default.weight"] for letter in "AB")
            value = value + method.settings()["alpha"] / len(a) * torch.einsum("or...,ri...->oi...", b, a)
        merged[plain] = value
    return functional_call(model, merged, (images,))


def _lite(values: Callable[[str], Tensor], x: Tensor, size: torch.Size, groups: int, stride: int) -> Tensor:
    """Compute the lite residual: pooling, then two convolutions with standardized weights, each followed by GroupNorm.

    Each group of GroupNorm has 8 channels.
    """

    def convolved(x: Tensor, weight: Tensor, **more: Any) -> Tensor:
        mean, variance = weight.mean((1, 2, 3), keepdim=True), weight.var((1, 2, 3), correction=0, keepdim=True)
        return F.conv2d(x, (weight - mean) / (variance + 1e-6).sqrt(), **more)

    def normalized(x: Tensor, norm: str) -> Tensor:
        return F.group_norm(x, x.shape[1] // 8, values(f"{norm}.weight"), values(f"{norm}.bias"))

    x = F.avg_pool2d(x, 2) if min(x.shape[-2:]) > 1 else x
    kernel = values("conv1.weight").shape[-1]
    x = convolved(x, values("conv1.weight"), stride=stride, padding=kernel // 2, groups=groups)
    x = normalized(convolved(normalized(x, "norm1").relu(), values("conv2.weight")), "norm2")
    return F.interpolate(x, size=size, mode="bilinear", align_corners=False)


def _strides(module: nn.Module) -> int:
    return max((m.stride[0] for m in module.modules() if isinstance(m, nn.Conv2d)), default=1)


def tinytl(method: Method, model: nn.Module, parameters: Parameters, images: Tensor) -> Tensor:
    """Add a lite residual to each inverted residual block. With ``norm=group``, GroupNorm replaces BatchNorm."""
    for name, module in list(model.named_modules()):
        if method.settings()["norm"] == "group" and isinstance(module, nn.BatchNorm2d):
            module.forward = partial(_grouped, module)  # type: ignore[method-assign]
        if f"{name}.lite_residual.conv1.weight" in parameters:
            module.forward = partial(  # type: ignore[method-assign]
                _with_lite, module, _below(parameters, f"{name}.lite_residual"), method.settings()["groups"]
            )
    return functional_call(model, _own(model, parameters), (images,))


def _grouped(norm: Any, x: Tensor) -> Tensor:
    x = F.group_norm(x, x.shape[1] // 8, norm.weight, norm.bias, norm.eps)
    return norm.act(x) if hasattr(norm, "act") else x


def _with_lite(module: nn.Module, values: Callable[[str], Tensor], groups: int, x: Tensor) -> Tensor:
    y = type(module).forward(module, x)
    return y + _lite(values, x, y.shape[-2:], groups, _strides(module))


def _below(parameters: Parameters, prefix: str) -> Callable[[str], Tensor]:
    return lambda name: parameters[f"{prefix}.{name}"]


def _own(model: nn.Module, parameters: Parameters) -> Parameters:
    """Return the entries of `parameters` that exist in the plain model."""
    return {name: parameters[name] for name, _ in model.named_parameters()}


def repnet(method: Method, model: nn.Module, parameters: Parameters, images: Tensor) -> Tensor:
    """Add a side module to each chosen block: a lite residual, or the residual branches of a transformer block."""
    for name in {n.partition(".side_module.")[0] for n in parameters if ".side_module." in n}:
        block = model.get_submodule(name)
        values = _below(parameters, f"{name}.side_module")
        branch = _side_branches if hasattr(block, "attn") else partial(_side_lite, method.settings()["groups"])
        block.forward = partial(_with_side, block, branch, values)  # type: ignore[method-assign]
    return functional_call(model, _own(model, parameters), (images,))


def _with_side(
    block: Any, branch: Callable[..., Tensor], values: Callable[[str], Tensor], x: Tensor, **_: Any
) -> Tensor:
    y = type(block).forward(block, x)
    return y + branch(block, values, x, y)


def _side_lite(groups: int, block: Any, values: Callable[[str], Tensor], x: Tensor, y: Tensor) -> Tensor:
    return _lite(values, x, y.shape[-2:], groups, _strides(block))


def _side_branches(block: Any, values: Callable[[str], Tensor], x: Tensor, y: Tensor) -> Tensor:
    def normalized(x: Tensor, norm: str) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], values(f"{norm}.weight"), values(f"{norm}.bias"), block.norm1.eps)

    def linear(x: Tensor, layer: str) -> Tensor:
        return F.linear(x, values(f"{layer}.weight"), values(f"{layer}.bias"))

    heads = block.attn.num_heads
    q, k, v = linear(normalized(x, "norm1"), "attn.qkv").unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4)
    attended = ((q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1) @ v).transpose(1, 2).flatten(2)
    attended = linear(attended, "attn.proj")
    hidden = F.gelu(linear(normalized(x + attended, "norm2"), "mlp.fc1"))
    return attended + linear(hidden, "mlp.fc2")


# ------------------------------------------------------------------------------------------------ tokens
class Embeddings:
    """Rotary embeddings of the patch tokens of each image: sine and cosine of each angle, (B, L, D / 2) each."""

    def __init__(self, rope: Tensor | None, batch: int) -> None:
        self.of_BLE = None if rope is None else rope.expand(batch, -1, -1)

    def keep(self, index_BK: Tensor) -> None:
        """Keep the embeddings of the tokens at these indices."""
        if self.of_BLE is not None:
            self.of_BLE = _picked(self.of_BLE, index_BK)

    def rotated(self, x_BHND: Tensor, half: bool) -> Tensor:
        """Rotate each pair of channels of the patch tokens by its angle."""
        if self.of_BLE is None:
            return x_BHND
        count = self.of_BLE.shape[1]
        sine, cosine = self.of_BLE.unsqueeze(1).chunk(2, -1)
        pairs = (2, -1) if half else (-1, 2)
        dim = -2 if half else -1
        c, s = (part.unflatten(-1, pairs).select(dim, 0) for part in (cosine, sine))
        first, second = x_BHND[:, :, -count:].unflatten(-1, pairs).unbind(dim)
        result = torch.stack([c * first - s * second, s * first + c * second], dim).flatten(-2)
        return torch.cat([x_BHND[:, :, :-count], result.to(x_BHND.dtype)], 2)


def blocks_of_vit(
    model: Any,
    x: Tensor,
    after_attention: Callable[[int, Tensor, Tensor, Tensor], Tensor] | None = None,
    after_block: Callable[[int, Tensor, Tensor], Tensor] | None = None,
    mlp: Callable[[int, Tensor], Tensor] | None = None,
    weights: Callable[[Tensor], Tensor] | None = None,
    embeddings: Embeddings | None = None,
) -> Tensor:
    """Run a vision transformer's blocks, final norm and head, with attention computed in separate operations.

    Args:
        model: The plain model.
        x: Input tokens of the blocks, (B, N, C).
        after_attention: A function of the block index, x after attention, the attention map (B, H, N, N) and the keys.
            It returns the tokens to pass on.
        after_block: A function of the block index, x after the block and the attention map. It returns the tokens to
            pass on.
        mlp: A function of the block index and the normalized tokens that replaces the feed-forward network.
        weights: A function that computes the attention map from the scores. The default is softmax.
        embeddings: Rotary embeddings of the tokens. The other functions change them.
    """
    for number, block in enumerate(model.blocks):
        attn = block.attn
        q, k, v = attn.qkv(block.norm1(x)).unflatten(-1, (3, attn.num_heads, -1)).permute(2, 0, 3, 1, 4)
        if embeddings is not None:
            q, k = (embeddings.rotated(one, getattr(attn, "rotate_half", False)) for one in (q, k))
        scores = q @ k.mT * attn.scale
        p = scores.softmax(-1) if weights is None else weights(scores)
        x = x + getattr(block, "gamma_1", 1) * attn.proj((p @ v).transpose(1, 2).flatten(2))
        x = x if after_attention is None else after_attention(number, x, p, k)
        x = x + getattr(block, "gamma_2", 1) * (
            block.mlp(block.norm2(x)) if mlp is None else mlp(number, block.norm2(x))
        )
        x = x if after_block is None else after_block(number, x, p)
    return model.forward_head(model.norm(x))


def embedded(model: Any, images: Tensor) -> tuple[Tensor, Embeddings]:
    """Return the input tokens of the blocks and their rotary embeddings."""
    x = model._pos_embed(model.patch_embed(images))
    x, rope = x if isinstance(x, tuple) else (x, None)
    return model.norm_pre(x), Embeddings(rope, len(x))


def _ranked(p: Tensor, prefix: int) -> tuple[Tensor, Tensor]:
    """Return the class token's attention to the patch tokens, (B, L), and the descending order of the patch tokens."""
    scores = p.mean(1)[:, 0, prefix:]
    return scores, scores.argsort(dim=1, descending=True, stable=True)


def _picked(x: Tensor, index: Tensor) -> Tensor:
    return x.gather(1, index.unsqueeze(-1).expand(-1, -1, x.shape[-1]))


def evit(method: Method, model: nn.Module, parameters: Parameters, images: Tensor) -> Tensor:
    """Keep the ⌈rate · L⌉ most attended patch tokens in each block of `drop_at`, and fuse the others into one token.

    The fused token has the rotary embedding of the most attended of these others.
    """
    settings = method.settings()

    def forward(model: Any, images: Tensor) -> Tensor:
        x, embeddings = embedded(model, images)
        prefix = model.num_prefix_tokens

        def dropped(number: int, x: Tensor, p: Tensor, _: Tensor) -> Tensor:
            if number not in settings["drop_at"]:
                return x
            scores, order = _ranked(p, prefix)
            kept = math.ceil(settings["keep_rate"] * scores.shape[1])
            parts = [x[:, :prefix], _picked(x[:, prefix:], order[:, :kept])]
            fuses = settings["fuse"] and kept < scores.shape[1]
            if fuses:
                others = order[:, kept:]
                shares = scores.gather(1, others).unsqueeze(-1)
                parts.append((_picked(x[:, prefix:], others) * shares).sum(1, keepdim=True))
            embeddings.keep(order[:, : kept + fuses])
            return torch.cat(parts, 1)

        return blocks_of_vit(model, x, dropped, embeddings=embeddings)

    return called(model, parameters, images, forward)


def alast(method: Method, model: nn.Module, parameters: Parameters, images: Tensor) -> Tensor:
    """Keep the ⌊budget · L⌋ most attended patch tokens after each block in training, in their original order."""
    if not model.training:
        return functional_call(model, parameters, (images,))
    budgets = method.step_stats()["budgets"]

    def forward(model: Any, images: Tensor) -> Tensor:
        x, embeddings = embedded(model, images)
        prefix = model.num_prefix_tokens

        def passed_on(number: int, x: Tensor, p: Tensor) -> Tensor:
            _, order = _ranked(p, prefix)
            index = order[:, : math.floor(budgets[number] * order.shape[1] + 1e-9)].sort(1).values
            embeddings.keep(index)
            return torch.cat([x[:, :prefix], _picked(x[:, prefix:], index)], 1)

        return blocks_of_vit(model, x, after_block=passed_on, embeddings=embeddings)

    return called(model, parameters, images, forward)


def patch_dropout(method: Method, model: nn.Module, parameters: Parameters, images: Tensor) -> Tensor:
    """Pass ⌈rate · L⌉ patch tokens per image to the blocks in training: the tokens with the smallest random numbers."""
    if not model.training:
        return functional_call(model, parameters, (images,))

    def forward(model: Any, images: Tensor) -> Tensor:
        x, embeddings = embedded(model, images)
        prefix = model.num_prefix_tokens
        order = torch.rand(len(x), x.shape[1] - prefix).argsort(1)
        index = order[:, : math.ceil(method.settings()["keep_rate"] * order.shape[1])].sort(1).values
        embeddings.keep(index)
        kept = torch.cat([x[:, :prefix], _picked(x[:, prefix:], index)], 1)
        return blocks_of_vit(model, kept, embeddings=embeddings)

    return called(model, parameters, images, forward)


def tome(method: Method, model: nn.Module, parameters: Parameters, images: Tensor) -> Tensor:
    """Merge the r most similar token pairs in each block by a matrix product.

    A merged token is the mean of the tokens, weighted by their sizes. It has the rotary embedding of the largest token.
    If the final pooling uses the patch tokens, each patch counts once.
    """
    settings = method.settings()
    last = len(model.blocks) - 1  # type: ignore[arg-type]

    def forward(model: Any, images: Tensor) -> Tensor:
        x, embeddings = embedded(model, images)
        prefix = model.num_prefix_tokens
        state = {"sizes": x.new_ones(x.shape[:2]).detach(), "whole": torch.eye(x.shape[1], dtype=x.dtype)}

        def weights(scores: Tensor) -> Tensor:
            return (
                scores + state["sizes"].log()[:, None, None] if settings["proportional_attention"] else scores
            ).softmax(-1)

        def merged(number: int, x: Tensor, p: Tensor, k: Tensor) -> Tensor:
            r = round(settings["r"] * (1 + settings["inflect"] * (2 * number / last - 1)))
            matrices = torch.stack([_merging(keys.double(), r, prefix).to(x.dtype) for keys in k.detach().mean(1)])
            sized = matrices * state["sizes"][:, None]
            # If two tokens have the same size, the later token is used.
            largest = (sized * (1 + 1e-9 * torch.arange(sized.shape[-1], dtype=torch.float64))).argmax(-1)
            embeddings.keep(largest[:, prefix:] - prefix)
            state["sizes"], state["whole"] = sized.sum(-1), matrices @ state["whole"]
            return sized @ x / state["sizes"].unsqueeze(-1)

        def spread(number: int, x: Tensor, _: Tensor) -> Tensor:
            return state["whole"].mT @ x if number == last and model.global_pool != "token" else x

        return blocks_of_vit(model, x, merged, spread, weights=weights, embeddings=embeddings)

    return called(model, parameters, images, forward)


def _merging(keys: Tensor, r: int, prefix: int) -> Tensor:
    """Compute the 0/1 matrix (N − r, N) that sums merged tokens, from the keys (N, D) of an image."""
    unit = F.normalize(keys, dim=-1)
    a, b = ([i for i in range(start, len(keys), 2) if i >= prefix] for start in (0, 1))
    similar = unit[a] @ unit[b].T
    best = similar.max(1)
    merges = best.values.argsort(descending=True)[: min(r, (len(keys) - prefix) // 2)].tolist()
    into = {a[i]: b[best.indices[i]] for i in merges}
    groups = [[i] for i in (*range(prefix), *(i for i in a if i not in into))]
    groups += [[j, *(i for i in into if into[i] == j)] for j in b]
    matrix = torch.zeros(len(groups), len(keys), dtype=keys.dtype)
    for row, group in enumerate(groups):
        matrix[row, group] = 1
    return matrix


def moe(method: Method, model: nn.Module, parameters: Parameters, images: Tensor) -> Tensor:
    """Run every token through all experts, with a weight of zero outside the top k."""
    settings = method.settings()

    def mixed(name: str, mlp: nn.Module, x: Tensor) -> Tensor:
        p = F.linear(x, parameters[f"{name}.gate.weight"]).softmax(-1)
        rank = p.argsort(dim=-1, descending=True, stable=True).argsort(-1)
        weight = p * (rank < settings["top_k"])
        weight = weight / weight.sum(-1, keepdim=True) if settings["norm_topk_prob"] else weight
        y = torch.zeros_like(x)
        for expert in range(settings["num_experts"]):
            within = f"{name}.experts.{expert - 1}" if expert else name
            hidden = F.gelu(F.linear(x, *(parameters[f"{within}.fc1.{part}"] for part in ("weight", "bias"))))
            out = F.linear(hidden, *(parameters[f"{within}.fc2.{part}"] for part in ("weight", "bias")))
            y = y + weight[..., expert : expert + 1] * out
        return y

    for name, module in list(model.named_modules()):
        if f"{name}.gate.weight" in parameters:
            module.forward = partial(mixed, name, module)  # type: ignore[method-assign]
    return functional_call(model, _own(model, parameters), (images,))


# ------------------------------------------------------------------------------------------------ low-rank backward
def low_rank(method: Any, model: nn.Module, parameters: Parameters, images: Tensor) -> Tensor:
    """Run layers y = W x with the gradients (A g)ᵀ A x and Sᵀ (A g) W. A and S are dense matrices over positions."""
    if model.training:
        layers = {layer.name: layer for layer in view(model).layers}
        chosen = method.state_dict().get("chosen", {})
        for name in method.applied.touched:
            layer = layers[name]
            tokens: Any = layer.tokens
            if name in chosen:
                pairs = lowest_first(tuple(pair) for pair in chosen[name])
                projector: Any = WalshProjector(pairs, method.padding)
            else:
                projector = method.projector_for(layer)
            layer.module.forward = partial(_projected, layer.module, projector, tokens, layer.channels)  # type: ignore
            if layer.reach is not None:
                model.get_submodule(layer.reach).qkv_bias_separate = True  # type: ignore[assignment]
    return functional_call(model, parameters, (images,))


def _projected(module: Any, projector: Any, tokens: Any, channels: tuple[int, int], x: Tensor) -> Tensor:
    convolution = isinstance(module, nn.Conv2d)
    grid = x.shape[2:] if convolution else tokens.grid if tokens.form == "tokens" else x.shape[1:3]
    a, s = projector.projection(tuple(grid), tokens.prefix, channels).matrices(x.device, x.dtype)
    weight = module.weight.flatten(1)
    if convolution:  # (B, C, L)
        columns = x.flatten(2)
        terms = weight @ (columns.detach() @ (a.T @ a)), weight.detach() @ (columns @ (s.T @ a))
        y = straight(weight @ columns, *terms).unflatten(2, x.shape[2:])
        return y if module.bias is None else y + module.bias.view(-1, 1, 1)
    rows = x.flatten(1, -2)  # (B, L, C)
    terms = F.linear(a.T @ (a @ rows.detach()), weight), F.linear(a.T @ (s @ rows), weight.detach())
    y = straight(F.linear(rows, weight), *terms).unflatten(1, x.shape[1:-1])
    return y if module.bias is None else y + module.bias


# ------------------------------------------------------------------------------------------------ sparse activations
def swat(method: Any, model: nn.Module, parameters: Parameters, images: Tensor) -> Tensor:
    """Compute products with the largest weights. The dense weight gradient uses the largest input values."""
    weights = [parameters[f"{name}.weight"] for name in method.applied.touched]
    with _SparseProducts(method.settings()["sparsity"], weights, model.training):
        return functional_call(model, parameters, (images,))


class _SparseProducts(TorchFunctionMode):
    """A mode in which `F.linear` and `F.conv2d` with one of `weights` compute the products of SWAT."""

    def __init__(self, sparsity: float, weights: list[Tensor], training: bool) -> None:
        super().__init__()
        self.sparsity, self.training, self.weights = sparsity, training, {id(weight) for weight in weights}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in (F.linear, F.conv2d):
            return func(*args, **kwargs or {})
        given = dict(zip(("input", "weight", "bias", "stride", "padding", "dilation", "groups"), args, strict=False))
        given |= kwargs or {}
        x, weight, bias = given.pop("input"), given.pop("weight"), given.pop("bias", None)
        if id(weight) not in self.weights:
            return func(x, weight, bias, **given)
        sparse = self.largest(weight)
        if self.training:
            y = straight(func(x, sparse, **given), func(x, sparse, **given), func(self.largest(x), weight, **given))
        else:
            y = func(x, torch.where(sparse != 0, weight, 0), **given)
        return y if bias is None else y + (bias if func is F.linear else bias.view(-1, 1, 1))

    def largest(self, x: Tensor) -> Tensor:
        x = x.detach()
        smallest = x.abs().flatten().sort().values[math.floor(x.numel() * self.sparsity)]
        return torch.where(x.abs() >= smallest, x, 0)
