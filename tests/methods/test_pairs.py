"""Tests of training with every supported pair of methods, and with every method alone.

A network is pretrained on images of the digits 0 to 4 and fine-tuned on images of the digits 5 to 9. The network is a
vision transformer. TinyTL uses a network of inverted residual blocks, because it supports no other architecture.
"""

from __future__ import annotations

import copy
import itertools
import math
import statistics
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from efficient_ft.core.errors import UserError
from efficient_ft.data.digits import load_digits
from efficient_ft.methods import METHODS, Method, apply_methods, check_stack
from efficient_ft.testing import CLASSES, MODELS
from tests.methods.settings import ROWS

#: Settings for a small network that are as strong as the published settings for a network of twelve blocks.
SETTINGS = {
    "blocks": {"blocks": [1, 3]},
    "lora": {"rank": 8, "alpha": 32},
    "lora_fa": {"rank": 8, "alpha": 32},
    "bsr": {"blocks": [1, 3], "drop_at": [1, 2], "keep_rate": 0.7},
    "evit": {"drop_at": [1, 2], "keep_rate": 0.7},
    "tome": {"r": 8},
    "patch_dropout": {"keep_rate": 0.7},
    "lbp_wht": {"order": 4},
    "lbp_dct": {"order": 4},
    "back_razor": {"sparsity": 0.8},
    "swat": {"sparsity": 0.5},
    "top_layers": {"num_layers": 2, "profile_steps": 1},
    "tinytl": {"norm": "batch"},
}
#: Milder settings for pairs that approximate the same activation twice, because the fractions of kept values multiply.
#: With these settings, a pair loses no accuracy; see docs/guides/stacking.md.
MILDER = {pair: {"back_razor": {"sparsity": 0.5}} for pair in (("back_razor", "lbp_dct"), ("back_razor", "lbp_wht"))}

NAMES = sorted(METHODS)

STEPS, BATCH, RATE = 200, 32, 2e-3
#: Number of steps and learning rate of the pretraining.
PRETRAINED = {"vit": (600, RATE), "mobilenet": (1000, 5e-3)}

#: Pairs that `check_stack` accepts and `apply_methods` rejects, because one method changes the model so that the other
#: method cannot be applied.
REFUSED = {
    ("alast", "repnet"), ("alast", "tinytl"), ("bitfit", "lora"), ("bitfit", "lora_fa"), ("bsr", "repnet"),
    ("bsr", "tinytl"), ("evit", "repnet"), ("evit", "tinytl"), ("head", "lora"), ("head", "lora_fa"), ("head", "moe"),
    ("head", "repnet"), ("head", "tinytl"), ("lora", "norm_last"), ("lora_fa", "norm_last"), ("moe", "norm_last"),
    ("patch_dropout", "repnet"), ("patch_dropout", "tinytl"), ("repnet", "tome"), ("tinytl", "tome"),
}  # fmt: skip

#: The accuracy that a pair may lose in addition to the losses of both methods alone. A different initialization changes
#: the accuracy by up to 0.3. A pair that exceeds the margin is therefore trained with three seeds, and the test uses
#: the median.
MARGIN = 0.15
SEEDS = 1, 2, 3
CHANCE = 1 / CLASSES


def _create(name: str, milder: dict[str, dict[str, float]] | None = None) -> Method:
    settings = {**SETTINGS.get(name, {}), **(milder or {}).get(name, {})}
    return METHODS[name](**{**ROWS[name].settings, **settings}) if name in ROWS else METHODS[name]()


@cache
def _images(first: int, test: bool, size: int) -> tuple[Tensor, Tensor]:
    """Return images (N, 3, size, size) and labels from 0 of five classes, starting with class `first`.

    Every fourth image belongs to the test set.
    """
    x, y = load_digits()
    of = (y >= first) & (y < first + CLASSES)
    images = torch.tensor(x[of], dtype=torch.float32)[:, None] / 8 - 1
    held_out = torch.arange(len(images)) % 4 == 0
    images = F.interpolate(images, size=size, mode="bilinear").expand(-1, 3, -1, -1)
    labels = torch.tensor(y[of] - first)
    return (images[held_out], labels[held_out]) if test else (images[~held_out], labels[~held_out])


def _train(model: nn.Module, methods: list[Method], first: int, steps: int, rate: float, size: int) -> float:
    """Train with AdamW and a one-cycle learning rate, and return the test accuracy."""
    images, labels = _images(first, test=False, size=size)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, steps, pct_start=0.1)
    generator = torch.Generator().manual_seed(0)
    for step in range(steps):
        for method in methods:
            method.step_begin(step)
        drawn = torch.randint(len(images), (BATCH,), generator=generator)
        loss = F.cross_entropy(model(images[drawn]), labels[drawn])
        assert torch.isfinite(loss), step
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        for method in methods:
            method.step_end()
    model.eval()
    with torch.no_grad():
        images, labels = _images(first, test=True, size=size)
        return float((model(images).argmax(1) == labels).double().mean())


@cache
def _pretrained(network: str) -> nn.Module:
    torch.manual_seed(0)
    model = MODELS[network].create().train()
    assert _train(model, [], 0, *PRETRAINED[network], MODELS[network].size) > 0.9
    return model.train()


@cache
def _fine_tuned(network: str, *names: str, seed: int = SEEDS[0]) -> float:
    model: Any = copy.deepcopy(_pretrained(network))
    torch.manual_seed(seed)
    head = model.get_classifier()
    nn.init.trunc_normal_(head.weight, std=0.02)
    nn.init.zeros_(head.bias)
    methods = [_create(name, MILDER.get(names)) for name in names]  # type: ignore[call-overload]
    apply_methods(model, methods)
    return _train(model, methods, 5, STEPS, RATE, MODELS[network].size)


def _stacks(one: str, other: str) -> bool:
    try:
        check_stack([_create(one), _create(other)])
    except UserError:
        return False
    return True


def _network(*names: str) -> str:
    return "mobilenet" if "tinytl" in names else "vit"


STACKS = [pair for pair in itertools.combinations(NAMES, 2) if _stacks(*pair)]
PAIRS = [pair for pair in STACKS if pair not in REFUSED]


def test_most_pairs_can_be_stacked() -> None:
    assert len(PAIRS) > 120


@pytest.mark.first(4, "slow")
@pytest.mark.parametrize(("one", "other"), sorted(REFUSED))
def test_what_one_method_leaves_nothing_of_for_the_other_is_refused(one: str, other: str) -> None:
    assert (one, other) in STACKS
    with pytest.raises(UserError):
        apply_methods(MODELS[_network(one, other)].create(), [_create(one), _create(other)])


@pytest.mark.exhaustive
def test_every_method_learns_alone() -> None:
    accuracies = {name: _fine_tuned(_network(name), name) for name in NAMES}
    print(accuracies)
    assert min(accuracies.values()) > CHANCE + 0.3, accuracies
    assert accuracies["full"] > 0.9


@pytest.mark.exhaustive
@pytest.mark.parametrize(("one", "other"), PAIRS)
def test_a_pair_loses_what_each_of_the_two_loses(one: str, other: str) -> None:
    network = _network(one, other)

    def below(seed: int) -> float:
        """Return the pair's loss of accuracy beyond the sum of both losses, or infinity if the pair does not learn."""
        full, first, second, together = (
            _fine_tuned(network, *names, seed=seed) for names in (("full",), (one,), (other,), (one, other))
        )
        print(f"PAIR seed {seed}: full {full:.3f}, {one} {first:.3f}, {other} {second:.3f}, together {together:.3f}")
        return first + second - full - together if together > CHANCE + 0.1 else math.inf

    if below(SEEDS[0]) >= MARGIN:
        assert statistics.median(below(seed) for seed in SEEDS) < MARGIN
