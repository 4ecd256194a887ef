"""Explain why weights do not fit a network, and suggest a timm model that fits."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping
from difflib import SequenceMatcher
from pathlib import Path

import timm
import torch
from torch import Tensor, nn

from efficient_ft.models.checkpoint import Contents, why_unusable
from efficient_ft.models.matching import PREFIX_TOKENS, Fit, compare, some

#: Maximum number of models that the search for a fitting model builds on the meta device.
_TRIED = 32
#: Common models, which are tried first if the names in the file belong to a different family of models.
_COMMON = ("resnet18", "resnet50", "deit_tiny_patch16_224", "vit_base_patch16_224", "swin_tiny_patch4_window7_224",
           "convnext_tiny", "efficientnet_b0", "mobilenetv2_100", "mobilenetv3_large_100", "resnet34", "resnet101",
           "deit_small_patch16_224", "deit_base_patch16_224", "vit_small_patch16_224", "densenet121", "vgg16",
           "regnety_016", "tf_efficientnet_lite0", "beit_base_patch16_224", "mixer_b16_224")  # fmt: skip
#: Error messages for quantized, pruned and sharded weights, by the suffix of their tensor names.
_OTHER_FORMS = {
    "._packed_params.0": "The file contains quantized weights. Save the weights of the network before quantization.",
    ".weight_orig": "The file contains pruned weights and masks. Merge the masks into the weights first:"
    " torch.nn.utils.prune.remove(module, 'weight') for each pruned module.",
    "_flat_param": "The file contains weights that FSDP has flattened. Save a full state dict"
    " (torch: StateDictType.FULL_STATE_DICT).",
}
#: Arguments for variants of timm's ViT. The keys are the suffixes of tensor names that identify a variant.
_FORM_ARGUMENTS = {(".ls1.gamma", ".ls2.gamma"): "init_values=1e-5", (".attn.qkv.bias",): "qkv_bias=false"}
_INDEX = re.compile(r"(?:^|(?<=\.))\d+(?=\.)")


def explain(
    name: str,
    path: Path,
    contents: Contents,
    fit: Fit,
    own: Mapping[str, Tensor],
    heads: tuple[str, ...],
    setting: str = "model=timm model.name",
) -> str:
    """Explain in one or more sentences why the nearest part of a file does not fit the network `name`.

    `own` contains the network's tensors, and `heads` contains the names of the network's classifiers. `setting` is the
    text before the name of a suggested model, for example ``model.encoder``.
    """
    given = contents.under(fit.prefix)
    if any(".lora_" in one or ".base_layer." in one for one in contents.tensors):
        return "The file contains LoRA adapters. Merge the adapters into the network (peft: merge_and_unload())."
    for ending, sentence in _OTHER_FORMS.items():
        if any(one.endswith(ending) for one in contents.tensors):
            return sentence
    odd = [f"{one} ({kind})" for one, value in given.items() if (kind := why_unusable(value))
           and (one not in own or own[one].is_floating_point())
           and not (one.endswith("num_batches_tracked") or "index" in one or "position_ids" in one)]  # fmt: skip
    if odd and not fit.missing and not fit.foreign:
        return f"Weights must be floating-point numbers (fp32, fp16 or bf16), unlike these tensors: {some(odd)}."
    if fit.model is None and fit.taken and not fit.error:  # compare the converted tensors
        rest = {one: given.get(one, torch.empty(0)) for one in (*fit.foreign, *fit.left_out)}
        heads_made = tuple(f"{head}." for head in fit.new_heads)
        given = {one: value for one, value in fit.taken.items() if not one.startswith(heads_made)} | rest
    alike, search = sum(one in own for one in given), True
    if fit.model is not None:
        details = "; ".join(_lists(fit))
    elif fit.error and alike * 3 <= len(own):
        details = f"the tensor names in the file cannot be converted ({fit.error})"
    elif alike * 20 <= len(own):
        count = "only a few of its {} names occur" if alike else "none of its {} names occurs"
        held = contents.tensors if alike else given  # a part may match by coincidence, so list the whole file
        details = (
            f"{count.format(len(contents.tensors))} in the network. The file contains {some(list(held))},"
            f" but the network has {some(list(own))}"
        )
    else:
        structure = _structure(given, own)
        facts = [*_tokens(given, own, positions=not structure), *structure]
        details = "; ".join(facts or _lists(fit)) or fit.error
        search = bool(facts or fit.missing or fit.foreign)
    better = suggestion(name, path.stem, contents, heads) if search and timm.is_model(name) else None
    advice = "" if better is None else f" The file fits {setting}={better}."
    if better is None and "prefix token" in details:
        advice = _with_tokens(name, _prefix_tokens(given))
    advice += "" if advice else _with_argument(fit)
    if contents.objects and not fit.loaded:
        advice += f" The following Python objects in the file were not read: {some(contents.objects)}."
    return f"The weights may belong to another model: {details}.{advice}"


def _tokens(given: Mapping[str, Tensor], own: Mapping[str, Tensor], *, positions: bool) -> list[str]:
    """Return a description of the difference in prefix tokens.

    If there is no difference and `positions` is True, describe the difference in position embeddings instead.
    """
    theirs, ours = _prefix_tokens(given), _prefix_tokens(own)
    if theirs != ours:
        return [f"the file has {_words(theirs)}, but the model has {_words(ours)}"]
    if not positions:
        return []
    name = next((n for n in own if n in given and n.rpartition(".")[2] in ("pos_embed", "position_embedding")), None)
    if name is None or given[name].ndim != 3 or own[name].ndim != 3 or given[name].shape[2] != own[name].shape[2]:
        return []
    there, here = given[name].shape[1], own[name].shape[1]
    if there == here:
        return []
    count = sum(ours.values())
    facts = (
        f"the position embedding has {_positions(there, count)} in the file, but {_positions(here, count)} in the model"
    )
    if count and not _is_square(there - count) and _is_square(there):
        facts += ". The position embedding may exclude the prefix tokens. If so, set +model.kwargs.no_embed_class=true"
    return [f"{facts}. For images that are not square, set model.image_size to [height, width] of the training images"]


def _prefix_tokens(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Return the number of prefix tokens of each kind."""
    present = {kind: tensors[name] for name, kind in PREFIX_TOKENS.items() if name in tensors}
    return {kind: value.shape[1] if value.ndim == 3 else 1 for kind, value in present.items()}


def _words(tokens: Mapping[str, int]) -> str:
    if not tokens:
        return "no prefix token"
    kinds = [kind if count == 1 else f"{count} {kind}s" for kind, count in tokens.items()]
    count = sum(tokens.values())
    return f"{count} prefix token{'s' * (count > 1)} ({', '.join(kinds)})"


def _with_tokens(name: str, tokens: Mapping[str, int]) -> str:
    """Return a sentence that lists timm models with these prefix tokens, or an empty string."""
    pattern = (
        f"*reg{tokens['register']}*" if "register" in tokens else "*distilled*" if "distillation" in tokens else ""
    )
    names = list(timm.list_models(pattern)) if pattern else []
    names.sort(key=lambda one: SequenceMatcher(None, name, one).ratio(), reverse=True)
    return f" The following timm models have these prefix tokens: {', '.join(names[:3])}." if names else ""


def _with_argument(fit: Fit) -> str:
    """Return a sentence that suggests an argument for the ViT variant in the file, or an empty string."""
    names = (*fit.missing, *fit.foreign)
    for ends, argument in _FORM_ARGUMENTS.items():
        if names and not fit.misshapen and all(one.endswith(ends) for one in names):
            return f" The variant of the network in the file may require +model.kwargs.{argument}."
    return ""


def _is_square(number: int) -> bool:
    return number > 0 and math.isqrt(number) ** 2 == number


def _positions(number: int, tokens: int) -> str:
    """Describe `number` position embeddings as a square grid of patches, with or without `tokens` prefix tokens."""
    for more in (tokens, 0):
        if _is_square(number - more):
            side = math.isqrt(number - more)
            others = f" and {more} prefix token{'s' * (more > 1)}" if more else ""
            return f"{number} entries ({side}×{side} patches{others})"
    return f"{number} entries"


def _structure(given: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> list[str]:
    """Return descriptions of the differences in depth, width and patch size."""
    facts = []
    theirs, ours = _depths(given), _depths(own)
    deep = [one for one in ours if one in theirs and theirs[one] != ours[one]]
    there, here = _width(given), _width(own)
    if there and here and there != here:
        at = next((one for one in ("blocks", "layers", "stages") if one in theirs and one in ours), None)
        count = (f"{theirs[at]} {at}", f"{ours[at]}") if at else ("a stem", "a stem")
        facts.append(f"the file has {count[0]} of width {there}, but the model has {count[1]} of width {here}")
        deep = [one for one in deep if one != at]
    for one in deep[:2]:
        plain = one in ("blocks", "layers", "stages")
        facts.append(f"the file has {theirs[one]} {one}, but the model has {ours[one]}" if plain
                     else f"{one} has {theirs[one]} parts in the file, but {ours[one]} parts in the model")  # fmt: skip
    patches = [tensors.get("patch_embed.proj.weight", torch.empty(0)) for tensors in (given, own)]
    sizes = [f"{patch.shape[-2]}×{patch.shape[-1]}" for patch in patches if patch.ndim == 4]
    if len(set(sizes)) == 2:
        facts.append(f"the file has patches of {sizes[0]} pixels, but the model has patches of {sizes[1]} pixels")
    return facts


def _lists(fit: Fit) -> list[str]:
    """For each kind of difference, return a text that lists the tensors with this difference."""
    scalars = {name: words for name, words in fit.misshapen.items() if "single number" in words}
    shapes = [f"{name} ({words})" for name, words in (scalars or fit.misshapen).items()]
    parts = {"missing": fit.missing, "unexpected": fit.foreign, "of a different shape": shapes}
    return [f"{what}: {some(names)}" for what, names in parts.items() if names]


def _depths(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Return the number of modules in each module list, by the name of the list."""
    entries: dict[str, set[str]] = {}
    for name in tensors:
        for index in _INDEX.finditer(name):
            entries.setdefault(name[: index.start()].rstrip("."), set()).add(index[0])
    return {name: len(numbers) for name, numbers in entries.items() if name}


def _width(tensors: Mapping[str, Tensor]) -> int | None:
    """Return the number of channels of the patch embedding or the tokens, or None if the number is unknown."""
    for name in ("patch_embed.proj.weight", "cls_token", "pos_embed"):
        value = tensors.get(name)
        if value is not None and value.ndim >= 3:
            return value.shape[0 if name.endswith("weight") else -1]
    return None


def suggestion(name: str, stem: str, contents: Contents, heads: tuple[str, ...]) -> str | None:
    """Return the name of a timm model that fits the tensors of a file, or None if a short search finds none.

    `name` is the name of the model that does not fit, and `heads` contains the names of its classifiers. `stem` is the
    name of the file without its extension.
    """
    for other in itertools.islice(_by_likeness(name, stem, contents), _TRIED):
        try:
            with torch.device("meta"):
                model = timm.create_model(other)
        except Exception:  # some constructors read tensor values, which meta tensors lack
            continue
        if _fits(model, contents, heads):
            return other
    return None


def _fits(model: nn.Module, contents: Contents, heads: tuple[str, ...]) -> bool:
    own = model.state_dict()
    classifier = model.pretrained_cfg.get("classifier") if isinstance(model.pretrained_cfg, dict) else None  # type: ignore[union-attr]
    names = (classifier,) if isinstance(classifier, str) else tuple(classifier or heads)
    first = next(iter(own))
    for full in contents.tensors:
        if full == first or full.endswith(f".{first}"):
            prefix = full[: len(full) - len(first)]
            fit = compare(prefix, contents.under(prefix), own, model, names)
            return fit.complete and fit.loaded * 2 > len(own)
    return False


def _by_likeness(name: str, stem: str, contents: Contents) -> Iterator[str]:
    """Yield the names of timm models, ordered by how likely they are to match the file."""
    plain = name.partition(".")[0]
    ends = {full.rpartition(".")[2] for full in contents.tensors}
    hints = [word for token, word in (("dist_token", "distilled"), ("reg_token", "reg")) if token in ends]
    for full, value in contents.tensors.items():
        if full.endswith("patch_embed.proj.weight") and value.ndim == 4:
            hints.append(f"patch{value.shape[-1]}")

    def likeness(other: str) -> float:
        alike = max(SequenceMatcher(None, one, other).ratio() for one in (plain, stem))
        return sum(word in other for word in hints) + alike

    known = timm.list_models()
    module = getattr(timm.models, plain).__module__ if hasattr(timm.models, plain) else ""
    family = {one for one in known if getattr(getattr(timm.models, one, None), "__module__", "") == module}
    plain_vits = {*timm.list_models(module="vision_transformer"), *timm.list_models(module="deit")}
    if any(full.endswith(("blocks.0.attn.qkv.weight", "cls_token")) for full in contents.tensors):
        family |= plain_vits
    elif plain in plain_vits:  # the file belongs to another family of models
        family = set()
    nearest = sorted(family, key=likeness, reverse=True)
    first = dict.fromkeys([*nearest[:6], *sorted(_COMMON, key=lambda one: one not in family), *nearest])
    yield from first
    yield from sorted(set(known) - family - first.keys(), key=likeness, reverse=True)
