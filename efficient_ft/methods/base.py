"""Base class of all methods. A method is an object that modifies a model in place and returns a report.

>>> method = LBPWHT(bases="l1", order=4)
>>> print(method.apply(model))

A training loop makes the following calls in each optimizer step:

1. ``method.step_begin(step)`` before the first forward pass.
2. ``loss = method.total_loss(loss)`` once after each forward pass (once per micro-batch).
3. ``loss.backward()`` and ``optimizer.step()``.
4. ``method.step_end()`` before the gradients are set to zero.

Create the optimizer after ``apply`` and before the first ``step_begin``, with all parameters that require gradients. In
a custom training loop, `efficient_ft.MethodSession` calls `step_begin`, `total_loss` and `step_end` of one or more
methods. The package `efficient_ft.integrations` provides callbacks for Lightning and for the Hugging Face `Trainer`.

Image classifiers map images (B, C, H, W) to logits (B, classes). Segmentation models return logits (B, classes, H, W).
Text models map the tensors of a tokenizer, each (B, tokens), to logits (B, classes). Image sizes are in pixels.
"""

from __future__ import annotations

import copy
import inspect
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Unpack

import torch
from torch import Tensor, nn

from efficient_ft.core.errors import SettingError, UserError, hint
from efficient_ft.core.format import format_number
from efficient_ft.methods.declarations import ORDER_OF_APPLICATION, Adds, Axis, Needs, PlanCandidate
from efficient_ft.methods.stack import (
    assumptions,
    check_needs,
    check_removal,
    check_stack,
    no_method,
    note_applied,
    nothing_to_change,
)
from efficient_ft.methods.step_watch import StepWatch
from efficient_ft.methods.summary import count, left, trained, within
from efficient_ft.methods.wrapped import check_module, refuse_adapters_of_peft, refuse_other_inputs, refuse_wrapped
from efficient_ft.models.marks import Mark, add_mark, marks_of, remove_mark
from efficient_ft.models.view import ModelView, Skipped, Structure, restored_on_error, specify, view
from efficient_ft.models.weight_dtype import to_float32

#: Name of the distribution (pip package) that contains this package.
OURS = "efficient-ft"


@dataclass(frozen=True)
class Applied:
    """Report that `Method.apply` returns. The report is the only record of the changes that the method made.

    Attributes:
        method: name of the method.
        touched: full names of the modules or parameters that the method changes or trains, without duplicates.
        skipped: parts of the model that the method did not change, although a user may expect a change. The keys are
            the full names of the skipped parts. Each value contains a `Reason` and a text for the user.
        notes: additional sentences for the user.
        none_needed: reason why no layer has to be changed. For example, at full rank, plain layers are exact and
            cheaper. If `none_needed` and `touched` are both empty, `Method.apply` raises an error.
        modules: full names of the modules that the method added. `ModelView` excludes added modules.
        routed: full names of the modules to which the method routes individual tokens. The input of a routed module may
            contain tokens from several images.
        summary: phrase that ``print(report)`` shows, for example "blocks 9–11, norm and head train". If the phrase is
            empty, ``print(report)`` shows the number and location of the touched parts, the reasons for the skipped
            parts, and the notes.
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
        """Return a one-line summary of the changes, the skipped parts, and the reasons why the parts were skipped."""
        if self.summary:
            return f"{self.method}: {self.summary}"
        done = f"the model is not changed ({self.none_needed})"
        if self.touched:
            done = f"{count(len(self.touched), 'part')} changed ({within(self.touched)})"
        return "; ".join([f"{self.method}: {done}{left(self.skipped, 'unchanged', 'part')}", *self.notes])

    def details(self) -> str:
        """Return ``str(report)``, followed by one line for each touched (+) or skipped (-) part, and by the notes."""
        lines = [str(self), *(f"  + {name}" for name in self.touched)]
        lines += [f"  - {name}: {why}" for name, why in self.skipped.items()]
        return "\n".join([*lines, *(f"  {note}" for note in self.notes if note not in lines[0])])


class Method(ABC):
    """Base class of all methods. A method is an object that modifies a model in place and can be removed.

    A subclass declares `name` and `axis`, implements `_apply` and `_remove`, and overrides the step and state methods
    that it requires. The arguments of the constructor are the settings of the method. The constructor checks each
    setting and stores it in an attribute of the same name. If a setting is invalid, the constructor raises
    `SettingError` with the name of the argument. The decorator `efficient_ft.methods.register` registers the class
    under its `name`.

    The attributes below are declarations that apply to all values of the settings. A constructor may restrict a
    declaration for some settings. For example, BSR without token dropping does not belong to the token axis.

    Attributes:
        name: name of the method on the command line and in reports. The name consists of lower-case letters, digits and
            underscores.
        axis: part of a training step that the method controls. The axis also determines the order in which methods are
            applied.
        other_axes: additional axes of a method that acts on several axes. For example, BSR and ALaST select parameters
            and drop tokens.
        adds: additions to the model or to the training step (`Adds`).
        needs: requirements on the model or the training loop (`Needs`).
        conflicts: mapping whose keys are axes (`Axis`), additions (`Adds`) or names of methods. This method cannot be
            combined with methods that match a key. Each value states the reason for the conflict.
        hints: mapping from a value of `Needs` to a sentence that is added to the error message if the model does not
            meet this requirement. ``{argument}`` in a sentence is replaced by `full_name("argument")`.
        warmup_steps: number of optimizer steps that remain until the cost of a step is constant (for example, until a
            profile ends).
        cost_steps: number of steps over which the cost is averaged, for methods whose cost differs between steps.
        merges: True if `_remove` merges the method's changes into the model's own weights, or if the method does not
            change these weights. If False, exported weights contain the method's modules, and the method must be
            applied before these weights are loaded.
        changes_weights: True if `_remove` may change the model's own weights (for example, by merging an adapter). If
            False, the weights are not copied when the model is exported.
        libraries: names of Python modules that are imported only if the method is applied or runs a step on a CPU.
            Predictions of process memory include the memory of these Python modules.
        acts_per_step: True if the training loop must call `step_begin` and `step_end`. If the training loop does not
            make these calls, a warning is issued at the second backward pass. Overrides of `step_begin` and `step_end`
            must call ``super()``.
        candidates: settings that ``efficient-ft plan`` examines. If empty, ``efficient-ft plan`` does not examine the
            method unless the user specifies it.
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
    #: Name of the distribution (pip package) that registered the class. The name is empty for unregistered classes.
    distribution: ClassVar[str] = ""

    _applied: Applied | None = None
    _watch: StepWatch | None = None

    # ------------------------------------------------------------------ methods that a subclass must implement
    @abstractmethod
    def _apply(self, model: nn.Module, view: ModelView) -> Applied:
        """Modify `model` in place and return the report.

        `apply` calls this method once, after it has checked conflicts and needs. An implementation must select all
        parts before it modifies the model, so that the model is unchanged if an error is raised.

        Args:
            model: plain model, neither compiled nor wrapped. Parameters may be on any device and have any dtype.
            view: view of `model`. Reading the structure of the model (blocks, head) requires no forward pass. The first
                access to `view.layers` runs one forward pass on fake tensors.

        Returns:
            The report. If the report lists no touched part, `Applied.none_needed` must state the reason.

        Raises:
            SettingError: If a setting does not fit this model. The error must contain the full name of the setting,
                ``method.<name>.<setting>``.
            UserError: If the method does not support this model. The message must name the method, the model and the
                reason.
        """

    @abstractmethod
    def _remove(self, model: nn.Module) -> None:
        """Undo the changes that `_apply` made to `model`, but keep the trained values.

        `model` may be a deep copy of the model that `_apply` modified, because exports remove methods from a copy while
        training continues. An implementation must therefore not change `self`. An implementation must find the parts of
        the model by name or by the state that `_apply` stored on the modules, because references to modules are not
        valid in a copy. If `_apply` never changes the model, the body of this method is empty.
        """

    # ------------------------------------------------------------------ methods that a training loop calls
    def step_begin(self, step: int) -> None:
        """Prepare an optimizer step. Call this method before the first forward pass of the step.

        Args:
            step: number of the optimizer step, counted from 0. The number must be the same for all micro-batches of the
                step and on all processes. Random choices must depend only on the seed and `step`, so that all processes
                and resumed runs make the same choices.
        """
        if self._watch is not None:
            self._watch.begin()

    def step_end(self) -> None:
        """Finish an optimizer step. Call this method after ``optimizer.step()`` and before ``zero_grad()``.

        Raises:
            UserError: If training cannot continue after this step (for example, because a value exceeds the range of
                fp16).
        """
        if self._watch is not None:
            self._watch.end()

    def total_loss(self, loss: Tensor) -> Tensor:
        """Return the sum of `loss` and the loss that the method adds, as a tensor of shape ().

        Call this method exactly once after each forward pass in training.

        Args:
            loss: mean loss of the forward pass, with shape ().

        Raises:
            UserError: If the method adds a loss, but no forward pass has computed this loss.
        """
        return loss

    def trained_in_some_step(self) -> Iterable[nn.Parameter]:
        """Return the parameters that are trained in some steps, even if they are frozen in the current step."""
        return ()

    def step_stats(self) -> dict[str, Any]:
        """Return the choices that the method made for the current step, as lists, dictionaries and numbers."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Return the state that is required to resume training, as tensors, numbers, strings, lists and dictionaries.

        The state does not contain the settings or the model's parameters. A method without state returns an empty
        dictionary.
        """
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:  # noqa: B027
        """Load a state returned by `state_dict`, either before or after `apply`.

        The state must belong to a method with the same settings on a model with the same architecture.
        """

    # ------------------------------------------------------------------ methods that users call
    def apply(self, model: nn.Module, classifier: str | Iterable[str] = (), **structure: Unpack[Structure]) -> Applied:
        """Apply the method to `model` in place.

        Call this method after the weights are loaded and before the optimizer is created. The model object, its device,
        its weights and its outputs in evaluation do not change, except for changes that the docstring of the method
        describes. A second call has no effect and returns the same report.

        Args:
            model: image classifier that maps (B, C, H, W) to logits (B, classes), on any device.
            classifier: full names of the classifier's modules (default: timm's classifier). If `model` contains a
                pretrained network, parts outside of this network are treated as new and are always trained.
            **structure: optional keyword arguments `image_size`, `prefix_tokens` and `blocks`. Pass an argument only if
                the inferred value is incorrect (see `efficient_ft.models.view.Structure`). The values are stored on
                `model` and apply to all methods.

        Returns:
            A report that lists the changed parts and the skipped parts of the model.

        Raises:
            UserError: If the model is compiled or wrapped (DataParallel, DDP, FSDP), if the model does not meet a
                requirement of the method, or if the method cannot change any part of the model. Also raised if the
                method cannot be combined with a method that was applied before, or if this object is already applied to
                a different model. An error leaves the model unchanged, unless a method from another package has
                returned an invalid report.
            SettingError: If a setting does not fit this model (for example, a block index that is out of range), if
                `classifier`, `image_size`, `prefix_tokens` or `blocks` is invalid for `model`, or if `model` is not a
                module.
        """
        check_module(model)
        if self._applied is not None:
            if all(mark.key != self.state_key for mark in marks_of(model)):
                raise UserError(
                    f"method {self.name}: this object has already been applied to another model. Create a new object"
                    " for this model."
                )
            return self._applied
        with restored_on_error(model):
            specify(model, classifier, **structure)
            return self._apply_once(model)

    def _apply_once(self, model: nn.Module) -> Applied:
        refuse_wrapped(model)
        refuse_other_inputs(model)
        check_stack([self], model)
        refuse_adapters_of_peft(model, self.name, self.axes)
        looked = view(model)
        check_needs(self, looked)
        applied = self._apply(model, looked)
        self._check_report(applied, model)
        notes = assumptions(self, looked)
        summary = applied.summary and "; ".join([applied.summary, *notes])
        applied = replace(applied, summary=summary, notes=(*applied.notes, *notes))
        if not applied.touched and not applied.none_needed:
            raise nothing_to_change(self, looked, applied.skipped.values())
        self._applied = applied
        note_applied(model, self)
        if self.acts_per_step:
            self._watch = StepWatch(self.name, model)
        # The mark is stored on the model, so that copies of the model also have the mark.
        declared = (self.name, self.state_key, self.axes, self.adds, dict(self.conflicts))
        add_mark(model, Mark(*declared, applied.modules, applied.routed))
        return applied

    def _check_report(self, report: Any, model: nn.Module) -> None:
        if (wrong := _wrong_report(report, self.name, model)) is None:
            return
        kind = type(self)
        package = vars(kind).get("distribution") or kind.__module__
        assert package != OURS, f"{kind.__name__}._apply {wrong}"
        raise UserError(f"Package {package}: `_apply` of method {self.name} {wrong}. Fix or uninstall the package.")

    @property
    def applied(self) -> Applied | None:
        """Report that `apply` returned, or None before `apply` and after `remove`."""
        return self._applied

    @property
    def application_order(self) -> tuple[int, str]:
        """Sort key that defines the order of application: first the axis, then the name."""
        return ORDER_OF_APPLICATION.index(self.axis), self.name

    def remove(self, model: nn.Module) -> None:
        """Restore the modules, names and `requires_grad` of `model`, but keep the trained values.

        The method itself returns to its initial state, so that it can be applied to a new model. Subclasses must undo
        their changes in `_remove`, because this function deletes the attributes that `_apply` has set.

        Args:
            model: model to which the method was applied. If several methods were applied, remove the methods in the
                reverse order of application.

        Raises:
            UserError: If the method is not applied to `model`, or if another method must be removed first.
        """
        check_removal(self, model)
        fresh = vars(type(self)(**self.settings()))
        self._remove(model)
        self._stop_watching()
        remove_mark(model, self.state_key)
        vars(self).clear()
        vars(self).update(fresh)

    def _stop_watching(self) -> None:
        if self._watch is not None:
            self._watch.stop()
            self._watch = None

    @property
    def axes(self) -> tuple[Axis, ...]:
        """All axes of the method: `axis` and `other_axes`."""
        return (self.axis, *self.other_axes)

    @property
    def find_unused_parameters(self) -> bool:
        """Return True if some trainable parameters have no gradient in some steps (see ``DistributedDataParallel``)."""
        return Needs.FIND_UNUSED_PARAMETERS in self.needs

    def settings(self) -> dict[str, Any]:
        """Return the arguments of the constructor. ``type(m)(**m.settings())`` is equivalent to ``m``."""
        return {name: getattr(self, name) for name in inspect.signature(type(self)).parameters}

    def full_name(self, setting: str) -> str:
        """Return the name of a setting in messages, which is ``method.<name>.<setting>`` on the command line."""
        return hint(setting, f"method.{self.name}.{setting}")

    def setting_error(self, setting: str, allowed: str, do: str | None = None) -> SettingError:
        """Return the error for a setting that does not fit a model. See `SettingError`."""
        return SettingError(self.full_name(setting), getattr(self, setting), allowed, do)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{k}={v!r}' for k, v in self.settings().items())})"

    @property
    def state_key(self) -> str:
        """Key of the method in checkpoints and in marks on models. The key consists of the name and the settings."""
        return f"{self.name}{sorted(self.settings().items())}"


# ---------------------------------------------------------------------------------------------- several methods
def in_order(methods: Method | Iterable[Method]) -> list[Method]:
    """Return the methods sorted by their order of application, which depends on their axes.

    Args:
        methods: one method or several methods, in any order.

    Raises:
        SettingError: If `methods` contains an object that is not a method.
    """
    given = [methods] if isinstance(methods, Method) else methods
    several = list(given) if isinstance(given, Iterable) and not isinstance(given, str | Mapping | nn.Module) else None
    wrong = given if several is None else next((one for one in several if not isinstance(one, Method)), None)
    if several is None or wrong is not None:
        raise no_method(wrong)
    return sorted(several, key=lambda m: m.application_order)


def apply_methods(
    model: nn.Module,
    methods: Method | Iterable[Method],
    classifier: str | Iterable[str] = (),
    **structure: Unpack[Structure],
) -> list[Applied]:
    """Apply several methods to a model in their order of application.

    Args:
        model: see `Method.apply`.
        methods: one method or several methods, in any order.
        classifier, **structure: see `Method.apply`.

    Returns:
        The reports in the order of application. If a later method freezes parameters that a selection method trains,
        the report of the selection method states the number of these parameters.

    Raises:
        UserError: If the methods cannot be applied. In this case, the model is unchanged. See also `Method.apply`.
        SettingError: If `methods` contains an object that is not a method. See also `Method.apply`.
    """
    ordered = in_order(methods)
    check_module(model)
    check_stack(ordered, model)
    with ExitStack() as undo:
        for number, method in enumerate(ordered):
            before = trained(model), {id(p): p.numel() for p in model.parameters() if p.requires_grad}
            method.apply(model, classifier, **structure)
            undo.callback(method.remove, model)
            _update_reports(ordered[:number], method, model, *before)
        undo.pop_all()
    return [m.applied for m in ordered if m.applied is not None]


def _update_reports(
    earlier: Sequence[Method], method: Method, model: nn.Module, claim: str, trained_before: Mapping[int, int]
) -> None:
    """Replace the phrase `claim` in earlier reports after `method` has changed the trainable parameters.

    `claim` is the phrase that states the number of trainable parameters before the change. `trained_before` maps the id
    of each of these parameters to its number of elements.
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
    """Return all weights on the CPU, with adapters merged and with the parameter names of the pretrained model.

    `model` is not changed. Modules that were added by methods with ``merges = False`` cannot be merged and keep their
    names. If adapters are merged, weights in bfloat16 are converted to float32, so that the sum is not rounded.

    Args:
        model: model to which the methods were applied.
        methods: methods that were applied to `model`.
        copy_weights: if False, weights on the CPU are not copied, unless a method changes weights when it is removed.
            Tensors that are not copied share memory with `model` and must be used before the next training step.
    """
    merged = [method for method in reversed(in_order(methods)) if method.merges]
    share = not copy_weights and not any(method.changes_weights for method in merged)
    # Parameters that share memory must be new objects, because `_remove` sets `requires_grad` and frees gradients.
    own = [*model.parameters(), *model.buffers()] if share else []
    same_memory = {id(t): nn.Parameter(t.detach(), t.requires_grad) if isinstance(t, nn.Parameter) else t for t in own}
    plain = copy.deepcopy(model, same_memory)
    for method in merged:
        if method.changes_weights:
            to_float32(plain)
        method._remove(plain)
    return {k: v.detach().cpu().contiguous() for k, v in plain.state_dict().items()}


def _wrong_report(report: Any, name: str, model: nn.Module) -> str | None:
    """Return a phrase that states why the report returned by `_apply` is invalid, or None if the report is valid."""
    if not isinstance(report, Applied):
        return f"must return an Applied object, got {report!r}"
    if report.method != name:
        return f"must report the method's own name, got {report.method!r}"
    modules = {n for n, _ in model.named_modules(remove_duplicate=False)}
    parameters = {n for n, _ in model.named_parameters(remove_duplicate=False)}
    for attribute, known in (("touched", modules | parameters), ("modules", modules), ("routed", modules)):
        unknown = [n for n in getattr(report, attribute) or () if n not in known]
        if unknown:
            return f"must list only parts of the model in Applied.{attribute}, got {unknown[0]!r}"
    return None
