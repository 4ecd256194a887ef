"""The schema of a run's configuration, checked by pydantic. A leaf: imports nothing else of this package."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    SerializerFunctionWrapHandler,
    model_serializer,
)

Fraction = Annotated[float, Field(ge=0, lt=1)]
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Count = Annotated[int, Field(ge=1)]
#: Pixels of an image's side; beyond it a single image does not fit into memory.
LARGEST_SIDE = 8192
Side = Annotated[int, Field(ge=1, le=LARGEST_SIDE)]
BatchSize = Annotated[int, Field(ge=1, le=65536)]
Name = Annotated[str, Field(min_length=1)]
#: A folder or file; a number, as Hydra reads ``2019``, is its name.
Place = Annotated[Name, BeforeValidator(lambda given: str(given) if type(given) is int else given)]


class Section(BaseModel):
    """Base of the sections: strict, immutable, without unknown keys."""

    # Unknown keys are mistakes; NaN and infinity are never a sensible setting; a key `model_…` is nobody's.
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, frozen=True, protected_namespaces=())


#: The families of networks that kinds of other packages add, by ``model.name`` (`training.kinds.registry.register`).
NETWORKS: dict[str, str] = {}


class ModelConfig(Section):
    """The network and its weights. `name` is a timm name, ``vit_digits`` or ``vit_micro``."""

    name: Name
    pretrained: bool = True
    #: With `name` a network of segmentation-models-pytorch: timm's name of its encoder.
    encoder: Name | None = None
    #: Local file (.safetensors, .pth, .npz) in timm's names; used instead of a download.
    weights: Name | None = None
    #: The part of `weights` to use, if several fit: the start of names in the file, e.g. ``teacher.backbone``.
    weights_key: Name | Annotated[int, Field(ge=0)] | None = None
    #: With `name` a text classifier of transformers: tokens of a text, longer ones are cut; null: it takes images.
    max_length: Annotated[int, Field(ge=8)] | None = None
    #: Pixels, or [height, width]; null: what the weights were trained at.
    image_size: Side | tuple[Side, Side] | None = None
    drop_path_rate: Fraction = 0.0
    drop_rate: Fraction = 0.0
    #: BatchNorm keeps its running statistics while training.
    frozen_bn: bool = True
    #: A new classifier (for other classes, or without weights) starts at zero.
    zero_head: bool = False
    #: The default selection of methods whose YAML names no other.
    select: Name = "last_stage"
    #: Normalization per channel; null: as in pretraining.
    mean: tuple[float, ...] | None = None
    std: tuple[Positive, ...] | None = None
    #: Further arguments of ``timm.create_model``.
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

    ``resize_crop``: resize, crop a random part with `scale` of the area, resize it to the input size, flip.
    ``none``: the transform of evaluation.
    """

    name: Literal["resize_crop", "none"] = "resize_crop"
    #: Size before the crop: ``input`` (the network's), pixels (square), or ``none`` (crop the original image).
    resize: Count | Literal["input", "none"] = "input"
    scale: tuple[Annotated[float, Field(gt=0, le=1)], Annotated[float, Field(gt=0, le=1)]] = (0.08, 1.0)
    flip: bool = True
    #: Turn half of the images upside down.
    vertical_flip: bool = False
    #: Of the crop and the flips that are on, this many are drawn for each image; null: all of them.
    pick: Count | None = None


MaskValue = Annotated[int, Field(ge=0, lt=2**16)]
_Channel = Annotated[int, Field(ge=0, le=255)]


class MaskConfig(Section):
    """Settings of segmentation data sets: folders, classes, pixel values without a label, sizes."""

    #: Names of the classes with ids 0, 1, …; null: those of the data set, or of classes.txt.
    classes: list[Name] | None = None
    #: Further ids of pixels without a label, besides 255.
    ignored: list[MaskValue] = Field(default_factory=list)
    #: The class of each pixel value, by its name or id, or ``void``; ids: values are ids; null: the same, and masks
    #: that suggest another reading are rejected.
    values: Annotated[dict[MaskValue, Name | int], Field(min_length=1)] | Literal["ids"] | None = None
    #: The color of each class, [red, green, blue] or "#rrggbb", for masks of colors; ``void``: no label.
    colors: Annotated[dict[Name, Name | tuple[_Channel, _Channel, _Channel]], Field(min_length=1)] | None = None
    #: Masks with a palette are read by index or by color; auto: by color if the classes have colors.
    palette: Literal["auto", "index", "color"] = "auto"
    #: Masks of images with an EXIF orientation belong to the upright image, or to its stored (raw) pixels; auto: as
    #: their sizes show.
    exif: Literal["auto", "upright", "raw"] = "auto"
    #: Names of the folders of masks and of images; null: recognized.
    folder: Name | None = None
    image_folder: Name | None = None
    #: Read only masks whose file stem ends with this suffix; null: all masks.
    suffix: Name | None = None
    #: Training images are resized by a random factor in this range before a part is cut out.
    zoom: tuple[Positive, Positive] = (0.5, 2.0)
    #: Mirror half of the training images left to right.
    flip: bool = True
    #: (height, width) that images are resized to in evaluation; null: their own size.
    resize: tuple[Count, Count] | None = None
    #: In evaluation the network sees the whole image, or windows of the training size, whose logits are averaged.
    evaluation: Literal["whole", "windows"] = "whole"


class TextConfig(Section):
    """Settings of data sets of texts: the columns of files, their format, and the labels."""

    #: The column of the text, or the two columns of a pair.
    columns: Annotated[list[Name], Field(min_length=1, max_length=2)] = ["text"]
    #: The column of the class.
    label: Name = "label"
    #: The names of all columns, for tables whose first line is a row; null: the first line names the columns.
    names: Annotated[list[Name], Field(min_length=2)] | None = None
    #: The character between the cells of a table; null: as the extension says, or else the one that fits the columns.
    delimiter: Literal["comma", "semicolon", "tab", "pipe"] | None = None
    #: Quotes enclose cells; false: they are plain characters; null: they enclose cells in .csv, not in .tsv.
    quotes: bool | None = None
    #: The encoding of the files, as Python names it (cp1252, utf-16-le); null: UTF-8, or that of a byte order mark.
    encoding: Name | None = None
    #: Labels that mean "no label", as do empty ones and NaN.
    missing: list[str | int | float] = ["null", "NULL", "NA", "N/A"]
    #: Labels that differ only in case are one class (true) or several (false); null: they are rejected.
    ignore_case: bool | None = None


#: The data sets of this package.
DATA_NAMES = (
    "folder", "digits", "cifar10", "cifar100", "flowers102", "food101", "pets", "aircraft", "cars", "cub200",
    "mask_folder", "camvid", "cityscapes", "voc2012_aug", "text_folder", "rte",
)  # fmt: skip


class DataConfig(Section):
    """A data set: images or texts, splits, loading and augmentation."""

    #: One of `DATA_NAMES`, or a data set registered by another package with its own kind of task.
    name: Annotated[Name, Field(json_schema_extra={"enum": [*DATA_NAMES]})]
    root: Name = "./data"
    #: Of folders of one's own: use files and folders that links out of `root` lead to; they are refused otherwise.
    follow_links: bool = False
    #: Of folders of one's own: the folder or folders of each split, relative to `root` (``.`` is `root` itself), whose
    #: top folders are the classes; null: recognized by their names.
    splits: dict[Literal["train", "val", "test"], Place | Annotated[list[Place], Field(min_length=1)]] | None = None
    #: Of image files with more than 8 bits of gray: the values that become black and white; null: 0 and 65535.
    value_range: tuple[float, float] | None = None
    #: Image files with more pixels are rejected.
    max_pixels: Count = 178_956_970
    batch_size: BatchSize = 64
    #: null: as `batch_size`.
    eval_batch_size: BatchSize | None = None
    num_workers: Annotated[int, Field(ge=0, le=256)] = 2
    #: Share of the training images held out for validation, stratified and seeded.
    val_fraction: Fraction = 0.1
    #: The split on which the best epoch is selected. Use ``test`` only to reproduce a paper that selected on the test
    #: split.
    select_best_on: Literal["val", "test"] = "val"
    #: With select_best_on=test the official validation images train as well (flowers102, aircraft).
    train_on_val: bool = True
    on_corrupt: Literal["stop", "skip"] = "stop"
    augment: AugmentConfig = AugmentConfig()
    #: Of a segmentation data set; null: images have classes, and no masks.
    masks: MaskConfig | None = None
    #: Of a data set of texts; null: it has images.
    text: TextConfig | None = None
    download: bool = True
    #: Keep decoded and resized images on disk, for later epochs and runs; auto: if there is room.
    keep_decoded: Literal["off", "auto", "on"] = "auto"
    decoded_folder: Name = "outputs/decoded"
    #: More bytes of decoded images are not kept.
    decoded_limit: str | int | float = "4GB"


class OptimConfig(Section):
    """Optimizer and its memory, learning-rate schedule, label smoothing, clipping. Warm-up counts optimizer steps."""

    name: Literal["adamw", "sgd", "adam"]
    lr: Annotated[float, Field(ge=1e-12)]
    weight_decay: NotNegative = 1e-5
    #: SGD only.
    momentum: Fraction = 0.9
    #: Adam and AdamW only.
    betas: tuple[Fraction, Fraction] = (0.9, 0.999)
    schedule: Literal["cosine", "constant"] = "cosine"
    #: Less than the optimizer steps of all epochs; null: a quarter of the run's, and at most 100.
    warmup_steps: Annotated[int, Field(ge=0)] | None = None
    #: The warm-up starts at this share of `lr`.
    warmup_start_factor: Annotated[float, Field(ge=0, le=1)] = 0.001
    #: The cosine ends at this share of `lr`.
    min_lr_ratio: Annotated[float, Field(ge=0, le=1)] = 0.01
    label_smoothing: Fraction = 0.1
    #: Largest norm of the whole gradient; null: no clipping.
    grad_clip_norm: Annotated[float, Field(ge=1e-6)] | None = 5.0
    #: The classifier's learning rate is `lr` times this.
    head_lr_mult: Positive = 1.0
    #: Factor of the learning rate per layer from the head down; null: one rate for all layers.
    layer_decay: Annotated[float, Field(gt=0, le=1)] | None = None
    #: Adam and AdamW only: bits per value of the two moments.
    state_bits: Literal[32, 8, 4] = 32
    #: Step each parameter inside the backward pass and free its gradient; needs grad_clip_norm null.
    in_backward: bool = False


class TrainerConfig(Section):
    """Length, device and precision of the training."""

    epochs: Count
    #: Optimizer steps after which to stop; -1: after `epochs`.
    max_steps: Annotated[int, Field(ge=-1)] = -1
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    accelerator: Literal["auto", "cpu", "gpu", "mps"] = "auto"
    #: Processes on each node; auto: one for each of its GPUs.
    devices: Count | Literal["auto"] = 1
    #: Machines, each with as many processes.
    num_nodes: Count = 1
    #: auto: DistributedDataParallel with several processes; ddp: with a single one, too.
    strategy: Literal["auto", "ddp"] = "auto"
    #: Batches per optimizer step.
    grad_accum_steps: Count = 1
    #: Channels-last memory format for convolutions; null: only on a CPU, where it is faster.
    channels_last: bool | None = None
    progress: bool = True
    deterministic: bool = False
    #: Evaluate on this many batches only; null: on all.
    limit_eval_batches: Count | None = None
    #: Form in which the frozen part below all that trains computes: fp32 as it is, folded with BatchNorm folded into
    #: convolutions, bf16 with these in bfloat16; auto: the fastest on this machine, see `models.prefix_form`.
    prefix: Literal["fp32", "folded", "bf16", "auto"] = "fp32"
    #: Store what the frozen part below all that trains computes; auto: where it saves time, see `training.features`.
    cache_features: Literal["off", "auto", "on"] = "off"
    #: With stored features: augmented views of each image; epoch e has view e mod this.
    views: Count = 4
    #: Type of the stored values; int8: groups of 64 with a minimum and a step.
    cache_dtype: Literal["fp16", "fp32", "int8"] = "fp16"
    cache_folder: Name = "outputs/features"
    #: Features that would be larger are not stored.
    cache_limit: str | int | float = "20GB"


class LoggerConfig(Section):
    """Where metrics go in addition to the CSV and JSONL files of the run folder."""

    name: Literal["none", "wandb", "tensorboard"] = "none"
    project: Name = "efficient-ft"
    #: wandb's user or team; null: the one logged in.
    entity: str | None = None
    #: null: the run folder's parent, which names the methods.
    group: str | None = None
    #: Name of the run; null: the methods and the settings given on the command line.
    run_name: str | None = None
    tags: list[str] = Field(default_factory=list)
    job_type: Name = "train"
    mode: Literal["online", "offline"] = "online"
    #: Optimizer steps between two rows of train loss and learning rate; null: 50, or fewer for at least 20 rows.
    every_n_steps: Count | None = None


class CostConfig(Section):
    """The cost report at the end of a run."""

    #: What the cost is compared with: a selection on the plain model (full, last_stage, head, …), or none.
    baseline: Name = "full"
    #: Timed steps of each; fewer where they would take more than a tenth of the training time.
    steps: Count = 5


class StepStatsConfig(Section):
    """The recording of step statistics (step_stats.jsonl), in addition to the metrics."""

    #: The first optimizer step and every n-th after it; 0: none.
    interval: Annotated[int, Field(ge=0)] = 0


class Config(Section):
    """One run. `method` maps a method's name to its settings (the constructor's arguments, and `select`)."""

    #: The kind of task; a package may add others, see `config.kinds`.
    task: Annotated[Name, Field(json_schema_extra={"enum": ["classification", "segmentation", "text"]})] = (
        "classification"
    )
    model: ModelConfig
    #: With `tasks`: the first of them.
    data: DataConfig
    #: Several data sets by name, each with its own classifier; optimizer steps take turns in this order.
    tasks: dict[Name, DataConfig] = Field(default_factory=dict)
    method: Annotated[dict[Name, dict[str, Any]], Field(min_length=1)]
    optim: OptimConfig
    trainer: TrainerConfig
    logger: LoggerConfig = LoggerConfig()
    cost: CostConfig = CostConfig()
    step_stats: StepStatsConfig = StepStatsConfig()
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 233
    #: auto: the same command continues an interrupted run and shows a finished one; never: start from the beginning.
    resume: Literal["auto", "never"] = "auto"
    #: The accuracy that a paper prints for this run, a fraction, for the logger's summary.
    published: Annotated[float, Field(ge=0, le=1)] | None = None
    #: Jobs of a sweep (-m) at the same time.
    jobs: Count = 1
    #: A job of a sweep (-m) that runs longer is stopped: seconds, or with a unit (90s, 30min, 2h); null: never.
    job_timeout: str | Annotated[int, Field(strict=True)] | Annotated[float, Field(strict=True)] | None = None
    #: A run folder to evaluate, without training.
    evaluate: str | None = None
    #: Print the cost; train nothing.
    cost_only: bool = False
    #: Also print details: each module that a method changes or skips, and the notes of train.log.
    verbose: bool = False
    #: The memory allocator of the process (Linux with glibc): see `core.allocator`.
    allocator: Literal["auto", "mimalloc", "tcmalloc", "keep", "system"] = "auto"
    #: The memory that the run may take, with a unit (4GB, 3.5GiB), see `training.memory.budget`; null: no budget.
    memory: str | int | float | None = None

    #: The settings of the options that a command chose (model=, data=, ...); None without a command.
    _options: dict[str, Any] | None = PrivateAttr(default=None)

    def with_options(self, options: dict[str, Any] | None) -> Config:
        """Return a copy with the settings of the chosen options, which `changed` compares with."""
        copy = self.model_copy()
        copy._options = options
        return copy

    def changed(self) -> dict[str, Any]:
        """Return the settings, by full name, that differ from the chosen options, else from the schema's defaults."""
        options = {} if self._options is None else flatten(self._options)
        given = flatten(self.model_dump(mode="json", exclude_defaults=True))
        return {
            name: value
            for name, value in flatten(self.model_dump(mode="json")).items()
            if (value != options[name] if name in options else name in given)
            and not (self.tasks and name.startswith("data."))
        }

    @model_serializer(mode="wrap")
    def _written_out(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out `tasks` in a run on one data set."""
        plain: dict[str, Any] = write(self)
        if not self.tasks:
            plain.pop("tasks", None)
        return plain


def flatten(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Return nested mappings as one level with dotted keys; an empty mapping is a value."""
    if not isinstance(tree, Mapping) or not tree:
        return {prefix: tree}
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        flat |= flatten(value, f"{prefix}.{name}" if prefix else name)
    return flat
