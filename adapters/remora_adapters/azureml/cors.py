"""Which pages may read Azure's answers: the headers that tell a browser so, as Azure's server gives them. Pure.

Endpoints of Azure let no such request through; it is for deployments that are reached by another way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # a host is made before the server's modules are imported
    from remora.protocols.http1 import Head
    from remora.protocols.rest.answer import Headers

_ORIGIN = b"Access-Control-Allow-Origin"
_METHODS = b"GET, POST"
_PATTERN = frozenset("*\\[](){}?$^|+")


class Origins:
    """The origins of ``AML_CORS_ORIGINS``: none, some, or all (``*``).

    Raises ValueError for what no origin can be. Azure's server takes some of that for regular expressions, which match
    more than their authors mean.
    """

    def __init__(self, text: str) -> None:
        named = {origin.strip() for origin in text.split(",")} - {""}
        self._all = "*" in named
        named.discard("*")
        if not (text.isascii() and text.isprintable()) or any(_PATTERN & set(origin) for origin in named):
            raise ValueError(f"AML_CORS_ORIGINS={text[:80]}: expected origins such as https://example.com, or *")
        self._folded = {origin.lower().encode() for origin in named}
        self._first = min(named, default="").encode()  # what a request without an origin is told

    def headers(self, head: Head) -> Headers:
        """What an answer says to the page that a request came from."""
        origin = head.get(b"origin")
        if not origin:
            origin = b"*" if self._all else self._first
        elif not self._all and origin.lower() not in self._folded:
            origin = b""
        if not origin:
            return ()
        told: list[tuple[bytes, bytes]] = [(_ORIGIN, origin)]
        if head.method == "OPTIONS":
            told += _preflight(head)
        if origin != b"*" and (self._all or len(self._folded) > 1):
            told.append((b"Vary", b"Origin"))
        return tuple(told)


def _preflight(head: Head) -> Headers:
    """What a page may ask with, said before it does."""
    if (head.get(b"access-control-request-method") or b"").upper() not in (b"GET", b"POST"):
        return ()
    wanted = (head.get(b"access-control-request-headers") or b"").split(b",")
    names = b", ".join(sorted(name.strip() for name in wanted))
    return ((b"Access-Control-Allow-Methods", _METHODS), *([(b"Access-Control-Allow-Headers", names)] if names else []))
