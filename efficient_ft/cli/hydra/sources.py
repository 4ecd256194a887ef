"""Check the user's configuration files before Hydra reads them, and report files that cannot be read."""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import hydra
import omegaconf
from hydra._internal.config_repository import ConfigRepository
from hydra.core.object_type import ObjectType
from hydra.plugins.config_source import ConfigLoadError, ConfigResult

from efficient_ft.cli.hydra.conf import CONF
from efficient_ft.core.errors import UserError, first_line
from efficient_ft.core.format import format_bytes
from efficient_ft.core.parsing import parse_yaml

#: Maximum size of a configuration file in bytes.
_LARGEST = 10**6
_load = ConfigRepository.load_config
_LIBRARIES = tuple(Path(str(library.__file__)).parent for library in (hydra, omegaconf))
_OURS = Path(__file__).parents[2]


def register() -> None:
    """Make Hydra raise a `UserError` for unreadable files. By default, Hydra raises many types of errors."""
    ConfigRepository.load_config = _checked  # type: ignore[method-assign, assignment]


def _checked(repository: ConfigRepository, config_path: str) -> ConfigResult | None:
    """Load a file as Hydra does, but raise a `UserError` if the file cannot be read or is not YAML."""
    source = repository._find_object_source(config_path=config_path, object_type=ObjectType.CONFIG)
    if source is None or source.scheme() != "file":
        return _load(repository, config_path)
    file = Path(source.path, source._normalize_file_name(config_path))
    if file.is_relative_to(CONF):
        return _load(repository, config_path)
    try:
        if (size := file.stat().st_size) > _LARGEST:
            raise ValueError(f"the file size {format_bytes(size)} exceeds the maximum of {format_bytes(_LARGEST)}")
        parse_yaml(file.read_text(encoding="utf-8"))
        return _load(repository, config_path)
    except ConfigLoadError:
        raise
    except Exception as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else first_line(error)
        raise UserError(f"The file {file} cannot be read as a configuration: {reason}. Correct the file.") from error


@contextmanager
def faults_of_files(folders: Sequence[str]) -> Iterator[None]:
    """Convert an error of Hydra in the user's configuration `folders` to a `UserError` that names the folders."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        places = [Path(frame.filename) for frame in traceback.extract_tb(error.__traceback__)]
        last = max((number for number, place in enumerate(places) if place.is_relative_to(_OURS)), default=0)
        inside = any(place.is_relative_to(library) for place in places[last + 1 :] for library in _LIBRARIES)
        if not folders or not inside:
            raise
        reason = "the files include each other" if isinstance(error, RecursionError) else first_line(error)
        raise UserError(f"The configurations in {' and '.join(folders)} cannot be used: {reason}.") from error
