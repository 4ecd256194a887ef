"""Parse recipes of the benchmarks.

A recipe is ``METHOD[:KEY=VALUE,...][+METHOD...]`` with the names and settings of the command line. ``NAME=RECIPE``
assigns a name to a recipe. A key that contains a dot is the full name of a setting (``full:trainer.precision=bf16``).
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from efficient_ft.config import Config
from efficient_ft.core.errors import SettingError, UserError
from efficient_ft.core.packages import configuration_folders, method_of

if TYPE_CHECKING:
    import torch

    from efficient_ft.cost import TrainingStep

#: Function that returns the checked configuration of a run with random weights. The arguments are the name of a model
#: in conf/model or timm (or None for the model of the default job), and overrides as on the command line.
Configure = Callable[[str | None, Sequence[str]], Config]

_COMMA = r",(?![^\[]*\])"  # a comma that is not inside brackets
_PLUS = r"\+(?![^\[]*\])"


@dataclass(frozen=True)
class Network:
    """Network (a model in conf/model or timm), batch size and device of a benchmark.

    `image_size` is the side length in pixels, or None for the default of the model. The settings of a recipe can
    override `precision`. If `unfused` is True, attention runs without timm's fused kernel.
    """

    model: str
    batch_size: int = 16
    image_size: int | None = None
    num_classes: int = 100
    precision: str = "fp32"
    device: torch.device | str = "cpu"
    unfused: bool = False

    @property
    def overrides(self) -> list[str]:
        """Overrides of the configuration, as on the command line."""
        size = [] if self.image_size is None else [f"model.image_size={self.image_size}"]
        return [*size, f"trainer.precision={self.precision}"]


@dataclass(frozen=True)
class Recipe:
    """Recipe to measure.

    Attributes:
        name: name in tables.
        overrides: overrides of the configuration, as on the command line.
        wrap: function that changes the steps, e.g. to compile the model, and returns the number of bytes that a step
            saves on the device for the backward pass. If None, the steps are those of a run.
    """

    name: str
    overrides: tuple[str, ...]
    wrap: Callable[[TrainingStep], int] | None = None


def parse_recipe(text: str, conf: Path) -> Recipe:
    """Parse ``[NAME=]METHOD[:KEY=VALUE,...][+METHOD...]``.

    `conf` is the folder with the configuration groups of this package. Folders of other packages are found
    automatically.

    Raises:
        UserError: If `text` does not have this form, or a method of another package has no configuration files.
        SettingError: If the recipe sets ``trainer.precision=auto``.
    """
    folders = [conf, *itertools.chain(*configuration_folders().values())]
    name, equals, rest = text.partition("=")
    if not equals or ":" in name:
        name, rest = text, text
    elif "." in name:
        raise UserError(f"Recipe {text}: each setting must follow its method (METHOD:KEY=VALUE).")
    options, overrides = [], []
    for part in re.split(_PLUS, rest):
        option, colon, settings = part.partition(":")
        if not re.fullmatch(r"\w+", option) or (colon and not settings):
            raise UserError(f"{text}: a recipe must have the form [NAME=]METHOD[:KEY=VALUE,...][+METHOD...].")
        options.append(option)
        for setting in re.split(_COMMA, settings) if settings else ():
            if not re.fullmatch(r"[\w.]+=.+", setting):
                raise UserError(f"Recipe {text}: settings must have the form KEY=VALUE, got {setting}.")
            full = "." in setting.partition("=")[0]
            if setting == "trainer.precision=auto":  # the result would depend on the machine
                raise SettingError("trainer.precision", "auto", "fp32, bf16 or fp16 in a recipe of a benchmark")
            overrides.append(setting if full else f"method.{_package(option, folders)}.{setting}")
    keys = [one.partition("=")[0] for one in overrides]
    if twice := next((key for key in keys if keys.count(key) > 1), None):
        raise UserError(f"Recipe {text}: the setting {twice} is given more than once. Give each setting once.")
    return Recipe(name, (f"method=[{','.join(options)}]", *overrides))


def parse_recipes(texts: Sequence[str], conf: Path) -> list[Recipe]:
    """Parse several recipes (see `parse_recipe`).

    Raises:
        UserError: If a recipe is invalid, or two recipes have the same name.
    """
    recipes = [parse_recipe(text, conf) for text in texts]
    names = [recipe.name for recipe in recipes]
    if len(set(names)) < len(names):
        raise UserError(f"Two recipes have the same name ({', '.join(names)}). Assign another name with NAME=RECIPE.")
    return recipes


#: Name of the two precisions that a benchmark compares.
BOTH = "both"


def precisions_of(dtype: str) -> tuple[str, ...]:
    """Return the precisions of ``--dtype``: fp32 and bf16 for `BOTH`, or only `dtype`."""
    return ("fp32", "bf16") if dtype == BOTH else (dtype,)


def in_precision(name: str, precision: str, precisions: Sequence[str]) -> str:
    """Return the name of a row: `name` in the first of the measured precisions, or `name` followed by `precision`."""
    return name if precision == precisions[0] else f"{name} {precision}"


def in_both_precisions(recipes: Sequence[Recipe]) -> list[Recipe]:
    """Return each recipe twice, in fp32 and in bf16. The names of the latter end with ``bf16``.

    A recipe whose settings contain ``trainer.precision`` is returned once, with its own name.
    """
    fixed = [recipe for recipe in recipes if any(word.startswith("trainer.precision=") for word in recipe.overrides)]
    precisions = precisions_of(BOTH)
    both = [
        Recipe(in_precision(one.name, precision, precisions), (*one.overrides, f"trainer.precision={precision}"))
        for precision in precisions
        for one in recipes
        if one not in fixed
    ]
    return [*both, *fixed]


def _package(option: str, folders: Iterable[Path]) -> str:
    """Return the name under which a method's settings are stored. Variants of a method share this name."""
    files = (folder / "method" / f"{option}.yaml" for folder in folders)
    return next((method_of(file) for file in files if file.is_file()), None) or option
