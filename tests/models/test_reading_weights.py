"""Tests of loading weights: keys and prefixes, several sets of weights in a file, and files of other networks."""

from __future__ import annotations

import argparse
from collections import OrderedDict, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lightning.fabric.utilities.data import AttributeDict
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.utils import prune

from efficient_ft.config import ModelConfig
from efficient_ft.core.errors import SettingError
from efficient_ft.models import factory
from efficient_ft.models.loading_report import LoadingReport, loading_report
from tests.models.small_vit import assert_equal, assert_refused, backbone, pretend_pretrained, small

State = dict[str, Tensor]

PREFIXES = (
    "", "net.", "backbone.", "network.", "model.model.", "model._orig_mod.", "module.", "base_encoder.", "encoder.",
    "student.", "model.net.module.", "a-name.with spaces.",
)  # fmt: skip


def prefixed(weights: State, prefix: str) -> State:
    return {prefix + name: value for name, value in weights.items()}


#: Content of a file with weights, and the key that the report names, for each case.
NESTINGS: dict[str, tuple[Any, str]] = {
    "flat": (lambda w: w, ""),
    "ordered": (lambda w: OrderedDict(w), ""),
    "state_dict": (lambda w: {"state_dict": w, "epoch": 3}, "state_dict"),
    "model": (lambda w: {"model": w, "args": argparse.Namespace(lr=1)}, "model"),
    "model_state_dict": (lambda w: {"model_state_dict": w, "optimizer_state_dict": _adam()}, "model_state_dict"),
    "net and acc": (lambda w: {"net": w, "acc": np.float64(93.1)}, "net"),
    "weights": (lambda w: {"weights": w}, "weights"),
    "ema alone": (lambda w: {"ema": w, "updates": 7}, "ema"),
    "deeper": (lambda w: {"state": {"nets": [{"d": w}]}}, "state.nets.0.d"),
    "a list": (lambda w: [w, 3], "0"),
    "a number": (lambda w: {0: w}, "0"),
    "other objects": (
        lambda w: {"sd": w, "hyper_parameters": AttributeDict(lr=1), "p": Path("x"), "c": defaultdict(list, a=[1])},
        "sd",
    ),
    "attribute dict": (lambda w: AttributeDict(w), ""),
}


def _adam() -> dict[str, Any]:
    return {"state": {0: {"step": torch.tensor(1.0), "exp_avg": torch.zeros(3)}}, "param_groups": [{"params": [0]}]}


def load(path: Path, held: Any, classes: int = 1000, config: Any = small, **changes: Any) -> nn.Module:
    torch.save(held, path)
    return factory.create_model(config(weights=str(path), **changes), classes)


def load_fails(said: str, folder: Path, held: Any, classes: int = 1000, config: Any = small, **changes: Any) -> None:
    with pytest.raises(SettingError, match=said):
        load(folder / "w.pth", held, classes, config, **changes)


def report(model: nn.Module) -> LoadingReport:
    found = loading_report(model)
    assert found is not None
    return found


@pytest.fixture(scope="module")
def weights() -> State:
    return pretend_pretrained().state_dict()


def shifted(weights: State) -> State:
    return {name: value + 1 for name, value in weights.items()}


# ------------------------------------------------------------------------------------------------ keys and prefixes
@pytest.mark.vary_one
@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("nesting", NESTINGS)
def test_weights_are_found(tmp_path: Path, weights: State, nesting: str, prefix: str) -> None:
    make, key = NESTINGS[nesting]
    model = load(tmp_path / "w.pth", make(prefixed(weights, prefix)))
    assert_equal(model.state_dict(), weights)
    found = report(model)
    assert (found.loaded, found.total, found.key, found.prefix) == (32, 32, key, prefix)
    assert not found.new_heads
    assert len(found.lines(1000)) == 1 + bool(found.left_out)


@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    keys=st.lists(st.text("abcdelmnot_0123", min_size=1, max_size=8), max_size=4),
    prefix=st.lists(st.text("abcdelmnot_0123", min_size=1, max_size=8), max_size=3),
    others=st.dictionaries(st.text("xyz", min_size=1, max_size=4), st.just(torch.zeros(2)), max_size=3),
)
def test_weights_are_found_under_any_name(
    tmp_path: Path, weights: State, keys: list[str], prefix: list[str], others: State
) -> None:
    held: Any = {**prefixed(weights, "".join(f"{part}." for part in prefix)), **others}
    for key in keys:
        held = {key: held, **others}
    model = load(tmp_path / "w.pth", held)
    assert_equal(model.state_dict(), weights)
    assert report(model).loaded == 32


@pytest.mark.first(1, "exhaustive")
@pytest.mark.parametrize(
    "name",
    ["deit_tiny_patch16_224", "swin_tiny_patch4_window7_224", "efficientnet_b0", "resnet18",
     "vit_small_patch14_reg4_dinov2"],
)  # fmt: skip
def test_networks_at_their_real_size(tmp_path: Path, name: str) -> None:
    torch.manual_seed(3)
    source = timm.create_model(name, num_classes=7)
    held = {"state_dict": {**prefixed(source.state_dict(), "model.net."), "loss.weight": torch.ones(7)},
            "optimizer_states": [_adam()]}  # fmt: skip
    model = load(tmp_path / "w.ckpt", held, 7, lambda **changes: ModelConfig(name=name, **changes))
    assert_equal(model.state_dict(), source.state_dict())
    found = report(model)
    assert (found.key, found.prefix, found.loaded) == ("state_dict", "model.net.", len(source.state_dict()))
    assert found.left_out["state_dict.loss.weight"] == "elsewhere in the file"


@pytest.mark.parametrize("wrapper", ["_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"])
def test_wrappers_inside_of_names(tmp_path: Path, weights: State, wrapper: str) -> None:
    held = {f"model.{name.replace('attn.', f'{wrapper}.attn.')}": value for name, value in weights.items()}
    assert_equal(load(tmp_path / "w.pth", held).state_dict(), weights)


def test_counters_buffers_and_heads_are_left_out_with_the_reason(tmp_path: Path, weights: State) -> None:
    extra = {"total_ops": torch.zeros(1), "blocks.0.total_params": torch.zeros(1), "mask_token": torch.zeros(1, 1, 16)}
    projection = {"head.mlp.0.weight": torch.zeros(8, 16)}
    held = {**{k: v for k, v in weights.items() if not k.startswith("head.")}, **extra, **projection}
    found = report(load(tmp_path / "w.pth", held, 7))
    assert found.left_out["blocks.0.total_params"] == "from a profiler"
    assert found.left_out["head.mlp.0.weight"] == "of another head"
    assert found.new_heads == {"head": "absent from the file"}


def test_an_autoencoder_gives_its_encoder(tmp_path: Path, weights: State, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    decoder = {
        f"decoder_blocks.{i}{k[8:]}": v for i in range(4) for k, v in weights.items() if k.startswith("blocks.0")
    }
    held = {"model": {**{k: v for k, v in weights.items() if "head" not in k}, **decoder, "mask_token": torch.ones(2)}}
    model = load(tmp_path / "mae.pth", held, 5)
    assert_equal(backbone(model), {k: v for k, v in weights.items() if not k.startswith("head.")})
    assert (
        "Not loaded: 48 not part of the model (decoder_blocks.*); 1 not used by timm's model (mask_token)."
        in caplog.text
    )
    lines = [record.getMessage() for record in caplog.records if "Weights" in record.getMessage()]
    assert lines == [f"Weights: 30 of 32 tensors from {tmp_path / 'mae.pth'} (key 'model')."]


# ------------------------------------------------------------------------------------------------ several sets
@pytest.mark.parametrize(
    ("names", "key"),
    [
        (("teacher.backbone.", "student.backbone."), "teacher.backbone"),
        (("state_dict.module.base_encoder.", "state_dict.module.momentum_encoder."), "state_dict.module.base_encoder"),
        (("model.", "ema."), "ema"),
        (("model.", "best.model.", "last.model."), "best"),
    ],
)
def test_several_sets_are_listed_and_one_is_chosen(
    tmp_path: Path, weights: State, names: tuple[str, ...], key: str
) -> None:
    sets, held = {}, {}
    current = weights
    for name in names:
        current = shifted(current)
        sets[name.rstrip(".")] = current
        held |= prefixed(current, name)
    with pytest.raises(SettingError) as caught:
        load(tmp_path / "w.pth", held)
    text = str(caught.value)
    assert text.startswith(f"model.weights_key must be one of {', '.join(sets)}, got null.")
    assert all(f"{name} (32 tensors)" in text for name in sets)
    model = load(tmp_path / "w.pth", held, weights_key=key)
    wanted = next(value for name, value in sets.items() if name.startswith(key))
    assert_equal(model.state_dict(), wanted)


def test_sets_with_the_same_values_are_one(tmp_path: Path, weights: State) -> None:
    assert_equal(load(tmp_path / "w.pth", {"a": weights, "b": dict(weights)}).state_dict(), weights)


def test_timm_s_average_is_used_and_named(tmp_path: Path, weights: State) -> None:
    held = {"state_dict": weights, "state_dict_ema": shifted(weights)}
    model = load(tmp_path / "w.pth", held)
    assert_equal(model.state_dict(), shifted(weights))
    assert "model.weights_key=state_dict selects the other weights" in report(model).lines(1000)[-1]
    assert_equal(load(tmp_path / "w.pth", held, weights_key="state_dict").state_dict(), weights)


@pytest.mark.slow
def test_files_without_names_cycles_and_names_that_are_there_twice(tmp_path: Path, weights: State) -> None:
    load_fails(r"none of its 2 names occurs in .*\. The file contains 0, 1", tmp_path, [torch.ones(2), torch.ones(3)])
    cycle: dict[str, Any] = {"net": weights}
    cycle["self"] = cycle
    assert not report(load(tmp_path / "w.pth", cycle)).left_out
    load_fails(r"The file contains a\.b\.c twice", tmp_path, {"a": {"b.c": torch.ones(1)}, "a.b": {"c": torch.ones(1)}})
    held = {"net (best)": weights, "net (last)": shifted(weights)}
    load_fails(r"Set \"model\.weights_key='net \(last\)'\" or another", tmp_path, held)


def test_a_key_that_is_not_there_lists_those_that_are(tmp_path: Path, weights: State) -> None:
    said = r"model\.weights_key must be .*, got teachr\. .* contains teacher \(32 tensors\)"
    load_fails(said, tmp_path, {"teacher": weights, "x": torch.ones(1)}, weights_key="teachr")


# ------------------------------------------------------------------------------------------------ other networks
def deit(**changes: Any) -> ModelConfig:
    return ModelConfig(**{"name": "deit_tiny_patch16_224", **changes})


def state(name: str, **kwargs: Any) -> State:
    torch.manual_seed(5)
    return timm.create_model(name, **kwargs).state_dict()


@pytest.mark.first(3, "slow")
@pytest.mark.parametrize(
    ("name", "other", "kwargs", "said"),
    [
        ("deit_tiny_patch16_224", "deit_tiny_distilled_patch16_224", {},
         r"the file has 2 prefix tokens \(class, distillation\), but the model has 1 prefix token \(class\)\. "
         r"The file fits model=timm model\.name=deit_tiny_distilled_patch16_224\."),
        ("deit_tiny_distilled_patch16_224", "deit_tiny_patch16_224", {},
         r"the file has 1 prefix token \(class\), but the model has 2 prefix tokens"),
        ("vit_tiny_patch16_224", "vit_tiny_patch16_224", {"reg_tokens": 4, "no_embed_class": True},
         r"5 prefix tokens \(class, 4 registers\), but the model has 1 .*models have these prefix tokens: \w*reg4"),
        ("deit_tiny_patch16_224", "deit_tiny_patch16_224", {"class_token": False, "global_pool": "avg"},
         r"the file has no prefix token, but the model has 1 prefix token \(class\)"),
        ("deit_tiny_patch16_224", "deit_small_patch16_224", {},
         r"the file has 12 blocks of width 384, but the model has 12 of width 192\. .*name=deit_small_patch16_224\."),
        ("deit_tiny_patch16_224", "deit_tiny_patch16_224", {"depth": 14}, "has 14 blocks, but the model has 12"),
        ("deit_tiny_patch16_224", "deit_tiny_patch16_224", {"depth": 10}, "has 10 blocks, but the model has 12"),
        ("deit_tiny_patch16_224", "deit_tiny_patch16_224", {"qkv_bias": False},
         r"missing: blocks\.0\.attn\.qkv\.bias.*\+model\.kwargs\.qkv_bias=false"),
        ("deit_tiny_patch16_224", "deit_tiny_patch16_224", {"init_values": 0.1},
         r"unexpected: blocks\.0\.ls1\.gamma.*\+model\.kwargs\.init_values=1e-5"),
        ("deit_tiny_patch16_224", "cait_xxs24_224", {}, r"another model: the file has 24 blocks, but the model has 12"),
        ("deit_tiny_patch16_224", "deit_tiny_patch16_224", {"no_embed_class": True},
         r"has 196 entries \(14×14 patches\) in the file, but 197 .*no_embed_class=true"),
        ("deit_tiny_patch16_224", "deit_tiny_patch16_224", {"img_size": (96, 128)}, r"set model\.image_size to \["),
        ("resnet18", "resnet34", {}, r"layer1 has 3 parts in the file, but 2 parts in .*model\.name=resnet34\."),
        ("deit_tiny_patch16_224", "resnet18", {}, r"none of its 122 names .*The file fits .*model\.name=resnet18\."),
    ],
)  # fmt: skip
def test_another_network_is_explained_in_words(
    tmp_path: Path, name: str, other: str, kwargs: dict[str, Any], said: str
) -> None:
    load_fails(said, tmp_path, {"net": prefixed(state(other, **kwargs), "module.")}, 10, ModelConfig, name=name)


@pytest.mark.slow
def test_left_out_tensors_never_hide_a_mismatch(tmp_path: Path, weights: State) -> None:
    weights = {name: value for name, value in weights.items() if name != "blocks.1.norm1.weight"}
    held = {"state_dict": {**prefixed(weights, "m."), "loss.weight": torch.ones(2)}}
    load_fails(r"missing: blocks\.1\.norm1\.weight", tmp_path, held)


def test_changed_shapes_are_reported(tmp_path: Path) -> None:
    held = state("vit_tiny_patch16_224", patch_size=32)
    found = report(load(tmp_path / "w.pth", held, 10, deit, image_size=160, name="vit_tiny_patch16_224"))
    assert "position embeddings were resized from 50 to 101 positions" in found.notes
    assert "patches were resized from 32×32 to 16×16" in found.notes
    gray = load(tmp_path / "r.pth", state("resnet18"), 10, ModelConfig, name="resnet18", kwargs={"in_chans": 1},
                mean=(0.5,), std=(0.5,))  # fmt: skip
    assert report(gray).notes == ("conv1.weight was changed from 3 to 1 channels",)


def test_adapters_that_are_not_merged(tmp_path: Path, weights: State) -> None:
    held = {k.replace("qkv.", "qkv.base_layer."): v for k, v in weights.items()}
    held["blocks.0.attn.qkv.lora_A.default.weight"] = torch.zeros(4, 16)
    load_fails("Merge the adapters into the network", tmp_path, held)


@pytest.mark.filterwarnings("ignore")
def test_other_forms_of_the_weights_are_named(tmp_path: Path) -> None:
    quantized = torch.ao.quantization.quantize_dynamic(pretend_pretrained(), {nn.Linear})
    load_fails("quantized weights", tmp_path, quantized.state_dict())
    pruned = pretend_pretrained()
    prune.l1_unstructured(pruned.get_submodule("blocks.0.mlp.fc1"), "weight", 0.5)
    load_fails(r"prune\.remove", tmp_path, pruned.state_dict())
    load_fails("FSDP", tmp_path, {"_fsdp_wrapped_module._flat_param": torch.zeros(9)})


@pytest.mark.slow
def test_a_backbone_of_numbered_parts_is_not_confused_with_one_of_them(tmp_path: Path) -> None:
    parts = {"conv1": 0, "bn1": 1, "layer1": 4, "layer2": 5, "layer3": 6, "layer4": 7}
    held = {f"backbone.{parts[one]}.{rest}": value for name, value in state("resnet18").items()
            for one, _, rest in [name.partition(".")] if one in parts}  # fmt: skip
    said = r"few of its \d+ names occur in the network\. The file contains backbone\.0\.weight"
    load_fails(said, tmp_path, held, 10, ModelConfig, name="resnet18")


# ------------------------------------------------------------------------------------------------ kinds of values
@pytest.mark.parametrize(
    "kind",
    [torch.int8, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn, "sparse", "quantized", "meta"],
    ids=str,
)
@pytest.mark.filterwarnings("ignore")
def test_tensors_that_cannot_be_weights(tmp_path: Path, weights: State, kind: Any) -> None:
    value = weights["blocks.1.mlp.fc1.weight"]
    made = {
        "sparse": value.to_sparse,
        "quantized": lambda: torch.quantize_per_tensor(value, 0.1, 0, torch.qint8),
        "meta": lambda: value.to("meta"),
    }
    odd = made[kind]() if isinstance(kind, str) else value.to(kind)
    held = {**weights, "blocks.1.mlp.fc1.weight": odd}
    load_fails(r"floating-point numbers .*: blocks\.1\.mlp\.fc1\.weight \(", tmp_path, held)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_floats_are_weights(tmp_path: Path, weights: State, dtype: torch.dtype) -> None:
    model = load(tmp_path / "w.pth", {name: value.to(dtype) for name, value in weights.items()})
    assert_equal(model.state_dict(), weights, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("head.weight", torch.tensor(1.0), r"head\.weight \(a single number in the file, but 1000×16 in the model\)"),
        ("head.bias", torch.tensor(1.0), r"head\.bias \(a single number"),
        ("blocks.0.attn.qkv.weight", torch.ones(48), r"attn\.qkv\.weight \(48 in the file, but 48×16 in the model"),
        ("pos_embed", torch.ones(()), "prefix tokens|single number"),
        ("cls_token", torch.ones(16), "prefix token|cls_token"),
        ("head.bias", torch.ones(7), r"head\.bias \(7 in the file, but 1000 in the model\)"),
    ],
)  # fmt: skip
def test_tensors_of_a_wrong_shape(tmp_path: Path, weights: State, name: str, value: Tensor, said: str) -> None:
    load_fails(said, tmp_path, {**weights, name: value})


@pytest.mark.parametrize(
    ("value", "said"),
    [(float("nan"), "NaN or infinity"), (float("inf"), "NaN or infinity"), (-1.0, "negative variances"),
     (1e38, r"values up to 1e\+38")],
)  # fmt: skip
def test_senseless_values_are_refused(tmp_path: Path, value: float, said: str) -> None:
    held = state("resnet18")
    held["layer1.0.bn1.running_var"][3] = value
    load_fails(rf"layer1\.0\.bn1\.running_var contains {said}", tmp_path, held, 10, ModelConfig, name="resnet18")


def test_suspicious_values_are_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    held = state("resnet18")
    held["layer1.0.bn1.running_var"].fill_(1e10)
    held["layer1.0.bn2.running_var"].zero_()
    load(tmp_path / "w.pth", held, 10, ModelConfig, name="resnet18")
    assert "layer1.0.bn1.running_var: values up to 1e+10" in caplog.text
    assert "layer1.0.bn2.running_var: the running variance is 0 in most channels" in caplog.text
    zeros = {name: torch.zeros_like(value) for name, value in state("resnet18").items()}
    load(tmp_path / "w.pth", zeros, 10, ModelConfig, name="resnet18")
    assert "all values are 0" in caplog.text


def test_a_single_layer_that_was_never_filled_is_named(tmp_path: Path, weights: State) -> None:
    never = {"blocks.1.attn.qkv.weight": 0.0, "blocks.0.mlp.fc1.weight": 0.3}
    held = {n: torch.full_like(v, never[n]) if n in never else v for n, v in weights.items()}
    assert report(load(tmp_path / "w.pth", held)).suspicious == (
        "blocks.1.attn.qkv.weight: all values are 0, as in a tensor that was never initialized",
        "blocks.0.mlp.fc1.weight: all values are equal",
    )
    start = ("cls_token", "pos_embed", "bias", "norm1.weight", "head.weight")  # these tensors may remain zero
    held = {n: torch.zeros_like(v) if n.endswith(start) else v for n, v in weights.items()}
    assert report(load(tmp_path / "w.pth", held)).suspicious == ()


# ------------------------------------------------------------------------------------------------ forms of files
@pytest.mark.parametrize("nested", [False, True])
def test_a_whole_model_is_refused_with_the_way_out(tmp_path: Path, nested: bool) -> None:
    model = pretend_pretrained()
    held = {"model": model} if nested else model
    load_fails(r"a whole model .*safetensors\.torch\.save_model\(model, FILE\)", tmp_path, held)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "The file is empty"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0", "Git LFS pointer"),
        (b"\xff\xd8\xff\xe0\0\x10JFIF\0", "The file is an image"),
        (b"%PDF-1.7\n", "The file is a PDF document"),
        (b"404: Not Found\n", "The file is a text file"),
        (b"<!DOCTYPE html><html>", "a web page"),
        (b"\x89HDF\r\n\x1a\n", "HDF5"),
        (b'{"weight_map": {}}', "shards"),
        (b"\x1f\x8b\x08\x00", "compressed archive"),
        (b"\x01\x02no weights\xfe", "The file cannot be read"),
    ],
)
@pytest.mark.parametrize("suffix", [".pth", ".safetensors", ".npz"])
def test_files_that_hold_no_weights(tmp_path: Path, content: bytes, said: str, suffix: str) -> None:
    file = tmp_path / f"w{suffix}"
    file.write_bytes(content)
    assert_refused(said, file)


def test_a_torchscript_program_and_a_folder(tmp_path: Path) -> None:
    torch.jit.trace(pretend_pretrained().eval(), torch.zeros(1, 3, 224, 224)).save(str(tmp_path / "w.pt"))
    assert_refused("TorchScript", tmp_path / "w.pt")
    assert_refused(r"an existing file.*contains 1 weights file\. Pass this file: model\.weights=.*w\.pt", tmp_path)
    trainer = tmp_path / "checkpoint-500"
    trainer.mkdir()
    for name in ("optimizer.pt", "rng_state_0.pth", "model.safetensors", "training_args.bin"):
        (trainer / name).touch()
    assert_refused(r"contains 1 weights file\..*model\.safetensors", trainer)
    (trainer / "model.safetensors").rename(trainer / "adapter_model.safetensors")
    assert_refused(r"an adapter\. Merge the adapter", trainer)
    for number in (1, 2):
        (tmp_path / f"model-0000{number}-of-00002.safetensors").touch()
    assert_refused("shards of one model", tmp_path)


@pytest.mark.parametrize("address", ["https://example.com/w.pth", "hf-hub:timm/vit", "hf_hub:timm/vit", "s3://b/w.pt"])
def test_an_address_is_not_a_file(address: str) -> None:
    with pytest.raises(SettingError, match=rf"got {address}\. Download the file, and pass its local path\."):
        factory.create_model(small(weights=address), 7)


def test_reasons_for_unreadable_files_end_with_a_sentence(tmp_path: Path, weights: State) -> None:
    torch.save({name: value.numpy() for name, value in weights.items()}, tmp_path / "arrays.pth")
    assert_refused(r"contains cls_token.*NumPy arrays .* are not loaded\..*arrays\)\.$", tmp_path / "arrays.pth")
    torch.save(weights, tmp_path / "half.pth")
    content = (tmp_path / "half.pth").read_bytes()
    (tmp_path / "half.pth").write_bytes(content[: len(content) // 2])
    assert_refused(r"failed finding central directory\.$", tmp_path / "half.pth")


def test_a_truncated_file_is_named_as_such(tmp_path: Path, weights: State) -> None:
    torch.save(weights, tmp_path / "w.pth")
    (tmp_path / "w.pth").write_bytes((tmp_path / "w.pth").read_bytes()[:5000])
    assert_refused(r"The file cannot be read: the file is truncated or damaged\.$", tmp_path / "w.pth")


def test_the_form_is_recognized_by_its_content(tmp_path: Path, weights: State) -> None:
    save_file(weights, tmp_path / "w.bin")
    assert_equal(factory.create_model(small(weights=str(tmp_path / "w.bin")), 1000).state_dict(), weights)
    torch.save(weights, tmp_path / "w.safetensors")
    assert_equal(factory.create_model(small(weights=str(tmp_path / "w.safetensors")), 1000).state_dict(), weights)
    np.savez(tmp_path / "w.npz", **{name: value.numpy() for name, value in weights.items()})
    assert_equal(factory.create_model(small(weights=str(tmp_path / "w.npz")), 1000).state_dict(), weights)


def test_a_real_file() -> None:
    file = Path(__file__).resolve().parents[3] / "shared" / "data" / "deit_tiny.safetensors"
    if not file.is_file():
        pytest.skip("the file deit_tiny.safetensors is not here")
    found = report(factory.create_model(deit(weights=str(file)), 10))
    assert (found.loaded, found.total, found.suspicious, found.left_out) == (150, 152, (), {})
    assert found.lines(10)[1:] == ["Changed: head newly initialized for 10 classes (1000 in the file)."]
