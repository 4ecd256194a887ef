"""Tests of the stacking rules: conflicts that methods declare, in the configuration, `apply_methods` and `apply`."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from torch import nn

from efficient_ft.core.errors import UserError
from efficient_ft.methods import (
    BSR,
    LBPWHT,
    LISA,
    METHODS,
    SWAT,
    ALaST,
    Applied,
    Axis,
    BackRazor,
    BSRMoE,
    Checkpointing,
    EViT,
    Full,
    LastStage,
    LoRA,
    Mesa,
    Method,
    ModelView,
    MoE,
    Needs,
    PatchDropout,
    ToMe,
    apply_methods,
    check_stack,
)
from efficient_ft.models.marks import marks_of
from efficient_ft.models.view import view
from efficient_ft.testing import batch_of, model_of
from tests.methods.settings import small_vit


@pytest.mark.parametrize(
    ("one", "other", "why"),
    [
        (LastStage(), Full(), "both select the parameters to train"),
        (BSR(), LISA(), "both select the parameters to train"),
        (BSR(), EViT(), "both drop or merge tokens"),
        (ALaST(), ToMe(), "both drop or merge tokens"),
        (LoRA(), MoE(), "both add modules to the model"),
        (BSRMoE(), LoRA(), "both add modules to the model"),
        (LBPWHT(), METHODS["lbp_dct"](), "both replace the backward pass"),
        (Mesa(), Checkpointing(), "both define how activations are saved"),
        (ToMe(), LBPWHT(), "cannot be combined: merged tokens have no grid positions"),
        (SWAT(), LBPWHT(), "cannot be combined: low-rank layers have their own dense forward"),
        (BackRazor(prune="both"), LBPWHT(), "cannot be combined: prune=both: low-rank layers"),
    ],
    ids=lambda value: value.name if isinstance(value, Method) else "",
)
def test_what_cannot_be_stacked_is_refused_in_either_order(one: Method, other: Method, why: str) -> None:
    for first, second in ((one, other), (other, one)):
        with pytest.raises(UserError, match=rf"^method: {first.name} and {second.name} .*{why}"):
            check_stack([first, second])


def test_methods_of_different_axes_can_be_stacked() -> None:
    check_stack([BSR(), LBPWHT(), BackRazor()])
    check_stack([BSR(drop_at=[]), EViT(), LoRA(), Mesa()])
    check_stack([ALaST(), LoRA(), LBPWHT(), Checkpointing()])


def test_nothing_is_changed_by_a_stack_that_is_refused() -> None:
    model = model_of("vit")
    with pytest.raises(UserError, match="both define how activations are saved"):
        apply_methods(model, [LastStage(), Mesa(), Checkpointing()])
    assert all(p.requires_grad for p in model.parameters())
    assert not marks_of(model)


def test_methods_are_removed_if_a_later_method_refuses_the_model() -> None:
    model = model_of("resnet")
    names, selection = list(model.state_dict()), LastStage()
    with pytest.raises(UserError, match="no attention layers"):
        apply_methods(model, [LoRA(), selection])
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert selection.applied is None
    assert list(model.state_dict()) == names
    apply_methods(model, [LoRA(targets="all", rank=2), Full()])


def test_functions_that_require_all_tokens_are_refused_until_every_method_is_removed() -> None:
    model: Any = small_vit("vit_tiny_patch16_224")
    images = batch_of("vit")[0].double()
    evit, dropout = EViT([1]), PatchDropout(0.5)
    apply_methods(model, [evit, dropout])
    for first, last in ((evit, dropout), (dropout, evit)):
        first.remove(model)
        with pytest.raises(UserError, match=f"Remove the method first: {last.name}"):
            model.forward_intermediates(images)
        last.remove(model)
        model.eval().forward_intermediates(images)
        apply_methods(model, [evit, dropout])


def test_what_is_applied_counts_as_part_of_the_stack() -> None:
    model, first = model_of("vit"), Mesa()
    first.apply(model)
    with pytest.raises(UserError, match="checkpointing: mesa has been applied to this VisionTransformer, and"):
        Checkpointing().apply(model)
    with pytest.raises(UserError, match="or remove mesa first"):
        apply_methods(model, [LastStage(), Checkpointing()])
    assert all(p.requires_grad for p in model.parameters())
    apply_methods(model, [first, LastStage()])  # applying the same object twice is allowed
    assert [mark.method for mark in marks_of(model)] == ["mesa", "last_stage"]
    first.remove(model)
    assert [mark.method for mark in marks_of(model)] == ["last_stage"]


@pytest.mark.parametrize(
    ("first", "second"), [(LoRA(2), LastStage()), (MoE(2, 1, [1]), LastStage()), (LBPWHT(order=2), LoRA(2))]
)
def test_what_must_come_first_is_not_applied_second(first: Method, second: Method) -> None:
    model = model_of("vit")
    first.apply(model)
    message = f"{first.name} has been applied .* but must be applied after {second.name}"
    with pytest.raises(UserError, match=message):
        second.apply(model)


def test_what_others_build_on_is_not_removed_below_them() -> None:
    model, methods = model_of("vit"), [LastStage(), LoRA(2), LBPWHT(order=2)]
    apply_methods(model, methods)
    for below, above in itertools.pairwise(methods):
        with pytest.raises(UserError, match=f"{above.name} was applied after {below.name}. Remove {above.name} first"):
            below.remove(model)
    for method in reversed(methods):
        method.remove(model)
    assert all(p.requires_grad for p in model.parameters())


def test_a_method_is_removed_only_from_a_model_to_which_it_is_applied() -> None:
    model, method = model_of("vit"), LoRA(2)
    method.apply(model)
    with pytest.raises(UserError, match="method lora: the method is not applied to this model"):
        method.remove(model_of("vit"))
    method.remove(model)
    with pytest.raises(UserError, match="method lora: the method is not applied to this model"):
        method.remove(model)


class Named(Method):
    """A method with two conflicts: a method name and an axis."""

    name = "named"
    axis = Axis.MEMORY
    needs = frozenset({Needs.CLASS_TOKEN})
    conflicts: Any = {"lisa": "it must see all layers", Axis.TOKENS: "it counts tokens"}  # noqa: RUF012

    def _apply(self, model: nn.Module, view: ModelView) -> Applied:
        return Applied(self.name, ("head",))

    def _remove(self, model: nn.Module) -> None: ...


def test_conflicts_may_name_methods_and_axes() -> None:
    for other, why in ((LISA(), "it must see all layers"), (ToMe(), "it counts tokens"), (ALaST(), "it counts tokens")):
        with pytest.raises(UserError, match=f"cannot be combined: {why}"):
            check_stack([Named(), other])
    check_stack([Named(), Full()])


def test_needs_are_checked_before_anything_is_called() -> None:
    with pytest.raises(UserError, match=r"method named: resnet26 has no class token, .*\.$"):
        Named().apply(model_of("resnet"))
    with pytest.raises(UserError, match=r"no class token, .*\. To disable token dropping, use drop_at=\[\]"):
        BSR([1], [1]).apply(model_of("resnet"))
    BSR([1], []).apply(model_of("resnet"))


@pytest.mark.slow
def test_the_view_leaves_out_what_methods_added() -> None:
    plain = [layer.name for layer in view(model_of("mobilenet")).layers]
    model = model_of("mobilenet")
    METHODS["tinytl"]().apply(model)
    assert [layer.name for layer in view(model).layers] == plain
    model = model_of("vit")
    LoRA(2).apply(model)
    names = [layer.name for layer in view(model).layers]
    assert len(names) == len(view(model_of("vit")).layers)
    assert not any("lora" in name for name in names)


@pytest.mark.parametrize("flag", ["grad_checkpointing", "gradient_checkpointing"])
def test_a_network_with_checkpointing_of_its_own_is_refused_where_it_changes_the_method(flag: str) -> None:
    """A method rejects a model's own checkpointing if recomputation would update ranges or count a loss twice."""
    for method in (Mesa(), Checkpointing(), BackRazor(), MoE(num_experts=4, top_k=2, blocks=[-1], aux_loss_coef=0.1)):
        model = model_of("vit")
        setattr(model.blocks, flag, True)
        with pytest.raises(UserError, match=rf"method {method.name}: .* uses its own checkpointing"):
            method.apply(model)
    model = model_of("vit")
    setattr(model, flag, True)
    assert LoRA(rank=2).apply(model).touched
