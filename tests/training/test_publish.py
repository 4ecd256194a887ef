"""Tests of efficient-ft export: the files, their check, the published folder, and predictions with exported files."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from huggingface_hub import ModelCard
from PIL import Image
from torch import Tensor, nn

from efficient_ft.cli.commands import export as command
from efficient_ft.cli.commands import predict, run_command
from efficient_ft.config import ModelConfig
from efficient_ft.core.errors import SettingError, UserError
from efficient_ft.core.input_spec import InputSpec
from efficient_ft.data import Transform
from efficient_ft.methods import (
    BSR,
    BSRMoE,
    EViT,
    HeadOnly,
    LoRA,
    Method,
    MoE,
    RepNet,
    TinyTL,
    ToMe,
    apply_methods,
)
from efficient_ft.methods.base import plain_state_dict
from efficient_ft.task import TASKS
from efficient_ft.training.output import export
from efficient_ft.training.publish.card import CARD
from efficient_ft.training.publish.folder import CLASSES, ExportOptions, compared, export_run, load
from tests.conftest import unwrapped

#: Small networks of timm: a ViT with 4×4 patches for images of 32×32 pixels, and networks without blocks.
VIT = ModelConfig(
    name="vit_tiny_patch16_224", pretrained=False, image_size=32,
    kwargs={"patch_size": 4, "depth": 3, "embed_dim": 24, "num_heads": 2},
)  # fmt: skip
FORMER = ModelConfig(
    name="efficientformer_l1", pretrained=False, kwargs={"depths": [1, 1, 1, 2], "embed_dims": [8, 8, 16, 24]}
)
RESNET = ModelConfig(name="resnet18", pretrained=False, image_size=32, kwargs={"channels": [4, 4, 8, 8]})
MOBILE = ModelConfig(name="mobilenetv2_050", pretrained=False, image_size=64)
NAMES = ["eins", "zwei", "drei", "vier", "fünf"]


def write_run(folder: Path, config: ModelConfig, *methods: Method) -> nn.Module:
    """Write model.safetensors of a network with random weights, and return the network."""
    from efficient_ft.models import factory

    torch.manual_seed(0)
    model = factory.random_model(config, len(NAMES))
    for name, p in model.named_parameters():
        if p.dim() > 1 and "token" not in name and "pos_embed" not in name:
            nn.init.normal_(p, 0, 1 / p[0].numel() ** 0.5)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.running_var, 0.5, 1.5)
            nn.init.normal_(module.running_mean, 0, 0.2)
    apply_methods(model, list(methods))
    for name, p in model.named_parameters():
        if "lora_" in name:
            nn.init.normal_(p, 0, 0.3)
    spec = factory.input_of(config)
    spec = InputSpec(spec.size, (0.4, 0.5, 0.6), (0.2, 0.25, 0.3), "bilinear")
    notes = {"epoch": 1, "accuracy": 0.5, "split": "val"}
    folder.mkdir(parents=True)
    export.save(folder / export.NAME, plain_state_dict(model, methods), config, NAMES, spec, notes, methods)
    return model


def photos(folder: Path, count: int = 5) -> Path:
    """Write photos of different sizes, in folders named after classes."""
    chance = np.random.default_rng(0)
    for k in range(count):
        file = folder / NAMES[k % len(NAMES)] / f"{k}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(chance.integers(0, 255, (40 + 3 * k, 50, 3), dtype=np.uint8)).save(file)
    return folder


def exported(run: Path, **options: Any) -> tuple[Path, list[str]]:
    return export_run(ExportOptions(run, **{"to": "onnx", **options}))


def inputs(trained: Any, count: int) -> Tensor:
    channels = len(trained.input.mean)
    return torch.randn(count, channels, *trained.input.size, generator=torch.Generator().manual_seed(2))


@pytest.fixture(scope="module")
def vit(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """A run, its export to ONNX, and a folder of photos."""
    place = tmp_path_factory.mktemp("vit")
    write_run(place / "run", VIT, HeadOnly())
    files = photos(place / "photos")
    return place / "run", exported(place / "run", check=[files], license="cc0-1.0")[0], files


# ---------------------------------------------------------------------------------------------- networks and methods
@pytest.mark.slow
@pytest.mark.parametrize("to", ["onnx", "pt2"])
@pytest.mark.parametrize(
    ("config", "methods"),
    [
        (VIT, [ToMe(4), HeadOnly()]),
        (RESNET, [HeadOnly()]),
        (VIT, [LoRA(rank=2)]),
        (VIT, [EViT([1]), HeadOnly()]),
        (VIT, [BSR([2], drop_at=[1])]),
        (VIT, [RepNet()]),
        (FORMER, [HeadOnly()]),
        (MOBILE, [TinyTL(norm="batch")]),
    ],
    ids=["tome", "resnet", "lora", "evit", "bsr", "repnet", "former", "tinytl"],
)
@pytest.mark.first(2, "slow", of="config")
def test_every_batch_size_gives_the_logits_of_the_run(
    to: str, config: ModelConfig, methods: list[Method], tmp_path: Path
) -> None:
    methods = [type(method)(**method.settings()) for method in methods]
    write_run(tmp_path / "run", config, *methods)
    out, lines = exported(tmp_path / "run", to=to)
    assert "16 random inputs, because the data of the run cannot be read" in lines[1]
    from efficient_ft.training.publish.graph import FORMATS

    trained, (network, _) = export.load(tmp_path / "run"), FORMATS[to].open(out / FORMATS[to].file)
    weights, file = (out / export.NAME).stat().st_size, (out / FORMATS[to].file).stat().st_size
    assert file < 1.5 * weights + 1_200_000, "the file contains no samples"
    scale = trained.model(inputs(trained, 8)).abs().max()
    for batch in (1, 2, 7):
        x = inputs(trained, batch)
        torch.testing.assert_close(network(x) / scale, trained.model(x) / scale, rtol=0, atol=2e-5)
    assert trained.model(inputs(trained, 8)).std(0).max() > 1e-3 * scale, "the logits depend on the image"


@pytest.mark.parametrize(
    ("methods", "reason"),
    [
        ([MoE(num_experts=2, top_k=1, blocks=[1])], "the number of tokens of each expert depends on the images"),
        ([BSRMoE(2, 1, [2], drop_at=[1])], "the number of tokens of each expert depends on the images"),
    ],
    ids=["moe", "bsr_moe"],
)
@pytest.mark.parametrize("to", ["onnx", "pt2"])
@pytest.mark.first(1, "slow", of="methods")
def test_a_method_that_a_graph_cannot_express_is_rejected(
    to: str, methods: list[Method], reason: str, tmp_path: Path
) -> None:
    write_run(tmp_path / "run", VIT, *[type(method)(**method.settings()) for method in methods])
    with pytest.raises(UserError, match=rf"The run cannot be exported as model\.{to}.*{reason}"):
        exported(tmp_path / "run", to=to)
    assert [file.name for file in tmp_path.rglob("*")] == ["run", export.NAME]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "methods"),
    [
        ("deit_tiny_patch16_224", []),
        ("deit_tiny_patch16_224", [ToMe(8)]),
        ("deit_tiny_patch16_224", [LoRA(rank=4)]),
        ("tf_efficientnet_lite0", []),
        ("efficientformer_l1", []),
    ],
    ids=["deit", "deit_tome", "deit_lora", "lite", "former"],
)
def test_whole_networks_keep_their_classes(name: str, methods: list[Method], tmp_path: Path) -> None:
    methods = [type(method)(**method.settings()) for method in methods]
    write_run(tmp_path / "run", ModelConfig(name=name, pretrained=False), *methods, *([] if methods else [HeadOnly()]))
    out, lines = exported(tmp_path / "run", check=[photos(tmp_path / "photos", 10)])
    assert "the predicted classes agree for all 10 images" in lines[1]
    assert load(out).class_names == NAMES


@pytest.mark.slow
def test_a_fixed_batch_size_predicts_smaller_and_larger_batches(tmp_path: Path) -> None:
    write_run(tmp_path / "run", RESNET, HeadOnly())
    out, lines = exported(tmp_path / "run", batch=3)
    assert "batch size 3" in lines[0]
    trained, network = export.load(tmp_path / "run"), load(out).model
    for batch in (1, 3, 8):
        x = inputs(trained, batch)
        torch.testing.assert_close(network(x), trained.model(x), rtol=1e-4, atol=1e-4)


# ---------------------------------------------------------------------------------------------- the check
@pytest.mark.slow
def test_the_check_finds_another_class_and_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(tmp_path / "run", VIT, HeadOnly())
    from efficient_ft.training.publish.graph import ExportedNetwork

    forward = ExportedNetwork.forward
    monkeypatch.setattr(ExportedNetwork, "forward", lambda *args: forward(*args).roll(1, 1))
    with pytest.raises(UserError, match=r"different predictions for 16 of 16 images .*random inputs.*Nothing was writ"):
        exported(tmp_path / "run", out=tmp_path / "deep" / "out")
    assert {file.name for file in tmp_path.rglob("*")} == {"run", export.NAME}


def test_the_check_compares_samples_and_reports_the_difference() -> None:
    task, x = TASKS["classification"], torch.randn(4, 3)
    shifted = nn.Linear(3, 3)
    with torch.no_grad():
        shifted.weight.copy_(torch.eye(3))
        shifted.bias.fill_(0.25)
    found = compared(task, nn.Identity(), shifted, [x, x[:1]], "test")
    assert (found.samples, found.classes) == (5, True)
    assert found.difference == pytest.approx(0.25, abs=1e-6)
    assert "the predicted classes agree for all 5 images; the logits differ by at most 0.25" in found.sentence


@pytest.mark.slow
def test_the_images_of_the_run_are_compared(finished: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command.main([str(finished[0]), "--to", "onnx", "--out", str(tmp_path / "out"), "--samples", "40"])
    printed = unwrapped(capsys.readouterr().out)
    assert "check (onnxruntime, 40 test images of the run): the predicted classes agree for all 40 images" in printed
    assert "license: unknown" in printed
    card = (tmp_path / "out" / CARD).read_text()
    data = ModelCard(card).data
    assert [(one.dataset_split, one.metric_value) for one in data.eval_results or []] == list(
        finished[2]["data"]["accuracy"].items()
    )
    for heading in ("Costs of training", "Data", "Preprocessing", "Classes", "Results", "Check of the export"):
        assert f"\n## {heading}\n" in card


# ---------------------------------------------------------------------------------------------- the folder
@pytest.mark.slow
def test_the_folder_is_loaded_by_timm(vit: tuple[Path, Path, Path]) -> None:
    run, out, files = vit
    assert {file.name for file in out.iterdir()} == {
        "model.onnx", export.NAME, "config.json", "preprocessor_config.json", CLASSES, CARD,
    }  # fmt: skip
    model = timm.create_model(f"local-dir:{out}", pretrained=True).eval()
    trained = export.load(run)
    with torch.no_grad():
        torch.testing.assert_close(model(inputs(trained, 3)), trained.model(inputs(trained, 3)), rtol=0, atol=0)
    transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))
    file = files / NAMES[1] / "1.png"
    torch.testing.assert_close(transform(Image.open(file)), Transform(trained.input)(file), rtol=0, atol=1e-5)
    assert model.pretrained_cfg["label_names"] == NAMES if "label_names" in model.pretrained_cfg else True
    assert json.loads((out / CLASSES).read_text()) == NAMES
    assert (out / export.NAME).read_bytes() == (run / export.NAME).read_bytes()


@pytest.mark.slow
def test_the_card_is_a_model_card(vit: tuple[Path, Path, Path]) -> None:
    card = ModelCard.load(vit[1] / CARD)
    assert (card.data.license, card.data.library_name, card.data.pipeline_tag) == (
        "cc0-1.0",
        "timm",
        "image-classification",
    )
    assert "timm.create_model('local-dir:DIR'" in card.text
    assert "efficient-ft export run --to onnx" in card.text
    assert "32×32 pixels" in card.text


@pytest.mark.slow
@pytest.mark.parametrize("to", ["onnx", "pt2"])
def test_the_code_in_the_card_predicts(
    to: str, vit: tuple[Path, Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, out, files = vit
    out = out if to == "onnx" else exported(run, to=to, out=tmp_path / "pt2", check=[files])[0]
    code = re.search(r"```python\n(import json.*?)```", (out / CARD).read_text(encoding="utf-8"), re.DOTALL)
    assert code is not None
    shown = np.random.default_rng(1).integers(0, 255, (60, 40, 4), dtype=np.uint8)
    shown[:, :20, 3] = 0
    Image.fromarray(shown).save(tmp_path / "transparent.png")
    rotated = Image.fromarray(np.repeat(np.repeat(shown[::4, ::4, :3], 4, 0), 4, 1))
    rotated.getexif()[0x0112] = 6
    rotated.save(tmp_path / "rotated.png", exif=rotated.getexif())
    others = [str(tmp_path / name) for name in ("transparent.png", "rotated.png")]
    predict.main([str(run), str(files), *others, "--json", "--device", "cpu"])
    for one in json.loads(capsys.readouterr().out):
        names: dict[str, Any] = {}
        exec(code[1].replace("DIR", str(out)).replace("IMAGE", one["path"]), names)
        assert capsys.readouterr().out.strip() == one["class"]
        probability = torch.from_numpy(names["logits"]).softmax(0).max()
        assert float(probability) == pytest.approx(one["probability"], abs=1e-4)


@pytest.mark.slow
def test_a_network_with_a_method_is_not_declared_as_a_network_of_timm(tmp_path: Path) -> None:
    write_run(tmp_path / "run", VIT, ToMe(4), HeadOnly())
    out, _ = exported(tmp_path / "run", to="pt2")
    assert not (out / "config.json").exists()
    assert ModelCard.load(out / CARD).data.library_name == "efficient-ft"


def test_paths_of_the_machine_are_not_published() -> None:
    from efficient_ft.training.publish.card import _without_folders

    assert _without_folders("data.root=/home/me/photos") == "data.root=…/photos"
    assert _without_folders("model.weights=~/w/a.pth") == "model.weights=…/a.pth"
    assert _without_folders("splits.train=[/a/b, c/d]") == "splits.train=[…/b, c/d]"
    assert _without_folders("optim.lr=1e-3") == "optim.lr=1e-3"


# ---------------------------------------------------------------------------------------------- predictions
@pytest.mark.parametrize("place", ["folder", "file"])
def test_predictions_with_onnx_equal_those_of_the_run(
    place: str, vit: tuple[Path, Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    run, out, files = vit
    predict.main([str(run), str(files), "--json", "--device", "cpu"])
    expected = json.loads(capsys.readouterr().out)
    predict.main([str(out if place == "folder" else out / "model.onnx"), str(files), "--json", "--batch-size", "2"])
    printed = capsys.readouterr()
    assert "note: model.onnx runs with onnxruntime on the CPU." in printed.err
    for one, other in zip(json.loads(printed.out), expected, strict=True):
        assert one.pop("probability") == pytest.approx(other.pop("probability"), abs=1e-5)
        assert [pair.pop("probability") for pair in one["top"]] == pytest.approx(
            [pair.pop("probability") for pair in other["top"]], abs=1e-5
        )
        assert one == other


def test_a_folder_with_pt2_is_predicted_with_its_weights_and_the_file_is_rejected(tmp_path: Path) -> None:
    write_run(tmp_path / "run", RESNET, HeadOnly())
    out, _ = exported(tmp_path / "run", to="pt2")
    assert load(out).class_names == NAMES
    with pytest.raises(UserError, match="does not load PT2 files, because loading such a file can run code"):
        load(out / "model.pt2")


# ---------------------------------------------------------------------------------------------- rejected input
def test_an_onnx_file_of_another_program_is_rejected(tmp_path: Path, vit: tuple[Path, Path, Path]) -> None:
    import onnx

    model = onnx.load(vit[1] / "model.onnx")
    del model.metadata_props[:]
    onnx.save(model, tmp_path / "other.onnx")
    with pytest.raises(UserError, match=r"not written by efficient-ft export.*efficient-ft export RUN --to onnx"):
        load(tmp_path / "other.onnx")
    (tmp_path / "damaged.onnx").write_bytes(b"onnx")
    with pytest.raises(UserError, match=r"damaged\.onnx cannot be loaded by onnxruntime"):
        load(tmp_path / "damaged.onnx")
    with pytest.raises(UserError, match=r"missing\.onnx: the file does not exist"):
        load(tmp_path / "missing.onnx")
    with pytest.raises(UserError, match="Remove --task"):
        load(vit[1], "a")


def test_settings_that_cannot_be_used_are_rejected(
    tmp_path: Path, vit: tuple[Path, Path, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run, out, _ = vit
    with pytest.raises(SettingError, match="--to must be one of onnx, pt2, got tflite"):
        exported(run, to="tflite")
    with pytest.raises(SettingError, match=r"--license must be an identifier .*, got My License"):
        exported(run, license="My License")
    with pytest.raises(
        UserError, match=r"The folder .*export_onnx already exists\. Remove the folder, or choose another folder with"
    ):
        exported(run)
    with pytest.raises(
        UserError, match=r"contains no model\.safetensors\. Pass the folder of a run that has finished an epoch"
    ):
        exported(tmp_path)
    with pytest.raises(UserError, match=r"absent\.jpg: there is no such file or folder"):
        exported(run, out=tmp_path / "x", check=[tmp_path / "absent.jpg"])
    with pytest.raises(SystemExit) as ended:
        run_command("export", [str(run)])
    assert ended.value.code == 2
    assert "No file format is given. Pass --to onnx or --to pt2." in unwrapped(capsys.readouterr().err)
    import efficient_ft.training.publish.graph as graph

    monkeypatch.setattr(graph.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"not installed: onnx, onnxscript, onnxruntime\. Run pip install 'efficient-"):
        exported(run, out=tmp_path / "x")
    with pytest.raises(UserError, match=r"require the package onnxruntime.*pip install 'efficient-ft\[export\]'"):
        load(out)
    assert not any(tmp_path.iterdir())
