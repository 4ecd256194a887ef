"""A test class that checks the contracts of methods for a table of settings.

Define a subclass in a test file, for example::

    from efficient_ft.testing import MethodContracts, Row

    class TestContracts(MethodContracts):
        rows = {"every_nth": Row(EveryNth, {"n": 2}, why_no_off="...", on_reference="exact")}
        conf = Path(__file__).parent.parent / "conf" / "method"

pytest then runs every contract on every row, with every small model of the row.
"""

from __future__ import annotations

import copy
import inspect
import pickle
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import nn

from efficient_ft.core.errors import UserError
from efficient_ft.core.packages import option_settings
from efficient_ft.methods.base import Method, plain_state_dict
from efficient_ft.methods.declarations import Axis
from efficient_ft.methods.registry import METHODS, broken_contract, broken_settings
from efficient_ft.models.marks import marks_of
from efficient_ft.models.view import Skipped, model_view
from efficient_ft.testing.models import MODELS, model_of
from efficient_ft.testing.reference_contracts import ReferenceContracts
from efficient_ft.testing.rows import ContractTests, Row, on_models
from efficient_ft.testing.snapshots import differing, structure
from efficient_ft.testing.step_contracts import StepContracts
from efficient_ft.testing.steps import evaluate, gradients, largest_difference, stir, train_a_little, warm_up


class MethodContracts(ReferenceContracts, StepContracts, ContractTests):
    """Base class of test classes that check the contracts of methods for each `Row` of settings.

    Define a subclass in a test file and set `rows`. pytest runs every contract (``test_…``) on all rows and models.

    Attributes:
        rows: Dict from row names to rows of settings.
        conf: Folder with the YAML files of the methods. If None, YAML files are not tested.
    """

    def test_the_class_keeps_the_contract(self, row: str) -> None:
        """The class declares its name, axis and settings, and overrides the required methods."""
        method = self.rows[row].method
        assert broken_contract(method) is None, broken_contract(method)
        assert broken_settings(method) is None, broken_settings(method)
        assert METHODS.get(method.name) in (method, None), "another method has this name"

    def test_the_row_is_complete(self, row: str) -> None:
        """A `Row` contains models, a reference, and either `off` or the reason `why_no_off`."""
        r = self.rows[row]
        exact = r.on_reference == "exact"
        assert exact or callable(r.on_reference), "on_reference must be 'exact' or a Reference"
        assert set(r.models) - set(r.unreferenced), "at least one model must be compared with the reference"
        assert all(r.unreferenced.values()), "every entry of unreferenced must have a reason"
        assert (r.off is None) == bool(r.why_no_off), "a Row must set either off or why_no_off"
        assert r.off is None or r.instead is None, "a Row must not set both off and instead"
        assert set(r.models) | set(r.refused) <= set(MODELS)
        assert not set(r.models) & set(r.refused)
        assert r.models, "the row has no models"

    def test_settings_rebuild_the_method(self, row: str) -> None:
        """`type(m)(**m.settings())` has the same settings and state key as `m`."""
        method = self.rows[row].create()
        again = type(method)(**method.settings())
        assert again.settings() == method.settings()
        assert again.state_key == method.state_key
        assert repr(again) == repr(method)
        assert method.state_key.startswith(method.name)

    def test_apply_reports_what_it_did_and_is_idempotent(self, row: str, name: str) -> None:
        """The report of `apply` names modules or parameters of the model, and a second `apply` changes nothing."""
        model, method = model_of(name), self.rows[row].create()
        assert method.applied is None
        torch.manual_seed(1)
        with counted_probes() as probes:
            report = method.apply(model)
        assert len(probes) <= 1, "apply must run at most one forward pass on fake tensors"
        names = {n for n, _ in model.named_modules()} | {n for n, _ in model.named_parameters()}
        plain = {n.replace(".base_layer", "") for n in names}
        assert report.touched
        assert len(set(report.touched)) == len(report.touched)
        assert set(report.touched) <= names
        assert set(report.skipped) <= plain
        assert not set(report.skipped) & set(report.touched)
        assert all(isinstance(why, Skipped) and str(why) for why in report.skipped.values())
        assert report.method == method.name
        assert method.name in str(report)
        keys, classes = list(model.state_dict()), [type(m) for m in model.modules()]
        assert method.apply(model) is report is method.applied
        assert list(model.state_dict()) == keys
        assert [type(m) for m in model.modules()] == classes
        (mark,) = marks_of(model)
        assert (mark.method, mark.key) == (method.name, method.state_key)
        self._prototypes.setdefault(self._key(row, name), (model, method))

    @on_models(lambda row: row.refused)
    def test_models_it_cannot_serve_are_refused_with_the_reason(self, row: str, name: str) -> None:
        """`apply` does not change an unsupported model, and raises a UserError with the method name and the reason."""
        model = model_of(name)
        before = _state(model)
        text = _refusal(self.rows[row].create(), model)
        assert self.rows[row].refused[name] in text, text
        assert self.rows[row].method.name in text
        assert _state(model) == before
        assert not marks_of(model)

    def test_a_wrapped_model_is_refused(self, row: str) -> None:
        """Applying a method to a compiled or wrapped model raises a UserError."""
        model = model_of(self.rows[row].models[0])
        distributed = torch.nn.parallel.DistributedDataParallel.__new__(torch.nn.parallel.DistributedDataParallel)
        nn.Module.__init__(distributed)
        distributed.module = model
        for wrapped in (nn.DataParallel(model), distributed, torch.compile(model)):
            method = self.rows[row].create()
            assert "must be an unwrapped nn.Module" in _refusal(method, wrapped)  # type: ignore[arg-type]
            assert method.applied is None

    def test_a_second_one_is_refused(self, row: str) -> None:
        """Applying a second method of the same class raises a UserError, and the model is not changed."""
        model, method = self.applied(row, self.rows[row].models[0])
        before = _state(model)
        text = _refusal(self.rows[row].create(), model)
        assert f"{method.name} has been applied" in text
        assert _state(model) == before

    def test_copies_and_pickles_train_alike(self, row: str, name: str) -> None:
        """Deep copies and unpickled copies of a model and its method have the same gradients as the original."""
        model, method = self.applied(row, name)
        stir(model)
        warm_up(model, method, name)
        copied, copied_method = copy.deepcopy((model, method))
        pickled, pickled_method = pickle.loads(pickle.dumps((model, method)))
        assert copied_method.applied == pickled_method.applied == method.applied
        # Only the first pass of each copy is compared, because the next pass of a step rounds with different noise.
        expected = gradients(copied, name)
        assert largest_difference(expected, gradients(pickled, name)) == 0
        # Changes to a copy must not affect the original.
        keys = list(model.state_dict())
        copied_method.remove(copied)
        assert list(copied.state_dict()) == list(model_of(name).state_dict())
        assert list(model.state_dict()) == keys
        assert largest_difference(expected, gradients(model, name)) == 0

    def test_remove_gives_the_plain_model_back(self, row: str, name: str) -> None:
        """`remove` restores classes, names, `requires_grad`, hooks and attributes."""
        plain = model_of(name)
        next(plain.parameters()).requires_grad = False
        model, method = copy.deepcopy(plain), self.rows[row].create()
        method.apply(model)
        train_a_little(model, method, name)
        method.remove(model)
        assert method.applied is None
        assert not marks_of(model)
        changed = differing(structure(plain), structure(model))
        assert not changed, f"remove must restore the model, but changed {'; '.join(changed[:5])}"
        plain.load_state_dict(model.state_dict())
        again = copy.deepcopy(model)  # copied before the running statistics of BatchNorm change
        assert largest_difference(gradients(plain, name), gradients(model, name)) == 0
        # The method can be applied again, to this model or to a different one.
        if name == self.rows[row].models[0]:
            assert method.apply(again).touched

    def test_what_is_exported_is_the_pretrained_models_own(self, row: str, name: str) -> None:
        """The plain timm model with the exported weights returns the logits of the trained model.

        If a method does not merge its modules, these modules are added to the plain model first.
        """
        model, method = self.applied(row, name)
        before = evaluate(self.rows[row].initial_model(model_of(name)), name)
        equal = torch.allclose(evaluate(model, name), before, rtol=1e-10, atol=1e-12)
        assert equal != bool(self.rows[row].own_evaluation)
        train_a_little(model, method, name)
        kept = {name: value.clone() for name, value in model.state_dict().items()}
        exported = plain_state_dict(model, [method])
        shared = plain_state_dict(model, [method], copy_weights=False)
        torch.testing.assert_close(shared, exported, rtol=0, atol=0)
        torch.testing.assert_close(dict(model.state_dict()), kept, rtol=0, atol=0)
        fresh = model_of(name)
        assert fresh.state_dict().keys() <= exported.keys()
        if not method.merges:
            fresh, _ = self.applied(row, name)
        fresh.load_state_dict(exported, strict=True)
        after = evaluate(fresh, name)
        torch.testing.assert_close(after, evaluate(model, name), rtol=1e-10, atol=1e-12)
        assert (after - before).abs().max() > 1e-5

    def test_a_yaml_holds_the_constructors_arguments(self, file: Path) -> None:
        """The settings in each YAML file, including inherited settings, are the arguments of the constructor.

        A setting whose value refers to another setting, such as ``${optim.lr}``, can have another default.
        """
        package = re.match(r"# @package method\.(\w+)\n", file.read_text(encoding="utf-8"))
        assert package, f"the first line of {file.name} must state the package, e.g. # @package method.{file.stem}"
        (method,) = {r.method for r in self.rows.values() if r.method.name == package[1]}
        values = option_settings(file)
        parameters = inspect.signature(method).parameters
        select = values.pop("select", None)
        assert (select is None) == (method.axis == Axis.SELECTION), "only selection methods must omit select"
        assert values.keys() == parameters.keys()
        if file.stem == method.name:
            defaults = {n: "???" if p.default is p.empty else p.default for n, p in parameters.items()}
            assert values == {n: values[n] if str(values[n]).startswith("${") else d for n, d in defaults.items()}
        else:
            assert any(values[n] != p.default for n, p in parameters.items()), "a variant must differ from the defaults"

    def test_every_method_has_a_yaml_of_its_name(self) -> None:
        """Each method has a YAML file with its name."""
        if self.conf is not None:
            names = {r.method.name for r in self.rows.values()}
            missing = names - {file.stem for file in self.conf.glob("*.yaml")}
            assert not missing, f"the folder {self.conf} contains no YAML file for {', '.join(sorted(missing))}"


@contextmanager
def counted_probes() -> Iterator[list[str]]:
    """Record the forward passes that model views run on fake tensors, one entry per pass."""
    probes: list[str] = []
    real = model_view.probe

    def probe(model: nn.Module, *arguments: Any) -> Any:
        probes.append(type(model).__name__)
        return real(model, *arguments)

    with mock.patch.object(model_view, "probe", probe):
        yield probes


def worked_on_or_refused(plain: nn.Module, images: torch.Tensor, rows: Mapping[str, Row]) -> list[str]:
    """Check that every method either trains on a model or rejects it.

    A method must reject a model with a UserError that contains the name of the method, without changing the model.

    Args:
        plain: Classifier with at least two classes.
        images: Two images with shape (2, 3, H, W).
        rows: Dict from row names to rows of settings.

    Returns:
        Names of the rows whose methods train on the model.
    """
    names = list(plain.state_dict())
    worked = []
    for key, row in rows.items():
        model, method = copy.deepcopy(plain), row.create()
        before = _state(model)
        try:
            report = method.apply(model)
        except UserError as error:
            assert method.name in str(error), error  # noqa: PT017
            assert _state(model) == before
            continue
        worked.append(key)
        assert report.touched or report.notes
        model.train()
        loss = F.cross_entropy(model(images), torch.tensor([0, 1]))
        loss.backward()
        assert torch.isfinite(loss)
        assert any(p.grad is not None for p in model.parameters())
        assert all(p.grad is None for p in model.parameters() if not p.requires_grad)
        exported = list(plain_state_dict(model, [method]))
        assert [n for n in exported if n in names] == names
        assert len(exported) == len(names) or not method.merges
    return worked


def _state(model: nn.Module) -> list[Any]:
    """Return the classes of the modules, and the `requires_grad` flags of the parameters."""
    modules = [(name, type(module), "forward" in vars(module)) for name, module in model.named_modules()]
    return [*modules, *((name, p.requires_grad) for name, p in model.named_parameters())]


def _refusal(method: Method, model: nn.Module) -> str:
    """Return the message of the UserError that applying `method` to `model` raises."""
    try:
        method.apply(model)
    except UserError as error:
        return str(error)
    raise AssertionError(f"applying {method!r} to {type(model).__name__} must raise a UserError")
