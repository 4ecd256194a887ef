"""Tests of ``efficient-ft bench``: the output, the files and the errors of each kind of bench."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import timm
from torch import Tensor

from efficient_ft.bench import step
from efficient_ft.bench.recipes import Recipe
from efficient_ft.cli.commands import bench, run_command
from efficient_ft.cli.commands import gradient_error as gradient_error_command
from efficient_ft.config import check
from efficient_ft.core.format import format_bytes
from efficient_ft.cost.step import StepSpec
from efficient_ft.methods.compiled import compile_blocks
from efficient_ft.models.prefix import FrozenPrefix
from tests.conftest import REPOSITORY, unwrapped
from tests.data.pictures import save
from tests.training.runs import plain_config


def run(*arguments: str) -> None:
    # Keep the allocator of the test process, and skip the slow processes of recipes, which have their own test.
    apart = ["--memory-steps", "0"] if arguments[0] == "step" and "--memory-steps" not in arguments else []
    run_command("bench", [*arguments, "--allocator", "system", *apart])


@pytest.mark.slow
def test_steps_of_two_recipes(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = tmp_path / "step.json"
    arguments = "step --model vit_digits --batch 2 --classes 10 --rounds 2 --warmup 1 exact=last_stage"
    run(*arguments.split(), "low=lbp_wht:order=2,select=last_stage", "--json", str(file))
    report = json.loads(file.read_text(encoding="utf-8"))
    assert (report["kind"], report["baseline"], report["command"].split()[:3]) == (
        "step",
        "exact",
        ["efficient-ft", "bench", "step"],
    )
    assert "--json step.json" in report["command"], "no folder of this machine"
    assert {"torch", "threads", "device", "allocator", "date"} <= set(report["environment"])
    exact, low = report["recipes"]["exact"], report["recipes"]["low"]
    assert low["executed"]["backward_flops"] < exact["executed"]["backward_flops"] / 2
    assert "LBPWHT(bases='l1', order=2" in " ".join(low["methods"])
    for recipe in (exact, low):
        parts = recipe["measured"]
        assert set(parts) == {"prefix inference", "prefix", "forward", "backward", "update", "step"}
        assert all(len(part["seconds"]) == 2 for part in parts.values())
        for number in range(2):
            seconds = {name: part["seconds"][number] for name, part in parts.items()}
            assert seconds["prefix"] < seconds["forward"]
            assert seconds["step"] == pytest.approx(seconds["forward"] + seconds["backward"] + seconds["update"])
    printed = capsys.readouterr().out
    assert "baseline: exact" in printed
    assert re.search(r"allocator:[\s#]+system", printed), "the line of a long processor name is wrapped"


@pytest.mark.slow
def test_steps_of_a_compiled_recipe(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(step, "compile_blocks", partial(compile_blocks, backend="eager"))
    file = tmp_path / "step.json"
    arguments = "step --model vit_digits --batch 2 --classes 10 --rounds 1 --warmup 1 head"
    compiled_full = "compiled=full:trainer.compile=true"
    run(*arguments.split(), "full", compiled_full, "alone=bitfit:trainer.compile=true", "--json", str(file))
    recipes = json.loads(file.read_text(encoding="utf-8"))["recipes"]
    full, compiled = recipes["full"], recipes["compiled"]
    assert compiled["executed"] == full["executed"]
    assert not {"compiled", "first_step_seconds"} & set(full)
    printed = unwrapped(capsys.readouterr().out)
    assert f"compiled: {compiled['compiled']} The first step took" in printed
    assert "blocks compiled" in compiled["compiled"]
    assert compiled["first_step_seconds"] > compiled["measured"]["step"]["median"]
    baselines = {name: of["baseline"] for name, of in recipes.items()}
    assert baselines == {"head": "head", "full": "head", "compiled": "full", "alone": "head"}
    assert "baseline: head and full" in printed


@pytest.mark.slow
def test_a_step_is_compiled_after_batch_norm_is_frozen(monkeypatch: pytest.MonkeyPatch):
    graphs: list[object] = []

    def backend(graph: object, inputs: object) -> object:
        graphs.append(graph)
        return graph

    levit = timm.create_model("levit_128s", num_classes=10, embed_dim=(16, 16, 16), depth=(1, 1, 1))  # BatchNorm1d
    monkeypatch.setattr(step, "step_spec", lambda config: StepSpec(2, (224, 224)))
    monkeypatch.setattr(step, "compile_blocks", partial(compile_blocks, backend=backend, tell=pytest.fail))
    step.build_step(check(plain_config(trainer__compile=True)), levit, "cpu", 2, channels_last=False)()
    assert graphs


def test_one_layer_in_both_precisions(tmp_path: Path):
    file = tmp_path / "layer.json"
    arguments = "layer --shape 24,40,7x7 --batch 2 --orders 2 --rounds 1 --warmup 1 --dtype both --json"
    run(*arguments.split(), str(file))
    report = json.loads(file.read_text(encoding="utf-8"))
    assert (report["dtype"], list(report["shapes"])) == ("fp32 and bf16", ["24,40,7x7", "24,40,7x7 bf16"])


@pytest.mark.slow
def test_steps_in_both_precisions_in_the_memory_format_of_runs(tmp_path: Path):
    file = tmp_path / "step.json"
    arguments = "step --model efficientnet_lite0 --size 64 --batch 2 --classes 10 --rounds 1 --warmup 1 --dtype both"
    timm = "timm=head:trainer.channels_last=false"
    run(*arguments.split(), "head", timm, "--memory-steps", "1", "--json", str(file))
    report = json.loads(file.read_text(encoding="utf-8"))
    baselines = {name: (of["dtype"], of["baseline"]) for name, of in report["recipes"].items()}
    assert baselines == {
        "head": ("fp32", "head"),
        "timm": ("fp32", "head"),
        "head bf16": ("bf16", "head bf16"),
        "timm bf16": ("bf16", "head bf16"),
    }
    saved = {name: of["executed"]["saved_bytes"] for name, of in report["recipes"].items()}
    assert saved["head bf16"] < saved["head"]
    assert all("process" in of for of in report["recipes"].values())


@pytest.mark.slow
def test_steps_with_the_prefix_in_another_form_or_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """The prefix is computed once for the recipe `read`, and in every step for the recipe `form`."""
    features = FrozenPrefix.features
    computed: list[str] = []

    def counted(prefix: FrozenPrefix, images: Tensor) -> Tensor:
        if len(images) == 3:  # two images are used to find the prefix
            computed.append(str(prefix.form))
        return features(prefix, images)

    monkeypatch.setattr(FrozenPrefix, "features", counted)
    file = tmp_path / "step.json"
    arguments = "step --model efficientnet_lite0 --size 64 --batch 3 --classes 10 --rounds 2 --warmup 1 head"
    recipes = ["form=head:trainer.prefix=folded", "read=head:trainer.cache_features=on"]
    run(*arguments.split(), *recipes, "--json", str(file))
    assert computed.count("folded") >= 3
    assert computed.count("fp32") == 1
    report = json.loads(file.read_text(encoding="utf-8"))
    assert all(len(report["recipes"][name]["measured"]["step"]["seconds"]) == 2 for name in ("head", "form", "read"))
    assert "With trainer.cache_features=on, FLOPs and bytes are counted for a step" in capsys.readouterr().out


@pytest.mark.slow
def test_memory_of_recipes_each_in_its_own_process(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = tmp_path / "memory.json"
    arguments = "memory --model vit_digits --batch 256 --classes 10 --steps 2 --warmup 1 --threads 1"
    run(*arguments.split(), "full", "head", "--json", str(file))
    report = json.loads(file.read_text(encoding="utf-8"))
    assert (report["kind"], report["batch"], list(report["recipes"])) == ("memory", 256, ["full", "head"])
    for record in report["recipes"].values():
        executed, memory = record["executed"], record["memory"]
        assert 2**27 < record["interpreter_bytes"] < record["with_model_bytes"]
        assert memory["growth_bytes"] == memory["peak_bytes"] - memory["before_bytes"]
        assert (memory["first_step"], memory["steps"], len(record["seconds"])) == (1, 2, 3)
        above = executed["peak_bytes"] - executed["model_bytes"] - executed["batch_bytes"]
        assert record["counted_bytes"] == above + record["optimizer_bytes"]
    full, head = report["recipes"].values()
    # AdamW stores two moments per parameter and a step counter per tensor.
    assert full["optimizer_bytes"] == pytest.approx(8 * full["trainable_parameters"], rel=1e-3)
    # The process must grow by 0.9 to 3 times the counted bytes (hundreds of MiB).
    assert 0.9 * full["counted_bytes"] < full["memory"]["growth_bytes"] < 3 * full["counted_bytes"]
    assert head["memory"]["growth_bytes"] < 0.7 * full["memory"]["growth_bytes"]
    printed = capsys.readouterr().out
    assert all(format_bytes(record["memory"]["growth_bytes"]) in printed for record in (full, head))
    assert "used" in " ".join(printed.split())
    assert "# Measuring the memory of the recipe full" in printed


def test_a_process_that_compiles_kernels_is_measured_again(monkeypatch: pytest.MonkeyPatch):
    answers = iter([{"compiler_used": True, "run": 1}, {"compiler_used": False, "run": 2}, {"failure": "killed"}])
    monkeypatch.setattr(bench, "_in_own_process", lambda recipe, options: next(answers))
    assert bench._memory_of(Recipe("low_bit", ()), {})["run"] == 2
    assert bench._memory_of(Recipe("low_bit", ()), {}) == {"failure": "killed"}


@pytest.mark.slow
def test_memory_excludes_the_compiler_if_no_kernel_is_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "kernels"))
    file = tmp_path / "memory.json"
    run(
        *["memory", "--model", "vit_digits", "--batch", "4", "--steps", "1", "--warmup", "1", "low_bit"],
        "--json",
        str(file),
    )
    assert json.loads(file.read_text())["recipes"]["low_bit"]["compiler_used"] is False
    assert list((tmp_path / "kernels").rglob("*.nbi"))


@pytest.mark.slow
def test_memory_with_an_optimizer_without_state(tmp_path: Path):
    file = tmp_path / "memory.json"
    arguments = "memory --model vit_digits --batch 2 --optim sgd --steps 1 --warmup 0 full:optim.momentum=0 --json"
    run(*arguments.split(), str(file))
    (record,) = json.loads(file.read_text(encoding="utf-8"))["recipes"].values()
    assert (record["optimizer"], record["optimizer_bytes"], len(record["seconds"])) == ("sgd", 0, 1)
    assert record["memory"]["growth_bytes"] > 0.5 * record["counted_bytes"]


@pytest.mark.slow
def test_steps_come_with_the_memory_of_each_recipes_process(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = tmp_path / "step.json"
    arguments = "step --model vit_digits --batch 128 --rounds 1 --warmup 1 --memory-steps 1 full --json"
    run(*arguments.split(), str(file))
    process = json.loads(file.read_text(encoding="utf-8"))["recipes"]["full"]["process"]
    assert (process["memory"]["steps"], process["memory"]["first_step"]) == (1, 2)
    assert process["memory"]["growth_bytes"] > 0.9 * process["counted_bytes"] > 2**26
    assert format_bytes(process["memory"]["growth_bytes"]) in capsys.readouterr().out


def test_a_recipe_whose_process_is_killed_is_a_row_without_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    from efficient_ft.cli.hydra import processes

    start = processes.run
    killed = [sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"]
    monkeypatch.setattr(processes, "run", lambda command, environment: start(killed, environment))
    monkeypatch.chdir(tmp_path)
    run("memory", "--model", "vit_digits", "full", "--json", "out.json")
    report = json.loads(Path("out.json").read_text(encoding="utf-8"))
    assert report["recipes"] == {"full": {"failure": "killed by SIGKILL, probably for lack of memory"}}
    assert "note: full: killed by SIGKILL" in capsys.readouterr().out


@pytest.mark.slow
def test_steps_of_an_optimizer_inside_the_backward_pass(tmp_path: Path):
    file = tmp_path / "step.json"
    settings = "optim.in_backward=true,optim.grad_clip_norm=null"
    arguments = (
        f"step --model vit_digits --batch 2 --rounds 2 --warmup 1 full inside=blocks:blocks=[1],{settings} --json"
    )
    run(*arguments.split(), str(file))
    recipes = json.loads(file.read_text(encoding="utf-8"))["recipes"]
    assert len(recipes["inside"]["measured"]["step"]["seconds"]) == 2
    assert recipes["inside"]["trainable_parameters"] < recipes["full"]["trainable_parameters"]
    # The search for the frozen prefix has its own backward pass, and must finish its update.
    assert "prefix" in recipes["inside"]["measured"]


def test_without_a_frozen_prefix_there_is_none_to_report(tmp_path: Path):
    file = tmp_path / "step.json"
    arguments = "step --model vit_digits --batch 2 --rounds 1 --warmup 1 full --json"
    run(*arguments.split(), str(file))
    measured = json.loads(file.read_text(encoding="utf-8"))["recipes"]["full"]["measured"]
    assert set(measured) == {"forward", "backward", "update", "step"}


@pytest.mark.slow
def test_overhead(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = tmp_path / "overhead.json"
    arguments = "overhead full compact lora --rounds 2 --warmup 1 --json"
    run(*arguments.split(), str(file))
    report = json.loads(file.read_text(encoding="utf-8"))
    assert (report["kind"], report["baseline"], report["dtype"], report["batch"]) == ("overhead", "full", "fp32", 1)
    assert report["environment"]["threads"] == 1
    for record in report["recipes"].values():
        parts = {name: part["seconds"] for name, part in record["measured"].items()}
        assert parts["both"] == pytest.approx(
            [sum(pair) for pair in zip(parts["forward"], parts["backward"], strict=True)]
        )
    calls = {name: record["python_calls"] for name, record in report["recipes"].items()}
    assert 12 * 50 < calls["full"] < calls["lora"] < calls["compact"]
    printed = " ".join(capsys.readouterr().out.split())
    assert "12 blocks, width 48, 5 tokens, batch 1, fp32, 2 rounds; baseline: full" in printed


@pytest.mark.parametrize("layout", ["tokens", "map"])
def test_one_layer(tmp_path: Path, capsys: pytest.CaptureFixture[str], layout: str):
    file = tmp_path / "layer.json"
    arguments = f"layer --shape 24,40,7x7 --batch 2 --orders 2,15 --rounds 2 --warmup 1 --layout {layout}"
    run(*arguments.split(), "--profile", "--json", str(file))
    report = json.loads(file.read_text(encoding="utf-8"))
    (shape,) = report["shapes"].values()
    assert set(shape) == {"exact", "order 2", "order 15"}
    assert shape["exact"]["backward_flops"] == 4 * 24 * 40 * 49
    # Each channel's projection from 49 positions to 3 coefficients costs 2·49·3 FLOPs.
    projections = 2 * 49 * 3 * (24 + 40)
    assert shape["order 2"]["backward_flops"] == pytest.approx(4 * 24 * 40 * 3 + projections, rel=0.02)
    for of in shape.values():
        profile = of["profile"]
        assert profile["rate"] == pytest.approx(2 * of["backward_flops"] / profile["products"])
        assert min(profile[part] for part in ("products", "passes", "calls")) > 0
    assert shape["order 2"]["profile"]["calls"] > shape["exact"]["profile"]["calls"]
    assert f"reaches {shape['exact']['profile']['peak_flops_per_second'] / 1e9:.0f} GFLOP/s" in capsys.readouterr().out


@pytest.mark.slow
def test_gradients_compared_with_the_exact_ones(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = tmp_path / "gradient.json"
    arguments = "gradient --model vit_digits --batch 2 --batches 2 --classes 10 full half=full:trainer.precision=bf16"
    others = "off=back_razor:sparsity=0,value_dtype=same last=last_stage+mesa razor=back_razor:sparsity=0.9 swat"
    run(*arguments.split(), *others.split(), "--json", str(file))
    report = json.loads(file.read_text(encoding="utf-8"))
    assert (report["kind"], report["weights"], report["images"], report["size"]) == (
        "gradient",
        "random",
        "noise",
        [32, 32],
    )
    recipes = report["recipes"]
    cosines = {name: recipe["cosine"]["blocks"]["mean"] for name, recipe in recipes.items()}
    assert cosines["full"] == cosines["off"] == 1
    assert recipes["full"]["error"]["blocks"]["max"] == 0
    assert recipes["off"]["error"]["blocks"]["max"] < 1e-5
    assert cosines["swat"] < cosines["razor"] < 0.95 < 0.99 < cosines["last"] < 1
    assert cosines["razor"] < cosines["half"] < 1
    assert recipes["half"]["configuration"]["trainer"]["precision"] == "bf16"
    assert recipes["razor"]["configuration"]["method"]["back_razor"]["sparsity"] == 0.9
    assert recipes["razor"]["executed"]["saved_bytes"] < recipes["full"]["executed"]["saved_bytes"] / 2
    assert recipes["last"]["trainable_parameters"] < recipes["full"]["trainable_parameters"] / 2
    for recipe in recipes.values():
        assert {"blocks", "qkv", "proj", "fc1", "fc2", "norm1"} <= set(recipe["cosine"])
        cosine = recipe["cosine"]["blocks"]
        assert (cosine["min"], cosine["max"]) == (min(cosine["batches"]), max(cosine["batches"]))
        assert len(cosine["batches"]) == 2
    assert "relative error" in capsys.readouterr().out


def test_the_framework_against_a_bare_loop(tmp_path: Path):
    file = tmp_path / "loop.json"
    arguments = "loop --job default --batch 4 --rounds 3 --warmup 1 --json"
    run(*arguments.split(), str(file))
    job = json.loads(file.read_text(encoding="utf-8"))["jobs"]["default"]
    assert len(job["bare loop"]["seconds"]) == len(job["framework"]["seconds"]) == 3
    overhead = sorted(
        100 * (f / b - 1) for b, f in zip(job["bare loop"]["seconds"], job["framework"]["seconds"], strict=True)
    )
    assert job["overhead_percent"]["median"] == pytest.approx(overhead[1])
    shares = sorted(100 * d / f for d, f in zip(job["data wait"]["seconds"], job["framework"]["seconds"], strict=True))
    assert job["data_wait_percent"]["median"] == pytest.approx(shares[1])


def test_a_loop_that_reads_stored_features(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    for number in range(8):
        save(tmp_path / "images" / "train" / f"class{number % 2}" / f"{number}.jpg", number)
        save(tmp_path / "images" / "val" / f"class{number % 2}" / f"{number}.jpg", number + 8)
    monkeypatch.chdir(tmp_path)
    settings = ["method=head", "trainer.cache_features=on", "trainer.views=1"]
    arguments = ["loop", "--job", "default", "--images", "images", "--batch", "4", "--rounds", "4", "--warmup", "2"]
    run(*arguments, *(f"--set={setting}" for setting in settings), "--json", "loop.json")
    (job,) = json.loads(Path("loop.json").read_text(encoding="utf-8"))["jobs"].values()
    assert len(job["data wait"]["seconds"]) == len(job["framework"]["seconds"]) == 4
    printed = capsys.readouterr().out
    assert "data wait" in printed
    assert "bare loop" not in job
    assert "bare loop" not in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("step --model vit_digits lbp_wth", "Did you mean"),
        ("step --model vit_digits lbp_wht:order=99", "order"),
        ("step --model vit_digits lbp_wht:", "[NAME=]METHOD"),
        ("step --model vit_digits lbp_wht:order", "KEY=VALUE"),
        ("step --model vit_digits full full", "same name"),
        ("step --model no_such_model", "no_such_model"),
        ("memory --model no_such_model full", "no_such_model"),
        ("memory --model vit_digits --optim adam_w full", "optim"),
        ("memory --model vit_digits lbp_wth", "Did you mean"),
        ("memory --model vit_digits full full", "same name"),
        ("memory --model vit_digits full:trainer.precision=fp8", "trainer.precision"),
        ("gradient --model vit_digits --images no_such_folder full", "no_such_folder"),
        ("gradient --model vit_digits --weights no_such_file.pth full", "no_such_file"),
        ("gradient --model vit_digits --classes 10 head", "no parameter of the blocks"),
        ("layer --shape 3,4", "--shape must be of the form C_IN,C_OUT,HxW, got 3,4."),
        ("layer --orders 2,16", "--orders must be integers from 1 to 15, got 16."),
        ("layer --device warp", "--device must be cpu, cuda or cuda:N, got warp."),
        ("memory --model vit_digits --device meta full", "--device must be cpu, cuda or cuda:N, got meta."),
        ("step --model vit_digits --threads 100000 full", "on this machine, got 100000."),
        ("loop --job no_such_model", "no_such_model"),
        ("loop --job default --images no_such_folder", "no_such_folder"),
        ("loop --job default --set data.num_workers=2", "data.num_workers must be 0, got 2. Loading is timed in one"),
    ],
)
def test_a_mistake_is_one_message_and_status_2(capsys: pytest.CaptureFixture[str], arguments: str, message: str):
    with pytest.raises(SystemExit) as stopped:
        run(*arguments.split())
    assert stopped.value.code == 2
    error = unwrapped(capsys.readouterr().err)
    assert message in error
    assert "Traceback" not in error


@pytest.mark.parametrize("arguments", ["walk", "step --rounds 0", "step --dtype fp8", "layer --batch many", "memory"])
def test_argparse_mistakes_exit_with_2(arguments: str):
    with pytest.raises(SystemExit) as stopped:
        run_command("bench", arguments.split())
    assert stopped.value.code == 2


def test_help_answers_without_torch():
    """The commands parse their arguments before they import torch."""
    code = """
import importlib, sys
for name in ("bench", "report", "gradient_error"):
    try:
        importlib.import_module(f"efficient_ft.cli.commands.{name}").main(["--help"])
    except SystemExit as stopped:
        assert stopped.code == 0
heavy = {"torch", "timm", "lightning", "matplotlib", "numpy", "hydra"} & set(sys.modules)
assert not heavy, heavy
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for name in ("bench", "report", "gradient-error"):
        assert f"usage: efficient-ft {name}" in done.stdout


@pytest.mark.slow
def test_low_bit_optimizers_against_32_bits(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = tmp_path / "report.json"
    run_command("bench", ["optimizer", "--rounds", "2", "--warmup", "1", "--json", str(file)])
    report = json.loads(file.read_text(encoding="utf-8"))
    own = {bits: report["optimizers"][f"LowBitAdamW, {bits} bits"] for bits in (8, 4)}
    for case, found in own[8]["cases"].items():
        assert found["largest"] <= 1.25, case
        assert own[4]["cases"][case]["error"] >= 4 * found["error"], case
        assert own[4]["cases"][case]["largest"] <= (2.5 if "3,000" in case else 1.25), case
        assert 0.95 <= found["size"] <= 1.05, case
        assert 0.85 <= own[4]["cases"][case]["size"] <= 1.15, case
    assert own[8]["bytes_per_value"] == 1 + 5 / 128
    assert "LowBitAdamW, 8 bits" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words",
    [
        ["--sizes", "0"], ["--sizes", "9000"], ["--orders", "-1"], ["--batch", "0"], ["--batches", "x"],
        ["--profile-batches", "0"], ["--finetune-steps", "0"], ["--finetune-lr", "nan"], ["--finetune-lr", "a"],
        ["--seed", "-1"], ["--seed", "4294967296"],
    ],
)  # fmt: skip
def test_numbers_of_the_gradient_error_are_checked(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        gradient_error_command.main(["--weights", "none", "--images", "none", *words])
    assert left.value.code == 2
    assert f"argument {words[0]}: must be" in capsys.readouterr().err
