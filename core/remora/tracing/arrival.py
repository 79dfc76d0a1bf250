"""Arrival of a request at a front end, for its trace."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

Carrier = Callable[[bytes], bytes | None]
"""Returns the value of a header by its lower-case name."""


class Arrival(NamedTuple):
    """The protocol and headers of a request, and when its receipt began (0: now)."""

    protocol: str
    carrier: Carrier
    since_ns: int = 0
