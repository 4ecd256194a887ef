"""Functions that open a URL, or check within seconds whether a URL can be fetched."""

from __future__ import annotations

import http.client
import threading
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

#: Time limit in seconds, including name resolution. A URL that takes longer counts as unreachable.
PROBE_SECONDS = 8.0

# Exceptions raised when opening or reading a URL.
_ERRORS = (OSError, http.client.HTTPException, ValueError)

#: Beginning of the reason if a host answered with an HTTP status. Other files of this host may be available.
_STATUS = "HTTP "
#: Reasons why hosts are unreachable, keyed by host, inside `each_host_once`, or None outside of it.
_unreachable_hosts: ContextVar[dict[str, str] | None] = ContextVar("_unreachable_hosts", default=None)
#: True inside `local_files_only`.
_local_only: ContextVar[bool] = ContextVar("_local_only", default=False)


@contextmanager
def local_files_only() -> Iterator[None]:
    """Let `unreachable` reject every URL without a request, so that only local files count as available."""
    token = _local_only.set(True)
    try:
        yield
    finally:
        _local_only.reset(token)


@contextmanager
def each_host_once() -> Iterator[None]:
    """Let `unreachable` wait for each unreachable host only once, so that many URLs are checked within seconds."""
    token = _unreachable_hosts.set({})
    try:
        yield
    finally:
        _unreachable_hosts.reset(token)


def open_url(url: str, timeout: float) -> Any:
    """Open `url` (http, https, ftp or file) through the proxies of the current environment.

    The returned response is a context manager with `headers` and `read`. The connection is closed after `timeout`
    seconds without data.

    Raises:
        OSError, http.client.HTTPException, ValueError: If `url` cannot be opened.
    """
    # A new opener is created, because the shared opener of urllib caches the proxies when it is first used.
    opener = urllib.request.build_opener()
    return opener.open(urllib.request.Request(url, headers={"User-Agent": "efficient-ft"}), timeout=timeout)


def unreachable(url: str, size: int | None = None, accept_404: bool = False) -> str | None:
    """Check whether `url` can be fetched, without downloading it.

    As in urllib, proxies are read from the environment (`https_proxy`, `no_proxy`, ...).

    Args:
        url: URL of the file.
        size: expected length in bytes. A host that announces a different length counts as unreachable.
        accept_404: if True, a host that answers 404 counts as reachable, because the file name may differ on this host.

    Returns:
        None if the URL can be fetched. Otherwise, a message that states the host, the proxy and the reason. For
        example, the host did not answer within `PROBE_SECONDS`.
    """
    host = urllib.parse.urlsplit(url).netloc
    known = _unreachable_hosts.get()
    if _local_only.get():
        return f"{host}: only local files are checked"
    if known is not None and host in known:
        return known[host]
    answer: list[str | None] = []
    # The request runs in a thread, because name resolution ignores socket timeouts.
    thread = threading.Thread(target=lambda: answer.append(_ask(url, size, accept_404)), daemon=True)
    thread.start()
    thread.join(PROBE_SECONDS)
    if answer and answer[0] is None:
        return None
    late = f" did not answer within {PROBE_SECONDS:g} seconds"
    reason = f"{host}{_through(url)}{f': {answer[0]}' if answer else late}"
    if known is not None and not (answer and str(answer[0]).startswith(_STATUS)):
        known[host] = reason
    return reason


def reason_of(error: Exception) -> str:
    """Return a short description of an error from `open_url`."""
    if isinstance(error, urllib.error.HTTPError):
        return f"{_STATUS}{error.code} {error.reason}"
    if isinstance(error, urllib.error.URLError):
        return str(error.reason)
    return str(error) or type(error).__name__


def _ask(url: str, size: int | None, accept_404: bool) -> str | None:
    try:
        # The connection is closed after the headers. HEAD requests are not used, because some hosts refuse them.
        with open_url(url, PROBE_SECONDS) as response:
            length = response.headers.get("Content-Length")
    except _ERRORS as error:
        if accept_404 and isinstance(error, urllib.error.HTTPError) and error.code == 404:
            return None
        return reason_of(error)
    if size is not None and length is not None and length.isdigit() and int(length) != size:
        return f"the host announces {length} bytes, but {size} bytes are expected"
    return None


def _through(url: str) -> str:
    """Return `` through the proxy HOST`` without the password, or an empty string if no proxy is used."""
    parts = urllib.parse.urlsplit(url)
    proxy = urllib.request.getproxies().get(parts.scheme)
    if not proxy or urllib.request.proxy_bypass(parts.hostname or ""):
        return ""
    return f" through the proxy {urllib.parse.urlsplit(proxy).hostname or 'of the environment'}"
