"""Tests of the inspection of texts: lengths, unknown tokens, duplicates, and suspicious texts."""

from __future__ import annotations

from pathlib import Path

from tests.data.text_sets import open_set, printed, table, write_all
from tests.models.text_models import VOCABULARY, sentences


def test_lengths_are_those_of_the_tokenizer(tmp_path: Path) -> None:
    rows = [("apple " * k, ("fruit", "metal")[k % 2]) for k in range(1, 41)]
    data = open_set(write_all(tmp_path, {"train.csv": table(rows), "val.csv": table(rows[:4])}), max_length=12)
    found = data.inspect()
    assert found.facts["tokens"] == {"min": 3, "median": 22.5, "max": 42}
    assert found.facts["characters"] == {"min": 5, "median": 122.0, "max": 239}
    assert found.facts["cut_share"] == 0.75
    assert found.lines == ["texts: 3 to 42 tokens (median 22); 75.00 % are truncated at model.max_length=12"]
    assert any("75.00 % of the texts are truncated" in warning for warning in found.warnings)


def test_many_texts_are_sampled_and_all_of_them_on_request(tmp_path: Path) -> None:
    data = open_set(write_all(tmp_path, {"train.csv": table(3000), "val.csv": table(4)}))
    assert "1,000 of 3,000 texts were examined" in data.inspect().lines[0]
    assert data.inspect(thorough=True).facts["texts_examined"] == 3000
    rows = [("apple " * 2000, ("fruit", "metal")[k % 2]) for k in range(60)]
    data = open_set(write_all(tmp_path, {"train.csv": table(rows)}))
    assert data.inspect().facts["texts_examined"] < 30, "long texts: fewer"
    rows = [*sentences(40), ("apple " * 200_000, "fruit")]
    found = open_set(write_all(tmp_path, {"train.csv": table(rows), "val.csv": table(4)})).inspect()
    assert found.facts["texts_examined"] == 40, "all but the giant one"


def test_words_that_the_vocabulary_lacks_are_warned_of(tmp_path: Path) -> None:
    rows = [("привет мир apple", "да"), ("пока дом apple", "нет")] * 6
    found = open_set(write_all(tmp_path, {"train.csv": table(rows)})).inspect()
    assert round(found.facts["unknown_token_share"], 3) == 0.667
    assert any("66.67 % of the tokens are unknown to the tokenizer" in warning for warning in found.warnings)
    assert "unknown" not in printed(open_set(write_all(tmp_path, {"train.csv": table(20)})))
    assert "привет" not in VOCABULARY


def test_texts_in_two_splits_or_with_two_labels_are_counted(tmp_path: Path) -> None:
    rows = [*sentences(30), ("apple zinc", "fruit"), ("apple zinc", "metal")]
    write_all(tmp_path, {"train.csv": table(rows), "dev.csv": table(rows[:3]), "test.csv": table(rows[:5])})
    found = open_set(tmp_path).inspect()
    assert found.facts["shared_texts"] == {"val": 3, "test": 5}
    assert found.facts["texts_with_several_labels"] == 1
    text = "\n".join(found.warnings)
    assert "include 3 of 3 val texts and 5 of 5 test texts" in text
    assert "1 text has several labels. Example: 'apple zinc' has the labels 'fruit' and 'metal'." in text


def test_case_and_spaces_are_ignored_on_request(tmp_path: Path) -> None:
    rows = [*sentences(10)]
    again = [(text.upper().replace(" ", "  "), label) for text, label in rows]
    data = open_set(write_all(tmp_path, {"train.csv": table(rows), "test.csv": table(again)}), on_corrupt="skip")
    assert "test" not in data.inspect().facts["shared_texts"]
    assert data.inspect(thorough=True).facts["shared_texts"]["test"] == data.splits["train"]


def test_texts_that_look_wrong_are_warned_of(tmp_path: Path) -> None:
    for text, message in (
        ("nan", "may mean a missing text, for example 'nan'"),
        ("cafÃ© apple", "may have been decoded with a wrong encoding, for example 'cafÃ© apple'"),
        ("<br />apple", "may contain HTML tags"),
        ("\u200b", "only special tokens"),
    ):
        rows = [*sentences(20), *((text, "fruit") for _ in range(10))]
        assert message in printed(open_set(write_all(tmp_path, {"train.csv": table(rows)}))), text


def test_a_constant_column_and_joined_labels_are_warned_of(tmp_path: Path) -> None:
    rows = [("same", ("a", "b", "a|b")[k % 3]) for k in range(15)]
    text = printed(open_set(write_all(tmp_path, {"train.csv": table(rows)})))
    assert "training texts duplicate another text. Check data.text.columns." in text
    assert "1 class name may combine several labels, for example 'a|b'." in text


def test_combinations_that_share_labels_are_warned_of(tmp_path: Path) -> None:
    rows = [("same", ("action|drama", "drama|war", "comedy")[k % 3]) for k in range(15)]
    text = printed(open_set(write_all(tmp_path, {"train.csv": table(rows)})))
    assert "2 class names may combine several labels, for example 'action|drama'." in text
    rows = [("same", ("Home & Garden", "Home & Kitchen")[k % 2]) for k in range(15)]
    assert "join several" not in printed(open_set(write_all(tmp_path, {"train.csv": table(rows)})))


def test_a_class_with_a_single_training_text_is_warned_of(tmp_path: Path) -> None:
    rows = [*((f"apple {k}", "fruit") for k in range(9)), ("zinc", "metal")]
    tests = table([("apple", "fruit"), ("zinc", "metal")])
    data = open_set(write_all(tmp_path, {"train.csv": table([*rows, ("gold", "metal")]), "test.csv": tests}))
    held = sum(len(part) for split, part in data._parts.items() if split == "val")
    assert held
    assert "1 class has a single training text: 'metal'." in printed(data)
