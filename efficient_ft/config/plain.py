"""Convert a configuration composed by Hydra to plain containers. Other modules of `config` do not import OmegaConf."""

from __future__ import annotations

from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from efficient_ft.core.errors import UserError


def plain(composed: DictConfig) -> dict[str, Any]:
    """Return a composed configuration as plain containers with resolved interpolations.

    Hydra's own settings and the list of sweep rows are removed. Raise a UserError if an interpolation cannot be
    resolved.
    """
    job = OmegaConf.masked_copy(composed, [str(key) for key in composed if key not in ("hydra", "rows")])
    # Interpolations can be resolved in the copy, because they refer only to the settings of the job.
    try:
        container = OmegaConf.to_container(job, resolve=True)
    except OmegaConfBaseException as error:
        setting = error.full_key or "The configuration"
        raise UserError(
            f"{setting} cannot be resolved: {sentence(error).rstrip('.')}. Use a value, or ${{NAME}} of an"
            " existing setting."
        ) from None
    assert isinstance(container, dict)
    return {str(key): value for key, value in container.items()}


def sentence(error: Exception) -> str:
    """Return the message of a Hydra or OmegaConf error without search paths and object types."""
    texts = [str(error), *([str(error.__cause__)] if error.__cause__ is not None else [])]
    lines = [line.strip() for text in texts for line in text.splitlines()]
    kept = []
    for line in lines:
        if line.startswith(("Config search path", "full_key:", "object_type=", "reference_type=")):
            break
        if line:
            kept.append(line)
    return " ".join(kept) or type(error).__name__
