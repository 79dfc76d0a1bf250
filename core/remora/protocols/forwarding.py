"""Addresses and schemes of clients behind proxies, from X-Forwarded-For, X-Forwarded-Proto and Forwarded. Pure.

Invariant: a header counts only if the connection, or the next hop that it passed, belongs to a trusted proxy.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Sequence

from remora.protocols.rest.answer import Headers

_Network = ipaddress.IPv4Network | ipaddress.IPv6Network
_Address = ipaddress.IPv4Address | ipaddress.IPv6Address
_ELEMENT = re.compile(r'(?:[^",]|"(?:[^"\\]|\\.?)*+(?:"|\Z))++')
"""Element of ``Forwarded``: no comma between quotes ends it, and a quote that is not closed extends to the end."""
_PAIR = re.compile(r"""\s*([!#$%&'*+.^_`|~0-9A-Za-z-]+)\s*=\s*(?:"((?:[^"\\]|\\.)*)"|([^\s";,]*))\s*(?:;\s*|\Z)""")
_QUOTED_PAIR = re.compile(r"\\(.)")
_PORT = re.compile(r"(?:\[(.*)\]|([^:]*))(?::\d+)?")
_MOST_HOPS = 32
_MOST_KNOWN = 4096
_SCHEMES = ("http", "https")


class TrustedProxies:
    """Networks of proxies whose headers are believed.

    ``words`` are addresses and networks, several in a word with commas between them. Raises ValueError.
    """

    def __init__(self, words: Sequence[str]) -> None:
        self._networks: list[_Network] = []
        for text in (each.strip() for word in words for each in word.split(",")):
            try:
                self._networks.append(ipaddress.ip_network(text))
            except ValueError as error:
                raise ValueError(f"--trusted-proxy={text}: expected an address or a network: {error}") from None
        self._known: dict[str, bool] = {}

    def trusts(self, peer: str) -> bool:
        """Return True if an address belongs to a trusted proxy."""
        known = self._known.get(peer)
        if known is None:
            address = _address(peer)
            known = address is not None and any(address in network for network in self._networks)
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            self._known[peer] = known
        return known

    def client_of(self, peer: str, headers: Headers) -> str:
        """Return the address of the client of a request that ``peer`` sent.

        It is the last address that is not a trusted proxy, because clients can write whatever precedes it.
        """
        if not self.trusts(peer):
            return peer
        found = peer
        for hop in reversed(_hops(headers)[-_MOST_HOPS:]):
            address = _address(hop)
            if address is None:
                break
            found = str(address)
            if not self.trusts(found):
                break
        return found

    def scheme_of(self, peer: str, headers: Headers) -> str:
        """Return the scheme that the client used towards the first proxy, "" if no trusted proxy names it."""
        if not self.trusts(peer):
            return ""
        named = [value.split(",")[0].strip() for value in _values(headers, b"x-forwarded-proto")]
        named += _members(headers, "proto")
        scheme = named[0].lower() if named else ""
        return scheme if scheme in _SCHEMES else ""


ClientOf = Callable[[str, Headers], str]
"""Returns the address of the client of a request from the address of its connection and its headers."""


def _values(headers: Headers, name: bytes) -> list[str]:
    return [value.decode("latin-1") for key, value in headers if len(key) == len(name) and key.lower() == name]


def _hops(headers: Headers) -> list[str]:
    """Return the addresses that proxies have added, the client's first."""
    listed = _values(headers, b"x-forwarded-for")
    if listed:
        return [hop.strip() for hop in ",".join(listed).split(",")]
    return _members(headers, "for")


def _members(headers: Headers, name: str) -> list[str]:
    """Return the values of a parameter of ``Forwarded`` (RFC 7239), "" for elements without it.

    A malformed element has no parameters. Each field is parsed alone, because a quote that a client leaves open must
    not hide the field of a proxy.
    """
    elements = (element for value in _values(headers, b"forwarded") for element in _ELEMENT.findall(value))
    return [_pairs(element).get(name, "") for element in elements if element.strip()]


def _pairs(element: str) -> dict[str, str]:
    """Return the parameters of an element by their lower-case names, none if it is malformed."""
    found: dict[str, str] = {}
    place = 0
    while place < len(element):
        match = _PAIR.match(element, place)
        if match is None:
            return {}
        quoted = match[2]
        found[match[1].lower()] = match[3] if quoted is None else _QUOTED_PAIR.sub(r"\1", quoted)
        place = match.end()
    return found


def _address(text: str) -> _Address | None:
    """Return an address, without its port and brackets.

    An IPv4 address for one that is mapped to IPv6.
    """
    match = _PORT.fullmatch(text)
    try:
        address = ipaddress.ip_address((match[1] or match[2]) if match is not None else text)
    except ValueError:
        return None
    mapped = getattr(address, "ipv4_mapped", None)
    return mapped if mapped is not None else address
