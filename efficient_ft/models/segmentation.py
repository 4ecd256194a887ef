"""Segmentation networks: Segformer, and the encoder–decoder networks of segmentation-models-pytorch.

Segformer comes from `transformers` (Apache-2.0), because the encoder with this name in segmentation-models-pytorch has
a non-commercial license. All other encoders are timm models (``tu-NAME``) with timm's weights.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.models import PretrainedCfg
from torch import Tensor, nn

from efficient_ft.config.schema import ModelConfig
from efficient_ft.core.errors import SettingError, UserError, did_you_mean, first_line
from efficient_ft.core.input_spec import InputSpec
from efficient_ft.models.checkpoint import Contents, read_contents
from efficient_ft.models.hub import fetch_weights, missing_files
from efficient_ft.models.hub_code import refuse_code
from efficient_ft.models.loading_report import set_loading_report
from efficient_ft.models.matching import Fit, choose, compare, fit_of_transformers, no_fit
from efficient_ft.models.mismatch import explain
from efficient_ft.models.timm_config import build as build_timm
from efficient_ft.models.timm_config import pretrained_cfg
from efficient_ft.models.weights import match_timm, quiet_timm, report_of

#: Channels per stage, blocks per stage, and decoder channels, from Xie et al., "SegFormer", NeurIPS 2021, Table 6.
SEGFORMERS: dict[str, tuple[tuple[int, ...], tuple[int, ...], int]] = {
    "segformer_b0": ((32, 64, 160, 256), (2, 2, 2, 2), 256),
    "segformer_b1": ((64, 128, 320, 512), (2, 2, 2, 2), 256),
    "segformer_b2": ((64, 128, 320, 512), (3, 4, 6, 3), 768),
    "segformer_b3": ((64, 128, 320, 512), (3, 4, 18, 3), 768),
    "segformer_b4": ((64, 128, 320, 512), (3, 8, 27, 3), 768),
    "segformer_b5": ((64, 128, 320, 512), (3, 6, 40, 3), 768),
}
#: Default size of training crops in pixels.
_SIZE = 512
#: Network arguments that are determined by other settings. The values are hints for the error message.
_SET_ELSEWHERE = {
    **dict.fromkeys(("classes", "num_labels"), "The data set determines this argument."),
    "encoder_name": "Set model.encoder instead.",
    "encoder_weights": "Set model.pretrained or model.weights instead.",
    "activation": "The loss takes logits.",
    "aux_params": "The network has only one output.",
}


def input_of(config: ModelConfig) -> InputSpec:
    """Return the size of training crops and the normalization of a segmentation network. See `factory.input_of`."""
    mean, std = IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
    if config.encoder is not None:
        cfg = encoder_cfg(config)
        mean, std = tuple(cfg.mean), tuple(cfg.std)  # type: ignore[assignment]
    size = _SIZE if config.image_size is None else config.image_size
    pair = (size, size) if isinstance(size, int) else size
    return InputSpec(pair, config.mean or mean, config.std or std, "bilinear")


def encoder_cfg(config: ModelConfig) -> PretrainedCfg:
    """Return timm's pretrained configuration of the encoder. Raise a SettingError if timm does not have the encoder."""
    try:
        return pretrained_cfg(config.model_copy(update={"name": config.encoder}))
    except SettingError as error:
        error.setting = "model.encoder"
        error.args = (str(error).replace("model.name", "model.encoder", 1),)
        raise


def weights_cfg(config: ModelConfig) -> PretrainedCfg:
    """Return the pretrained configuration of the encoder if one is set, or of Segformer trained on ADE20K."""
    if config.encoder is not None:
        return encoder_cfg(config)
    size = 640 if config.name == "segformer_b5" else 512
    name = config.name.removeprefix("segformer_")
    repository = f"nvidia/segformer-{name}-finetuned-ade-{size}-{size}"
    return PretrainedCfg(architecture=config.name, hf_hub_id=repository)


def build(config: ModelConfig, classes: int, encoder: dict[str, Tensor] | None = None) -> nn.Module:
    """Build a segmentation network for images (B, 3, H, W). See `factory.random_model`.

    The network returns logits (B, classes, h, w), or an object that contains the logits. `encoder` contains the weights
    of the encoder under timm's names. If `encoder` is None, the encoder has random weights.

    Raises:
        SettingError: If the network is unknown, or if another setting determines an argument.
        UserError: If a required library is not installed, or if the network rejects an argument.
    """
    refuse_code(config.kwargs)
    for name in config.kwargs:
        if name in _SET_ELSEWHERE:
            raise SettingError(f"model.kwargs.{name}", config.kwargs[name], "unset", _SET_ELSEWHERE[name])
    if config.encoder is None:
        segformer, about = _segformer_class(config, classes)
        return _with_input_size(config, segformer(about))
    return _with_input_size(config, _encoder_decoder(config, classes, encoder))


def _segformer_class(config: ModelConfig, classes: int) -> tuple[Any, Any]:
    """Return the class of Segformer in `transformers`, and a configuration for this class."""
    try:
        import transformers
        from transformers import SegformerConfig, SegformerForSemanticSegmentation
    except ImportError:
        raise UserError(
            f"model.name={config.name} needs transformers. Run pip install 'efficient-ft[segmentation]'."
        ) from None
    transformers.logging.disable_progress_bar()
    if config.name not in SEGFORMERS:
        raise SettingError("model.name", config.name, list(SEGFORMERS))
    channels, depths, decoder = SEGFORMERS[config.name]
    settings: Any = {"hidden_sizes": channels, "depths": depths, "decoder_hidden_size": decoder, **config.kwargs}
    rates: Any = {"drop_path_rate": config.drop_path_rate, "classifier_dropout_prob": config.drop_rate}
    make: Any = SegformerConfig
    return SegformerForSemanticSegmentation, make(num_labels=classes, **rates, **settings)


def _encoder_decoder(config: ModelConfig, classes: int, encoder: dict[str, Tensor] | None) -> nn.Module:
    try:
        import segmentation_models_pytorch as smp
    except ImportError:
        raise UserError(
            f"model.name={config.name} needs segmentation-models-pytorch. Run pip install 'efficient-ft[segmentation]'."
        ) from None
    known = sorted(smp.MODEL_ARCHITECTURES_MAPPING)
    if config.name not in known:
        hint = did_you_mean(config.name, known).strip() or None
        raise SettingError("model.name", config.name, f"one of {', '.join(known)} if model.encoder is set", hint)
    if config.drop_rate:
        hint = "Set an argument of the network instead, for example model.kwargs.decoder_aspp_dropout for DeepLabV3."
        raise SettingError("model.drop_rate", config.drop_rate, "0 if model.encoder is set", hint)
    cfg = encoder_cfg(config)
    arguments: dict[str, Any] = dict(config.kwargs)
    if encoder is not None:
        arguments["pretrained_cfg_overlay"] = {"state_dict": encoder, "custom_load": False}
    if config.drop_path_rate:
        arguments["drop_path_rate"] = config.drop_path_rate
    try:
        with quiet_timm():
            network: nn.Module = smp.create_model(
                config.name,
                encoder_name=f"tu-{cfg.architecture}",
                encoder_weights=None if encoder is None else True,
                classes=classes,
                **arguments,
            )
    except (TypeError, ValueError, AssertionError, RuntimeError, KeyError) as error:
        raise UserError(
            f"model.name={config.name} cannot be built with model.encoder={config.encoder} and"
            f" model.kwargs={config.kwargs}: {first_line(error).rstrip('.')}. Change model.encoder or model.kwargs."
        ) from error
    size = input_of(config).size
    stride = int(getattr(network.encoder, "output_stride", 1))  # type: ignore[union-attr]
    if getattr(network, "requires_divisible_input_shape", True) and any(side % stride for side in size):
        near = " or ".join(str(side) for side in (size[0] // stride * stride, -(-size[0] // stride) * stride) if side)
        allowed = f"a multiple of {stride} for model.name={config.name}"
        raise SettingError("model.image_size", config.image_size, allowed, f"Use {near}.")
    if encoder is not None:  # free the tensors that timm has stored in `pretrained_cfg`
        stored: Any = network.encoder.model.pretrained_cfg  # type: ignore[union-attr]
        stored["state_dict"] = None
    return network


def load(config: ModelConfig, classes: int, random: nn.Module) -> nn.Module:
    """Build a network with weights for all layers or only for its encoder. See `factory.create_model`."""
    path = fetch_weights(config, weights_cfg(config))
    if config.encoder is None:
        return _load_segformer(config, classes, path, random)
    own = random.state_dict()
    head = "segmentation_head"

    def fit(searched: Contents, prefix: str) -> Fit:
        return compare(prefix, searched.weights_under(prefix), own, random, (head,))

    contents, chosen = choose(config, path, read_contents(path), own, fit)
    if chosen.complete:
        random.load_state_dict(chosen.taken)
        return set_loading_report(random, report_of(path, contents, chosen, random))
    if any(name.startswith(("decoder.", f"{head}.")) for name in contents.under(chosen.prefix)):
        raise no_fit(config, path, explain(config.name, path, contents, chosen, own, (head,)))
    return _load_encoder(config, classes, path, own)


def missing(config: ModelConfig) -> str | None:
    """Return a message if the weights are missing, or None otherwise. See `factory.missing_weights`."""
    return missing_files(config, weights_cfg(config))


def _load_encoder(config: ModelConfig, classes: int, path: Path, own: Mapping[str, Tensor]) -> nn.Module:
    """Build the network with timm's weights for the encoder."""
    cfg = encoder_cfg(config)
    update: dict[str, Any] = {"name": config.encoder, "encoder": None, "image_size": None, "kwargs": {}}
    encoder = config.model_copy(update=update)
    # timm's feature extractors name stages ``stages_0`` instead of ``stages.0``, and omit the layers after the stages.
    names = [n.removeprefix("encoder.model.") for n in own if n.startswith("encoder.model.")]
    inside = {re.sub(r"^([a-z]+)_(\d+)\.", r"\1.\2.", n) for n in names}
    plain = build_timm(encoder, {"num_classes": 0})
    contents, chosen, model = match_timm(encoder, {"num_classes": 0}, plain, cfg, path, inside, config)
    report = report_of(path, contents, chosen, model)
    network = build(config, classes, dict(chosen.taken))
    return set_loading_report(network, replace(report, new_heads={"decoder and its head": "absent from the file"}))


def _load_segformer(config: ModelConfig, classes: int, path: Path, random: nn.Module) -> nn.Module:
    """Load Segformer with `transformers`, which converts the tensor names of earlier versions."""
    network, about = _segformer_class(config, classes)
    decoder, head = "decode_head", "decode_head.classifier"

    def fit(searched: Contents, prefix: str) -> Fit:
        weights = searched.weights_under(prefix)
        loaded, found = network.from_pretrained(
            None, config=about, state_dict=weights, ignore_mismatched_sizes=True, output_loading_info=True
        )
        new = head if any(name.startswith(f"{decoder}.") for name in weights) else decoder
        return fit_of_transformers(prefix, loaded, found, {new})

    contents, chosen = choose(config, path, read_contents(path), random.state_dict(), fit)
    if not chosen.complete or chosen.model is None:
        raise no_fit(config, path, explain(config.name, path, contents, chosen, random.state_dict(), (head,)))
    report = report_of(path, contents, chosen, chosen.model)
    return set_loading_report(_with_input_size(config, chosen.model), report)


def _with_input_size(config: ModelConfig, network: nn.Module) -> nn.Module:
    """Store the input size in `pretrained_cfg`, as timm does. The model view reads this attribute."""
    size = input_of(config).size
    network.pretrained_cfg = {"architecture": config.name, "input_size": (3, *size)}  # type: ignore[assignment]
    return network
