"""Open the stores of the features of a run."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from efficient_ft.config import Config
from efficient_ft.config.augment import is_random
from efficient_ft.config.identity import augment_content
from efficient_ft.core.errors import UserError
from efficient_ft.core.format import format_bytes
from efficient_ft.core.terminal import shown_path
from efficient_ft.data.opened import OpenedData
from efficient_ft.data.row_store import RowStore, require_room
from efficient_ft.data.segmentation_data import SegmentationData
from efficient_ft.data.text_data import TextData
from efficient_ft.models import factory
from efficient_ft.models.prefix import KEPT_INPUTS, FrozenPrefix
from efficient_ft.models.prefix_form import Form
from efficient_ft.models.prefix_lengths import PrefixLengths
from efficient_ft.task import Inputs
from efficient_ft.training.features.row_form import RowForm
from efficient_ft.training.features.store import RunFeatures, SplitFeatures, TextFeatures
from efficient_ft.training.kinds.registry import kind_of
from efficient_ft.training.output.console import say

Data = OpenedData[Any, Any]
#: Format version of stored features. Increase this number when the format changes.
_FORMAT = 1
#: Batch size of the forward passes that find the prefix.
EXAMPLES = 2


def examples(config: Config, count: int, tokens: int | None = None) -> Inputs:
    """Return random images, or random texts with `tokens` tokens. Every second text contains padding."""
    spec, generator = factory.input_of(config.model), torch.Generator().manual_seed(0)
    size = spec.size if tokens is None else (tokens,)
    found = kind_of(config).task.example_inputs(count, len(spec.mean), size, generator)
    if isinstance(found, Mapping):
        found["attention_mask"][1::2, size[0] // 2 :] = 0
    return found


def open_features(config: Config, images: Data, prefix: FrozenPrefix, epochs: int, device: torch.device) -> RunFeatures:
    """Open the features of a run of `epochs` epochs. The form of the prefix must already be set.

    Raises:
        SettingError: If the features need more space than the settings or the disk allow.
        UserError: If the tokenizer of texts returns no attention mask.
    """
    options, views = config.trainer, config.trainer.views
    train, evaluated = images.splits["train"], images.splits[images.best_split]
    about = {**about_features(config, images, prefix, device), "form": str(prefix.form)}
    if isinstance(images, TextData):
        return _text_features(config, images, prefix, epochs, about)
    plans = [_Plan(prefix, options.cache_dtype, views * train + evaluated, about)]
    if isinstance(images, SegmentationData):
        plans = [_Plan(prefix, options.cache_dtype, views * train, about, factory.input_of(config.model).image_size)]
        sizes_of_evaluation = images.evaluation_sizes()
        if sizes_of_evaluation is not None:
            size, mask, unique = sizes_of_evaluation
            other = prefix.resized(torch.zeros(EXAMPLES, 3, *size, device=prefix.device))
            plans.append(_Plan(other, options.cache_dtype, evaluated, {**about, "size": size}, mask))
            if not unique:
                say(
                    f"Features of {images.best_split} images are stored only for the most frequent size. The other"
                    f" {images.best_split} images are computed in every epoch."
                )
    with_masks = plans[0].mask is not None
    evaluates = len(plans) > 1 or not with_masks
    stores = _open_stores(config, images, plans, epochs, " and masks" if with_masks else "", evaluates)
    of_train = SplitFeatures(prefix, plans[0].form, stores[0], views, mask=plans[0].mask)
    first = views * train
    if len(plans) > 1:
        plan = plans[1]
        return RunFeatures(of_train, SplitFeatures(plan.prefix, plan.form, stores[1], 1, first, first, plan.mask))
    return RunFeatures(of_train, None if with_masks else SplitFeatures(prefix, plans[0].form, stores[0], 1, first))


def _text_features(
    config: Config, images: TextData, prefix: FrozenPrefix, epochs: int, about: dict[str, Any]
) -> RunFeatures:
    """Open the features of texts. See `TextFeatures`.

    Padding to the longest text of a batch requires nearly as much space: the batches of 32 texts of Reuters R8 have 466
    tokens on average with a limit of 512 tokens, and 64 tokens with a limit of 64 tokens.
    """
    if not {*KEPT_INPUTS} <= {*images.tokenizer.inputs}:
        raise UserError("Features cannot be stored, because the tokenizer of the network returns no attention mask.")
    options, longest = config.trainer, images.longest()
    lengths = PrefixLengths(prefix, examples(config, EXAMPLES, max(images.max_length // 2, 1)))
    about |= {"tokens": longest, "tokenizer": _digest(images.tokenizer.dumps())}
    train, evaluated = images.splits["train"], images.splits[images.best_split]
    rows = options.views * train + evaluated
    plan = _Plan(lengths.at(longest), options.cache_dtype, rows, about, (longest,))
    (store,) = _open_stores(config, images, [plan], epochs)
    parts = [
        TextFeatures(
            plan.prefix, plan.form, store, views, first, lengths=lengths, longest=longest, max_length=images.max_length
        )
        for views, first in ((options.views, 0), (1, options.views * train))
    ]
    return RunFeatures(*parts)


def _open_stores(
    config: Config, images: Data, plans: Sequence[_Plan], epochs: int, also: str = "", evaluates: bool = True
) -> list[RowStore]:
    """Open the stores of a run, and print a message. Raise SettingError if there is not enough space.

    The first store begins with the training samples. A run with fewer epochs than views does not use all of its rows.
    `also` names the other contents of the stores. `evaluates` is False if only the features of training samples are
    stored.
    """
    options, views, folder = config.trainer, config.trainer.views, Path(config.trainer.cache_folder)
    how = "You can also reduce trainer.views, or set trainer.cache_dtype=int8 or trainer.cache_features=off."
    sizes = {folder / plan.key: plan.bytes for plan in plans}
    require_room("trainer.cache", options.cache_limit, sizes, "features", how)
    stores = [RowStore(folder / plan.key, plan.about, plan.rows, plan.row_bytes) for plan in plans]
    train, used = images.splits["train"], min(views, epochs)
    written = torch.cat([store.written() for store in stores])
    written = torch.cat([written[: used * train], written[views * train :]])
    rows, missing = len(written), int((~written).sum())
    prefix, noun = plans[0].prefix, f"{images.noun}s"
    shapes = " + ".join(" × ".join(map(str, shape)) for shape in prefix.shapes)
    say(
        f"Features of {prefix.end} ({shapes}, {options.cache_dtype}){also}:"
        f" {views} view{'s' if views > 1 else ''} of {train} training {noun}"
        + (f" and {images.splits[images.best_split]} {images.best_split} {noun}" if evaluates else "")
        + f" require {format_bytes(sum(sizes.values()))} in"
        f" {shown_path(stores[0].folder if len(stores) == 1 else folder)}."
        + (f" The run uses {used} of {views} views (trainer.epochs={epochs})." if used < views else "")
        + f" {'All features are stored' if not missing else f'{missing} of {rows} features must be computed'}."
        f" {prefix.reason}."
    )
    augmented = images.noun != "text" and (config.data.masks is not None or is_random(config.data.augment))
    if views > 1 and not augmented:
        say(f"All views are equal, because the {noun} are not augmented. Set trainer.views=1.")
    return stores


@dataclass
class _Plan:
    """A store of features. `mask` is the shape of the masks that are stored too, or None if there are no masks."""

    prefix: FrozenPrefix
    dtype: str
    rows: int
    about: dict[str, Any]
    mask: tuple[int, ...] | None = None

    @property
    def form(self) -> RowForm:
        return RowForm(self.dtype, self.prefix.values)

    @property
    def row_bytes(self) -> int:
        return self.form.bytes + (0 if self.mask is None else math.prod(self.mask))

    @property
    def bytes(self) -> int:
        return self.rows * self.row_bytes

    @property
    def key(self) -> str:
        return folder_name(self.about, self.prefix.form)


def about_features(config: Config, images: Data, prefix: FrozenPrefix, device: torch.device) -> dict[str, Any]:
    """Return all properties on which stored features depend, except for the form of the prefix."""
    options = config.trainer
    masks = {} if config.data.masks is None else {"masks": config.data.masks.model_dump(mode="json")}
    return {
        **masks,
        "format": _FORMAT,
        "model": config.model.model_dump(mode="json", exclude={"pretrained", "weights", "select", "zero_head"}),
        "end": prefix.end,
        "shape": prefix.shape if len(prefix.shapes) == 1 else prefix.shapes,
        "weights": prefix.digest(),
        "images": images.content_digest(),
        "augment": augment_content(config.data.augment),
        "seed": config.seed,
        "views": options.views,
        "precision": options.precision,
        "device": device.type,
        "dtype": options.cache_dtype,
    }


def folder_name(about: dict[str, Any], form: Form) -> str:
    """Return the name of the folder of features with the properties `about` (see `about_features`)."""
    return _digest(json.dumps({**about, "form": str(form)}, sort_keys=True))


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(errors="surrogateescape"), digest_size=8).hexdigest()
