"""What V2 over gRPC says around its messages: status numbers, error texts, metadata; the law: pure."""

from __future__ import annotations

import re
from collections.abc import Iterable

from remora.errors import ConfigError, RemoraError

MAX_STATUS_BYTES = 4_096
"""How long an error's text may be: clients drop a whole answer whose trailers exceed 8 KiB."""

DECOUPLED_TEXT = "ModelInfer RPC doesn't support models with decoupled transaction policy"
SHUTDOWN_TEXT = "GRPC server is shutting down and has stopped accepting new requests."

_STATUS = {
    "CANCELLED": 1,
    "UNKNOWN": 2,
    "INVALID_ARG": 3,
    "NOT_FOUND": 5,
    "ALREADY_EXISTS": 6,
    "UNSUPPORTED": 12,
    "INTERNAL": 13,
    "UNAVAILABLE": 14,
}


def utf8(text: str) -> str:
    """A text as protobuf and trailers take it: what came out of bytes that are no UTF-8 becomes "?"."""
    return text.encode("utf-8", "replace").decode()


def status_of(error: RemoraError) -> int:
    """The number of the gRPC status an error is answered with [R03]."""
    return _STATUS.get(error.code, 2)


def status_text(error: RemoraError) -> str:
    """An error's text as it fits into the trailers: at most MAX_STATUS_BYTES once it is percent-encoded."""
    text, size = utf8(error.message), 0
    if 12 * len(text) <= MAX_STATUS_BYTES:  # No character takes more.
        return text
    for at, character in enumerate(text):
        size += 1 if " " <= character <= "~" and character != "%" else 3 * len(character.encode())
        if size > MAX_STATUS_BYTES - 3:
            return text[:at] + "..."
    return text


def forward_pattern(pattern: str) -> re.Pattern[str] | None:
    """The compiled ``--grpc-header-forward-pattern``; None for an empty one. ``(?-i)`` in front minds the case.

    Raises ConfigError when it is no regular expression.
    """
    if not pattern:
        return None
    minds_case = pattern.startswith("(?-i)")
    try:
        return re.compile(pattern.removeprefix("(?-i)"), 0 if minds_case else re.IGNORECASE)
    except re.error as error:
        raise ConfigError(
            f"--grpc-header-forward-pattern: '{pattern}' is not a regular expression ({error}); "
            "an example that is one: 'my-.*'"
        ) from error


def forwarded(pattern: re.Pattern[str] | None, metadata: Iterable[tuple[str, str | bytes]]) -> dict[str, str]:
    """The metadata that become parameters [R16]: the pattern may match any part of a key, as Triton's does.

    Binary values (of keys that end in ``-bin``) go as the text that their bytes are. gRPC's own keys and keys reserved
    for Triton stay behind.
    """
    if pattern is None:
        return {}
    return {
        key: value if isinstance(value, str) else value.decode("utf-8", "surrogateescape")
        for key, value in metadata
        if not key.startswith((":", "grpc-", "triton_")) and pattern.search(key)
    }
