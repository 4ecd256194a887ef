"""scripts/bench.py: recipes, statistics, what it writes, and its one clear message for a mistake."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "bench.py"


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bench", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["bench"] = module  # its dataclass looks itself up
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("text", "name", "overrides"),
    [
        ("lbp_wht", "lbp_wht", ["method=[lbp_wht]"]),
        ("lbp_wht:order=2", "lbp_wht:order=2", ["method=[lbp_wht]", "method.lbp_wht.order=2"]),
        ("exact=last_stage", "exact", ["method=[last_stage]"]),
        (
            "low=lbp_wht_published:order=2,padding=zero",
            "low",
            ["method=[lbp_wht_published]", "method.lbp_wht.order=2", "method.lbp_wht.padding=zero"],
        ),
        (
            "blocks:blocks=[3,7]+lbp_dct:order=6",
            "blocks:blocks=[3,7]+lbp_dct:order=6",
            ["method=[blocks,lbp_dct]", "method.blocks.blocks=[3,7]", "method.lbp_dct.order=6"],
        ),
        (
            "half=full:trainer.precision=bf16+mesa:derive=false",
            "half",
            ["method=[full,mesa]", "trainer.precision=bf16", "method.mesa.recompute_inputs=false"],
        ),
    ],
)
def test_a_recipe_is_what_the_command_line_would_be_given(
    bench: ModuleType, text: str, name: str, overrides: list[str]
):
    recipe = bench.parse_recipe(text)
    assert recipe.name == name
    assert list(recipe.overrides) == overrides


def test_rounds_alternate_and_ratios_pair_the_same_round(bench: ModuleType):
    calls: list[str] = []
    times = {"a": iter([9.0, 4.0, 8.0, 6.0]), "b": iter([9.0, 2.0, 2.0, 6.0])}

    def call(name: str) -> Any:
        def timed() -> dict[str, float]:
            calls.append(name)
            return {"step": next(times[name])}

        return timed

    seconds = bench.alternate({"a": call("a"), "b": call("b")}, rounds=3, warmup=1)
    assert calls == ["a", "b"] * 4
    assert seconds == {"a": {"step": [4.0, 8.0, 6.0]}, "b": {"step": [2.0, 2.0, 6.0]}}
    out = bench.summary(seconds, "a")
    assert out["a"]["step"]["times_faster"]["median"] == 1
    assert out["b"]["step"]["times_faster"]["median"] == 2  # of 2, 4 and 1; the ratio of medians would be 3
    assert (out["b"]["step"]["q1"], out["b"]["step"]["q3"]) == (2, 4)
    assert out["b"]["step"]["times_faster"]["mean"] == pytest.approx(7 / 3)
    assert out["b"]["step"]["seconds"] == [2.0, 2.0, 6.0]


def run(bench: ModuleType, *arguments: str) -> int:
    # The allocator of the process that tests is left alone.
    return bench.main([*arguments, "--system-allocator"])


def test_steps_of_two_recipes(bench: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = tmp_path / "step.json"
    arguments = "step --model vit_digits --batch 2 --classes 10 --rounds 2 --warmup 1 exact=last_stage"
    assert run(bench, *arguments.split(), "low=lbp_wht:order=2,select=last_stage", "--json", str(file)) == 0
    report = json.loads(file.read_text(encoding="utf-8"))
    assert (report["kind"], report["baseline"], report["command"].split()[1]) == ("step", "exact", "step")
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
    assert "allocator: system" in printed


def test_without_a_frozen_prefix_there_is_none_to_report(bench: ModuleType, tmp_path: Path):
    file = tmp_path / "step.json"
    arguments = "step --model vit_digits --batch 2 --rounds 1 --warmup 1 full --json"
    assert run(bench, *arguments.split(), str(file)) == 0
    measured = json.loads(file.read_text(encoding="utf-8"))["recipes"]["full"]["measured"]
    assert set(measured) == {"forward", "backward", "update", "step"}


@pytest.mark.parametrize("layout", ["tokens", "map"])
def test_one_layer(bench: ModuleType, tmp_path: Path, layout: str):
    file = tmp_path / "layer.json"
    arguments = f"layer --shape 24,40,7x7 --batch 2 --orders 2,15 --rounds 2 --warmup 1 --layout {layout} --json"
    assert run(bench, *arguments.split(), str(file)) == 0
    (shape,) = json.loads(file.read_text(encoding="utf-8"))["shapes"].values()
    assert set(shape) == {"exact", "order 2", "order 15"}
    assert shape["exact"]["backward_flops"] == 4 * 24 * 40 * 49
    # 3 coefficients of 49 positions: 2·49·3 per projected channel, in and out of g_y, x's gradient back; the bias
    projections = 2 * 49 * 3 * (24 + 40)
    assert shape["order 2"]["backward_flops"] == pytest.approx(4 * 24 * 40 * 3 + projections, rel=0.02)


def test_gradients_beside_the_exact_ones(bench: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = tmp_path / "gradient.json"
    arguments = "gradient --model vit_digits --batch 2 --batches 2 --classes 10 full half=full:trainer.precision=bf16"
    others = ["off=back_razor:sparsity=0,values=input", "last=last_stage+mesa", "razor=back_razor:sparsity=0.9", "swat"]
    assert run(bench, *arguments.split(), *others, "--json", str(file)) == 0
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


def test_the_framework_against_a_bare_loop(bench: ModuleType, tmp_path: Path):
    file = tmp_path / "loop.json"
    arguments = "loop --job default --batch 4 --rounds 3 --warmup 1 --json"
    assert run(bench, *arguments.split(), str(file)) == 0
    job = json.loads(file.read_text(encoding="utf-8"))["jobs"]["default"]
    assert len(job["bare loop"]["seconds"]) == len(job["framework"]["seconds"]) == 3
    overhead = sorted(
        100 * (f / b - 1) for b, f in zip(job["bare loop"]["seconds"], job["framework"]["seconds"], strict=True)
    )
    assert job["overhead_percent"]["median"] == pytest.approx(overhead[1])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("step --model vit_digits lbp_wth", "Did you mean"),
        ("step --model vit_digits lbp_wht:order=99", "order"),
        ("step --model vit_digits lbp_wht:", "[NAME=]METHOD"),
        ("step --model vit_digits lbp_wht:order", "KEY=VALUE"),
        ("step --model vit_digits full full", "same name"),
        ("step --model no_such_model", "no_such_model"),
        ("gradient --model vit_digits --images no_such_folder full", "no_such_folder"),
        ("gradient --model vit_digits --weights no_such_file.pth full", "no_such_file"),
        ("gradient --model vit_digits --classes 10 head", "no parameter of the blocks"),
        ("layer --shape 3,4", "--shape=3,4"),
        ("layer --orders 2,16", "--orders=16"),
        ("layer --device warp", "--device=warp"),
        ("loop --job no_such_model", "no_such_model"),
    ],
)
def test_a_mistake_is_one_message_and_status_2(
    bench: ModuleType, capsys: pytest.CaptureFixture[str], arguments: str, message: str
):
    assert run(bench, *arguments.split()) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error


@pytest.mark.parametrize("arguments", ["", "walk", "step --rounds 0", "step --dtype fp8", "layer --batch many"])
def test_argparse_mistakes_exit_with_2(bench: ModuleType, arguments: str):
    with pytest.raises(SystemExit) as stopped:
        bench.main(arguments.split())
    assert stopped.value.code == 2
