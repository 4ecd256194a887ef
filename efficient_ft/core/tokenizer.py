"""Tokenizer that converts texts or pairs of texts to token ids."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from efficient_ft.core.errors import UserError, first_line

if TYPE_CHECKING:
    import tokenizers

#: Sequences are padded to a multiple of this length, so that only a few different sequence lengths occur.
MULTIPLE = 8
#: A character that most vocabularies do not contain. A tokenizer without an unknown token cannot encode this character.
_RARE = "\u16d4"


def padded_length(longest: int, max_length: int) -> int:
    """Return the length of a batch whose longest text has `longest` tokens after truncation to `max_length` tokens."""
    return min(-(-longest // MULTIPLE) * MULTIPLE, max_length)


class Tokenizer:
    """Tokenizer that converts texts to the inputs of a network, with truncation and padding.

    Args:
        tokenizer: tokenizer from the `tokenizers` library.
        inputs: names of the inputs of the network: ``input_ids``, ``attention_mask``, and optionally
            ``token_type_ids``.
        pad: id and string of the padding token.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer, inputs: Sequence[str], pad: tuple[int, str]) -> None:
        self._tokenizer, self.inputs, self.pad = tokenizer, tuple(inputs), pad
        tokenizer.no_padding()
        tokenizer.no_truncation()

    def __getstate__(self) -> str:
        return self.dumps()

    def __setstate__(self, state: str) -> None:
        self.__dict__.update(Tokenizer.loads(state).__dict__)

    @property
    def size(self) -> int:
        """Number of tokens in the vocabulary."""
        return self._tokenizer.get_vocab_size()

    def measure(self, texts: Sequence[Sequence[str]]) -> tuple[list[int], list[int]]:
        """Return the number of tokens (with special tokens) and the number of unknown tokens for each text or pair."""
        unknown = self._unknown()
        found = [encoding.ids for encoding in self._encode(texts)]
        return [len(ids) for ids in found], [ids.count(unknown) for ids in found]

    def special(self, texts: int) -> int:
        """Return the number of special tokens that are added to one text (``texts=1``) or to a pair (``texts=2``)."""
        return self._tokenizer.num_special_tokens_to_add(texts > 1)

    def _unknown(self) -> int | None:
        """Return the id of the unknown token, or None if the vocabulary has no unknown token."""
        model = json.loads(self._tokenizer.to_str())["model"]
        if model.get("unk_id") is not None:  # Unigram
            return int(model["unk_id"])
        return self._tokenizer.token_to_id(model["unk_token"]) if model.get("unk_token") else None

    def batch(self, texts: Sequence[Sequence[str]], max_length: int) -> dict[str, Tensor]:
        """Encode texts or pairs as int64 tensors (B, L), one for each name in `inputs`. L is at most `max_length`.

        If a pair is too long, the longer of the two texts is truncated first.
        """
        self._tokenizer.enable_truncation(max_length, strategy="longest_first")
        try:
            found = self._encode(texts)
        finally:
            self._tokenizer.no_truncation()
        length = padded_length(max(map(len, found)), max_length)
        number, text = self.pad
        for encoding in found:
            encoding.pad(length, pad_id=number, pad_token=text)
        parts = {"input_ids": "ids", "attention_mask": "attention_mask", "token_type_ids": "type_ids"}
        return {name: torch.tensor([getattr(encoding, parts[name]) for encoding in found]) for name in self.inputs}

    def decode(self, ids: Tensor) -> list[str]:
        """Convert token ids (B, L) to texts, with special tokens and without padding tokens."""
        kept = [[int(token) for token in row if int(token) != self.pad[0]] for row in ids]
        return [self._tokenizer.decode(row, skip_special_tokens=False) for row in kept]

    def _encode(self, texts: Sequence[Sequence[str]]) -> list[Any]:
        items = [tuple(text) if len(text) > 1 else text[0] for text in texts]
        try:
            return self._tokenizer.encode_batch(items)  # type: ignore[arg-type]
        except Exception as error:  # the library raises Exception instead of a subclass
            raise UserError(
                f"The tokenizer cannot encode a text ({first_line(error)}). The files of the tokenizer are damaged or"
                " belong to different networks. Use the files that were published with the weights."
            ) from error

    def dumps(self) -> str:
        """Serialize the tokenizer to a string that `loads` can read."""
        return json.dumps({"tokenizer": self._tokenizer.to_str(), "inputs": self.inputs, "pad": self.pad})

    @staticmethod
    def loads(text: str) -> Tokenizer:
        """Create a tokenizer from a string written by `dumps`."""
        import tokenizers

        about = json.loads(text)
        number, name = about["pad"]
        return Tokenizer(tokenizers.Tokenizer.from_str(about["tokenizer"]), about["inputs"], (number, name))


def checked_tokenizer(source: Path, make: Callable[[], Tokenizer]) -> Tokenizer:
    """Create a tokenizer with `make`, and check that the tokenizer can encode an unknown character.

    Raises:
        UserError: If the tokenizer cannot be created or cannot encode the character. The message names `source`, which
            is the file or folder of the tokenizer.
    """
    try:
        tokenizer = make()
    except UserError:
        raise
    except Exception as error:  # the library raises Exception instead of a subclass
        raise UserError(f"{source}: the tokenizer cannot be read ({first_line(error)}).") from error
    try:
        tokenizer.measure([(_RARE,)])
    except UserError as error:
        raise UserError(f"{source}: {error}") from error
    return tokenizer
