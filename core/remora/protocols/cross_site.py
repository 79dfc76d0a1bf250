"""Checks against requests that web pages of other sites send, DNS rebinding included.

A browser lets any page send requests to any address, this machine's included, and keeps only the answers from the page.
A request that the browser sends without a preflight (Fetch, "CORS-simple") therefore reaches the server with all its
effects. A page whose name resolves to this machine (DNS rebinding) is of the same origin and also reads the answers;
only the Host header still carries its name. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container

from remora.system.url_secrets import shown_place

_SAFE_METHODS = ("GET", "HEAD", "OPTIONS")
_OWN_SITES = (b"same-origin", b"none")
_SIMPLE_TYPES = (b"text/plain", b"multipart/form-data", b"application/x-www-form-urlencoded")
_LOOPBACK = re.compile(r"127(?:\.\d{1,3}){3}|::1|localhost|.+\.localhost")
_NAME = re.compile(r"[a-z0-9_.:-]+")
_ORIGIN = r"https?://[a-z0-9_.-]+(?::[0-9]{1,5})?|https?://\[[0-9a-f:]+\](?::[0-9]{1,5})?"
_FIELD_NAME = rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+"
_EXPOSED = b"Inference-Header-Content-Length, Retry-After, X-Request-Id"
_UNDOTTED = re.compile(r"[a-z0-9_-]+")

Header = Callable[[bytes], bytes | None]
"""Returns the value of a request header by its lower-case name, or None."""


def host_names(names: tuple[str, ...]) -> frozenset[str]:
    """Return the names of ``--allowed-host`` in the form in which Host headers are compared.

    Raises ValueError for text that is not the name of a host.
    """
    for name in names:
        if not _NAME.fullmatch(name_of(name.encode())):
            raise ValueError(f"--allowed-host={name}: expected the name of a host such as models.example")
    return frozenset(name_of(name.encode()) for name in names)


def name_of(authority: bytes) -> str:
    """Return the host of a Host header in lower case, without the port, brackets and final dot."""
    text = authority.decode("latin-1").strip().lower()
    if text.startswith("["):
        return text[1:].partition("]")[0]
    name, _, port = text.rpartition(":")
    return (name if name and ":" not in name and (port.isdigit() or not port) else text).rstrip(".")


def is_loopback(name: str) -> bool:
    """Return True if a host is this machine by its name or address alone."""
    return _LOOPBACK.fullmatch(name) is not None


def is_own_host(host: bytes, allowed: Container[str]) -> bool:
    """Return True if a server on a loopback address answers every request with this Host header.

    A browser sends the name that the page was opened under, so an empty name comes from a program.
    """
    name = name_of(host)
    return not name or is_loopback(name) or name in allowed


def refuse_host(header: Header, allowed: Container[str]) -> str:
    """Return why a loopback server refuses the host that a request names, or ""."""
    host = header(b"host") or b""
    name = name_of(host)
    if is_own_host(host, allowed):
        return ""
    # Proxies use names without a dot for their upstreams. Those are not in the public DNS; only an attacker in the
    # local network could rebind one, and no page can send more than a GET without an Origin.
    if _UNDOTTED.fullmatch(name) and header(b"origin") is None and header(b"sec-fetch-site") is None:
        return ""
    if not _NAME.fullmatch(name):  # not repeated, because it may be markup
        return "This server listens on a loopback address, and the Host header is not the name of a host"
    return (
        f"This server listens on a loopback address and does not know the host '{name}'. "
        f"--allowed-host={name} lets requests for that name in"
    )


def refuse_page(method: str, header: Header, allowed: Container[str]) -> str:
    """Return why a request that changes the server is refused as a web page's, or "".

    Args:
        method: method of the request; safe methods are never refused.
        header: returns a header of the request.
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


class SharedOrigins:
    """Origins of ``--cors-origin``, whose pages may read the answers.

    ``*`` stands for every origin. Answers never permit credentials: a page sends its key in a header, so that no cookie
    or password that a browser stores can be abused. Raises ValueError for text that is not an origin.
    """

    def __init__(self, origins: tuple[str, ...]) -> None:
        for origin in origins:
            if origin != "*" and not re.fullmatch(_ORIGIN, origin.lower()):
                raise ValueError(
                    f"--cors-origin={shown_place(origin)}: expected an origin such as https://app.example, or *"
                )
        self._all = "*" in origins
        self._named = frozenset(_serialized(origin).encode() for origin in origins)
        self.vary: tuple[tuple[bytes, bytes], ...] = () if self._all else ((b"Vary", b"Origin"),)
        """Headers of cacheable answers to other origins, so that no cache gives them to a page of a named one."""

    def headers(self, header: Header) -> tuple[tuple[bytes, bytes], ...]:
        """Return the CORS headers of the answer to a request, none for a page of another origin."""
        origin = header(b"origin")
        if origin is None or not (self._all or origin.lower() in self._named):
            return ()
        shared = ((b"Access-Control-Expose-Headers", _EXPOSED),)
        if self._all:
            return ((b"Access-Control-Allow-Origin", b"*"), *shared)
        return ((b"Access-Control-Allow-Origin", origin), *self.vary, *shared)

    def preflight(self, method: str, header: Header) -> tuple[tuple[bytes, bytes], ...]:
        """Return the further headers of the answer to a preflight, none for another request."""
        if method != "OPTIONS" or header(b"access-control-request-method") is None:
            return ()
        wanted = (header(b"access-control-request-headers") or b"").split(b",")
        names = b", ".join(name.strip() for name in wanted if re.fullmatch(_FIELD_NAME, name.strip()))
        return (
            (b"Access-Control-Allow-Methods", b"GET, POST, DELETE"),
            *(((b"Access-Control-Allow-Headers", names),) if names else ()),
            (b"Access-Control-Max-Age", b"600"),
        )


def _serialized(origin: str) -> str:
    """Return an origin as browsers send it, without the default port of its scheme."""
    text = origin.lower()
    return text.removesuffix(":443" if text.startswith("https:") else ":80")
