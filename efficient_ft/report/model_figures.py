"""Figures of papers that do not require a training run."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from efficient_ft.config import Config
from efficient_ft.core.errors import SettingError, UserError
from efficient_ft.data import missing_data, open_data
from efficient_ft.methods import BitFit
from efficient_ft.models import factory
from efficient_ft.models.view import Layer, view
from efficient_ft.ops.projection import block_energy
from efficient_ft.papers.rules import CountSettings, count_cost
from efficient_ft.report.charts import Chart, Panel, Series
from efficient_ft.report.record import block_labels
from efficient_ft.training.callbacks.block_stats import channel_axis, observe_blocks, relative_magnitude
from efficient_ft.training.kinds.registry import kind_of

#: Batch size that is used for the figures.
IMAGES = 16


def _model_and_batch(config: Config) -> tuple[nn.Module, Tensor, Tensor]:
    missing = [text for text in (factory.missing_weights(config.model), missing_data(config.data)) if text is not None]
    if missing:
        raise UserError("\n".join(missing))
    data = config.data.model_copy(update={"num_workers": 0, "eval_batch_size": IMAGES})
    images = open_data(data, factory.input_of(config.model), config.seed)
    batch, labels = next(iter(images.eval_loader(images.best_split)))
    return factory.create_model(config.model, images.num_classes).eval(), batch, labels


def relative_magnitudes(config: Config) -> Chart:
    """ALaST, Figure 2: relative magnitude ‖f(x)‖ / ‖f(x) + x‖ of each block of a pretrained model.

    The values are averaged over images and tokens.
    """
    model, batch, _ = _model_and_batch(config)
    of_model, found = view(model), dict[int, float]()

    def keep(index: int, io: Any) -> None:
        axis = channel_axis(model.get_submodule(of_model.blocks[index]), io.y.dim())
        pair = relative_magnitude(io, of_model.prefix_tokens, axis)
        if pair is not None:
            found[index] = float(pair[0])

    with torch.no_grad(), observe_blocks(model, of_model.blocks, keep):
        model(batch)
    if not found:
        raise UserError(f"The model {of_model.name} has no blocks whose input and output can be compared.")
    labels = block_labels(of_model.blocks)
    series = Series(config.model.name, [labels[i] for i in found], list(found.values()))
    return Chart("Relative magnitude", [Panel("", "block", "‖f(x)‖ / ‖f(x) + x‖", [series], "bars")])


def class_attention(config: Config) -> Chart:
    """ALaST, Figure 4: attention of the class token to the patches of the first image, averaged over the heads.

    The figure shows the second, fourth and sixth block.
    """
    model, batch, _ = _model_and_batch(config)
    of_model = view(model)
    name, grid = of_model.name, of_model.block_grid
    if not of_model.has_class_token or grid is None:
        raise UserError(f"The model {name} has no class token with a grid of patches. Use a ViT or DeiT.")
    if grid[0] != grid[1]:
        raise UserError(f"The model {name} has no square grid of patches. Set model.image_size to one number.")
    attention: dict[int, Any] = {
        index: getattr(model.get_submodule(of_model.blocks[index]), "attn", None)
        for index in (1, 3, 5)
        if index < len(of_model.blocks)
    }
    with _attention_probabilities(attention) as found:
        model(batch[:1])
    tokens = of_model.prefix_tokens + math.prod(grid)
    panels = []
    for index in attention:
        probabilities = found.get(index)
        if probabilities is None or probabilities.shape[2:] != (tokens, tokens):
            block = of_model.blocks[index]
            raise UserError(
                f"The block {block} of the model {name} ({type(model.get_submodule(block)).__name__}) has no attention"
                " module whose probabilities can be read. Use a ViT or DeiT."
            )
        of_patches = probabilities[0, :, 0, of_model.prefix_tokens :].mean(0).tolist()
        title = f"block {index + 1}"
        panels.append(Panel(title, "", "", [Series(title, list(range(len(of_patches))), of_patches)], "image"))
    return Chart("Attention of the class token", panels)


@contextmanager
def _attention_probabilities(attention: Mapping[int, Any]) -> Iterator[dict[int, Tensor]]:
    """Yield a dict that a forward pass fills with the probabilities of each attention module, (B, heads, N, N).

    The probabilities are the input of the dropout of a timm attention module, so they contain all biases and rotary
    embeddings. Fused attention computes no probabilities and is disabled. Modules without this dropout are omitted.
    """
    found: dict[int, Tensor] = {}

    def keep(index: int, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        found[index] = inputs[0].float()

    with ExitStack() as stack, torch.no_grad():
        for index, module in attention.items():
            dropout = getattr(module, "attn_drop", None)
            if not isinstance(dropout, nn.Module):
                continue
            stack.callback(dropout.register_forward_pre_hook(partial(keep, index)).remove)
            if getattr(module, "fused_attn", False):
                stack.callback(setattr, module, "fused_attn", True)
                module.fused_attn = False
        yield found


def gradient_spectrum(config: Config) -> Chart:
    """LBP-WHT, Figure 5: energy of the gradient g_y in each Walsh-Hadamard basis (i, j) for the last attention layer.

    g_y is the gradient of the loss with respect to the output of the layer. The gradient is computed for one batch and
    for the pretrained model with a new classifier.
    """
    model, batch, labels = _model_and_batch(config)
    of_model = view(model)
    layers = [layer for layer in of_model.layers if layer.tokens is not None and layer.in_attention]
    if not layers:
        raise UserError(f"The model {of_model.name} has no attention layer over a grid of tokens.")
    for name in of_model.head:  # A classifier with zero weights would block all gradients.
        for parameter in model.get_submodule(name).parameters():
            nn.init.normal_(parameter, std=0.02)
    held: dict[str, Tensor] = {}

    def keep(name: str, module: nn.Module, inputs: Any, output: Tensor) -> None:
        output.register_hook(lambda gradient: held.update({name: gradient.detach()}))

    for one in layers[-4:]:
        model.get_submodule(one.name).register_forward_hook(partial(keep, one.name))
    output = model(batch)
    logits = getattr(output, "logits", output)  # `transformers` returns an object
    kind_of(config).task_of(config).loss(logits, labels).backward()
    # If only the class token has a gradient in the last attention layer, the previous attention layer is used.
    layer, grid = next(
        (one, grid) for one in reversed(layers[-4:]) if (grid := _on_grid(held[one.name], one)).abs().max() > 0
    )
    energy = block_energy(grid)
    values = (energy / energy.sum()).flatten().tolist()
    series = Series(layer.name, list(range(64)), values)
    return Chart(f"WHT spectrum of the gradient at {layer.name}", [Panel("", "j", "i", [series], "image")])


def _on_grid(gradient: Tensor, layer: Layer) -> Tensor:
    """Return the gradient of the patches as a tensor of shape (B, H, W, C)."""
    assert layer.tokens is not None
    if gradient.dim() == 4:  # a 1×1 convolution
        gradient = gradient.flatten(2).transpose(1, 2)
    return gradient[:, layer.tokens.prefix :].unflatten(1, tuple(layer.tokens.grid)).float()


def training_memory(config: Config | None = None) -> Chart:
    """Back Razor, Figure 1: training memory at batch size 16, counted in the same way as in TinyTL.

    The memory limits of devices are omitted, because the paper does not give their values.
    """
    networks = (
        ("ResNet-50", "resnet50", ()),
        ("ViT-B", "vit_base_patch16_224", ()),
        ("ViT-B (BitFit)", "vit_base_patch16_224", (BitFit,)),
        ("ProxylessNAS-Mobile", "proxyless_mobile", ()),
        ("DeiT-S", "deit_small_patch16_224", ()),
    )
    values = [count_cost(CountSettings(architecture, 16, methods)).memory for _, architecture, methods in networks]
    series = Series("training memory", [name for name, *_ in networks], values)
    return Chart("Training memory, batch 16", [Panel("", "", "MiB by TinyTL's rule", [series], "bars")])


#: Functions that draw figures from a model and images. The keys are the names in `papers.published.figures`.
FIGURES: dict[str, Callable[[Config], Chart]] = {
    "lbp_wht/figure_5": gradient_spectrum,
    "back_razor/figure_1": training_memory,
    "alast/figure_2": relative_magnitudes,
    "alast/figure_4": class_attention,
}


def model_figure(name: str, config: Config) -> Chart:
    """Return the chart of a figure. Raise a `UserError` if weights, images or parts of the model are missing."""
    if name not in FIGURES:
        raise SettingError("figure", name, FIGURES)
    return FIGURES[name](config)
