"""Tests of the study of gradient errors: its comparisons, its files and the effect of padding on a trained network."""

from __future__ import annotations

import copy
import json
import math
import tarfile
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor, nn

from efficient_ft.bench import gradient_error, projections
from efficient_ft.bench.gradient_error import STATES, Study, groups, measure, save
from efficient_ft.bench.gradients import error_and_cosine, image_folder, shuffled_batches, step_gradients
from efficient_ft.bench.projections import METHODS, Candidate, candidates, headroom
from efficient_ft.cli.commands import gradient_error as command
from efficient_ft.cli.commands import run_command
from efficient_ft.config import ModelConfig
from efficient_ft.core.errors import UserError
from efficient_ft.methods import LBPDCT, LBPWHT, LoRA
from efficient_ft.models.factory import create_model
from tests.conftest import unwrapped

SMALL = {"depth": 2, "embed_dim": 48}


@pytest.fixture(autouse=True)
def small_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use a smaller network of the same kind for the studies."""
    monkeypatch.setattr(gradient_error, "ModelConfig", partial(ModelConfig, kwargs=SMALL))


def _lively(model: nn.Module) -> nn.Module:
    """Initialize the head with nonzero weights, because a zero head passes no gradient."""
    nn.init.normal_(model.head.weight, std=0.1)
    return model


@pytest.fixture(scope="module")
def network() -> nn.Module:
    torch.manual_seed(0)
    return _lively(timm.create_model("vit_digits", num_classes=2, depth=2, img_size=28))


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A typical weights file, in half precision and trained at 32 pixels."""
    torch.manual_seed(0)
    model = _lively(timm.create_model("vit_digits", num_classes=2, **SMALL))
    file = tmp_path_factory.mktemp("weights") / "weights.safetensors"
    save_file({k: v.half() if v.is_floating_point() else v for k, v in model.state_dict().items()}, file)
    return file


def _draw(folder: Path, count: int) -> Path:
    """Write images of two classes with noisy brightness gradients along one axis each."""
    g = torch.Generator().manual_seed(0)
    for name, axis in (("across", 0), ("down", 1)):
        (folder / name).mkdir(parents=True)
        for k in range(count):
            ramp = torch.linspace(0, 1, 40).unsqueeze(axis).expand(40, 40)
            pixels = (ramp[..., None] * torch.rand(3, generator=g) + 0.2 * torch.rand(40, 40, 3, generator=g)) * 200
            Image.fromarray(pixels.to(torch.uint8).numpy()).save(folder / name / f"{k}.png")
    return folder


def _batch(images: int, seed: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(images, 3, 28, 28, generator=g), torch.randint(2, (images,), generator=g)


@pytest.mark.slow
def test_the_whole_study_runs_and_its_file_says_everything(weights, tmp_path, capsys, monkeypatch):
    few = {name: METHODS[name] for name in ("LHE", "DCT")}
    for module in (projections, gradient_error):
        monkeypatch.setattr(module, "METHODS", few)
    images, other = _draw(tmp_path / "images", 4), tmp_path / "other"
    _draw(other / "train", 4)
    _draw(other / "test", 2)
    file = tmp_path / "out" / "numbers.json"
    common = [f"--weights={weights}", f"--images={images}", "--model=vit_digits", "--orders=4", f"--json={file}"]
    small = ["--batch=2", "--batches=2", "--profile-batches=1"]
    tuning = [f"--finetune={other}", "--finetune-steps=2", "--finetune-batch=2", "--finetune-batches=1"]

    command.main([*common, *small, *tuning, "--sizes=28"])
    table = capsys.readouterr().out
    record = json.loads(file.read_text(encoding="utf-8"))
    assert [r["state"] for r in record["results"]] == [s for s in STATES for _ in few]
    for r in record["results"]:
        assert r["grid"] == [7, 7]
        assert r["full_rank"] < 1e-5
        assert r["backward_mflops"] < 0.75 * r["exact_mflops"]
        network = r["batch"]["network"]
        assert 1e-3 < network["error"]["min"] <= network["error"]["mean"] <= network["error"]["max"]
        assert 0 < network["cosine"]["mean"] <= 1  # may be rounded to 1
        assert set(r["batch"]) == {"network", "qkv", "proj", "fc1", "fc2", "rest", "activations", "first block"}
    assert "7×7, LP-4" in table
    assert all(name in table for name in few)
    assert str(tmp_path) not in file.read_text(encoding="utf-8")  # the file contains no local paths

    # A second size is added to the file without changing the first.
    other_size = [{**r, "image_size": 20, "grid": [5, 5]} for r in record["results"]]
    save(file, Study(weights, images, batches=1), other_size)
    both = json.loads(file.read_text(encoding="utf-8"))
    assert set(both["runs"]) == {"20", "28"}
    assert both["runs"]["28"] == record["runs"]["28"]
    assert both["runs"]["20"]["settings"]["batches"] == 1
    assert [r for r in both["results"] if r["image_size"] == 28] == record["results"]
    assert [r for r in both["results"] if r["image_size"] == 20] == other_size


def test_a_mistake_is_one_message_and_status_2(weights, tmp_path, capsys):
    def refused(*arguments: str) -> str:
        with pytest.raises(SystemExit) as stopped:
            run_command("gradient-error", arguments)
        assert stopped.value.code == 2
        return unwrapped(capsys.readouterr().err)

    common = [f"--weights={weights}", "--model=vit_digits", "--sizes=28"]
    assert "nowhere does not exist." in refused(*common, f"--images={tmp_path / 'nowhere'}")
    (tmp_path / "empty").mkdir()
    assert "class folders (CLASS/*.jpg)" in refused(*common, f"--images={tmp_path / 'empty'}")
    images = _draw(tmp_path / "images", 2)
    assert "Pass a smaller --batches" in refused(*common, f"--images={images}")
    for text in ("{", "[1]", '{"runs": {"x": 1}, "results": []}', '{"runs": {}, "results": [{}]}'):
        (tmp_path / "old.json").write_text(text)
        said = refused(*common, f"--images={images}", f"--json={tmp_path / 'old.json'}")
        assert "old.json cannot be extended: it contains other data." in said, "before anything is measured"
    assert "no.safetensors" in refused(f"--weights={tmp_path / 'no.safetensors'}", f"--images={images}")


def test_error_and_cosine_of_known_vectors():
    exact = {"a": torch.tensor([3.0]), "b": torch.tensor([[4.0]])}
    error, cosine = error_and_cosine(exact, {"a": torch.tensor([3.0]), "b": torch.tensor([[0.0]])}, ["a", "b"])
    assert math.isclose(error, 4 / 5)
    assert math.isclose(cosine, 3 / 5)
    assert error_and_cosine(exact, exact, ["a", "b"]) == (0, 1)


def test_each_parameter_is_in_one_group(network):
    found = groups(network)
    kinds = [name for kind in ("qkv", "proj", "fc1", "fc2") for name in found[kind]]
    assert sorted(kinds) == sorted(found["network"])
    head = {"head.weight", "head.bias"}
    assert set(found["network"]) | set(found["rest"]) | head == {n for n, _ in network.named_parameters()}
    assert not set(found["network"]) & set(found["rest"])
    assert found["activations"] == ["input:blocks.0", "input:blocks.1"]


def test_gradients_are_autograds_own(network):
    x, y = _batch(2, 0)
    model = copy.deepcopy(network).eval()  # the same forward pass: BatchNorm is frozen and dropout is disabled
    model.zero_grad()
    torch.nn.functional.cross_entropy(model(x), y).backward()
    _, found = step_gradients(network, (x, y), inputs=["blocks.1"])
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad)
    assert found["input:blocks.1"].shape == (2, 50, 96)
    assert all(p.grad is None for p in network.parameters())


def test_gradients_of_a_step_with_methods(network):
    """Methods receive the step's number and seed, and adapted layers keep the names of the plain model."""
    calls: list[Any] = []

    class Listening:
        def step_begin(self, step: int) -> None:
            calls.append((step, torch.initial_seed()))

        def step_end(self) -> None:
            calls.append("end")

        def total_loss(self, loss: Tensor) -> Tensor:
            raise AssertionError("the exact gradient has no loss of a method's")

    batch = _batch(2, 0)
    exact = step_gradients(network, batch).gradients
    assert calls == []
    adapted = copy.deepcopy(network)
    LoRA(2).apply(adapted)
    for parameter in adapted.parameters():
        parameter.requires_grad_(True)
    found = step_gradients(adapted, batch, methods=[Listening()], step=3, seed=11).gradients
    assert calls == [(3, 11), "end"]
    assert set(exact) <= set(found)
    assert error_and_cosine(exact, found, exact)[0] < 1e-6
    half = step_gradients(network, batch, precision="bf16").gradients
    assert 1e-4 < error_and_cosine(exact, half, exact)[0] < 0.1


def test_a_zero_gradient_cannot_be_compared():
    zero = {"a": torch.zeros(2)}
    with pytest.raises(UserError, match="exact gradient is zero"):
        error_and_cosine(zero, zero, ["a"])


def test_pooled_is_the_gradient_of_all_images(network):
    a, b = _batch(2, 1), _batch(2, 2)

    def of(*batches: tuple[Tensor, Tensor]) -> dict[str, list[tuple[float, float]]]:
        changed, method = copy.deepcopy(network), LBPWHT(order=3)
        method.apply(changed)
        candidate = Candidate("WHT ortho", 3, changed, method)
        measure(network, [candidate], batches)
        return candidate.scores

    apart, together = of(a, b), of((torch.cat([a[0], b[0]]), torch.cat([a[1], b[1]])))
    for group in ("network", "qkv", "rest"):
        assert apart[f"pooled {group}"][0] == pytest.approx(together[group][0], rel=1e-3)


@pytest.mark.slow
def test_lhe_profiles_once_and_keeps_its_choice(network):
    first = candidates(network, [2], [_batch(4, 3)])
    later = copy.deepcopy(network)
    with torch.no_grad():
        for parameter in later.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    second = candidates(later, [2], [_batch(4, 3)], first)
    chosen = [next(c for c in made if c.name == "LHE").method.state_dict()["chosen"] for made in (first, second)]
    assert chosen[0] == chosen[1]
    fresh = next(c for c in candidates(later, [2], [_batch(4, 4)]) if c.name == "LHE")
    assert fresh.method.state_dict()["chosen"] != chosen[0]


def test_headroom_bases_are_orthonormal_and_better_on_what_they_were_made_for(network):
    batch = _batch(8, 5)
    for candidate in headroom(network, [3], [batch]):
        how = candidate.model.get_submodule("blocks.0.mlp.fc2").low_rank
        basis = torch.from_numpy(how.projector.rows.copy())
        torch.testing.assert_close(basis @ basis.T, torch.eye(len(basis), dtype=basis.dtype))
        assert candidate.rank == len(basis) + 1  # one more for the class token

    # For the gradients g_y they were computed from, leading singular vectors are the best fixed basis.
    caught = {}
    model = copy.deepcopy(network)
    layer = model.get_submodule("blocks.0.mlp.fc2")
    layer.register_forward_hook(lambda m, a, y: y.register_hook(lambda g: caught.update(g=g)) and None)
    step_gradients(model, batch)
    g = caught["g"][:, 1:]
    kept = {}
    for candidate in headroom(network, [3], [batch]):
        rows = candidate.model.get_submodule("blocks.0.mlp.fc2").low_rank.projector.rows.copy()
        kept[candidate.name] = (torch.from_numpy(rows).to(g) @ g).square().sum().item()
    assert kept["PCA of g_y"] == max(kept.values())


@pytest.mark.slow
def test_padding_is_most_of_what_the_published_projection_loses(shared_data, tmp_path):
    file, archive = shared_data / "vit_micro_tinyimagenet100.safetensors", shared_data / "tinyimagenet100.tar.gz"
    if not (file.is_file() and archive.is_file()):
        pytest.skip(f"needs {file.name} and {archive.name}")
    taken: dict[str, int] = {}
    with tarfile.open(archive) as packed:
        for member in packed:
            parts = Path(member.name).parts
            if member.isfile() and "val" in parts and taken.setdefault(parts[-2], 0) < 1:
                taken[parts[-2]] += 1
                target = tmp_path / parts[-2] / parts[-1]
                target.parent.mkdir()
                reader = packed.extractfile(member)
                assert reader is not None
                target.write_bytes(reader.read())
    assert len(taken) == 100

    config = ModelConfig(name="vit_micro", weights=str(file), image_size=28)
    model = create_model(config, 100)
    compared = []
    for name, method in (
        ("reflect", LBPWHT(order=4, padding="reflect")),
        ("ortho", LBPWHT(order=4)),
        ("dct", LBPDCT(order=4)),
    ):
        changed = copy.deepcopy(model)
        method.apply(changed)
        compared.append(Candidate(name, 4, changed, method))
    about = measure(model, compared, shuffled_batches(image_folder(tmp_path, config), 32, 1, 0, 0))
    assert about["top1"] > 0.15  # chance is 0.01, so weights and images match
    reflect, ortho, dct = (c.scores["network"][0][0] for c in compared)
    assert dct < ortho < 0.85 * reflect
    assert 0.3 < reflect < 0.7
