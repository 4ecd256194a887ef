"""Networks of `transformers`, created by model type, from a Hub repository, or from local files.

A `NetworkFiles` object describes one class of networks, such as text classifiers. The functions of a family (see
`factory.Family`) use this object to read configurations, to find or download files, and to build and load networks. A
local folder contains the files that ``save_pretrained`` in `transformers` writes.
"""

from __future__ import annotations

import json
import os
import pickle
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import hf_hub_download, hf_hub_url, snapshot_download
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import Tensor, nn

from efficient_ft.config.schema import ModelConfig
from efficient_ft.core.errors import SettingError, UserError, did_you_mean, first_line
from efficient_ft.models.checkpoint import Contents, read_contents
from efficient_ft.models.hub import cached_file, why_unavailable
from efficient_ft.models.hub_code import read_json, refuse_code
from efficient_ft.models.loading_report import LoadingReport
from efficient_ft.models.matching import Fit, choose, fit_of_transformers, no_fit
from efficient_ft.models.mismatch import explain
from efficient_ft.models.weights import report_of

#: Name of the configuration file, and names of weights files. A folder needs one of the weights files. An index lists
#: several files that contain the weights.
CONFIG, _INDEX = "config.json", ".index.json"
WEIGHTS = ("model.safetensors", "pytorch_model.bin", f"model.safetensors{_INDEX}", f"pytorch_model.bin{_INDEX}")
#: Exceptions that `transformers` raises for configurations and files that it cannot use.
REFUSALS = (ValueError, LookupError, TypeError, AttributeError, RuntimeError, AssertionError, ArithmeticError,
            MemoryError, ImportError, StrictDataclassError)  # fmt: skip
#: Network arguments that other settings determine. The values are hints for the error message.
SET_ELSEWHERE = {
    **dict.fromkeys(("num_labels", "id2label", "label2id"), "The data set determines this argument."),
    **dict.fromkeys(("return_dict", "output_attentions", "output_hidden_states"), "The loss takes logits."),
    "dtype": "Set trainer.precision instead.",
    "model_type": "Set model.name instead.",
}
#: Entries of a `transformers` configuration that do not describe the architecture.
_NO_ARCHITECTURE = (*SET_ELSEWHERE, "problem_type", "architectures", "torch_dtype", "transformers_version")
#: Maximum values of the sizes in a `transformers` configuration, by name.
_SIZES = {
    **dict.fromkeys(("hidden_size", "dim", "d_model", "intermediate_size", "hidden_dim", "embedding_size"), 2**17),
    **dict.fromkeys(("num_hidden_layers", "n_layers", "num_attention_heads", "n_heads"), 2**10),
    **dict.fromkeys(("vocab_size", "max_position_embeddings"), 2**24),
}
#: Sizes that are lists in the configurations of some networks, for example `num_attention_heads` of PVT.
_LISTS = ("hidden_size", "num_attention_heads", "num_hidden_layers")


@dataclass(frozen=True)
class NetworkFiles:
    """The configurations, files and names of one class of networks of `transformers`.

    Attributes:
        auto: Name of the auto class in `transformers` that builds the networks.
        noun: Name of such a network in messages, with an article.
        extra: Extra of this package that installs `transformers`.
        contents: Description of the files of a folder for messages.
        files: Groups of file names, besides config.json and the weights. A network needs one file of each group.
        optional: Names of optional files to download.
        example: Model type for messages.
        dropout: Argument for the dropout probability of the network in `example`.
        set_elsewhere: Network arguments that other settings determine, in addition to `SET_ELSEWHERE`.
        published: For each name of a published network, the repository on the hub, the model type in `transformers`,
            and changes to the default arguments.
        is_complete: Function that returns True if a weights file also contains the data of `files`.
    """

    auto: str
    noun: str
    extra: str
    contents: str
    files: tuple[tuple[str, ...], ...]
    optional: tuple[str, ...]
    example: str
    dropout: str
    set_elsewhere: Mapping[str, str]
    published: Mapping[str, tuple[str, str, dict[str, Any]]]
    is_complete: Callable[[Path], bool]

    def missing(self, config: ModelConfig) -> str | None:
        """Return a message if files of a network are missing, or None otherwise. See `factory.missing_weights`."""
        if config.weights is not None:
            path = Path(config.weights).expanduser()
            if os.path.isdir(path):  # pathlib raises an error if the name is too long
                groups = ((CONFIG,), WEIGHTS, *self.files)
                lacking = [_in_words(group) for group in groups if not any((path / name).is_file() for name in group)]
                if lacking and (path / "adapter_config.json").is_file():
                    return str(_adapter(path))
                lacking = lacking or _missing_parts(path)
                hint = f"The folder does not contain {', '.join(lacking)}."
                allowed = f"a folder with {self.contents}"
                return str(SettingError("model.weights", config.weights, allowed, hint)) if lacking else None
            if not os.path.isfile(path):
                return str(SettingError("model.weights", config.weights, "an existing folder or file"))
            if self.is_complete(path):
                return None
        repository = self.repository(config)
        if repository is None:
            if not config.pretrained and config.weights is None and not self.files:
                return None
            what = "a tokenizer" if config.weights is not None or not config.pretrained else "published weights"
            names = f"one of {', '.join(self.published)}" if self.published else "a repository OWNER/NAME on the hub"
            random = "" if self.files else ", or set model.pretrained=false for random weights"
            return (
                f"model.name={config.name} is a model type without {what}. Set model.weights=DIR, where DIR is a local"
                f" folder with {self.contents}, or set model.name to {names}{random}."
            )
        absent = [group for group in self._needed(config) if cached_file(repository, group) is None]
        if not absent:
            return None
        url = hf_hub_url(repository, absent[0][0])
        why = why_unavailable(url)
        if why is None:
            return None
        files = ", ".join(map(_in_words, absent))
        return (
            f"The files {files} of {config.name} cannot be fetched from {url.partition('/resolve/')[0]} ({why}).\n"
            f"Download these files on a machine with network access. {_ALTERNATIVES}"
        )

    def _needed(self, config: ModelConfig) -> tuple[tuple[str, ...], ...]:
        """Return groups of file names. The repository must provide one file of each group."""
        has_weights = config.weights is not None or not config.pretrained
        return ((CONFIG,), *(() if has_weights else (WEIGHTS,)), *self.files)

    def repository(self, config: ModelConfig) -> str | None:
        """Return the repository on the hub, or None if the model name is a model type.

        Raise a SettingError for any other name.
        """
        if config.name in self.published:
            return self.published[config.name][0]
        if re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", config.name) and not Path(config.name).is_dir():
            return config.name
        if not re.fullmatch(r"[\w-]+", config.name):
            hint = f"For a local folder, set model.weights=DIR, and model.name to the type, for example {self.example}."
            raise SettingError("model.name", config.name, "OWNER/NAME on the hub, or a model type", hint)
        return None

    def local(self, config: ModelConfig, *, complete: bool = False) -> Path:
        """Return the folder with the network's files, which are downloaded if necessary, or the file `model.weights`.

        If `complete` is True and the file does not contain the data of `files`, return the folder of the repository
        instead. Raise a UserError if files are missing.
        """
        path = None if config.weights is None else Path(config.weights).expanduser()
        if path is not None and path.is_file() and not (complete and not self.is_complete(path)):
            return path
        problem = self.missing(config)
        if problem is not None:
            raise UserError(problem)
        if path is not None and path.is_dir():
            return path
        repository = self.repository(config)
        assert repository is not None, "`missing` returns a message for a model type"
        cached = [cached_file(repository, names) for names in self._needed(config)]
        if all(cached) and not _missing_parts(Path(str(cached[0])).parent):
            return Path(str(cached[0])).parent
        wanted = [name for names in self._needed(config) for name in names if name not in WEIGHTS[1:]]
        try:
            folder = Path(snapshot_download(repository, allow_patterns=[*wanted, *self.optional]))
            for more in (["model-*-of-*.safetensors", WEIGHTS[2]], [WEIGHTS[1]], ["pytorch_model-*.bin", WEIGHTS[3]]):
                lacks = not any((folder / name).is_file() for name in WEIGHTS) or _missing_parts(folder)
                if WEIGHTS in self._needed(config) and lacks:
                    folder = Path(snapshot_download(repository, allow_patterns=[*wanted, *self.optional, *more]))
            return folder
        except Exception as error:  # hub errors and transport errors have no narrower common base class
            why = first_line(error)
            raise UserError(f"The files of {config.name} cannot be fetched: {why}. {_ALTERNATIVES}") from error

    def library(self, config: ModelConfig) -> Any:
        """Return the module `transformers`, which logs only errors. Raise a UserError if it is not installed."""
        try:
            import transformers
        except ImportError:
            raise UserError(
                f"model.name={config.name} needs transformers. Run pip install 'efficient-ft[{self.extra}]'."
            ) from None
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        return transformers

    def optional_file(self, config: ModelConfig, names: tuple[str, ...]) -> Path | None:
        """Return the first file in `names` of the network's folder or repository, or None if none is available.

        The file is downloaded if it is in a repository that can be reached.
        """
        folder = self.folder_of(config)
        if folder is None:
            return None
        file = next((folder / name for name in names if (folder / name).is_file()), None)
        is_folder = config.weights is not None and Path(config.weights).expanduser().is_dir()
        repository = None if is_folder else self.repository(config)
        return _downloaded(repository, names[0]) if file is None and repository is not None else file

    def folder_of(self, config: ModelConfig) -> Path | None:
        """Return the local folder whose config.json describes the network, or None for a model type without a folder.

        If `weights` is a file and the name is a model type, return the folder of the file if its config.json has this
        model type.
        """
        path = None if config.weights is None else Path(config.weights).expanduser()
        if path is not None and os.path.isdir(path):
            return path
        if path is not None and not os.path.isfile(path):  # pathlib raises an error if the name is too long
            raise SettingError("model.weights", config.weights, "an existing folder or file")
        if config.name in self.published:
            return None
        if self.repository(config) is not None:
            return self.local(config.model_copy(update={"pretrained": False, "weights": None}))
        parent = None if path is None else path.parent
        if parent is None or not (parent / CONFIG).is_file():
            return None
        return parent if read_json(parent / CONFIG).get("model_type") == config.name else None

    def architecture(self, config: ModelConfig, classes: int) -> Any:
        """Return the network's `transformers` configuration with the changes in `model.kwargs`."""
        auto = self.library(config)
        changes: dict[str, Any] = {}
        folder = self.folder_of(config)
        if folder is not None:
            about = self._read_architecture(config, folder)
        elif config.name in self.published:
            _, kind, changes = self.published[config.name]
            about = auto.AutoConfig.for_model(kind)
        else:
            known = auto.models.auto.configuration_auto.CONFIG_MAPPING_NAMES
            if config.name not in known:
                hint = did_you_mean(config.name, [*self.published, *known]).strip()
                names = [*self.published, "a repository OWNER/NAME on the hub", "or a model type"]
                raise SettingError("model.name", config.name, ", ".join(names), hint or None)
            about = auto.AutoConfig.for_model(config.name)
        refuse_code(config.kwargs)
        elsewhere = {**SET_ELSEWHERE, **self.set_elsewhere}
        for name, value in {**changes, **config.kwargs}.items():
            _change(about, name, value, elsewhere, "model.kwargs")
        about.num_labels = classes
        if config.drop_rate or config.drop_path_rate:
            name = "drop_rate" if config.drop_rate else "drop_path_rate"
            hint = f"Set an argument of the network instead, for example +model.kwargs.{self.dropout}."
            raise SettingError(f"model.{name}", getattr(config, name), f"0 for {self.noun} of transformers", hint)
        return about

    def _read_architecture(self, config: ModelConfig, folder: Path) -> Any:
        """Read the `transformers` configuration in a folder. Entries that refer to code are ignored.

        Raise a SettingError if `model.name` is a different model type.
        """
        plain = read_json(folder / CONFIG)
        known = self.library(config).CONFIG_MAPPING
        kind = plain.get("model_type", config.name)
        if not isinstance(kind, str) or kind not in known:
            why = f"model_type={plain.get('model_type')} is not a model type of transformers"
            if "model_type" not in plain and isinstance(plain.get("architecture"), str):
                why = "it describes a network of timm"
                hint = f" Use model=timm model.name={plain['architecture']} with the weights file in the folder."
                raise UserError(f"The file {folder}/{CONFIG} cannot be used: {why}.{hint}")
            if "model_type" not in plain:
                why = "the entry model_type is missing"
            do = (
                "Set model.weights to a folder that save_pretrained of transformers has written, or correct model_type."
            )
            raise UserError(f"The file {folder}/{CONFIG} cannot be used: {why}. {do}")
        named = self.published[config.name][1] if config.name in self.published else config.name
        if config.weights is not None and named not in (kind, "auto") and "/" not in named:
            hint = f"The folder contains a {kind} network. Leave model.name out, or set model.name={kind}."
            raise SettingError("model.name", config.name, f"the type of the network in {folder}", hint)
        try:
            return known[kind].from_dict(plain)
        except REFUSALS as error:
            why = " ".join(str(error).split())[:300] or first_line(error)
            raise UserError(f"The file {folder}/{CONFIG} cannot be used: {why.rstrip('.')}.") from error

    def random(self, config: ModelConfig, about: Any) -> nn.Module:
        """Build the network of the `transformers` configuration `about` with random weights in fp32."""
        for name, most in _SIZES.items():
            size = getattr(about, name, None)
            if name in _LISTS and isinstance(size, list | tuple) and size:
                continue
            if size is not None and (type(size) is not int or not 1 <= size <= most):
                file = f"{name} in config.json of {config.weights or config.name}"
                place = f"model.kwargs.{name}" if name in config.kwargs else file
                raise SettingError(place, size, f"an integer from 1 to {most:,}")
        auto = getattr(self.library(config), self.auto)
        about.architectures = about.architectures or []  # types with several classes require a list
        try:
            model: nn.Module = auto.from_config(about, dtype=torch.float32)
        except REFUSALS as error:
            given = f"model.kwargs={config.kwargs}" if config.kwargs else f"the type {about.model_type}"
            raise UserError(
                f"model.name={config.name} cannot be built as {self.noun} with {given}: {first_line(error)}."
            ) from error
        return model

    def load(self, config: ModelConfig, about: Any) -> tuple[nn.Module, LoadingReport]:
        """Build the network of the `transformers` configuration `about` with the configured weights.

        Parts outside of the pretrained network that the weights do not contain, such as a classifier, are newly
        initialized.

        Raises:
            SettingError: If the weights do not fit the network.
            UserError: If files are missing or damaged.
        """
        source = self.local(config)
        if (source / "adapter_config.json").is_file():
            raise _adapter(source)
        if config.weights_key is not None and source.is_dir():
            raise SettingError("model.weights_key", config.weights_key, "null if model.weights is a folder")
        options: Any = {"ignore_mismatched_sizes": True, "local_files_only": True, "trust_remote_code": False}
        with torch.device("meta"):
            plain = self.random(config, about)
        kind: Any = type(plain)
        own, base = plain.state_dict(), f"{_pretrained_part(plain)}."

        def fit(weights: dict[str, Tensor] | None, prefix: str) -> Fit:
            folder = None if source.is_file() else str(source)
            model, found = kind.from_pretrained(
                folder, config=about, state_dict=weights, dtype="float32", output_loading_info=True, **options
            )
            new = {*found["missing_keys"], *(name for name, *_ in found["mismatched_keys"])}
            heads = {name.rpartition(".")[0] for name in new if not name.startswith(base) or ".pooler." in name}
            return fit_of_transformers(prefix, model, found, {*heads, f"{base}pooler"})

        try:
            if source.is_file():
                held = read_contents(source)
                whole = any(f".{base}" in f".{name}" for name in held.tensors)
                names = own if whole else {name.removeprefix(base) for name in own}
                contents, chosen = choose(config, source, held, names, lambda part, at: fit(part.weights_under(at), at))
            else:
                contents, chosen = Contents({}, {}), fit(None, "")
        except (*REFUSALS, OSError, EOFError, pickle.UnpicklingError, SafetensorError) as error:
            if isinstance(error, UserError):
                raise
            raise UserError(
                f"The weights in {source} cannot be read ({first_line(error)}). The file may be incomplete. Copy"
                " it again, or set model.weights to another folder or file."
            ) from error
        if not chosen.complete or chosen.model is None:
            raise no_fit(config, source, explain(config.name, source, contents, chosen, own, ()))
        return chosen.model, report_of(source, contents, chosen, chosen.model)

    def portable(self, config: ModelConfig, model: nn.Module) -> ModelConfig:
        """Return a `model` section that builds the architecture of `model` without other files.

        `config` is the section that created `model`, and may refer to a folder or a repository.
        """
        own = config.weights is not None and Path(config.weights).expanduser().is_dir()
        if config.name in self.published and not own:
            return config
        about: Any = model.config
        plain = self.library(config).AutoConfig.for_model(about.model_type)
        elsewhere = (*_NO_ARCHITECTURE, *self.set_elsewhere)
        kwargs = _differences(plain, about.to_dict(), elsewhere)
        kinds = getattr(self.library(config), self.auto)._model_mapping[type(about)]
        if isinstance(kinds, tuple | list) and type(model) is not kinds[0]:
            kwargs["architectures"] = [type(model).__name__]
        return config.model_copy(update={"name": about.model_type, "kwargs": kwargs})


def config_json(model: nn.Module, class_names: Sequence[str]) -> str:
    """Return the content of config.json for the weights of a network, including the names of the classes."""
    about: Any = model.config
    entries = {
        **about.to_diff_dict(),
        "architectures": [type(model).__name__],
        "id2label": {str(number): name for number, name in enumerate(class_names)},
        "label2id": {name: number for number, name in enumerate(class_names)},
    }
    return json.dumps(entries, indent=2) + "\n"


@cache
def _downloaded(repository: str, name: str) -> Path | None:
    """Return the path of a file of a repository, or None if the file does not exist or cannot be downloaded."""
    cached = cached_file(repository, (name,))
    if cached is not None or why_unavailable(hf_hub_url(repository, name)) is not None:
        return cached
    try:
        return Path(hf_hub_download(repository, name))
    except Exception:  # hub errors and transport errors have no narrower common base class
        return None


_ALTERNATIVES = "Alternatively, set model.weights=DIR, where DIR is a local folder with these files."


def _in_words(group: Sequence[str]) -> str:
    """Return the names of files of which one is needed. Indexes of several files are left out."""
    return " or ".join(name for name in group if not name.endswith(_INDEX))


def _missing_parts(folder: Path) -> list[str]:
    """Return the names of missing weights files that are listed in the index of a folder."""
    present = next((name for name in WEIGHTS if (folder / name).is_file()), "")
    if not present.endswith(_INDEX):
        return []
    parts = read_json(folder / present).get("weight_map")
    if not isinstance(parts, dict) or not parts:
        raise UserError(f"The file {folder}/{present} cannot be used: it does not list the files of the weights.")
    names = sorted({str(part) for part in parts.values()})
    if foreign := next((name for name in names if Path(name).name != name), None):
        raise UserError(
            f"The file {folder}/{present} cannot be used: {foreign} is not the name of a file in the folder."
        )
    return [f"{name} (listed in {present})" for name in names if not (folder / name).is_file()]


def _adapter(folder: Path) -> UserError:
    return UserError(f"The folder {folder} contains an adapter. Merge the adapter first (peft: merge_and_unload()).")


def _pretrained_part(model: nn.Module) -> str:
    """Return the name of the submodule that contains the first layer, for example ``vit`` or ``vision_model``."""
    layers = (name for name, m in model.named_modules() if isinstance(m, nn.Conv2d | nn.Embedding | nn.Linear))
    return next(layers, "").partition(".")[0]


def _is_argument(about: Any, name: str) -> bool:
    """Return True if the `transformers` configuration `about` has a setting with this name."""
    return not name.startswith("_") and hasattr(about, name) and not callable(getattr(about, name))


def _change(about: Any, name: str, value: Any, elsewhere: Mapping[str, str], place: str) -> None:
    """Set an argument of the configuration `about`. If `value` is a mapping, change a nested configuration.

    Raise a SettingError if the argument is unknown, has an invalid value, or is determined by another setting.
    """
    if name in elsewhere:
        raise SettingError(f"{place}.{name}", value, "unset", elsewhere[name])
    if not _is_argument(about, name):
        names = [n for n in about.to_dict() if n not in _NO_ARCHITECTURE]
        inner = [n for n in names if _is_nested(getattr(about, n, None)) and _is_argument(getattr(about, n), name)]
        inner.sort(key=lambda one: one != "vision_config")
        hint = f"Use +{place}.{inner[0]}.{name}." if inner else did_you_mean(name, names).strip()
        hint = hint or f"See the configuration of {about.model_type} in transformers."
        raise SettingError(f"{place}.{name}", value, f"an argument of {about.model_type}", hint)
    if _is_nested(getattr(about, name)):
        if not isinstance(value, dict):
            raise SettingError(f"{place}.{name}", value, "a mapping from names of arguments to values")
        for key, one in value.items():
            _change(getattr(about, name), str(key), one, elsewhere, f"{place}.{name}")
        return
    try:
        setattr(about, name, value)
    except REFUSALS as error:
        hint, allowed = f"transformers: {first_line(error)}.", f"a value that {about.model_type} accepts"
        raise SettingError(f"{place}.{name}", value, allowed, hint) from error


def _is_nested(value: Any) -> bool:
    """Return True if `value` is a configuration of `transformers`."""
    return hasattr(value, "model_type") and hasattr(value, "to_dict")


def _differences(plain: Any, given: Mapping[str, Any], elsewhere: tuple[str, ...]) -> dict[str, Any]:
    """Return the arguments in `given` that differ from the configuration `plain`.

    A published config.json may contain entries that are not arguments of the network. These entries are omitted.
    """
    usual, found = plain.to_dict(), {}
    for name, value in given.items():
        if usual.get(name) == value or name in elsewhere or not _is_argument(plain, name):
            continue
        inner = getattr(plain, name)
        found[name] = _differences(inner, value, elsewhere) if _is_nested(inner) and isinstance(value, dict) else value
    return found
