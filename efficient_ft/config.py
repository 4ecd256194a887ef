"""The configuration of a run: its schema, its check, and the one place that turns it into methods.

`check` turns a plain mapping (what Hydra composed) into a `Config`, or raises a `SettingError` that names the
first mistake by its full dotted key. `build_methods` makes the method objects. `run_folder` names the folder.

Importing this loads no torch: a mistaken command is refused at once.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import re
import typing
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, create_model

from efficient_ft.errors import SettingError, UserError, did_you_mean

if TYPE_CHECKING:
    from efficient_ft.methods.base import Method

Fraction = Annotated[float, Field(ge=0, lt=1)]
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Count = Annotated[int, Field(ge=1)]
Name = Annotated[str, Field(min_length=1)]


class _Part(BaseModel):
    # Unknown keys are mistakes; NaN and infinity are never a sensible setting; a key `model_…` is nobody's.
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, frozen=True, protected_namespaces=())


class ModelConfig(_Part):
    """Which network, from which weights. `name` is a timm name or ``vit_digits``."""

    name: Name
    pretrained: bool = True
    #: Local file (.safetensors, .pth, .npz) in timm's names; used instead of a download.
    weights: str | None = None
    #: Pixels, or [height, width]; null: what the weights were trained at.
    image_size: Count | tuple[Count, Count] | None = None
    drop_path: Fraction = 0.0
    drop: Fraction = 0.0
    #: BatchNorm keeps its running statistics while training.
    frozen_bn: bool = True
    #: The default selection of recipes that bring none of their own.
    select: Name = "last_stage"
    #: Normalisation per channel; null: what the weights were trained with.
    mean: tuple[float, ...] | None = None
    std: tuple[Positive, ...] | None = None
    #: Further arguments of ``timm.create_model``.
    kwargs: dict[str, Any] = Field(default_factory=dict)


class AugmentConfig(_Part):
    """The transform of training images. ``resize_crop``: resize to the input size, crop a part of `scale` of the
    area and bring it back to the input size, flip. ``none``: what evaluation does."""

    name: Literal["resize_crop", "none"] = "resize_crop"
    scale: tuple[Annotated[float, Field(gt=0, le=1)], Annotated[float, Field(gt=0, le=1)]] = (0.08, 1.0)
    flip: bool = True


class DataConfig(_Part):
    """Which images, how they are split, loaded and augmented."""

    name: Literal[
        "folder",
        "digits",
        "cifar10",
        "cifar100",
        "flowers102",
        "food101",
        "pets",
        "aircraft",
        "cars",
        "cub200",
    ]
    root: str = "./data"
    batch_size: Count = 64
    #: null: as `batch_size`.
    eval_batch_size: Count | None = None
    workers: Annotated[int, Field(ge=0)] = 2
    #: Share of the training images held out for validation: stratified, seeded.
    val_fraction: Fraction = 0.1
    #: The split on which the best epoch is chosen; ``test`` only to repeat a paper that did so.
    select_best_on: Literal["val", "test"] = "val"
    on_corrupt: Literal["stop", "skip"] = "stop"
    augment: AugmentConfig = AugmentConfig()
    download: bool = True


class OptimConfig(_Part):
    """Optimizer, learning-rate schedule, loss smoothing and clipping. Warm-up counts optimizer steps."""

    name: Literal["adamw", "sgd", "adam"]
    lr: Positive
    weight_decay: NotNegative = 0.0
    #: SGD only.
    momentum: Fraction = 0.9
    #: Adam and AdamW only.
    betas: tuple[Fraction, Fraction] = (0.9, 0.999)
    schedule: Literal["cosine", "constant"] = "cosine"
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    #: The warm-up starts at this share of `lr`.
    warmup_ratio: Annotated[float, Field(ge=0, le=1)] = 0.001
    #: The cosine ends at this share of `lr`.
    min_lr_ratio: Annotated[float, Field(ge=0, le=1)] = 0.01
    label_smoothing: Fraction = 0.0
    #: Largest norm of the whole gradient; null: no clipping.
    clip: Positive | None = None
    #: Learning rate times this per layer from the head down; null: one rate for all.
    layer_decay: Annotated[float, Field(gt=0, le=1)] | None = None


class TrainerConfig(_Part):
    """How long, on what, in which precision."""

    epochs: Count
    #: Optimizer steps after which to stop; -1: after `epochs`.
    max_steps: Annotated[int, Field(ge=-1)] = -1
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    accelerator: Literal["auto", "cpu", "gpu", "mps"] = "auto"
    devices: Count | Literal["auto"] = 1
    #: Batches per optimizer step.
    accumulate: Count = 1
    progress: bool = True
    deterministic: bool = False
    #: Evaluate on this many batches only; null: on all.
    limit_eval_batches: Count | None = None


class LoggerConfig(_Part):
    """Where metrics go besides the CSV and JSONL files that are always written."""

    name: Literal["none", "wandb", "tensorboard"] = "none"
    project: Name = "efficient-ft"
    #: null: the run folder's parent.
    group: str | None = None
    mode: Literal["online", "offline"] = "online"


class CostConfig(_Part):
    """The cost report. `compare_full`: probe plain full fine-tuning as well; `steps`: timed steps of each."""

    compare_full: bool = True
    steps: Count = 5


class Config(_Part):
    """One run. `method` maps a method's name to its settings (the constructor's arguments, and `select`)."""

    model: ModelConfig
    data: DataConfig
    method: Annotated[dict[Name, dict[str, Any]], Field(min_length=1)]
    optim: OptimConfig
    trainer: TrainerConfig
    logger: LoggerConfig = LoggerConfig()
    cost: CostConfig = CostConfig()
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 233
    #: auto: the same command continues an interrupted run and shows a finished one; never: start anew.
    resume: Literal["auto", "never"] = "auto"
    #: A run folder to evaluate, without training.
    evaluate: str | None = None
    #: Print the cost and stop.
    cost_only: bool = False
    #: glibc keeps freed memory (Linux).
    keep_allocator: bool = True
