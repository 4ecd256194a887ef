"""Tests of the tokenizer of a text model against the tokenizer of transformers."""

from __future__ import annotations

import pickle

import torch
from hypothesis import given
from hypothesis import strategies as st

from efficient_ft.core.tokenizer import MULTIPLE, Tokenizer
from tests.models.text_models import VOCABULARY, tokenizer

REFERENCE = tokenizer()
OURS = Tokenizer(tokenizer().backend_tokenizer, ("input_ids", "attention_mask", "token_type_ids"), (0, "[PAD]"))

words = st.lists(st.sampled_from(VOCABULARY[5:]), min_size=1, max_size=30).map(" ".join)
texts = st.lists(words, min_size=1, max_size=5).map(lambda found: [(text,) for text in found])
pairs = st.lists(st.tuples(words, words), min_size=1, max_size=5)


@given(texts=texts | pairs, max_length=st.integers(8, 40))
def test_batches_are_those_of_transformers(texts: list[tuple[str, ...]], max_length: int) -> None:
    found = OURS.batch(texts, max_length)
    columns = [list(column) for column in zip(*texts, strict=True)]
    options = {"truncation": "longest_first", "max_length": max_length, "padding": True, "return_tensors": "pt"}
    wanted = REFERENCE(*columns, **options)
    length = wanted["input_ids"].shape[1]
    padded = found["input_ids"].shape[1]
    assert length <= padded <= max_length
    assert padded == max_length or padded % MULTIPLE == 0
    for name, tensor in found.items():
        assert tensor.dtype == torch.long
        torch.testing.assert_close(tensor[:, :length], wanted[name])
        assert not tensor[:, length:].any(), "padding has id 0, no mask and type 0"


def test_lengths_are_those_before_cutting() -> None:
    OURS.batch([("the apple",)], 8)
    assert OURS.measure([("the apple",), ("the qzx " * 25,)]) == ([4, 52], [0, 25])
    assert (OURS.special(1), OURS.special(2)) == (2, 3)


def test_it_is_the_same_in_another_process_and_as_text() -> None:
    for copy in (pickle.loads(pickle.dumps(OURS)), Tokenizer.loads(OURS.dumps())):
        assert copy.pad == OURS.pad
        assert copy.inputs == OURS.inputs
        assert copy.size == len(VOCABULARY)
        found, wanted = (one.batch([("a pear", "old iron")], 32) for one in (copy, OURS))
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)
