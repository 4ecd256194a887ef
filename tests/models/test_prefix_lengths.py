"""Tests that a text network computes the same result from the stored output of its frozen prefix, at every length."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from efficient_ft.core.errors import UserError
from efficient_ft.methods import Blocks, HeadOnly, LastStage
from efficient_ft.models.prefix import find_prefix, kept_inputs
from efficient_ft.models.prefix_lengths import PrefixLengths

SIZES: dict[str, Any] = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2,
                         "intermediate_size": 32, "max_position_embeddings": 48, "hidden_dropout_prob": 0.0,
                         "attention_probs_dropout_prob": 0.0}  # fmt: skip
DISTILBERT: dict[str, Any] = {"vocab_size": 50, "dim": 16, "n_layers": 3, "n_heads": 2, "hidden_dim": 32,
                              "max_position_embeddings": 48, "dropout": 0.0, "attention_dropout": 0.0,
                              "seq_classif_dropout": 0.0}  # fmt: skip
CONFIGS = {
    "bert": lambda: transformers.BertConfig(**SIZES),
    "roberta": lambda: transformers.RobertaConfig(**SIZES),
    "electra": lambda: transformers.ElectraConfig(**SIZES, embedding_size=8),
    "distilbert": lambda: transformers.DistilBertConfig(**DISTILBERT),
}


def texts(length: int, count: int = 3, seed: int = 0) -> dict[str, Tensor]:
    """Return token ids (B, L) and attention masks. The last texts are shorter."""
    ids = torch.randint(3, 50, (count, length), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(ids)
    mask[1:, length // 2 :] = 0
    return {"input_ids": ids.where(mask.bool(), 1), "attention_mask": mask}


def network(name: str, method: Any) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = transformers.AutoModelForSequenceClassification.from_config(CONFIGS[name]()).train()
    model.pretrained_cfg = {"architecture": name, "input_size": (24,)}  # type: ignore[assignment]
    method.apply(model)
    return model


def gradients(model: nn.Module, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    model.zero_grad()
    output: Any = model(**inputs)
    output.logits.square().sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.first(1, "slow")
@pytest.mark.parametrize("name", list(CONFIGS))
@pytest.mark.parametrize("method", [LastStage, HeadOnly, lambda: Blocks([-2])], ids=["last_stage", "head", "blocks"])
def test_gradients_from_stored_features_are_those_from_texts_bit_for_bit(name: str, method: Any) -> None:
    model = network(name, method())
    prefix = find_prefix(model, texts(24))
    lengths = PrefixLengths(prefix, texts(12))
    for length in (8, 16, 24, 40):
        inputs = texts(length, seed=length)
        expected = gradients(model, inputs)
        part = lengths.at(length)
        features = part.from_rows(part.to_rows(part.features(inputs)).clone())
        with part.replaced(features, kept_inputs(inputs)) as placeholder:
            assert not torch.equal(placeholder["input_ids"], inputs["input_ids"]), "token ids are not used"
            found = gradients(model, placeholder)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key], expected[key]) for key in expected)


def test_the_features_are_the_hidden_states_after_the_last_frozen_block() -> None:
    prefix = find_prefix(network("bert", LastStage()), texts(24))
    lengths = PrefixLengths(prefix, texts(12))
    assert (prefix.end, prefix.shape) == ("bert.encoder.layer.1", (24, 16))
    assert lengths.dimension == 1
    assert lengths.at(8).shape == (8, 16)
    head = PrefixLengths(find_prefix(network("bert", HeadOnly()), texts(24)), texts(12))
    assert head.dimension is None
    assert (head.at(8).end, head.at(8).shape) == ("dropout", (16,)), "dropout with p=0 draws no random numbers"


def test_a_network_that_reads_the_tokens_again_has_no_prefix() -> None:
    class ReadsAgain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.head = nn.Embedding(50, 8).requires_grad_(False), nn.Linear(8, 2)

        def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
            last = (input_ids != 1).sum(1) - 1
            return self.head(self.embedding(input_ids)[torch.arange(len(last)), last])

    torch.manual_seed(0)
    with pytest.raises(UserError, match="later layers also use values computed before this layer"):
        find_prefix(ReadsAgain().train(), texts(24))
