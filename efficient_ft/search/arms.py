"""Propose the arms of a search: recipes from finished studies that fit the memory budget, with learning rates.

This module imports torch. A search calls `propose` in a separate process, so that the memory of the search itself
remains small.
"""

from __future__ import annotations

import itertools
import math
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from torch import nn

from efficient_ft.config import Config
from efficient_ft.config.schema import TASK_NAMES
from efficient_ft.core.errors import SettingError, UserError, first_line
from efficient_ft.core.format import bytes_setting
from efficient_ft.methods import METHODS
from efficient_ft.methods.declarations import Axis, Exactness
from efficient_ft.models import factory
from efficient_ft.models.view import view
from efficient_ft.planning.candidates import Candidate, split
from efficient_ft.planning.options import Option
from efficient_ft.planning.plan import Limits
from efficient_ft.planning.planner import Configure, Planner, start_planning
from efficient_ft.planning.prior import Studied, closeness, network_kind, studied, weighted_mean
from efficient_ft.search.state import Arm, Data, Proposed
from efficient_ft.search.transfer import methods_of, transferred
from efficient_ft.training.datamodule import refuse_unusable, run_length, summaries, summary_text
from efficient_ft.training.kinds.base import only
from efficient_ft.training.kinds.registry import kind_of

#: Methods of the baselines, which are examined early, because users compare other recipes with them.
BASELINES = (("full",), ("head",), ("full", "lora"))
#: Memory methods in the order in which a search tries them: the methods that take the least additional time come first.
_MEMORY = ("mesa", "compact", "low_bit", "checkpointing")
#: Fraction of the memory budget that a recipe may need according to its prediction.
_ROOM = 0.95
#: Size of the smallest micro-batch of a recipe with accumulated gradients. Smaller micro-batches take more time.
_MICRO_BATCH = 4
#: Maximum difference of the losses of accuracy of two variants in percentage points.
_SAME = 2.0
#: Factor between two learning rates of the same recipe.
LR_FACTOR = 3.0
#: Variants of methods that reproduce a paper. A search uses the project's own variants.
_PUBLISHED = re.compile(r"_(published|paper|code)$")


@dataclass(frozen=True)
class Family:
    """Recipes that differ only in their memory method, and therefore have about the same accuracy.

    Attributes:
        methods: methods without memory methods.
        rows: settings of the studied rows. Rows without a memory method come first.
        points_lost: mean loss of accuracy relative to full fine-tuning in similar studies, in percentage points.
        lr: learning rate of the most similar study.
        source: title of this study.
    """

    methods: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    points_lost: float
    lr: float
    source: str


def propose(
    settings: Sequence[str],
    configure: Configure,
    memory_bytes: int,
    count: int,
    seconds: float,
    say: Callable[[str], None] = lambda text: None,
    show: Callable[[str], None] = lambda text: None,
    most_recipes: int | None = None,
) -> Proposed:
    """Return up to `count` arms for the run that `settings` describe, or no arms if no recipe fits `memory_bytes`.

    Recipes are examined in the order of their accuracy in similar studies until `seconds` are over. The baselines
    (`BASELINES`) are examined early. `say` is called with a description of each step, and `show` with a summary of the
    data. The arms use at most `most_recipes` different recipes. Further arms have other learning rates. If `seconds` is
    finite, images are then decoded for up to `seconds` seconds.

    Raises:
        UserError: If the data cannot be used.
    """
    began = time.perf_counter()
    end = began + seconds
    room = round(_ROOM * memory_bytes)
    planner, steps = start_planning(settings, configure, Limits(room), say=say)
    if steps is None:
        missing = [text for text in kind_of(planner.base).missing(planner.base) if text is not None]
        raise UserError(missing[0])
    data = _data(planner.base, show)
    network = planner.counter.network()
    kind, size, tokens = network_kind(network), factory.input_of(planner.base.model).size[0], _tokens(network)
    families = _ordered(list(families_for(planner.base.task, kind, size, planner.counter.blocks, tokens)))
    found: list[tuple[Family, Option]] = []
    refused: dict[str, str] = {}
    counted: list[Option] = []

    def examine(candidate: Candidate) -> Option | None:
        """Count a recipe, or return None if it cannot be used."""
        say(f"counting the recipe {candidate.name}")
        try:
            # A run that is continued needs more memory than a new run, because it reads a checkpoint.
            option = planner.option(candidate, resumed=True)
        except UserError as error:
            refused[candidate.name] = first_line(error)
            return None
        counted.append(option)
        return option

    for family in families:
        late = time.perf_counter() > end and (found or family.methods != ("head",))
        if len(found) >= min(count, most_recipes or count) or late:
            continue
        before = len(counted)
        option = _fitting(family, planner, examine)
        if option is not None:
            found.append((family, option))
        elif counted[before:]:
            least = min(counted[before:], key=planner.bound)
            refused[least.name] = f"needs memory={bytes_setting(_budget(planner, least))}"
    arms = [_arm(planner, family, option, family.lr) for family, option in found]
    for factor in (LR_FACTOR, 1 / LR_FACTOR):
        further = [_arm(planner, family, option, family.lr * factor) for family, option in found]
        arms += further[: max(0, count - len(arms))]
    # With a budget of steps, decoding images does not reduce the budget of a recipe.
    if arms and math.isfinite(seconds):
        _decode(planner.base, seconds)
    smallest = min(counted, key=planner.bound, default=None)
    return Proposed(
        arms=arms,
        refused=refused,
        data=data,
        seconds=time.perf_counter() - began,
        smallest=None if smallest is None else smallest.name,
        smallest_bytes=0 if smallest is None else _budget(planner, smallest),
    )


def _budget(planner: Planner, option: Option) -> int:
    """Return the smallest memory budget of a search in which a recipe fits, in bytes."""
    return round(planner.bound(option) / _ROOM)


def families_for(task: str, kind: str, size: int, blocks: int, tokens: int | None) -> Iterator[Family]:
    """Yield the studied families for a network.

    Args:
        task: kind of task.
        kind: kind of the network (`planning.prior.network_kind`).
        size: height of the images in pixels.
        blocks: number of blocks.
        tokens: number of patch tokens in the blocks, or None if the network has no token grid.

    If no study has the kind of task, the studies of classification are used. Recipes that cannot be transferred to the
    network are left out.
    """
    of_task = [one for one in studied() if one.task == task] or [one for one in studied() if one.task == TASK_NAMES[0]]
    rows: dict[tuple[str, ...], list[tuple[Studied, tuple[str, ...]]]] = {}
    for one in of_task:
        arguments = transferred(one, blocks, tokens)
        if not one.pretrained or one.lr is None or arguments is None:
            continue
        methods = methods_of(arguments)
        own = all(word.startswith("method") for word in arguments)
        if not own or any(_PUBLISHED.search(name) or name not in METHODS for name in methods):
            continue
        if any(METHODS[name].axis is Axis.MEMORY and name not in _MEMORY for name in methods):
            continue
        key = tuple(word for word in arguments if _axis(word) is not Axis.MEMORY and not word.startswith("method="))
        plain = tuple(name for name in methods if METHODS[name].axis is not Axis.MEMORY)
        rows.setdefault((*plain, *key), []).append((one, arguments))
    for of in rows.values():
        lost = {
            arguments: weighted_mean(known)
            for arguments in {arguments for _, arguments in of}
            if (
                known := [
                    (one.points_lost, closeness(one, kind, size))
                    for one, own in of
                    if own == arguments and one.points_lost is not None
                ]
            )
        }
        variants = sorted(lost, key=lambda arguments: (_memory_order(arguments), lost[arguments], arguments))
        if not variants:
            continue
        variants = [one for one in variants if lost[one] <= lost[variants[0]] + _SAME]
        weighed = [(one, closeness(one, kind, size)) for one, arguments in of if arguments == variants[0]]
        nearest, _ = max(weighed, key=lambda pair: (pair[1], pair[0].seeds))
        assert nearest.lr is not None
        plain = tuple(name for name in methods_of(variants[0]) if METHODS[name].axis is not Axis.MEMORY)
        yield Family(plain, tuple(variants), lost[variants[0]], nearest.lr, nearest.study)


def _ordered(families: Sequence[Family]) -> list[Family]:
    """Return the families in increasing order of their loss of accuracy, with a baseline after every other family."""
    baselines = [one for methods in BASELINES for one in families if one.methods == methods]
    rest = sorted((one for one in families if one not in baselines), key=lambda one: one.points_lost)
    pairs = itertools.zip_longest(rest, baselines)
    return [one for pair in pairs for one in pair if one is not None]


def _fitting(family: Family, planner: Planner, examine: Callable[[Candidate], Option | None]) -> Option | None:
    """Return the recipe of a family that fits and takes the least time, or None if no recipe fits.

    The order is: without a memory method, then with each memory method. If a recipe does not fit, the batch is split
    into micro-batches, whose accumulated gradient equals the gradient of the batch.
    """
    for row in family.rows:
        candidate = _candidate(row)
        option = examine(candidate)
        if option is None:
            continue
        if planner.fits(option):
            return option
        if planner.base.model.frozen_bn is not True:  # BatchNorm statistics depend on the micro-batch
            continue
        fixed = option.peak_bytes - planner.growth_bytes(option)
        for parts in split(candidate, planner.base):
            if planner.base.data.batch_size < _MICRO_BATCH * parts.micro_batches:
                break
            # At best, the growth and its margin are proportional to the micro-batch.
            if fixed + (planner.bound(option) - fixed) / parts.micro_batches > planner.memory_bytes:
                continue
            smaller = examine(parts)
            if smaller is not None and planner.fits(smaller):
                return smaller
    return None


def _axis(word: str) -> Axis | None:
    """Return the axis of the method whose setting is `word`, or None for another setting."""
    name = word.removeprefix("method.").partition(".")[0]
    return METHODS[name].axis if word.startswith("method.") and name in METHODS else None


def _memory_order(arguments: tuple[str, ...]) -> int:
    """Return the position in `_MEMORY` of the memory method, or -1 without a memory method."""
    return max((_MEMORY.index(name) for name in methods_of(arguments) if name in _MEMORY), default=-1)


def _candidate(arguments: Sequence[str]) -> Candidate:
    settings = tuple(word for word in arguments if not word.startswith("method="))
    return Candidate(methods_of(arguments), settings, Exactness.UNKNOWN)


def _arm(planner: Planner, family: Family, option: Option, lr: float) -> Arm:
    name = f"{option.name} lr={lr:.2g}"
    return Arm(
        name=name,
        recipe=option.name,
        arguments=[*option.arguments, f"optim.lr={lr:.2g}"],
        folder=re.sub(r"[^\w.+-]+", "_", name),
        lr=lr,
        points_lost=family.points_lost,
        source=family.source,
        baseline=family.methods in BASELINES,
        needed_bytes=planner.bound(option),
    )


def _tokens(network: nn.Module) -> int | None:
    """Return the number of patch tokens in the blocks of a network, or None if the blocks have no common token grid."""
    grid = view(network).block_grid
    return None if grid is None else grid[0] * grid[1]


def _data(config: Config, show: Callable[[str], None]) -> Data:
    """Return the sizes of the data. Raise SettingError if there are no validation samples.

    The data are inspected and the weights are loaded, and `show` is called with the summary of each. All training
    processes read the data and the weights in the same way, but they write their output to files.
    """
    kind = kind_of(config)
    opened = kind.open(config, factory.input_of(config.model))
    data = only(opened)
    understood = summaries(opened)
    show(summary_text(understood))
    refuse_unusable(config, understood)
    classes = opened.num_classes
    assert isinstance(classes, int), "a search has one task"
    loaded = factory.loading_report(kind.network(config.model, classes))
    if loaded is not None:  # None: random weights, which `create_model` reports
        show("\n".join(loaded.lines(classes)))
    epochs, steps = run_length(config, opened, 1)
    sizes = {split: data.splits.get(split, 0) for split in ("train", "val", "test")}
    if not sizes["val"]:
        do = "The search compares recipes on validation images."
        raise SettingError("data.val_fraction", config.data.val_fraction, "a fraction > 0", do)
    return Data(**sizes, epoch_steps=-(-steps // epochs))


def _decode(config: Config, seconds: float) -> None:
    """Decode the images that all runs share, for about `seconds` seconds. Otherwise, the first run would decode them.

    The recipes have already been counted, because decoding increases the memory of this process.
    """
    data = only(kind_of(config).open(config, factory.input_of(config.model)))
    data.keep_decoded(config.trainer.epochs)
    data.decode(seconds)
