"""Status numbers, error texts and forwarded metadata of V2 over gRPC."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from remora.errors import ConfigError, RemoraError
from remora.protocols.header_patterns import open_header_pattern
from remora.protocols.reserved_names import refuse_reserved

STRICT_KEY = "triton_grpc_error"

Forward = Callable[[Iterable[tuple[str, str | bytes]]], dict[str, str]]
"""Returns the metadata that become parameters."""

MAX_STATUS_BYTES = 4_096
"""Longest error text, because clients drop an answer whose trailers exceed 8 KiB."""

DECOUPLED_TEXT = "ModelInfer RPC doesn't support models with decoupled transaction policy"
SHUTDOWN_TEXT = "GRPC server is shutting down and has stopped accepting new requests."

_STATUS = {
    "CANCELLED": 1,
    "UNKNOWN": 2,
    "INVALID_ARG": 3,
    "NOT_FOUND": 5,
    "ALREADY_EXISTS": 6,
    "PERMISSION_DENIED": 7,
    "UNSUPPORTED": 12,
    "INTERNAL": 13,
    "UNAVAILABLE": 14,
}


def utf8(text: str) -> str:
    """Return a text that protobuf and trailers accept.

    Surrogates, which come from bytes that are not UTF-8, become "?".
    """
    return text.encode("utf-8", "replace").decode()


def status_of(error: RemoraError) -> int:
    """Return the number of the gRPC status for an error [R03]."""
    return _STATUS.get(error.code, 2)


def status_text(error: RemoraError) -> str:
    """Return an error's text, cut to MAX_STATUS_BYTES once percent-encoded."""
    text, size = utf8(error.message), 0
    if 12 * len(text) <= MAX_STATUS_BYTES:  # a character takes at most 12 bytes
        return text
    for at, character in enumerate(text):
        size += 1 if " " <= character <= "~" and character != "%" else 3 * len(character.encode())
        if size > MAX_STATUS_BYTES - 3:
            return text[:at] + "..."
    return text


def open_forward(pattern: str, withholds: Callable[[str, str], bool] | None = None) -> Forward | None:
    """Return the selection of metadata that become parameters [R16].

    The pattern is that of ``--grpc-header-forward-pattern``: it may match any part of a key, as in Triton, and a
    leading ``(?-i)`` makes it case-sensitive. Binary values (of keys that end in ``-bin``) are decoded as text. gRPC's
    own keys, those with which Triton's clients control a stream and entries for which ``withholds`` is true by key and
    value are skipped; the function raises InvalidArgumentError for other keys that are reserved for Triton.

    Returns None for an empty pattern. Raises ConfigError for an invalid regular expression.
    """
    if not pattern:
        return None
    case_sensitive = pattern.startswith("(?-i)")
    try:
        search = open_header_pattern(pattern.removeprefix("(?-i)"), case_sensitive=case_sensitive).search
    except ValueError as error:
        raise ConfigError(
            f"--grpc-header-forward-pattern: '{pattern[:200]}' is not a regular expression ({error}); "
            "an example that is one: 'my-.*'"
        ) from error

    def forward(metadata: Iterable[tuple[str, str | bytes]]) -> dict[str, str]:
        parameters = {}
        for key, value in metadata:
            if not key.startswith((":", "grpc-", STRICT_KEY)) and search(key):
                refuse_reserved(key)
                text = value if isinstance(value, str) else value.decode("utf-8", "surrogateescape")
                if withholds is None or not withholds(key, text):
                    parameters[key] = text
        return parameters

    return forward
