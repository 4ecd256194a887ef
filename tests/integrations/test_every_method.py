"""Tests of every method in the training loops of other libraries, against a plain training loop."""

from __future__ import annotations

import itertools
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import nn
from torch.nn import functional as F

from efficient_ft.methods.base import Method, apply_methods
from efficient_ft.testing import model_of
from tests.integrations.loops import assert_same_weights, batches_of, sgd, states_of, train_by_hand
from tests.integrations.test_transformers import plain_sgd, trainer_of, wrapped
from tests.methods.settings import ROWS, rows_on_vit


def seeded(network: nn.Module) -> nn.Module:
    """Seed torch's generator before each forward pass, because the Trainer's data loader also uses the generator."""
    seeds = itertools.count()
    network.register_forward_pre_hook(lambda *_: torch.manual_seed(next(seeds)) and None)
    return network


def by_hand(methods: list[Method], optimizer_of: Any) -> nn.Module:
    torch.manual_seed(0)
    network = seeded(model_of("vit"))
    torch.manual_seed(1)
    train_by_hand(network, methods, batches_of("vit", 4), accumulate=2, optimizer_of=optimizer_of)
    return network


@pytest.mark.parametrize("row", rows_on_vit(("moe", "lora")))
def test_a_loop_of_accelerate(row: str) -> None:
    """Training with `accelerate` and gradient accumulation gives the weights of the plain loop."""
    expected = by_hand([ROWS[row].create()], sgd)
    torch.manual_seed(0)
    network, method = seeded(model_of("vit")), ROWS[row].create()
    torch.manual_seed(1)
    apply_methods(network, [method])
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, optimizer = accelerator.prepare(network, sgd(network))
    step, begins = 0, True
    for images, labels in batches_of("vit", 4):
        if begins:
            method.step_begin(step)
        with accelerator.accumulate(model):
            accelerator.backward(method.total_loss(F.cross_entropy(model(images), labels)))
            optimizer.step()
            begins = accelerator.sync_gradients
            if begins:
                method.step_end()
                step += 1
            optimizer.zero_grad()
    assert step == 2
    assert_same_weights(expected, network)


@pytest.mark.slow
@pytest.mark.parametrize("row", rows_on_vit(("moe", "lora")))
def test_the_trainer_of_transformers(row: str, tmp_path: Path) -> None:
    warnings.simplefilter("ignore")
    method, carried = ROWS[row].create(), ROWS[row].create()
    expected = by_hand([method], plain_sgd)
    model = wrapped()
    seeded(model.timm_model)
    torch.manual_seed(1)
    trainer = trainer_of(carried, tmp_path, model, gradient_accumulation_steps=2, seed=1)
    trainer.train()
    assert trainer.state.global_step == 2
    assert_same_weights(expected, model.timm_model)
    assert states_of([method]) == states_of([carried])
