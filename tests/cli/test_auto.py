"""Tests of ``efficient-ft auto``: mistakes, and a search that is interrupted and continued."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from efficient_ft.cli.commands.auto import auto, main
from efficient_ft.cli.commands.auto_networks import available_networks, several_networks
from efficient_ft.core.errors import UserError
from efficient_ft.search.state import read_state
from efficient_ft.search.text import command_of
from tests.training.runs import rows_of

MISTAKES = {
    "time=5m": r"The memory budget is missing\. Pass memory=SIZE",
    "memory=2GB": r"Pass either time=TIME, for example time=30m, or steps=N\.",
    "memory=2GB time=5m steps=10": r"Pass either time=TIME",
    "memory=2 time=5m": r"memory must be a number with one of the units",
    "memory=2GB time=soon": r"time must be a number with one of the units",
    "memory=2GB time=20s": r"time must be at least 1min, got 20 s",
    "memory=2GB steps=0": r"steps must be an integer >= 1, got 0",
    "memory=2GB steps=60": r"steps must be at least 100, got 60",
    "memory=2GB time=5m method=lora": r"method must be left out, got lora. The search determines this setting",
    "memory=2GB time=5m method.lora.rank=2": r"method\.lora\.rank must be left out",
    "memory=2GB time=5m optim.lr=1e-3": r"optim\.lr must be left out",
    "memory=2GB time=5m trainer.epochs=3": r"trainer\.epochs must be left out",
    "memory=2GB time=5m trainer.patience=2": r"trainer\.patience must be left out",
    "memory=2GB time=5m resume=never": r"resume must be left out",
    "memory=2GB time=5m hydra.run.dir=x": r"hydra\.run\.dir must be left out",
    "memory=2GB time=5m trainer={max_steps:5}": r"trainer must be an option of the group",
    "memory=2GB time=5m optim=sgd": r"optim must be adam or adamw in a search, got sgd",
    "memory=2GB time=5m optim.warmup_steps=null": r"optim\.warmup_steps must be an integer in a search, got null",
    "memory=2GB time=5m data.val_fraction=0": r"data\.val_fraction must be a fraction > 0 in a search",
    "memory=2GB time=5m data.select_best_on=test": r"data\.select_best_on must be val in a search",
    "memory=2GB time=5m data=folder data.root=nowhere": r"data\.root must be a folder of images, got nowhere",
    "memory=2GB time=5m optim.learning_rate=1": r"optim\.learning_rate",
    "memory=2GB time=5m model=deit_tiny,nothing": r"model must be one of .*, got nothing",
    "memory=2GB time=5m model=deit_tiny,": r"model must be an option, several options separated by commas, or auto",
    "memory=2GB time=5m model=[deit_tiny,resnet18]": r"Example: model=deit_tiny,resnet50\.",
    "memory=2GB time=5m model=choice(deit_tiny,resnet18)": r"Example: model=deit_tiny,resnet50\.",
    "memory=2GB time=5m model=deit_tiny,auto": r"model must be an option, several options .*, got deit_tiny,auto",
    "memory=2GB time=5m model=deit_tiny,deit_tiny": r"got deit_tiny,deit_tiny\. Name each option only once\.",
    "memory=2GB time=5m model=deit_tiny,resnet18 model.weights=x": r"model\.weights must be left out with model=deit",
    "memory=2GB time=5m model=auto model.weights=x": r"model\.weights must be left out with model=auto, got x\.",
    "memory=2GB time=5m model=auto model.name=x": r"model\.name must be left out with model=auto",
    "memory=2GB time=5m model=auto +model.kwargs.x=1": r"model\.kwargs\.x must be left out with model=auto",
    "memory=2GB time=5m model=auto model.pretrained=false": r"model\.pretrained must be left out with model=auto",
    "memory=2GB time=5m model=auto task=nothing": r"task must be one of .*, got nothing",
    "memory=2GB time=5m model=vit_digits,bert_tiny": r"task must be text with model\.name=bert_tiny",
}


@pytest.mark.parametrize("words", MISTAKES)
def test_mistakes_leave_no_folder(words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=MISTAKES[words]):
        main(words.split())
    assert not list(tmp_path.iterdir())


#: Mistakes that the child process finds, which imports torch.
WITHOUT_WEIGHTS = {
    "model=deit_tiny,resnet18": r"model=deit_tiny: The weights of deit_tiny\S+ cannot be fetched .* Remove this",
    "model=auto": r"model=auto must find the weights of at least one network\. The options are .* The weights .*=FILE",
}


@pytest.mark.slow
@pytest.mark.parametrize("model", WITHOUT_WEIGHTS)
def test_missing_weights_leave_no_folder(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")  # HF_HUB_OFFLINE does not apply to other hosts
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    with pytest.raises(UserError, match=WITHOUT_WEIGHTS[model]):
        main(["memory=2GB", "steps=100", model])
    assert not list(Path().iterdir())


@pytest.mark.slow
def test_a_search_finds_a_model_and_its_command_repeats_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("efficient_ft.search.search.MOST", 3)
    settings = ["model=vit_digits", "data.num_workers=0"]
    lines: list[str] = []
    state = auto(*settings, memory="4GB", steps=240, say=lines.append)
    text = "\n".join(lines)
    assert "Settings of all runs: recipe=none optim=adam" in text
    assert "data: digits, classification, 10 classes" in text
    assert "vit_digits starts from RANDOM weights" in text
    assert state.final is not None
    assert state.final.test is not None
    arm = state.arm(state.final.arm)
    (folder,) = Path("outputs/auto/digits/vit_digits").iterdir()
    assert read_state(folder) == state
    run = folder / arm.folder
    results = json.loads((run / "results.json").read_text())
    assert results["totals"]["steps"] == state.final.steps
    assert sum(one.step for one in state.arms if one is not arm) + state.final.steps == pytest.approx(240, abs=3)
    rates = [row["lr"] for row in rows_of(run) if "lr" in row]
    assert rates[-1] < 0.2 * max(rates)
    assert f"Model: {run}" in lines[-2]
    assert "test accuracy" in lines[-2]
    assert lines[-1] == f"Report: {folder / 'report' / 'report.html'}"
    page = (folder / "report/report.html").read_text()
    assert f'href="../{arm.folder}/report/report.html"' in page
    assert (run / "report/report.html").is_file()
    again = auto(*settings, memory="4GB", steps=240)
    assert again == state
    # The printed command trains the same weights alone.
    from safetensors.torch import load_file

    from efficient_ft.cli.hydra import processes

    words = [*command_of(state)[1:], "hydra.run.dir=alone"]
    assert processes.run([sys.executable, "-m", "efficient_ft", *words], {}, tmp_path / "log").failure is None
    first, second = load_file(run / "model.safetensors"), load_file("alone/model.safetensors")
    assert all(first[name].equal(second[name]) for name in first)
    capfd.readouterr()


def cached(cache: Path, name: str) -> None:
    """Store random weights of a timm network in a folder with the layout of the cache of the hub."""
    import timm
    import torch
    from safetensors.torch import save_file

    torch.manual_seed(0)
    repository, commit = cache / f"models--timm--{name}", "0" * 40
    for folder in ("refs", f"snapshots/{commit}"):
        (repository / folder).mkdir(parents=True)
    (repository / "refs/main").write_text(commit)
    save_file(
        timm.create_model(name.partition(".")[0]).state_dict(), repository / "snapshots" / commit / "model.safetensors"
    )


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder that is the cache of the hub in this process and in its child processes."""
    folder = tmp_path / "hub"
    monkeypatch.setenv("HF_HUB_CACHE", str(folder))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(folder))
    monkeypatch.setattr("huggingface_hub.file_download.constants.HF_HUB_CACHE", str(folder))
    return folder


def test_automatic_networks_belong_to_the_task() -> None:
    networks = several_networks(["model=auto", "data=digits"])
    assert networks is not None
    assert networks.automatic
    assert networks.folder == "auto"
    assert {"deit_tiny", "resnet50"} <= set(networks.names)
    assert not {"vit_digits", "timm", "hf", "bert_tiny", "segformer_b0", "swinv2_small_224"} & set(networks.names)
    of_task = {"text": {"bert_base", "bert_tiny", "distilbert_base"},
               "segmentation": {"deeplabv3_mobilenetv2", "segformer_b0"}}  # fmt: skip
    for task, expected in of_task.items():
        found = several_networks(["model=auto", f"task={task}"])
        assert found is not None
        assert set(found.names) == expected


@pytest.mark.parametrize("model", ["model=deit_tiny", "data=digits", "model={name: vit_digits, kwargs: {a: 1}}"])
def test_one_network_is_not_a_search_over_networks(model: str) -> None:
    assert several_networks([model, "model.weights=x"]) is None


@pytest.mark.slow
def test_local_weights_come_first_and_hosts_are_asked_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cached(cache, "mobilenetv2_100.ra_in1k")
    monkeypatch.delenv("HF_HUB_OFFLINE")
    asked: list[str] = []

    def answer(url: str, size: int | None, accept_404: bool) -> str | None:
        asked.append(url)
        return None if "deit_small" in url else "no route"

    monkeypatch.setattr("efficient_ft.core.network._ask", answer)
    names = ["resnet18", "deit_small", "mobilenetv2", "deit_tiny", "resnet50"]
    runs = ["data=digits", "recipe=none", "method=full"]
    # The first answer of the host is "no route", so this host is not asked again.
    assert available_networks(runs, names, 2) == (["mobilenetv2"], ["resnet18", "deit_small", "deit_tiny", "resnet50"])
    assert len(asked) == 1
    # deit_small is checked before the host does not answer.
    assert available_networks(runs, ["deit_small", "mobilenetv2"], 2) == (["mobilenetv2", "deit_small"], [])
    # If enough weights are in the cache, no request is made.
    asked.clear()
    assert available_networks(runs, names, 1) == (["mobilenetv2"], [])
    assert asked == []


@pytest.mark.slow
def test_missing_weights_and_data_are_named(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("efficient_ft.core.network._ask", lambda *given: "no route")
    runs = ["data=digits", "recipe=none", "method=full"]
    with pytest.raises(UserError, match=r"^model=resnet18: The weights of resnet18\.tv_in1k cannot be fetched from"):
        available_networks(runs, ["vit_digits", "resnet18"], None)
    assert available_networks(runs, ["vit_digits"], None) == (["vit_digits"], [])
    with pytest.raises(UserError, match=r"The options are resnet18, deit_tiny\. The weights of resnet18.*model=NAME"):
        available_networks(runs, ["resnet18", "deit_tiny"], 2)
    with pytest.raises(UserError, match=r"flowers102"):
        available_networks(["data=flowers102", *runs[1:], "data.root=nowhere"], ["resnet18"], 2)


@pytest.mark.slow
def test_a_search_over_two_networks(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    cached(cache, "mobilenetv2_100.ra_in1k")
    settings = ["model=vit_digits,mobilenetv2", "model.image_size=32", "data.num_workers=0"]
    lines: list[str] = []
    state = auto(*settings, memory="4GB", steps=120, say=lines.append)
    text = "\n".join(lines)
    assert text.count("data: digits, classification, 10 classes") == 1
    assert "Networks: vit_digits, mobilenetv2." in text
    assert [arm.network for arm in state.arms] == ["vit_digits", "mobilenetv2", "vit_digits"]
    assert all(arm.slices for arm in state.arms)
    assert all(f"model={arm.network}" in arm.arguments for arm in state.arms)
    assert state.final is not None
    arm = state.arm(state.final.arm)
    (folder,) = Path("outputs/auto/digits/vit_digits+mobilenetv2").iterdir()
    assert read_state(folder) == state
    assert f"model={arm.network}" in command_of(state)
    assert f"{arm.recipe} with model={arm.network} and optim.lr" in text
    assert json.loads((folder / arm.folder / "results.json").read_text())["config"]["model"]["name"].startswith(
        arm.network
    )
