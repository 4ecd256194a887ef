"""The contract of a method: a plain object that modifies a model and returns a report.

>>> method = LBPWHT(bases="l1", order=4)
>>> print(method.apply(model))

A training loop calls the methods of one optimizer step in this order:

1. ``method.step_begin(step)``, before the first forward pass of the step.
2. ``loss = method.total_loss(loss)``, once after each forward pass (once per micro-batch).
3. ``loss.backward()`` and ``optimizer.step()``.
4. ``method.step_end()``, before gradients are set to zero.

Build the optimizer after ``apply`` and before the first ``step_begin``, over all parameters that require gradients at
that moment. `efficient_ft.MethodSession` makes these calls for several methods in any loop, and
`efficient_ft.integrations` has callbacks for Lightning and for the Hugging Face `Trainer`.

The contract of the model: it maps images (B, C, H, W) to logits (B, classes). Text models take the tensors of a
tokenizer, (B, tokens), and segmentation models return logits (B, classes, H, W). Sizes of images are in pixels.
"""

from __future__ import annotations

import copy
import inspect
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from efficient_ft.core.errors import UserError
from efficient_ft.core.format import format_number
from efficient_ft.methods.declarations import ORDER_OF_APPLICATION, Adds, Axis, Needs, PlanCandidate
from efficient_ft.methods.optimizer_check import note_applied
from efficient_ft.methods.stack import check_needs, check_removal, check_stack, no_method, refuse_wrapped
from efficient_ft.methods.step_watch import StepWatch
from efficient_ft.methods.summary import count, left, trained, within
from efficient_ft.models.marks import Mark, add_mark, marks_of, remove_mark
from efficient_ft.models.view import ModelView, Skipped, state_classifier, view

#: Name of this package's distribution.
OURS = "efficient-ft"


@dataclass(frozen=True)
class Applied:
    """The report of `Method.apply`: the only record of the changes of a method.

    Attributes:
        method: the method's name.
        touched: full names of the modules or parameters that it works on, each once.
        skipped: full names of the parts that it left unchanged although a user could expect a change. Each has a
            reason (`Reason`) for code and a text for people.
        notes: further sentences for the user.
        none_needed: the reason why no layer needs a change (at full rank plain layers are exact and cheaper). If empty,
            touching no part is an error.
        modules: full names of the modules that it added to the model. The view of the model excludes them.
        routed: full names of modules whose input tokens it routes, so that one batch of tokens mixes images.
        summary: a phrase for ``print(report)``: "blocks 9–11, norm and head train". If empty, the report shows the
            number and location of `touched`, the reasons of `skipped`, and the notes.
    """

    method: str
    touched: tuple[str, ...]
    skipped: Mapping[str, Skipped] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    none_needed: str = ""
    modules: tuple[str, ...] = ()
    routed: tuple[str, ...] = ()
    summary: str = ""

    def __str__(self) -> str:
        """Return one line with the change and the reasons for skipped parts."""
        if self.summary:
            return f"{self.method}: {self.summary}"
        if not self.touched:
            return f"{self.method}: nothing is changed ({self.none_needed})"
        done = f"{count(len(self.touched), 'part')} changed ({within(self.touched)})"
        return "; ".join([f"{self.method}: {done}{left(self.skipped, 'unchanged', 'part')}", *self.notes])

    def details(self) -> str:
        """Return the full report: the line of ``str(report)``, each touched (+) or skipped (-) part, and the notes."""
        lines = [str(self), *(f"  + {name}" for name in self.touched)]
        lines += [f"  - {name}: {why}" for name, why in self.skipped.items()]
        return "\n".join([*lines, *(f"  {note}" for note in self.notes if note not in lines[0])])


class Method(ABC):
    """Base of all methods: a plain object that modifies a model in place and can be removed.

    A subclass declares `name` and `axis`, implements `_apply` and `_remove`, and overrides the step and state methods
    that it needs. The arguments of its constructor are its settings. Each setting has the paper's value as its default,
    is checked in the constructor (raise `SettingError` with the argument's name), and is stored in an attribute of the
    same name. The decorator `efficient_ft.methods.register` gives the class its name on the command line.

    The declarations below hold for all settings. A constructor may narrow them for some settings: BSR without token
    dropping is not on the token axis.

    Attributes:
        name: name on the command line and in reports: lower-case letters, digits and underscores.
        axis: the part of a training step that it decides on, which also defines the order of application.
        other_axes: additional axes of a method that acts on several axes (BSR and ALaST select parameters and drop
            tokens).
        adds: additions to the model or to the step (`Adds`).
        needs: requirements on the model or the training loop (`Needs`).
        conflicts: axes (`Axis`), additions (`Adds`) or names of methods that it cannot be stacked with, each with the
            reason.
        hints: by need, a sentence for the user if the model does not meet it.
        warmup_steps: number of remaining optimizer steps before the cost of a step settles (of a profile).
        cost_steps: number of steps over which the cost is averaged, if steps differ.
        merges: True if `_remove` merges the method's changes into the model's own weights, or if the method does not
            change them. If False, exported weights contain its modules, and it is applied before they are loaded.
        changes_weights: True if `_remove` may change the model's own weights (merging an adapter). If False, an export
            does not copy the weights.
        libraries: modules that only its application or its steps on a CPU import. Predictions of process memory add
            them.
        acts_per_step: True if it needs `step_begin` and `step_end`. A loop without these calls is warned at its second
            backward pass. Overrides of the two methods then call ``super()``.
        candidates: settings that ``efficient-ft plan`` examines. If empty, plans examine the method only if the user
            names it.
    """

    name: ClassVar[str]
    axis: ClassVar[Axis]
    other_axes: tuple[Axis, ...] = ()
    adds: frozenset[Adds] = frozenset()
    needs: frozenset[Needs] = frozenset()
    conflicts: Mapping[str, str] = {}
    hints: ClassVar[Mapping[Needs, str]] = {}
    warmup_steps: int = 0
    cost_steps: ClassVar[int] = 1
    merges: ClassVar[bool] = True
    changes_weights: ClassVar[bool] = True
    libraries: tuple[str, ...] = ()
    acts_per_step: bool = False
    candidates: ClassVar[tuple[PlanCandidate, ...]] = ()
    #: Name of the distribution (pip package) that registered the class; empty if it is not registered.
    distribution: ClassVar[str] = ""

    _applied: Applied | None = None
    _watch: StepWatch | None = None

    # ------------------------------------------------------------------ to be implemented by a method
    @abstractmethod
    def _apply(self, model: nn.Module, view: ModelView) -> Applied:
        """Modify `model` in place and return the report.

        It is called once per application, after the conflicts and needs have been checked. Decide on all parts first
        and modify the model last, so that an error leaves it unchanged.

        Args:
            model: the plain model, neither compiled nor wrapped. Parameters may be on any device and of any dtype.
            view: the view of `model`. Its structure (blocks, head) costs nothing; its `layers` cost one forward pass on
                fake tensors when they are first used.

        Returns:
            The report. If it names no touched part, `Applied.none_needed` gives the reason.

        Raises:
            SettingError: a setting does not fit this model. Name it in full: ``method.<name>.<setting>``.
            UserError: the method does not support this model. The text names the method, the model and the reason.
        """

    @abstractmethod
    def _remove(self, model: nn.Module) -> None:
        """Undo `_apply` on `model`; trained values stay.

        `model` may be a deep copy of the model that `_apply` modified, because exports remove methods from a copy while
        training continues. Therefore it must not change `self`. Refer to parts of the model by name, or store state
        on its modules, instead of holding references to modules. The method is empty if `_apply` changed nothing.

        Args:
            model: the modified model, or a deep copy of it.
        """

    # ------------------------------------------------------------------ called by a training loop
    def step_begin(self, step: int) -> None:
        """Prepare an optimizer step, before its first forward pass.

        Args:
            step: number of the optimizer step, from 0; the same for all micro-batches and in all processes. Draw random
                choices of a step from (seed, step), so that processes and resumed runs agree.
        """
        if self._watch is not None:
            self._watch.begin()

    def step_end(self) -> None:
        """Finish an optimizer step, after the optimizer has stepped and before gradients are set to zero.

        Raises:
            UserError: training cannot continue after this step (a value exceeds the range of fp16).
        """
        if self._watch is not None:
            self._watch.end()

    def total_loss(self, loss: Tensor) -> Tensor:
        """Return the loss to minimize after a forward pass in training.

        Call it exactly once after each forward pass.

        Args:
            loss: mean loss of that forward pass, shape ().

        Returns:
            `loss`, plus the loss that the method adds, shape ().

        Raises:
            UserError: the method adds a loss, and no forward pass has computed it.
        """
        return loss

    def trained_in_some_step(self) -> Iterable[nn.Parameter]:
        """Return the parameters that train in some steps, even if they are frozen in the current step."""
        return ()

    def step_stats(self) -> dict[str, Any]:
        """Return the decisions for the current step (budgets, chosen blocks) as lists, dictionaries and numbers."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a resumed training needs, as tensors, numbers, strings, lists and dictionaries.

        Settings and the model's parameters are not part of it. A method without state returns an empty dictionary.
        """
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:  # noqa: B027
        """Restore the result of `state_dict`; may be called before or after `apply`.

        Args:
            state_dict: state of a method with the same settings on a model of the same architecture.
        """

    # ------------------------------------------------------------------ called by users
    def apply(self, model: nn.Module, classifier: str | Iterable[str] = ()) -> Applied:
        """Apply the method to `model` in place.

        Call it after the weights are loaded and before the optimizer is built. The model object, its device, its
        weights and its evaluation stay the same, except for changes that the method's docstring describes. A second
        call has no effect and returns the same report.

        Args:
            model: an image classifier that maps (B, C, H, W) to logits (B, classes), on any device. The attribute
                ``image_size`` gives the size of its images in pixels if no other attribute does (default: 224).
            classifier: full names of the classifier's modules. By default it is timm's classifier; in a larger module
                all parts around a pretrained network count as new and train under every method that freezes.

        Returns:
            The report of touched and skipped parts.

        Raises:
            UserError: the model is compiled or wrapped (DataParallel, DDP, FSDP) or does not meet a need; a method
                applied before cannot be stacked with this one; no part of the model can be touched; or this object is
                applied to another model. The model is unchanged in these cases. It may be changed if the report of
                another package's method breaks the contract.
            SettingError: a setting does not fit this model (a block index outside it), or `classifier` names no module.
        """
        state_classifier(model, classifier)
        if self._applied is not None:
            if all(mark.key != self.state_key for mark in marks_of(model)):
                raise UserError(
                    f"method {self.name}: this object is applied to another model. Create a new object for this model."
                )
            return self._applied
        refuse_wrapped(model, self.name)
        check_stack([self], model)
        looked = view(model)
        check_needs(self, looked)
        applied = self._apply(model, looked)
        self._check_report(applied, model)
        applied = _with_note(applied, self, looked)
        if not applied.touched and not applied.none_needed:
            reasons = sorted({str(why) for why in applied.skipped.values()})
            raise UserError(
                f"method {self.name}: nothing in {type(model).__name__} can be touched"
                + (f" ({'; '.join(reasons[:3])})." if reasons else ".")
                + " Choose another method; method=full trains everything."
            )
        self._applied = applied
        note_applied(model, self)
        if self.acts_per_step:
            self._watch = StepWatch(self.name, model)
        # On the model, so that copies of both still belong together.
        add_mark(
            model,
            Mark(
                self.name, self.state_key, self.axes, self.adds, dict(self.conflicts), applied.modules, applied.routed
            ),
        )
        return applied

    def _check_report(self, report: Any, model: nn.Module) -> None:
        """Check that `_apply` returned a report of this method, with names that `model` has.

        Raises:
            UserError: the report is wrong and the method belongs to another package, which the text names.
        """
        wrong = _wrong_report(report, self.name, model)
        if wrong is None:
            return
        kind = type(self)
        package = vars(kind).get("distribution") or kind.__module__
        assert package != OURS, f"{kind.__name__}._apply {wrong}"
        raise UserError(f"Package {package}: `_apply` of method {self.name} {wrong}. Fix or uninstall the package.")

    @property
    def applied(self) -> Applied | None:
        """The report of `apply`; None before `apply` and after `remove`."""
        return self._applied

    @property
    def application_order(self) -> tuple[int, str]:
        """Sort key of the order of application: axis, then name."""
        return ORDER_OF_APPLICATION.index(self.axis), self.name

    def remove(self, model: nn.Module) -> None:
        """Restore the modules, names and `requires_grad` of `model`; trained values stay.

        Args:
            model: the model that the method was applied to. Remove several methods in the reverse order of application.

        Raises:
            UserError: a method that was applied on top of this one is still applied.
        """
        check_removal(self, model)
        self._remove(model)
        self._applied = None
        self._stop_watching()
        remove_mark(model, self.state_key)

    def _stop_watching(self) -> None:
        if self._watch is not None:
            self._watch.stop()
            self._watch = None

    @property
    def axes(self) -> tuple[Axis, ...]:
        """`axis` and `other_axes`."""
        return (self.axis, *self.other_axes)

    @property
    def find_unused_parameters(self) -> bool:
        """True if some trainable parameters get no gradient in some steps (an option of DistributedDataParallel)."""
        return Needs.FIND_UNUSED_PARAMETERS in self.needs

    def settings(self) -> dict[str, Any]:
        """Return the values of the constructor's arguments: ``type(m)(**m.settings())`` is equivalent to ``m``."""
        return {name: getattr(self, name) for name in inspect.signature(type(self)).parameters}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{k}={v!r}' for k, v in self.settings().items())})"

    @property
    def state_key(self) -> str:
        """Name and settings, the key of this method's state in a checkpoint and of its mark on a model."""
        return f"{self.name}{sorted(self.settings().items())}"


# ---------------------------------------------------------------------------------------------- several methods
def in_order(methods: Method | Iterable[Method]) -> list[Method]:
    """Return methods in their order of application, which their axes declare.

    Args:
        methods: one method or several, in any order.

    Raises:
        SettingError: `methods` contains an object that is not a method.
    """
    given = [methods] if isinstance(methods, Method) else methods
    several = list(given) if isinstance(given, Iterable) and not isinstance(given, str | Mapping | nn.Module) else None
    wrong = given if several is None else next((one for one in several if not isinstance(one, Method)), None)
    if several is None or wrong is not None:
        raise no_method(wrong)
    return sorted(several, key=lambda m: m.application_order)


def apply_methods(
    model: nn.Module, methods: Method | Iterable[Method], classifier: str | Iterable[str] = ()
) -> list[Applied]:
    """Apply methods in their order of application.

    Args:
        model: as in `Method.apply`.
        methods: one method or several.
        classifier: as in `Method.apply`.

    Returns:
        The reports in this order. The report of a selection counts the parameters that a later method freezes.

    Raises:
        UserError: two methods cannot be stacked (the model is unchanged then), or as in `Method.apply`.
        SettingError: `methods` contains an object that is not a method, or as in `Method.apply`.
    """
    ordered = in_order(methods)
    check_stack(ordered, model)
    for number, method in enumerate(ordered):
        before = trained(model), {id(p): p.numel() for p in model.parameters() if p.requires_grad}
        method.apply(model, classifier)
        _update_reports(ordered[:number], method, model, *before)
    return [m.applied for m in ordered if m.applied is not None]


def _with_note(report: Applied, method: Method, view: ModelView) -> Applied:
    """Add a note to the report of a method that freezes parameters if the head was inferred."""
    freezes = {Axis.SELECTION, Axis.ADAPTERS} & set(method.axes)
    if not (freezes and view.head_note and any(not p.requires_grad for p in view.model.parameters())):
        return report
    note = f"{view.head_note} (name the classifier by classifier=)"
    return replace(report, summary=f"{report.summary}; {note}" if report.summary else "", notes=(*report.notes, note))


def _update_reports(
    earlier: Sequence[Method], method: Method, model: nn.Module, claim: str, trained_before: Mapping[int, int]
) -> None:
    """Update the reports of earlier methods after `method` has changed the trainable parameters.

    Args:
        earlier: methods applied before.
        method: the method applied last.
        model: the model.
        claim: the phrase of the earlier reports with the number of trainable parameters.
        trained_before: sizes of the parameters that were trainable before, by identity.
    """
    frozen = sum(trained_before.get(id(p), 0) for p in model.parameters() if not p.requires_grad)
    new = f", except {format_number(frozen)} parameters that {method.name} freezes" if frozen else f": {trained(model)}"
    for one in earlier:
        report = one.applied
        if report is not None and f": {claim}" in report.summary:
            one._applied = replace(report, summary=report.summary.replace(f": {claim}", new))


def plain_state_dict(
    model: nn.Module, methods: Sequence[Method], *, copy_weights: bool = True
) -> dict[str, torch.Tensor]:
    """Return all weights under the pretrained model's own names, on the CPU and with adapters merged.

    `model` is not changed. Modules of methods that cannot be merged (``merges = False``) keep their own names.

    Args:
        model: the model.
        methods: the methods applied to it.
        copy_weights: if False, tensors share memory with `model` if they are on the CPU and no method changes weights
            when it is removed. The caller must use them before the next step.
    """
    merged = [method for method in reversed(in_order(methods)) if method.merges]
    share = not copy_weights and not any(method.changes_weights for method in merged)
    # A removal sets `requires_grad` and frees gradients, so parameters that share memory are new objects.
    of_model = [*model.parameters(), *model.buffers()] if share else []
    same_memory = {
        id(t): nn.Parameter(t.detach(), t.requires_grad) if isinstance(t, nn.Parameter) else t for t in of_model
    }
    plain = copy.deepcopy(model, same_memory)
    for method in merged:
        method._remove(plain)
    return {k: v.detach().cpu().contiguous() for k, v in plain.state_dict().items()}


# ---------------------------------------------------------------------------------------------- helpers for methods
def trainable(model: nn.Module) -> dict[str, bool]:
    """Return `requires_grad` of every parameter, by name."""
    return {name: parameter.requires_grad for name, parameter in model.named_parameters()}


def make_trainable(model: nn.Module, wanted: Mapping[str, bool]) -> None:
    """Set `requires_grad` of the named parameters that the model has, and free the gradients of frozen ones."""
    for name, parameter in model.named_parameters():
        if name in wanted:
            parameter.requires_grad_(wanted[name])
            if not wanted[name]:
                parameter.grad = None


def _wrong_report(report: Any, name: str, model: nn.Module) -> str | None:
    """Return how the result of `_apply` breaks the contract; None if it does not."""
    if not isinstance(report, Applied):
        return f"must return an Applied, got {report!r}"
    if report.method != name:
        return f"must report the method's own name, got {report.method!r}"
    modules = {n for n, _ in model.named_modules(remove_duplicate=False)}
    parameters = {n for n, _ in model.named_parameters(remove_duplicate=False)}
    for attribute, known in (("touched", modules | parameters), ("modules", modules), ("routed", modules)):
        unknown = [n for n in getattr(report, attribute) or () if n not in known]
        if unknown:
            return f"must report names that the model has in Applied.{attribute}, got {unknown[0]!r}"
    return None
