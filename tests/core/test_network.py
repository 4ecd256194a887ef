"""Tests of the reachability of URLs without a network, with local files and a stub of the opener."""

from __future__ import annotations

import threading
import urllib.error
from email.message import Message
from pathlib import Path

import pytest

from efficient_ft.core import network
from efficient_ft.core.network import each_host_once, local_files_only, reason_of, unreachable


def test_a_file_that_exists_is_reachable_if_its_length_is_the_expected_one(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"abc")
    url = (tmp_path / "x").as_uri()
    assert unreachable(url) is None
    assert unreachable(url, size=3) is None
    assert "announces 3 bytes, but 4 bytes are expected" in str(unreachable(url, size=4))
    assert "No such file" in str(unreachable((tmp_path / "y").as_uri()))
    assert unreachable("nonsense") is not None


@pytest.mark.parametrize(
    ("code", "accept_404", "reachable"), [(404, False, False), (404, True, True), (401, True, False)]
)
def test_a_host_that_refuses(monkeypatch: pytest.MonkeyPatch, code: int, accept_404: bool, reachable: bool) -> None:
    def refuse(url: str, timeout: float) -> None:
        raise urllib.error.HTTPError(url, code, "no", Message(), None)

    monkeypatch.setattr(network, "open_url", refuse)
    reason = unreachable("http://host/x", accept_404=accept_404)
    assert (reason is None) == reachable
    assert reachable or reason == f"host: HTTP {code} no"


def test_a_host_that_never_answers_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    end = threading.Event()
    monkeypatch.setattr(network, "PROBE_SECONDS", 0.05)

    def wait(url: str, timeout: float) -> None:
        end.wait(60)
        raise TimeoutError

    monkeypatch.setattr(network, "open_url", wait)
    assert unreachable("http://host/x") == "host did not answer within 0.05 seconds"
    end.set()


def test_reasons() -> None:
    assert reason_of(urllib.error.URLError("Name or service not known")) == "Name or service not known"
    assert reason_of(OSError(28, "No space left on device")) == "[Errno 28] No space left on device"
    assert reason_of(TimeoutError()) == "TimeoutError"


def test_each_unreachable_host_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def refuse(url: str, timeout: float) -> None:
        asked.append(url)
        if "status" in url:
            raise urllib.error.HTTPError(url, 403, "no", Message(), None)
        raise OSError("no route")

    monkeypatch.setattr(network, "open_url", refuse)
    urls = ["http://a/1", "http://a/2", "http://b/1", "http://status/1", "http://status/2"]
    with each_host_once():
        reasons = [unreachable(url) for url in urls]
    assert reasons == ["a: no route", "a: no route", "b: no route", "status: HTTP 403 no", "status: HTTP 403 no"]
    assert asked == [urls[0], urls[2], urls[3], urls[4]]
    unreachable(urls[1])
    assert asked[-1] == urls[1]


def test_local_files_only_makes_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "open_url", lambda *given: pytest.fail("a request was made"))
    with local_files_only():
        assert unreachable("http://host/x") == "host: only local files are checked"
