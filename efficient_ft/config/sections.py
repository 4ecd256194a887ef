"""Base class and types of the configuration sections, and the sections of masks, texts and label files.

This module does not import other modules of the package.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PrivateAttr

Fraction = Annotated[float, Field(ge=0, lt=1)]
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Probability = Annotated[float, Field(ge=0, le=1)]
MixAlpha = Annotated[float, Field(ge=0, le=100)]
Count = Annotated[int, Field(ge=1)]
#: Maximum height and width of an image in pixels. A larger image would not fit into memory.
LARGEST_SIDE = 8192
Side = Annotated[int, Field(ge=1, le=LARGEST_SIDE)]
BatchSize = Annotated[int, Field(ge=1, le=65536)]
if TYPE_CHECKING:  # a run replaces ``auto`` by an integer before it uses the value
    TrainBatchSize = int
else:
    TrainBatchSize = BatchSize | Literal["auto"]
Name = Annotated[str, Field(min_length=1)]
#: A folder or file. Hydra reads a name such as ``2019`` as a number, which is converted back to text.
Place = Annotated[Name, BeforeValidator(lambda given: str(given) if type(given) is int else given)]


class Section(BaseModel):
    """Base class of the configuration sections. A section is immutable, and rejects unknown keys."""

    # Reject unknown keys, NaN and infinity, and allow keys that start with `model_`.
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, frozen=True, protected_namespaces=())


MaskValue = Annotated[int, Field(ge=0, lt=2**16)]
_Channel = Annotated[int, Field(ge=0, le=255)]


class MaskConfig(Section):
    """Settings of segmentation data sets: folders, classes, pixel values without a label, and sizes."""

    #: Names of the classes with the ids 0, 1, …. If null, the names come from the data set or from classes.txt.
    classes: list[Name] | None = None
    #: Ids of pixels without a label, in addition to 255.
    ignored: list[MaskValue] = Field(default_factory=list)
    #: Class name, class id, or ``void`` (no label) for each pixel value. With ``ids``, pixel values are class ids. Null
    #: has the same meaning, but ambiguous masks are rejected.
    values: Annotated[dict[MaskValue, Name | int], Field(min_length=1)] | Literal["ids"] | None = None
    #: Color of each class in color masks, as [red, green, blue] or "#rrggbb". The name ``void`` means no label.
    colors: Annotated[dict[Name, Name | tuple[_Channel, _Channel, _Channel]], Field(min_length=1)] | None = None
    #: Read masks with a palette by index or by color. With ``auto``, colors are used if the classes have colors.
    palette: Literal["auto", "index", "color"] = "auto"
    #: Orientation of masks for images with an EXIF orientation tag. With ``upright``, masks have the orientation of the
    #: upright image. With ``raw``, masks have the orientation of the stored pixels. With ``auto``, the sizes of the
    #: image and the mask determine the orientation.
    exif: Literal["auto", "upright", "raw"] = "auto"
    #: Names of the mask folder and the image folder. If null, the folders are recognized automatically.
    folder: Name | None = None
    image_folder: Name | None = None
    #: Read only masks whose file stem ends with this suffix. If null, all masks are read.
    suffix: Name | None = None
    #: Range of the random scale factor of training images before the crop.
    zoom: tuple[Positive, Positive] = (0.5, 2.0)
    #: Flip half of the training images left to right.
    flip: bool = True
    #: Size (height, width) in pixels to which images are resized in evaluation. If null, the original size is kept.
    resize: tuple[Count, Count] | None = None
    #: Evaluate on whole images, or on windows of the training size whose logits are averaged.
    evaluation: Literal["whole", "windows"] = "whole"


class TextConfig(Section):
    """Settings of text data sets: the columns, format and labels of files."""

    #: Column that contains the text, or the two columns that contain a pair of texts.
    columns: Annotated[list[Name], Field(min_length=1, max_length=2)] = ["text"]
    #: Column that contains the class.
    label: Name = "label"
    #: Names of all columns, for tables without a header. If null, the first line contains the names.
    names: Annotated[list[Name], Field(min_length=2)] | None = None
    #: Delimiter between cells. If null, the delimiter is determined by the file extension or the columns.
    delimiter: Literal["comma", "semicolon", "tab", "pipe"] | None = None
    #: If true, quotes enclose cells. If false, quotes are plain characters. If null, the value is true for .csv files
    #: and false for .tsv files.
    quotes: bool | None = None
    #: Python name of the file encoding, e.g. cp1252 or utf-16-le. If null, the byte order mark determines the encoding.
    #: Without a byte order mark, the encoding is UTF-8.
    encoding: Name | None = None
    #: Labels that mean "no label", in addition to empty labels and NaN.
    missing: list[str | int | float] = ["null", "NULL", "NA", "N/A"]
    #: Labels that differ only in case are merged if true, kept separate if false, and rejected if null.
    ignore_case: bool | None = None


class LabelsConfig(Section):
    """Settings of a label file, which lists images and their labels: its columns, classes and format."""

    #: Label file (.csv, .tsv, .jsonl, or .parquet with pyarrow), or one file for each split. Paths are relative to
    #: `root`.
    file: Place | Annotated[dict[Literal["train", "val", "test"], Place], Field(min_length=1)]
    #: Folder of the images, relative to `root`. If null, the folder is `root`.
    folder: Place | None = None
    #: Column with the image files. The extensions of the files may be omitted. If null, the column is recognized.
    image: Name | None = None
    #: Column with the label. With task=multilabel, also columns with the values 0 and 1. With task=regression, one
    #: column for each target. If null, the column is recognized.
    label: Name | Annotated[list[Name], Field(min_length=1)] | None = None
    #: Column with the split of each image, or ``none`` for no column. If null, the column is recognized.
    split: Name | None = None
    #: Names of the classes in the order of the outputs, or a file with such a list, relative to `root`. If null, the
    #: classes are the sorted labels.
    classes: Annotated[list[Name], Field(min_length=2)] | Place | None = None
    #: Text between the labels in a cell with task=multilabel, ``space``, or ``none`` if each cell contains one label.
    #: If null, the separator is recognized.
    separator: Annotated[str, Field(min_length=1)] | None = None
    #: Names of all columns, for tables without a header. If null, the first line contains the names.
    names: Annotated[list[Name], Field(min_length=2)] | None = None
    #: Delimiter between cells. If null, the delimiter is determined by the file extension or the columns.
    delimiter: Literal["comma", "semicolon", "tab", "pipe"] | None = None
    #: If true, quotes enclose cells. If false, quotes are plain characters. If null, the value is true for .csv files
    #: and false for .tsv files.
    quotes: bool | None = None
    #: Python name of the file encoding, e.g. cp1252. If null, the encoding is UTF-8, or that of the byte order mark.
    encoding: Name | None = None
    #: Labels that mean "no label", in addition to empty labels and NaN.
    missing: list[str | int | float] = ["null", "NULL", "NA", "N/A"]

    #: The kind of task (``task``), which determines how labels are read. `config.check` sets this value.
    _task: str = PrivateAttr(default="classification")
    #: True to skip unusable rows although ``data.on_corrupt=stop``, which then applies only to image files.
    _skips_rows: bool = PrivateAttr(default=False)


class MultiLabelConfig(Section):
    """The loss and the thresholds of task=multilabel."""

    #: Binary cross-entropy (``bce``), or the asymmetric loss, which reduces the weight of easy negative labels.
    loss: Literal["bce", "asymmetric"] = "bce"
    #: Focusing exponents of the asymmetric loss for positive and for negative labels.
    gamma_positive: NotNegative = 0.0
    gamma_negative: NotNegative = 4.0
    #: Probability margin of the asymmetric loss. Negative labels with lower probabilities have no loss.
    margin: Fraction = 0.05
    #: Minimum probability of a predicted label. With ``tuned``, the threshold of each label maximizes the F1 score of
    #: the label on the split that selects the best epoch.
    thresholds: Literal["tuned"] | Annotated[float, Field(gt=0, lt=1)] = "tuned"
