"""Names of headers and metadata that are never forwarded as parameters."""

from __future__ import annotations

from remora.errors import InvalidArgumentError

_NAMES = frozenset(
    ("sequence_id", "sequence_start", "sequence_end", "priority", "timeout", "headers", "binary_data_output")
)
"""Refused in exactly this spelling, as by Triton's newer releases."""


def refuse_reserved(name: str) -> None:
    """Raise InvalidArgumentError for a header whose name is reserved."""
    if name in _NAMES or name.lower().startswith("triton_"):
        raise InvalidArgumentError(f"Header '{name}' is reserved for Triton usage and cannot be forwarded.")
