"""Models by timm's names, and their weights: from the Hugging Face hub, from a local file, or none, said loudly.

A weights file is strict about the backbone: a missing or unexpected name is an error, never a half-random model.
Only a head of another size is made anew, which is said.
"""

from __future__ import annotations

import logging
import os
import re
import threading
import urllib.error
import urllib.request
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import timm
import torch
from huggingface_hub import hf_hub_download, hf_hub_url, try_to_load_from_cache
from timm.models import PretrainedCfg, get_pretrained_cfg
from timm.models import load_state_dict as read_weights
from torch import Tensor, nn

import efficient_ft.models.small  # noqa: F401  registers vit_digits and vit_micro
from efficient_ft.core.errors import SettingError, UserError, did_you_mean
from efficient_ft.models.proxyless import timm_names
from efficient_ft.models.tasks import give_heads
from efficient_ft.models.view import view

if TYPE_CHECKING:
    from efficient_ft.config import ModelConfig
    from efficient_ft.core.input_spec import InputSpec

log = logging.getLogger(__name__)

#: Seconds the check for a network may take; the message must not wait for a long time-out.
NETWORK_SECONDS = 8.0

# What timm asks the hub for, in its order.
_HUB_FILES = ("model.safetensors", "pytorch_model.bin")


# ---------------------------------------------------------------------------------------------- creation
def create_model(config: ModelConfig, num_classes: int | Mapping[str, int]) -> nn.Module:
    """The classifier `config.name` with `num_classes` outputs and its weights loaded, in fp32 on the CPU.

    With classes by task it has a classifier for each (`models.tasks`): the first is made, or loaded, as that of a
    network of one task, the others are made anew.

    Raises:
        UserError: an unknown name, arguments or an image size the model refuses, weights that cannot be had or
            do not fit.
    """
    if not isinstance(num_classes, int):
        model = create_model(config, next(iter(num_classes.values())))
        give_heads(model, num_classes, zero=config.zero_head)
        return model
    cfg = _pretrained_cfg(config)
    fresh = random_model(config, num_classes)
    if config.weights is None and not config.pretrained:
        log.warning(
            "%s starts from RANDOM weights (model.pretrained=false, no model.weights): it is trained from scratch.",
            config.name,
        )
        return _zero_head(fresh) if config.zero_head else fresh
    path = _fetch(config, cfg) if config.weights is None else Path(config.weights).expanduser()
    model, made_anew = _load(config, _arguments(config, cfg, num_classes), fresh, cfg, path)
    _of_size(config, model)
    if made_anew:
        if config.zero_head:
            _zero_head(model)
        log.warning("%s: made anew for %d classes: %s; all else from %s.", config.name, num_classes, made_anew, path)
    else:
        log.debug("%s: all weights from %s.", config.name, path)
    return model


def _zero_head(model: nn.Module) -> nn.Module:
    """`model` with a classifier that gives 0 for every class."""
    for name in view(model).head:
        for parameter in model.get_submodule(name).parameters():
            nn.init.zeros_(parameter)
    return model


def random_model(config: ModelConfig, num_classes: int | Mapping[str, int]) -> nn.Module:
    """The same classifier with random weights, whatever the configuration says of weights: to count its cost."""
    if not isinstance(num_classes, int):
        model = random_model(config, next(iter(num_classes.values())))
        give_heads(model, num_classes)
        return model
    cfg = _pretrained_cfg(config)
    model = _build(config, _arguments(config, cfg, num_classes))
    _check_input(config, cfg, model)
    return _of_size(config, model)


def input_of(config: ModelConfig, model: nn.Module | None = None) -> InputSpec:
    """Size (H, W), normalisation and interpolation of the images the model wants; `model` is not needed for it."""
    from efficient_ft.core.input_spec import InputSpec

    cfg = _pretrained_cfg(config)
    size = cfg.input_size[-2:] if config.image_size is None else _pair(config.image_size)
    mean, std = (
        tuple(own if own is not None else theirs) for own, theirs in ((config.mean, cfg.mean), (config.std, cfg.std))
    )
    channels = config.kwargs.get("in_chans", 3)
    for name, values in (("mean", mean), ("std", std)):
        if len(values) != channels:
            raise SettingError(
                f"model.{name}", list(values), f"a list of {channels}, one for each of model.kwargs.in_chans={channels}"
            )
    return InputSpec(
        size=(int(size[0]), int(size[1])),
        mean=mean,
        std=std,
        interpolation=cfg.interpolation or "bicubic",
    )


def _of_size(config: ModelConfig, model: nn.Module) -> nn.Module:
    """`model`, whose record says what images it will be given: methods look at it at that size."""
    spec = input_of(config)
    record: Any = model.pretrained_cfg
    model.pretrained_cfg = {**record, "input_size": (len(spec.mean), *spec.size)}  # type: ignore[assignment]
    return model


def _pair(size: int | list[int] | tuple[int, ...]) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else (int(size[0]), int(size[1]))


def _pretrained_cfg(config: ModelConfig) -> PretrainedCfg:
    """timm's record of the model's weights and input.

    Raises:
        SettingError: timm knows no such model.
    """
    name = config.name
    if not timm.is_model(name):
        known = timm.list_models()
        raise SettingError(
            "model.name",
            name,
            "any classifier of timm (timm.list_models()), `vit_digits`, `vit_micro`, `proxyless_mobile`",
            did_you_mean(name, known).strip() or None,
        )
    try:
        cfg = get_pretrained_cfg(name)
    except RuntimeError:  # a tag (what follows the dot) that this model does not have
        raise SettingError("model.name", name, timm.list_pretrained(f"{name.partition('.')[0]}.*")) from None
    return PretrainedCfg(architecture=name) if cfg is None else cfg


#: Arguments of timm that have a setting of their own.
_SET_ELSEWHERE = {
    "num_classes": "the data: it follows from them",
    "pretrained": "model.pretrained",
    "img_size": "model.image_size",
    "drop_rate": "model.drop_rate",
    "drop_path_rate": "model.drop_path_rate",
}


def _arguments(config: ModelConfig, cfg: PretrainedCfg, num_classes: int) -> dict[str, Any]:
    kwargs: dict[str, Any] = {"num_classes": num_classes}
    # Only models whose weights depend on the image size take it as an argument; others work at any size.
    if config.image_size is not None and cfg.fixed_input_size:
        kwargs["img_size"] = _pair(config.image_size)
    if config.drop_path_rate:
        kwargs["drop_path_rate"] = config.drop_path_rate
    if config.drop_rate:
        kwargs["drop_rate"] = config.drop_rate
    for name in config.kwargs:
        if name in _SET_ELSEWHERE:
            raise SettingError(f"model.kwargs.{name}", config.kwargs[name], "nothing", f"Set {_SET_ELSEWHERE[name]}.")
    kwargs.update(config.kwargs)
    return kwargs


def _build(config: ModelConfig, kwargs: dict[str, Any], **more: Any) -> nn.Module:
    try:
        return timm.create_model(config.name, **kwargs, **more)
    except (TypeError, ValueError, AssertionError) as error:
        raise UserError(f"model.name={config.name} cannot be built with {kwargs}: {error}") from error


def _check_input(config: ModelConfig, cfg: PretrainedCfg, model: nn.Module) -> None:
    """Refuse an image size that the model accepts as an argument and then fails on (attention over fixed grids)."""
    if config.image_size is None or _pair(config.image_size) == tuple(cfg.input_size[-2:]):
        return
    training = model.training
    try:
        with torch.no_grad():
            model.eval()(torch.zeros(1, config.kwargs.get("in_chans", 3), *_pair(config.image_size)))
    except (RuntimeError, AssertionError, ValueError) as error:
        raise SettingError(
            "model.image_size",
            config.image_size,
            f"what {config.name} can take; its own size is {cfg.input_size[-2]}×{cfg.input_size[-1]}",
            f"The model says: {str(error).splitlines()[0]}",
        ) from error
    finally:
        model.train(training)


# ---------------------------------------------------------------------------------------------- loading
def _load(
    config: ModelConfig, kwargs: dict[str, Any], fresh: nn.Module, cfg: PretrainedCfg, path: Path
) -> tuple[nn.Module, str]:
    """The model with the weights of `path`, and which heads had to be made anew; `fresh` is it with random weights.

    timm itself converts names, resizes position embeddings and attention biases, and loads strictly: it is given
    the file's tensors with a head that does not fit already replaced by the fresh one.
    """
    if path.suffix == ".npz":
        return _load_npz(config, kwargs, path)
    weights = {k: v.float() if v.is_floating_point() else v for k, v in read_state_dict(path).items()}
    if cfg.architecture == "proxyless_mobile":
        try:
            weights = timm_names(weights)  # here, not only in timm: the head's name must be known below
        except ValueError as error:
            raise _does_not_fit(config, path, error) from error
    own = fresh.state_dict()
    new_heads = []
    classifiers = cfg.classifier or ()
    for classifier in (classifiers,) if isinstance(classifiers, str) else classifiers:
        names = [n for n in own if n.startswith(f"{classifier}.")]
        offset = cfg.label_offset or 0
        fits = all(
            n in weights
            and weights[n].shape[1:] == own[n].shape[1:]
            and weights[n].shape[0] in (own[n].shape[0], own[n].shape[0] + offset)
            for n in names
        )
        if names and not fits:
            was = weights[f"{classifier}.weight"].shape[0] if f"{classifier}.weight" in weights else None
            new_heads.append(f"{classifier} ({'absent' if was is None else f'{was} classes'} in the file)")
            weights.update({n: own[n] for n in names})
    overlay = {"state_dict": weights, "num_classes": kwargs["num_classes"], "custom_load": False}
    if new_heads:
        overlay["label_offset"] = None
    try:
        model = _build(config, kwargs, pretrained=True, pretrained_cfg_overlay=overlay)
    except (RuntimeError, KeyError, AttributeError, IndexError) as error:
        raise _does_not_fit(config, path, error) from error
    # timm keeps the overlay as the model's record; the tensors would be copied with every deepcopy.
    record: Any = model.pretrained_cfg
    record["state_dict"] = None
    return model, ", ".join(new_heads)


def _load_npz(config: ModelConfig, kwargs: dict[str, Any], path: Path) -> tuple[nn.Module, str]:
    """Original JAX weights of the ViT family, through timm's own loader (it makes a head of another size anew)."""
    if not path.is_file():
        raise UserError(f"model.weights={path}: no such file.")
    overlay = {"file": str(path), "custom_load": True, "hf_hub_id": None, "url": ""}
    try:
        model = _build(config, kwargs, pretrained=True, pretrained_cfg_overlay=overlay)
    except (KeyError, RuntimeError, AttributeError, OSError, zipfile.BadZipFile, UserError) as error:
        raise UserError(
            f"model.weights={path}: not the original JAX weights of {config.name} ({_first_line(error)})."
            " Give a .safetensors or .pth file with timm's names."
        ) from error
    return model, "the head, if it has another size than the file's"


def read_state_dict(path: Path) -> dict[str, Tensor]:
    """The tensors of a .safetensors, .pth, .pt, .bin or .ckpt file; `state_dict`, `model` and EMA entries are opened
    and wrappers' prefixes removed (timm's rules, EMA first). Never runs code from the file.

    Raises:
        UserError: no such file, damaged, or not a file of weights.
    """
    if not path.is_file():
        raise UserError(f"model.weights={path}: no such file.")
    try:
        weights = read_weights(str(path), device="cpu", weights_only=True)
    except Exception as error:  # torch and safetensors raise a dozen kinds for a damaged file
        raise UserError(
            f"model.weights={path}: cannot be read ({_first_line(error)}). Is it complete, and a file of"
            " weights (.safetensors; .pth, .pt or .bin with tensors only; .npz for the ViT family)?"
        ) from error
    # A Lightning checkpoint holds the network under one more name.
    if weights and all(k.startswith("model.") for k in weights):
        weights = {k.removeprefix("model."): v for k, v in weights.items()}
    if not weights or not all(isinstance(v, Tensor) for v in weights.values()):
        odd = [k for k, v in weights.items() if not isinstance(v, Tensor)]
        raise UserError(
            f"model.weights={path}: holds no state dict (names to tensors); found {', '.join(map(str, odd[:5]))}."
        )
    return weights


def _does_not_fit(config: ModelConfig, path: Path, error: Exception) -> UserError:
    """The names at fault, read from torch's own message (after timm's conversion of names)."""
    text = str(error)

    def listed(title: str) -> list[str]:
        found = re.search(rf'{title} key\(s\) in state_dict: (".*?")\.\s', text + " ", re.DOTALL)
        return re.findall(r'"([^"]+)"', found[1]) if found else []

    def some(names: list[str]) -> str:
        return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")

    parts = {
        "missing": listed("Missing"),
        "unexpected": listed("Unexpected"),
        "of another shape": re.findall(r"size mismatch for (\S+):", text),
    }
    details = "; ".join(f"{what}: {some(names)}" for what, names in parts.items() if names)
    return UserError(
        f"model.weights={path} does not fit model.name={config.name}: {details or _first_line(error)}."
        " Is it the file of another model?"
    )


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]


# ---------------------------------------------------------------------------------------------- fetching
def missing_weights(config: ModelConfig) -> str | None:
    """None when the weights are at hand or can be fetched; else what is missing, where to put it, what to use instead.

    Looks at the given file, at the local caches, and last at the network, for at most `NETWORK_SECONDS`.
    """
    cfg = _pretrained_cfg(config)
    if config.weights is not None:
        if Path(config.weights).expanduser().is_file():
            return None
        return f"model.weights={config.weights}: no such file."
    if not config.pretrained:
        return None
    instead = "use instead: model.weights=FILE (a local file), or model.pretrained=false (random weights)."
    if not (cfg.hf_hub_id or cfg.url or cfg.file):
        return f"There are no pretrained weights for model.name={config.name}; {instead}"
    if _cached(cfg) is not None:
        return None
    url = _address(cfg)
    why = _unreachable(cfg, url)
    if why is None:
        return None
    return (
        f"The weights of {config.name} could not be fetched from {url} ({why}).\n"
        f"  by hand: download that file where there is a network, and pass model.weights=FILE;\n  {instead}"
    )


def _hub_file(cfg: PretrainedCfg) -> tuple[str, str | None, tuple[str, ...]]:
    """Repository, revision and the names timm would ask for."""
    repo, _, revision = str(cfg.hf_hub_id).partition("@")
    if cfg.hf_hub_filename:
        names = [cfg.hf_hub_filename]
        if not cfg.hf_hub_filename.endswith(".safetensors"):
            names.insert(0, str(Path(cfg.hf_hub_filename).with_suffix(".safetensors")))
        return repo, revision or None, tuple(names)
    return repo, revision or None, _HUB_FILES


def _cached(cfg: PretrainedCfg) -> Path | None:
    """The weights in the hub's or torch's local cache."""
    if cfg.hf_hub_id:
        repo, revision, names = _hub_file(cfg)
        for name in names:
            found = try_to_load_from_cache(repo, name, revision=revision)
            if isinstance(found, str):
                return Path(found)
        return None
    if cfg.file:
        return Path(cfg.file) if Path(cfg.file).is_file() else None
    file = _torch_hub_file(cfg)
    return file if file.is_file() else None


def _torch_hub_file(cfg: PretrainedCfg) -> Path:
    return Path(torch.hub.get_dir()) / "checkpoints" / str(cfg.url).rpartition("/")[2]


def _address(cfg: PretrainedCfg) -> str:
    if cfg.hf_hub_id:
        repo, revision, names = _hub_file(cfg)
        return hf_hub_url(repo, names[0], revision=revision)
    return str(cfg.url or cfg.file)


def _unreachable(cfg: PretrainedCfg, url: str) -> str | None:
    """Why `url` cannot be fetched, or None. Name look-ups ignore time-outs, so the question is asked from a thread."""
    if cfg.hf_hub_id and os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "TRUE", "YES", "ON"):
        return "HF_HUB_OFFLINE is set, and it is not in the local cache"
    answer: list[str | None] = []

    def ask() -> None:
        try:
            request = urllib.request.Request(url, method="HEAD")
            with urllib.request.urlopen(request, timeout=NETWORK_SECONDS - 1):
                answer.append(None)
        except urllib.error.HTTPError as error:
            # The host answers; with 404 another name of the file may still be there.
            answer.append(None if error.code == 404 else f"HTTP {error.code} {error.reason}")
        except (OSError, ValueError) as error:
            answer.append(str(getattr(error, "reason", error)))

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(NETWORK_SECONDS)
    return answer[0] if answer else f"no answer within {NETWORK_SECONDS:.0f} s"


def _fetch(config: ModelConfig, cfg: PretrainedCfg) -> Path:
    """The local file of the pretrained weights, downloaded if need be."""
    cached = _cached(cfg)
    if cached is not None:
        return cached
    missing = missing_weights(config)
    if missing is not None:
        raise UserError(missing)
    errors = []
    try:
        if not cfg.hf_hub_id:
            file = _torch_hub_file(cfg)
            file.parent.mkdir(parents=True, exist_ok=True)
            torch.hub.download_url_to_file(str(cfg.url), str(file))
            return file
        repo, revision, names = _hub_file(cfg)
        for name in names:
            try:
                return Path(hf_hub_download(repo, name, revision=revision))
            except Exception as error:  # the hub's errors share no narrower base with the transport's
                errors.append(f"{name}: {_first_line(error)}")
    except OSError as error:
        errors.append(_first_line(error))
    raise UserError(
        f"The weights of {config.name} could not be fetched: {'; '.join(errors)}\n"
        "  use instead: model.weights=FILE (a local file), or model.pretrained=false (random weights)."
    )
