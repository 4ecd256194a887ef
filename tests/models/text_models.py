"""A small BERT in a local folder in the format of `transformers`, and training texts."""

from __future__ import annotations

import csv
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordPiece
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer
from tokenizers.processors import TemplateProcessing
from transformers import BertConfig, BertModel, BertTokenizerFast

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
FRUIT = ("apple", "pear", "plum", "cherry", "grape", "melon")
METAL = ("iron", "copper", "zinc", "silver", "nickel", "lead")
OTHER = ("the", "a", "was", "seen", "near", "old", "house", "and", "then", "we", "took", "one", "of", "them")
#: The ids start at 0.
VOCABULARY = (*SPECIAL, *FRUIT, *METAL, *OTHER)

#: `model.kwargs` of a small BERT.
SMALL: dict[str, Any] = {"vocab_size": len(VOCABULARY), "hidden_size": 32, "num_hidden_layers": 4,
                         "num_attention_heads": 2, "intermediate_size": 64, "max_position_embeddings": 64}  # fmt: skip


def tokenizer() -> BertTokenizerFast:
    plain = Tokenizer(WordPiece({word: k for k, word in enumerate(VOCABULARY)}, unk_token="[UNK]"))
    plain.normalizer, plain.pre_tokenizer = BertNormalizer(), BertPreTokenizer()
    plain.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return BertTokenizerFast(tokenizer_object=plain)


def write_model(folder: Path, seed: int = 0, **changes: Any) -> Path:
    """Write a BERT with random weights and without a classifier, like a published pretrained model."""
    torch.manual_seed(seed)
    BertModel(BertConfig(**{**SMALL, **changes})).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def sentences(count: int, seed: int = 0) -> Iterator[tuple[str, str]]:
    """Yield pairs of a text and its class. Each text contains either a fruit or a metal."""
    chance = random.Random(seed)
    for k in range(count):
        words = chance.choices(OTHER, k=chance.randint(3, 9))
        words.insert(chance.randrange(len(words)), chance.choice((FRUIT, METAL)[k % 2]))
        yield " ".join(words), ("fruit", "metal")[k % 2]


def write_texts(path: Path, count: int, seed: int = 0) -> Path:
    """Write `sentences` as a .csv file with the columns text and label."""
    with path.open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file)
        rows.writerow(["text", "label"])
        rows.writerows(sentences(count, seed))
    return path
