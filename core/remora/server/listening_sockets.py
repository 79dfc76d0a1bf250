"""Listening sockets of all ports, so that an address means the same on each.

The module imports little, because the early port needs it before all others.
"""

from __future__ import annotations

import errno
import socket

BACKLOG = 1024
"""Connections that the kernel queues until they are accepted."""
_NO_IPV6 = (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL)
_MAPPED = bytes(10) + b"\xff\xff"
"""Beginning of an IPv4 address in IPv6's form (RFC 4291 2.5.5.2)."""


def is_numeric(address: str) -> bool:
    """Return True if `listen` can open a socket for an address without a resolver."""
    return not address or _packed(address) is not None


def listen(address: str, port: int, *, reuse_port: bool) -> socket.socket:
    """Return a listening socket for a numeric address.

    ``::`` and no address are all interfaces with IPv4 and IPv6, or with IPv4 alone where the system has no IPv6;
    ``0.0.0.0`` is all interfaces with IPv4. Raises OSError, also for an address that is not numeric.
    """
    packed = _packed(address or "::")
    if packed is None:
        raise OSError(errno.EINVAL, f"'{address}' is not a numeric address")
    if len(packed) == 4:
        return _open(address, port, socket.AF_INET, reuse_port=reuse_port)
    everywhere = not any(packed)
    try:
        both = everywhere or packed.startswith(_MAPPED)
        return _open(address or "::", port, socket.AF_INET6, reuse_port=reuse_port, both=both)
    except OSError as error:
        if everywhere and error.errno in _NO_IPV6:
            return _open("0.0.0.0", port, socket.AF_INET, reuse_port=reuse_port)
        raise


def _packed(address: str) -> bytes | None:
    """Return the bytes of a numeric address, None for other text."""
    try:
        return socket.inet_pton(socket.AF_INET6 if ":" in address else socket.AF_INET, address)
    except OSError:
        return None


def _open(
    address: str, port: int, family: socket.AddressFamily, *, reuse_port: bool, both: bool = False
) -> socket.socket:
    both = both and socket.has_dualstack_ipv6()
    return socket.create_server(
        (address, port), family=family, backlog=BACKLOG, reuse_port=reuse_port, dualstack_ipv6=both
    )
