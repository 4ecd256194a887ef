"""Tests of the one-line summary of a method and of its details."""

from __future__ import annotations

import copy
from functools import cache

import pytest
import timm
from torch import nn

from efficient_ft.core.context import set_context
from efficient_ft.core.errors import UserError
from efficient_ft.core.format import format_number
from efficient_ft.methods import METHODS, Applied, Reason, Skipped, apply_methods
from efficient_ft.methods.summary import left, ranges, within

NETWORKS = ("deit_tiny_patch16_224", "swin_tiny_patch4_window7_224", "mobilenetv2_100")


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (["blocks.9", "blocks.10", "blocks.11", "norm", "head"], "blocks 9–11, norm and head"),
        (["blocks.3", "blocks.7", "blocks.11", "head"], "blocks 3, 7, 11 and head"),
        (["layer1", "layer2", "layer4", "fc"], "layer1–2, 4 and fc"),
        (["layers.2.blocks.5", "layers.3"], "layers.2.blocks.5 and layers.3"),
        (["layer1.0", "layer1.1"], "layer1.0–1"),
        (["fc"], "fc"),
        (["a", "b", "c", "d"], "a, b, c and d"),
        (["a", "b", "c", "d", "e", "f"], "a, b, c and 3 more"),
        ([], "nothing"),
    ],
)
def test_names_become_ranges(names: list[str], text: str) -> None:
    assert ranges(names) == text


def test_layers_are_named_by_the_blocks_that_hold_them() -> None:
    assert within(f"blocks.{i}.{part}" for i in range(12) for part in ("attn.qkv", "mlp.fc1")) == "blocks 0–11"
    assert within(["stages.0.blocks.1.fc", "stages.1.blocks.0.fc", "head.fc"]) == "stages 0–1 and head.fc"


def test_parts_left_are_counted_with_their_reasons() -> None:
    stem, head = Skipped(Reason.STEM), Skipped(Reason.HEAD)
    assert left({}, "exact") == ""
    assert left({"conv": stem, "conv2": stem, "fc": head}, "exact") == "; head and stem exact"
    few = {"a": Skipped(Reason.OTHER, "exact, as published"), "b": Skipped(Reason.OTHER, "exact, as published")}
    assert left(few, "exact") == "; a and b exact (as published)"
    costs = {f"x.{i}": Skipped(Reason.EXACT_IS_CHEAPER, f"exact is cheaper: {i} MFLOPs") for i in range(9)}
    assert left({"fc": head, **costs}, "exact") == "; head and 9 layers exact (exact is cheaper)"


@cache
def _network(name: str) -> nn.Module:
    return timm.create_model(name, num_classes=10)


@pytest.mark.parametrize(
    "network", [NETWORKS[0], *(pytest.param(network, marks=pytest.mark.slow) for network in NETWORKS[1:])]
)
@pytest.mark.parametrize("name", list(METHODS))
def test_every_method_reports_in_a_line(name: str, network: str) -> None:
    model = copy.deepcopy(_network(network))
    settings = {"blocks": [-2, -1]} if name == "blocks" else {}
    try:
        with set_context("short_reports", True):
            report = METHODS[name](**settings).apply(model)
    except UserError:
        assert network != NETWORKS[0] or name == "tinytl", "every other method fits a ViT"
        return
    line, details = str(report), report.details()
    assert line.startswith(f"{name}: ")
    assert report.summary
    assert "\n" not in line
    assert len(line) <= 200, "two lines of 100 columns"
    assert details.startswith(f"{line}\n")
    shown = [text[4:].partition(":")[0] for text in details.splitlines() if text.startswith(("  + ", "  - "))]
    assert shown == [*report.touched, *report.skipped], "the full list"


def test_the_example_of_the_issue() -> None:
    model = timm.create_model("deit_tiny_patch16_224", num_classes=10)
    reports = apply_methods(model, [METHODS["last_stage"](), METHODS["lbp_dct"](), METHODS["back_razor"]()])
    assert [str(report) for report in reports] == [
        "last_stage: blocks 9–11, norm and head train: 1.34 M of 5.53 M parameters",
        "lbp_dct: 48 layers in blocks 0–11 low-rank; head and stem exact",
        "back_razor: 72 layers in blocks 0–11 packed; patch_embed, norm and head dense (as published)",
    ]


@pytest.mark.parametrize(
    ("names", "line"),
    [
        (("full", "lora"), "full: everything trains, except 5.52 M parameters that lora freezes"),
        (("last_stage", "lora"), "last_stage: blocks 9–11, norm and head train, except 1.33 M parameters that lora"),
        (("full", "moe"), "full: everything trains: 18.8 M parameters"),
        (("full", "low_bit"), "full: everything trains: 5.53 M parameters"),
    ],
)
def test_the_lines_of_a_stack_add_up_to_the_trained_parameters(names: tuple[str, ...], line: str) -> None:
    model = timm.create_model("deit_tiny_patch16_224", num_classes=10)
    methods = [METHODS[name]() for name in names]
    lines = [str(report) for report in apply_methods(model, methods)]
    assert lines[0].startswith(line)
    train = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert f"{format_number(train)} " in " ".join(lines)
    assert lines == [str(method.applied) for method in methods], "results.json has the same lines"


def test_the_line_of_bsr_moe_counts_its_experts() -> None:
    model = timm.create_model("deit_tiny_patch16_224", num_classes=10)
    line = str(METHODS["bsr_moe"]().apply(model))
    train, every = (sum(p.numel() for p in model.parameters() if p.requires_grad or all_) for all_ in (False, True))
    assert f": {format_number(train)} of {format_number(every)} parameters;" in line


def test_a_method_of_another_package_has_a_line_too() -> None:
    touched = tuple(f"blocks.{i}.mlp" for i in range(4))
    report = Applied("theirs", touched, {"head": Skipped(Reason.HEAD)}, notes=("every second one",))
    assert str(report) == "theirs: 4 parts changed (blocks 0–3); head unchanged; every second one"
    assert report.details().splitlines()[1:3] == ["  + blocks.0.mlp", "  + blocks.1.mlp"]
    nothing = Applied("theirs", (), none_needed="the rank is full")
    assert str(nothing) == "theirs: the model is not changed (the rank is full)"
