"""Tests of downloads and archives: repeated requests, errors and remaining files."""

from __future__ import annotations

import contextlib
import hashlib
import http.server
import io
import tarfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from efficient_ft.config import DataConfig
from efficient_ft.core import network
from efficient_ft.core.errors import UserError
from efficient_ft.data import fetch, missing_data, open_data
from efficient_ft.data.fetch import Archive
from efficient_ft.data.published import PUBLISHED
from tests.data.pictures import SPEC
from tests.data.publishers import pack, write_cub, write_food

Config = Callable[..., DataConfig]


class Handler(http.server.BaseHTTPRequestHandler):
    files: dict[str, bytes]
    mode = "whole"
    asked: list[str]

    def do_GET(self) -> None:
        self.asked.append(self.path)
        body = self.files.get(self.path.rsplit("/", 1)[-1])
        if body is None or self.mode == "gone":
            self.send_error(404)
            return
        if self.mode == "silent":
            time.sleep(3)
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        with contextlib.suppress(OSError):  # the reachability check closes after the headers
            self.wfile.write(body[: len(body) // 2] if self.mode == "breaks" else body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[type[Handler], str]]:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("no_proxy", "")
    handler = type("OneServer", (Handler,), {"files": {}, "asked": []})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as listening:
        thread = threading.Thread(target=listening.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield handler, f"http://127.0.0.1:{listening.server_port}"
        listening.shutdown()
        thread.join()


@pytest.fixture
def food_online(
    tmp_path: Path, server: tuple[type[Handler], str], change_archives: Callable[..., None]
) -> tuple[type[Handler], Path]:
    """Serve a small Food-101 on a local server, and return the handler and the destination folder."""
    handler, address = server
    write_food(tmp_path / "made")
    pack(tmp_path / "made/food-101.tar.gz", tmp_path / "made/food-101")
    body = (tmp_path / "made/food-101.tar.gz").read_bytes()
    handler.files["food-101.tar.gz"] = body
    change_archives("food101", url=f"{address}/food-101.tar.gz", size=len(body), md5=hashlib.md5(body).hexdigest())
    return handler, tmp_path / "data"


def test_what_can_be_fetched_is_fetched_once(food_online: tuple[type[Handler], Path], data_config: Config) -> None:
    handler, root = food_online
    config = data_config("food101", root=str(root), download=True)
    assert missing_data(config) is None
    assert not root.exists()  # the check downloads nothing
    assert open_data(config, SPEC, 0).splits == {"train": 6, "val": 2, "test": 4}
    asked = len(handler.asked)
    assert open_data(config, SPEC, 0).splits == {"train": 6, "val": 2, "test": 4}
    assert len(handler.asked) == asked
    assert sorted(p.name for p in root.iterdir()) == ["food-101", "food-101.tar.gz"]


def test_download_false_fetches_nothing(food_online: tuple[type[Handler], Path], data_config: Config) -> None:
    handler, root = food_online
    message = str(missing_data(data_config("food101", root=str(root), download=False)))
    assert "data.download=false" in message
    assert handler.asked == []


def test_a_partial_archive_is_recognized_and_replaced(
    food_online: tuple[type[Handler], Path], data_config: Config
) -> None:
    handler, root = food_online
    root.mkdir()
    (root / "food-101.tar.gz").write_bytes(handler.files["food-101.tar.gz"][:500])
    message = str(missing_data(data_config("food101", root=str(root), download=False)))
    assert "the existing file (500 B) is incomplete or damaged" in message
    assert len(open_data(data_config("food101", root=str(root), download=True), SPEC, 0).class_names) == 2


def test_an_archive_of_the_right_length_with_other_content_is_refused(
    food_online: tuple[type[Handler], Path], data_config: Config
) -> None:
    handler, root = food_online
    root.mkdir()
    body = bytearray(handler.files["food-101.tar.gz"])
    body[len(body) // 2] ^= 1
    (root / "food-101.tar.gz").write_bytes(body)
    with pytest.raises(UserError, match="the MD5 checksum is not"):
        open_data(data_config("food101", root=str(root), download=True), SPEC, 0)


def test_downloads_that_fail_leave_nothing_behind(
    food_online: tuple[type[Handler], Path], data_config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    handler, root = food_online
    config = data_config("food101", root=str(root), download=True)
    handler.mode = "breaks"
    with pytest.raises(UserError, match="stopped after"):
        open_data(config, SPEC, 0)
    handler.mode = "whole"
    good = handler.files["food-101.tar.gz"]
    handler.files["food-101.tar.gz"] = b"x" * len(good)
    with pytest.raises(UserError, match="deleted, because the MD5 checksum is not"):
        open_data(config, SPEC, 0)
    handler.files["food-101.tar.gz"] = good + b"more"
    assert f"{len(good) + 4} bytes, but {len(good)} bytes are expected" in str(missing_data(config))
    handler.files["food-101.tar.gz"] = good
    usage = type("Usage", (), {"free": 10})
    monkeypatch.setattr(fetch.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(UserError, match="10 B of free space"):
        open_data(config, SPEC, 0)
    assert list(root.iterdir()) == []


def test_a_host_that_refuses_or_is_silent_is_reported_in_time(
    food_online: tuple[type[Handler], Path], data_config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    handler, root = food_online
    config = data_config("food101", root=str(root), download=True)
    handler.mode = "gone"
    assert "HTTP 404" in str(missing_data(config))
    handler.mode = "silent"
    monkeypatch.setattr(network, "PROBE_SECONDS", 0.3)
    assert "cannot be downloaded" in str(missing_data(config))
    monkeypatch.setattr(network, "_ask", lambda *_: time.sleep(2))  # simulates a host name that never resolves
    assert "did not answer within" in str(missing_data(config))


def test_the_proxy_of_the_environment_is_used_and_its_password_not_shown(
    server: tuple[type[Handler], str], data_config: Config, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    handler, address = server
    handler.files["food-101.tar.gz"] = b"x"
    proxy = address.replace("http://", "http://user:secret@")
    monkeypatch.setenv("http_proxy", proxy)
    config = data_config("food101", root=str(tmp_path), download=True)
    message = str(missing_data(config))
    assert handler.asked == ["http://data.vision.ee.ethz.ch/cvl/food-101.tar.gz"]
    assert "through the proxy 127.0.0.1" in message
    assert "announces 1 bytes" in message
    assert "secret" not in message


def test_a_place_that_cannot_be_written(food_online: tuple[type[Handler], Path], data_config: Config) -> None:
    _, root = food_online
    root.write_text("a file where the folder should be")
    with pytest.raises(UserError, match=r"food-101\.tar\.gz"):
        open_data(data_config("food101", root=str(root), download=True), SPEC, 0)


def test_truncated_and_mistaken_archives_put_there_by_hand(tmp_path: Path, data_config: Config) -> None:
    folder = write_cub(tmp_path / "elsewhere")
    archive = tmp_path / "data/CUB_200_2011.tgz"
    config = data_config("cub200", root=str(tmp_path / "data"))
    pack(archive, folder)
    archive.write_bytes(archive.read_bytes()[:-2000])
    with pytest.raises(UserError, match=r"CUB_200_2011\.tgz cannot be unpacked"):
        open_data(config, SPEC, 0)
    assert not (tmp_path / "data/CUB_200_2011").exists()  # no partial data set remains
    archive.write_bytes(b"not an archive")
    with pytest.raises(UserError, match="cannot be unpacked"):
        open_data(config, SPEC, 0)
    pack(archive, folder / "images.txt")
    with pytest.raises(UserError, match=r"contains images\.txt instead of the folder CUB_200_2011/"):
        open_data(config, SPEC, 0)
    archive.write_bytes(b"")
    assert "incomplete or damaged" in str(missing_data(config))


def test_archive_states(tmp_path: Path) -> None:
    archive = Archive("a.tgz", "a", size=4, contents=("list.txt",))
    assert archive.state(tmp_path) == "absent"
    (tmp_path / "a.tgz").write_bytes(b"abc")
    assert archive.state(tmp_path) == "partial"
    (tmp_path / "a.tgz").write_bytes(b"abcd")
    assert archive.state(tmp_path) == "packed"
    (tmp_path / "a").mkdir()
    assert archive.state(tmp_path) == "packed"  # an empty folder is ignored
    (tmp_path / "a/x").write_text("")
    assert archive.state(tmp_path) == "broken"
    (tmp_path / "a/list.txt").write_text("")
    assert archive.state(tmp_path) == "ready"


def test_archives_cannot_write_elsewhere(tmp_path: Path) -> None:
    archive = tmp_path / "data/CUB_200_2011.tgz"
    archive.parent.mkdir()
    with tarfile.open(archive, "w:gz") as tar:
        member = tarfile.TarInfo("../../outside.txt")
        member.size = 1
        tar.addfile(member, io.BytesIO(b"x"))
    with pytest.raises(UserError, match="cannot be unpacked"):
        fetch.fetch(PUBLISHED["cub200"].archives, tmp_path / "data")
    assert not (tmp_path / "outside.txt").exists()
