"""Access to URLs: whether one can be fetched, asked within seconds, and the reason in words where it cannot."""

from __future__ import annotations

import http.client
import threading
import urllib.error
import urllib.parse
import urllib.request
from typing import Any

#: Seconds until a URL counts as unreachable, name resolution included.
PROBE_SECONDS = 8.0

# Everything that opening or reading a URL raises.
_ERRORS = (OSError, http.client.HTTPException, ValueError)

_HEADERS = {"User-Agent": "efficient-ft"}


def open_url(url: str, timeout: float) -> Any:
    """Open `url` through the proxies that the environment names now.

    Args:
        url: http, https, ftp or file.
        timeout: seconds without a byte until the connection is given up.

    Returns:
        The response: a context manager with `headers` and `read`.

    Raises:
        OSError, http.client.HTTPException, ValueError: `url` cannot be opened.
    """
    # urllib's shared opener would keep the proxies of its first use.
    opener = urllib.request.build_opener()
    return opener.open(urllib.request.Request(url, headers=_HEADERS), timeout=timeout)


def unreachable(url: str, size: int | None = None, accept_404: bool = False) -> str | None:
    """Ask whether `url` can be fetched, without fetching it.

    Proxies come from the environment (`https_proxy`, `no_proxy`, ...), as in all of urllib.

    Args:
        url: the file.
        size: its expected length in bytes; a host that announces another length counts as unreachable.
        accept_404: a host that answers 404 counts as reachable: it may have the file under another name.

    Returns:
        None if the host answers within `PROBE_SECONDS`, else the reason: host, proxy, error.
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
    """Return the reason of an error from `open_url` in a few words."""
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
    """`` through the proxy HOST`` if the environment names one, without its password."""
    parts = urllib.parse.urlsplit(url)
    proxy = urllib.request.getproxies().get(parts.scheme)
    if not proxy or urllib.request.proxy_bypass(parts.hostname or ""):
        return ""
    return f" through the proxy {urllib.parse.urlsplit(proxy).hostname or 'of the environment'}"
