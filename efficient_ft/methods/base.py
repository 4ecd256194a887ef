"""The contract of a method: a plain object that changes a model, and says what it did.

In any training loop a method is two lines::

    method = LBPWHT(bases="l1", order=4)
    print(method.apply(model))

Methods that act per step also need ``step_begin(step)`` before the forward pass of each optimizer step and
``step_end()`` after it, before gradients are set to zero; methods with a loss of their own need
``loss = method.total_loss(loss)``. Build the optimizer after ``apply`` and before the first ``step_begin``, over all
parameters that require gradients at that moment.

`efficient_ft.integrations` has callbacks that do all this in Lightning and in the Hugging Face `Trainer`.
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
from efficient_ft.methods.stack import check_needs, check_removal, check_stack, no_method
from efficient_ft.methods.step_watch import StepWatch
from efficient_ft.methods.summary import count, left, trained, within
from efficient_ft.models.marks import Mark, add_mark, marks_of, remove_mark
from efficient_ft.models.view import ModelView, Skipped, state_classifier, view

#: The distribution of this package.
OURS = "efficient-ft"


@dataclass(frozen=True)
class Applied:
    """The report of `Method.apply`: the one record of what a method did to a model.

    Attributes:
        method: the method's name.
        touched: full names of the modules or parameters it works on, each once.
        skipped: full names of those it left alone although it could have been expected to work on them, with the
            reason (`Reason`, for code) and its text (for people).
        notes: further sentences for the user.
        none_needed: reason why touching no layer is correct (at full rank plain layers are exact and cheaper); empty:
            touching nothing is an error.
        modules: full names of the modules it put into the model. The view of the model leaves them out.
        routed: full names of modules whose input it routes, so that their tokens come from any images.
        summary: the change as a phrase for ``print(report)``: "blocks 9–11, norm and head train". If empty, the
            report shows the number and location of `touched`, the reasons of `skipped`, and the notes.
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
        """Return one line that describes the change, and briefly why parts were skipped."""
        if self.summary:
            return f"{self.method}: {self.summary}"
        if not self.touched:
            return f"{self.method}: nothing is changed ({self.none_needed})"
        done = f"{count(len(self.touched), 'part')} changed ({within(self.touched)})"
        return "; ".join([f"{self.method}: {done}{left(self.skipped, 'unchanged', 'part')}", *self.notes])

    def details(self) -> str:
        """Return the full report: the line of ``str(report)``, each part touched (+) or left (-), and the notes."""
        lines = [str(self), *(f"  + {name}" for name in self.touched)]
        lines += [f"  - {name}: {why}" for name, why in self.skipped.items()]
        return "\n".join([*lines, *(f"  {note}" for note in self.notes if note not in lines[0])])


class Method(ABC):
    """Base of all methods: a plain object that changes a model in place and can be removed again.

    A subclass declares `name` and `axis`, implements `_apply` and `_remove`, and overrides the per-step and state
    methods it needs. Its constructor's arguments are its settings: each has a default from the paper, is checked in
    the constructor (raise `SettingError` with the argument's name) and is stored in an attribute of the same name.
    Decorate it with `efficient_ft.methods.register` to give it its name on the command line.

    What it declares is the same for all settings, or is narrowed by the constructor for some of them (BSR that drops
    no tokens is not on the token axis).

    Attributes:
        name: its name on the command line and in reports: lower-case letters, digits and underscores.
        axis: the question it answers. It decides the place in the order of application.
        other_axes: further axes that a recipe decides on as well (BSR and ALaST select and drop tokens).
        adds: what it adds to the model or to the step.
        needs: what it needs of the model or of the training loop.
        conflicts: what it cannot be stacked with, each with the reason: axes (`Axis`), additions (`Adds`) or names of
            methods.
        hints: for a need that a model does not meet, a sentence that says what else the user can do.
        warmup_steps: optimizer steps still to come before the cost of a step no longer changes (profiles).
        cost_steps: steps over which the mean of its cost is taken, where steps differ.
        merges: what it does is merged into the model's own weights, or leaves no trace in them. If False, exported
            weights hold what it adds, and are loaded into a model that it is applied to first.
        changes_weights: removing it may change values of the model's own weights (merging an adapter). If False, an
            export needs no copy of the weights.
        libraries: modules that applying it, or its steps on a CPU, import and other runs do not: a prediction of memory
            counts them.
        acts_per_step: without calls of `step_begin` and `step_end` it has no effect, or a constant one. A loop without
            them is warned at its second backward pass. Overrides of the two then call ``super()``.
        candidates: settings that plans examine (`efficient-ft plan`); empty: plans examine the method only where the
            user names it.
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
    #: The distribution (the pip package) that registered the class; empty for a class that is not registered.
    distribution: ClassVar[str] = ""

    _applied: Applied | None = None
    _watch: StepWatch | None = None

    # ------------------------------------------------------------------ to be implemented by a method
    @abstractmethod
    def _apply(self, model: nn.Module, view: ModelView) -> Applied:
        """Change `model` in place and report what was done.

        Called once per application, after the declared conflicts and needs have been checked. Decide about every part
        first and change the model last, so that a refusal leaves it as it was.

        Args:
            model: the plain model: not compiled, not wrapped.
            view: the view of `model`, the only one of this application. Its structure is free; its `layers` cost one
                forward pass on fake tensors, once.

        Returns:
            The report. Touching nothing is an error unless `Applied.none_needed` gives the reason.

        Raises:
            SettingError: a setting does not fit this model. Name it in full: ``method.<name>.<setting>``.
            UserError: the method cannot work on this model; the text names method, model and reason.
        """

    @abstractmethod
    def _remove(self, model: nn.Module) -> None:
        """Undo `_apply` on `model`, or on a deep copy of the model that `_apply` changed; trained values stay.

        Must not change `self`: exports call it on a copy of the model while training goes on. Refer to the
        model's parts by name, or store state on its modules; do not hold references to them. A method that changed
        nothing has an empty `_remove`.
        """

    # ------------------------------------------------------------------ what a training loop calls
    def step_begin(self, step: int) -> None:
        """Prepare an optimizer step, before its first forward pass.

        Args:
            step: number of the optimizer step, from 0. The same on all micro-batches and processes; random choices
                that hold for a step are drawn from (seed, step).
        """
        if self._watch is not None:
            self._watch.begin()

    def step_end(self) -> None:
        """Finish an optimizer step, after the optimizer has stepped and before gradients are set to zero.

        Raises:
            UserError: what the step showed means that training cannot go on (a value too large for fp16).
        """
        if self._watch is not None:
            self._watch.end()

    def total_loss(self, loss: Tensor) -> Tensor:
        """Return the loss to minimize after a forward pass in training.

        Call it exactly once after each forward pass.

        Args:
            loss: the loss of that forward pass, a scalar.

        Returns:
            `loss`, plus the method's own loss where it has one; a scalar.

        Raises:
            UserError: the forward pass left no loss of the method's own.
        """
        return loss

    def trained_in_some_step(self) -> Iterable[nn.Parameter]:
        """Return parameters that train in some steps, whether or not they train in the present one."""
        return ()

    def step_stats(self) -> dict[str, Any]:
        """Return what it decided for the current step, in plain containers (budgets, chosen blocks)."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Return what must survive a restart, in plain containers and tensors; empty for a method without state.

        Settings and parameters of the model are not part of it.
        """
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:  # noqa: B027
        """Restore what `state_dict` returned; may be called before or after `apply`.

        Args:
            state_dict: of a method with the same settings, on a model of the same architecture.
        """

    # ------------------------------------------------------------------ what users call
    def apply(self, model: nn.Module, classifier: str | Iterable[str] = ()) -> Applied:
        """Apply to `model` in place.

        Call it after the weights are loaded and before the optimizer is built. The model object, its device, its
        weights and its evaluation stay, save for what the method's description says. A second call is a no-op that
        returns the same report.

        Args:
            model: an image classifier: (B, channels, H, W) to logits (B, classes); any timm model, on any device. Its
                attribute ``image_size`` states the size of its images where no other attribute does (default: 224).
            classifier: full names of the classifier's modules, where they differ from those that the report states. By
                default timm's classifier; in a larger module all parts around a pretrained network count as new, and
                train under every method that freezes.

        Returns:
            The report of what was touched and what was skipped, and why.

        Raises:
            UserError: the model is compiled or wrapped (DataParallel, DDP, FSDP); it does not have what the method
                needs; a method applied before cannot be stacked with this one; nothing in the model can be touched;
                or this object has been applied to another model. The model is unchanged then. Also: the report of
                another package's method breaks the contract; the model may be changed then.
            SettingError: a setting does not fit this model (a block index outside it), or `classifier` names no module
                of it.
        """
        state_classifier(model, classifier)
        if self._applied is not None:
            if all(mark.key != self.state_key for mark in marks_of(model)):
                raise UserError(
                    f"method {self.name}: this object has been applied to another model; make a new one for this model."
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
            UserError: it did not, and the method is another package's, which the text names.
        """
        wrong = _wrong_report(report, self.name, model)
        if wrong is None:
            return
        kind = type(self)
        package = vars(kind).get("distribution") or kind.__module__
        assert package != OURS, f"{kind.__name__}._apply {wrong}"
        raise UserError(f"Package {package}: `_apply` of method {self.name} {wrong}. Mend or uninstall the package.")

    @property
    def applied(self) -> Applied | None:
        """The report of `apply`; None before it and after `remove`."""
        return self._applied

    @property
    def application_order(self) -> tuple[int, str]:
        """Sort key of the order in which methods are applied: by axis, then by name."""
        return ORDER_OF_APPLICATION.index(self.axis), self.name

    def remove(self, model: nn.Module) -> None:
        """Give `model` back its own modules, names and `requires_grad`; trained values stay.

        Args:
            model: the model the method was applied to. Methods that build on each other are removed in the opposite
                order of application.

        Raises:
            UserError: a method that was applied on top of this one is still there.
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
        """Return the constructor's arguments and their values: ``type(m)(**m.settings())`` equals ``m``."""
        return {name: getattr(self, name) for name in inspect.signature(type(self)).parameters}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{k}={v!r}' for k, v in self.settings().items())})"

    @property
    def state_key(self) -> str:
        """Name and settings: the key of this method's state in a checkpoint and of its mark on a model."""
        return f"{self.name}{sorted(self.settings().items())}"


# ---------------------------------------------------------------------------------------------- several methods
def in_order(methods: Method | Iterable[Method]) -> list[Method]:
    """Sort methods by the order of application that their axes declare; the order of a user's list has no effect.

    Args:
        methods: one method or several.

    Raises:
        SettingError: something else; the text names it.
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
    """Apply methods in their declared order.

    Args:
        model: as in `Method.apply`.
        methods: one method or several.
        classifier: as in `Method.apply`.

    Returns:
        Their reports, in that order. The report of a selection names the parameters that a later method freezes.

    Raises:
        UserError: methods that cannot be stacked (before anything is changed), or as in `Method.apply`.
        SettingError: `methods` are no methods, or as in `Method.apply`.
    """
    ordered = in_order(methods)
    check_stack(ordered, model)
    for number, method in enumerate(ordered):
        before = trained(model), {id(p): p.numel() for p in model.parameters() if p.requires_grad}
        method.apply(model, classifier)
        _update_reports(ordered[:number], method, model, *before)
    return [m.applied for m in ordered if m.applied is not None]


def _with_note(report: Applied, method: Method, view: ModelView) -> Applied:
    """Return the report of a method that freezes parameters, with the parts that were inferred to be the head."""
    freezes = {Axis.SELECTION, Axis.ADAPTERS} & set(method.axes)
    if not (freezes and view.head_note and any(not p.requires_grad for p in view.model.parameters())):
        return report
    note = f"{view.head_note} (name the classifier by classifier=)"
    return replace(report, summary=f"{report.summary}; {note}" if report.summary else "", notes=(*report.notes, note))


def _update_reports(
    earlier: Sequence[Method], method: Method, model: nn.Module, claim: str, trained_before: Mapping[int, int]
) -> None:
    """Update the reports of earlier methods after `method` has changed which parameters train.

    Args:
        earlier: methods applied before.
        method: the method applied last.
        model: the model.
        claim: how the earlier reports state the number of trained parameters.
        trained_before: sizes of the parameters that trained before, by identity.
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
    """Return the weights under the pretrained model's own names (adapters merged), on the CPU.

    `model` is not changed. What a method adds that cannot be merged (``merges = False``) stays, under its own names.

    Args:
        model: the model.
        methods: those applied to it.
        copy_weights: False: the tensors share memory with `model` where no method changes weights when it is removed
            and they are on the CPU already, for a caller that is done with them before the next step.
    """
    merged = [method for method in reversed(in_order(methods)) if method.merges]
    share = not copy_weights and not any(method.changes_weights for method in merged)
    # Shared parameters are new ones of the same memory: a removal sets `requires_grad` and frees gradients.
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
    """Set `requires_grad` of the parameters named, where the model has them; a frozen one's gradient is None."""
    for name, parameter in model.named_parameters():
        if name in wanted:
            parameter.requires_grad_(wanted[name])
            if not wanted[name]:
                parameter.grad = None


def _wrong_report(report: Any, name: str, model: nn.Module) -> str | None:
    """Return how what `_apply` returned breaks the contract; None: it does not."""
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


def refuse_wrapped(model: nn.Module, name: str) -> None:
    """Raise UserError for a compiled model or one inside DataParallel, DDP or FSDP: surgery must come first."""
    wrapper = type(model).__name__
    if any(kind.__name__ == "PeftModel" for kind in type(model).__mro__):
        raise UserError(
            f"method {name}: the model is wrapped by peft ({wrapper}). Apply the method to the model inside:"
            " apply(model.get_base_model()); peft's adapters stay."
        )
    if wrapper in ("OptimizedModule", "DataParallel", "DistributedDataParallel", "FullyShardedDataParallel"):
        raise UserError(
            f"method {name}: the model is already wrapped ({wrapper}); apply the method to the plain model first,"
            " then compile or wrap it."
        )
    if isinstance(model, torch.jit.ScriptModule):
        raise UserError(f"method {name}: a scripted model cannot be changed; apply the method before scripting it.")
