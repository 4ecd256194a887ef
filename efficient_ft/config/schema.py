"""The schema of a run's configuration, checked by pydantic. A leaf: imports nothing else of this package."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, SerializerFunctionWrapHandler, model_serializer

Fraction = Annotated[float, Field(ge=0, lt=1)]
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Count = Annotated[int, Field(ge=1)]
Name = Annotated[str, Field(min_length=1)]


class Section(BaseModel):
    # Unknown keys are mistakes; NaN and infinity are never a sensible setting; a key `model_…` is nobody's.
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, frozen=True, protected_namespaces=())


class ModelConfig(Section):
    """Which network, from which weights. `name` is a timm name or ``vit_digits``."""

    name: Name
    pretrained: bool = True
    #: Local file (.safetensors, .pth, .npz) in timm's names; used instead of a download.
    weights: str | None = None
    #: Pixels, or [height, width]; null: what the weights were trained at.
    image_size: Count | tuple[Count, Count] | None = None
    drop_path_rate: Fraction = 0.0
    drop_rate: Fraction = 0.0
    #: BatchNorm keeps its running statistics while training.
    frozen_bn: bool = True
    #: A classifier made anew (for other classes, or without weights) starts at zero.
    zero_head: bool = False
    #: The default selection of recipes that bring none of their own.
    select: Name = "last_stage"
    #: Normalisation per channel; null: what the weights were trained with.
    mean: tuple[float, ...] | None = None
    std: tuple[Positive, ...] | None = None
    #: Further arguments of ``timm.create_model``.
    kwargs: dict[str, Any] = Field(default_factory=dict)


class AugmentConfig(Section):
    """The transform of training images. ``resize_crop``: resize, crop a part of `scale` of the area and bring it to
    the input size, flip. ``none``: what evaluation does."""

    name: Literal["resize_crop", "none"] = "resize_crop"
    #: To what before the crop: the ``input`` size, so many pixels square, or ``none``: the crop is of the whole image.
    resize: Count | Literal["input", "none"] = "input"
    scale: tuple[Annotated[float, Field(gt=0, le=1)], Annotated[float, Field(gt=0, le=1)]] = (0.08, 1.0)
    flip: bool = True


class DataConfig(Section):
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
    num_workers: Annotated[int, Field(ge=0)] = 2
    #: Share of the training images held out for validation: stratified, seeded.
    val_fraction: Fraction = 0.1
    #: The split on which the best epoch is chosen; ``test`` only to repeat a paper that did so.
    select_best_on: Literal["val", "test"] = "val"
    on_corrupt: Literal["stop", "skip"] = "stop"
    augment: AugmentConfig = AugmentConfig()
    download: bool = True


class OptimConfig(Section):
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
    warmup_start_factor: Annotated[float, Field(ge=0, le=1)] = 0.001
    #: The cosine ends at this share of `lr`.
    min_lr_ratio: Annotated[float, Field(ge=0, le=1)] = 0.01
    label_smoothing: Fraction = 0.0
    #: Largest norm of the whole gradient; null: no clipping.
    grad_clip_norm: Positive | None = None
    #: The classifier's learning rate is `lr` times this.
    head_lr_mult: Positive = 1.0
    #: Learning rate times this per layer from the head down; null: one rate for all.
    layer_decay: Annotated[float, Field(gt=0, le=1)] | None = None


class TrainerConfig(Section):
    """How long, on what, in which precision."""

    epochs: Count
    #: Optimizer steps after which to stop; -1: after `epochs`.
    max_steps: Annotated[int, Field(ge=-1)] = -1
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    accelerator: Literal["auto", "cpu", "gpu", "mps"] = "auto"
    devices: Count | Literal["auto"] = 1
    #: Batches per optimizer step.
    grad_accum_steps: Count = 1
    #: Convolutional maps in channels-last memory; null: on a CPU, where they run faster so.
    channels_last: bool | None = None
    progress: bool = True
    deterministic: bool = False
    #: Evaluate on this many batches only; null: on all.
    limit_eval_batches: Count | None = None


class LoggerConfig(Section):
    """Where metrics go besides the CSV and JSONL files that are always written."""

    name: Literal["none", "wandb", "tensorboard"] = "none"
    project: Name = "efficient-ft"
    #: null: the run folder's parent.
    group: str | None = None
    mode: Literal["online", "offline"] = "online"


class CostConfig(Section):
    """The cost report. `compare_full`: probe plain full fine-tuning as well; `steps`: timed steps of each."""

    compare_full: bool = True
    steps: Count = 5


class StepStatsConfig(Section):
    """What is recorded of a run besides its metrics, in step_stats.jsonl: see `record.step_stats`."""

    #: The first optimizer step and every n-th after it; 0: none.
    interval: Annotated[int, Field(ge=0)] = 0


class Config(Section):
    """One run. `method` maps a method's name to its settings (the constructor's arguments, and `select`)."""

    model: ModelConfig
    #: With `tasks` the first of these.
    data: DataConfig
    #: Several data sets by name, trained on in turn, one optimizer step each in this order, with a classifier for each.
    tasks: dict[Name, DataConfig] = Field(default_factory=dict)
    method: Annotated[dict[Name, dict[str, Any]], Field(min_length=1)]
    optim: OptimConfig
    trainer: TrainerConfig
    logger: LoggerConfig = LoggerConfig()
    cost: CostConfig = CostConfig()
    step_stats: StepStatsConfig = StepStatsConfig()
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 233
    #: auto: the same command continues an interrupted run and shows a finished one; never: start anew.
    resume: Literal["auto", "never"] = "auto"
    #: A run folder to evaluate, without training.
    evaluate: str | None = None
    #: Print the cost and stop.
    cost_only: bool = False
    #: glibc keeps freed memory (Linux).
    keep_freed_memory: bool = True

    @model_serializer(mode="wrap")
    def _written_out(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """A run of one data set says nothing of tasks."""
        plain: dict[str, Any] = write(self)
        if not self.tasks:
            plain.pop("tasks", None)
        return plain
