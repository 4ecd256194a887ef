"""Count memory and multiply-adds for the rows of published tables, with the cost formulas of the papers.

The ``rule`` section of a table file defines how the costs of the rows are counted:

.. code-block:: yaml

    rule:
      unit: MiB                                     # unit of the memory column, MiB or MB (10⁶ bytes)
      rule: bsr                                     # tinytl (default) or bsr, see `efficient_ft.cost.published`
      rows:                                         # settings of matching rows; later entries take precedence
        - {when: {method: back_razor}, value_bytes: 4, note: each value has 4 bytes}

The columns of a row determine which parameters are trained and which tokens are dropped. Models stay on the meta
device, and nothing is executed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Literal

import timm
import torch
from pydantic import BaseModel, ConfigDict
from timm.models._efficientnet_blocks import InvertedResidual
from torch import nn
from torch.nn import functional as F

import efficient_ft.models.proxyless  # noqa: F401  registers proxyless_mobile
from efficient_ft.config.schema import ModelConfig
from efficient_ft.cost.published import (
    BSR_RULE,
    DENSE,
    MESA,
    TINYTL_RULE,
    Keeping,
    Operation,
    Rule,
    back_razor,
    operations,
    parameter_bytes,
    peak,
)
from efficient_ft.methods import BSR, BitFit, Blocks, EViT, HeadOnly, NormLast, RepNet, TinyTL
from efficient_ft.methods.selection.static import Selection
from efficient_ft.models.factory import random_model
from efficient_ft.models.marks import marks_of
from efficient_ft.models.trained import make_trainable
from efficient_ft.models.view import is_norm, view
from efficient_ft.papers.published import Row, Table, rule_of

_RULES = {"tinytl": TINYTL_RULE, "bsr": BSR_RULE}
_UNITS = {"MiB": 2**20, "MB": 10**6}

#: Methods for the values of the column ``method`` in Back Razor's tables. For other values, the full model is trained.
_SELECTIONS: dict[str, tuple[Callable[[], Any], ...]] = {
    "head": (HeadOnly,),
    "bitfit": (BitFit,),
    "norm_last": (NormLast,),
    "tinytl": (TinyTL,),
    "tinytl_320": (TinyTL,),
    "rep_net": (RepNet,),
}

#: timm's names of models that have other names in the papers. `_OTHERS` contains models that timm does not provide.
_TIMM = {
    "vit_b": "vit_base_patch16_224",
    "vit_b_moe": "vit_base_patch16_224",
    "deit_s": "deit_small_patch16_224",
    "proxylessnas_mobile": "proxyless_mobile",
}

_OTHERS = {
    "bert_base": ModelConfig(name="bert_base", pretrained=False, max_length=512),
    "deeplabv3_mobilenet": ModelConfig(
        name="deeplabv3",
        encoder="mobilenetv2_100",
        pretrained=False,
        image_size=224,
        kwargs={"encoder_output_stride": 16, "decoder_atrous_rates": [6, 12, 18]},
    ),
}


@dataclass(frozen=True)
class CountSettings:
    """Settings of a paper's cost formula for one row.

    Attributes:
        architecture: name of the model in the paper or in timm.
        batch_size: number of images.
        methods: methods that are applied to the model, in order.
        keeping: format in which activations are stored.
        rule: cost formula of the paper.
        unit: number of bytes in the paper's unit of memory, for example 2**20 for MiB.
        input_size: (height, width) of images in pixels, or (tokens,) for texts.
        classes: number of classes.
        frozen_norms: True if the scales and shifts of normalization layers are frozen, as in Back Razor's CNNs.
        parameters: rule for counting parameters: 4 bytes per trained and 1 byte per frozen parameter (``rule``), 1 byte
            per parameter (``one_byte``), or 0 bytes (``none``).
        by_name: indices of blocks. The published count assumes that the parameters from `named_alike` are also trained.
        experts: if True, count only the multiply-adds of linear layers and the patch embedding, without the
            feed-forward networks or experts of blocks 3, 7 and 11 (BSR, Table 6).
        dense: regular expression for the names of operations whose activations stay dense.
        left_out: regular expression for the names of operations that are not counted.
        note: note on the count of the row.
    """

    architecture: str
    batch_size: int
    methods: tuple[Callable[[], Any], ...] = ()
    keeping: Keeping = DENSE
    rule: Rule = TINYTL_RULE
    unit: int = 2**20
    input_size: tuple[int, ...] = (224, 224)
    classes: int = 100
    frozen_norms: bool = False
    parameters: Literal["rule", "one_byte", "none"] = "rule"
    by_name: tuple[int, ...] = ()
    experts: bool = False
    dense: str | None = None
    left_out: str | None = None
    note: str = ""

    def model(self) -> nn.Module:
        """Build the model on the meta device."""
        return _model(self.architecture, self.classes, self.methods, self.frozen_norms)


@dataclass(frozen=True)
class CountedCost:
    """The cost of a row according to the paper's formula.

    `memory` is in the unit of the row's `CountSettings`. `as_listed` is the memory if only the listed blocks were
    unfrozen. `gmacs` is the number of multiply-adds of the forward pass of a batch, divided by 10⁹.
    """

    memory: float
    gmacs: float
    as_listed: float


class _Settings(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    unit: Literal["MiB", "MB"] = "MiB"
    rule: Literal["tinytl", "bsr"] = "tinytl"
    batch: int | None = None
    classes: int = 100
    parameters: Literal["rule", "one_byte", "none"] = "rule"
    value_bytes: int = 2
    norm_bytes: int | None = None
    with_tinytl: bool = False
    frozen_norms: bool = False
    named_alike: bool = False
    experts: bool = False
    drop_at: tuple[int, ...] | None = None
    keep_rate: float | None = None
    tokens: int | None = None
    dense: str | None = None
    left_out: str | None = None
    note: str = ""
    sparsity: float | None = None
    underived: bool = False


def count_settings(table: Table, row: Row) -> CountSettings | None:
    """Return the settings of the paper's cost formula for `row`.

    Return None if the table has no formula, or if the published count of the row could not be derived.
    """
    held = rule_of(table.name, row)
    if held is None:
        return None
    settings, columns = _Settings.model_validate(held), row.columns
    batch_size, unit = batch_and_unit(table, row)
    if settings.underived:
        return None
    blocks = _indices(columns, "trainable_blocks") or (3, 7, 11)
    method = columns["method"]
    methods = _SELECTIONS.get(method, ())
    if method == "bsr":
        drop_at = settings.drop_at
        if drop_at is None:
            drop_at = _indices(columns, "drop_blocks") or (3, 6, 9)
        keep_rate = settings.keep_rate or round(1 - float(columns.get("drop_rate") or 0.5), 6)
        methods = _bsr(blocks, drop_at, keep_rate, settings.experts)
    keeping = DENSE
    if method == "mesa":
        keeping = MESA
    elif method.startswith("back_razor"):
        keeping = back_razor(settings.sparsity or float(columns["sparsity"]), settings.value_bytes, settings.norm_bytes)
    return CountSettings(
        architecture=columns["model"],
        batch_size=batch_size,
        methods=(TinyTL, *methods) if settings.with_tinytl else methods,
        keeping=keeping,
        rule=_RULES[settings.rule],
        unit=unit,
        input_size=(int(columns.get("resolution") or 224),) * 2 if settings.tokens is None else (settings.tokens,),
        classes=settings.classes,
        frozen_norms=settings.frozen_norms,
        parameters=settings.parameters,
        by_name=blocks if settings.named_alike else (),
        experts=settings.experts,
        dense=settings.dense,
        left_out=settings.left_out,
        note=settings.note,
    )


def batch_and_unit(table: Table, row: Row) -> tuple[int, int]:
    """Return the batch size for the memory column of the row, and the number of bytes in the unit of the column."""
    settings = _Settings.model_validate(rule_of(table.name, row) or {})
    return settings.batch or int(row.columns.get("batch") or 1), _UNITS[settings.unit]


def _indices(columns: Mapping[str, str], key: str) -> tuple[int, ...]:
    return tuple(map(int, columns.get(key, "").split()))


@cache  # Equal arguments must return identical objects, which are cache keys of `_operations`.
def _bsr(
    blocks: tuple[int, ...], drop_at: tuple[int, ...], keep_rate: float, experts: bool
) -> tuple[Callable[[], Any], ...]:
    if experts:
        return (partial(EViT, list(drop_at), keep_rate, fuse=False),)
    if not drop_at:
        return (partial(Blocks, list(blocks)),)
    return (partial(BSR, list(blocks), list(drop_at), keep_rate),)


def count_cost(of: CountSettings) -> CountedCost:
    """Return the cost of a row that has the settings `of`."""
    plain = _operations(of.architecture, of.classes, of.methods, of.frozen_norms, of.input_size, of.rule)
    memory = as_listed = _memory(of, plain.operations, plain.parameter_bytes)
    if alike := named_alike(plain.frozen, of.by_name):
        model = of.model()
        for name in alike:
            model.get_parameter(name).requires_grad_(True)
        # The published count of linear and normalization layers depends on which of their weights are trained. However,
        # attention and GELU before the first listed block receive no gradient, even if parameters of earlier blocks are
        # trained.
        trains = operations(model, of.input_size, rule=of.rule, blocks=_blocks(of.architecture, of.input_size))
        both = [t if t.kind in ("product", "norm") else p for t, p in zip(trains, plain.operations, strict=True)]
        memory = _memory(of, both, parameter_bytes(model))
    macs = plain.operations
    if of.experts:
        left_out = tuple(f"blocks.{block}.mlp." for block in (3, 7, 11))
        macs = tuple(op for op in macs if op.kind == "product" and not op.name.startswith(left_out))
    return CountedCost(memory, sum(op.macs for op in macs) * of.batch_size / 1e9, as_listed)


def named_alike(names: Iterable[str], blocks: Sequence[int]) -> list[str]:
    """Return the names of the parameters that Table 7 of BSR assigns to `blocks`.

    These names contain the index of one of the blocks at any position. For example, index 2 matches block 2, and
    ``norm2`` and ``fc2`` of each block. Index 0 matches blocks 0 and 10.
    """
    return [name for name in names if any(str(block) in name for block in blocks)]


def _memory(of: CountSettings, running: Sequence[Operation], of_parameters: int) -> float:
    if of.parameters != "rule":
        of_parameters = sum(p.numel() for p in of.model().parameters()) if of.parameters == "one_byte" else 0
    counted = [op for op in running if not (of.left_out and re.search(of.left_out, op.name))]
    return (peak(counted, of.keeping, of.dense)[0] * of.batch_size + of_parameters) / of.unit


def _model(architecture: str, classes: int, methods: Sequence[Callable[[], Any]], frozen_norms: bool) -> nn.Module:
    model = network(architecture, classes)
    with torch.device("meta"):
        for method in (make() for make in methods):
            if isinstance(method, Selection) and marks_of(model):
                # The papers compare selections on a network with frozen TinyTL modules.
                chosen = method.chosen(view(model))
                make_trainable(model, {name: name in chosen for name, _ in model.named_parameters()})
            else:
                method.apply(model)
        if frozen_norms:
            for module in filter(is_norm, model.modules()):
                module.requires_grad_(False)
    return model


@dataclass(frozen=True)
class _Operations:
    """The operations on one image, the number of bytes of the parameters, and the names of frozen parameters."""

    operations: tuple[Operation, ...]
    parameter_bytes: int
    frozen: tuple[str, ...]


@cache  # Rows that differ only in the storage of activations share their operations.
def _operations(
    architecture: str,
    classes: int,
    methods: tuple[Callable[[], Any], ...],
    frozen_norms: bool,
    size: tuple[int, ...],
    rule: Rule,
) -> _Operations:
    model = _model(architecture, classes, methods, frozen_norms)
    frozen = tuple(name for name, p in model.named_parameters() if not p.requires_grad)
    found = operations(model, size, rule=rule, blocks=_blocks(architecture, size))
    return _Operations(tuple(found), parameter_bytes(model), frozen)


@cache
def _blocks(architecture: str, size: tuple[int, ...]) -> tuple[str, ...]:
    return view(_model(architecture, 2, (), False), size).blocks


def network(architecture: str, classes: int) -> nn.Module:
    """Build a network on the meta device. `architecture` is the name of the network in a paper or in timm."""
    if architecture not in _OTHERS:
        with torch.device("meta"):
            return timm.create_model(_TIMM.get(architecture, architecture), num_classes=classes)
    with torch.device("meta") if architecture == "bert_base" else nullcontext():
        model = random_model(_OTHERS[architecture], classes).to("meta")
    if architecture == "deeplabv3_mobilenet":
        _pad_before_widening(model)
    return model


def _pad_before_widening(model: nn.Module) -> None:
    """Pad the feature map before the 1×1 convolution that widens the map, instead of in the next depthwise convolution.

    With this padding, the widened maps and the number of bytes saved for them are larger. Back Razor's Table 5
    corresponds to this variant of MobileNetV2. The paper reports 8280 MiB of packable activations, and this variant has
    8318 MiB. With padding in the depthwise convolution, the count is 7528 MiB.
    """

    def pad(by: int) -> Any:
        return lambda _, args: (F.pad(args[0], (by, by, by, by)), *args[1:])

    for module in model.modules():
        if isinstance(module, InvertedResidual):
            depthwise: Any = module.conv_dw
            (by, _), depthwise.padding = depthwise.padding, (0, 0)
            module.conv_pw.register_forward_pre_hook(pad(by))
