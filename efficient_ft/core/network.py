"""Check within seconds if a URL can be fetched, and report the reason if not."""

from __future__ import annotations

import http.client
import threading
import urllib.error
import urllib.parse
import urllib.request
from typing import Any

#: Seconds until a URL counts as unreachable, name resolution included.
PROBE_SECONDS = 8.0

# Exceptions raised when opening or reading a URL.
_ERRORS = (OSError, http.client.HTTPException, ValueError)

_HEADERS = {"User-Agent": "efficient-ft"}


def open_url(url: str, timeout: float) -> Any:
    """Open `url` through the proxies of the current environment.

    Args:
        url: http, https, ftp or file.
        timeout: seconds without data until the connection is closed.

    Returns:
        The response: a context manager with `headers` and `read`.

    Raises:
        OSError, http.client.HTTPException, ValueError: `url` cannot be opened.
    """
    # urllib's shared opener caches the proxies of its first use.
    opener = urllib.request.build_opener()
    return opener.open(urllib.request.Request(url, headers=_HEADERS), timeout=timeout)


def unreachable(url: str, size: int | None = None, accept_404: bool = False) -> str | None:
    """Check if `url` can be fetched, without fetching it.

    Proxies come from the environment (`https_proxy`, `no_proxy`, ...), as in urllib.

    Args:
        url: the file.
        size: expected length in bytes. A host that announces a different length counts as unreachable.
        accept_404: a host that answers 404 counts as reachable, because it may have the file under another name.

    Returns:
        None if the host answers within `PROBE_SECONDS`, otherwise the reason: host, proxy, error.
    """
    answer: list[str | None] = []

    def ask() -> None:
        answer.append(_ask(url, size, accept_404))

    # Name resolution ignores socket timeouts, so a thread asks.
    thread = threading.Thread(target=ask, daemon=True, name="reachability")
    thread.start()
    thread.join(PROBE_SECONDS)
    host = urllib.parse.urlsplit(url).netloc
    if not answer:
        return f"{host}{_through(url)} gave no answer within {PROBE_SECONDS:g} seconds"
    return None if answer[0] is None else f"{host}{_through(url)}: {answer[0]}"


def reason_of(error: Exception) -> str:
    """Return a short reason for an error of `open_url`."""
    if isinstance(error, urllib.error.HTTPError):
        return f"HTTP {error.code} {error.reason}"
    if isinstance(error, urllib.error.URLError):
        return str(error.reason)
    return str(error) or type(error).__name__


def _ask(url: str, size: int | None, accept_404: bool) -> str | None:
    try:
        # A GET that is closed after the headers: some hosts refuse HEAD.
        with open_url(url, PROBE_SECONDS) as response:
            length = response.headers.get("Content-Length")
    except _ERRORS as error:
        if accept_404 and isinstance(error, urllib.error.HTTPError) and error.code == 404:
            return None
        return reason_of(error)
    if size is not None and length is not None and length.isdigit() and int(length) != size:
        return f"it announces {length} bytes, expected {size}"
    return None


def _through(url: str) -> str:
    """Return `` through the proxy HOST``, without its password, if the environment names a proxy."""
    parts = urllib.parse.urlsplit(url)
    proxy = urllib.request.getproxies().get(parts.scheme)
    if not proxy or urllib.request.proxy_bypass(parts.hostname or ""):
        return ""
    return f" through the proxy {urllib.parse.urlsplit(proxy).hostname or 'of the environment'}"
