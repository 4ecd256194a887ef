"""Weights from a file into a model, strictly: a missing or unexpected name is an error.

Only a classifier of another size is replaced by a newly initialized one.
"""

from __future__ import annotations

import os
import re
import warnings
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from timm.models import PretrainedCfg
from timm.models import load_state_dict as read_weights
from torch import Tensor, nn

from efficient_ft.core.errors import SettingError, UserError, first_line, why_unreadable
from efficient_ft.models.proxyless import timm_names
from efficient_ft.models.timm_config import build

if TYPE_CHECKING:
    from efficient_ft.config.schema import ModelConfig


def load_weights(
    config: ModelConfig, kwargs: dict[str, Any], random: nn.Module, cfg: PretrainedCfg, path: Path
) -> tuple[nn.Module, str]:
    """Create the model with the weights of a file.

    timm converts names, resizes position embeddings and attention biases, and loads strictly: it is given the file's
    tensors, in which a classifier that does not fit is replaced by that of `random`.

    Args:
        config: the `model` section of the configuration.
        kwargs: of `timm.create_model`.
        random: the same model with random weights.
        cfg: timm's record of the model.
        path: a file that `read_state_dict` reads, or .npz with the original JAX weights of the ViT family.

    Returns:
        The model, and the newly initialized classifiers in words ("" if all weights are the file's).

    Raises:
        SettingError: the file does not exist, cannot be read, or does not fit the model.
    """
    if path.suffix == ".npz":
        return _load_npz(config, kwargs, path)
    weights = {k: v.float() if v.is_floating_point() else v for k, v in read_state_dict(path).items()}
    if cfg.architecture == "proxyless_mobile":
        try:
            weights = timm_names(weights)  # here, not only in timm: the classifier's name is needed below
        except ValueError as error:
            raise _does_not_fit(config, path, error) from error
    own = random.state_dict()
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
        model = build(config, kwargs, pretrained=True, pretrained_cfg_overlay=overlay)
    except (RuntimeError, KeyError, AttributeError, IndexError) as error:
        raise _does_not_fit(config, path, error) from error
    # timm keeps the overlay as the model's record; its tensors would be copied with every deepcopy.
    record: Any = model.pretrained_cfg
    record["state_dict"] = None
    return model, ", ".join(new_heads)


def _load_npz(config: ModelConfig, kwargs: dict[str, Any], path: Path) -> tuple[nn.Module, str]:
    """Load the original JAX weights of the ViT family with timm's own loader, which initializes a head that differs."""
    _require_file(path)
    overlay = {"file": str(path), "custom_load": True, "hf_hub_id": None, "url": ""}
    try:
        model = build(config, kwargs, pretrained=True, pretrained_cfg_overlay=overlay)
    except (KeyError, RuntimeError, AttributeError, OSError, zipfile.BadZipFile, UserError) as error:
        raise SettingError(
            "model.weights",
            path,
            f"a file of the original JAX weights of {config.name}",
            f"Loading it failed: {first_line(error)}. Or use a .safetensors or .pth file with timm's names.",
        ) from error
    return model, "the head, if its size differs from the file's"


def read_state_dict(path: Path) -> dict[str, Tensor]:
    """Read the tensors of a .safetensors, .pth, .pt, .bin or .ckpt file, without running code from it.

    Entries `state_dict`, `model` and EMA are opened and the prefixes of wrappers removed, by timm's rules (EMA first).

    Raises:
        SettingError: the file does not exist, is damaged, or holds no weights.
    """
    _require_file(path)
    try:
        with warnings.catch_warnings():  # torch's advice about pickles, of which nothing but tensors is read
            warnings.filterwarnings("ignore", message="Detected pickle protocol")
            weights = read_weights(str(path), device="cpu", weights_only=True)
    except Exception as error:  # torch and safetensors raise a dozen kinds on a damaged file
        raise SettingError(
            "model.weights",
            path,
            "a complete file of weights (.safetensors; .pth, .pt, .bin or .ckpt with tensors only; .npz for the ViT"
            " family)",
            f"Reading it failed: {why_unreadable(error).rstrip('.')}.",
        ) from error
    # A Lightning checkpoint nests the network under one more name.
    if weights and all(k.startswith("model.") for k in weights):
        weights = {k.removeprefix("model."): v for k, v in weights.items()}
    if not weights or not all(isinstance(v, Tensor) for v in weights.values()):
        odd = [str(k) for k, v in weights.items() if not isinstance(v, Tensor)]
        raise SettingError(
            "model.weights",
            path,
            "a file with a state dict (names to tensors)",
            f"It holds {', '.join(odd[:5]) or 'nothing'}.",
        )
    return weights


def _require_file(path: Path) -> None:
    if not os.path.isfile(path):  # pathlib raises for a name that is too long
        raise SettingError("model.weights", path, "an existing file")


def _does_not_fit(config: ModelConfig, path: Path, error: Exception) -> SettingError:
    """Name the parameters at fault, read from torch's own message (after timm's conversion of names)."""
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
    details = "; ".join(f"{kind}: {some(names)}" for kind, names in parts.items() if names)
    return SettingError(
        "model.weights",
        path,
        f"a file that fits model.name={config.name}",
        f"It may belong to another model: {details or first_line(error)}.",
    )


def tensors_do_not_fit(config: ModelConfig, path: Path, names: list[str], what: str) -> SettingError:
    """The error for weights that do not fit a network.

    Args:
        config: the `model` section of the configuration.
        path: of the weights.
        names: of the tensors that do not.
        what: what is wrong with them, in words.
    """
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return SettingError(
        "model.weights",
        path,
        f"a file that fits model.name={config.name}",
        f"It may belong to another model: {what}: {', '.join(names[:4])}{more}.",
    )
