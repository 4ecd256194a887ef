"""Find pretrained weights in local caches, on the Hugging Face Hub or at a URL, and download them."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

import torch
from huggingface_hub import hf_hub_download, hf_hub_url, try_to_load_from_cache
from timm.models import PretrainedCfg

from efficient_ft.config.schema import ModelConfig
from efficient_ft.core.errors import SettingError, UserError, first_line
from efficient_ft.core.network import unreachable
from efficient_ft.models.checkpoint import require_file

_ALTERNATIVES = "Alternatively, set model.weights=FILE (a local file) or model.pretrained=false (random weights)."


def missing_files(config: ModelConfig, cfg: PretrainedCfg) -> str | None:
    """Return a message if the weights of a network are missing, or None otherwise. See `factory.missing_weights`."""
    if config.weights is not None:
        try:
            require_file(Path(config.weights).expanduser())
        except SettingError as error:
            return str(error)
        return None
    if not config.pretrained:
        return None
    if not (cfg.hf_hub_id or cfg.url or cfg.file):
        return f"There are no pretrained weights for model.name={config.name}. {_ALTERNATIVES}"
    if _cached(cfg) is not None:
        return None
    if cfg.hf_hub_id:
        repo, revision, names = _hub_files(cfg)
        url = hf_hub_url(repo, names[0], revision=revision)
        why = why_unavailable(url)
    else:
        url = str(cfg.url or cfg.file)
        why = unreachable(url, accept_404=True)
    if why is None:
        return None
    return (
        f"The weights of {config.name} cannot be fetched from {url} ({why}).\n"
        "Download the file on a machine with network access and pass it as model.weights=FILE.\n"
        f"{_ALTERNATIVES}"
    )


def fetch_weights(config: ModelConfig, cfg: PretrainedCfg) -> Path:
    """Return the path `config.weights`, or the path of the pretrained weights if `config.weights` is None.

    Pretrained weights are downloaded if necessary. Raise a UserError if there are no pretrained weights, or if the
    download fails.
    """
    if config.weights is not None:
        return Path(config.weights).expanduser()
    cached = _cached(cfg)
    if cached is not None:
        return cached
    missing = missing_files(config, cfg)
    if missing is not None:
        raise UserError(missing)
    errors = []
    try:
        if not cfg.hf_hub_id:
            file = _torch_hub_file(cfg)
            file.parent.mkdir(parents=True, exist_ok=True)
            torch.hub.download_url_to_file(str(cfg.url), str(file))
            return file
        repo, revision, names = _hub_files(cfg)
        for name in names:
            try:
                return Path(hf_hub_download(repo, name, revision=revision))
            except Exception as error:  # hub errors and transport errors have no narrower common base class
                errors.append(f"{name}: {first_line(error)}")
    except OSError as error:
        errors.append(first_line(error))
    raise UserError(f"The weights of {config.name} cannot be fetched: {'; '.join(errors)}.\n{_ALTERNATIVES}")


def _hub_files(cfg: PretrainedCfg) -> tuple[str, str | None, tuple[str, ...]]:
    """Return the repository, the revision, and the file names in the order in which timm tries them."""
    repo, _, revision = str(cfg.hf_hub_id).partition("@")
    file = cfg.hf_hub_filename
    if not file:
        return repo, revision or None, ("model.safetensors", "pytorch_model.bin")
    return repo, revision or None, tuple(dict.fromkeys((str(PurePosixPath(file).with_suffix(".safetensors")), file)))


def cached_file(repository: str, names: Iterable[str], revision: str | None = None) -> Path | None:
    """Return the path of the first file in `names` that is in the hub's local cache, or None if there is none."""
    found = (try_to_load_from_cache(repository, name, revision=revision) for name in names)
    return next((Path(path) for path in found if isinstance(path, str)), None)


def _cached(cfg: PretrainedCfg) -> Path | None:
    """Return the path of the weights in the local cache of the hub or of torch, or None if they are not cached."""
    if cfg.hf_hub_id:
        repo, revision, names = _hub_files(cfg)
        return cached_file(repo, names, revision)
    file = Path(cfg.file) if cfg.file else _torch_hub_file(cfg)
    return file if file.is_file() else None


def _torch_hub_file(cfg: PretrainedCfg) -> Path:
    return Path(torch.hub.get_dir()) / "checkpoints" / str(cfg.url).rpartition("/")[2]


def why_unavailable(url: str) -> str | None:
    """Return the reason why a file of the hub cannot be downloaded, or None if it can be downloaded."""
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "TRUE", "YES", "ON"):
        return "HF_HUB_OFFLINE is set, and the file is not in the local cache"
    return unreachable(url, accept_404=True)
