"""Tests of pretrained weights in local caches, and of the message without network access."""

from __future__ import annotations

import socket
import time
from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import save_file

from efficient_ft.config import ModelConfig
from efficient_ft.core import network
from efficient_ft.core.errors import UserError
from efficient_ft.models import factory, hub
from tests.models.small_vit import small


@pytest.fixture
def empty_cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.file_download.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def pretrained(name: str = "resnet18.a1_in1k") -> ModelConfig:
    return ModelConfig(name=name, pretrained=True)


def test_offline_says_what_where_and_what_instead(empty_cache, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    text = factory.missing_weights(pretrained())
    assert text is not None
    assert "HF_HUB_OFFLINE" in text
    for part in ("timm/resnet18.a1_in1k", "model.safetensors", "model.weights=FILE", "pretrained=false"):
        assert part in text
    with pytest.raises(UserError, match="cannot be fetched"):
        factory.create_model(pretrained(), 7)


@pytest.mark.slow
def test_a_host_that_never_answers_is_given_up_soon(empty_cache, monkeypatch):
    silent = socket.socket()
    silent.bind(("127.0.0.1", 0))
    silent.listen()
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(network, "PROBE_SECONDS", 1.5)
    monkeypatch.setattr(hub, "hf_hub_url", lambda *a, **k: f"http://127.0.0.1:{silent.getsockname()[1]}/w")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    started = time.monotonic()
    text = factory.missing_weights(pretrained())
    silent.close()
    assert text is not None
    assert "cannot be fetched" in text
    # Without the limit PROBE_SECONDS, a blocked name resolution takes minutes.
    assert time.monotonic() - started < 30


def test_weights_in_the_local_cache_need_no_network(empty_cache, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    torch.manual_seed(3)
    source = timm.create_model("resnet18")
    commit = "0" * 40
    snapshot = empty_cache / "models--timm--resnet18.a1_in1k" / "snapshots" / commit
    snapshot.mkdir(parents=True)
    reference = empty_cache / "models--timm--resnet18.a1_in1k" / "refs" / "main"
    reference.parent.mkdir()
    reference.write_text(commit)
    save_file(source.state_dict(), snapshot / "model.safetensors")
    assert factory.missing_weights(pretrained()) is None
    model = factory.create_model(pretrained(), 5)
    torch.testing.assert_close(model.layer3[0].conv1.weight, source.layer3[0].conv1.weight)
    assert model.fc.out_features == 5


def test_nothing_is_missing_where_nothing_is_wanted(tmp_path):
    assert factory.missing_weights(small()) is None
    (tmp_path / "w.pth").write_bytes(b"")
    assert factory.missing_weights(small(weights=str(tmp_path / "w.pth"))) is None
    for absent in (str(tmp_path / "none.pth"), "x" * 5000):
        assert "model.weights must be an existing file" in str(factory.missing_weights(small(weights=absent)))


def test_a_model_without_published_weights_says_so():
    text = factory.missing_weights(pretrained("vit_digits"))
    assert "no pretrained weights for model.name=vit_digits" in str(text)
    assert "model.pretrained=false" in str(text)
