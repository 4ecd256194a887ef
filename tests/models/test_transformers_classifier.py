"""Tests of image classifiers from `transformers`: their weights, image sizes, files and messages."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch import nn

from efficient_ft.config import check
from efficient_ft.config.schema import ModelConfig
from efficient_ft.core.errors import SettingError, UserError
from efficient_ft.models import factory, transformers_files
from efficient_ft.models.tasks import give_heads
from efficient_ft.models.transformers_classifier import companions, portable
from efficient_ft.models.view import view
from tests.models.image_folders import NETWORKS, SMALL, write_network
from tests.models.text_models import write_model
from tests.training.runs import plain_config


def config(name: str = "vit", **changes: Any) -> ModelConfig:
    return ModelConfig(**{"name": name, "library": "transformers", **changes})


def random(name: str = "vit", **changes: Any) -> ModelConfig:
    kwargs = {key: value for key, value in SMALL.items() if key != "image_size"}
    return config(name, **{"pretrained": False, "image_size": 32, "kwargs": kwargs, **changes})


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("networks")
    return {kind: write_network(place / kind, kind) for kind in NETWORKS}


def images(size: int = 32) -> torch.Tensor:
    return torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(1))


def logits(model: nn.Module, size: int = 32, **options: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model.eval()(images(size), **options).logits
    return found


def own_network(folder: Path, classes: int, network: nn.Module) -> nn.Module:
    """Load a folder with `transformers`, and copy the head of `network`, because new heads are random."""
    auto: Any = transformers.AutoModelForImageClassification
    own = auto.from_pretrained(str(folder), num_labels=classes, ignore_mismatched_sizes=True)
    for name in view(network).head:
        own.get_submodule(name).load_state_dict(network.get_submodule(name).state_dict())
    return own  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", NETWORKS)
def test_weights_of_a_folder_are_those_of_transformers(folders: dict[str, Path], kind: str) -> None:
    model = factory.create_model(config(kind, weights=str(folders[kind])), 3)
    torch.testing.assert_close(logits(model), logits(own_network(folders[kind], 3, model)), rtol=0, atol=0)
    assert view(model).image_size == (32, 32)
    assert view(model).head
    report = factory.loading_report(model)
    assert report is not None
    assert {name.partition(".")[0] for name in report.new_heads} <= {
        "classifier",
        "cls_classifier",
        "distillation_classifier",
    }


@pytest.mark.parametrize("kind", ["vit", "deit", "dinov2", "beit", "siglip", "clip"])
@pytest.mark.parametrize("size", [24, 48])
def test_another_image_size_interpolates_positions_as_transformers_does(
    folders: dict[str, Path], kind: str, size: int
) -> None:
    given = config(kind, weights=str(folders[kind]), image_size=size)
    model = factory.create_model(given, 3)
    own = own_network(folders[kind], 3, model)
    options = {} if kind == "dinov2" else {"interpolate_pos_encoding": True}  # DINOv2 always interpolates
    torch.testing.assert_close(logits(model, size), logits(own, size, **options), rtol=1e-5, atol=1e-6)
    about: Any = model.config
    assert getattr(about, "vision_config", about).image_size == size
    report = factory.loading_report(model)
    assert report is not None
    assert any("changed from" in note or "resized" in note for note in report.notes)


@pytest.mark.parametrize("kind", ["swin", "resnet", "convnext"])
def test_networks_without_positions_accept_other_image_sizes(folders: dict[str, Path], kind: str) -> None:
    model = factory.create_model(config(kind, weights=str(folders[kind]), image_size=48), 3)
    torch.testing.assert_close(logits(model, 48), logits(own_network(folders[kind], 3, model), 48), rtol=0, atol=0)
    assert view(model).image_size == (48, 48)


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("vit", {"image_size": 30}, r"image_size must be a multiple of 4 \(the patch size of vit\), got 30.*28 or 32"),
        ("vit", {"image_size": 2}, r"model\.image_size must be .*, got 2"),
        ("clip", {"image_size": (32, 64)}, r"model\.image_size must be a size that clip can process, got \[32,64\]"),
    ],
)
def test_image_sizes_that_a_network_cannot_process(
    folders: dict[str, Path], kind: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(SettingError, match=message):
        factory.create_model(config(kind, weights=str(folders[kind]), **changes), 3)


def test_positions_that_cannot_be_resized_name_both_sizes(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"hidden_sizes": [8, 16, 32, 32], "depths": [1] * 4, "num_attention_heads": [1, 2, 4, 4]}
    network: Any = transformers.PvtForImageClassification(transformers.PvtConfig(image_size=64, **sizes))
    network.save_pretrained(tmp_path)
    transformers.ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(tmp_path)
    with pytest.raises(SettingError, match=r"images of 64×64 pixels.*specifies 32×32 pixels.*model\.image_size=64"):
        factory.create_model(config("pvt", weights=str(tmp_path)), 3)
    factory.create_model(config("pvt", weights=str(tmp_path), image_size=64), 3)


def test_the_head_is_kept_if_the_number_of_classes_is_equal(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = write_network(tmp_path, id2label={0: "cat", 1: "dog", 2: "owl", 3: "yak"})
    report = factory.loading_report(factory.create_model(config(weights=str(folder)), 4))
    assert report is not None
    assert "Kept: the classifier of the weights (4 classes: cat, dog, owl, …)." in report.lines(4)
    report = factory.loading_report(factory.create_model(config(weights=str(folder)), 5))
    assert report is not None
    assert report.new_heads == {"classifier": "4 in the file"}
    assert not report.kept


def test_an_ignored_center_crop_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = write_network(tmp_path / "net", size=None)
    transformers.CLIPImageProcessor(size={"shortest_edge": 32}, crop_size=32).save_pretrained(folder)
    with caplog.at_level("INFO"):
        factory.input_of(config(weights=str(folder)))
    assert "This run resizes images to 32×32 pixels without cropping." in caplog.text


def test_a_missing_image_processor_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = write_network(tmp_path / "net", size=None)
    with caplog.at_level("INFO"):
        spec = factory.input_of(config(weights=str(folder)))
    assert (spec.size, spec.mean[0]) == ((32, 32), pytest.approx(0.485))
    assert f"{folder} has no preprocessor_config.json. Assumed: images of 32×32 pixels" in caplog.text
    given = factory.input_of(config(weights=str(folder), mean=(0.1,) * 3, std=(0.2,) * 3))
    assert (given.mean, given.std) == ((0.1,) * 3, (0.2,) * 3)
    with pytest.raises(SettingError, match=r"model\.mean must be a list of 3 values, one per channel"):
        factory.input_of(config(weights=str(folder), mean=(0.1,), std=(0.2,)))


def test_the_size_of_the_image_processor_has_precedence(tmp_path: Path) -> None:
    folder = write_network(tmp_path, "dinov2", size=24)
    assert factory.input_of(config("dinov2", weights=str(folder))).size == (24, 24)
    assert view(factory.create_model(config("dinov2", weights=str(folder)), 3)).block_grid == (6, 6)


@pytest.mark.parametrize("kind", NETWORKS)
def test_transformers_loads_the_exported_files(folders: dict[str, Path], tmp_path: Path, kind: str) -> None:
    given = config(kind, weights=str(folders[kind]), image_size=48)
    model = factory.create_model(given, 3)
    names = ["a", "b", "c"]
    save_file({name: value.contiguous() for name, value in model.state_dict().items()}, tmp_path / "model.safetensors")
    spec = factory.input_of(given)
    for name, text in companions(model, names, spec).items():
        (tmp_path / name).write_text(text)
    auto: Any = transformers.AutoModelForImageClassification
    again = auto.from_pretrained(str(tmp_path))
    assert again.config.id2label == dict(enumerate(names))
    torch.testing.assert_close(logits(again, 48), logits(model, 48), rtol=0, atol=0)
    processor = transformers.AutoImageProcessor.from_pretrained(str(tmp_path))
    assert (processor.size["height"], tuple(processor.image_mean)) == (48, spec.mean)
    # This package also loads the folder and its weights file, without further settings.
    for place in (tmp_path, tmp_path / "model.safetensors"):
        mine = factory.create_model(config(kind, weights=str(place)), 3)
        torch.testing.assert_close(logits(mine, 48), logits(model, 48), rtol=0, atol=0)
        assert factory.input_of(config(kind, weights=str(place))) == spec


@pytest.mark.parametrize("kind", NETWORKS)
def test_a_portable_configuration_needs_no_folder(folders: dict[str, Path], kind: str) -> None:
    given = config(kind, weights=str(folders[kind]))
    model = factory.create_model(given, 3)
    found = portable(given, model).model_copy(update={"weights": None, "pretrained": False, "image_size": 32})
    again = factory.random_model(ModelConfig.model_validate(json.loads(found.model_dump_json())), 3)
    assert type(again) is type(model)
    assert {n: p.shape for n, p in again.named_parameters()} == {n: p.shape for n, p in model.named_parameters()}


def test_the_type_is_that_of_the_folder(folders: dict[str, Path], tmp_path: Path) -> None:
    def name(**model: Any) -> str:
        plain = plain_config()
        return check({**plain, "model": {"library": "transformers", **model}}).model.name

    assert name(weights=str(folders["swin"])) == "swin"
    assert name(weights=str(folders["swin"] / "model.safetensors")) == "swin"
    assert name(weights=str(folders["swin"]), name="vit") == "vit"
    assert name(weights=str(tmp_path)) == "auto"
    with pytest.raises(SettingError, match=r"model\.name must be a repository .*, got nothing.*model\.weights=DIR"):
        name()
    with pytest.raises(SettingError, match=r"model\.max_length must be null with model\.library=transformers, got 16"):
        name(name="vit", max_length=16)


def test_each_task_has_its_own_classifier(folders: dict[str, Path]) -> None:
    for kind in ("vit", "resnet", "deit"):
        model = factory.create_model(config(kind, weights=str(folders[kind])), {"a": 2, "b": 5})
        plain = copy.deepcopy(model)
        for task, classes in (("a", 2), ("b", 5)):
            switch: Any = next(m for m in plain.modules() if hasattr(m, "tasks")).tasks
            switch.active = task
            assert logits(plain).shape == (2, classes)
    own = factory.create_model(config(weights=str(folders["vit"])), 2)
    weight = own.get_submodule("classifier").weight
    give_heads(own, {"a": 5, "b": 2})
    assert own.get_submodule("classifier").b.weight is weight


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "vti"}, r"model\.name must be a repository OWNER/NAME .*, got vti\. Did you mean 'vit'\?"),
        ({"name": "./vit"}, r"model\.name must be OWNER/NAME on the hub.*set model\.weights=DIR"),
        ({"name": "bert", "kwargs": {}}, r"model\.name must be a model type .* with an image classifier .*, got bert"),
        ({"name": "dinov3_vit", "kwargs": {}}, r"got dinov3_vit\. Similar types with an image classifier: dinov2"),
        ({"name": "siglip2", "kwargs": {}}, r"got siglip2\. Similar types with an image classifier: siglip"),
        ({"kwargs": {"hidden_sise": 8}}, r"kwargs\.hidden_sise must be an argument of vit.*'hidden_size'"),
        ({"kwargs": {"image_size": 64}}, r"model\.kwargs\.image_size must be unset.*Set model\.image_size"),
        ({"kwargs": {"num_labels": 3}}, r"model\.kwargs\.num_labels must be unset"),
        ({"name": "clip", "kwargs": {"hidden_size": 8}}, r"Use \+model\.kwargs\.vision_config\.hidden_size"),
        ({"name": "clip", "kwargs": {"vision_config": 8}}, r"vision_config must be a mapping .*, got 8"),
        ({"kwargs": {"attn_implementation": "a/b"}}, r"refers to code"),
        ({"drop_rate": 0.1}, r"drop_rate must be 0 for an image classifier of transformers.*hidden_dropout_prob"),
        ({"kwargs": {"hidden_size": 0}}, r"model\.kwargs\.hidden_size must be an integer from 1"),
        ({"kwargs": {"hidden_act": "foo"}}, r"model\.name=vit cannot be built as an image classifier with"),
    ],
)
def test_settings_that_do_not_fit_are_rejected(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        factory.random_model(random(**changes), 2)
    assert "\n" not in str(caught.value)


def test_a_type_that_requires_a_library_which_is_not_installed_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    def build(*_: Any, **__: Any) -> None:
        raise ImportError("\nDinatForImageClassification requires the natten library but it was not found.")

    monkeypatch.setattr(transformers.AutoModelForImageClassification, "from_config", build)
    with pytest.raises(UserError, match=r"^model\.name=dinat cannot be built .* requires the natten library"):
        factory.random_model(random(name="dinat", kwargs={}), 2)


def test_weights_in_several_files_are_loaded(folders: dict[str, Path], tmp_path: Path) -> None:
    expected = factory.create_model(config(weights=str(folders["vit"])), 2)
    transformers.ViTForImageClassification.from_pretrained(folders["vit"]).save_pretrained(
        tmp_path, max_shard_size="20KB"
    )
    assert not (tmp_path / "model.safetensors").exists()
    assert factory.missing_weights(config(weights=str(tmp_path))) is None
    found = factory.create_model(config(weights=str(tmp_path)), 2).state_dict()
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=0, msg=name)
    part = sorted(tmp_path.glob("model-*.safetensors"))[1]
    part.unlink()
    message = str(factory.missing_weights(config(weights=str(tmp_path))))
    assert f"The folder does not contain {part.name} (listed in model.safetensors.index.json)." in message
    index = tmp_path / "model.safetensors.index.json"
    for weight_map, why in (
        ({}, "does not list the files"),
        ({"a": "../x"}, r"\.\./x is not the name of a file in the"),
    ):
        index.write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(UserError, match=f"index.json cannot be used: .*{why}"):
            factory.create_model(config(weights=str(tmp_path)), 2)


def test_weights_in_several_files_are_downloaded_with_their_index(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = transformers.ViTForImageClassification.from_pretrained(folders["vit"])
    network.save_pretrained(tmp_path / "hub", max_shard_size="20KB")
    local = tmp_path / "local"

    def download(repository: str, allow_patterns: list[str]) -> str:
        local.mkdir(exist_ok=True)
        for pattern in allow_patterns:
            for file in (tmp_path / "hub").glob(pattern):
                (local / file.name).write_bytes(file.read_bytes())
        return str(local)

    def cached(repository: str, names: Iterable[str]) -> Path | None:
        return next((local / name for name in names if (local / name).is_file()), None)

    monkeypatch.setattr(transformers_files, "snapshot_download", download)
    monkeypatch.setattr(transformers_files, "cached_file", cached)
    monkeypatch.setattr(transformers_files, "why_unavailable", lambda url: None)
    for _ in range(2):
        model = factory.create_model(config("owner/network"), 2)
        torch.testing.assert_close(model.state_dict()["vit.layernorm.bias"], network.vit.layernorm.bias)
        part = sorted(local.glob("model-*.safetensors"))[1]
        part.unlink()  # an interrupted download is completed


@pytest.mark.parametrize("kind", ["vit", "dinov2"])
def test_the_name_must_be_the_type_of_the_folder(folders: dict[str, Path], kind: str) -> None:
    weights = str(folders[kind])
    for name in (kind, "auto"):
        assert factory.create_model(config(name, weights=weights), 2).config.model_type == kind
    hint = rf"contains a {kind} network\. Leave model\.name out, or set model\.name={kind}\."
    with pytest.raises(SettingError, match=rf"model\.name must be the type of the network in .*, got swin\. .*{hint}"):
        factory.create_model(config("swin", weights=weights), 2)


def test_folders_that_do_not_fit_are_rejected(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = write_model(tmp_path / "bert")
    with pytest.raises(SettingError, match=r"model\.weights must be a network .* model type is bert\. Similar types"):
        factory.create_model(config("bert", weights=str(text)), 2)
    (tmp_path / "empty").mkdir()
    assert "does not contain config.json, model.safe" in str(
        factory.missing_weights(config(weights=f"{tmp_path}/empty"))
    )
    assert "an existing folder or file" in str(factory.missing_weights(config(weights=f"{tmp_path}/none")))
    (tmp_path / "empty" / "adapter_config.json").write_text("{}")
    assert "Merge the adapter first" in str(factory.missing_weights(config(weights=f"{tmp_path}/empty")))
    timm = tmp_path / "timm"
    shutil.copytree(folders["vit"], timm)
    (timm / "config.json").write_text(json.dumps({"architecture": "resnet18"}))
    with pytest.raises(UserError, match=r"describes a network of timm\. Use model=timm model\.name=resnet18"):
        factory.input_of(config("auto", weights=str(timm)))
    (timm / "config.json").write_text("{}")
    with pytest.raises(
        UserError, match=r"the entry model_type is missing\. Set model\.weights to a folder that save_pre"
    ):
        factory.input_of(config("auto", weights=str(timm)))
    cut = shutil.copytree(folders["vit"], tmp_path / "cut")
    (cut / "model.safetensors").write_bytes((folders["vit"] / "model.safetensors").read_bytes()[:1000])
    with pytest.raises(UserError, match=r"The weights in .*cut cannot be read .*, or set model\.weights to another"):
        factory.create_model(config(weights=str(cut)), 2)
    wider = {"hidden_size": 64}
    with pytest.raises(
        SettingError, match=r"model\.weights must be a folder that fits model\.name=vit.* The weights may belong"
    ):
        factory.create_model(config(weights=str(folders["vit"]), kwargs=wider), 2)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    message = str(factory.missing_weights(config("some/unknown-network")))
    assert "config.json, model.safetensors or pytorch_model.bin of some/unknown-network cannot be fetched" in message
    assert "set model.weights=DIR" in message
    message = str(factory.missing_weights(config("vit")))
    assert "a repository OWNER/NAME on the hub, or set model.pretrained=false for random weights" in message
    assert factory.missing_weights(random()) is None


@pytest.mark.parametrize(
    ("file", "entries", "message"),
    [
        ("preprocessor_config.json", {"size": 30}, r"a multiple of 4 .*, got 30\. .*json specifies 30×30 pixels\."),
        (
            "config.json",
            {"num_hidden_layers": "two"},
            r"'num_hidden_layers': .* expected int, got str \(value: 'two'\)\.",
        ),
        (
            "config.json",
            {"model_type": "sam"},
            r"type is sam\. Examples of supported types: convnextv2, deit, .*, vit\.",
        ),
        (
            "config.json",
            {"num_hidden_layers": 5},
            r"must be a folder that fits .* The weights may belong to another model",
        ),
    ],
)
def test_wrong_entries_in_the_files_of_a_folder_are_named(
    folders: dict[str, Path], tmp_path: Path, file: str, entries: dict[str, Any], message: str
) -> None:
    folder = shutil.copytree(folders["vit"], tmp_path / "network")
    path = folder / file
    path.write_text(json.dumps({**(json.loads(path.read_text()) if path.exists() else {}), **entries}))
    with pytest.raises(UserError, match=message):
        factory.create_model(config("auto", weights=str(folder)), 2)
