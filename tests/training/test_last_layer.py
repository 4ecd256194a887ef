"""Tests of evaluation in bf16 with a last layer in fp32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from efficient_ft.config import ModelConfig
from efficient_ft.models.factory import create_model
from efficient_ft.models.tasks import give_heads
from efficient_ft.models.weight_dtype import store_weights
from efficient_ft.task import TASKS
from efficient_ft.training.kinds.base import scores
from efficient_ft.training.last_layer import last_layer_in_fp32
from efficient_ft.training.module import FineTuner


class Close(nn.Module):
    """Network whose two logits are equal in bf16. In fp32, the second logit is larger."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(1, 1, bias=False), nn.Linear(1, 2, bias=False)
        with torch.no_grad():
            self.body.weight.fill_(1)
            self.head.weight.copy_(torch.tensor([[1.0], [1.001]]))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


IMAGES, LABELS = torch.ones(6, 1), torch.ones(6, dtype=torch.long)


def test_equal_logits_in_bf16_do_not_decide_the_accuracy(configuration):
    network, batches = Close().eval(), DataLoader(list(zip(IMAGES, LABELS, strict=True)), batch_size=4)
    with torch.autocast("cpu", torch.bfloat16):
        assert network(IMAGES).argmax(1).tolist() == [0] * 6
        module = FineTuner(network, configuration(), 2, 10)
        module.validation_step((IMAGES, LABELS), 0)
    assert module.scores[0].compute()["accuracy"] == 1
    found = scores(TASKS["classification"], network, batches, 2, torch.device("cpu"), "bf16")
    assert found.compute()["accuracy"] == 1


@pytest.mark.parametrize("weight_dtype", ["fp32", "bf16"])
def test_logits_equal_those_of_the_last_layer_in_fp32(weight_dtype):
    network = create_model(ModelConfig(name="vit_digits", pretrained=False), 10).eval()
    nn.init.normal_(network.head.weight)
    store_weights(network, weight_dtype)
    x, features = torch.randn(4, 3, 32, 32), []
    network.head.register_forward_pre_hook(lambda _, inputs: features.append(inputs[0]))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        rounded = network(x)
        with last_layer_in_fp32(network):
            logits = network(x)
        assert rounded.dtype == torch.bfloat16
        assert torch.equal(network(x), rounded)
    expected = F.linear(features[1].float(), network.head.weight.float(), network.head.bias)
    assert torch.equal(logits, expected)
    assert 0 < (logits - rounded).abs().max() < 0.2
    with torch.no_grad(), last_layer_in_fp32(network):
        assert "forward" not in vars(network.head)


def test_the_heads_of_all_tasks_compute_in_fp32():
    network: Any = create_model(ModelConfig(name="vit_digits", pretrained=False), 10).eval()
    tasks = give_heads(network, {"pets": 5, "food": 7})
    x = torch.randn(2, 3, 32, 32)
    for name in tasks.names:
        tasks.active = name
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16), last_layer_in_fp32(network):
            assert network(x).dtype == torch.float32
