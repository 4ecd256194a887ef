"""Text classifiers from `transformers`, created by name, from a repository of the hub, or from a local folder.

A local folder contains the files that ``save_pretrained`` in `transformers` writes: ``config.json``,
``model.safetensors`` and the tokenizer's files.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from efficient_ft.config.schema import ModelConfig
from efficient_ft.core.errors import SettingError, UserError
from efficient_ft.core.input_spec import InputSpec
from efficient_ft.core.tokenizer import Tokenizer, checked_tokenizer
from efficient_ft.models.checkpoint import read_metadata
from efficient_ft.models.hub_code import read_json
from efficient_ft.models.loading_report import set_loading_report
from efficient_ft.models.transformers_files import NetworkFiles


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
#: Key of the tokenizer in the metadata of model.safetensors.
TOKENIZER = "tokenizer"
_FILES = NetworkFiles(
    auto="AutoModelForSequenceClassification",
    noun="a text classifier",
    extra="text",
    contents="config.json, model.safetensors and the files of the tokenizer",
    files=(("tokenizer.json", "vocab.txt", "vocab.json"),),
    optional=("tokenizer_config.json", "special_tokens_map.json", "merges.txt", "added_tokens.json"),
    example="bert",
    dropout="hidden_dropout_prob for BERT",
    set_elsewhere={"problem_type": "Each text has one class."},
    published=TEXT_MODELS,
    is_complete=lambda path: TOKENIZER in read_metadata(path),
)
missing, portable = _FILES.missing, _FILES.portable


def input_of(config: ModelConfig) -> InputSpec:
    """Return the input specification of a text classifier, which contains the maximum number of tokens per text."""
    assert config.max_length is not None
    return InputSpec((config.max_length,), (), ())


def build(config: ModelConfig, classes: int) -> nn.Module:
    """Build a text classifier with random weights. See `factory.random_model`."""
    model = _FILES.random(config, _FILES.architecture(config, classes))
    _check_positions(config, model)
    return _with_input_size(config, model)


def load(config: ModelConfig, classes: int, random: nn.Module | None = None) -> nn.Module:
    """Build a text classifier with the weights of a repository, a folder or a file. See `factory.create_model`."""
    model, report = _FILES.load(config, _FILES.architecture(config, classes))
    _check_positions(config, model)
    return set_loading_report(_with_input_size(config, model), report)


def _check_positions(config: ModelConfig, model: nn.Module) -> None:
    """Raise a SettingError if `model.max_length` exceeds the number of positions of the network."""
    found = (module for name, module in model.named_modules() if name.endswith("position_embeddings"))
    table = next((module for module in found if isinstance(module, nn.Embedding)), None)
    if table is not None:
        # The positions of RoBERTa start after the index of the padding token.
        most = table.num_embeddings - (0 if table.padding_idx is None else table.padding_idx + 1)
        assert config.max_length is not None
        if config.max_length > most:
            raise SettingError("model.max_length", config.max_length, f"at most {most} (positions of {config.name})")


def tokenizer_of(config: ModelConfig) -> Tokenizer:
    """Read the tokenizer of a network, or raise a UserError if its files are missing or damaged."""
    auto = _FILES.library(config)
    source = _FILES.local(config, complete=True)
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


def require_fitting(tokenizer: Tokenizer, model: nn.Module) -> None:
    """Raise a UserError if the tokenizer has tokens for which the network has no embedding."""
    table: nn.Embedding = model.get_input_embeddings()  # type: ignore[operator]
    if tokenizer.size > table.num_embeddings:
        raise UserError(
            f"The tokenizer has {tokenizer.size} tokens, but the network embeds only {table.num_embeddings} tokens."
            " Use the network's own tokenizer, or do not set model.kwargs.vocab_size."
        )


def _with_input_size(config: ModelConfig, model: nn.Module) -> nn.Module:
    """Store the input size in `pretrained_cfg`, as timm does. The model view reads this attribute."""
    model.pretrained_cfg = {"architecture": config.name, "input_size": input_of(config).size}  # type: ignore[assignment]
    return model
