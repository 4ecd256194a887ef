"""The pydantic schema of a run's configuration. This module imports only `config.sections`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import (
    Field,
    PrivateAttr,
    SerializerFunctionWrapHandler,
    model_serializer,
)

from efficient_ft.config.sections import (
    LARGEST_SIDE,
    BatchSize,
    Count,
    Fraction,
    LabelsConfig,
    MaskConfig,
    MixAlpha,
    MultiLabelConfig,
    Name,
    NotNegative,
    Place,
    Positive,
    Probability,
    Section,
    Side,
    TextConfig,
    TrainBatchSize,
)

__all__ = [
    "DATA_NAMES",
    "LARGEST_SIDE",
    "NETWORKS",
    "TASK_NAMES",
    "AugmentConfig",
    "Config",
    "CostConfig",
    "DataConfig",
    "LabelsConfig",
    "LoggerConfig",
    "MaskConfig",
    "ModelConfig",
    "OptimConfig",
    "Section",
    "StepStatsConfig",
    "TextConfig",
    "TrainerConfig",
    "flatten",
]

#: Family of each network (``model.name``) that another package adds with a kind. See `training.kinds.registry`.
NETWORKS: dict[str, str] = {}


class ModelConfig(Section):
    """The network and its weights.

    `name` is the name of a timm model, of a network of this package (e.g. ``vit_digits``), or of a segmentation network
    or text classifier. With ``library: transformers``, `name` is a model type or a repository on the Hub.
    """

    name: Name
    #: Library of an image classifier. If null, the library is timm.
    library: Literal["transformers"] | None = None
    pretrained: bool = True
    #: timm's name of the encoder, if `name` is a network of segmentation-models-pytorch.
    encoder: Name | None = None
    #: Local file (.safetensors, .pth, .npz) with timm's parameter names. If the value is null and `pretrained` is true,
    #: the weights are downloaded. For a network of `transformers`, the value may also be a folder.
    weights: Name | None = None
    #: Prefix of parameter names that selects a part of `weights` if several parts match, e.g. ``teacher.backbone``.
    weights_key: Name | Annotated[int, Field(ge=0)] | None = None
    #: Maximum number of tokens per text if `name` is a text classifier from `transformers`. Longer texts are truncated.
    max_length: Annotated[int, Field(ge=8)] | None = None
    #: Image size in pixels, or [height, width]. If null, the image size of the pretrained weights is used.
    image_size: Side | tuple[Side, Side] | None = None
    drop_path_rate: Fraction = 0.0
    drop_rate: Fraction = 0.0
    #: Freeze the running statistics of BatchNorm during training. With ``frozen_part``, only the statistics of layers
    #: whose weight and bias are not trained are frozen.
    frozen_bn: bool | Literal["frozen_part"] = True
    #: Initialize the parameters of a new classifier to zero.
    zero_head: bool = False
    #: Part of the network that is trained by methods whose YAML file does not set `select`.
    select: Name = "last_stage"
    #: Mean and standard deviation of each channel for normalization. If null, the values from pretraining are used.
    mean: tuple[float, ...] | None = None
    std: tuple[Positive, ...] | None = None
    #: Additional arguments of ``timm.create_model``, or of the configuration of `transformers`.
    kwargs: dict[str, Any] = Field(default_factory=dict)

    @property
    def family(self) -> str:
        """The family of the network: ``classification`` (images), ``segmentation``, ``text``, or one of `NETWORKS`."""
        if self.name in NETWORKS:
            return NETWORKS[self.name]
        if self.max_length is not None:
            return "text"
        segmenter = self.encoder is not None or self.name.startswith("segformer_")
        return "segmentation" if segmenter else "classification"


class AugmentConfig(Section):
    """The transform of training images.

    ``resize_crop`` resizes the image, crops a random part whose relative area is in the range `scale`, resizes this
    part to the input size, and flips half of the images. ``none`` applies the transform of evaluation. ``light``,
    ``medium`` and ``strong`` are presets (`config.augment.PRESETS`) of further transforms after ``resize_crop``. The
    settings from `policy` to `cutmix` override the preset, and are null to use the value of the preset.
    """

    name: Literal["resize_crop", "none", "light", "medium", "strong"] = "resize_crop"
    #: Size before the crop: ``input`` (the network's input size), a side length in pixels, or ``none`` (unchanged).
    resize: Count | Literal["input", "none"] = "input"
    scale: tuple[Annotated[float, Field(gt=0, le=1)], Annotated[float, Field(gt=0, le=1)]] = (0.08, 1.0)
    flip: bool = True
    #: Flip half of the images upside down.
    vertical_flip: bool = False
    #: Number of enabled transforms (crop and flips) to draw for each image. If null, all transforms are applied.
    pick: Count | None = None
    #: Policy of random transforms of torchvision, which follows the crop and the flips.
    policy: Literal["none", "randaugment", "trivialaugment", "autoaugment"] | None = None
    #: Number of transforms of RandAugment for each image, and their magnitude from 0 to 30.
    num_ops: Annotated[int, Field(ge=1, le=14)] = 2
    magnitude: Annotated[int, Field(ge=0, le=30)] = 9
    #: Strength of the color jitter: brightness, contrast and saturation are multiplied by a factor in the range
    #: [1 - strength, 1 + strength].
    color_jitter: Probability | None = None
    #: Probability of erasing a random rectangle of an image.
    erase_prob: Probability | None = None
    #: Parameter alpha of the Beta distribution for MixUp and for CutMix. With 0, images are not mixed in this way. If
    #: both are positive, each batch is mixed in one of the two ways, with equal probability.
    mixup: MixAlpha | None = None
    cutmix: MixAlpha | None = None
    #: Probability of mixing a batch with MixUp or CutMix.
    mix_prob: Probability = 1.0


#: Names of the data sets in this package.
DATA_NAMES = (
    "folder", "labels", "digits", "cifar10", "cifar100", "flowers102", "food101", "pets", "aircraft", "cars", "cub200",
    "mask_folder", "camvid", "cityscapes", "voc2012_aug", "text_folder", "rte",
)  # fmt: skip


class DataConfig(Section):
    """A data set of images or texts, with its splits, loading and augmentation."""

    #: One of `DATA_NAMES`, or the name of a data set that another package registers with a kind of task.
    name: Annotated[Name, Field(json_schema_extra={"enum": [*DATA_NAMES]})]
    root: Name = "./data"
    #: Follow links to targets outside of `root` in a user's folder. If false, such links are rejected.
    follow_links: bool = False
    #: One or more folders for each split of a user's data set, relative to `root`. The direct subfolders are the
    #: classes. With data=labels, the values of the split column. If null, the splits are recognized by name.
    splits: dict[Literal["train", "val", "test"], Place | Annotated[list[Place], Field(min_length=1)]] | None = None
    #: Gray values that map to black and white in images with more than 8 bits. If null, the values are 0 and 65535.
    value_range: tuple[float, float] | None = None
    #: Maximum number of pixels of an image file. Larger images are rejected.
    max_pixels: Count = 178_956_970
    #: Number of samples per batch. With ``auto``, a run selects the largest batch size that is predicted to fit into
    #: `memory` or, without this budget, into the available memory. See `training.memory.batch_size`.
    batch_size: TrainBatchSize = 64
    #: Number of samples per optimizer step over all processes. `trainer.grad_accum_steps` is then the quotient of this
    #: number and the batch size. If null, `trainer.grad_accum_steps` determines the number of samples.
    effective_batch_size: Annotated[int, Field(ge=1, le=2**20)] | None = None
    #: True in config.yaml of a run that selected `batch_size`. Commands reject this value.
    batch_size_selected: bool = False
    #: Batch size of evaluation. If null, `batch_size` is used.
    eval_batch_size: BatchSize | None = None
    num_workers: Annotated[int, Field(ge=0, le=256)] = 2
    #: Fraction of the training images that is held out for validation (stratified and seeded).
    val_fraction: Fraction = 0.1
    #: Split for selecting the best epoch. Use ``test`` only to reproduce a paper that selected on the test split.
    select_best_on: Literal["val", "test"] = "val"
    #: With select_best_on=test, also train on the official validation images (flowers102, aircraft).
    train_on_val: bool = True
    on_corrupt: Literal["stop", "skip"] = "stop"
    #: How often each class is drawn in an epoch: as often as it occurs (shuffle), each class equally often (balanced),
    #: or in proportion to the square root of its number of training samples (sqrt). See `data.samplers`.
    sampler: Literal["shuffle", "balanced", "sqrt"] = "shuffle"
    augment: AugmentConfig = AugmentConfig()
    #: Settings of a segmentation data set, or null for a data set without masks.
    masks: MaskConfig | None = None
    #: Settings of a text data set, or null for a data set of images.
    text: TextConfig | None = None
    #: Settings of a label file, or null for a data set without a label file.
    labels: LabelsConfig | None = None
    download: bool = True
    #: Keep decoded and resized images on disk for later epochs and runs. With ``auto``, images are kept if the disk has
    #: enough space.
    keep_decoded: Literal["off", "auto", "on"] = "auto"
    decoded_folder: Name = "outputs/decoded"
    #: Maximum size of the decoded images on disk, in bytes or with a unit.
    decoded_limit: str | int | float = "4GB"
    #: True with `trainer.patience`, which requires a validation split.
    _stops_early: bool = PrivateAttr(default=False)

    @property
    def automatic(self) -> bool:
        """True if the batch size is ``auto``, or was ``auto`` before the run selected a batch size."""
        return self.batch_size_selected or not isinstance(self.batch_size, int)


class OptimConfig(Section):
    """Settings of the optimizer and its state, the learning rate schedule, label smoothing and gradient clipping."""

    name: Literal["adamw", "sgd", "adam"]
    lr: Annotated[float, Field(ge=1e-12)]
    weight_decay: NotNegative = 1e-5
    #: Momentum of SGD. Other optimizers do not use this setting.
    momentum: Fraction = 0.9
    #: Decay rates of the two moments of Adam and AdamW. SGD does not use this setting.
    betas: tuple[Fraction, Fraction] = (0.9, 0.999)
    schedule: Literal["cosine", "constant"] = "cosine"
    #: Number of optimizer steps at the end of the run in which the learning rate of schedule=constant decreases
    #: linearly to `min_lr_ratio`. If null, the learning rate does not decrease.
    decay_steps: Count | None = None
    #: Number of warm-up steps, which must be less than the number of optimizer steps. If null, a quarter of the
    #: optimizer steps are warm-up steps, but at most 100.
    warmup_steps: Annotated[int, Field(ge=0)] | None = None
    #: Learning rate at the start of the warm-up, as a fraction of `lr`.
    warmup_start_factor: Annotated[float, Field(ge=0, le=1)] = 0.001
    #: Learning rate at the end of the cosine schedule or of `decay_steps`, as a fraction of `lr`.
    min_lr_ratio: Annotated[float, Field(ge=0, le=1)] = 0.01
    label_smoothing: Fraction = 0.1
    #: Weight of each class in the training loss: ``auto`` (inversely proportional to the number of training samples), a
    #: file, a list with one weight per class, or a mapping from class names to weights. See `config.class_weights`.
    class_weights: Name | list[float] | dict[str, float] | None = None
    #: Maximum norm of the whole gradient, or null for no clipping.
    grad_clip_norm: Annotated[float, Field(ge=1e-6)] | None = 5.0
    #: Factor by which `lr` is multiplied for the classifier.
    head_lr_mult: Positive = 1.0
    #: Learning rate of a layer divided by the learning rate of the next layer. If null, all layers use the same rate.
    layer_decay: Annotated[float, Field(gt=0, le=1)] | None = None
    #: Number of bits per value of the two moments of Adam and AdamW.
    state_bits: Literal[32, 8, 4] = 32
    #: Update each parameter inside the backward pass and free its gradient. Requires grad_clip_norm=null.
    in_backward: bool = False


class TrainerConfig(Section):
    """Length, device and precision of the training."""

    epochs: Count
    #: Maximum number of optimizer steps, or -1 for no limit.
    max_steps: Annotated[int, Field(ge=-1)] = -1
    #: Precision of training. With ``auto``, a run uses bf16 on processors and GPUs with bf16 instructions, and fp32 on
    #: other devices. On a CPU, networks that are slower in bf16 also use fp32. See `training.precision`.
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    accelerator: Literal["auto", "cpu", "gpu", "mps"] = "auto"
    #: Number of processes on each node, or ``auto`` for one process per GPU.
    devices: Count | Literal["auto"] = 1
    #: Number of nodes, each with `devices` processes.
    num_nodes: Count = 1
    #: With ``auto``, DistributedDataParallel is used for several processes. With ``ddp``, a single process also uses
    #: DistributedDataParallel.
    strategy: Literal["auto", "ddp"] = "auto"
    #: Number of batches per optimizer step.
    grad_accum_steps: Count = 1
    #: Decay of an exponential moving average of the trained weights, which is evaluated and exported. If null, weights
    #: are not averaged. See `training.callbacks.ema`.
    ema: Annotated[float, Field(gt=0, lt=1)] | None = None
    #: Number of epochs without improvement of the metric that selects the best epoch, after which training stops. If
    #: null, training does not stop early. The learning rate schedule is planned for all epochs.
    patience: Count | None = None
    #: Use the channels-last memory format for convolutions. If null, this format is used only on a CPU, where it is
    #: faster.
    channels_last: bool | None = None
    #: Data type in which the weights of linear layers and convolutions are stored. With ``bf16``, optimizer steps are
    #: computed in fp32 and rounded stochastically. Requires precision=bf16. See `models.weight_dtype`.
    weight_dtype: Literal["fp32", "bf16"] = "fp32"
    #: Compile the blocks of the network with ``torch.compile`` for training. See `methods.compiled`.
    compile: bool = False
    progress: bool = True
    deterministic: bool = False
    #: Maximum number of batches in evaluation, or null for all batches.
    limit_eval_batches: Count | None = None
    #: Computation of the frozen prefix, i.e. the layers before the first trained layer: unchanged (``fp32``), with
    #: BatchNorm folded into convolutions (``folded``), folded and in bfloat16 (``bf16``), or in the fastest of these
    #: forms on this machine (``auto``). If null, the value is ``auto`` if `precision` is bf16, and otherwise ``fp32``.
    #: See `models.prefix_form`.
    prefix: Literal["fp32", "folded", "bf16", "auto"] | None = None
    #: Store the output of the frozen prefix. With ``auto``, the output is stored only if storing saves time. See
    #: `training.features`.
    cache_features: Literal["off", "auto", "on"] = "off"
    #: Number of augmented views of each image in the stored features. Epoch e uses view e modulo this number.
    views: Count = 4
    #: Data type of the stored features. With ``int8``, each group of 64 values has its own minimum and step size.
    cache_dtype: Literal["fp16", "fp32", "int8"] = "fp16"
    cache_folder: Name = "outputs/features"
    #: Maximum size of the stored features, in bytes or with a unit. Larger features are not stored.
    cache_limit: str | int | float = "20GB"

    @property
    def frozen_prefix(self) -> str:
        """The value of `prefix`, or the default for `precision` if this value is null."""
        return self.prefix or ("auto" if self.precision == "bf16" else "fp32")


class LoggerConfig(Section):
    """Logging of metrics in addition to the CSV and JSONL files in the run folder."""

    name: Literal["none", "wandb", "tensorboard"] = "none"
    project: Name = "efficient-ft"
    #: User or team in wandb, or null for the logged-in user.
    entity: str | None = None
    #: Group of the run. If null, the group is the name of the parent of the run folder, i.e. the method names.
    group: str | None = None
    #: Name of the run. If null, the name consists of the methods and the settings on the command line.
    run_name: str | None = None
    tags: list[str] = Field(default_factory=list)
    job_type: Name = "train"
    mode: Literal["online", "offline"] = "online"
    #: Number of optimizer steps between records of the training loss and the learning rate. If null, the interval is 50
    #: steps, or less if the run would otherwise have fewer than 20 records.
    every_n_steps: Count | None = None


class CostConfig(Section):
    """Settings of the cost report at the end of a run."""

    #: Trained part (full, last_stage, head, …) of the baseline in the cost comparison, or none for no comparison.
    baseline: Name = "full"
    #: Maximum number of timed steps for the run and the baseline. Timing takes at most a tenth of the training time.
    steps: Count = 5


class StepStatsConfig(Section):
    """Settings for recording step statistics in step_stats.jsonl, in addition to the metrics."""

    #: Interval of the records in optimizer steps, starting with the first step. If 0, nothing is recorded.
    interval: Annotated[int, Field(ge=0)] = 0


#: Names of the kinds of task in this package.
TASK_NAMES = ("classification", "multilabel", "regression", "segmentation", "text")


class Config(Section):
    """The configuration of a run.

    `method` maps the name of each method to its settings: the constructor's arguments and `select`.
    """

    #: The kind of task. Other packages may add kinds. See `config.kinds`.
    task: Annotated[Name, Field(json_schema_extra={"enum": [*TASK_NAMES]})] = "classification"
    model: ModelConfig
    #: The data set, or the first data set of `tasks`.
    data: DataConfig
    #: Several data sets by name, each with its own classifier. Optimizer steps alternate between the data sets in this
    #: order.
    tasks: dict[Name, DataConfig] = Field(default_factory=dict)
    method: Annotated[dict[Name, dict[str, Any]], Field(min_length=1)]
    optim: OptimConfig
    trainer: TrainerConfig
    logger: LoggerConfig = LoggerConfig()
    cost: CostConfig = CostConfig()
    step_stats: StepStatsConfig = StepStatsConfig()
    #: Settings of task=multilabel.
    multilabel: MultiLabelConfig = MultiLabelConfig()
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 233
    #: With ``auto``, an interrupted run continues, and the result of a finished run is shown. With ``never``, the run
    #: starts from the beginning.
    resume: Literal["auto", "never"] = "auto"
    #: Number of optimizer steps after which the run evaluates the network, saves a checkpoint and stops, or the
    #: training time of this process with a unit (90s, 30min). The same command without this setting or with a larger
    #: number of steps continues the run.
    pause_at: Annotated[int, Field(strict=True)] | str | None = None
    #: Published accuracy of this run as a fraction, for the logger's summary.
    published: Annotated[float, Field(ge=0, le=1)] | None = None
    #: Number of jobs of a sweep (-m) that run at the same time.
    jobs: Count = 1
    #: Time limit for each job of a sweep (-m), in seconds or with a unit (90s, 30min, 2h). If null, there is no limit.
    job_timeout: str | Annotated[int, Field(strict=True)] | Annotated[float, Field(strict=True)] | None = None
    #: Folder of a run to evaluate without training.
    evaluate: str | None = None
    #: Print the cost without training.
    cost_only: bool = False
    #: Also print each module that a method changes or skips, and the notes in train.log.
    verbose: bool = False
    #: Memory allocator of the process (Linux with glibc). See `core.allocator`.
    allocator: Literal["auto", "mimalloc", "tcmalloc", "keep", "system"] = "auto"
    #: Memory budget of the run with a unit (4GB, 3.5GiB), or null for no budget. See `training.memory.budget`.
    memory: str | int | float | None = None

    #: Settings of the options that the command line selects (model=, data=, ...), or None if there are none.
    _options: dict[str, Any] | None = PrivateAttr(default=None)
    #: The value of `trainer.precision` before `with_precision`, or None.
    _given_precision: str | None = PrivateAttr(default=None)

    @property
    def given_precision(self) -> str:
        """The value of `trainer.precision` before `with_precision`, e.g. ``auto``."""
        return self._given_precision or self.trainer.precision

    def with_precision(self, precision: str) -> Config:
        """Return a copy in which `trainer.precision` is the precision that was selected for ``auto``.

        Dumps and the fingerprint of the copy still contain the given value, so that the identity of a run does not
        depend on the machine.
        """
        copy = self.model_copy(update={"trainer": self.trainer.model_copy(update={"precision": precision})})
        copy._given_precision = self.given_precision
        return copy

    def with_batch_size(self, batch_size: int, grad_accum_steps: int) -> Config:
        """Return a copy with another batch size and accumulation. An automatic batch size is marked as selected."""
        data = {"batch_size": batch_size, "batch_size_selected": self.data.automatic}
        return self.model_copy(
            update={
                "data": self.data.model_copy(update=data),
                "trainer": self.trainer.model_copy(update={"grad_accum_steps": grad_accum_steps}),
            }
        )

    def with_options(self, options: dict[str, Any] | None) -> Config:
        """Return a copy that also stores the settings of the options that the command line selects (e.g. ``model=``).

        `changed` compares the configuration with these settings.
        """
        copy = self.model_copy()
        copy._options = options
        return copy

    def changed(self) -> dict[str, Any]:
        """Return the settings that differ from the selected options or the schema's defaults, keyed by full name."""
        options = {} if self._options is None else flatten(self._options)
        given = flatten(self.with_precision(self.given_precision).model_dump(mode="json", exclude_defaults=True))
        return {
            name: value
            for name, value in flatten(self.model_dump(mode="json")).items()
            if (value != options[name] if name in options else name in given)
            and not (self.tasks and name.startswith("data."))
        }

    @model_serializer(mode="wrap")
    def _as_given(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Remove `tasks` and `multilabel` if they have no effect, and write the given precision."""
        plain: dict[str, Any] = write(self)
        if not self.tasks:
            plain.pop("tasks", None)
        if self.multilabel == MultiLabelConfig():  # runs without these settings keep their names
            plain.pop("multilabel", None)
        if self._given_precision is not None and "precision" in plain.get("trainer", {}):
            plain["trainer"]["precision"] = self._given_precision
        return plain


def flatten(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Flatten nested mappings to one level with dotted keys. An empty mapping is kept as a value."""
    if not isinstance(tree, Mapping) or not tree:
        return {prefix: tree}
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        flat |= flatten(value, f"{prefix}.{name}" if prefix else name)
    return flat
