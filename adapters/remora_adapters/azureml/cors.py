"""CORS headers of Azure's answers.

The functions are pure. Azure's endpoints block cross-origin requests, so this serves deployments behind another route.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from remora.system.url_secrets import shown_place

if TYPE_CHECKING:  # the host exists before the server's modules are imported
    from remora.protocols.http1 import Head
    from remora.protocols.rest.answer import Headers

_ORIGIN = b"Access-Control-Allow-Origin"
_METHODS = b"GET, POST"
_PATTERN = frozenset("*\\[](){}?$^|+")


class Origins:
    """Allowed origins of ``AML_CORS_ORIGINS``, which may be none, some, or all (``*``).

    Raises ValueError for an invalid origin. Azure's server treats some of these as regular expressions, which match
    more than their authors intend.
    """

    def __init__(self, text: str) -> None:
        named = {origin.strip() for origin in text.split(",")} - {""}
        self._all = "*" in named
        named.discard("*")
        if not (text.isascii() and text.isprintable()) or any(_PATTERN & set(origin) for origin in named):
            raise ValueError(
                f"AML_CORS_ORIGINS={shown_place(text)[:80]}: expected origins such as https://example.com, or *"
            )
        self._folded = {origin.lower().encode() for origin in named}
        self._first = min(named, default="").encode()  # answered to a request without an Origin header

    def headers(self, head: Head) -> Headers:
        """Return the CORS headers of the answer to a request."""
        origin = head.get(b"origin")
        if not origin:
            origin = b"*" if self._all else self._first
        elif not self._all and origin.lower() not in self._folded:
            origin = b""
        if not origin:
            return ()
        headers: list[tuple[bytes, bytes]] = [(_ORIGIN, origin)]
        if head.method == "OPTIONS":
            headers += _preflight(head)
        if origin != b"*" and (self._all or len(self._folded) > 1):
            headers.append((b"Vary", b"Origin"))
        return tuple(headers)


def _preflight(head: Head) -> Headers:
    """Return the headers of the answer to a preflight request."""
    if (head.get(b"access-control-request-method") or b"").upper() not in (b"GET", b"POST"):
        return ()
    wanted = (head.get(b"access-control-request-headers") or b"").split(b",")
    names = b", ".join(sorted(name.strip() for name in wanted))
    return ((b"Access-Control-Allow-Methods", _METHODS), *([(b"Access-Control-Allow-Headers", names)] if names else []))
