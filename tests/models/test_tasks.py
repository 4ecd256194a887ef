"""Tests that a network with one classifier per task uses the classifier of the active task."""

from __future__ import annotations

import copy
import pickle

import pytest
import timm
import torch
from torch import nn

import efficient_ft.models.small  # noqa: F401  registers vit_digits
from efficient_ft.core.errors import SettingError, UserError
from efficient_ft.models.tasks import PerTask, Tasks, for_each_task, give_heads, tasks_of
from efficient_ft.models.view import view
from efficient_ft.testing import MODELS, batch_of, model_of

CLASSES = {"a": 3, "b": 5, "c": 5}


@pytest.mark.parametrize("name", MODELS)
def test_each_task_has_its_own_classifier_on_one_trunk(name: str) -> None:
    model, plain = model_of(name), model_of(name)
    heads = view(plain).head
    tasks = give_heads(model, CLASSES)
    assert tasks_of(model) is tasks
    assert (tasks.names, tasks.active) == (("a", "b", "c"), "a")
    assert view(model).head == heads
    own = set(plain.state_dict())
    added = {n for n in model.state_dict() if n not in own}
    assert own - set(model.state_dict()) == {n for n in own if n.startswith(tuple(f"{h}." for h in heads))}
    assert all(n.startswith(tuple(f"{h}.{t}." for h in heads for t in CLASSES)) for n in added)

    images, _ = batch_of(name)
    for task, classes in CLASSES.items():
        tasks.active = task
        found = model.eval()(images)
        assert found.shape == (2, classes)
        if task == "b":  # task b keeps the classifier of the model, with 5 classes
            torch.testing.assert_close(found, plain.eval()(images), rtol=0, atol=0)
    model.train()(images).sum().backward()
    with_gradient = {n for n, p in model.named_parameters() if p.grad is not None}
    assert {n for n in added if n in with_gradient} == {n for n in added if ".c." in n}


@pytest.mark.parametrize(
    ("name", "options"),
    [("sequencer2d_s", {}), ("crossvit_tiny_240", {}), pytest.param("samvit_base_patch16", {}, marks=pytest.mark.slow)],
)
def test_classifiers_that_are_changed_in_place_or_listed(name: str, options: dict[str, int]) -> None:
    with torch.device("meta"):
        model = timm.create_model(name, num_classes=5, **options)
    tasks = give_heads(model, CLASSES)
    for by_task in [module for module in model.modules() if isinstance(module, PerTask)]:
        assert len({id(module) for module in by_task.values()}) == len(CLASSES)
    size = model.pretrained_cfg["input_size"]
    for task, classes in CLASSES.items():
        tasks.active = task
        assert model.eval()(torch.empty(1, *size, device="meta")).shape == (1, classes)


def test_new_classifiers_may_start_at_zero() -> None:
    model = model_of("vit")
    tasks = give_heads(model, CLASSES, zero=True)
    logits = {}
    for task in CLASSES:
        tasks.active = task
        logits[task] = model(batch_of("vit")[0])
    assert not logits["a"].any()
    assert logits["b"].all()
    assert not logits["c"].any()


@pytest.mark.parametrize("through", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_has_tasks_of_its_own(through) -> None:
    model = model_of("vit")
    tasks = give_heads(model, CLASSES)
    model.gate = for_each_task(model, lambda: nn.Linear(2, 2))
    tasks.active = "c"
    other = through(model)
    copied = tasks_of(other)
    assert copied is not None
    assert (copied is tasks, copied.active) == (False, "c")
    copied.active = "a"
    assert tasks.active == "c"
    assert {m.tasks for m in other.modules() if isinstance(m, PerTask)} == {copied}


def test_a_network_of_one_task_stays_as_it_is() -> None:
    model = model_of("vit")
    assert tasks_of(model) is None
    assert type(for_each_task(model, nn.Identity)) is nn.Identity


@pytest.mark.parametrize("names", [[], ["a", "a"], ["a b"], ["a.b"], [""], ["keys"], ["forward"], ["training"]])
def test_names_that_will_not_do(names: list[str]) -> None:
    with pytest.raises(SettingError, match=r"^tasks must be "):
        Tasks(names)


def test_mistakes() -> None:
    model = model_of("vit")
    tasks = give_heads(model, CLASSES)
    with pytest.raises(SettingError, match=r"^task must be one of a, b, c, got d\."):
        tasks.active = "d"
    with pytest.raises(AttributeError):
        tasks.now = "b"  # a misspelled attribute raises an error
    with pytest.raises(UserError, match="already has several tasks"):
        give_heads(model, CLASSES)
    with pytest.raises(UserError, match="reset_classifier"):
        give_heads(nn.Linear(2, 2), CLASSES)


def test_a_model_without_classes_gets_classifiers() -> None:
    model = timm.create_model("vit_digits", num_classes=0, depth=1, embed_dim=16, num_heads=2)
    give_heads(model, {"a": 2, "b": 3})
    assert model(torch.randn(2, 3, 32, 32)).shape == (2, 2)
