"""Tests of ``trainer.precision=auto``: the selected precision, its record, resumed runs, and evaluations."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from efficient_ft.cli.hydra.compose import configured
from efficient_ft.config import Config, check, fingerprint
from efficient_ft.core.errors import UserError
from efficient_ft.record import config_file
from efficient_ft.record.collection import collect, groups, varying
from efficient_ft.record.environment import cpu_name
from efficient_ft.training import bf16_units, precision
from efficient_ft.training.bf16_units import bf16_is_emulated, has_bf16_units
from efficient_ft.training.evaluate import evaluate
from efficient_ft.training.memory.budget import Predictor
from efficient_ft.training.precision import choose_precision, in_bf16, network_time, resolve_precision
from efficient_ft.training.run import run
from tests.config.settings import with_settings
from tests.conftest import REPOSITORY, unwrapped
from tests.training.runs import interrupted_at, plain_config

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """Use an empty cache folder, and fail if a test measures without replacing the measurement."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in ("products_time", "network_time"):
        monkeypatch.setattr(precision, name, lambda *_: pytest.fail("the processor must not be measured"))


@pytest.fixture
def units(monkeypatch):
    """Return a function that sets whether devices have bf16 units, and the relative time of bf16.

    The rule for small networks is disabled, because the networks of these tests are small.
    """
    monkeypatch.setattr(precision, "_is_small", lambda network: False)

    def set_units(present: bool, ratio: float = 0.5) -> None:
        for module in (precision, bf16_units):
            monkeypatch.setattr(module, "has_bf16_units", lambda device: present)
        monkeypatch.setattr(precision, "products_time", lambda: ratio)
        precision.cache_file().unlink(missing_ok=True)

    return set_units


@pytest.fixture
def precisions(monkeypatch):
    """Return the list of the dtypes in which the first layer of each forward pass computes."""
    seen = []
    forward = nn.Linear.forward

    def noted(self, x):
        y = forward(self, x)
        seen.append(y.dtype)
        return y

    monkeypatch.setattr(nn.Linear, "forward", noted)
    return seen


def auto(**changes) -> Config:
    return check(plain_config(trainer__precision="auto", trainer__max_steps=4, **changes))


def printed(capsys) -> list[str]:
    """Return the printed lines about the precision."""
    return [line for line in unwrapped(capsys.readouterr().out).splitlines() if line.startswith("Precision:")]


# ---------------------------------------------------------------------------------------------------- the selection
@pytest.mark.parametrize(
    ("device", "present", "ratio", "selected", "reason"),
    [
        ("cpu", True, 0.4, "bf16", "autocast; the processor has bf16 instructions"),
        ("cpu", True, 1.05, "bf16", "autocast; the processor has bf16 instructions"),
        (
            "cpu",
            True,
            1.6,
            "fp32",
            "bf16 takes 1.60× the time of fp32 in matrix products and convolutions on this processor",
        ),
        ("cpu", False, 0.4, "fp32", "the processor has no bf16 instructions"),
        ("cuda", True, 1.6, "bf16", "autocast; the GPU has bf16 instructions"),
        ("cuda", False, 0.4, "fp32", "the GPU has no bf16 instructions"),
        ("mps", True, 0.4, "fp32", "trainer.precision=auto does not use bf16 on mps"),
    ],
)
def test_the_units_select_the_precision_and_the_measurement_can_only_reject_bf16(
    units, device, present, ratio, selected, reason
):
    units(present, ratio)
    assert choose_precision(auto(), torch.device(device))[:2] == (selected, reason)


@pytest.mark.parametrize(
    ("machine", "onednn", "instructions", "expected"),
    [
        ("x86_64", True, True, True),
        ("x86_64", True, False, False),  # AVX-512 without its bf16 instructions
        ("AMD64", True, False, False),
        ("x86_64", False, False, False),
        ("aarch64", True, False, True),
        ("arm64", False, False, False),
    ],
)
def test_the_flags_of_a_processor(monkeypatch, machine, onednn, instructions, expected):
    monkeypatch.setattr("platform.machine", lambda: machine)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: onednn)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: instructions)
    assert has_bf16_units(CPU) is expected
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert not has_bf16_units(CPU)


def test_a_gpu_that_emulates_bf16_has_no_units(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: including_emulation)
    assert not has_bf16_units(torch.device("cuda"))
    assert bf16_is_emulated(torch.device("cuda"))
    assert not bf16_is_emulated(torch.device("mps"))


# ------------------------------------------------------------------------------------------------ the measurements
def test_the_measurement_of_products_is_short_and_draws_no_random_numbers(monkeypatch):
    monkeypatch.undo()
    state, start = torch.get_rng_state(), time.process_time()
    assert precision.products_time() > 0
    assert time.process_time() - start < 5
    assert torch.equal(torch.get_rng_state(), state)


def has_units(monkeypatch, ratio: float) -> None:
    monkeypatch.setattr(precision, "_is_small", lambda network: False)
    monkeypatch.setattr(precision, "has_bf16_units", lambda device: True)
    monkeypatch.setattr(precision, "products_time", lambda: ratio)


@pytest.mark.parametrize("content", [None, "", "{", "[1]", '{"other": 0.3}', "\udc80"])
def test_the_time_is_measured_once_and_a_damaged_cache_is_replaced(monkeypatch, content):
    has_units(monkeypatch, 1.5)
    file = precision.cache_file()
    if content is not None:
        file.parent.mkdir(parents=True)
        file.write_bytes(content.encode(errors="surrogateescape"))
    assert choose_precision(auto(), CPU).precision == "fp32"
    monkeypatch.setattr(precision, "products_time", lambda: pytest.fail("the time must be stored"))
    assert choose_precision(auto(), CPU).precision == "fp32"
    stored = json.loads(file.read_text())
    assert list(stored.values())[-1] == 1.5
    assert ("other" in stored) == ("other" in (content or ""))


@pytest.mark.parametrize("value", ["fast", None, 0.0, -1.0, float("nan"), float("inf"), True])
def test_a_damaged_time_is_measured_again(monkeypatch, value):
    has_units(monkeypatch, 0.4)
    choose_precision(auto(), CPU)
    (key,) = json.loads(precision.cache_file().read_text())
    assert key == f"{cpu_name()}, torch {torch.__version__}, 1 thread", "tests/conftest.py writes the same key"
    precision.cache_file().write_text(json.dumps({key: value}))
    choose_precision(auto(), CPU)
    assert json.loads(precision.cache_file().read_text()) == {key: 0.4}


def test_the_comparison_of_times_excludes_waiting():
    def run(name: str) -> None:
        if name == "fp32":
            sum(range(300_000))
        else:
            time.sleep(0.2)  # as if another program were running

    threads = torch.get_num_threads()
    assert precision._ratio(run, rounds=3) < 0.5
    assert torch.get_num_threads() == threads


def test_without_a_writable_cache_the_time_is_measured(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    has_units(monkeypatch, 1.5)
    assert choose_precision(auto(), CPU).precision == "fp32"


def test_a_run_uses_bf16_if_it_does_not_fit_into_its_budget_in_fp32(monkeypatch, tmp_path):
    has_units(monkeypatch, 1.5)
    config = resolve_precision(auto(), CPU)
    assert config.trainer.precision == "fp32"
    other = in_bf16(config, CPU)
    assert other is not None
    assert (other.trainer.precision, other.given_precision) == ("bf16", "auto")
    assert fingerprint(other) == fingerprint(config)
    assert in_bf16(check(with_settings()), CPU) is None, "the user selected fp32"
    (tmp_path / precision.NAME).write_text('{"precision": "fp32", "device": "a CPU"}')
    assert in_bf16(config, CPU, tmp_path) is None, "a run keeps its precision"


@pytest.mark.slow
def test_the_predicted_memory_depends_on_the_selected_precision():
    config = configured(["model=vit_digits", "data=digits", "trainer.precision=auto"])
    predict = Predictor(config, None, 0, CPU)
    low, high = (predict(config.with_precision(one)).peak_bytes for one in ("bf16", "fp32"))
    assert low != high


@pytest.mark.slow
def test_with_a_memory_budget_the_timed_step_has_half_of_the_images(monkeypatch):
    sizes = []
    monkeypatch.setattr(precision, "_ratio", lambda run, rounds: 1.0)
    monkeypatch.setattr(precision, "_seconds", lambda run, precision: 1e-3)  # many images fit into the time

    class Step(precision.TrainingStep):
        def __init__(self, network, methods, spec):
            super().__init__(network, methods, spec)
            sizes.append(spec.batch_size)

    monkeypatch.setattr(precision, "TrainingStep", Step)
    for memory in ("null", "4GB"):
        network_time(configured(["model=vit_digits", "data=digits", "data.batch_size=6", f"memory={memory}"]))
    assert sizes == [2, 6, 2, 3]


def test_nothing_is_measured_without_units(monkeypatch):
    monkeypatch.setattr(precision, "has_bf16_units", lambda device: False)
    assert choose_precision(auto(), CPU).precision == "fp32"


def network(name: str, method: str = "full") -> Config:
    return configured((f"model={name}", f"method={method}", "data=cifar100", "data.batch_size=4"))


@pytest.mark.parametrize(
    ("name", "timed"), [("proxyless_mobile", True), ("mobilenetv2", True), ("resnet18", False), ("deit_tiny", False)]
)
def test_networks_with_depthwise_convolutions_are_timed(units, monkeypatch, name, timed):
    units(True)
    monkeypatch.setattr(precision, "network_time", lambda config: 1.5)
    choice = choose_precision(network(name), CPU)
    assert choice.precision == ("fp32" if timed else "bf16")
    assert ("bf16 takes 1.50× the time of fp32 in a step of this network" in choice.reason) is timed


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "small"), [("vit_digits", True), ("deit_tiny", False), ("resnet18", False), ("mobilenetv2", False)]
)
def test_small_networks_with_narrow_layers_train_in_fp32_on_a_processor(monkeypatch, name, small):
    """Nothing is measured, so the precision of the default job is the same on every processor with bf16 units."""
    monkeypatch.setattr(precision, "has_bf16_units", lambda device: True)
    if not small:
        for measurement in ("products_time", "network_time"):
            monkeypatch.setattr(precision, measurement, lambda *_: 0.5)
    choice = choose_precision(network(name), CPU)
    assert choice.precision == ("fp32" if small else "bf16")
    if small:
        assert choice.reason == "on a CPU, bf16 is slower for small networks with narrow layers"
        assert choice.other == "To train in bf16, set trainer.precision=bf16."
        assert not precision.cache_file().exists()
    assert choose_precision(network(name), torch.device("cuda")).precision == "bf16"


@pytest.mark.parametrize(
    ("layers", "small"),
    [
        (nn.Linear(219, 219), True),  # 109.5 products per value
        (nn.Linear(220, 220), False),
        (nn.Conv1d(24, 24, 9), True),  # 108
        (nn.Conv2d(24, 24, 3), True),  # 108
        (nn.Conv2d(25, 25, 3), False),
        (nn.Conv2d(50, 50, 3, groups=2), False),  # 112.5
        (nn.Sequential(*(nn.Linear(200, 200, bias=False) for _ in range(24))), True),
        (nn.Sequential(*(nn.Linear(200, 200, bias=False) for _ in range(25))), False),  # a million parameters
        (nn.Identity(), False),
    ],
)
def test_the_size_of_small_networks(layers, small):
    assert precision._is_small(layers) is small


def test_the_time_of_a_network_is_stored_for_its_methods(units, monkeypatch):
    units(True)
    measured = []
    monkeypatch.setattr(precision, "network_time", lambda config: measured.append(list(config.method)) or 1.5)
    for _ in range(2):
        choose_precision(network("proxyless_mobile"), CPU)
    choose_precision(network("proxyless_mobile", "head"), CPU)
    assert measured == [["full"], ["head"]]


def test_the_time_of_a_network_leaves_the_random_state(monkeypatch):
    monkeypatch.undo()
    config = check(plain_config(trainer__precision="auto", data__batch_size=4))
    state = torch.get_rng_state()
    assert precision.network_time(config) > 0
    assert torch.equal(torch.get_rng_state(), state)


# ------------------------------------------------------------------------------------------------ the configuration
def test_the_identity_contains_auto_and_the_run_the_selected_precision(units):
    config = check(with_settings(trainer__precision="auto"))
    units(True)
    selected = resolve_precision(config, CPU)
    assert (selected.trainer.precision, selected.given_precision) == ("bf16", "auto")
    assert selected.model_dump(mode="json") == config.model_dump(mode="json")
    assert selected.changed() == config.changed()
    assert fingerprint(selected) == fingerprint(config)
    assert fingerprint(config) != fingerprint(check(with_settings(trainer__precision="bf16")))
    copy = selected.model_copy(update={"seed": 1})
    assert (copy.trainer.precision, copy.given_precision) == ("bf16", "auto")


def test_auto_is_the_default_and_a_recipe_names_its_own_precision(units):
    assert configured(()).trainer.precision == "auto"
    assert check(with_settings(trainer={"epochs": 2})).trainer.precision == "auto"
    for recipe, named in (("lbp_wht/cifar10", "fp32"), ("alast/cifar100", "bf16")):
        config = configured(("model=deit_tiny", "data=cifar100", f"recipe={recipe}"))
        units(named == "fp32")
        assert resolve_precision(config, CPU).trainer.precision == named


# ------------------------------------------------------------------------------------------------------------- runs
@pytest.mark.parametrize("selected", ["bf16", "fp32"])
def test_a_run_prints_and_records_its_precision(tmp_path, units, precisions, without_cost, capsys, selected):
    units(selected == "bf16")
    results = run(auto(), tmp_path)
    assert set(precisions) == {torch.bfloat16 if selected == "bf16" else torch.float32}
    (line,) = printed(capsys)
    assert line.startswith(f"Precision: {selected} (")
    assert ("To train in fp32, set trainer.precision=fp32." in line) == (selected == "bf16")
    assert json.loads((tmp_path / "results.json").read_text()) == results
    assert results["environment"]["precision"] == selected
    assert results["config"]["trainer"]["precision"] == "auto"
    assert config_file.read_config(tmp_path).trainer.precision == "auto"
    assert json.loads((tmp_path / precision.NAME).read_text())["precision"] == selected


def test_a_given_precision_is_used_and_printed(tmp_path, units, precisions, without_cost, capsys):
    units(True)
    results = run(check(plain_config(trainer__max_steps=4)), tmp_path)
    assert set(precisions) == {torch.float32}
    assert printed(capsys) == ["Precision: fp32 (trainer.precision=fp32)."]
    assert results["environment"]["precision"] == "fp32"
    assert not (tmp_path / precision.NAME).exists()


@pytest.mark.slow
@pytest.mark.parametrize("first", [True, False])
def test_a_resumed_run_keeps_its_precision_on_another_machine(
    tmp_path, units, precisions, without_cost, capsys, caplog, first
):
    config, selected = auto(), "bf16" if first else "fp32"
    units(first)
    interrupted_at(2, config, tmp_path)
    (line,) = printed(capsys)
    units(not first)
    caplog.clear()
    results = run(config, tmp_path)
    (line,) = printed(capsys)
    assert line.startswith(f"Precision: {selected} (the run started in {selected} on ")
    assert set(precisions) == {torch.bfloat16 if first else torch.float32}
    assert results["environment"]["precision"] == selected
    assert ("PyTorch emulates them" in caplog.text) is first


@pytest.mark.slow
def test_a_new_run_in_the_same_folder_selects_its_precision_again(tmp_path, units, without_cost):
    units(True)
    run(auto(), tmp_path / "run")
    units(False)
    results = run(auto(resume="never"), tmp_path / "run")
    assert results["environment"]["precision"] == "fp32"
    assert json.loads((tmp_path / "run" / precision.NAME).read_text())["precision"] == "fp32"
    assert json.loads((tmp_path / "run.1" / precision.NAME).read_text())["precision"] == "bf16"


@pytest.mark.parametrize("content", ["", "[]", '{"precision": "auto", "device": "a"}', '{"precision": "bf16"}'])
def test_a_damaged_record_of_the_precision_is_rejected(tmp_path, units, content):
    units(True)
    (tmp_path / precision.NAME).write_text(content)
    with pytest.raises(UserError, match=r"precision\.json is damaged\. Remove this file"):
        run(auto(), tmp_path)


@pytest.mark.slow
def test_an_evaluation_uses_the_precision_of_the_run(tmp_path, units, precisions, without_cost, capsys):
    units(True)
    results = run(auto(), tmp_path)
    units(False)
    capsys.readouterr()
    for changes, dtype in (({}, torch.bfloat16), ({"trainer__precision": "fp32"}, torch.float32)):
        precisions.clear()
        found = evaluate(tmp_path, check({**auto().model_dump(mode="json"), **_changed(changes)}))
        assert set(precisions) == {dtype}
        assert found["accuracy"] == pytest.approx(results["data"]["accuracy"], abs=0.02)
    assert [line[:15] for line in printed(capsys)] == ["Precision: bf16", "Precision: fp32"]


def _changed(changes):
    return {"trainer": plain_config(trainer__max_steps=4, **{"trainer__precision": "auto", **changes})["trainer"]}


@pytest.mark.slow
def test_runs_with_different_precisions_are_not_averaged(tmp_path, units, without_cost):
    for name, seed, present in (("a", 1, True), ("b", 2, False), ("c", 3, True)):
        units(present)
        run(auto(seed=seed), tmp_path / "runs" / name)
    found = collect(tmp_path / "runs")
    assert [[one.folder for one in group] for group in groups(found.runs)] == [["a", "c"], ["b"]]
    assert varying(found.runs) == ["trainer.precision"]


#: Runs PLAIN in FOLDER. Only the first process has bf16 units. Each process writes its precision next to the folder.
SCRIPT = """
import json, os, sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from efficient_ft.config import check
from efficient_ft.training import precision, run
rank = os.environ.get("LOCAL_RANK", "0")
precision.has_bf16_units = lambda device: rank == "0"
precision.products_time = lambda: 0.5
precision._is_small = lambda network: False
def noted(*arguments, resolve=run.resolve_precision):
    config = resolve(*arguments)
    Path(sys.argv[2] + "_" + rank).write_text(config.trainer.precision)
    return config
run.resolve_precision = noted
run.run(check(json.loads(sys.argv[1])), Path(sys.argv[2]))
"""


@pytest.mark.slow
def test_the_first_process_selects_the_precision_of_all_processes(tmp_path):
    """Lightning starts the second process, which would select fp32, after the first process has selected bf16."""
    plain = plain_config(trainer__precision="auto", trainer__max_steps=2, trainer__devices=2, resume="never")
    (tmp_path / "script.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, str(tmp_path / "script.py"), json.dumps(plain), str(tmp_path / "run")],
        capture_output=True, text=True, timeout=600, env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert [(tmp_path / f"run_{rank}").read_text() for rank in range(2)] == ["bf16", "bf16"]
    assert done.stdout.count("Precision:") == 1


def test_connected_processes_receive_the_choice_of_the_first(monkeypatch, units):
    units(False)
    sent = []
    monkeypatch.setattr(precision, "is_connected", lambda: True)
    monkeypatch.setattr(precision, "rank", lambda: 1)
    monkeypatch.setattr(
        precision, "from_first", lambda value: sent.append(value) or precision.Choice("bf16", "as in the first")
    )
    config = check(with_settings(trainer__precision="auto"))
    assert resolve_precision(config, CPU, Path("missing")).trainer.precision == "bf16"
    assert sent == [None]
