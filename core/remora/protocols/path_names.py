"""Decoder of names in paths of routes that Triton does not have. Pure.

V2's paths are not percent-decoded, as in Triton [H02].

Invariant: a decoded name is one segment of a path, however often it was encoded, unless it is only looked up.
"""

from __future__ import annotations

import re
from urllib.parse import unquote_to_bytes

_MALFORMED = re.compile(r"%(?![0-9A-Fa-f]{2})")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


def decode_name(segment: str, *, may_have_slash: bool = False) -> str | None:
    """Return the name in a segment of a path, or None if no name is encoded so.

    It is decoded once. A name has no control character, and its bytes are UTF-8. ``may_have_slash`` is True for names
    that are only looked up, such as those of adapters; no path may be made of them.
    """
    if _MALFORMED.search(segment):
        return None
    try:
        name = unquote_to_bytes(segment).decode()
    except UnicodeDecodeError:
        return None
    return None if _CONTROL.search(name) or ("/" in name and not may_have_slash) else name
