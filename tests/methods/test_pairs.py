"""Any two methods that can be stacked learn together: each pair fine-tunes a pretrained network, and each method alone.

The network is pretrained on the digits 0 to 4 and fine-tuned on 5 to 9, real images of scikit-learn.
"""

from __future__ import annotations

import copy
import itertools
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

from efficient_ft.core.errors import UserError
from efficient_ft.methods import METHODS, Method, apply_methods, check_stack
from efficient_ft.testing import CLASSES, MODELS
from tests.methods.settings import ROWS

#: Settings of a method with which it is about as strong as the published ones are on a network of twelve blocks.
SETTINGS = {
    "blocks": {"blocks": [1, 3]},
    "lora": {"rank": 8, "alpha": 32},
    "bsr": {"blocks": [1, 3], "drop_at": [1, 2], "keep_rate": 0.7},
    "evit": {"drop_at": [1, 2], "keep_rate": 0.7},
    "tome": {"r": 8},
    "lbp_wht": {"order": 4},
    "lbp_dct": {"order": 4},
    "back_razor": {"sparsity": 0.8},
    "swat": {"sparsity": 0.5},
    "top_layers": {"num_layers": 2, "profile_steps": 1},
}
#: A row for every method that works on a network without inverted residuals.
NAMES = sorted(name for name in METHODS if name != "tinytl")

STEPS, BATCH, RATE = 200, 32, 2e-3

#: Pairs of which one changes the model so that the other finds nothing to do, or what it can't serve: refused by
#: `apply_methods`, not by `check_stack`.
REFUSED = {
    ("alast", "repnet"), ("bitfit", "lora"), ("bsr", "repnet"), ("evit", "repnet"), ("head", "lora"), ("head", "moe"),
    ("head", "repnet"), ("lora", "norm_last"), ("moe", "norm_last"), ("repnet", "tome"),
}  # fmt: skip

#: A pair may lose what each of the two loses alone, and this share more: another initialization changes ALaST by 0.08.
MARGIN = 0.15
CHANCE = 1 / CLASSES


def _create(name: str) -> Method:
    return METHODS[name](**{**ROWS[name].settings, **SETTINGS.get(name, {})}) if name in ROWS else METHODS[name]()


@cache
def _images(first: int, test: bool) -> tuple[Tensor, Tensor]:
    """The five classes from `first` on, as images (N, 3, 32, 32) and labels from 0; every fourth image tests."""
    x, y = load_digits(return_X_y=True)
    of = (y >= first) & (y < first + CLASSES)
    images = torch.tensor(x[of], dtype=torch.float32).view(-1, 1, 8, 8) / 8 - 1
    held_out = torch.arange(len(images)) % 4 == 0
    images = F.interpolate(images, size=32, mode="bilinear").expand(-1, 3, -1, -1)
    labels = torch.tensor(y[of] - first)
    return (images[held_out], labels[held_out]) if test else (images[~held_out], labels[~held_out])


def _train(model: nn.Module, methods: list[Method], first: int, steps: int) -> float:
    """Train with AdamW at a rate that rises and falls, and return the test accuracy."""
    images, labels = _images(first, test=False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=RATE, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, steps, pct_start=0.1)
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
        images, labels = _images(first, test=True)
        return float((model(images).argmax(1) == labels).double().mean())


@cache
def _pretrained() -> nn.Module:
    torch.manual_seed(0)
    model = MODELS["vit"].create().train()
    assert _train(model, [], 0, 600) > 0.9
    return model.train()


@cache
def _fine_tuned(*names: str) -> float:
    model = copy.deepcopy(_pretrained())
    torch.manual_seed(1)
    assert isinstance(model.head, nn.Linear)
    nn.init.trunc_normal_(model.head.weight, std=0.02)
    nn.init.zeros_(model.head.bias)
    methods = [_create(name) for name in names]
    apply_methods(model, methods)
    return _train(model, methods, 5, STEPS)


def _stacks(one: str, other: str) -> bool:
    try:
        check_stack([_create(one), _create(other)])
    except UserError:
        return False
    return True


STACKS = [pair for pair in itertools.combinations(NAMES, 2) if _stacks(*pair)]
PAIRS = [pair for pair in STACKS if pair not in REFUSED]


def test_most_pairs_can_be_stacked() -> None:
    assert len(PAIRS) > 120


@pytest.mark.parametrize(("one", "other"), sorted(REFUSED))
def test_what_one_method_leaves_nothing_of_for_the_other_is_refused(one: str, other: str) -> None:
    assert (one, other) in STACKS
    with pytest.raises(UserError):
        apply_methods(MODELS["vit"].create(), [_create(one), _create(other)])


@pytest.mark.exhaustive
def test_every_method_learns_alone() -> None:
    accuracies = {name: _fine_tuned(name) for name in NAMES}
    print(accuracies)
    assert min(accuracies.values()) > CHANCE + 0.3, accuracies
    assert accuracies["full"] > 0.9


@pytest.mark.exhaustive
@pytest.mark.parametrize(("one", "other"), PAIRS)
def test_a_pair_loses_what_each_of_the_two_loses(one: str, other: str) -> None:
    full, first, second = _fine_tuned("full"), _fine_tuned(one), _fine_tuned(other)
    together = _fine_tuned(one, other)
    print(f"PAIR {one} {first:.3f}, {other} {second:.3f}, together {together:.3f}")
    assert together > max(first + second - full - MARGIN, CHANCE + 0.1)
