"""Text classifiers from `transformers`, created by name, from a repository of the hub, or from a local folder.

A local folder contains the files that ``save_pretrained`` in `transformers` writes: ``config.json``,
``model.safetensors`` and the tokenizer's files.
"""

from __future__ import annotations

import os
import pickle
import re
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import hf_hub_url, snapshot_download
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import Tensor, nn

from efficient_ft.config.schema import ModelConfig
from efficient_ft.core.errors import SettingError, UserError, did_you_mean, first_line
from efficient_ft.core.input_spec import InputSpec
from efficient_ft.core.tokenizer import Tokenizer, checked_tokenizer
from efficient_ft.models.checkpoint import Contents, read_contents, read_metadata
from efficient_ft.models.hub import cached_file, why_unavailable
from efficient_ft.models.hub_code import read_json, refuse_code
from efficient_ft.models.loading_report import set_loading_report
from efficient_ft.models.matching import Fit, choose, fit_of_transformers, no_fit
from efficient_ft.models.mismatch import explain
from efficient_ft.models.weights import report_of


def _bert(layers: int, width: int, heads: int) -> dict[str, Any]:
    sizes = {"num_hidden_layers": layers, "hidden_size": width, "num_attention_heads": heads}
    return {**sizes, "intermediate_size": 4 * width}


_ROBERTA = {"vocab_size": 50265, "max_position_embeddings": 514, "type_vocab_size": 1, "layer_norm_eps": 1e-5}
#: For each model name, the repository on the hub, the model type in `transformers`, and changes to the default
#: arguments. bert_small and bert_tiny are from Turc et al., "Well-Read Students Learn Better", 2019.
TEXT_MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bert_base": ("google-bert/bert-base-uncased", "bert", {}),
    "bert_small": ("google/bert_uncased_L-4_H-512_A-8", "bert", _bert(4, 512, 8)),
    "bert_tiny": ("google/bert_uncased_L-2_H-128_A-2", "bert", _bert(2, 128, 2)),
    "distilbert_base": ("distilbert/distilbert-base-uncased", "distilbert", {}),
    "roberta_base": ("FacebookAI/roberta-base", "roberta", _ROBERTA),
}
#: Files of a repository or folder. A network needs one file from each group in `_NEEDED`.
_WEIGHTS = ("model.safetensors", "pytorch_model.bin")
_NEEDED = (("config.json",), _WEIGHTS, ("tokenizer.json", "vocab.txt", "vocab.json"))
_OPTIONAL = ("tokenizer_config.json", "special_tokens_map.json", "merges.txt", "added_tokens.json")
#: Key of the tokenizer in the metadata of model.safetensors.
TOKENIZER = "tokenizer"
#: Network arguments that other settings determine. The values are hints for the error message.
_SET_ELSEWHERE = {
    **dict.fromkeys(("num_labels", "id2label", "label2id"), "It follows from the data."),
    **dict.fromkeys(("return_dict", "output_attentions", "output_hidden_states"), "The loss takes logits."),
    "problem_type": "Each text has one class.",
    "dtype": "Set trainer.precision instead.",
    "model_type": "Set model.name instead.",
}
#: Exceptions that `transformers` raises for configurations and files that it cannot use.
_REFUSALS = (ValueError, LookupError, TypeError, AttributeError, RuntimeError, AssertionError, ArithmeticError,
             MemoryError, StrictDataclassError)  # fmt: skip
#: Maximum values of the sizes in a `transformers` configuration, by name.
_SIZES = {
    **dict.fromkeys(("hidden_size", "dim", "d_model", "intermediate_size", "hidden_dim", "embedding_size"), 2**17),
    **dict.fromkeys(("num_hidden_layers", "n_layers", "num_attention_heads", "n_heads"), 2**10),
    **dict.fromkeys(("vocab_size", "max_position_embeddings"), 2**24),
}

_ALTERNATIVES = "Alternatively, set model.weights=DIR, where DIR is a local folder with these files."


def input_of(config: ModelConfig) -> InputSpec:
    """Return the input specification of a text classifier, which contains the maximum number of tokens per text."""
    assert config.max_length is not None
    return InputSpec((config.max_length,), (), ())


def build(config: ModelConfig, classes: int) -> nn.Module:
    """Build a text classifier with random weights. See `factory.random_model`."""
    return _with_input_size(config, _random(config, _architecture(config, classes)))


def _random(config: ModelConfig, about: Any) -> nn.Module:
    """Build the network of the `transformers` configuration `about` with random weights in fp32."""
    for name, most in _SIZES.items():
        size = getattr(about, name, None)
        if size is not None and (type(size) is not int or not 1 <= size <= most):
            file = f"{name} in config.json of {config.weights or config.name}"
            place = f"model.kwargs.{name}" if name in config.kwargs else file
            raise SettingError(place, size, f"an integer from 1 to {most:,}")
    auto = _transformers(config).AutoModelForSequenceClassification
    try:
        model: nn.Module = auto.from_config(about, dtype=torch.float32)
    except _REFUSALS as error:
        given = f"model.kwargs={config.kwargs}" if config.kwargs else f"the type {about.model_type}"
        raise UserError(
            f"model.name={config.name} cannot be built as a text classifier with {given}: {first_line(error)}."
        ) from error
    found = (module for name, module in model.named_modules() if name.endswith("position_embeddings"))
    table = next((module for module in found if isinstance(module, nn.Embedding)), None)
    if table is not None:
        # The positions of RoBERTa start after the index of the padding token.
        most = table.num_embeddings - (0 if table.padding_idx is None else table.padding_idx + 1)
        assert config.max_length is not None
        if config.max_length > most:
            raise SettingError("model.max_length", config.max_length, f"at most {most} (positions of {config.name})")
    return model


def load(config: ModelConfig, classes: int, random: nn.Module | None = None) -> nn.Module:
    """Build a text classifier with the weights of a repository, a folder or a file. See `factory.create_model`."""
    about, source = _architecture(config, classes), _local(config)
    if (source / "adapter_config.json").is_file():
        raise UserError(f"The folder {source} contains an adapter. Merge the adapter first (peft: merge_and_unload()).")
    if config.weights_key is not None and source.is_dir():
        raise SettingError("model.weights_key", config.weights_key, "null if model.weights is a folder")
    options: Any = {"ignore_mismatched_sizes": True, "local_files_only": True, "trust_remote_code": False}
    with torch.device("meta"):
        plain = _random(config, about)
    kind: Any = type(plain)
    own, base = plain.state_dict(), f"{plain.base_model_prefix}."

    def fit(weights: dict[str, Tensor] | None, prefix: str) -> Fit:
        folder = None if source.is_file() else str(source)
        model, found = kind.from_pretrained(
            folder, config=about, state_dict=weights, dtype="float32", output_loading_info=True, **options
        )
        new = {*found["missing_keys"], *(name for name, *_ in found["mismatched_keys"])}
        heads = {name.rpartition(".")[0] for name in new if not name.startswith(base) or ".pooler." in name}
        return fit_of_transformers(prefix, model, found, heads)

    try:
        if source.is_file():
            held = read_contents(source)
            whole = any(f".{base}" in f".{name}" for name in held.tensors)
            names = own if whole else {name.removeprefix(base) for name in own}
            contents, chosen = choose(config, source, held, names, lambda part, at: fit(part.weights_under(at), at))
        else:
            contents, chosen = Contents({}, {}), fit(None, "")
    except (*_REFUSALS, OSError, EOFError, pickle.UnpicklingError, SafetensorError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"The weights in {source} cannot be read ({first_line(error)}).") from error
    if not chosen.complete or chosen.model is None:
        raise no_fit(config, source, explain(config.name, source, contents, chosen, own, ()))
    report = report_of(source, contents, chosen, chosen.model)
    return set_loading_report(_with_input_size(config, chosen.model), report)


def tokenizer_of(config: ModelConfig) -> Tokenizer:
    """Read the tokenizer of a network, or raise a UserError if its files are missing or damaged."""
    auto = _transformers(config)
    source = _local(config, tokenizer=True)
    if source.is_file():
        return checked_tokenizer(source, lambda: Tokenizer.loads(str(read_metadata(source)[TOKENIZER])))
    _require_plain_tokenizer(source)

    def read_folder() -> Tokenizer:
        fast = auto.AutoTokenizer.from_pretrained(
            str(source), use_fast=True, local_files_only=True, trust_remote_code=False
        )
        if fast.pad_token_id is None:
            raise ValueError("it has no padding token")
        known = ("input_ids", "attention_mask", "token_type_ids")
        inputs = [name for name in fast.model_input_names if name in known]
        return Tokenizer(fast.backend_tokenizer, inputs, (fast.pad_token_id, fast.pad_token))

    return checked_tokenizer(source, read_folder)


def _require_plain_tokenizer(folder: Path) -> None:
    """Raise a UserError if the configuration of a tokenizer refers to a file outside of `folder`.

    Entries of the configuration that refer to code are logged.
    """
    if not (folder / "tokenizer_config.json").is_file():
        return
    for name, value in read_json(folder / "tokenizer_config.json").items():
        if name.endswith("_file") and isinstance(value, str) and Path(value).name != value.replace("\\", "/"):
            entry = f"{name}={value} in {folder}/tokenizer_config.json"
            raise UserError(f"The file {entry} is outside of the folder. Remove the entry.")


#: Entries of a `transformers` configuration that do not describe the architecture.
_NO_ARCHITECTURE = (*_SET_ELSEWHERE, "architectures", "torch_dtype", "transformers_version")


def _is_argument(about: Any, name: str) -> bool:
    """Return True if the `transformers` configuration `about` has a setting with this name."""
    return not name.startswith("_") and hasattr(about, name) and not callable(getattr(about, name))


def require_fitting(tokenizer: Tokenizer, model: nn.Module) -> None:
    """Raise a UserError if the tokenizer has tokens for which the network has no embedding."""
    table: nn.Embedding = model.get_input_embeddings()  # type: ignore[operator]
    if tokenizer.size > table.num_embeddings:
        raise UserError(
            f"The tokenizer has {tokenizer.size} tokens, but the network embeds only {table.num_embeddings} tokens."
            " Use the network's own tokenizer, or do not set model.kwargs.vocab_size."
        )


def portable(config: ModelConfig, model: nn.Module) -> ModelConfig:
    """Return a `model` section that builds the architecture of `model` without other files.

    `config` is the section that created `model`, and may refer to a folder or a repository.
    """
    own = config.weights is not None and Path(config.weights).expanduser().is_dir()
    if config.name in TEXT_MODELS and not own:
        return config
    about: Any = model.config
    plain = _transformers(config).AutoConfig.for_model(about.model_type)
    usual = plain.to_dict()
    # A published config.json may contain entries that are not arguments of the network.
    changed = {name: value for name, value in about.to_dict().items() if usual.get(name) != value}
    names = [name for name in changed if name not in _NO_ARCHITECTURE and _is_argument(plain, name)]
    kwargs = {name: changed[name] for name in names}
    return config.model_copy(update={"name": about.model_type, "kwargs": kwargs})


def missing(config: ModelConfig) -> str | None:
    """Return a message if files of a text classifier are missing, or None otherwise. See `factory.missing_weights`."""
    if config.weights is not None:
        path = Path(config.weights).expanduser()
        if os.path.isdir(path):  # pathlib raises an error if the name is too long
            lacking = [" or ".join(group) for group in _NEEDED if not any((path / name).is_file() for name in group)]
            allowed = "a folder with config.json, model.safetensors and the files of the tokenizer"
            hint = f"The folder does not contain {', '.join(lacking)}."
            return str(SettingError("model.weights", config.weights, allowed, hint)) if lacking else None
        if not os.path.isfile(path):
            return str(SettingError("model.weights", config.weights, "an existing folder or file"))
        if TOKENIZER in read_metadata(path):
            return None
    repository = _repository(config)
    if repository is None:
        what = "tokenizer" if config.weights is not None or not config.pretrained else "published weights"
        return (
            f"model.name={config.name} is a model type without {what}. Set model.weights=DIR, where DIR is a local"
            f" folder with config.json, weights and tokenizer, or set model.name to one of {', '.join(TEXT_MODELS)}."
        )
    absent = [group for group in _needed(config) if cached_file(repository, group) is None]
    if not absent:
        return None
    url = hf_hub_url(repository, absent[0][0])
    why = why_unavailable(url)
    if why is None:
        return None
    files = ", ".join(" or ".join(group) for group in absent)
    return (
        f"The files {files} of {config.name} cannot be fetched from {url.partition('/resolve/')[0]} ({why}).\n"
        f"Download these files on a machine with network access. {_ALTERNATIVES}"
    )


def _needed(config: ModelConfig) -> tuple[tuple[str, ...], ...]:
    """Return groups of file names. The repository must provide one file of each group."""
    has_weights = config.weights is not None or not config.pretrained
    return tuple(group for group in _NEEDED if not (has_weights and group == _WEIGHTS))


def _repository(config: ModelConfig) -> str | None:
    """Return the repository on the hub, or None if the model name is a model type.

    Raise a SettingError for any other name.
    """
    if config.name in TEXT_MODELS:
        return TEXT_MODELS[config.name][0]
    if re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", config.name) and not Path(config.name).is_dir():
        return config.name
    if not re.fullmatch(r"[\w-]+", config.name):
        hint = "For a local folder, set model.weights=DIR, and model.name to the model type, for example bert."
        raise SettingError("model.name", config.name, "OWNER/NAME on the hub, or a model type", hint)
    return None


def _local(config: ModelConfig, tokenizer: bool = False) -> Path:
    """Return the folder with the network's files, which are downloaded if necessary, or the file `model.weights`.

    If `tokenizer` is True and the file does not contain a tokenizer, return the folder of the repository instead. Raise
    a UserError if files are missing.
    """
    path = None if config.weights is None else Path(config.weights).expanduser()
    if path is not None and path.is_file() and not (tokenizer and TOKENIZER not in read_metadata(path)):
        return path
    problem = missing(config)
    if problem is not None:
        raise UserError(problem)
    if path is not None and path.is_dir():
        return path
    repository = _repository(config)
    assert repository is not None
    cached = [cached_file(repository, names) for names in _needed(config)]
    if all(cached):
        return Path(str(cached[0])).parent
    wanted = [name for names in _needed(config) for name in names if name != _WEIGHTS[1]]
    try:
        folder = Path(snapshot_download(repository, allow_patterns=[*wanted, *_OPTIONAL]))
        if _WEIGHTS in _needed(config) and not (folder / _WEIGHTS[0]).is_file():
            folder = Path(snapshot_download(repository, allow_patterns=[*wanted, *_OPTIONAL, _WEIGHTS[1]]))
        return folder
    except Exception as error:  # hub errors and transport errors have no narrower common base class
        why = first_line(error)
        raise UserError(f"The files of {config.name} cannot be fetched: {why}. {_ALTERNATIVES}") from error


def _transformers(config: ModelConfig) -> Any:
    try:
        import transformers
    except ImportError:
        raise UserError(f"model.name={config.name} needs transformers. Run pip install 'efficient-ft[text]'.") from None
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return transformers


def _architecture(config: ModelConfig, classes: int) -> Any:
    """Return the network's `transformers` configuration with the changes in `model.kwargs`."""
    auto = _transformers(config)
    changes: dict[str, Any] = {}
    if config.weights is not None and Path(config.weights).expanduser().is_dir():
        about = _read_architecture(config, Path(config.weights).expanduser())
    elif config.name in TEXT_MODELS:
        _, kind, changes = TEXT_MODELS[config.name]
        about = auto.AutoConfig.for_model(kind)
    elif _repository(config) is not None:
        about = _read_architecture(config, _local(config.model_copy(update={"pretrained": False})))
    else:
        mapping = auto.models.auto.configuration_auto.CONFIG_MAPPING_NAMES
        if config.name not in mapping:
            hint = did_you_mean(config.name, [*TEXT_MODELS, *mapping]).strip()
            allowed = f"{', '.join(TEXT_MODELS)}, a repository OWNER/NAME on the hub, or a model type"
            raise SettingError("model.name", config.name, allowed, hint or None)
        about = auto.AutoConfig.for_model(config.name)
    refuse_code(config.kwargs)
    for name, value in {**changes, **config.kwargs}.items():
        if name in _SET_ELSEWHERE:
            raise SettingError(f"model.kwargs.{name}", value, "unset", _SET_ELSEWHERE[name])
        if not _is_argument(about, name):
            names = [n for n in about.to_dict() if n not in _NO_ARCHITECTURE]
            hint = did_you_mean(name, names).strip() or f"See the configuration of {about.model_type} in transformers."
            raise SettingError(f"model.kwargs.{name}", value, f"an argument of {about.model_type}", hint)
        try:
            setattr(about, name, value)
        except _REFUSALS as error:
            hint = f"transformers: {first_line(error)}."
            allowed = f"a value that {about.model_type} accepts"
            raise SettingError(f"model.kwargs.{name}", value, allowed, hint) from error
    about.num_labels = classes
    if config.drop_rate or config.drop_path_rate:
        name = "drop_rate" if config.drop_rate else "drop_path_rate"
        hint = "Set an argument of the network instead, for example +model.kwargs.hidden_dropout_prob for BERT."
        raise SettingError(f"model.{name}", getattr(config, name), "0 with task=text", hint)
    return about


def _read_architecture(config: ModelConfig, folder: Path) -> Any:
    """Read the `transformers` configuration in a folder. Entries that refer to code are ignored."""
    plain = read_json(folder / "config.json")
    known = _transformers(config).CONFIG_MAPPING
    kind = plain.get("model_type", config.name)
    if not isinstance(kind, str) or kind not in known:
        why = f"model_type={plain.get('model_type')} is not a model type of transformers"
        raise UserError(f"The file {folder}/config.json cannot be used: {why}.")
    try:
        return known[kind].from_dict(plain)
    except _REFUSALS as error:
        raise UserError(f"The file {folder}/config.json cannot be used: {first_line(error)}.") from error


def _with_input_size(config: ModelConfig, model: nn.Module) -> nn.Module:
    """Store the input size in `pretrained_cfg`, as timm does. The model view reads this attribute."""
    model.pretrained_cfg = {"architecture": config.name, "input_size": input_of(config).size}  # type: ignore[assignment]
    return model
