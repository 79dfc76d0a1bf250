"""Which texts may name a sequence [S01]; the law: every protocol that takes one asks here."""

from __future__ import annotations

from remora.errors import UnsupportedError

MAX_BYTES = 128


def checked_id(text: str) -> str:
    """The text itself. Raises UnsupportedError, as Triton calls it, for one of more than 128 bytes."""
    if len(text.encode("utf-8", "surrogateescape")) > MAX_BYTES:  # JSON may hold bytes that are no UTF-8
        raise UnsupportedError(f"string correlation ID cannot be longer than {MAX_BYTES} characters")
    return text
