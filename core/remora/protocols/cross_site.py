"""Requests that a web page of another site sends, and names that a page rebinds to this machine. Pure.

A browser lets any page send requests to any address, this machine's included, and keeps only the answers from it. A
request that the browser sends without a preflight (Fetch, "CORS-simple") therefore reaches the server with all its
effects. A page whose own name resolves to this machine (DNS rebinding) is of the same origin and also reads the
answers; only the Host header still carries its name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container

_SAFE_METHODS = ("GET", "HEAD", "OPTIONS")
_OWN_SITES = (b"same-origin", b"none")
_SIMPLE_TYPES = (b"text/plain", b"multipart/form-data", b"application/x-www-form-urlencoded")
_LOOPBACK = re.compile(r"127(?:\.\d{1,3}){3}|::1|localhost|.+\.localhost")
_NAME = re.compile(r"[a-z0-9_.:-]+")


def host_names(names: tuple[str, ...]) -> frozenset[str]:
    """The names of ``--allowed-host`` as Host headers are compared with them. Raises ValueError for other text."""
    for name in names:
        if not _NAME.fullmatch(name_of(name.encode())):
            raise ValueError(f"--allowed-host={name}: expected the name of a host such as models.example")
    return frozenset(name_of(name.encode()) for name in names)


def name_of(authority: bytes) -> str:
    """The host of a Host header in lower case, without the port, brackets and final dot."""
    text = authority.decode("latin-1").strip().lower()
    if text.startswith("["):
        return text[1:].partition("]")[0]
    name, _, port = text.rpartition(":")
    return (name if name and ":" not in name and (port.isdigit() or not port) else text).rstrip(".")


def is_loopback(name: str) -> bool:
    """True if a host is this machine by its name or address alone."""
    return _LOOPBACK.fullmatch(name) is not None


def refuse_host(host: bytes, allowed: Container[str]) -> str:
    """Return why a server on a loopback address refuses this Host header; "" if it does not.

    A browser sends the name that the page was opened under. A request without a name comes from no browser.
    """
    name = name_of(host)
    if not name or is_loopback(name) or name in allowed:
        return ""
    return (
        f"This server listens on a loopback address and does not know the host '{name}'. "
        f"--allowed-host={name} lets requests for that name in"
    )


def refuse_page(method: str, header: Callable[[bytes], bytes | None], allowed: Container[str]) -> str:
    """Return why a request that changes the server is refused as a web page's; "" if it is not.

    Args:
        method: of the request; those that cannot change anything are never refused.
        header: returns the value of a header by its lower-case name, or None.
        allowed: hosts whose pages may change the server.
    """
    origin = header(b"origin")
    site = header(b"sec-fetch-site")
    if method in _SAFE_METHODS or (origin is None and site is None):
        return ""
    page = (origin or b"").partition(b"://")[2]
    if page and name_of(page) in allowed:
        return ""
    # The page cannot set Sec-Fetch-Site. It also holds behind a proxy that replaces the Host header.
    own = site in _OWN_SITES or (site is None and page != b"" and page.lower() == (header(b"host") or b"").lower())
    if not own:
        return (
            "A web page of another site sent this request, which would change the server. "
            "--allowed-host=NAME lets the pages of host NAME do that"
        )
    kind = (header(b"content-type") or b"").partition(b";")[0].strip().lower()
    if origin is not None and kind in _SIMPLE_TYPES:
        return f"A web page must send this request as application/json, not as {kind.decode()}"
    return ""
