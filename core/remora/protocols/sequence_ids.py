"""Check of the texts that name a sequence, for every protocol that takes them [S01]."""

from __future__ import annotations

from remora.errors import UnsupportedError

MAX_BYTES = 128


def checked_id(text: str) -> str:
    """Return the text if it has at most 128 bytes.

    Raises UnsupportedError, Triton's kind, for a longer one.
    """
    if len(text.encode("utf-8", "surrogateescape")) > MAX_BYTES:  # JSON may contain bytes that are not UTF-8
        raise UnsupportedError(f"string correlation ID cannot be longer than {MAX_BYTES} characters")
    return text
