"""Networks of a search: published accuracies, the choice of networks, and the proposals for several networks."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from efficient_ft.core.errors import SettingError, UserError, first_line
from efficient_ft.core.format import bytes_setting, format_bytes
from efficient_ft.search.state import Arm, Proposed


class Published(NamedTuple):
    """Top-1 accuracy of a network on the ImageNet-1k validation images in percent, and parameters in millions."""

    top1: float
    parameters: float


#: Published accuracies, keyed by the name of the network with its weights (`model.name`). Source:
#: results/results-imagenet.csv of timm (github.com/huggingface/pytorch-image-models, commit 0173a139).
IMAGENET = {
    "deit_base_patch16_224.fb_in1k": Published(81.992, 86.57),
    "deit_small_patch16_224.fb_in1k": Published(79.844, 22.05),
    "deit_tiny_patch16_224.fb_in1k": Published(72.172, 5.72),
    "efficientformer_l1.snap_dist_in1k": Published(80.498, 12.29),
    "efficientformer_l7.snap_dist_in1k": Published(83.382, 82.23),
    "efficientformerv2_l.snap_dist_in1k": Published(83.632, 26.32),
    "efficientformerv2_s0.snap_dist_in1k": Published(76.118, 3.60),
    "mobilenetv2_100.ra_in1k": Published(72.976, 3.50),
    # The accuracy is that of github.com/mit-han-lab/proxylessnas, and the parameters were counted.
    "proxyless_mobile.mit_in1k": Published(74.6, 4.08),
    "resnet18.tv_in1k": Published(69.760, 11.69),
    "resnet50.tv_in1k": Published(76.130, 25.56),
    "swinv2_small_window8_256.ms_in1k": Published(83.854, 49.73),
    "tf_efficientnet_lite0.in1k": Published(74.830, 4.65),
    "vit_base_patch16_224.augreg_in1k": Published(79.154, 86.57),
    # These weights have no ImageNet-1k classifier. The accuracy is that of the same weights after fine-tuning
    # (vit_base_patch16_224.orig_in21k_ft_in1k).
    "vit_base_patch16_224.orig_in21k": Published(81.786, 86.57),
    "vit_small_patch16_224.augreg_in21k_ft_in1k": Published(81.384, 22.05),
}
#: Size classes of networks in millions of parameters (from, to), in the order in which networks are chosen.
_SIZES = ((15.0, 40.0), (0.0, 15.0), (40.0, math.inf))
#: Smallest and largest number of networks of ``model=auto``, and the number of arms that each network should have.
FEWEST, MOST, ARMS = 2, 4, 3
#: Maximum number of networks of ``model=auto`` that are examined, relative to the number of networks that take part. If
#: no recipe fits the memory budget, all recipes of a network are examined, which takes about a minute.
EXAMINED = 2

#: Function that proposes arms for a network, in a separate process. Its arguments are the network, the largest number
#: of different recipes, and the time in seconds.
ProposeOne = Callable[[str, int, float], Proposed]


def preferred(options: Mapping[str, str]) -> list[str]:
    """Return options of the group ``model`` in the order in which ``model=auto`` uses them.

    `options` maps each option to its `model.name`. The most accurate network of each size class comes first, then the
    second most accurate network of each class. Published accuracies alone would select only large networks, which
    execute few steps in a short time. Networks without a published accuracy follow in alphabetical order. Only one
    option is returned for each name.
    """
    unique: dict[str, str] = {}
    for option, name in sorted(options.items()):
        unique.setdefault(name, option)
    known = sorted((name for name in unique if name in IMAGENET), key=lambda name: -IMAGENET[name].top1)
    classes = [[name for name in known if low <= IMAGENET[name].parameters < high] for low, high in _SIZES]
    turns = [name for turn in itertools.zip_longest(*classes) for name in turn if name is not None]
    return [unique[name] for name in [*turns, *(name for name in unique if name not in IMAGENET)]]


def most_networks(count: int) -> int:
    """Return the number of networks of ``model=auto`` for a number of arms.

    Each network should have `ARMS` arms, because its first recipe may be unsuitable for the images. Short budgets
    therefore have two or three networks.
    """
    return max(FEWEST, min(MOST, count // ARMS))


def examined(order: Sequence[str], options: Mapping[str, str], limit: int) -> list[str]:
    """Return the first options in `order` that ``model=auto`` examines, so that `limit` networks take part.

    The result contains the smallest network, because it may be the only network that fits the memory budget. `options`
    maps each option to its `model.name`.
    """
    published = {option: IMAGENET.get(options[option]) for option in order}
    sizes = {option: math.inf if one is None else one.parameters for option, one in published.items()}
    smallest = min(order, key=sizes.__getitem__)
    first = list(order[: EXAMINED * limit])
    return first if smallest in first else [*first[:-1], smallest]


def propose_each(
    networks: Sequence[str],
    limit: int | None,
    count: int,
    seconds: float,
    memory_bytes: int,
    propose: ProposeOne,
    clock: Callable[[], float] = time.monotonic,
) -> Proposed:
    """Return up to `count` arms of several networks, and at least one arm of each network that can be used.

    The networks share the time, and each network has at least half of an equal share. The arms of the networks
    alternate.

    Args:
        networks: networks in the order of preference. The name of a network that is not shown is "".
        limit: number of networks that take part (``model=auto``). Networks that cannot be used are then replaced by the
            next networks. If None, all networks take part, and errors of a network are raised.
        count: number of arms.
        seconds: time in seconds for all proposals, without the starts of processes.
        memory_bytes: memory budget.
        propose: function that proposes arms for a network.
        clock: function that returns the time in seconds.

    Raises:
        UserError: If the data or a network cannot be used, or if no recipe of any network fits `memory_bytes`.
    """
    began, starts = clock(), list[float]()
    found: dict[str, Proposed] = {}
    reasons: dict[str, str] = {}
    most = min(limit or len(networks), len(networks))
    for position, network in enumerate(networks):
        usable = sum(bool(part.arms) for part in found.values())
        left = seconds - (clock() - began - sum(starts))
        if limit is not None and usable and (usable == most or left < 0):
            break
        # If earlier networks took too long, the most accurate recipe of this network is still examined.
        share = max(left / min(most - usable, len(networks) - position), seconds / (2 * most))
        started = clock()
        try:
            part = propose(network, math.ceil(count / most), share)
        except UserError as error:
            if limit is None:
                raise (UserError(f"model={network}: {error}") if network else error) from None
            if first_line(error) in reasons.values():  # the network is not the reason
                raise
            reasons[network] = first_line(error)
            continue
        starts.append(clock() - started - part.seconds)
        found[network] = part
    if not any(part.arms for part in found.values()):
        raise _refused(found, reasons, memory_bytes)
    reasons |= {network: _reason(part) for network, part in found.items() if not part.arms}
    both = {network: part for network, part in found.items() if part.arms}
    parts = [_named(network, part, len(both) > 1) for network, part in both.items()]
    return Proposed(
        arms=alternating([part.arms for part in parts], max(count, len(parts))),
        refused={recipe: reason for part in parts for recipe, reason in part.refused.items()},
        data=parts[0].data,
        seconds=clock() - began - statistics.mean(starts),
        networks=reasons,
    )


def alternating(parts: Sequence[Sequence[Arm]], count: int) -> list[Arm]:
    """Return up to `count` arms: the first arm of each part, then the second arm of each part, and so on."""
    turns = itertools.zip_longest(*parts)
    return [arm for turn in turns for arm in turn if arm is not None][:count]


def _named(network: str, part: Proposed, several: bool) -> Proposed:
    """Return proposals whose arms have the network. With several networks, names and folders begin with it."""
    arms = [
        arm.model_copy(
            update={
                "network": network,
                "name": f"{network} {arm.name}" if several else arm.name,
                "folder": f"{network}_{arm.folder}" if several else arm.folder,
            }
        )
        for arm in part.arms
    ]
    refused = {f"{network} {recipe}" if several else recipe: reason for recipe, reason in part.refused.items()}
    return part.model_copy(update={"arms": arms, "refused": refused})


def _reason(part: Proposed) -> str:
    """Return the sentence that states why no recipe of a network takes part."""
    if part.smallest is None:
        name, reason = next(iter(part.refused.items()))
        return f"No recipe can be used with this model. {name}: {reason}"
    return f"The recipe {part.smallest} needs the least memory: memory={bytes_setting(part.smallest_bytes)}."


def _refused(found: Mapping[str, Proposed], reasons: Mapping[str, str], memory_bytes: int) -> UserError:
    """Return the error for networks without recipes. The message names the smallest memory budget of all networks."""
    usable = {network: part for network, part in found.items() if part.smallest is not None}
    if not usable:
        return UserError(next(iter([*(_reason(part) for part in found.values()), *reasons.values()])))
    network = min(usable, key=lambda name: usable[name].smallest_bytes)
    smallest = usable[network]
    of = f" with model={network}" if network else ""
    do = f"The recipe {smallest.smallest}{of} needs the least memory."
    allowed = f"at least {bytes_setting(smallest.smallest_bytes)}"
    other = "Increase memory, or choose a smaller model, batch size or image size."
    return SettingError("memory", format_bytes(memory_bytes), allowed, f"{do} {other}")
