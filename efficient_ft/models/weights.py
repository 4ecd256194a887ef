"""Load weights from a file into a timm model.

An error is raised if tensors are missing in the file or belong to a different variant of the model. A classifier
that is missing or does not fit is newly initialized instead.
"""

from __future__ import annotations

import json
import logging
import warnings
import zipfile
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import timm.models._builder as timm_builder
import torch
from timm.models import PretrainedCfg, adapt_input_conv
from torch import Tensor, nn

from efficient_ft.config.schema import ModelConfig
from efficient_ft.core.errors import SettingError, UserError, first_line
from efficient_ft.models.checkpoint import Contents, read_contents, read_metadata, require_file, why_unusable
from efficient_ft.models.loading_report import LoadingReport, set_loading_report
from efficient_ft.models.matching import Fit, choose, compare, no_fit, some, split_prefix
from efficient_ft.models.mismatch import explain
from efficient_ft.models.timm_config import build

#: Running variances and weights whose absolute values exceed these limits are reported as suspicious.
_LARGE_VARIANCE, _LARGE_WEIGHT = 1e8, 1e6
#: Weights whose absolute values exceed this limit are rejected.
_ABSURD = 1e15


def load_weights(
    config: ModelConfig, kwargs: dict[str, Any], random: nn.Module, cfg: PretrainedCfg, path: Path
) -> nn.Module:
    """Create a timm model, load its weights from a file, and store the `LoadingReport` on the model.

    timm converts names and resizes position embeddings and attention biases. The file may also be an .npz file with the
    original JAX weights of the ViT family.

    Args:
        config: The `model` section of the configuration.
        kwargs: Keyword arguments of `timm.create_model`.
        random: The same model with random weights. The classifier of this model replaces a classifier that does not
            fit.
        cfg: timm's pretrained configuration of the model.
        path: Path of the file.

    Raises:
        SettingError: If the file does not exist or cannot be read, if no part of the file fits the model, or if several
            parts fit.
    """
    if path.suffix == ".npz" and _is_jax(path):
        return _load_npz(config, kwargs, path)
    contents, fit, model = match_timm(config, kwargs, random, cfg, path)
    model.load_state_dict(fit.taken)
    return set_loading_report(model, report_of(path, contents, fit, model))


def match_timm(
    config: ModelConfig,
    kwargs: dict[str, Any],
    random: nn.Module,
    cfg: PretrainedCfg,
    path: Path,
    needed: Collection[str] | None = None,
    decoder: ModelConfig | None = None,
) -> tuple[Contents, Fit, nn.Module]:
    """Find the weights of a timm model in a file. See `load_weights`.

    The file must contain all names in `needed`, or all names of the model if `needed` is None. If the model is the
    encoder of a segmentation network, `decoder` is the configuration of this network.

    Returns:
        The contents that were searched, the result of matching them to the model (`Fit`), and a model into which the
        matched tensors can be loaded.
    """
    own = random.state_dict()
    heads = (cfg.classifier,) if isinstance(cfg.classifier, str) else tuple(cfg.classifier or ())
    overlay: dict[str, Any] = {"num_classes": kwargs["num_classes"], "custom_load": False}
    size = recorded_size(path)
    if size is not None:  # timm reads the shape of a non-square grid from its pretrained configuration
        overlay["input_size"] = (kwargs.get("in_chans", 3), *size)
    # The replacement loads no weights, but captures timm's conversion function and the value of `strict`.
    caught: dict[str, Any] = {"filter_fn": None, "strict": True}
    with mock.patch.object(timm_builder, "load_pretrained", lambda *_, **given: caught.update(given)):
        model = build(config, kwargs, pretrained=True, pretrained_cfg_overlay=overlay)
    convert, lenient = caught["filter_fn"], not caught["strict"]

    def fit(contents: Contents, prefix: str) -> Fit:
        given, unusable = _plain(contents.under(prefix), own)
        error = ""
        try:
            with quiet_timm():
                converted = given if convert is None else _call(convert, dict(given), model)
            converted = _first_layer(converted, own, cfg)
        except Exception as failure:  # conversion functions may fail for the weights of other models
            converted, error = given, first_line(failure).rstrip(".")
        result = compare(prefix, converted, own, model, heads, offset=cfg.label_offset or 0, lenient=lenient)
        left_out = {**result.left_out, **_dropped(given, converted)}
        notes = (*result.notes, *_changes(given, result.taken, result.new_heads))
        odd = {n: f"{kind} in the file" for n, kind in unusable.items() if n in result.taken or n in own}
        missing = tuple(name for name in result.missing if needed is None or name in needed)
        misshapen = {**result.misshapen, **odd}
        return replace(result, notes=notes, error=error, misshapen=misshapen, missing=missing, left_out=left_out)

    contents, chosen = choose(config, path, read_contents(path), own, fit)
    if not chosen.complete:
        setting = "model=timm model.name" if decoder is None else "model.encoder"
        details = explain(config.name, path, contents, chosen, own, heads, setting)
        raise no_fit(decoder or config, path, details)
    return contents, chosen, model


def report_of(path: Path, contents: Contents, fit: Fit, model: nn.Module) -> LoadingReport:
    """Check the weights of `fit` with `check_values`, and return the report on loading these weights."""
    key, prefix = split_prefix(contents, fit.prefix)
    left_out = {fit.prefix + name: reason for name, reason in fit.left_out.items()}
    left_out |= {name: "elsewhere in the file" for name in contents.tensors if not name.startswith(fit.prefix)}
    suspicious = check_values(path, fit.taken, model)
    counts = (fit.loaded, len(fit.taken))
    return LoadingReport(str(path), key, prefix, *counts, left_out, fit.new_heads, fit.notes, suspicious)


def check_values(path: Path, weights: Mapping[str, Tensor], model: nn.Module) -> tuple[str, ...]:
    """Check the weights for values that do not occur in trained networks.

    A matrix or kernel of a layer is suspicious if all its values are equal. Biases, scales, tokens, positions and
    classifiers are excluded, because they are often initialized to zero and may remain zero.

    Returns:
        Descriptions of the suspicious values.

    Raises:
        SettingError: If values are not finite, if absolute values exceed 1e15, or if variances are negative.
    """
    floats = {name: value for name, value in weights.items() if value.is_floating_point() and value.numel()}
    variances = {name: value for name, value in floats.items() if name.endswith("running_var")}
    peaks = {name: float(value.abs().max()) for name, value in floats.items()}
    largest = f"values up to {max(peaks.values(), default=0):.0e}"
    for bad, what in (
        ([name for name, value in floats.items() if not bool(value.isfinite().all())], "NaN or infinity"),
        ([name for name, value in variances.items() if bool((value < 0).any())], "negative variances"),
        ([name for name, peak in peaks.items() if peak > _ABSURD], largest),
    ):
        if bad:
            words = f"{some(bad)} {'contains' if len(bad) == 1 else 'contain'} {what}. Export the weights again."
            raise SettingError("model.weights", path, "a file of finite, trained weights", words)
    large = [n for n, peak in peaks.items() if peak > (_LARGE_VARIANCE if n in variances else _LARGE_WEIGHT)]
    dead = [name for name, value in variances.items() if float((value <= 1e-12).float().mean()) > 0.5]
    classifier: Any = getattr(model, "get_classifier", tuple)()  # only timm models have `get_classifier`
    modules = classifier if isinstance(classifier, tuple | list) else (classifier,)
    heads = {id(p) for module in modules if isinstance(module, nn.Module) for p in module.parameters()}
    matrices = [
        name for name, p in model.named_parameters()
        if id(p) not in heads and name in floats and floats[name].ndim > 1 and floats[name].numel() > 1
        and name.endswith("weight") and "token_type" not in name  # the token-type embedding of RoBERTa is zero
    ]  # fmt: skip
    flat = [name for name in matrices if bool((floats[name] == floats[name].flatten()[0]).all())]
    zero = [name for name in flat if peaks[name] == 0]
    suspicious = {
        f"values up to {max((peaks[n] for n in large), default=0):.0e}": large,
        "the running variance is 0 in most channels": dead,
        "all values are 0, as in a tensor that was never initialized": zero,
        "all values are equal": [name for name in flat if name not in zero],
    }
    return tuple(f"{some(names)}: {words}" for words, names in suspicious.items() if names)


def _call(convert: Any, weights: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Call one of timm's conversion functions, some of which take only the weights."""
    try:
        return dict(convert(weights, model))
    except TypeError:
        return dict(convert(weights))


@contextmanager
def quiet_timm() -> Iterator[None]:
    """Silence timm's messages about resized and unused tensors, because the loading report lists these tensors."""
    log = logging.getLogger("timm")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # NumPy and torch warn about timm's interpolation
            yield
    finally:
        log.setLevel(level)


def _plain(given: dict[str, Tensor], own: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Convert floating-point tensors to fp32, and replace unusable tensors with zeros.

    Returns:
        The tensors, and a mapping from the names of unusable tensors to the reasons.
    """
    unusable = {}
    plain = {}
    for name, value in given.items():
        kind = why_unusable(value)
        integer = kind is not None and not value.is_complex() and not value.is_floating_point()
        if kind is None:
            plain[name] = value.float()
        elif integer and value.layout == torch.strided and not (value.is_meta or value.is_quantized):
            plain[name] = value
            if name in own and own[name].is_floating_point():
                unusable[name] = kind
        else:
            plain[name] = torch.zeros(1).expand(value.shape)
            unusable[name] = kind or ""
    return plain, unusable


def _dropped(given: Mapping[str, Tensor], converted: Mapping[str, Tensor]) -> dict[str, str]:
    """Return the names of the tensors that timm's conversion dropped, each with the reason for the loading report.

    The result is empty if the conversion created new tensors, because the new tensors may contain the dropped tensors.
    """
    kept = {value.untyped_storage().data_ptr() for value in converted.values()}
    own = {value.untyped_storage().data_ptr() for value in given.values()}
    if any(v.untyped_storage().data_ptr() not in own for n, v in converted.items() if n not in given):
        return {}
    gone = (n for n, v in given.items() if n not in converted and v.untyped_storage().data_ptr() not in kept)
    return dict.fromkeys(gone, "not used by timm's model")


def _first_layer(weights: dict[str, Tensor], own: Mapping[str, Tensor], cfg: PretrainedCfg) -> dict[str, Tensor]:
    """Adapt the weights of the first layers to the number of input channels of the model, as timm does."""
    names = (cfg.first_conv,) if isinstance(cfg.first_conv, str) else tuple(cfg.first_conv or ())
    for name in (f"{one}.weight" for one in names):
        if name not in weights or name not in own or weights[name].ndim != 4 or own[name].ndim != 4:
            continue
        if weights[name].shape[1] == cfg.input_size[0] and own[name].shape[1] != weights[name].shape[1]:
            weights = {**weights, name: adapt_input_conv(own[name].shape[1], weights[name])}
    return weights


def _changes(given: Mapping[str, Tensor], taken: Mapping[str, Tensor], new_heads: Mapping[str, str]) -> list[str]:
    """Return descriptions of the shapes that the conversion changed."""
    heads = tuple(f"{head}." for head in new_heads)
    changed = [n for n, v in taken.items() if n in given and given[n].shape != v.shape and not n.startswith(heads)]
    words = []
    for name in changed:
        was, now, end = given[name].shape, taken[name].shape, name.rpartition(".")[2]
        if end == "pos_embed" and len(was) == len(now) == 3:
            words.append(f"position embeddings were resized from {was[1]} to {now[1]} positions")
        elif name.endswith("patch_embed.proj.weight") and len(was) == len(now) == 4 and was[2:] != now[2:]:
            words.append(f"patches were resized from {was[2]}×{was[3]} to {now[2]}×{now[3]}")
        elif len(was) == len(now) == 4 and was[1] != now[1] and was[2:] == now[2:]:
            words.append(f"{name} was changed from {was[1]} to {now[1]} channels")
    tables = sum(name.endswith("relative_position_bias_table") for name in changed)
    return words + ([f"{tables} relative position tables were resized"] if tables else [])


def recorded_size(path: Path) -> tuple[int, int] | None:
    """Return the training image size (H, W) in pixels from the metadata of a file, or None if none is recorded."""
    try:
        size = json.loads(read_metadata(path).get("image_size", "null"))
    except (ValueError, RecursionError):  # the error is reported when the weights are read
        return None
    return (size[0], size[1]) if isinstance(size, list) and [type(n) for n in size] == [int, int] else None


def _is_jax(path: Path) -> bool:
    """Return True if an .npz file contains names of the original JAX weights, or no names."""
    require_file(path)
    try:
        with zipfile.ZipFile(path) as archive:
            return any("/" in name for name in archive.namelist()) or not archive.namelist()
    except (zipfile.BadZipFile, OSError):
        return False


def _load_npz(config: ModelConfig, kwargs: dict[str, Any], path: Path) -> nn.Module:
    """Load original JAX weights of the ViT family with timm's loader. A head that does not fit is newly initialized."""
    overlay = {"file": str(path), "custom_load": True, "hf_hub_id": None, "url": ""}
    try:
        model = build(config, kwargs, pretrained=True, pretrained_cfg_overlay=overlay)
    except (KeyError, RuntimeError, AttributeError, OSError, ValueError, zipfile.BadZipFile, UserError) as error:
        known = f"a file with the original JAX weights of {config.name}"
        do = f"Loading the file failed: {first_line(error).rstrip('.')}. A file with timm's names is also accepted."
        raise SettingError("model.weights", path, known, do) from error
    own = model.state_dict()
    classes = len(np.load(path).get("head/bias", ()))
    new = {} if classes == kwargs["num_classes"] else {"head": f"{classes} in the file" if classes else "absent"}
    loaded = len(own) - 2 * len(new)
    suspicious = check_values(path, own, model)
    report = LoadingReport(str(path), "", "", loaded, len(own), new_heads=new, suspicious=suspicious)
    return set_loading_report(model, report)
